"""One writer at a time, whatever became of the one before."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ncm_cli.errors import InputError
from ncm_cli.main import run
from ncm_cli.store import files as lock
from ncm_cli.store.files import holds_lock, is_dead, lock_path, pid_namespace, start_time, writer_lock

HOLD = """
import os, sys, time
os.register_at_fork(after_in_child=lambda: time.sleep(5))
from ncm_cli.store import files as lock
if sys.argv[3] == "elsewhere":
    lock.pid_namespace = lambda: "00000000"
with lock.writer_lock(sys.argv[1]):
    if sys.argv[2] == "child" and os.fork() == 0:
        os._exit(0)
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse without waiting for a lock that changes hands."""
    monkeypatch.setattr(lock, "_LOCK_WAIT", 0)


def holder(output: Path, child: str = "no", where: str = "here") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(output), child, where], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_writer_is_refused_and_told_who_is_first(tmp_path: Path, at_once: None) -> None:
    output = tmp_path / "f.h5"
    with holder(output) as process:
        try:
            with pytest.raises(InputError, match="another process is writing") as error, writer_lock(output):
                pass
            assert f"process {process.pid} on host {socket.gethostname()}" in str(error.value.found)
            assert error.value.where == output
            with writer_lock(tmp_path / "other.h5"):
                pass
            process.send_signal(signal.SIGINT)
            process.wait()
            assert not lock_path(output).exists()
            with writer_lock(output):
                pass
        finally:
            process.kill()
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    output = tmp_path / "f.h5"
    with holder(output) as process:
        process.kill()
    assert lock_path(output).exists()
    with writer_lock(output):
        assert json.loads(lock_path(output).read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_container_of_this_host_is_taken_over_once_it_is_killed(
    tmp_path: Path, at_once: None
) -> None:
    output = tmp_path / "f.h5"
    with holder(output, where="elsewhere") as process:
        with pytest.raises(InputError, match="another process") as error, writer_lock(output):
            pass
        assert f"delete {lock_path(output)}" in str(error.value.fix)
        process.kill()
    with writer_lock(output, wait=1):
        pass
    assert not lock_path(output).exists()


@pytest.mark.parametrize("repeat", range(3))
def test_workers_that_outlive_a_killed_writer_do_not_keep_its_lock(tmp_path: Path, repeat: int) -> None:
    # The child sleeps before any hook of ours could run in it, with all descriptors that it has inherited.
    output = tmp_path / "f.h5"
    with holder(output, "child") as process:
        process.kill()
        with writer_lock(output):
            pass
        assert process.stdout is not None
        process.stdout.close()


def test_a_process_that_nobody_has_asked_about_since_it_was_killed_is_dead(tmp_path: Path) -> None:
    if not Path("/proc/self/stat").exists():
        pytest.skip("this system doesn't tell the state of a process")
    output = tmp_path / "f.h5"
    with holder(output) as process:
        started = start_time(process.pid)
        assert not is_dead(process.pid, started)
        assert is_dead(process.pid, "1")
        process.kill()
        while not is_dead(process.pid, started):
            time.sleep(0.01)
        assert Path(f"/proc/{process.pid}").exists()


def test_a_process_knows_what_it_is_writing(tmp_path: Path) -> None:
    with writer_lock(tmp_path / "f.h5"):
        assert holds_lock(tmp_path / "f.h5") and not holds_lock(tmp_path / "other.h5")
        with pytest.raises(InputError, match="another process") as error, writer_lock(tmp_path / "f.h5"):
            pass
        assert f"process {os.getpid()} on host" in str(error.value.found)
    assert not holds_lock(tmp_path / "f.h5")


def test_a_process_id_that_was_given_out_again_is_not_the_holder(tmp_path: Path) -> None:
    output = tmp_path / "f.h5"
    here = {"host": socket.gethostname(), "place": pid_namespace()}
    facts = {"pid": os.getppid(), **here, "started": "1", "since": "long ago"}
    lock_path(output).write_text(json.dumps(facts))
    if not Path("/proc/self/stat").exists():
        pytest.skip("this system doesn't tell when a process started")
    with writer_lock(output):
        pass


@pytest.mark.parametrize("where", [{}, {"place": "00000000"}])
def test_another_places_lock_is_respected(tmp_path: Path, where: dict[str, str], at_once: None) -> None:
    # Ids mean another thing there, if it is a container of this host or an earlier version, which didn't say.
    output = tmp_path / "f.h5"
    facts = {"pid": 2**22 + 1, "host": "elsewhere", "started": "", "since": "2024-01-01", **where}
    lock_path(output).write_text(json.dumps(facts))
    with pytest.raises(InputError, match="another process") as error, writer_lock(output):
        pass
    assert f"process {2**22 + 1} on host elsewhere, since 2024-01-01" in str(error.value.found)
    assert str(lock_path(output)) in str(error.value.fix)
    assert lock_path(output).exists()


@pytest.mark.parametrize("content", ["", "garbage", "[]", '{"pid": "x"}'])
def test_a_lock_file_that_names_nobody(tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "f.h5"
    lock_path(output).write_text(content)
    # It may be another's who is about to write the name: only an old one is given up.
    with monkeypatch.context() as patch, pytest.raises(InputError, match="another process"):
        patch.setattr(lock, "_LOCK_WAIT", 0)
        with writer_lock(output):
            pass
    os.utime(lock_path(output), (0, 0))
    with writer_lock(output):
        pass
    assert not lock_path(output).exists()


def test_of_many_threads_one_writes_at_a_time(tmp_path: Path) -> None:
    output = tmp_path / "f.h5"
    inside, most, refused, entered = [0], [0], [0], [0]
    guard = threading.Lock()

    def work() -> None:
        for _ in range(20):
            try:
                with writer_lock(output):
                    with guard:
                        inside[0] += 1
                        entered[0] += 1
                        most[0] = max(most[0], inside[0])
                    with guard:
                        inside[0] -= 1
            except InputError:
                refused[0] += 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 1
    assert entered[0] > 0
    assert entered[0] + refused[0] == 80
    assert not lock_path(output).exists()


def test_the_lock_is_released_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="x"), writer_lock(tmp_path / "f.h5"):
        raise ValueError("x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a.csv", "a.h5"])
def test_a_sweep_locks_all_of_its_files(
    tmp_path: Path, name: str, at_once: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with writer_lock(tmp_path / "a.json"):
        code = run(["sweep", "--features", str(tmp_path / "none.h5"), "-o", str(tmp_path / name)])
    assert code == 3
    assert "another process is writing this output" in capsys.readouterr().err


def test_a_full_disk_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(lock.os, "write", full)
        with pytest.raises(InputError, match="the disk is full"), writer_lock(tmp_path / "f.h5"):
            pass
    assert list(tmp_path.iterdir()) == []
    with writer_lock(tmp_path / "f.h5"):
        pass
