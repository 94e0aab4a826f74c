"""``ncm fit`` from the shell: streams, exit codes, what the table says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ncm_cli.main import run


def line(on_disk: Any, *more: str) -> list[str]:
    return ["fit", "-f", str(on_disk.features), "-o", str(on_disk.folder / "probe"), *more]


def with_pairs(on_disk: Any, *more: str) -> list[str]:
    return line(on_disk, "-p", str(on_disk.pairs), *more)


def test_table_on_stdout_facts_on_stderr(on_disk: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(with_pairs(on_disk, "--rank", "0:4", "--weight-decay", "1e-2")) == 0
    out, err = capsys.readouterr()
    assert "choosing by validation error + flip rate" in out and "(--select bound)" in out
    assert "choosing by" not in err, "the rule is said once"
    assert "ORACLE" not in out + err
    assert sum(row.lstrip().startswith(">") for row in out.splitlines()) == 1
    assert "wrote" in err
    assert "rank" in err


def test_json_has_the_whole_path(on_disk: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(with_pairs(on_disk, "--json")) == 0
    body = json.loads(capsys.readouterr().out)
    assert len(body["path"]) == 125
    assert body["path"][body["chosen"]]["rank"] == body["rank"]
    assert (body["rule"], body["oracle"], body["folds"]) == ("bound", False, 1)
    assert body["verdict"]["code"] == "helps"
    assert [control["name"] for control in body["controls"]] == ["constant", "erm"]


def test_long_paths_are_thinned_and_say_so(on_disk: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(with_pairs(on_disk)) == 0
    out = capsys.readouterr().out
    assert "of 125 candidates not shown: --json has them all" in out
    assert sum(row.lstrip().startswith(">") for row in out.splitlines()) == 1


def test_oracle_is_marked_on_every_surface(on_disk: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(with_pairs(on_disk, "--select", "oracle", "--test", "split=test", "--rank", "0:3")) == 0
    out, err = capsys.readouterr()
    assert "selection: ORACLE oracle" in out
    assert "ORACLE" in out.split("selection: ORACLE oracle")[1], "the column of test accuracies is marked"
    assert "ORACLE: ncm" in err


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--rank", "99"], 3, "at most 24"),
        (["--rank", "4-8"], 2, "a rank grid that can't be read"),
        (["--target", "lable"], 3, "did you mean 'label'"),
    ],
)
def test_refusals(
    on_disk: Any, capsys: pytest.CaptureFixture[str], more: list[str], code: int, message: str
) -> None:
    assert run(with_pairs(on_disk, *more)) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert not (on_disk.folder / "probe").exists()


@pytest.mark.parametrize(
    "more",
    [
        ["--method", "irm"],
        ["--method", "irm", "--envs", "place"],
        ["--penalty=10", "--method", "matchdg"],
        ["--method", "leace", "--erase", "place"],
    ],
)
def test_an_old_line_for_another_method_names_the_command_that_has_it(
    on_disk: Any, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    assert run(with_pairs(on_disk, *more)) == 2
    err = capsys.readouterr().err
    assert "ncm sweep --methods" in err
    assert "--save-probes DIR" in err
