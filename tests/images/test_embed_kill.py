"""Kill the embedding at any moment: the same command goes on, and ends as if nothing had happened."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ncm_cli.store.features import FeatureStore
from ncm_cli.store.files import lock_path
from ncm_cli.store.journal import journal_folder

from .conftest import contents

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork to kill without a new start")

OPTIONS = {"batch_size": "16", "workers": "2", "model": "pixels:4"}


def forked(work: Callable[[], None]) -> int:
    """Run ``work`` in a process of its own; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    except BaseException:
        os._exit(1)


def killed(pid: int) -> bool:
    """Wait for a process; whether SIGKILL ended it. Any other end but a good one fails the test."""
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the run ended with an error of its own"
    return os.WIFSIGNALED(status)


def forget(output: Path) -> None:
    output.unlink(missing_ok=True)
    for path in journal_folder(output).glob("*"):
        path.unlink()


def resumed(pictures: Any, clean: dict[str, Any]) -> bool:
    """Run again, compare with the clean run; whether it went on from what the killed run had finished."""
    pictures.embed(**OPTIONS)
    made = contents(pictures.output)
    assert made == clean
    assert len(set(made["ids"])) == len(made["ids"]) == len(pictures.rows)
    with FeatureStore(pictures.output) as store:
        assert store.read().any(axis=1).all()
    assert not journal_folder(pictures.output).exists()
    left = {path.name for path in pictures.folder.iterdir() if path.name.startswith(".")}
    assert left <= {lock_path(pictures.output).name}
    return any("going on" in note for note in pictures.said.notes)


def count_file_events(work: Callable[[], None], folder: Path, kill_at: int | None, log: Path | None) -> None:
    """Run ``work`` counting what it does to files in ``folder``; die by SIGKILL before event ``kill_at``."""
    seen = []

    def watch(event: str, details: tuple[Any, ...]) -> None:
        if event not in {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod"}:
            return
        if not (details and isinstance(details[0], (str, os.PathLike))):
            return
        name = str(details[0])
        if name.startswith(str(folder)) and not name.endswith(".png"):
            seen.append(event)
            if len(seen) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    work()
    if log:
        log.write_text(str(len(seen)))


@pytest.mark.slow
def test_a_kill_before_any_single_file_operation_loses_nothing(make_pictures: Any, tmp_path: Path) -> None:
    pictures = make_pictures(40)
    clean_path, log = pictures.folder / "clean.h5", pictures.folder / "count.txt"
    pictures.embed(output=clean_path, **OPTIONS)
    clean = contents(clean_path)

    def embed() -> None:
        pictures.embed(**OPTIONS)

    assert not killed(forked(lambda: count_file_events(embed, tmp_path, None, log)))
    total = int(log.read_text())
    assert total > 10
    went_on = 0
    for event in range(1, total):
        forget(pictures.output)
        at = event
        assert killed(forked(lambda: count_file_events(embed, tmp_path, at, None)))  # noqa: B023
        went_on += resumed(pictures, clean)
    assert went_on > total / 6


@pytest.mark.slow
def test_kills_during_an_update_keep_the_old_or_give_the_new_store(
    make_pictures: Any, tmp_path: Path
) -> None:
    pictures = make_pictures(30)
    pictures.embed(**OPTIONS)
    original = pictures.output.read_bytes()
    before = contents(pictures.output)
    pictures.picture("4.png")
    rows = [
        *pictures.rows[2:],
        {"id": "new", "path": "1.png", "label": "cat", "split": "train", "place": "0"},
    ]
    pictures.write(rows)
    pictures.embed(output=pictures.folder / "clean.h5", **OPTIONS)
    clean = contents(pictures.folder / "clean.h5")
    log = pictures.folder / "count.txt"

    def embed() -> None:
        pictures.embed(**OPTIONS)

    assert not killed(forked(lambda: count_file_events(embed, tmp_path, None, log)))
    for event in range(1, int(log.read_text())):
        pictures.output.write_bytes(original)
        at = event
        assert killed(forked(lambda: count_file_events(embed, tmp_path, at, None)))  # noqa: B023
        assert contents(pictures.output) in (before, clean)
        pictures.embed(**OPTIONS)
        assert contents(pictures.output) == clean
