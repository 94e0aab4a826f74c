"""``ncm sweep --save-probes``: the picks as probe files that every command takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ncm_cli.baselines.choice import read_sweep
from ncm_cli.baselines.options import SweepOptions
from ncm_cli.baselines.sweep import sweep
from ncm_cli.main import run
from ncm_cli.probes.evaluate import evaluate
from ncm_cli.probes.fit import fit
from ncm_cli.probes.options import EvalOptions, FitOptions
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.probe import read_probe, seen_rows

from .conftest import write_problem

Made = Callable[..., SweepOptions]
METHODS = "erm,irm,vrex,groupdro,fish,lisa,matchdg,ncm,dfr,leace,erm+upweight,irm+upweight"
RULES = {"in-domain", "worst-group", "bound", "oracle", "oracle-worst-group"}


@pytest.mark.parametrize(
    ("classes", "scaling"), [(2, "none"), pytest.param(3, "standard", marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_every_pick_is_a_probe_with_the_tables_accuracy(
    swept: Made, problem: Path, classes: int, scaling: str
) -> None:
    write_problem(problem, classes=classes, held_out=0, of_rows=True)
    folder = problem / "probes"
    options = swept(
        methods=METHODS, upweight="label,color", erase="color", search=("rank=1:3", "lr=log:1e-3:1e-1"),
        scaling=scaling, save_probes=folder, trials=2, epochs=2, folds=2,
    )  # fmt: skip
    report = sweep(options)
    with FeatureStore(problem / "f.h5") as store:
        split = store.categorical("split").codes
        test_rows, train, val = ([store.ids[i] for i in np.flatnonzero(split == part)] for part in (0, 1, 2))
    seen: set[str] = set()
    for row in report["rows"]:
        for at, seed in enumerate(row["seeds"]):
            path = folder / f"{row['method']}-{row['rule']}-seed{seed}.safetensors"
            seen.add(path.name)
            probe = read_probe(path)
            measured = evaluate(EvalOptions(probe=path, features=problem / "f.h5", where="split=test"))
            assert measured["n"] == len(test_rows)
            wrong = (1 - measured["accuracy"]) * measured["n"]
            assert wrong == pytest.approx(
                (1 - row["values"]["test_accuracy"][at]) * measured["n"], abs=1e-9
            ), path
            meta, method = probe.meta, row["method"].removesuffix("+upweight")
            assert meta["method"] == method and probe.classes == tuple(report["classes"])
            for name, value in row["hyper_parameters"].items():
                assert meta["hyper_parameters"][name] == value
            assert (meta["hyper_parameters"]["upweight"] is None) == ("+" not in row["method"])
            assert meta["selection"]["rule"] == row["rule"] and meta["selection"]["oracle"] == row["oracle"]
            assert meta["selection"]["epoch"] == row["epochs"][at]
            assert any("ORACLE" in flag for flag in meta["flags"]) == row["oracle"]
            assert meta["data"]["features"]["content_sha256"] == report["data"]["content_sha256"]
            assert probe.rank == row["hyper_parameters"].get("rank", 0)
            assert seen_rows(probe, "train", train).all() and seen_rows(probe, "val", val).all()
            assert seen_rows(probe, "train", val).all() == (method == "dfr")
            assert not seen_rows(probe, "train", test_rows).any()
    assert {path.name for path in folder.iterdir()} == seen
    assert {row["rule"] for row in report["rows"]} == RULES and len(seen) == 12 * 5 * 2


def test_eval_predict_info_and_report_take_them(
    swept: Made, problem: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, store = problem / "probes", str(problem / "f.h5")
    options = {"methods": "irm,ncm,dfr,leace", "erase": "color", "search": (), "epochs": 2, "folds": 2}
    sweep(swept(**options, seeds=1, trials=1, save_probes=folder))
    assert len(list(folder.iterdir())) == 4 * 5
    for method in ("irm", "ncm", "dfr", "leace"):
        probe = str(folder / f"{method}-in-domain.safetensors")
        result = str(problem / f"{method}.json")
        assert run(["eval", probe, "-f", store, "--where", "split=test", "-o", result]) == 0
        assert run(["predict", probe, store, "--where", "split=test", "-o", str(problem / "p.csv")]) == 0
        capsys.readouterr()
        assert run(["info", probe, "--verify", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["method"] == method
        assert run(["eval", probe, "-f", store, "--where", "split=train", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["overlap"]["train"] > 0
    assert run(["report", *(str(problem / f"{method}.json") for method in ("irm", "ncm"))]) == 0
    assert "leace" not in capsys.readouterr().out
    assert run(["report", str(folder / "ncm-bound.safetensors"), "--plots", str(problem / "plots")]) == 0


@pytest.mark.slow
def test_saving_probes_changes_no_table(swept: Made, problem: Path) -> None:
    sweep(swept())
    before = (problem / "s.csv").read_bytes()
    sweep(swept(save_probes=problem / "probes"))
    assert (problem / "s.csv").read_bytes() == before
    assert len(list((problem / "probes").iterdir())) == 2 * 5 * 2


def test_a_pick_of_ncm_is_what_fit_makes_of_its_record(swept: Made, problem: Path) -> None:
    sweep(swept(methods="ncm", envs=None, seeds=1, save_probes=problem / "probes"))
    saved = read_probe(problem / "probes" / "ncm-bound.safetensors")
    assert read_sweep(problem / "s.h5").epochs.tolist() == [1, 2, 3, 4]
    hyper = saved.meta["hyper_parameters"]
    fit(
        FitOptions(
            features=problem / "f.h5",
            pairs=problem / "p.h5",
            output=problem / "fitted.safetensors",
            solver="adam",
            rank=str(saved.rank),
            weight_decay=repr(hyper["weight_decay"]),
            lr=hyper["lr"],
            epochs=hyper["epochs"],
            batch_size=64,
            device="cpu",
        )
    )
    fitted = read_probe(problem / "fitted.safetensors")
    np.testing.assert_allclose(saved.weight, fitted.weight, atol=1e-12)
    np.testing.assert_array_equal(saved.basis, fitted.basis)
    for name in ("encoder", "scaling", "rows", "data"):
        assert saved.meta[name] == fitted.meta[name] or name == "data"
    for name in ("features", "pairs", "train", "val", "train_rows", "val_rows"):
        assert saved.meta["data"][name] == fitted.meta["data"][name]
