"""``--leave-out``: each domain is left out once, as by filters written out; means and worst values."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ncm_cli.baselines.options import SweepOptions
from ncm_cli.baselines.sweep import sweep
from ncm_cli.errors import InputError, NcmError, UsageError
from ncm_cli.main import run
from ncm_cli.options import check, parse_left_out
from ncm_cli.probes.fit import fit
from ncm_cli.probes.leave_out import averages
from ncm_cli.probes.options import FitOptions
from ncm_cli.recipes.load import read_recipe
from ncm_cli.store.probe import read_probe
from tests.world import Heard, write_pair_store, write_store

DOMAINS = ("art", "photo", "sketch/x")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """``f.h5``, in which the colour tells the label except in sketches; ``p.h5``, pairs of two colours."""
    rng = np.random.default_rng(0)
    n = 360
    label, domain = rng.integers(0, 2, n), np.arange(n) % 3
    color = np.where(rng.random(n) < np.array([0.9, 0.8, 0.1])[domain], label, 1 - label)
    X = rng.normal(size=(n, 5))
    X[:, 0] += 1.5 * (2 * label - 1)
    X[:, 4] = 3 * (2 * color - 1) + 0.3 * rng.normal(size=n)
    columns = {
        "label": [str(code) for code in label],
        "domain": [DOMAINS[code] for code in domain],
        "color": ["rg"[code] for code in color],
        "split": rng.choice(["train", "val"], n, p=[0.8, 0.2]).tolist(),
    }
    write_store(tmp_path / "f.h5", X, columns)
    a = rng.normal(size=(40, 5)).astype(np.float32)
    a[:, 4] = 3
    b = a + 0.05 * rng.normal(size=(40, 5)).astype(np.float32)
    b[:, 4] = -3
    ids = [f"a{i}" for i in range(40)], [f"b{i}" for i in range(40)]
    write_pair_store(tmp_path / "p.h5", a, b, held_out=0, ids=ids)
    return tmp_path


def _fit(folder: Path, output: str, **options: Any) -> dict[str, Any]:
    made = FitOptions(features=folder / "f.h5", pairs=folder / "p.h5", output=folder / output, **options)
    return fit(made, reporter=Heard())


def _sweep(folder: Path, output: str, **options: Any) -> dict[str, Any]:
    made = SweepOptions(
        features=folder / "f.h5",
        pairs=folder / "p.h5",
        output=folder / output,
        methods="erm,ncm",
        trials=2,
        epochs=3,
        folds=0,
        **{"seeds": 2} | options,
    )
    return sweep(made, reporter=Heard())


def test_each_domain_is_left_out_as_by_filters_written_out(folder: Path) -> None:
    body = _fit(folder, "all.safetensors", leave_out="domain", groups="label")
    assert list(body["left_out"]) == list(DOMAINS)
    for value in DOMAINS:
        _fit(
            folder,
            "by-hand.safetensors",
            groups="label",
            train=f"split=train & domain!={value}",
            val=f"split=val & domain!={value}",
            test=f"domain={value}",
        )
        name = f"all-{value.replace('/', '-')}"
        by_hand, left_out = (read_probe(folder / f"{stem}.safetensors") for stem in ("by-hand", name))
        assert np.array_equal(by_hand.weight, left_out.weight)
        test = body["left_out"][value]["test"]
        assert (test["where"], test["n"]) == (f"domain={value}", 120)
        assert (folder / f"{name}.json").is_file()
    _fit(folder, "one.safetensors", leave_out="domain=photo", groups="label")
    assert np.array_equal(
        read_probe(folder / "one.safetensors").weight, read_probe(folder / "all-photo.safetensors").weight
    )
    assert not (folder / "one.json").exists()


def test_averages_are_over_domains_and_deviations_over_seeds(folder: Path) -> None:
    body = _sweep(folder, "s.h5", leave_out="domain")
    found = averages(body["left_out"])
    assert {(one.rule, one.method) for one in found} >= {("in-domain", "erm"), ("in-domain", "ncm")}
    for one in found:
        rows = [row for of in body["left_out"].values() for row in of["rows"]]
        of_pick = [row for row in rows if (row["rule"], row["method"]) == (one.rule, one.method)]
        values = [row["values"]["test_accuracy"] for row in of_pick]
        assert one.mean == pytest.approx(np.mean(values))
        assert one.sd == pytest.approx(np.std(np.mean(values, axis=0), ddof=1))
        assert one.worst == pytest.approx(np.mean(values, axis=1).min())


def test_the_command_and_the_report_show_domains_mean_and_worst(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = _fit(folder, "all.safetensors", leave_out="domain")
    _sweep(folder, "s.h5", leave_out="domain", seeds=1)
    scores = [one["test"]["accuracy"] for one in body["left_out"].values()]
    files = [
        f"--features={folder / 'f.h5'}",
        f"--pairs={folder / 'p.h5'}",
        "-o",
        f"{folder / 'all.safetensors'}",
    ]
    assert run(["fit", *files, "--leave-out", "domain"]) == 0
    said = capsys.readouterr().out
    assert all(value in said for value in (*DOMAINS, f"{statistics.fmean(scores):.3f}", f"{min(scores):.3f}"))
    assert run(["report", *map(str, sorted(folder.glob("*-*.json")))]) == 0
    said = capsys.readouterr().out
    assert "One domain left out: accuracy" in said
    assert "Sweep s: test accuracy, one domain left out" in said
    assert "--reference" not in said


@pytest.mark.parametrize("text", ["domain=art|photo", "domain!=art", "domain=art & label=0"])
def test_one_column_or_one_value_is_asked_for(text: str) -> None:
    with pytest.raises(UsageError, match="--leave-out takes a column or one of its values"):
        parse_left_out(text)


def test_a_store_of_one_domain_is_refused(folder: Path) -> None:
    columns = {"label": list("0101"), "domain": ["art"] * 4, "split": ["train"] * 4}
    write_store(folder / "one.h5", np.eye(4), columns)
    options = FitOptions(features=folder / "one.h5", output=folder / "o.safetensors", leave_out="domain")
    with pytest.raises(InputError, match="two domains or more"):
        fit(check(options), reporter=Heard())
    assert not list(folder.glob("*.safetensors"))


def test_all_outputs_are_checked_before_any_work(folder: Path) -> None:
    (folder / "all-sketch-x.json").write_text("mine")
    with pytest.raises(NcmError, match=r"all-sketch-x\.json|isn't"):
        _fit(folder, "all.safetensors", leave_out="domain")
    assert (folder / "all-sketch-x.json").read_text() == "mine"
    assert not list(folder.glob("*.safetensors"))


def test_a_recipe_names_one_value_for_each_cell(folder: Path) -> None:
    text = "name: x\nsteps:\n  - fit: {features: f.h5, leave_out: domain, output: o.safetensors}\n"
    (folder / "r.yaml").write_text(text)
    with pytest.raises(NcmError, match="leave_out: domain="):
        read_recipe(folder / "r.yaml")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"leave_out": "label"}, "a class that is left out can't be learned"),
        ({"leave_out": "split"}, "no (train|val|test) row is left where split="),
        ({"leave_out": "domain", "test": "domain=art"}, "no test row is left where domain=photo"),
    ],
)
def test_what_some_domain_lacks_is_said_before_any_work(
    folder: Path, changed: dict[str, str], message: str
) -> None:
    with pytest.raises(NcmError, match=message):
        _fit(folder, "all.safetensors", **changed)
    assert not list(folder.glob("*.safetensors"))


def test_domains_of_one_file_name_are_named(folder: Path) -> None:
    columns = {
        "label": list("01") * 30,
        "domain": ["a b", "a-b", "c"] * 20,
        "split": ["train"] * 42 + ["val"] * 18,
    }
    write_store(folder / "f.h5", np.random.default_rng(0).normal(size=(60, 5)), columns)
    with pytest.raises(InputError, match="same name") as error:
        _fit(folder, "all.safetensors", leave_out="domain")
    assert error.value.found == "'a b', 'a-b': all-a-b.safetensors"
