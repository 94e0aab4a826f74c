"""``ncm sweep`` from files to files."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ncm_cli.baselines.choice import read_sweep
from ncm_cli.baselines.options import SweepOptions
from ncm_cli.baselines.runner import Runner
from ncm_cli.baselines.sweep import sweep
from ncm_cli.errors import InputError, UsageError
from ncm_cli.main import run
from ncm_cli.probes.fit import fit
from ncm_cli.probes.options import FitOptions
from ncm_cli.solvers.dfr import fit_dfr, halves
from ncm_cli.solvers.methods import PROTOCOLS
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.files import read_result
from ncm_cli.store.journal import Journal, read_facts
from ncm_cli.store.outputs import check_outputs
from tests.world import Heard, rows_of, write_store

from .conftest import write_problem

Made = Callable[..., SweepOptions]
METHODS = "erm,irm,vrex,groupdro,fish,lisa,matchdg,ncm,dfr,leace,erm+upweight"


def row_of(report: dict, method: str, rule: str) -> dict:
    return next(row for row in report["rows"] if (row["method"], row["rule"]) == (method, rule))


def test_ncm_finds_what_erm_misses_and_the_tables_agree(swept: Made, problem: Path) -> None:
    options = swept(epochs=15, search=("lr=0.03,0.1", "rank=0:3"), grid=True)
    report = sweep(options)
    erm, ncm = (row_of(report, method, "bound")["metrics"] for method in ("erm", "ncm"))
    assert row_of(report, "erm", "in-domain")["metrics"]["test_accuracy"] < 0.5
    assert ncm["test_accuracy"] > 0.7
    assert ncm["flip_rate"] < 0.1
    assert erm["bound_01"] >= 1 - erm["val_accuracy"]
    assert row_of(report, "ncm", "bound")["hyper_parameters"]["rank"] >= 1
    assert [row["rule"] for row in report["rows"] if row["method"] == "ncm"] == [
        "in-domain",
        "worst-group",
        "bound",
        "oracle",
        "oracle-worst-group",
    ]
    assert all(row["oracle"] == row["rule"].startswith("oracle") for row in report["rows"])

    written = read_result(problem / "s.json", kind="sweep")
    assert written["rows"] == report["rows"]
    assert written["configurations"] == (2 + 2 * 4) * 2
    assert written["data"]["train_rows"] == 450 and written["data"]["pairs_held_out"] == 16

    table, lines = read_sweep(problem / "s.h5"), rows_of(problem / "s.csv")
    assert len(table.method) == 20
    assert table.epochs.tolist() == list(range(1, 16))
    assert len(lines) == 20 * 5
    picked = row_of(report, "ncm", "bound")
    for seed, epoch, value in zip(
        picked["seeds"], picked["epochs"], picked["values"]["test_accuracy"], strict=True
    ):
        at = np.flatnonzero(
            (np.array(table.method) == "ncm") & (table.trial == picked["trial"]) & (table.seed == seed)
        )
        assert table.metrics["test_accuracy"][at[0], epoch - 1] == value
        line = next(
            line
            for line in lines
            if (line["method"], line["trial"], line["seed"], line["rule"])
            == ("ncm", str(picked["trial"]), str(seed), "bound")
        )
        assert (int(line["epoch"]), float(line["test_accuracy"])) == (epoch, value)
        assert line["oracle"] == "false" and line["diverged"] == "false" and line["rank"]


@pytest.mark.parametrize("method", ["erm", "ncm"])
def test_fit_trains_what_a_sweep_trains(swept: Made, problem: Path, method: str) -> None:
    """And a rank's probe doesn't depend on the ranks beside it."""
    rank = ("rank=2",) if method == "ncm" else ()
    search = ("lr=0.01", "weight_decay=1e-3", *rank)
    sweep(swept(methods=method, search=search, seeds=1, folds=0, envs=None))
    fitted = FitOptions(
        features=problem / "f.h5",
        pairs=problem / "p.h5",
        output=problem / "probe.safetensors",
        method=method,
        rank="0:3" if method == "ncm" else "0",
        select="in-domain",
        solver="adam",
        weight_decay="1e-3",
        lr=0.01,
        epochs=4,
        batch_size=64,
        device="cpu",
    )
    path = fit(fitted)["path"]
    found = next(one for one in path if one["rank"] == (2 if method == "ncm" else 0))
    table = read_sweep(problem / "s.h5").metrics
    assert table["val_log_loss"][0, -1] == pytest.approx(found["val_log_loss"], abs=1e-12)


def test_the_protocol_is_followed_and_recorded(swept: Made, problem: Path) -> None:
    search = ("lr=0.01", "meta_lr=0.5")
    losses = {}
    for protocol in PROTOCOLS:
        report = sweep(swept(methods="erm,irm,fish", search=search, folds=0, protocol=protocol))
        assert report["options"]["protocol"] == protocol
        losses[protocol] = read_sweep(problem / "s.h5").metrics["val_log_loss"][:, -1]
    assert np.abs(losses["common"] - losses["domainbed"]).min() > 1e-4
    # erm is the same in both; irm's and fish's own code is not their common form.
    erm, irm, fish = np.abs(losses["common"] - losses["papers"]).reshape(3, -1)
    assert erm.max() < 1e-12
    assert min(irm.min(), fish.min()) > 1e-7


def test_lisa_warns_of_batches_with_too_few_rows_of_a_cell(swept: Made, problem: Path) -> None:
    """Cells of label and colour, of which the rarest are about a tenth of the rows."""

    def warnings(**changes: object) -> list[str]:
        heard = Heard()
        quick = {
            "methods": "erm,lisa",
            "search": ("lr=0.1", "p_sel=0.5"),
            "trials": 1,
            "seeds": 1,
            "epochs": 1,
        }
        sweep(swept(**quick | {"envs": "color", "folds": 0} | changes), reporter=heard)
        return [text for text in heard.warnings if "lisa" in text]

    with FeatureStore(problem / "f.h5") as store:
        split = store.columns["split"]
        train = split.codes == split.categories.index("train")
        label, color = (store.columns[name].codes[train] for name in ("label", "color"))
    rarest = np.bincount(2 * label + color).min()
    enough = math.ceil(4 * train.sum() / rarest)
    (told,) = warnings(batch_size=16)
    assert f"about {16 * rarest / train.sum():.1f} of the {rarest} rows of class" in told
    assert f"--batch-size {enough} suffices" in told and "--protocol papers" in told
    assert not warnings(batch_size=enough)
    assert not warnings(batch_size=0)
    assert not warnings(batch_size=16, protocol="papers")
    assert not warnings(batch_size=16, methods="erm")
    assert warnings(batch_size=8, protocol="domainbed")


@pytest.mark.slow
def test_dfr_is_tuned_on_one_subset_and_tested_on_twenty(swept: Made, problem: Path) -> None:
    sweep(swept(methods="dfr", search=("C=0.3",), seeds=1, folds=0))
    table = read_sweep(problem / "s.h5").metrics
    with FeatureStore(problem / "f.h5") as store:
        X, codes = store.read().astype(float), {name: store.categorical(name).codes for name in store.columns}
    test, train, val = (codes["split"] == part for part in range(3))
    y, group = codes["label"].astype(int), 2 * codes["label"] + codes["color"]
    chosen, judged = halves(group[val], 0)
    tuned = fit_dfr(X[val][chosen], y[val][chosen], group[val][chosen], 2, [0.3], seed=0, subsets=1)[0]
    final = fit_dfr(X[val], y[val], group[val], 2, [0.3], seed=0, subsets=20, scale_by=X[train])[0]
    for name, probe, rows, labels, groups in (
        ("val", tuned, X[val][judged], y[val][judged], group[val][judged]),
        ("test", final, X[test], y[test], group[test]),
    ):
        right = (rows @ probe.weight[0] + probe.bias[0] > 0) == labels
        assert table[f"{name}_accuracy"][0, 0] == pytest.approx(right.mean())
        worst = min(right[groups == g].mean() for g in np.unique(groups))
        assert table[f"{name}_worst_group"][0, 0] == pytest.approx(worst)


@pytest.mark.parametrize("classes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_method_has_its_row(swept: Made, problem: Path, classes: int) -> None:
    write_problem(problem, classes=classes)
    report = sweep(
        swept(methods=METHODS, upweight="label,color", erase="color", search=(), trials=1, epochs=1, folds=2)
    )
    assert {row["method"] for row in report["rows"]} == set(METHODS.split(","))
    for row in report["rows"]:
        known = {name for name, value in row["metrics"].items() if value is not None}
        assert len(known) == 9, row["method"]
        assert len(row["values"]["val_accuracy"]) == 2
        assert (row["epochs"] == [None, None]) == (row["method"] == "dfr")
    assert report["diverged"] == 0


def test_without_test_rows_nothing_of_them_is_looked_at(swept: Made, problem: Path) -> None:
    report = sweep(swept(test=None))
    assert {row["rule"] for row in report["rows"]} == {"in-domain", "worst-group", "bound"}
    assert report["rules"]["oracle"] == "there are no --test rows"
    assert all(row["metrics"]["test_accuracy"] is None for row in report["rows"])
    assert "NaN" not in (problem / "s.json").read_text()


def test_rules_that_do_not_apply_say_why(swept: Made) -> None:
    report = sweep(swept(pairs=None, groups=None, methods="erm", search=("lr=0.1",)))
    assert report["rules"]["bound"] == "there are no --pairs"
    assert report["rules"]["worst-group"] == "there are no --groups"
    assert report["rules"]["in-domain"] is None


def test_a_killed_sweep_resumes_and_ends_with_the_same_table(
    swept: Made, problem: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_problem(problem, held_out=0, of_rows=True)
    options = swept(methods="erm,ncm,leace", erase="color", trials=2, folds=2)
    sweep(options)
    whole = {suffix: (problem / f"s{suffix}").read_bytes() for suffix in (".csv",)}
    history = read_sweep(problem / "s.h5").metrics
    assert not (problem / ".s.json.partial").exists()
    for suffix in (".h5", ".csv", ".json"):
        (problem / f"s{suffix}").unlink()

    trained: list[int] = []
    original = Runner.run

    def stopping(self: Runner, cells: list, advance: Callable[[int], None]) -> object:
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(len(cells))
        return original(self, cells, advance)

    monkeypatch.setattr(Runner, "run", stopping)
    with pytest.raises(KeyboardInterrupt):
        sweep(options)
    assert read_facts(problem / ".s.json.partial")["rows"] == 2
    assert not (problem / "s.csv").exists()

    # A chunk that rotted is made anew, a half-written one never counts.
    log = problem / ".s.json.partial" / "rows.log"
    content = bytearray(log.read_bytes())
    content[-20] ^= 0xFF
    log.write_bytes(bytes(content) + content[:100])
    monkeypatch.setattr(Runner, "run", original)
    heard = Heard()
    report = sweep(options, reporter=heard)
    counts = [re.match(r"(\d+) of (\d+) configurations were already finished", note) for note in heard.notes]
    resumed = next(found for found in counts if found)
    assert 0 < int(resumed[1]) < int(resumed[2]) == report["configurations"]
    assert any("1 finished chunks are damaged" in warning for warning in heard.warnings)
    assert (problem / "s.csv").read_bytes() == whole[".csv"]
    for name, values in read_sweep(problem / "s.h5").metrics.items():
        np.testing.assert_array_equal(values, history[name])
    assert not (problem / ".s.json.partial").exists()


def test_a_killed_sweep_goes_on_under_another_of_its_names(
    swept: Made, problem: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Runner.run
    trained: list[int] = []

    def stopping(self: Runner, configs: list, advance: Callable[[int], None]) -> object:
        if trained:
            raise KeyboardInterrupt
        trained.append(len(configs))
        return original(self, configs, advance)

    monkeypatch.setattr(Runner, "run", stopping)
    with pytest.raises(KeyboardInterrupt):
        sweep(swept(output=problem / "s.csv"))
    monkeypatch.setattr(Runner, "run", original)
    heard = Heard()
    sweep(swept(output=problem / "s.h5"), reporter=heard)
    assert any(note.startswith(f"{trained[0]} of ") for note in heard.notes)
    assert not list(problem.glob(".s*"))


def test_chunks_of_other_options_are_not_taken(swept: Made, problem: Path) -> None:
    with Journal.open(problem / "s.json", {"options": "other"}) as journal:
        journal.put("0", {"history": np.zeros(3)})
    heard = Heard()
    sweep(swept(), reporter=heard)
    assert not any("were already finished" in note for note in heard.notes)
    assert any("discarded" in note for note in heard.notes)


def test_a_diverged_configuration_is_told_counted_and_never_chosen(swept: Made, problem: Path) -> None:
    heard = Heard()
    options = swept(methods="erm", search=("lr=0.05,1e300", "weight_decay=1e9,1e-4"), grid=True, seeds=1)
    report = sweep(options, reporter=heard)
    assert report["diverged"] >= 1
    assert any(f"{report['diverged']} of 4 configurations diverged" in warning for warning in heard.warnings)
    assert row_of(report, "erm", "in-domain")["hyper_parameters"] == {"lr": 0.05, "weight_decay": 1e-4}
    lines = [line for line in rows_of(problem / "s.csv") if line["diverged"] == "true"]
    assert len(lines) == report["diverged"]
    assert all(line["rule"] == "" and line["val_accuracy"] == "" for line in lines)


def test_validation_rows_must_be_there_and_be_no_others(swept: Made) -> None:
    """kohpangwei/group_DRO#10."""
    with pytest.raises(InputError, match="validation rows that are test rows"):
        sweep(swept(val="split=test"))
    with pytest.raises(InputError, match="validation rows that are training rows"):
        sweep(swept(val="split=train"))
    with pytest.raises(InputError, match="test rows that are training rows"):
        sweep(swept(test="split=train"))


