"""``ncm run --cluster`` on several nodes of one machine: the same files as one by one, whatever ends."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ncm_cli.errors import InputError
from ncm_cli.recipes import cluster, messages
from ncm_cli.recipes.load import read_recipe
from ncm_cli.recipes.perform import Outcome
from ncm_cli.recipes.run import RunReport, run
from ncm_cli.store.files import lock_path, remove_lock_of, writer_lock
from tests.images.test_cluster import Nodes
from tests.recipes import planted_steps
from tests.recipes.run_folders import contents_of
from tests.recipes.test_jobs import _whole
from tests.world import Heard

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name != "posix", reason="Ray's nodes of one machine")]


def _run(folder: Path, nodes: Nodes, *sets: str, **options: Any) -> RunReport:
    recipe = read_recipe(folder / "tiny.yaml", out=Path("out"), sets=sets)
    return run(recipe, cluster=nodes.address, **options)


def test_the_same_files_as_one_by_one(eight_steps: Path, nodes: Nodes) -> None:
    alone, heard = Heard(), Heard()
    alone.verbose = heard.verbose = True  # every warning, not those of one seed
    whole = _whole(eight_steps, reporter=alone)
    nodes.add()
    nodes.add()
    report = _run(eight_steps, nodes, reporter=heard)
    assert contents_of(eight_steps / "out") == whole
    assert len(report.ran) == 8 and not report.failed
    assert any("3 nodes, 2 cores, 0 GPUs" in note for note in heard.notes)
    assert alone.warnings and sorted(heard.warnings) == sorted(alone.warnings)
    assert _run(eight_steps, nodes).ran == ()
    failed = _run(eight_steps, nodes, "rows=nowhere", jobs=1)
    assert [failure.step for failure in failed.failed] == ["eval (seed 0)", "eval (seed 1)"]
    assert [stopped.step for stopped in failed.stopped] == ["report"] and failed.exit_code == 3


def test_of_a_step_that_has_ended_its_progress_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    def do(_: object, send: Callable[..., None]) -> Outcome:
        with messages._Sender(send).task("embedding") as task:
            task.relabel("embedding on 2 nodes")
            task.advance()
        send("note", "done")
        return Outcome()

    class Here:
        def unseen(self) -> None:
            return None

    monkeypatch.setattr(cluster, "do", do)
    place: Any = Here()
    order: Any = None
    assert cluster._step(place, 1, order, []) == [("note", "done"), ("outcome", Outcome())]


def _when(holds: Callable[[], Any], act: Callable[[Any], None]) -> threading.Thread:
    """Act once something holds, beside the test."""

    def wait() -> None:
        until = time.monotonic() + 120
        while not (found := holds()) and time.monotonic() < until:
            time.sleep(0.05)
        act(found)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_a_node_that_goes_away_loses_nothing(
    eight_steps: Path,
    nodes: Nodes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is killed while it holds the lock of a step's output."""
    whole = _whole(eight_steps)
    notes = eight_steps / "notes"
    notes.touch()
    monkeypatch.setattr(cluster, "_step", planted_steps.step_that_waits_once)
    there = {"PLANTED_NOTES": str(notes), "PLANTED_STEP": "features.h5"}
    made = [nodes.add(**there), nodes.add(**there)]

    def kill(text: str) -> None:
        name = text.split()[1]
        (node,) = (node for node in made if node.node_id == name)
        nodes.kill(node)

    thread = _when(lambda: text if (text := notes.read_text()).endswith("\n") else "", kill)
    report = _run(eight_steps, nodes)
    thread.join()
    waited, again = (line.split() for line in notes.read_text().splitlines())
    assert waited[0] == "waiting" and again[0] == "again" and waited[1] != again[1]
    assert not report.failed and len(report.ran) == 8
    assert contents_of(eight_steps / "out") == whole


BLIND = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None):
    os._exit(9)
if os.path.isdir({folder!r}) and libc.mount(b"tmpfs", {folder!r}.encode(), b"tmpfs", 0, None):
    os._exit(9)
"""
"""Puts an empty disk over a folder, for one process and its children alone."""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root mounts a disk")
def test_a_node_that_does_not_see_the_folder_is_named_before_any_step(
    eight_steps: Path,
    nodes: Nodes,
) -> None:
    nodes.add()
    nodes.add(startup=BLIND.format(folder=str(eight_steps / "out")))
    (eight_steps / "out").mkdir()
    with pytest.raises(InputError, match="doesn't see the folder of the run") as caught:
        _run(eight_steps, nodes)
    assert caught.value.where == eight_steps / "out" and "share" in str(caught.value.fix)
    assert not list((eight_steps / "out").iterdir())


def test_the_lock_of_a_host_that_is_no_more_is_removed(tmp_path: Path) -> None:
    output, lock = tmp_path / "a.h5", lock_path(tmp_path / "a.h5")
    with writer_lock(output):
        text = lock.read_text()
    lock.write_text(text.replace(socket.gethostname(), "gone"))
    remove_lock_of(output, {"other"})
    assert lock.exists()
    remove_lock_of(output, {"gone"})
    assert not lock.exists()
    remove_lock_of(output, {"gone"})
