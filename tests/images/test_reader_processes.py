"""Processes that read images: the same rows as by threads, a dead one is named, none is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ncm_cli.errors import InputError
from ncm_cli.images import encoder as encoders
from ncm_cli.images import reading
from ncm_cli.store.columns import ImageFile

from .conftest import contents

pytestmark = pytest.mark.skipif(os.name != "posix", reason="images are read by threads here")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ids of the reader processes that are started from now on, however few images there are."""
    pids: list[int] = []
    plain = reading._ReaderProcess.__init__

    def init(self: Any, preprocess: Any) -> None:
        plain(self, preprocess)
        pids.append(self._child.process.pid)

    monkeypatch.setattr(reading._ReaderProcess, "__init__", init)
    monkeypatch.setattr(reading, "MIN_SECONDS_FOR_PROCESSES", 0.0)
    return pids


def running(pids: list[int]) -> list[int]:
    """Which of the processes are there and not just waiting to be asked about."""

    def state(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return "X"

    return [pid for pid in pids if state(pid) not in "XZ"]


def test_processes_give_what_threads_give(
    make_pictures: Any, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = make_pictures(50)
    pictures.folder.joinpath("7.png").write_bytes(b"broken")
    frames = [Image.new("RGB", (9, 9), colour) for colour in ("red", "blue")]
    frames[0].save(pictures.folder / "8.png", "GIF", save_all=True, append_images=frames[1:])
    for row, name in enumerate(["20.png", "21.png"]):
        deep = np.arange(64, dtype=np.float32).reshape(8, 8) * (row + 1)
        Image.fromarray(deep).save(pictures.folder / name, "TIFF")
    view = {"augment": "noise:0.3+crop", "intensity_range": "0:100", "model": "pixels:3", "batch_size": "13"}
    pictures.embed(**view)
    said = pictures.said
    assert len(started) == 2 and not running(started)
    made = contents(pictures.output)
    monkeypatch.setattr(reading, "MIN_SECONDS_FOR_PROCESSES", 1e9)
    pictures.embed(output=pictures.folder / "threads.h5", **view)
    assert len(started) == 2 and len(made["failed"]) == 1
    assert contents(pictures.folder / "threads.h5") == made
    assert pictures.said.warnings == said.warnings and "1 images are used in part" in said.warnings[0]


@pytest.mark.slow
def test_a_process_that_dies_is_named_and_finished_rows_are_kept(
    make_pictures: Any, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = make_pictures(400)
    plain = encoders.PixelsEncoder.encode

    def encode(self: Any, items: Any) -> np.ndarray:
        for pid in started:
            with contextlib.suppress(ProcessLookupError):  # killed in an earlier batch
                os.kill(pid, signal.SIGKILL)
        return plain(self, items)

    with monkeypatch.context() as patch, pytest.raises(InputError, match="ended by SIGKILL") as caught:
        patch.setattr(encoders.PixelsEncoder, "encode", encode)
        pictures.embed(batch_size="10")
    assert caught.value.where in {f"process {pid}" for pid in started}
    assert str(caught.value.found).count(".png") == reading.IMAGES_PER_REQUEST
    assert len(started) == 2 and not running(started)
    pictures.embed(batch_size="10")
    assert any("going on" in note for note in pictures.said.notes)
    pictures.embed(output=pictures.folder / "clean.h5", batch_size="10")
    assert contents(pictures.output) == contents(pictures.folder / "clean.h5")


PROGRAM = """
import sys
from ncm_cli.images import reading
from ncm_cli.images.encoder import EncoderRequest, load_encoder
from ncm_cli.progress import SILENT
from ncm_cli.store.journal import ImageFile

plain = reading._ReaderProcess.__init__
def init(self, preprocess):
    plain(self, preprocess)
    print(self._child.process.pid, flush=True)

reading._ReaderProcess.__init__ = init
batches = [[ImageFile("", sys.argv[1], 10**6)]] * 10_000
encoder = load_encoder(EncoderRequest(model="pixels:8"), reporter=SILENT)
for images, _ in reading.encode_batches(encoder, batches, workers=2):
    print(images[0].reason, flush=True)
"""
"""A script as people write them, without a guard: a process that ran it again would start others."""


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["parent", "reader"])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_all_end_when_one_does(tmp_path: Path, end: signal.Signals, victim: str) -> None:
    Image.fromarray(np.zeros((900, 900, 3), np.uint8)).save(tmp_path / "a.jpg")
    (tmp_path / "script.py").write_text(PROGRAM)
    command = [sys.executable, tmp_path / "script.py", tmp_path / "a.jpg"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        assert parent.stdout.readline() == "\n" and len(running(pids)) == 2
        os.kill(parent.pid if victim == "parent" else pids[0], end)
        said = parent.communicate(timeout=20)[1]
    deadline = time.monotonic() + 10
    while running(pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not running(pids)
    assert ("Traceback" in said) == ((victim, end) != ("parent", signal.SIGKILL))
    assert (f"a process that reads images was ended by {end.name}" in said) == (victim == "reader")


def test_small_jobs_and_single_readers_start_no_process() -> None:
    few = [ImageFile(str(i), "", 20_000) for i in range(100)]
    assert not reading.choose_readers(None, few)[1]
    assert not reading.choose_readers(1, few * 1000)[1] and not reading.choose_readers(0, few * 1000)[1]
    assert reading.choose_readers(3, few * 1000) == (3, True)
    large = [ImageFile(str(i), "", 5_000_000) for i in range(100)]
    assert reading.choose_readers(3, large) == (3, True)


def test_a_gpu_has_the_next_batch_before_the_last_ones_features_are_asked_for(make_pictures: Any) -> None:
    pictures = make_pictures(5)
    said: list[str] = []

    class Fake(encoders.PixelsEncoder):
        def start(self, items: Any) -> Any:
            number = sum(text.startswith("start") for text in said)
            said.append(f"start {number}")
            features = self.encode(items)
            return lambda: (said.append(f"fetch {number}"), features)[1]

    encoder = Fake(encoders.EncoderRequest(model="pixels:2"))
    files = [ImageFile(str(i), str(pictures.folder / f"{i}.png")) for i in range(5)]
    rows = {}
    for encoder.device in ("cpu", "cuda:0"):
        said.clear()
        made = list(reading.encode_batches(encoder, [files[:2], files[2:4], files[4:]], workers=1))
        assert [[image.file.id for image in images] for images, _ in made] == [["0", "1"], ["2", "3"], ["4"]]
        rows[encoder.device] = np.concatenate([features for _, features in made])
        order = {"cpu": "s0 f0 s1 f1 s2 f2", "cuda:0": "s0 s1 f0 s2 f1 f2"}[encoder.device]
        assert " ".join(text[0] + text[-1] for text in said) == order
    np.testing.assert_array_equal(rows["cpu"], rows["cuda:0"])