def test_no_validation_rows_is_an_error(swept: Made, problem: Path) -> None:
    """kohpangwei/group_DRO#10."""
    write_problem(problem, n=8)
    with pytest.raises(InputError, match=r"selects no rows|no validation row"):
        sweep(swept(val="split=val & domain=c"))


def test_what_cannot_be_is_refused_before_any_work(swept: Made, problem: Path) -> None:
    with pytest.raises(UsageError, match=r"a sweep's table can't be 's\.txt'"):
        sweep(swept(output=problem / "s.txt"))
    with pytest.raises(UsageError, match="would replace --features"):
        check_outputs(swept(output=problem / "f.csv"))
    with pytest.raises(UsageError, match="--epochs must be at least 1"):
        sweep(swept(epochs=0))
    with pytest.raises(UsageError, match="irm needs --envs"):
        sweep(swept(methods="irm", envs=None))
    with pytest.raises(InputError, match="did you mean 'domain'"):
        sweep(swept(envs="domian"))
    assert not list(problem.glob(".s*"))


def test_training_rows_without_an_environment_take_no_part(swept: Made, problem: Path) -> None:
    with FeatureStore(problem / "f.h5") as store:
        columns = {name: store.categorical(name).text() for name in store.columns}
        features, ids = store.read(), store.ids
    columns["domain"][3] = ""
    write_store(problem / "f.h5", features, columns, ids=ids)
    heard = Heard()
    sweep(swept(methods="irm", search=()), reporter=heard)
    assert any("1 training rows without a value of domain" in warning for warning in heard.warnings)
    assert read_result(problem / "s.json", kind="sweep")["data"]["train_rows"] == 449


