"""What ``ncm report`` reads, and the tables it makes of it."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from ncm_cli.errors import InputError, UsageError
from ncm_cli.main import run
from ncm_cli.probes.metrics import wilson
from ncm_cli.results.formats import comma_separated, latex, markdown, tex
from ncm_cli.results.options import ReportOptions
from ncm_cli.results.report import report
from ncm_cli.results.tables import Cell, ReportTable, Spread, decimals
from ncm_cli.store.files import write_result

from .conftest import Results


def write_eval(
    path: Path,
    method: str,
    accuracy: float,
    *,
    where: str = "split=test",
    n: int = 200,
    rank: int = 0,
    oracle: bool = False,
    task: str = "classification",
    **extra: Any,
) -> Path:
    worst = {"group": {"label": "1", "place": "sea"}, "n": n // 2, "accuracy": accuracy - 0.1}
    low, high = wilson(round(worst["accuracy"] * worst["n"]), worst["n"])
    groups = [
        {"group": {"label": "0", "place": "land"}, "n": n // 2, "accuracy": accuracy + 0.1}
        | {"ci_low": accuracy, "ci_high": min(accuracy + 0.2, 1.0)},
        worst | {"ci_low": low, "ci_high": high},
    ]
    body = {
        "n": n,
        "accuracy": accuracy,
        "log_loss": 1 - accuracy,
        "worst_group": worst,
        "groups": groups,
        "oracle": oracle,
        "task": task,
        "where": where,
        "probe": {
            "path": f"/x/{path.stem}.safetensors",
            "method": method,
            "rank": rank,
            "selection": "in-domain",
        },
        "options": {},
        **extra,
    }
    write_result(path, "eval", body)
    return path


def _report(*paths: Path, **options: Any) -> Any:
    return report(ReportOptions(results=tuple(paths), **options))


def test_methods_side_by_side_with_the_best_in_bold(tmp_path: Path) -> None:
    made = _report(
        write_eval(tmp_path / "erm.json", "erm", 0.60),
        write_eval(tmp_path / "ncm.json", "ncm", 0.75, rank=16),
        write_eval(tmp_path / "best.json", "ncm", 0.90, rank=20, oracle=True),
    )
    (table,) = made.tables
    assert table.columns == ("method", "selection", "rank", "split=test: accuracy", "split=test: worst group")
    by_method = {(row[0].text, row[1].text): row for row in table.rows}
    assert not by_method["erm", "in-domain"][3].bold
    assert by_method["ncm", "in-domain"][3].bold and by_method["ncm", "in-domain"][2].text == "16"
    assert not by_method["ncm", "in-domain ORACLE"][3].bold, "what looked at the test rows can't win"
    assert "ORACLE" in table.note
    own = by_method["erm", "in-domain"][3].spread
    assert (own.low, own.high) == wilson(120, 200)


def test_lower_is_better_for_losses(tmp_path: Path) -> None:
    made = _report(
        write_eval(tmp_path / "a.json", "erm", 0.60, task="regression", mse=0.40, r2=0.5),
        write_eval(tmp_path / "b.json", "ncm", 0.75, task="regression", mse=0.25, r2=0.6),
    )
    assert made.tables[0].columns[3:] == ("split=test: mse", "split=test: r2")
    erm, ncm = made.tables[0].rows
    assert ncm[3].bold and not erm[3].bold


def test_a_report_without_a_table_says_what_shows_probes(
    results: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", str(results.probe("p.safetensors"))]) == 0
    assert "--plots DIR and --html FILE" in capsys.readouterr().err


def test_repetitions_have_mean_and_deviation(tmp_path: Path, results: Results) -> None:
    for seed, accuracy in enumerate((0.6, 0.7, 0.8)):
        probe = results.probe(f"{seed}.safetensors", seed=seed)
        results.eval(f"{seed}.json", probe, accuracy, rank=10 + seed)
    (row,) = _report(tmp_path).tables[0].rows
    assert row[3].spread == Spread(pytest.approx(0.7), pytest.approx(0.1), 3)
    assert row[2].text == "10 to 12"
    assert not row[3].bold, "a single row has no rival"


def test_columns_by_rows_evaluated(tmp_path: Path) -> None:
    write_eval(tmp_path / "a.json", "ncm", 0.8, where="split=val")
    write_eval(tmp_path / "b.json", "ncm", 0.7, where="split=test")
    write_eval(tmp_path / "c.json", "erm", 0.9, where="split=val")
    table = _report(tmp_path).tables[0]
    assert table.columns[3::2] == ("split=val: accuracy", "split=test: accuracy")
    assert [row[0].text for row in table.rows if row[0].text.startswith("ncm")] == [
        "ncm, fit probe a.safetensors",
        "ncm, fit probe b.safetensors",
    ]
    erm = next(row for row in table.rows if row[0].text == "erm")
    assert erm[5].spread is None


@pytest.mark.parametrize("by", ["probe", "file"])
def test_lines_by_file_names(tmp_path: Path, by: str) -> None:
    write_eval(tmp_path / "ncm-10.json", "ncm", 0.8)
    write_eval(tmp_path / "ncm-9.json", "ncm", 0.7)
    assert [row[0].text for row in _report(tmp_path, by=by).tables[0].rows] == ["ncm-9", "ncm-10"]


def test_a_folder_is_read_as_far_as_it_is_ours(tmp_path: Path) -> None:
    write_eval(tmp_path / "ncm.json", "ncm", 0.8)
    (tmp_path / "notes.json").write_text('{"a": 1}')
    (tmp_path / "broken.json").write_text("{")
    assert len(_report(tmp_path).tables[0].rows) == 1
    with pytest.raises(InputError, match="not a file of ncm"):
        _report(tmp_path / "notes.json")


def test_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to report"):
        _report(tmp_path)


def test_a_result_of_another_kind(tmp_path: Path) -> None:
    write_result(tmp_path / "x.json", "info", {})
    with pytest.raises(InputError, match="a result that ncm report doesn't read"):
        _report(tmp_path / "x.json")


def test_bound_results(tmp_path: Path, results: Results) -> None:
    for name in ("a", "b"):
        for seed in range(2):
            probe = results.probe(f"{seed}.safetensors", seed=seed)
            results.bound(f"{name}{seed}.json", probe, 0.75 + seed, pairs=Path(f"{name}.h5"))
    (table,) = _report(tmp_path / "a0.json", tmp_path / "b0.json", by="pairs").tables
    assert [row[0].text for row in table.rows] == ["a", "b"]
    assert table.rows[0][2].text == "1 of 1, exact"
    bound = table.rows[0][table.columns.index("bound")].spread
    assert bound == Spread(0.75, low=0.7, high=0.8)
    (together,) = _report(tmp_path).tables
    assert [row[0].text for row in together.rows] == ["ncm, --pairs a.h5", "ncm, --pairs b.h5"]
    assert [row[2].text for row in together.rows] == ["2 of 2, exact"] * 2


def test_sweep_results_by_rule(tmp_path: Path) -> None:
    def pick(method: str, rule: str, test: float, *, oracle: bool = False) -> dict[str, Any]:
        return {
            "method": method,
            "rule": rule,
            "oracle": oracle,
            "trial": 3,
            "hyper_parameters": {"lr": 1e-3, "rank": 16.0},
            "seeds": [0, 1, 2],
            "metrics": {"val_accuracy": 0.8, "test_accuracy": test, "val_worst_group": None},
            "sd": {"val_accuracy": 0.01, "test_accuracy": 0.02},
        }

    rows = [pick("erm", "in-domain", 0.1), pick("ncm", "in-domain", 0.6)]
    rows += [pick("erm", "oracle", 0.2, oracle=True), pick("ncm", "oracle", 0.65, oracle=True)]
    write_result(tmp_path / "sweep.json", "sweep", {"rows": rows, "configurations": 32, "rules": {}})
    (table,) = _report(tmp_path / "sweep.json").tables
    assert table.columns == ("rule", "method", "hyper-parameters", "validation accuracy", "test accuracy")
    assert [row[4].bold for row in table.rows] == [False, True, False, True]
    assert table.rows[2][0].text == "oracle ORACLE"
    assert [row[2].text for row in table.rows] == ["lr 0.001, rank 16"] * 4
    assert table.rows[1][4].spread == Spread(0.6, 0.02, 3)
    # Two picks of one setting differ in their epochs alone; those of ERM are one checkpoint.
    epochs = {"ncm": ([3, 3, 3], [5, 100, 7]), "erm": ([9, 9, 9], [9, 9, 9])}
    for row in rows:
        row["epochs"] = epochs[row["method"]][row["oracle"]]
    write_result(tmp_path / "sweep.json", "sweep", {"rows": rows, "configurations": 32, "rules": {}})
    (table,) = _report(tmp_path / "sweep.json").tables
    assert [row[2].text.removeprefix("lr 0.001, rank 16") for row in table.rows] == [
        *("", ", epoch 3"),
        *("", ", epochs 5 to 100"),
    ]


def test_known_values_of_a_run(tmp_path: Path) -> None:
    def verdict(state: str, measured: Any, within: float | None, **known: Any) -> dict[str, Any]:
        base = {"metric": "accuracy", "filters": {"step": "NCM"}, "source": "paper"}
        base |= {"value": None, "spread": None, "tolerance": None, "min": None, "max": None}
        return {"expectation": base | known, "measured": measured, "state": state, "within": within}

    once = {"mean": 0.5, "sd": None, "n": 1}
    expect = [
        verdict("reproduced", {"mean": 0.7, "sd": 0.01, "n": 5}, 0.02, value=0.69, tolerance=0.05),
        verdict("near", once, 0.05, value=0.47, spread=0.01, tolerance=0.05),
        verdict("missed", once, None, min=0.6),
        verdict("not run", None, None, max=0.25),
        verdict("not run", None, None, value=0.5, tolerance=0.1, max=0.55),
    ]
    before_0_7 = verdict("reproduced", once, None, value=0.47, tolerance=0.05)
    del before_0_7["within"], before_0_7["expectation"]["spread"]
    expect.append(before_0_7)
    write_result(
        tmp_path / "report.json",
        "run",
        {"rows": [], "expect": expect, "provenance": {"recipe": {"name": "x"}}},
    )
    (table,) = _report(tmp_path).tables
    assert [tuple(cell.text for cell in row[2:5]) for row in table.rows] == [
        ("reproduced", "±0.02", "0.69"),
        ("near", "±0.05", "0.47 ± 0.01"),
        ("missed", "", "at least 0.6"),
        ("not run", "", "at most 0.25"),
        ("not run", "", "0.5, at most 0.55"),
        ("reproduced", "±0.05", "0.47"),
    ]
    assert table.rows[0][5].spread == Spread(0.7, 0.01, 5) and table.rows[3][5].spread is None


TABLE = ReportTable(
    title="A & B_1",
    columns=("name", "50% {x}"),
    rows=(
        (Cell(r"a\b_c#$~^|"), Cell(spread=Spread(2 / 3, 0.01234, 5), bold=True)),
        (Cell("=1+1"), Cell(spread=Spread(0.5, low=0.4, high=0.6))),
        (Cell("none"), Cell()),
    ),
    note="± of 5 <seeds>",
)


def test_latex_escapes_and_balances() -> None:
    text = latex(TABLE)
    assert r"\caption{A \& B\_1}" in text
    assert r"50\% \{x\}" in text
    assert r"a\textbackslash{}b\_c\#\$\textasciitilde{}\textasciicircum{}\textbar{}" in text
    assert r"\textbf{0.667 $\pm$ 0.012} \\" in text
    assert text.count(r"\begin{") == text.count(r"\end{") == 2
    for line in text.splitlines():
        if line.endswith(r"\\"):
            assert line.replace(r"\&", "").count("&") == 1
    for name in ("toprule", "midrule", "bottomrule"):
        assert text.count("\\" + name) == 1


def test_latex_leaves_no_special_character_bare() -> None:
    for character in "&%$#_{}~^\\":
        escaped = tex(f"a{character}b")
        assert escaped not in (f"a{character}b",) and escaped.startswith("a") and escaped.endswith("b")


def test_markdown_escapes() -> None:
    text = markdown(TABLE)
    header, rule, *rows = text.splitlines()[2:7]
    assert header == r"| name | 50% \{x\} |" and rule == "|---|---:|"
    assert rows[0].startswith(r"| a\\b\_c\#$~^\| | **0.667 ± 0.012** |")
    assert r"± of 5 \<seeds\>." in text


def test_csv_has_full_precision_and_no_formulas() -> None:
    rows = list(csv.reader(io.StringIO(comma_separated(TABLE))))
    assert rows[0] == ["table", "name", "50% {x}", "50% {x} sd", "50% {x} ci low", "50% {x} ci high"]
    assert float(rows[1][2]) == 2 / 3
    assert rows[2][1] == "'=1+1" and rows[2][4:] == ["0.4", "0.6"]
    assert rows[3][2:] == ["", "", "", ""]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.12345, "0.123"), (0.0, "0.000"), (1e-7, "1e-07"), (1.0, "1.000"), (16.0, "16"), (1234.5, "1.23e+03")],
)
def test_numbers(value: float, text: str) -> None:
    assert decimals(value) == text


def test_ends_of_intervals_have_the_decimals_of_their_number() -> None:
    def shown(*values: float | None) -> str:
        mean, sd, low, high = values
        assert mean is not None
        return Cell(spread=Spread(mean, sd, low=low, high=high)).as_text()

    assert shown(0.004, None, 0.000745, 0.024) == "0.004 [0.001, 0.024]"
    assert shown(0.0, None, 0.0, 0.0004) == "0.000 [0.000, <0.001]"
    assert shown(0.1, None, -0.0002, 0.2) == "0.100 [0.000, 0.200]"
    assert shown(0.5, 0.0003, None, None) == "0.500 ± <0.001"
    assert shown(2e-5, None, 1e-5, 3e-5) == "2e-05 [1e-05, 3e-05]"


def test_file_names_that_are_not_utf8(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("no such names here")
    write_eval(folder / "erm.json", "erm", 0.6)
    for out in ("-o", "--html"):
        file = tmp_path / f"out{out}"
        assert run(["report", str(folder / "erm.json"), "--by", "file", out, str(file)]) == 0
    assert "udcff" in file.read_text("utf-8")


def test_two_outputs_in_one_file_are_refused(tmp_path: Path) -> None:
    write_eval(tmp_path / "erm.json", "erm", 0.6)
    out = str(tmp_path / "out")
    assert run(["report", str(tmp_path / "erm.json"), "-o", out, "--html", out]) == 2
    assert not Path(out).exists()


def test_command_prints_writes_and_speaks_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_eval(tmp_path / "erm.json", "erm", 0.6)
    write_eval(tmp_path / "ncm.json", "ncm", 0.7)
    assert run(["report", str(tmp_path)]) == 0
    assert "0.700" in capsys.readouterr().out
    assert run(["report", str(tmp_path), "--format", "latex"]) == 0
    assert r"\toprule" in capsys.readouterr().out
    for form in ("table", "markdown", "latex", "csv"):
        target = tmp_path / f"out.{form}"
        assert run(["report", str(tmp_path), "--format", form, "-o", str(target)]) == 0
        assert "0.7" in target.read_text(encoding="utf-8")
        assert capsys.readouterr().out == ""
    assert run(["report", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["tables"][0]["rows"][1]["split=test: accuracy"]["mean"] == 0.7


def test_wrong_choices_are_usage_errors(tmp_path: Path) -> None:
    write_eval(tmp_path / "erm.json", "erm", 0.6)
    assert run(["report", str(tmp_path), "--format", "html"]) == 2
    assert run(["report", str(tmp_path / "absent.json")]) == 3
    with pytest.raises(UsageError):
        from ncm_cli.options import check

        check(ReportOptions(results=(tmp_path,), by="seed"))
