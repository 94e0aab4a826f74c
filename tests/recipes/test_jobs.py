"""``ncm run --jobs N``: the same files as one by one, whatever fails, is killed or is interrupted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ncm_cli.errors import InputError, UsageError
from ncm_cli.recipes import processes
from ncm_cli.recipes.load import read_recipe
from ncm_cli.recipes.run import RunReport, run
from ncm_cli.recipes.schedule import Plan, dependencies
from ncm_cli.recipes.steps import Job
from ncm_cli.store.files import BusyError, read_result, writer_lock
from tests.recipes import planted_steps
from tests.recipes.run_folders import contents_of
from tests.world import Heard

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs child processes with sockets")


def _run(folder: Path, *sets: str, **options: Any) -> RunReport:
    return run(read_recipe(folder / "tiny.yaml", out=Path("out"), sets=sets), **options)


def _whole(folder: Path, **options: Any) -> dict[str, str]:
    """The contents of a run one by one, whose folder is removed."""
    _run(folder, **options)
    contents = contents_of(folder / "out")
    shutil.rmtree(folder / "out")
    return contents


def test_the_same_files_as_one_by_one(eight_steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, heard = Heard(), Heard()
    alone.verbose = heard.verbose = True  # every warning, not those of one seed
    one_by_one = _whole(eight_steps, reporter=alone)
    report = _run(eight_steps, jobs=2, reporter=heard)
    assert contents_of(eight_steps / "out") == one_by_one
    assert len(one_by_one) == 10
    assert report.ran == (
        "embed",
        *("probe (seed 0)", "probe (seed 1)"),
        *("eval (seed 0)", "eval (seed 1)", "eval-2 (seed 0)", "eval-2 (seed 1)"),
        "report",
    )
    assert report.exit_code == 0 and not report.failed and not report.stopped
    assert sorted(heard.notes) == sorted(alone.notes)
    assert alone.warnings and sorted(heard.warnings) == sorted(alone.warnings)
    monkeypatch.setattr(processes, "Child", None)  # not needed for what is up to date
    again = _run(eight_steps, jobs=2)
    assert again.ran == () and again.skipped == report.ran
    assert again.rows == report.rows and again.comparisons == report.comparisons


def _job(step: str, read: tuple[str, ...] = (), written: tuple[str, ...] = ()) -> Job:
    paths = tuple(Path("/run") / name for name in written)
    inputs = {"features": tuple(Path("/run") / name for name in read)}
    return Job(step=step, kind="fit", cell={}, inputs=inputs, written=paths)


def test_what_depends_on_what() -> None:
    jobs = [
        _job("makes a folder", written=("data",)),
        _job("reads in it", read=("data/manifest.csv",), written=("a.h5",)),
        _job("reads that", read=("a.h5",), written=("figures",)),
        _job("reads nothing of the run", read=("/other/a.h5",), written=("a.h5.json",)),
        _job("writes in a folder", written=("set/b.h5",)),
        _job("reads the folder", read=("set",), written=("c.h5",)),
        _job("writes what was read", written=("data/manifest.csv",)),
        _job("writes around what was read", written=("set",)),
        _job("reads both", read=("a.h5", "c.h5"), written=("d.h5",)),
    ]
    assert dependencies(jobs) == [set(), {0}, {1}, set(), set(), {4}, {0, 1}, {4, 5}, {1, 5}]


def test_a_report_waits_for_all_results_of_its_pattern(eight_steps: Path) -> None:
    jobs = read_recipe(eight_steps / "tiny.yaml", out=Path("out"), sets=()).jobs
    before = dependencies(jobs)
    titles = [job.title for job in jobs]
    assert {titles[number] for number in before[-1]} == {"eval (seed 0)", "eval (seed 1)"}
    assert before[0] == set()
    later = before[titles.index("eval-2 (seed 1)")]
    assert {titles[number] for number in later} == {"embed", "probe (seed 1)"}


def test_a_table_of_the_users_may_name_images_of_a_step(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("id,path,label\na,out/data/images/1.png,x\n")
    (tmp_path / "tiny.yaml").write_text(
        "name: tiny\nsteps:\n"
        "  - data: {builder: digits, output: data}\n"
        "  - embed: {source: mine.csv, model: 'pixels:2', output: a.h5}\n"
        "  - embed: {source: data/manifest.csv, model: 'pixels:2', output: b.h5}\n"
    )
    jobs = read_recipe(tmp_path / "tiny.yaml", out=Path("out"), sets=()).jobs
    assert dependencies(jobs) == [set(), {0}, {0}]


def test_the_longest_chain_goes_first_and_failures_stop_it() -> None:
    #  0 -> 2 -> 4, and 1 -> 3 -> 5 -> 6; 7 waits for both ends
    plan = Plan([set(), set(), {0}, {1}, {2}, {3}, {5}, {4, 6}, set()])
    assert plan.ready == [1, 0, 8]
    for number in (1, 0):
        plan.start(number)
    assert plan.ready == [8]
    plan.end(1)
    assert plan.ready == [3, 8]
    assert plan.fail(0) == [2, 4, 7]
    assert plan.open == {3, 5, 6, 8}
    for number in (3, 5, 6, 8):
        plan.start(number)
        plan.end(number)
    assert not plan.open and not plan.ready
    assert plan.stopped() == {2: 0, 4: 0, 7: 0}


def test_a_stopped_job_names_the_first_failed_one_in_whatever_order_they_failed() -> None:
    plan = Plan([set(), set(), {0, 1}])
    for number in (0, 1):
        plan.start(number)
    assert plan.fail(1) == [2] and plan.fail(0) == []
    assert plan.stopped() == {2: 0} and not plan.open


def test_a_failed_step_stops_what_depends_on_it_alone(eight_steps: Path) -> None:
    """The rows of one eval step become none: its old results stay on disk, and aren't shown."""
    assert _run(eight_steps).comparisons[0].measured is not None
    heard = Heard()
    report = _run(eight_steps, "rows=nowhere", "decay=1", jobs=2, reporter=heard)
    assert [failure.step for failure in report.failed] == ["eval (seed 0)", "eval (seed 1)"]
    assert [(stopped.step, stopped.because) for stopped in report.stopped] == [("report", "eval (seed 0)")]
    assert report.ran == ("probe (seed 0)", "probe (seed 1)", "eval-2 (seed 0)", "eval-2 (seed 1)")
    assert report.exit_code == 3
    assert all((eight_steps / "out" / f"test-{seed}.json").exists() for seed in (0, 1))
    written = read_result(eight_steps / "out" / "report.json")
    assert [entry["step"] for entry in written["failed"]] == ["eval (seed 0)", "eval (seed 1)"]
    assert written["stopped"] == [{"step": "report", "because": "eval (seed 0)"}]
    assert [comparison.measured for comparison in report.comparisons] == [None] * 3
    made = {entry["file"]: entry["sha256"] for entry in written["provenance"]["files"]}
    assert made["test-0.json"] is None and made["val-0.json"]
    assert any("eval (seed 0) failed" in warning for warning in heard.warnings)
    done = _run(eight_steps, "decay=1", jobs=2)
    assert done.ran == ("eval (seed 0)", "eval (seed 1)", "report") and not done.failed
    assert "failed" not in read_result(eight_steps / "out" / "report.json")