def test_one_class_is_a_plain_error_and_three_classes_work(swept: Made, problem: Path) -> None:
    """embeddings-benchmark/mteb#944."""
    with pytest.raises(InputError, match="only one class"):
        sweep(swept(train="split=train & label=class1"))
    write_problem(problem, classes=3)
    report = sweep(swept(features=problem / "f.h5", epochs=8, search=("lr=0.05", "rank=1")))
    assert row_of(report, "ncm", "bound")["metrics"]["test_accuracy"] > 0.5


def test_changed_bytes_of_the_table_are_noticed(swept: Made, problem: Path) -> None:
    sweep(swept())
    path = problem / "s.h5"
    content = bytearray(path.read_bytes())
    at = content.find(np.float64(read_sweep(path).metrics["val_accuracy"][0, 0]).tobytes())
    assert at > 0
    content[at] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(InputError):
        read_sweep(path)


def test_the_command_prints_json_or_tables(problem: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sweep", "-f", str(problem / "f.h5"), "-p", str(problem / "p.h5"), "-o", str(problem / "s.h5")]
    command += [
        "--methods",
        "erm,ncm",
        "--search",
        "rank=1:3",
        "--trials",
        "2",
        "--seeds",
        "2",
        "--epochs",
        "2",
    ]
    command += ["--test", "split=test", "--device", "cpu"]
    assert run(command) == 0
    shown = capsys.readouterr()
    assert "ORACLE" in shown.out and "±" in shown.out and "wrote" in shown.err
    assert "worst-group: there are no --groups" in " ".join(shown.out.split())
    assert run([*command, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["rows"][0]["method"] == "erm"
    assert run([*command, "--search", "lrr=1"]) == 2
    assert "did you mean 'lr'" in capsys.readouterr().err


def test_another_writer_is_refused(swept: Made, problem: Path) -> None:
    from ncm_cli.store.files import writer_lock

    with writer_lock(problem / "s.json"), pytest.raises(InputError, match="another process"):
        sweep(swept())


@pytest.mark.slow
def test_the_result_does_not_depend_on_where_the_files_are(
    swept: Made, problem: Path, tmp_path: Path
) -> None:
    sweep(swept())
    other = tmp_path / "elsewhere"
    other.mkdir()
    for name in ("f.h5", "p.h5"):
        shutil.copy(problem / name, other / name)
    sweep(swept(features=other / "f.h5", pairs=other / "p.h5", output=other / "t.csv"))
    assert (other / "t.csv").read_bytes() == (problem / "s.csv").read_bytes()
