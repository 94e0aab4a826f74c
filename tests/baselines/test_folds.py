"""The bound of a sweep: measured on folds of pairs, by probes that know neither them nor their rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ncm_cli.baselines.choice import SweepTable, read_sweep
from ncm_cli.baselines.options import SweepOptions
from ncm_cli.baselines.runner import Runner
from ncm_cli.baselines.sweep import sweep
from ncm_cli.errors import InputError, UsageError
from ncm_cli.probes.fit import fit
from ncm_cli.probes.options import FitOptions
from ncm_cli.probes.reading import read_problem
from ncm_cli.progress import SILENT
from ncm_cli.solvers.methods import Config
from ncm_cli.solvers.projection import Spectrum
from ncm_cli.solvers.trainer import Schedule, train
from ncm_cli.solvers.training_set import TrainingSet
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.pairs import read_pairs
from tests.world import Heard

from .conftest import write_problem

Made = Callable[..., SweepOptions]


def swept_table(options: SweepOptions) -> SweepTable:
    sweep(options)
    return read_sweep(options.output.with_suffix(".h5"))


def decided(X: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    logits = X @ weight.T + bias
    return (logits[:, 0] > 0).astype(int) if logits.shape[1] == 1 else logits.argmax(1)


def log_losses(X: np.ndarray, y: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    logits = X @ weight.T + bias
    if logits.shape[1] == 1:
        logits = np.concatenate([np.zeros_like(logits), logits], axis=1)
    return np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]


def reference(options: SweepOptions, method: str, seed: int, **hyper: float) -> dict[str, float]:
    """The bound of one configuration at its last epoch: folds, training and counting one by one."""
    problem = read_problem(
        FitOptions(features=options.features, pairs=options.pairs, output=options.output, select="in-domain"),
        oracle=False,
        reporter=SILENT,
    )
    with FeatureStore(options.features) as store:
        X, y, ids = store.read().astype(float), store.categorical("label").codes.astype(int), store.ids
        train_rows, val_rows = (store.categorical("split").codes == part for part in (1, 2))
        cell = 2 * y + store.categorical("color").codes
    pairs = read_pairs(options.pairs)
    errors, losses, flips, shifts = [], [], [], []
    by_row: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for fold in problem.pairs.folds(options.folds, seed):
        members = {*np.array(pairs.id_a)[fold.measured], *np.array(pairs.id_b)[fold.measured]}
        kept = train_rows & ~np.isin(ids, list(members))
        shared = np.isin(pairs.id_a, list(members)) | np.isin(pairs.id_b, list(members))
        assert not (fold.basis & shared).any()
        delta = pairs.features_a[fold.basis].astype(float) - pairs.features_b[fold.basis]
        directions = np.linalg.svd(delta.T, full_matrices=False)[0]
        basis = Spectrum(np.ones(directions.shape[1]), directions, directions.shape[1], 0.0, 0)
        data = TrainingSet(X=X[kept], y=y[kept], n_classes=int(y.max()) + 1, spectrum=basis, pairs=1)
        schedule = Schedule(epochs=options.epochs, batch_size=options.batch_size)
        found = train([Config(method=method, seed=seed, **hyper)], data, schedule)[0]
        probe = (found.weight, found.bias)
        a, b = (part[fold.measured].astype(float) for part in (pairs.features_a, pairs.features_b))
        errors.append(decided(X[val_rows], *probe) != y[val_rows])
        losses.append(log_losses(X[val_rows], y[val_rows], *probe))
        own = np.isin(ids, list(members))
        told = decided(X[own], *probe) != y[own], log_losses(X[own], y[own], *probe)
        by_row.append((cell[own], *told))
        flips += (decided(a, *probe) != decided(b, *probe)).tolist()
        shifts += ((((a - b) @ found.weight.T) ** 2).sum(1)).tolist()
    lipschitz = 1.0 if y.max() == 1 else np.sqrt(2)
    by_row.append((cell[val_rows], np.mean(errors, axis=0), np.mean(losses, axis=0)))
    cells, *told = (np.concatenate(part) for part in zip(*by_row, strict=True))
    by_cell = [[one[cells == code].mean() for code in np.unique(cells)] for one in told]
    return {
        "cell_error": np.mean(by_cell[0]),
        "cell_log_loss": np.mean(by_cell[1]),
        "flip_rate": np.mean(flips),
        "bound_01": np.mean(errors) + np.mean(flips),
        "log_loss_bound": np.mean(losses) + lipschitz * np.sqrt(np.mean(shifts)),
        "folds": len(errors),
        "pairs": len(flips),
    }


@pytest.mark.parametrize(
    ("classes", "pairs"),
    [
        (2, "of training rows"),
        (3, "of other rows"),
        (2, "held out"),
        pytest.param(3, "of training rows", marks=pytest.mark.slow),
    ],
)
def test_the_bound_is_what_a_plain_loop_over_the_folds_finds(
    swept: Made, problem: Path, classes: int, pairs: str
) -> None:
    held, count = 16 if pairs == "held out" else 0, 24 if pairs == "of training rows" else 40
    write_problem(problem, classes=classes, held_out=held, of_rows=pairs == "of training rows")
    options = swept(envs=None, search=("lr=0.05", "weight_decay=1e-3", "rank=1"), epochs=6)
    table = swept_table(options)
    hyper = {"lr": 0.05, "weight_decay": 1e-3}
    for i, (method, seed) in enumerate(zip(table.method, table.seed, strict=True)):
        expected = reference(options, method, int(seed), **hyper, **({"rank": 1} if method == "ncm" else {}))
        assert (expected.pop("folds"), expected.pop("pairs")) == ((1, 16) if held else (5, count))
        if pairs == "held out" or pairs == "of other rows":
            assert not np.isfinite(table.metrics["cell_error"]).any(), "rows that have no cells"
            expected = {name: value for name, value in expected.items() if not name.startswith("cell")}
        for name, value in expected.items():
            assert table.metrics[name][i, -1] == pytest.approx(value, rel=1e-9), (method, seed, name)
    flips = dict(zip(table.method, table.metrics["flip_rate"][:, -1], strict=True))
    assert flips["erm"] > flips["ncm"] + 0.1


@pytest.mark.slow
def test_a_long_sweep_in_full_batch_finds_what_fit_finds(swept: Made, problem: Path) -> None:
    write_problem(problem, held_out=0, of_rows=True)
    table = swept_table(
        swept(
            methods="ncm",
            envs=None,
            search=("lr=0.1", "weight_decay=1e-2,1e-1", "rank=0:2"),
            grid=True,
            seeds=1,
            epochs=300,
            batch_size=0,
        )
    )
    report = fit(
        FitOptions(
            features=problem / "f.h5",
            pairs=problem / "p.h5",
            output=problem / "probe.safetensors",
            rank="0:2",
            weight_decay="1e-2,1e-1",
            method="ncm",
        )
    )
    found = {(one["rank"], one["weight_decay"]): one for one in report["path"]}
    assert len(found) == len(table.method) == 6
    for i, setting in enumerate(zip(table.hyper["rank"], table.hyper["weight_decay"], strict=True)):
        for name in ("flip_rate", "bound_01", "log_loss_bound", "cell_error", "cell_log_loss"):
            assert table.metrics[name][i, -1] == pytest.approx(found[setting][name], abs=0.02)


@pytest.mark.slow
def test_each_seed_has_its_own_folds(swept: Made, problem: Path) -> None:
    write_problem(problem, held_out=0, of_rows=True)
    options = swept(search=("lr=0.01", "rank=2"), trials=1, batch_size=0, seeds=4, epochs=6)
    heard = Heard()
    sweep(options, reporter=heard)
    table = read_sweep(problem / "s.h5")
    for method in ("erm", "ncm"):
        own = [i for i, name in enumerate(table.method) if name == method]
        assert np.ptp(table.metrics["val_log_loss"][own, -1]) < 1e-9
        assert len(set(table.metrics["log_loss_bound"][own, -1].round(6))) == 4
    notes = [note for note in heard.notes if "don't depend on the seed" in note]
    assert len(notes) == 1
    assert "erm, ncm don't depend on the seed, except on the folds of the bound" in notes[0]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"batch_size": 0}, "erm, ncm"),
        ({"batch_size": 450}, "erm, ncm"),
        ({"batch_size": 0, "methods": "erm,fish,lisa,dfr", "search": ()}, "erm"),
        ({"batch_size": 449}, None),
        ({"batch_size": 0, "seeds": 1}, None),
        ({"batch_size": 0, "protocol": "domainbed"}, "erm, ncm"),
        ({"batch_size": 450, "protocol": "domainbed"}, None),
    ],
)
def test_seeds_that_vary_nothing_are_told_in_one_note(
    swept: Made, changes: dict[str, object], named: str | None
) -> None:
    heard = Heard()
    sweep(swept(**{"search": ("lr=0.1",), "trials": 1, "epochs": 3} | changes), reporter=heard)
    notes = [note for note in heard.notes if "don't depend on the seed" in note]
    assert len(notes) == (named is not None)
    if named is not None:
        assert f"the results of {named} don't depend on the seed, so ±.000" in notes[0]
        assert "--batch-size below the number of rows" in notes[0]


@pytest.mark.slow
def test_without_folds_there_is_no_bound_and_nothing_else_changes(swept: Made, problem: Path) -> None:
    write_problem(problem, held_out=0, of_rows=True)
    options = swept()
    whole = swept_table(options)
    report = sweep(dataclasses.replace(options, folds=0))
    without = read_sweep(problem / "s.h5")
    assert report["rules"]["bound"] == "with --folds 0 no pair is measured"
    assert "bound" not in {row["rule"] for row in report["rows"]}
    for name, values in without.metrics.items():
        if name in ("flip_rate", "bound_01", "log_loss_bound", "cell_error", "cell_log_loss"):
            assert np.isnan(values).all() and not np.isnan(whole.metrics[name]).any()
        else:
            np.testing.assert_array_equal(values, whole.metrics[name])


@pytest.mark.slow
@pytest.mark.parametrize("of_rows", [True, False])
def test_methods_without_pairs_are_trained_again_only_where_a_fold_takes_rows(
    swept: Made, problem: Path, monkeypatch: pytest.MonkeyPatch, of_rows: bool
) -> None:
    write_problem(problem, held_out=0, of_rows=of_rows)
    trained: list[str] = []
    original = Runner._train

    def counting(self: Runner, part: object, cells: list, *rest: object) -> object:
        trained.extend(cell.method for cell in cells)
        return original(self, part, cells, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Runner, "_train", counting)
    sweep(swept(methods="erm,ncm,matchdg", search=("lr=0.01", "rank=2", "penalty=1"), trials=1, seeds=1))
    assert {name: trained.count(name) for name in dict.fromkeys(trained)} == {
        "erm": 6 if of_rows else 1,
        "ncm": 6,
        "matchdg": 6,
    }


def test_pairs_that_make_no_folds_are_refused_before_training(swept: Made, problem: Path) -> None:
    write_problem(problem, held_out=0)
    pairs = read_pairs(problem / "p.h5")
    one = dataclasses.replace(pairs, id_a=("a0",) * 40, id_b=("b0",) * 40)
    from ncm_cli.store.pairs import write_pairs

    write_pairs(problem / "p.h5", one)
    with pytest.raises(InputError, match="too few pairs to be cut into folds") as caught:
        sweep(swept())
    assert "--folds 0" in str(caught.value)
    assert sweep(swept(folds=0))["rules"]["bound"] is not None
    with pytest.raises(UsageError, match="--folds must be at least 2"):
        sweep(swept(folds=1))


def test_every_configuration_diverged_is_the_reason(swept: Made) -> None:
    report = sweep(swept(methods="erm", search=("lr=1e300", "weight_decay=1e9"), trials=1, seeds=1))
    assert set(report["rules"].values()) == {"every configuration diverged"}