def _ncm(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "ncm_cli", "run", "tiny.yaml", "--out", "out", *words]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)


def test_failures_on_the_command_line(eight_steps: Path) -> None:
    done = _ncm(eight_steps, "--jobs", "2", "--set", "rows=nowhere", "--json")
    assert done.returncode == 3
    body = json.loads(done.stdout)
    assert [entry["step"] for entry in body["failed"]] == ["eval (seed 0)", "eval (seed 1)"]
    assert body["failed"][0]["exit_code"] == 3 and "nowhere" in json.dumps(body["failed"][0])
    assert [entry["step"] for entry in body["stopped"]] == ["report"]
    assert "eval (seed 1): bad input: " in done.stderr
    assert "warning: 2 steps failed: eval (seed 0), eval (seed 1)" in done.stderr
    assert "1 not run, after a failed step: report (after eval (seed 0))" in done.stderr


@pytest.fixture
def planted(eight_steps: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Let child processes run a function of `planted_steps`; returns the file of their notes."""

    def plant(serve: Any, output: str = "") -> Path:
        if serve is not None:
            monkeypatch.setattr(processes, "serve_steps", serve)
        monkeypatch.setenv("PLANTED_NOTES", str(eight_steps / "notes"))
        monkeypatch.setenv("PLANTED_STEP", output)
        return eight_steps / "notes"

    return plant


@pytest.mark.slow
def test_a_killed_process_is_a_failed_step(eight_steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(processes, "serve_steps", planted_steps.serve_until_killed)
        patch.setenv("PLANTED_STEP", "erm-1.safetensors")
        patch.setenv("PLANTED_SIGNAL", str(int(signal.SIGKILL)))
        report = _run(eight_steps, jobs=2)
    (failure,) = report.failed
    assert failure.step == "probe (seed 1)"
    assert failure.error.what == "the process of this step was ended by SIGKILL"
    assert "--jobs" in str(failure.error.fix)
    assert {stopped.step for stopped in report.stopped} == {"eval (seed 1)", "eval-2 (seed 1)", "report"}
    assert set(report.ran) == {"embed", "probe (seed 0)", "eval (seed 0)", "eval-2 (seed 0)"}
    assert len(_run(eight_steps, jobs=2).ran) == 4
    contents = contents_of(eight_steps / "out")
    shutil.rmtree(eight_steps / "out")
    assert contents == _whole(eight_steps)


def test_a_terminated_process_says_so(
    eight_steps: Path, planted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(planted_steps.serve_until_killed, "features.h5")
    monkeypatch.setenv("PLANTED_SIGNAL", str(int(signal.SIGTERM)))
    (failure,) = _run(eight_steps, jobs=2).failed
    assert failure.error.what == "the process of this step was ended by SIGTERM"


def test_a_bug_in_a_step_keeps_its_traceback(eight_steps: Path, planted: Any) -> None:
    planted(planted_steps.serve_with_a_bug, "test-0.json")
    report = _run(eight_steps, jobs=2)
    (failure,) = report.failed
    assert (failure.step, report.exit_code) == ("eval (seed 0)", 1)
    assert failure.error.what == "ZeroDivisionError: planted"
    assert "Traceback" in str(failure.error.found) and "in fail" in str(failure.error.found)


@pytest.mark.slow
def test_each_gpu_has_its_process(eight_steps: Path, planted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, three processes: only training with adam may use one."""
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    text = (eight_steps / "tiny.yaml").read_text()
    text = text.replace("weight_decay: ${decay}\n", "solver: adam\n      epochs: 5\n")
    (eight_steps / "tiny.yaml").write_text(text.replace("seed: [0, 1]", "seed: [0, 1, 2, 3]"))
    notes = planted(planted_steps.serve_with_two_gpus)
    assert not _run(eight_steps, jobs=3).failed
    lines = [line.split() for line in notes.read_text().splitlines()]
    processes_of: dict[str, set[str]] = {}
    for output, gpu, together, threads, process in lines:
        assert (together, threads) == ("3", "5")
        assert gpu in ("0", "1") or not output.endswith(".safetensors")
        processes_of.setdefault(gpu, set()).add(process)
    assert {gpu for output, gpu, *_ in lines if output.endswith(".safetensors")} == {"0", "1"}
    assert all(len(processes) == 1 for processes in processes_of.values())


def test_threads_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("ncm_cli.images.reading.cores", lambda: 8)
    assert processes.environment(3) == {**dict.fromkeys(names, "2"), "LOCAL_WORLD_SIZE": "3"}
    assert processes.environment(20)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    assert processes.environment(4)["OPENBLAS_NUM_THREADS"] == "6"


@pytest.mark.parametrize("kind", ["fit", "finetune"])
def test_training_a_network_keeps_its_threads(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU its last bits depend on their number."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    job = Job(step="a", kind=kind, cell={}, options=None)
    made = processes.Processes([job, job], 2)._environment
    assert ("OMP_NUM_THREADS" in made) == (kind == "fit") and made["LOCAL_WORLD_SIZE"] == "2"


def test_a_second_run_at_the_same_time_is_refused(eight_steps: Path) -> None:
    (eight_steps / "out").mkdir()
    with writer_lock(eight_steps / "out" / "report.json"), pytest.raises(BusyError):
        _run(eight_steps, jobs=2)


def test_a_missing_input_fails_its_step(eight_steps: Path) -> None:
    report = _run(eight_steps, only=["eval", "eval-2"], jobs=2)
    assert len(report.failed) == 4 and "isn't there" in report.failed[0].error.what


SCRIPT = """
import ncm_cli
print("once")
result = ncm_cli.run("run", recipe="tiny.yaml", out="out", jobs=2)
print(len(result["ran"]), result.kind, ncm_cli.run("run", recipe="tiny.yaml", dry_run=True)["recipe"])
try:
    ncm_cli.run("run", recipe="tiny.yaml", out="out", jobs=2, set=["rows=nowhere"])
except ncm_cli.errors.InputError as error:
    print("refused", error.what)
"""
"""A script as people write them, without a guard: a process that ran it again would start others."""


def test_a_script_without_a_guard(eight_steps: Path) -> None:
    start = "import pathlib, sys; sys.path.append(pathlib.Path('x')); import ncm_cli, ncm_cli.errors"
    (eight_steps / "script.py").write_text(SCRIPT.replace("import ncm_cli", start, 1))
    line = [sys.executable, "script.py"]
    done = subprocess.run(line, cwd=eight_steps, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["once", "8 run tiny"] and lines[2].startswith("refused ")


def test_options_that_do_not_go_together() -> None:
    from ncm_cli import run as run_command

    with pytest.raises(UsageError, match="--cpus is for steps on a cluster"):
        run_command("run", recipe="digits", cpus=2)
    with pytest.raises(UsageError, match="jobs must be at least 1"):
        run_command("run", recipe="digits", jobs=0)
    with pytest.raises(UsageError, match="lists all recipes and runs none: leave out --jobs"):
        run_command("run", list=True, jobs=2)


@pytest.mark.slow
def test_standard_output_of_steps_is_printed_whole(eight_steps: Path) -> None:
    text = (eight_steps / "tiny.yaml").read_text()
    predict = "  - predict: {probe: 'erm-${seed}.safetensors', source: features.h5}\n"
    (eight_steps / "tiny.yaml").write_text(text.replace("expect:", predict + "expect:"))
    one_by_one = _ncm(eight_steps)
    shutil.rmtree(eight_steps / "out")
    at_once = _ncm(eight_steps, "--jobs", "2")
    assert sorted(at_once.stdout.splitlines()) == sorted(one_by_one.stdout.splitlines())
    table = one_by_one.stdout.split("tiny\n")[0]
    assert table.count("id,class") == 2
    half = table[: table.index("id,class", 1)]
    assert half in at_once.stdout


DRIVER = """
import sys
from ncm_cli.main import main
from ncm_cli.recipes import processes
from tests.recipes import planted_steps

processes.serve_steps = planted_steps.serve_slowly
main(["run", "tiny.yaml", "--out", "out", "--jobs", "2"])
"""


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "XZ"
    except FileNotFoundError:
        return False


def _wait(holds: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it takes too long"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="asks the system which processes run")
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_all_end_with_the_run(eight_steps: Path, planted: Any, end: signal.Signals) -> None:
    notes = planted(None, "features.h5")
    whole = _whole(eight_steps)
    line = [sys.executable, "-c", DRIVER]
    tests_too = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(line, cwd=eight_steps, env=tests_too, stderr=subprocess.PIPE, text=True) as driver:
        _wait(lambda: notes.exists() and len(notes.read_text().split()) == 3, 60)  # two processes, one waits
        assert (eight_steps / "out" / ".features.h5.lock").exists()
        driver.send_signal(end)
        _, said = driver.communicate(timeout=30)
    assert driver.returncode == (-9 if end == signal.SIGKILL else 130)
    pids = [int(line) for line in notes.read_text().split() if line.isdecimal()]
    assert len(pids) == 2
    _wait(lambda: not any(map(_alive, pids)), 5)
    if end != signal.SIGKILL:
        assert "interrupted: run the same command again" in said
        assert not list((eight_steps / "out").glob(".*.lock"))
    report = _run(eight_steps, jobs=2)
    assert len(report.ran) == 8 and not report.failed
    assert contents_of(eight_steps / "out") == whole


def test_a_process_that_ends_before_its_first_step(eight_steps: Path, planted: Any) -> None:
    """Of a run whose steps may use GPUs, since the others aren't asked what they have."""
    planted(planted_steps.serve_nothing)
    text = (eight_steps / "tiny.yaml").read_text()
    (eight_steps / "tiny.yaml").write_text(text.replace("weight_decay: ${decay}\n", "solver: adam\n"))
    with pytest.raises(InputError, match="a process for steps ended with exit code 7 before its first step"):
        _run(eight_steps, jobs=2)
