"""Exit codes and streams: the one place where exceptions become messages."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ncm_cli.cli import main
from ncm_cli.errors import InputError, MismatchError, NcmError, UsageError, listing, nearest, unknown
from ncm_cli.render import Ui, plain


def _run_raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    def app(**_: object) -> None:
        raise error

    monkeypatch.setattr(main, "build_app", lambda only=None: app)
    return main.run([])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("an option is off"), 2),
        (InputError("a bad row", where="m.csv, row 3", found="''", expected="an id", fix="fill it in"), 3),
        (MismatchError("two encoders"), 4),
        (OSError(errno.ENOSPC, "No space left on device", "f.h5"), 3),
        (PermissionError(errno.EACCES, "Permission denied", "f.h5"), 3),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "f.h5"), 3),
        (FileExistsError(errno.EEXIST, "File exists", "folder"), 3),
        (MemoryError(), 3),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_exceptions_have_their_exit_code_and_stay_off_stdout(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _run_raising(error, monkeypatch) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err
    if isinstance(error, NcmError):
        assert error.what in err
        assert all(text in err for _, text in error.lines())


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        _run_raising(ZeroDivisionError(), monkeypatch)


@pytest.mark.parametrize("argv", [["embde"], ["embed", "--no-such-option"], ["--what"]])
def test_usage_errors_exit_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "usage:" in err


def test_version_and_picture_go_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("ncm 0.")
    assert main.run([]) == 0
    assert "features.h5" in capsys.readouterr().out


def test_every_command_is_listed_with_its_own_summary(capsys: pytest.CaptureFixture[str]) -> None:
    for name, summary in main.COMMANDS.items():
        assert main.run([name, "--help"]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert summary in shown, name


def test_a_closed_pipe_is_no_error() -> None:
    program = f"{sys.executable} -m ncm_cli --help | head -1"
    done = subprocess.run(program, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_ascii_terminals_get_ascii() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ncm_cli"],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "PATH": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    done.stdout.decode("ascii")


def test_nearest_and_listing() -> None:
    assert nearest("lable", ["label", "split"]) == "label"
    assert nearest("LABEL", ["label"]) == "label"
    assert nearest("zzz", ["label"]) is None
    assert listing(range(20), limit=3) == "0, 1, 2 and 17 more"
    error = unknown("column", "lable", ["label", "split"], where="f.h5")
    assert "did you mean 'label'?" in str(error)
    assert "label, split" in str(error)


@pytest.mark.parametrize("redirection", [">&-", "2>&-", ">&- 2>&-"])
@pytest.mark.slow
def test_a_process_without_standard_streams_does_its_work(redirection: str) -> None:
    program = f"{sys.executable} -m ncm_cli info --system {redirection}"
    done = subprocess.run(program, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_help_cut_short_by_its_reader_is_no_error() -> None:
    program = f"set -o pipefail; {sys.executable} -m ncm_cli embed --help | true"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_command_without_arguments_shows_its_help_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["eval"]) == 2
    out, err = capsys.readouterr()
    assert "Usage: ncm eval" in out
    assert err == ""


def test_an_output_never_replaces_an_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table.csv"
    table.write_text("id_a,id_b\n1,2\n")
    (tmp_path / "link.csv").symlink_to(table)
    shell = ["pairs", str(table), "-f", str(tmp_path / "f.h5"), "-o", str(tmp_path / "link.csv")]
    assert main.run(shell) == 2
    assert "the output would replace SOURCE" in capsys.readouterr().err
    assert table.read_text() == "id_a,id_b\n1,2\n"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "f.h5"
    path.write_bytes(b"x")
    path.chmod(0)
    assert main.run(["info", str(path)]) == 3
    assert "permission denied" in capsys.readouterr().err.lower()


def test_terminals_get_no_control_characters() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    shown = plain("a\x1b[31m\r\x07\x9b\u202eb\tc\nd\udce9é", stream)
    assert shown == "a\\x1b[31m\\x0d\\x07\\x9b\\u202eb\tc\nd\\udce9é"


def test_names_that_are_not_utf8_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    Ui(json=True).result({"path": "caf\udce9"})
    assert json.loads(capsys.readouterr().out) == {"path": "caf\udce9"}
