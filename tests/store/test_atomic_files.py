"""A file is there whole or as it was before, whatever happens to its writer."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ncm_cli.errors import InputError
from ncm_cli.store import hdf5 as h5_sink
from ncm_cli.store.features import FeatureStore, write_features
from ncm_cli.store.files import (
    atomic_path,
    pid_namespace,
    read_json,
    sha256_file,
    start_time,
    write_json,
    writer_lock,
)
from ncm_cli.store.pairs import write_pairs
from ncm_cli.store.probe import write_probe

from .conftest import everything, make_probe, pair_store, store_arguments


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_replaces_at_the_end_only(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    with atomic_path(path) as temporary:
        temporary.write_text("new")
        assert temporary.parent == tmp_path
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert listing(tmp_path) == ["x"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError, MemoryError])
def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    with pytest.raises(error), atomic_path(path) as temporary:
        temporary.write_text("half")
        raise error
    assert path.read_text() == "old"
    assert listing(tmp_path) == ["x"]


def test_mode_links_and_folders(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "er" / "x"
    write_json(target, {"a": 1})
    target.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to(target)
    write_json(link, {"a": 2})
    assert link.is_symlink()
    assert read_json(target) == {"a": 2}
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert listing(target.parent) == ["x"]


def test_a_new_file_has_the_usual_mode(tmp_path: Path, probe_path: Path) -> None:
    (tmp_path / "plain").touch()
    assert probe_path.stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("name", ["x", "folder/x"])
def test_circles_of_links_are_refused(tmp_path: Path, name: str) -> None:
    for a, b in (("x", "y"), ("y", "x"), ("folder", "folder")):
        (tmp_path / a).symlink_to(tmp_path / b)
    with pytest.raises(InputError, match="leads back to itself"):
        write_json(tmp_path / name, {})
    with pytest.raises(InputError, match="leads back to itself"), writer_lock(tmp_path / name):
        pass
    assert listing(tmp_path) == ["folder", "x", "y"]


KILLED = """
import os, signal, sys
from ncm_cli.store.files import atomic_path
with atomic_path(sys.argv[1]) as temporary:
    temporary.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("name", ["x.h5", "é" * 127])
def test_the_next_writer_removes_what_killed_ones_left(tmp_path: Path, name: str) -> None:
    for _ in range(2):
        subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / name)], check=False)
        assert len(listing(tmp_path)) == 1
    write_json(tmp_path / "other.json", {})
    assert len(listing(tmp_path)) == 2
    write_json(tmp_path / name, {})
    assert listing(tmp_path) == sorted([name, "other.json"])


def test_a_writer_removes_nothing_that_may_be_at_work(tmp_path: Path) -> None:
    ours, mine, started = tmp_path / "x", os.getpid(), start_time(os.getpid())
    parent = os.getppid()
    names = {
        "a process of this place": f".x.{pid_namespace()}-{parent}-{start_time(parent)}-00000000.tmp",
        "another host's": f".x.00000000-{2**22 + 1}-7-00000000.tmp",
        "an earlier version's": f".x.{2**22 + 1}-00000000.tmp",
        "another output's": f".x.y.{pid_namespace()}-{2**22 + 1}-7-00000000.tmp",
        "no temporary file": f".x.{pid_namespace()}-{mine}-{started}-0.tmp",
    }
    with atomic_path(ours) as own:
        for name in names.values():
            (tmp_path / name).touch()
        write_json(ours, {})
        assert listing(tmp_path) == sorted([*names.values(), own.name, "x"])
        own.write_text("end")
    assert ours.read_text() == "end"
    for name in names.values():
        os.utime(tmp_path / name, (0, 0))
    write_json(ours, {})
    kept = [names[who] for who in ("a process of this place", "another output's", "no temporary file")]
    assert listing(tmp_path) == sorted([*kept, "x"])


@pytest.mark.parametrize("name", [".", "/dev/null"])
def test_folders_and_devices_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"folder|regular file"):
        write_json(tmp_path / name, {})
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_the_longest_names(tmp_path: Path) -> None:
    for name in ("é" * 127, "x" * 255):
        write_json(tmp_path / name, {})
        assert read_json(tmp_path / name) == {}
    assert len(listing(tmp_path)) == 2


def test_nan_is_not_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "x", {"a": float("nan")})
    assert listing(tmp_path) == []


def test_sha256_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    assert sha256_file(tmp_path / "abc").startswith("ba7816bf8f01cfea")


