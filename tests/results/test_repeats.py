"""A report averages repetitions and nothing else: results that differ in a declared seed alone."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ncm_cli.errors import UsageError
from ncm_cli.main import run
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.recipes.load import read_recipe
from ncm_cli.recipes.run import run as run_recipe
from ncm_cli.results.lines import Line, lines_of, read_sources
from ncm_cli.results.options import ReportOptions
from ncm_cli.results.repetitions import Mean, facts_of
from ncm_cli.results.report import report
from ncm_cli.results.tables import ReportTable
from ncm_cli.store.files import HEADER, read_result, write_result
from ncm_cli.store.probe import read_probe, write_probe
from tests.world import Heard

from .conftest import Results


def _evals(*paths: Path, reporter: Reporter = SILENT, **options: Any) -> ReportTable:
    return report(ReportOptions(results=paths, **options), reporter=reporter).tables[0]


def _names(table: ReportTable) -> list[str]:
    return [row[0].text for row in table.rows]


def _accuracies(table: ReportTable) -> list[tuple[float, float | None, int]]:
    spreads = [row[3].spread for row in table.rows]
    return [(own.mean, own.sd, own.n) for own in spreads if own]


def test_with_and_without_groups_are_two_rows(results: Results) -> None:
    probe = results.probe()
    table = _evals(results.eval("a.json", probe, 0.9), results.eval("b.json", probe, 0.9, groups="domain"))
    assert _names(table) == ["ncm, --groups none", "ncm, --groups domain"]
    assert _accuracies(table) == [(0.9, None, 1)] * 2


def test_the_same_rows_twice_are_one_result_and_that_is_said_once(results: Results, tmp_path: Path) -> None:
    probe = results.probe()
    paths = [results.eval(f"{name}.json", probe, 0.917, groups="label") for name in "abc"]
    heard = Heard()
    table = _evals(*paths, reporter=heard, plots=tmp_path / "plots")
    assert _names(table) == ["ncm"]
    assert _accuracies(table) == [(0.917, None, 1)]
    assert "±" not in table.note
    said = [note for note in heard.notes if "the same result again" in note]
    assert said == [f"the same result again, counted once: {tmp_path}/b.json, {tmp_path}/c.json"]


def test_a_comparison_changes_nothing_that_is_averaged(results: Results) -> None:
    probe = results.probe()
    other = results.probe("erm.safetensors", weight=3)
    results.eval("a.json", probe, 0.9)
    results.eval("b.json", probe, 0.9, compare=other)
    assert _accuracies(_evals(results.folder)) == [(0.9, None, 1)]


def test_other_features_are_other_data(results: Results) -> None:
    for seed, data in enumerate(("day/f.h5", "night/f.h5")):
        results.eval(f"{seed}.json", results.probe(f"{seed}.safetensors", seed=seed), 0.9, data=data)
    assert _names(_evals(results.folder)) == ["ncm, --features day/f.h5", "ncm, --features night/f.h5"]


def test_splits_of_ones_own_are_averaged_where_it_is_asked_for(results: Results) -> None:
    accuracies = (0.8, 0.9, 0.85)
    for part, accuracy in enumerate(accuracies):
        results.eval(
            f"{part}.json",
            results.probe(f"{part}.safetensors", weight=part + 1),
            accuracy,
            data=f"{part}/f.h5",
        )
    table = _evals(results.folder, mean_over="features")
    assert _names(table) == ["ncm"]
    assert _accuracies(table) == [(pytest.approx(0.85), pytest.approx(statistics.stdev(accuracies)), 3)]
    assert table.note.startswith("± is the standard deviation over 3 features × seeds")


def test_what_else_differs_is_not_averaged_over_features(results: Results) -> None:
    for part, groups in enumerate(("label", "domain")):
        results.eval(f"{part}.json", results.probe(), 0.9, data=f"{part}/f.h5", groups=groups)
    assert len(_names(_evals(results.folder, mean_over="features"))) == 2


def test_what_fits_chose_themselves_is_no_difference(results: Results) -> None:
    for seed, rows in enumerate(("yes", "no")):
        path = results.probe(f"{seed}.safetensors", seed=seed, pair_rows=rows)
        probe = read_probe(path)
        path.unlink()
        tried = {"rank": 1, "weight_decay": 0.1, "upweighted": False, "converged": True}
        candidates = [tried | {"pair_rows": value} for value in (False, True)]
        selection = {"rule": "bound", "oracle": False, "path": candidates, "chosen": 0}
        write_probe(path, dataclasses.replace(probe, meta={**probe.meta, "selection": selection}))
        results.eval(f"{seed}.json", path, 0.9)
    assert _accuracies(_evals(results.folder)) == [(0.9, 0.0, 2)]


def test_an_option_that_no_result_records_is_refused(results: Results) -> None:
    results.eval("a.json", results.probe(), 0.9)
    with pytest.raises(UsageError, match="no option of these results named 'feature'"):
        _evals(results.folder, mean_over="feature")


def test_features_replaced_at_one_path_are_named_by_their_contents(results: Results) -> None:
    probe = results.probe()
    for name in "ab":
        path = results.eval(f"{name}.json", probe, 0.9)
        body = read_result(path)
        body["features"]["content_sha256"] = name * 64
        write_result(path, "eval", {name: body[name] for name in body if name not in HEADER})
    assert _names(_evals(results.folder)) == ["ncm, --features aaaaaaaa", "ncm, --features bbbbbbbb"]


def test_other_rows_stand_in_other_columns(results: Results) -> None:
    probe = results.probe()
    results.eval("a.json", probe, 0.8, where="split=val")
    results.eval("b.json", probe, 0.6, where="split=test", groups="domain")
    (row,) = _evals(results.folder).rows
    assert [(cell.spread.mean, cell.spread.n) for cell in row[3::2] if cell.spread] == [(0.8, 1), (0.6, 1)]


def test_two_probes_share_no_row_even_if_they_share_no_column(results: Results) -> None:
    results.eval("a.json", results.probe("8.safetensors", rank="8"), 0.8, where="split=val")
    results.eval("b.json", results.probe("9.safetensors", rank="9"), 0.6, where="split=test")
    assert _names(_evals(results.folder)) == ["ncm, fit --rank 8", "ncm, fit --rank 9"]


def test_the_seed_of_the_fit_declares_a_repetition(results: Results) -> None:
    for seed, accuracy in enumerate((0.6, 0.7, 0.8)):
        results.eval(f"{seed}.json", results.probe(f"{seed}.safetensors", seed=seed), accuracy)
    table = _evals(results.folder)
    assert _names(table) == ["ncm"]
    assert _accuracies(table) == [(pytest.approx(0.7), pytest.approx(0.1), 3)]
    assert table.note == "± is the standard deviation over 3 seeds"


def test_one_seed_again_is_no_spread(results: Results) -> None:
    for seed, accuracy in ((0, 0.6), (1, 0.8)):
        for again in "ab":
            name = f"{seed}{again}"
            results.eval(f"{name}.json", results.probe(f"{name}.safetensors", seed=seed), accuracy)
    heard = Heard()
    table = _evals(results.folder, reporter=heard)
    assert _accuracies(table) == [(pytest.approx(0.7), pytest.approx(0.1414, abs=1e-4), 2)]
    assert len(heard.notes) == 1


def test_one_seed_with_another_outcome_is_another_result(results: Results) -> None:
    for name, weight in (("a", 1.0), ("b", 2.0)):
        results.eval(f"{name}.json", results.probe(f"{name}.safetensors", weight=weight), 0.5 + weight / 10)
    assert _names(_evals(results.folder)) == ["ncm, fit probe a.safetensors", "ncm, fit probe b.safetensors"]
    for name in "cd":
        path = results.eval(f"{name}.json", results.folder / "a.safetensors", 0.6 + (name == "d") / 10)
    table = _evals(results.folder / "c.json", path)
    assert _names(table) == ["ncm, result file c.json", "ncm, result file d.json"]


def test_a_probe_that_is_gone_declares_no_seed(results: Results) -> None:
    for seed in range(2):
        probe = results.probe(f"{seed}.safetensors", seed=seed)
        results.eval(f"{seed}.json", probe, 0.9)
    assert len(_evals(results.folder).rows) == 1
    for probe in results.folder.glob("*.safetensors"):
        probe.unlink()
    assert _names(_evals(results.folder)) == ["ncm, fit probe 0.safetensors", "ncm, fit probe 1.safetensors"]


def test_a_probe_that_was_fitted_again_declares_no_seed(results: Results) -> None:
    for seed in range(2):
        results.eval(f"{seed}.json", results.probe(f"{seed}.safetensors", seed=seed), 0.9)
    results.probe("1.safetensors", seed=1, weight=7)
    assert _names(_evals(results.folder)) == ["ncm, fit options known", "ncm, fit options unknown"]


def test_a_single_result_has_its_interval_and_no_deviation(results: Results) -> None:
    path = results.eval("a.json", results.probe(), 0.9)
    (row,) = _evals(path).rows
    assert row[3].spread is not None and row[3].spread.sd is None and row[3].spread.low is not None
    assert run(["report", str(path), "--format", "csv", "-o", str(results.folder / "t.csv")]) == 0
    assert " sd" not in (results.folder / "t.csv").read_text()
    assert str(Mean.of([0.5])) == "0.500"


def test_bounds_with_other_options_or_inputs_are_apart(results: Results) -> None:
    probe = results.probe()
    results.bound("a.json", probe, 0.5)
    results.bound("b.json", probe, 0.5, seed=3)
    results.bound("c.json", probe, 0.6, train="split=train")
    results.bound("d.json", probe, 0.7, oracle_pairs=results.folder / "other.h5")
    table = _evals(results.folder)
    assert len(table.rows) == 3, "the seed of the intervals makes no other bound"
    assert [row[2].text for row in table.rows] == ["1 of 1, exact"] * 3


def test_curves_of_other_pairs_are_other_lines_and_share_no_reference(
    results: Results, tmp_path: Path
) -> None:
    from ncm_cli.results.figures import references_of

    for seed in range(2):
        for name, erm in (("a", 0.5), ("b", 0.6)):
            probe = results.probe(f"{name}{seed}.safetensors", seed=seed, pairs=f"{name}.h5")
            summary = {"erm_test_accuracy": erm + seed / 50}
            own = {"summary": summary, "oracle": {"test_error": 0.1}}
            results.bound(f"{name}{seed}.json", probe, 0.5, pairs=tmp_path / f"{name}.h5", body=own)
    groups = lines_of(read_sources([tmp_path]).bounds, "method", SILENT)
    assert [group.label for group in groups] == ["ncm, --pairs a.h5", "ncm, --pairs b.h5"]
    assert [references_of([group]).erm for group in groups] == [pytest.approx(0.51), pytest.approx(0.61)]
    both = references_of(groups)
    assert both.erm is None and both.oracle == pytest.approx(0.9)


# What a result or its probe records, each with another value: for `Results.probe` and for `Results.eval`.
UNDECLARED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "groups": ({}, {"groups": "domain"}),
    "reference": ({}, {"reference": "split=val"}),
    "target": ({}, {"target": "place"}),
    "data": ({}, {"data": "g.h5"}),
    "option of another version": ({}, {"weights": "3"}),
    **{
        f"fit {name}": ({name: value}, {})
        for name, value in {
            "rank": "0:64",
            "weight_decay": "1e-3",
            "select": "in-domain",
            "solver": "adam",
            "train": "split=train & domain!=x",
            "scaling": "norm",
            "upweight": "label",
            "lr": 0.1,
            "data": "g.h5",
            "pairs": "q.h5",
            "model": "pixels:4",
        }.items()
    },
}


def _members(groups: list[Line]) -> list[set[str]]:
    return [{one.path.stem for one in group.sources} for group in groups]


CASES = [
    *(("hand", field) for field in (*UNDECLARED, None)),
    # Results of a run are compared by the same rule; what is particular to a run is its record.
    *(("run", field) for field in ("groups", "data", "fit rank", "fit pairs", "cell", "step", None)),
    *(("running", field) for field in ("fit data", "cell", "step", None)),
]


@pytest.mark.parametrize(("way", "field"), CASES)
@given(changed=st.lists(st.booleans(), min_size=2, max_size=4), data=st.data())
@settings(deadline=None, max_examples=3)
def test_what_differs_undeclared_is_never_averaged(
    way: str, field: str | None, changed: list[bool], data: st.DataObject
) -> None:
    """Seeds and what they may change differ throughout; one undeclared field differs where `changed`."""
    seeds = data.draw(st.permutations(range(len(changed))))
    # What survives a crash isn't the subject here, and waiting for the disk would take minutes.
    with tempfile.TemporaryDirectory() as folder, mock.patch("os.fsync"):
        results = Results(Path(folder))
        for seed, other in zip(seeds, changed, strict=True):
            fit, ev = UNDECLARED.get(field or "", ({}, {})) if other else ({}, {})
            cell = {"seed": str(seed)} | ({"v": "1" if other else "0"} if field == "cell" else {})
            at = "" if way == "hand" else f"seed{seed}/"
            fit = {"data": f"{at}f.h5", "pairs": f"{at}p.h5"} | fit
            ev = {"data": f"{at}f.h5"} | ev
            # In a run the seed of the fit stays: the cell declares the repetition.
            probe = results.probe(
                f"{at}{seed}.safetensors", seed=seed if way == "hand" else 0, weight=seed, **fit
            )
            path = results.eval(f"{at}{seed}.json", probe, 0.5 + seed / 100, **ev)
            results.made_by(probe, "B" if other and field == "step" else "A", **cell)
            results.made_by(path, "eval", **cell)
            for name in ("f.h5", "p.h5"):
                results.made[f"{at}{name}"] = (name, cell)
        if way != "hand":
            results.record(running=way == "running")
        heard = Heard()
        groups = lines_of(
            read_sources(sorted(Path(folder).rglob("*[0-9].json"))).evals, "method", heard, columns=True
        )
    wanted = [
        {str(s) for s, other in zip(seeds, changed, strict=True) if other is kind} for kind in (True, False)
    ]
    if field is None:
        assert _members(groups) == [{str(seed) for seed in seeds}]
    else:
        assert sorted(map(sorted, _members(groups))) == sorted(map(sorted, filter(None, wanted)))
    assert len({group.label for group in groups}) == len(groups)
    assert not heard.notes


def _run_of(results: Results, folder: str, values: tuple[float, ...], cells: tuple[str, ...] = ("",)) -> None:
    """A run's results, with its own data for each seed; ``cells`` are values of a matrix variable."""
    own = Results(results.folder / folder)
    for value in cells:
        for seed, accuracy in enumerate(values):
            at, cell = f"s{seed}{value}", {"seed": str(seed)} | ({"pairs": value} if value else {})
            probe = own.probe(f"{at}/ncm.safetensors", weight=seed, data=f"{at}/f.h5")
            own.made_by(probe, "NCM", **cell)
            own.made_by(own.eval(f"{at}/ncm.json", probe, accuracy, data=f"{at}/f.h5"), "eval", **cell)
    own.record()


