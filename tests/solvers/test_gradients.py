"""Every method's closed-form gradient against autograd of its paper's formula, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ncm_cli.solvers.batches import Batch, DeviceRows, generator_of
from ncm_cli.solvers.methods import Config
from ncm_cli.solvers.projection import spectrum
from ncm_cli.solvers.trainer import FishWeights, Schedule, SharedWeights
from ncm_cli.solvers.training_set import TrainingSet

from . import references

CLASSES = [2, 4]
TOLERANCE = 1e-8


def train_data(problem, *, pairs: bool = False) -> TrainingSet:
    return TrainingSet(
        X=problem.features,
        y=problem.targets,
        n_classes=problem.classes,
        codes={"envs": problem.environments},
        weights=problem.row_weights,
        spectrum=spectrum(problem.delta) if pairs else None,
        pairs=problem.delta.shape[1],
    )


def started(problem, config: Config, *, pairs: bool = False):
    """The weights of one configuration, which are the problem's, and its only batch."""
    rows = DeviceRows(train_data(problem, pairs=pairs), "cpu")
    make = FishWeights if config.method == "fish" else SharedWeights
    weights = make([config], rows, Schedule(epochs=1, batch_size=0))
    weight = problem.weight @ rows.rotation if config.rank else problem.weight
    weights.weight[0, :, : rows.dim] = torch.tensor(weight)
    weights.weight[0, :, rows.dim] = torch.tensor(problem.bias)
    return rows, weights, Batch(rows, torch.arange(rows.n), *(generator_of(config.seed, i) for i in (1, 2)))


def gradient_of(problem, config: Config, *, pairs: bool = False, step: int = 0) -> np.ndarray:
    held, weights, batch = started(problem, config, pairs=pairs)
    found = weights.gradient(batch, step).numpy()
    weight = found[:, : held.dim]
    if config.rank:
        weight = weight @ held.rotation.T
    return np.concatenate([weight, found[:, [held.dim]]], axis=1)


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(expected).max() > 1e-6
    np.testing.assert_allclose(found, expected, atol=TOLERANCE * max(1.0, np.abs(expected).max()), rtol=0)


@pytest.mark.parametrize("upweighted", [False, True])
@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("penalty", [0.3, 40.0])
def test_irm_and_vrex_are_their_papers(seed: int, classes: int, penalty: float, upweighted: bool) -> None:
    problem = references.Problem(seed, classes)
    for method, reference in (("irm", references.irm), ("vrex", references.vrex)):
        config = Config(method=method, penalty=penalty, upweighted=upweighted)
        assert_close(gradient_of(problem, config), problem.gradient(reference(penalty), upweighted))


@pytest.mark.parametrize("upweighted", [False, True])
@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("seed", range(5))
def test_erm_and_groupdro_are_their_papers(seed: int, classes: int, upweighted: bool) -> None:
    problem = references.Problem(seed, classes)
    found = gradient_of(problem, Config(upweighted=upweighted))
    assert_close(found, problem.gradient(references.erm, upweighted))
    found = gradient_of(problem, Config(method="groupdro", eta=0.7, upweighted=upweighted))
    assert_close(found, problem.gradient(references.groupdro(0.7), upweighted))


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("seed", range(5))
def test_matchdg_penalises_the_logits_gap(seed: int, classes: int) -> None:
    problem = references.Problem(seed, classes)
    found = gradient_of(problem, Config(method="matchdg", penalty=13.0), pairs=True)
    assert_close(found, problem.gradient(references.matchdg(13.0, problem.delta)))


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("seed", range(5))
def test_ncm_is_the_gradient_on_projected_features(seed: int, classes: int) -> None:
    problem = references.Problem(seed, classes)
    basis = np.linalg.svd(problem.delta, full_matrices=False)[0][:, :3]
    problem.weight -= problem.weight @ basis @ basis.T
    found = gradient_of(problem, Config(method="ncm", rank=3), pairs=True)
    problem.features = problem.features - problem.features @ basis @ basis.T
    assert_close(found, problem.gradient(references.erm))


@pytest.mark.parametrize("p_sel", [0.0, 1.0])
@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("seed", range(5))
def test_lisa_mixes_features_and_labels(seed: int, classes: int, p_sel: float) -> None:
    problem = references.Problem(seed, classes)
    config = Config(method="lisa", p_sel=p_sel, alpha=1.5, seed=seed)
    _, _, batch = started(problem, config)
    _, (_, intra_label), (_, intra_domain) = batch.mixing
    partner = intra_label if p_sel else intra_domain
    same, other = (
        (problem.targets, problem.environments) if p_sel else (problem.environments, problem.targets)
    )
    assert (same[partner] == same).all()
    assert (other[partner] != other).all()
    mix = np.random.default_rng([seed, 1_500_000]).beta(1.5, 1.5, len(problem.targets))
    expected = problem.gradient(
        references.lisa(problem.features, classes, mix, partner.numpy(), problem.bias)
    )
    assert_close(gradient_of(problem, config), expected)


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("seed", range(3))
def test_fish_is_algorithm_1(seed: int, classes: int) -> None:
    problem = references.Problem(seed, classes)
    config = Config(method="fish", lr=0.05, weight_decay=0.01, meta_lr=0.3, seed=seed)
    held, weights, batch = started(problem, config)
    weights.step(batch, 0)

    weight = torch.tensor(problem.weight, requires_grad=True)
    bias = torch.tensor(problem.bias, requires_grad=True)
    inner = torch.optim.Adam([{"params": [weight], "weight_decay": 0.01}, {"params": [bias]}], lr=0.05)
    for environment, _ in batch.visits:
        own = problem.environments == environment
        inner.zero_grad()
        logits = torch.tensor(problem.features[own]) @ weight.T + bias
        references.losses(logits, torch.tensor(problem.targets[own])).mean().backward()
        inner.step()
    expected_weight = problem.weight + 0.3 * (weight.detach().numpy() - problem.weight)
    expected_bias = problem.bias + 0.3 * (bias.detach().numpy() - problem.bias)
    assert np.abs(expected_weight - problem.weight).max() > 1e-4
    np.testing.assert_allclose(weights.weight[0, :, : held.dim].numpy(), expected_weight, atol=1e-10)
    np.testing.assert_allclose(weights.weight[0, :, held.dim].numpy(), expected_bias, atol=1e-10)


def test_annealing_starts_the_penalty_and_rescales_the_decay() -> None:
    problem = references.Problem(0, 2)
    for method, reference in (("irm", references.irm), ("vrex", references.vrex)):
        config = Config(method=method, penalty=50.0, anneal=3, weight_decay=0.2)
        _, weights, batch = started(problem, config)
        before = weights.gradient(batch, 0).numpy().copy()
        expected = problem.gradient(reference(1.0))
        np.testing.assert_allclose(before[:, :8], expected, atol=1e-8)
        weights.gradient(batch, 2)
        assert float(weights.adam.decay) == pytest.approx(0.2)
        after = weights.gradient(batch, 3).numpy()
        np.testing.assert_allclose(after[:, :8], problem.gradient(reference(50.0)), atol=1e-8)
        assert float(weights.adam.decay) == pytest.approx(0.2 / 50)