FULL_DISK = """
import resource, signal, sys
import numpy as np
from ncm_cli.errors import InputError
from ncm_cli.store.features import write_features

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
n = 3000
blocks = (np.full((100, 100), i, np.float32) for i in range(n // 100))
try:
    write_features(
        sys.argv[1], ids=[str(i) for i in range(n)], blocks=blocks, dim=100, columns=[], label_column=None,
        split_column=None, encoder={"kind": "x"}, options={},
    )
except InputError as error:
    sys.exit(error.what)
"""


@pytest.mark.parametrize("limit", [100, 60_000, 1_220_000])
def test_a_full_disk_is_an_error_and_keeps_the_old_store(
    write_store: Callable[..., Path], limit: int
) -> None:
    # 1.2 MB of features; the last limit is reached when they are written and the rest is not.
    path = write_store()
    before = everything(path)
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path), str(limit)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("the file is larger than this system allows")
    assert listing(path.parent) == ["features.h5"]
    assert everything(path) == before


@pytest.mark.parametrize("after", [0, 3, 10, 30])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_writes_that_fail_below_hdf5(
    write_store: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    after: int,
    number: int,
) -> None:
    path = write_store()
    before = everything(path)
    left = [after]

    def write(descriptor: int, data: bytes) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(number, os.strerror(number))
        return os.write(descriptor, data)

    monkeypatch.setattr(h5_sink, "os", SimpleNamespace(**{**vars(os), "write": write}))
    with pytest.raises(InputError, match=r"the disk (is full|quota)"):
        write_features(path, **store_arguments(seed=1))
    with pytest.raises(InputError, match=r"the disk (is full|quota)"):
        write_pairs(path, pair_store())
    monkeypatch.undo()
    assert everything(path) == before
    assert listing(path.parent) == ["features.h5"]


def test_interrupted_writers_leave_nothing(tmp_path: Path) -> None:
    def blocks() -> Iterator[np.ndarray]:
        yield np.ones((20, 8))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_features(tmp_path / "f.h5", **store_arguments(blocks=blocks()))
    assert listing(tmp_path) == []


def test_an_interrupt_within_hdf5_waits_for_it_to_end(
    write_store: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_store()
    before = everything(path)

    def write(descriptor: int, data: bytes) -> int:
        os.kill(os.getpid(), 2)
        return os.write(descriptor, data)

    monkeypatch.setattr(h5_sink, "os", SimpleNamespace(**{**vars(os), "write": write}))
    with pytest.raises(KeyboardInterrupt):
        write_features(path, **store_arguments(seed=1))
    monkeypatch.undo()
    assert everything(path) == before
    assert listing(path.parent) == ["features.h5"]


def test_readers_keep_the_old_store_while_it_is_replaced(write_store: Callable[..., Path]) -> None:
    """h5py/h5py#1864."""
    path = write_store()
    expected = everything(path)
    first, second = FeatureStore(path), FeatureStore(path)
    old = second.read()
    write_store(seed=1)
    np.testing.assert_array_equal(first.read(), old)
    first.verify()
    assert first.ids == second.ids
    second.close()
    assert everything(path) != expected
    # An open reader doesn't keep anyone from writing, and a written file is read beside it.
    write_store(seed=2)
    np.testing.assert_array_equal(first.read(), old)
    first.close()


def test_a_writer_that_fails_disturbs_no_reader(write_store: Callable[..., Path]) -> None:
    """h5py/h5py#1864."""
    path = write_store()
    with FeatureStore(path) as reader:
        with pytest.raises(InputError, match="finite"):
            write_store(features=np.full((40, 8), np.nan))
        reader.verify()
    everything(path)


def test_readers_need_no_locks(write_store: Callable[..., Path]) -> None:
    fcntl = pytest.importorskip("fcntl")
    path = write_store()
    with path.open("rb+") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with FeatureStore(path) as store:
            store.verify()


def test_readers_need_no_right_to_write(
    probe_path: Path, pairs_path: Path, write_store: Callable[..., Path]
) -> None:
    path = write_store()
    path.chmod(0o444)
    path.parent.chmod(0o555)
    try:
        with FeatureStore(path) as store:
            store.verify()
    finally:
        path.parent.chmod(0o755)


def test_equal_probes_and_pairs_have_equal_digests(tmp_path: Path) -> None:
    assert pair_store().content_sha256 == pair_store().content_sha256
    assert pair_store().content_sha256 != pair_store(seed=1).content_sha256
    assert make_probe().sha256 == make_probe(note="other").sha256
    assert make_probe().sha256 != make_probe(rank=1).sha256
    write_probe(tmp_path / "p", make_probe())


def test_json_with_a_name_that_is_not_utf8_can_be_read_back(tmp_path: Path) -> None:
    value = {"path": "caf\udce9", "other": "café"}
    write_json(tmp_path / "r.json", value)
    assert read_json(tmp_path / "r.json") == value