def test_a_run_moved_elsewhere_is_still_one_row(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    _run_of(results, "a", (0.6, 0.7, 0.8))
    (results.folder / "a").rename(results.folder / "b")
    monkeypatch.chdir(results.folder / "b")
    for path in (Path(), Path("s0"), results.folder):
        table = _evals(path)
        assert _accuracies(table)[0][2] == (1 if path == Path("s0") else 3)
        assert len(table.rows) == 1


def test_two_runs_are_two_rows(results: Results) -> None:
    _run_of(results, "a", (0.6, 0.7))
    _run_of(results, "b", (0.6, 0.7, 0.8))
    table = _evals(results.folder)
    assert _names(table) == ["ncm, run folder a", "ncm, run folder b"]
    assert [n for _, _, n in _accuracies(table)] == [2, 3]


def test_cells_of_a_matrix_are_rows_named_by_the_cell(results: Results) -> None:
    _run_of(results, "a", (0.6, 0.7), cells=("32", "128", "64"))
    table = _evals(results.folder)
    assert _names(table) == ["ncm, pairs 32", "ncm, pairs 64", "ncm, pairs 128"]
    assert [n for _, _, n in _accuracies(table)] == [2, 2, 2]


def test_a_result_replaced_by_hand_is_none_of_the_run(results: Results) -> None:
    _run_of(results, "a", (0.6, 0.7, 0.8))
    folder = results.folder / "a"
    results.eval("a/s2/ncm.json", folder / "s2" / "ncm.safetensors", 0.99, data="elsewhere.h5")
    table = _evals(folder)
    assert [n for _, _, n in _accuracies(table)] == [2, 1]
    assert _names(table) == ["ncm, run folder a", "ncm, run folder none"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"jobs": 3}', '{"jobs": {"[1]": {}}}', '{"provenance": null}']
)
def test_a_record_that_cant_be_read_declares_nothing(results: Results, text: str) -> None:
    _run_of(results, "a", (0.6, 0.7))
    (results.folder / "a" / "report.json").write_text(text)
    assert len(_evals(*(results.folder / "a" / f"s{seed}" / "ncm.json" for seed in range(2))).rows) == 2


