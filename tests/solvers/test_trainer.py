"""The batched trainer against torch's optimisers, against itself alone, and against its promises."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn import functional

from ncm_cli.errors import InputError, UsageError
from ncm_cli.solvers.batches import epoch_batches, generator_of
from ncm_cli.solvers.methods import Config
from ncm_cli.solvers.projection import Spectrum
from ncm_cli.solvers.trainer import Adam, Schedule, train
from ncm_cli.solvers.training_set import TrainingSet
from ncm_cli.store.roles import group_weights

TRAINED = ("erm", "ncm", "irm", "vrex", "groupdro", "fish", "lisa", "matchdg")


def make_data(
    seed: int = 0, *, n: int = 300, d: int = 12, classes: int = 2, pairs: bool = True
) -> TrainingSet:
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((n, d))
    scores = features @ rng.standard_normal((d, classes)) + rng.standard_normal((n, classes))
    basis = np.linalg.qr(rng.standard_normal((d, 4)))[0]
    return TrainingSet(
        X=features,
        y=scores.argmax(1),
        n_classes=classes,
        codes={"envs": rng.integers(0, 2, n)},
        weights=rng.uniform(0.5, 2, n),
        spectrum=Spectrum(np.sqrt([2.0, 1.0, 0.5, 0.1]), basis, 4, 0.0, 0) if pairs else None,
        pairs=1,
    )


def config_of(method: str, **changes: object) -> Config:
    base = Config(method=method, lr=0.02, weight_decay=1e-3, penalty=20.0, anneal=3, eta=0.1)
    return dataclasses.replace(base, rank=2 if method == "ncm" else 0, **changes)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_the_optimiser_is_torchs_step_by_step(decay: float) -> None:
    rng = np.random.default_rng(1)
    start = torch.tensor(rng.standard_normal((5, 7)))
    rates = torch.tensor(rng.uniform(1e-3, 1e-1, (5, 1)))
    decays = torch.tensor(rng.uniform(0, decay, (5, 1))) if decay else None
    ours = start.clone()
    mine = Adam(ours, rates, decays, 6)
    theirs = []
    for row in range(5):
        weight = start[row, :6].clone().requires_grad_()
        bias = start[row, 6:].clone().requires_grad_()
        of_row = 0.0 if decays is None else float(decays[row])
        groups = [{"params": [weight], "weight_decay": of_row}, {"params": [bias]}]
        theirs.append((weight, bias, torch.optim.Adam(groups, lr=float(rates[row]))))
    for _ in range(50):
        gradient = torch.tensor(rng.standard_normal((5, 7)))
        for row, (weight, bias, made) in enumerate(theirs):
            weight.grad, bias.grad = gradient[row, :6].clone(), gradient[row, 6:].clone()
            made.step()
        mine.step(gradient.clone())
        expected = torch.stack([torch.cat([weight, bias]).detach() for weight, bias, _ in theirs])
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)
    assert (ours - start).abs().max() > 0.01


def plain_loop(
    config: Config, data: TrainingSet, epochs: int, batch_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """ERM or the pair penalty as anyone writes it in torch, on the trainer's order of rows."""
    rows = torch.tensor(data.X)
    weight = torch.zeros(data.logits, rows.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(data.logits, dtype=torch.float64, requires_grad=True)
    groups = [{"params": [weight], "weight_decay": config.weight_decay}, {"params": [bias]}]
    optimizer = torch.optim.Adam(groups, lr=config.lr)
    targets = torch.tensor(data.y)
    generator = generator_of(config.seed, 0)
    strata = None
    if "envs" in data.codes:
        strata = torch.tensor(data.codes["envs"])
    for _ in range(epochs):
        for own in epoch_batches(strata, len(rows), batch_size, generator):
            optimizer.zero_grad()
            logits = rows[own] @ weight.T + bias
            losses = (
                functional.binary_cross_entropy_with_logits(
                    logits[:, 0], targets[own].double(), reduction="none"
                )
                if data.logits == 1
                else functional.cross_entropy(logits, targets[own], reduction="none")
            )
            weights = torch.tensor(data.weights)[own] if config.upweighted else torch.ones(len(own))
            loss = (weights * losses).sum() / weights.sum()
            if config.method == "matchdg":
                moment = torch.tensor(data.basis() * data.moments @ data.basis().T)
                loss = loss + config.penalty * torch.trace(weight @ moment @ weight.T)
            loss.backward()
            optimizer.step()
    return weight.detach().numpy(), bias.detach().numpy()


@pytest.mark.parametrize("classes", [2, 3])
def test_erm_is_a_plain_torch_loop(classes: int) -> None:
    data = make_data(3, classes=classes, pairs=False)
    config = Config(lr=0.01, weight_decay=0.02, seed=5)
    found = train([config], data, Schedule(epochs=4, batch_size=64))[0]
    weight, bias = plain_loop(config, data, 4, 64)
    np.testing.assert_allclose(found.weight, weight, atol=1e-10)
    np.testing.assert_allclose(found.bias, bias, atol=1e-10)
    assert found.iterations == 4 * 5


@pytest.mark.parametrize("classes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_configuration_does_not_depend_on_its_neighbours(classes: int) -> None:
    data = make_data(4, classes=classes)
    schedule = Schedule(epochs=6, batch_size=50)
    mine = [config_of(method, seed=2) for method in TRAINED]
    crowd = [
        config_of(method, seed=seed, lr=lr, p_sel=p_sel, upweighted=up)
        for method in TRAINED
        for seed in (1, 2)
        for lr, p_sel in ((0.001, 0.2), (0.05, 0.9))
        for up in (False, True)
    ]
    rng = np.random.default_rng(0)
    mixed = [*mine, *crowd]
    order = rng.permutation(len(mixed))
    together = train([mixed[i] for i in order], data, schedule)
    for position, config in enumerate(mine):
        alone = train([config], data, schedule)[0]
        found = together[int(np.flatnonzero(order == position)[0])]
        assert (found.rank, found.weight_decay) == (config.rank, config.weight_decay)
        assert np.abs(alone.weight).max() > 1e-3
        np.testing.assert_allclose(found.weight, alone.weight, atol=1e-10, err_msg=config.method)
        np.testing.assert_allclose(found.bias, alone.bias, atol=1e-10, err_msg=config.method)


def test_rounding_of_a_zero_gradient_is_not_trained_on() -> None:
    """Balanced weights make the bias's first gradient zero; of noise in its place Adam makes a full step."""
    rng = np.random.default_rng(16)
    features = rng.standard_normal((1000, 6))
    targets = (features[:, 0] + rng.standard_normal(1000) > 0.5).astype(int)
    data = TrainingSet(X=features, y=targets, n_classes=2, weights=group_weights(targets))
    configs = [Config(lr=0.1 + 0.01 * i, upweighted=True) for i in range(7)]
    schedule = Schedule(epochs=60, batch_size=0)
    together = train(configs, data, schedule)
    for config, found in zip(configs, together, strict=True):
        weight, bias = plain_loop(config, data, 60, 0)
        alone = train([config], data, schedule)[0]
        for other in ((weight, bias), (alone.weight, alone.bias)):
            np.testing.assert_allclose(found.weight, other[0], atol=1e-9)
            np.testing.assert_allclose(found.bias, other[1], atol=1e-9)


def test_pairs_change_no_method_but_those_that_use_them() -> None:
    data = make_data(17)
    bare = dataclasses.replace(data, spectrum=None)
    schedule = Schedule(epochs=6, batch_size=50)
    configs = [config_of(method) for method in ("erm", "irm", "vrex", "groupdro", "fish", "lisa")]
    every = train([*configs, config_of("ncm"), config_of("matchdg")], data, schedule)
    for config, with_others in zip(configs, every, strict=False):
        with_pairs, without = (train([config], given, schedule)[0] for given in (data, bare))
        assert with_pairs.weight.tobytes() == without.weight.tobytes(), config.method
        np.testing.assert_allclose(with_others.weight, without.weight, atol=1e-10, err_msg=config.method)
    weight, bias = plain_loop(config_of("matchdg"), data, 6, 50)
    np.testing.assert_allclose(every[-1].weight, weight, atol=1e-10)
    np.testing.assert_allclose(every[-1].bias, bias, atol=1e-10)


def test_same_seed_same_bits_and_another_seed_another_order() -> None:
    data = make_data(5)
    configs = [config_of(method, seed=seed) for method in TRAINED for seed in (0, 1)]
    torch.manual_seed(123)
    first = train(configs, data, Schedule(epochs=3, batch_size=50))
    state = torch.get_rng_state()
    torch.manual_seed(9)
    np.random.default_rng(7).random(3)
    second = train(configs, data, Schedule(epochs=3, batch_size=50))
    for a, b in zip(first, second, strict=True):
        assert a.weight.tobytes() == b.weight.tobytes()
        assert a.bias.tobytes() == b.bias.tobytes()
    for a, b in zip(first[::2], first[1::2], strict=True):
        assert not np.array_equal(a.weight, b.weight)
    torch.manual_seed(123)
    assert torch.equal(state, torch.get_rng_state()), "the global generator was used"


def test_rank_zero_is_erm_and_every_rank_is_orthogonal() -> None:
    data = make_data(6)
    schedule = Schedule(epochs=5, batch_size=64)
    erm, *path = train([Config(), *(Config(method="ncm", rank=rank) for rank in range(5))], data, schedule)
    assert erm.weight.tobytes() == path[0].weight.tobytes()
    for rank, found in enumerate(path):
        size = np.linalg.norm(found.weight)
        assert size > 0
        assert np.abs(found.weight @ data.basis(rank)).max(initial=0) < 1e-12 * max(size, 1)
    assert np.abs(erm.weight @ data.basis()).max() > 1e-3


def test_ncm_is_erm_on_projected_features() -> None:
    data = make_data(7)
    schedule = Schedule(epochs=300, batch_size=0)
    found = train([Config(method="ncm", rank=3, lr=0.05, weight_decay=0.1)], data, schedule)[0]
    basis = data.basis(3)
    flat = dataclasses.replace(data, X=data.X - data.X @ basis @ basis.T)
    other = train([Config(lr=0.05, weight_decay=0.1)], flat, schedule)[0]
    np.testing.assert_allclose(found.weight, other.weight, atol=1e-4)


def test_matchdg_approaches_ncm_as_its_penalty_grows() -> None:
    data = make_data(8)
    configs = [Config(method="matchdg", penalty=penalty, lr=0.02) for penalty in (0.0, 1.0, 100.0, 1e5)]
    found = train(configs, data, Schedule(epochs=200, batch_size=0))
    gaps = [float(np.abs(one.weight @ data.basis()).max()) for one in found]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 0.05
    assert gaps[-1] < 1e-3


def test_upweighting_counts_groups_alike() -> None:
    groups = np.array([0] * 90 + [3] * 10)
    weights = group_weights(groups)
    assert weights.mean() == pytest.approx(1)
    assert weights[groups == 0].sum() == pytest.approx(weights[groups == 3].sum())
    rng = np.random.default_rng(0)
    data = TrainingSet(
        X=rng.standard_normal((100, 3)),
        y=(groups > 0).astype(int),
        n_classes=2,
        weights=weights,
    )
    plain, weighted = train(
        [Config(lr=0.05), Config(lr=0.05, upweighted=True)], data, Schedule(epochs=300, batch_size=0)
    )
    # Without signal the bias tells the classes' log odds: log(10/90), and 0 when they count alike.
    assert plain.bias[0] < -1.5
    assert abs(weighted.bias[0]) < 0.5


def test_a_diverged_configuration_is_told_and_harms_no_other() -> None:
    data = make_data(9, classes=3)
    schedule = Schedule(epochs=3, batch_size=50)
    good, bad = config_of("erm"), config_of("matchdg", penalty=1e300, lr=1e300)
    found = train([good, bad], data, schedule)
    assert [one.converged for one in found] == [True, False]
    np.testing.assert_allclose(found[0].weight, train([good], data, schedule)[0].weight, atol=1e-6)


@pytest.mark.parametrize("method", ["irm", "vrex", "matchdg", "groupdro"])
@pytest.mark.parametrize("classes", [2, 5])
def test_huge_penalties_stay_finite(method: str, classes: int) -> None:
    data = make_data(10, classes=classes)
    data = dataclasses.replace(data, X=data.X * 30)
    found = train(
        [Config(method=method, penalty=1e5, anneal=2, lr=lr, eta=10.0) for lr in (1e-4, 1e-1)],
        data,
        Schedule(epochs=20, batch_size=50),
    )
    assert all(one.converged for one in found)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["irm", "vrex"])
def test_invariance_penalties_do_what_they_are_for(method: str) -> None:
    """Two environments disagree on one feature's sign; the penalty takes weight off it."""
    rng = np.random.default_rng(11)
    n = 2000
    y = rng.integers(0, 2, n)
    environments = rng.integers(0, 2, n)
    sign = 2 * y - 1
    stable = sign + 2 * rng.standard_normal(n)
    agrees = np.where(environments == 0, 0.95, 0.7)
    spurious = sign * np.where(rng.random(n) < agrees, 1, -1)
    data = TrainingSet(X=np.stack([stable, spurious], 1), y=y, n_classes=2, codes={"envs": environments})
    erm, robust = train(
        [Config(lr=0.01), Config(method=method, penalty=1e3, anneal=200, lr=0.01)],
        data,
        Schedule(epochs=800, batch_size=0),
    )
    share = [abs(one.weight[0, 1]) / np.abs(one.weight).sum() for one in (erm, robust)]
    assert share[0] > 0.6
    assert share[1] < share[0] - 0.2


def test_refusals_name_what_is_missing() -> None:
    data = make_data(12)
    bare = dataclasses.replace(data, codes={}, spectrum=None)
    for method in ("irm", "vrex", "groupdro", "fish", "lisa"):
        with pytest.raises(InputError, match=f"{method} needs environments"):
            train([Config(method=method)], bare)
    with pytest.raises(InputError, match="matchdg needs pairs"):
        train([Config(method="matchdg")], bare)
    with pytest.raises(InputError, match="rank 5 is more than the pairs span"):
        train([Config(method="ncm", rank=5)], data)
    with pytest.raises(UsageError, match="no method named 'imr'"):
        Config(method="imr")
    with pytest.raises(UsageError, match=r"lr can't be -1"):
        Config(lr=-1)
    with pytest.raises(UsageError, match=r"p_sel can't be 1\.5"):
        Config(p_sel=1.5)
    with pytest.raises(InputError, match="one class only"):
        train([Config()], dataclasses.replace(data, n_classes=1))
    with pytest.raises(InputError, match="one environment only"):
        train([Config()], dataclasses.replace(data, codes={"envs": np.zeros(300, int)}))


def test_not_finite_rows_are_refused_before_training() -> None:
    """numpy/numpy#5588."""
    data = make_data(13)
    data.X[7, 2] = np.nan
    with pytest.raises(InputError, match="NaN or infinite"):
        train([Config()], data)
    data.X[7, 2] = np.inf
    with pytest.raises(InputError, match="NaN or infinite"):
        train([Config()], data)


def test_observer_sees_every_epoch_in_the_given_coordinates() -> None:
    data = make_data(14)
    seen: list[tuple[int, list[int]]] = []
    last: dict[int, np.ndarray] = {}
    done: list[int] = []

    def observe(epoch: int, indices: list[int], weight: np.ndarray, bias: np.ndarray) -> None:
        seen.append((epoch, indices))
        for row, index in enumerate(indices):
            last[index] = weight[row].copy()

    configs = [config_of("fish", seed=1), config_of("ncm", seed=0), config_of("erm", seed=1)]
    found = train(
        configs,
        data,
        Schedule(epochs=7, batch_size=100),
        observe=observe,
        advance=done.append,
    )
    assert seen == [(e, own) for own in ([0, 2], [1]) for e in range(1, 8)]
    for index, one in enumerate(found):
        assert (one.rank, one.weight_decay) == (configs[index].rank, configs[index].weight_decay)
        np.testing.assert_array_equal(one.weight, last[index])
    assert sum(done) == 3 * 7


def test_memory_of_many_configurations_is_one_tensor() -> None:
    """460 probes of 64 features train in one call, each with its own learning rate."""
    data = make_data(15, d=64, pairs=False)
    rates = np.geomspace(1e-5, 1e-1, 460)
    found = train([Config(lr=float(rate)) for rate in rates], data, Schedule(epochs=2, batch_size=100))
    sizes = [float(np.linalg.norm(one.weight)) for one in found]
    assert np.all(np.diff(sizes) > 0)


def test_lisa_breaks_a_correlation_only_across_the_attribute_itself() -> None:
    """Two environments agree with the attribute's sign (.8 and .9): mixing one with the other keeps it."""
    rng = np.random.default_rng(0)
    labels, environments = rng.integers(0, 2, (2, 2000))
    attribute = labels ^ (rng.random(2000) < np.where(environments, 0.2, 0.1))
    features = rng.standard_normal((2000, 2)) + 2 * np.stack([labels, attribute], axis=1)
    config = Config(method="lisa", lr=0.05, weight_decay=0.0, p_sel=1.0)
    leans = {}
    for name, domains in (("environments", environments), ("attribute", attribute)):
        data = TrainingSet(X=features, y=labels, n_classes=2, codes={"envs": domains})
        leans[name] = np.abs(train([config], data, Schedule(epochs=10))[0].weight[0])
    assert leans["environments"][1] > 0.5 * leans["environments"][0]
    assert leans["attribute"][1] < 0.1 * leans["attribute"][0]
