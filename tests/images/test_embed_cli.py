"""``ncm embed`` as a process: exit codes, streams, signals, locales, limits."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
import unicodedata
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ncm_cli.store.features import FeatureStore
from ncm_cli.store.journal import journal_folder
from tests.world import run_light

from .conftest import contents

C_LOCALE = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def ncm(
    *arguments: object, env: dict[str, str] | None = None, **more: Any
) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "ncm_cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, env=os.environ | (env or {}), check=False, **more)


@pytest.mark.slow
def test_exit_codes_and_streams(make_pictures: Any) -> None:
    pictures = make_pictures(4)
    line = ("embed", pictures.manifest, "-o", pictures.output, "--model", "pixels:2")
    done = ncm(*line, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["rows"], report["new"], report["failed"]) == (4, 4, [])
    (pictures.folder / "1.png").write_bytes(b"<html>")
    done = ncm(*line)
    assert done.returncode == 5
    assert b"x001: " in done.stderr and b"1 failed" in done.stdout
    assert ncm(*line, "--max-failures", "1").returncode == 0
    done = ncm(*line[:-1], "pixels:3")
    assert done.returncode == 4 and b"pixels:2 there, pixels:3 asked for" in done.stderr and not done.stdout
    assert ncm(*line, "--batch-size", "none").returncode == 2
    (pictures.folder / "0.png").unlink()
    done = ncm(*line)
    assert done.returncode == 3 and b"0.png" in done.stderr and b"Traceback" not in done.stderr


def test_an_unchanged_run_imports_nothing_heavy(make_pictures: Any) -> None:
    pictures = make_pictures(4)
    pictures.embed()
    line = ["embed", str(pictures.manifest), "-o", str(pictures.output), "--model", "pixels:2"]
    assert "already up to date" in run_light(f"from ncm_cli.main import run\nassert run({line!r}) == 0")


@pytest.mark.parametrize("env", [{}, C_LOCALE], ids=["utf8", "C"])
@pytest.mark.slow
def test_names_that_are_not_ascii_work_in_any_locale(pictures: Any, env: dict[str, str]) -> None:
    """attention-ocr#101."""
    folder = pictures.folder / "dossier é"
    folder.mkdir()
    Image.new("RGB", (4, 4), "red").save(folder / unicodedata.normalize("NFD", "café 1.png"))
    text = unicodedata.normalize("NFC", "id,path,label\né b,café 1.png,naïve\n")
    (folder / "m.csv").write_text(text, encoding="utf-8")
    done = ncm("embed", folder / "m.csv", "-o", folder / "é.h5", "--model", "pixels:1", env=env)
    assert done.returncode == 0, done.stderr
    with FeatureStore(folder / "é.h5") as store:
        assert store.ids == ("é b",)
        assert store.categorical("label").text() == ["naïve"]
    (folder / "m.csv").write_text(text.replace("café 1", "absent é"), encoding="utf-8")
    done = ncm("embed", folder / "m.csv", "-o", folder / "é.h5", "--model", "pixels:1", env=env)
    assert done.returncode == 3 and b"absent" in done.stderr and b"Traceback" not in done.stderr
    done = ncm("embed", folder, "--layout", "label", "-o", folder / "é.h5", "--model", "pixels:1", env=env)
    assert done.returncode == 3 and b"Traceback" not in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_an_error(make_pictures: Any) -> None:
    pictures = make_pictures(2)
    closed = pictures.folder / "closed"
    closed.mkdir(mode=0o500)
    done = ncm("embed", pictures.manifest, "-o", closed / "f.h5", "--model", "pixels:2")
    assert done.returncode == 3 and b"Traceback" not in done.stderr


def slow_pictures(pictures: Any, rows: int) -> list[object]:
    """A manifest of many rows that share one picture which takes a while to decode."""
    noise = np.random.default_rng(0).integers(0, 256, (700, 700, 3), dtype=np.uint8)
    Image.fromarray(noise).save(pictures.folder / "large.png")
    pictures.write([{"id": f"x{i}", "path": "large.png", "label": "a"} for i in range(rows)])
    return ["embed", pictures.manifest, "-o", pictures.output, "--model", "pixels:2", "--batch-size", "4"]


@pytest.mark.slow
def test_ctrl_c_ends_soon_and_says_how_to_go_on(pictures: Any) -> None:
    line = slow_pictures(pictures, 500)
    process = subprocess.Popen(
        [sys.executable, "-m", "ncm_cli", *map(str, line)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    log = journal_folder(pictures.output) / "rows.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and log.stat().st_size > 2000):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - started < 2
    assert process.returncode == 130
    assert out == b"" and err.count(b"\n") == 1 and b"run the same command again" in err
    assert not pictures.output.exists()
    pictures.write([{"id": f"x{i}", "path": "large.png", "label": "a"} for i in range(20)])
    done = ncm(*line)
    assert done.returncode == 0 and b"going on after an interrupted run" in done.stderr


def limited(size: int) -> Any:
    """Files of this process can't grow beyond ``size`` bytes: to it, the disk is full."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.slow
def test_a_full_disk_is_an_error_and_loses_nothing(make_pictures: Any) -> None:
    pictures = make_pictures(60)
    clean = pictures.folder / "clean.h5"
    pictures.embed(output=clean, model="pixels:4", batch_size="8")
    line = ["embed", pictures.manifest, "-o", pictures.output, "--model", "pixels:4", "--batch-size", "8"]
    done = ncm(*line, preexec_fn=limited(15_000))
    assert done.returncode == 3 and b"Traceback" not in done.stderr
    assert not pictures.output.exists()
    done = ncm(*line)
    assert done.returncode == 0 and b"going on after an interrupted run" in done.stderr
    assert contents(pictures.output) == contents(clean)
    pictures.write([row | {"label": "bird"} for row in pictures.rows])
    before = pictures.output.read_bytes()
    done = ncm(*line, preexec_fn=limited(15_000))
    assert done.returncode == 3 and b"Traceback" not in done.stderr
    assert pictures.output.read_bytes() == before
    assert not [path for path in pictures.folder.iterdir() if path.suffix == ".tmp"]
    assert ncm(*line).returncode == 0
