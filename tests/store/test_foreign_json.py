"""JSON and lock files of strangers."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import pytest

from ncm_cli import main
from ncm_cli.errors import InputError
from ncm_cli.store import files
from ncm_cli.store.digests import MAX_JSON_DEPTH, header_digest, parse_json
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.files import lock_path, read_json, writer_lock
from ncm_cli.store.hdf5 import root_attributes


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
@pytest.mark.parametrize("depth", [MAX_JSON_DEPTH + 1, 900, 30_000, 1_000_000])
def test_deep_json_is_refused(tmp_path: Path, opening: str, depth: int) -> None:
    closing = "".join({"[": "]", "{": "}"}[one] for one in reversed(opening) if one in "[{")
    text = opening * depth + "1" + closing * depth
    with pytest.raises(ValueError, match="nested"):
        parse_json(text)
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(InputError, match="not a JSON file that can be read"):
        read_json(tmp_path / "x.json")


def test_json_of_any_width_is_read() -> None:
    value = {"a": [[1, 2.5, "x", None, True]] * 1000, "b": {str(i): {} for i in range(1000)}}
    assert parse_json(json.dumps(value)) == value
    deep = "[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH
    assert json.dumps(parse_json(deep)) == deep


@pytest.mark.parametrize("text", ["[" * 30_000 + "]" * 30_000, "[]", "3", '"x"', "{", "[[1, 2, 3]]"])
def test_an_encoder_that_can_not_be_described_is_refused(
    write_store: Callable[..., Path], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_store()
    with h5py.File(path, "r+") as file:
        file.attrs["encoder"] = np.bytes_(text)
    sealed = header_digest(root_attributes(path))
    with h5py.File(path, "r+") as file:
        file.attrs["header_sha256"] = np.bytes_(sealed)
    with pytest.raises(InputError), FeatureStore(path) as store:
        assert store.encoder
    assert main.run(["info", str(path)]) == 3
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "device"])
def test_what_is_no_lock_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    output = tmp_path / "f.h5"
    lock = lock_path(output)
    if kind == "pipe":
        os.mkfifo(lock)
    elif kind == "folder":
        lock.mkdir()
    else:
        lock.symlink_to("/dev/zero" if kind == "device" else tmp_path / "nowhere")
    began = time.monotonic()
    with pytest.raises(InputError, match="isn't a lock file") as refused, writer_lock(output):
        pass
    assert str(lock) in str(refused.value)
    assert not files.holds_lock(output)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("content", [b"[" * 30_000, b'{"pid": -1}', b"\xff" * 100, b"[1]", b"x" * (1 << 20)])
def test_a_lock_that_says_anything_is_no_bug(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_LOCK_WAIT", 0.0)
    output = tmp_path / "f.h5"
    lock_path(output).write_bytes(content)
    with pytest.raises(files.BusyError), writer_lock(output):
        pass
    os.utime(lock_path(output), (0, 0))
    with writer_lock(output):
        assert files.holds_lock(output)
    assert not list(tmp_path.iterdir())


def test_a_lock_that_was_moved_away_is_removed_by_the_next_writer(tmp_path: Path) -> None:
    """A process killed between moving a dead one's lock and deleting it left it for ever."""
    output = tmp_path / "f.h5"
    dead, alive = files._temporary(lock_path(output)), files._temporary(lock_path(output))
    dead = dead.with_name(dead.name.replace(f"-{os.getpid()}-", "-999999999-"))
    earlier, others = tmp_path / ".f.h5.lock.0123abcd", tmp_path / ".g.h5.lock.0123abcd"
    for path in (dead, alive, earlier, others):
        path.write_text("")
    os.utime(earlier, (0, 0))
    os.utime(others, (0, 0))
    files.write_bytes(output, b"x")
    assert {path.name for path in tmp_path.iterdir()} == {alive.name, others.name, "f.h5"}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "too many files are open"),
        (ImportError("x.so: cannot open shared object file: Too many open files"), "too many files are open"),
        (ImportError("libtorch.so: failed to map segment from shared object"), "out of memory"),
        (OSError("libgomp.so: cannot allocate memory in static TLS block"), "out of memory"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
            "out of memory",
        ),
        (MemoryError(), "out of memory"),
        (RuntimeError("can't start new thread"), "allows no more processes or threads"),
    ],
)
def test_what_the_system_refuses_is_one_error(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        try:
            raise error
        except Exception as cause:
            if isinstance(error, ImportError):  # as numpy and scikit-learn do
                raise ImportError("IMPORTANT: PLEASE READ THIS") from cause
            raise

    monkeypatch.setattr(main, "build_app", fail)
    assert main.run(["fit"]) == 3
    assert said in capsys.readouterr().err


def test_an_error_of_ours_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise ImportError("cannot import name 'x'")

    monkeypatch.setattr(main, "build_app", fail)
    with pytest.raises(ImportError, match="cannot import name"):
        main.run(["fit"])


def test_too_little_memory_is_said_before_libraries_wait_for_more(write_store: Callable[..., Path]) -> None:
    path = write_store()
    words = [sys.executable, "-m", "ncm_cli", "info", str(path)]
    limit = partial(resource.setrlimit, resource.RLIMIT_AS, (300 << 20, 300 << 20))
    done = subprocess.run(
        words, capture_output=True, text=True, preexec_fn=limit, timeout=60, cwd=path.parent
    )
    assert done.returncode == 3
    assert "too little memory to start" in done.stderr and "300 MiB (ulimit -v)" in done.stderr