RECIPE = """
name: made
vars: {rows: 100, at: "seed${seed}", f: "seed${seed}/data/features.h5", probe: "seed${seed}/ncm.safetensors"}
matrix: {seed: [0, 1, 2]}
steps:
  - data:
      {builder: synthetic, output: "${at}/data", seed: "${seed}", dim: 12, spurious: 3,
       rows: ${rows}, val_rows: 50, test_rows: 200, pairs: 20, holdout_pairs: 10}
  - name: NCM
    fit: {features: "${f}", pairs: "${at}/data/noisy-0.1.h5", rank: "3", output: "${probe}"}
  - eval: {probe: "${probe}", features: "${f}", where: split=test, output: "${at}/test.json"}
  - eval: {probe: "${probe}", features: "${f}", where: split=test, groups: "split", output: "${at}/x.json"}
  - report: {results: "seed*/test.json", format: csv, output: table.csv}
expect:
  - {metric: accuracy, where: split=test, step: NCM, min: .5}
"""


@pytest.mark.slow
def test_a_run_and_the_reports_in_and_after_it_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made.yaml").write_text(RECIPE)
    made = run_recipe(read_recipe(tmp_path / "made.yaml", out=tmp_path / "out"))
    values = [read_result(tmp_path / "out" / f"seed{seed}" / "test.json")["accuracy"] for seed in range(3)]
    wanted = Mean(statistics.fmean(values), statistics.stdev(values), 3)
    assert wanted.sd, "each seed has its own data"
    assert [row.columns["test"] for row in made.rows] == [wanted, wanted]
    assert [row.cell for row in made.rows] == [{"--groups": "none"}, {"--groups": "split"}]
    assert [comparison.measured for comparison in made.comparisons] == [wanted, wanted]
    within = (tmp_path / "out" / "table.csv").read_text().splitlines()
    assert len(within) == 2 and repr(wanted.mean) in within[1] and repr(wanted.sd) in within[1]
    after = _evals(tmp_path / "out")
    assert _names(after) == ["ncm, --groups none", "ncm, --groups split"]
    assert _accuracies(after) == [(wanted.mean, wanted.sd, 3)] * 2
    # Another setting of one seed into the same folder: what is left of the others is no repetition of it.
    run_recipe(read_recipe(tmp_path / "made.yaml", out=tmp_path / "out", sets=["seed=[1]", "rows=80"]))
    left = _evals(tmp_path / "out" / "seed0", tmp_path / "out" / "seed1", tmp_path / "out" / "seed2")
    assert {n for _, _, n in _accuracies(left)} == {1} and len(left.rows) == 6


def test_weights_that_the_run_made_are_named_by_their_step(tmp_path: Path) -> None:
    made = {f"s{seed}/{name}": (step, {"seed": str(seed)}) for seed in (0, 1) for name, step in _NETWORKS}
    facts = []
    for seed in (0, 1):
        options = {"output": f"{tmp_path}/s{seed}/ncm.safetensors", "seed": seed}
        body = {
            "kind": "finetune",
            "options": options | {"pretrained": f"{tmp_path}/s{seed}/erm.safetensors"},
        }
        facts.append(facts_of(tmp_path / f"s{seed}" / "ncm.json", body, run=(tmp_path, made)))
    assert facts[0].fixed == facts[1].fixed and facts[0].fixed["--pretrained"] == "start"
    body["options"]["pretrained"] = "openai"
    assert facts_of(tmp_path / "s1/ncm.json", body, run=(tmp_path, made)).fixed["--pretrained"] == "openai"


_NETWORKS = (("erm.safetensors", "start"), ("ncm.json", "NCM"), ("ncm.safetensors", "NCM"))
