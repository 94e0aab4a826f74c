"""What goes back through a network against autograd of each method's formula, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from ncm_cli.finetune.train import Objective, best_epochs, pair_batches
from ncm_cli.solvers.batches import Batch, DeviceRows
from ncm_cli.solvers.methods import Config
from ncm_cli.solvers.training_set import TrainingSet

N, PAIRS = 48, 10


def _risk(logits, y, w):
    if logits.shape[1] == 1:
        losses = functional.binary_cross_entropy_with_logits(logits[:, 0], y.double(), reduction="none")
    else:
        losses = functional.cross_entropy(logits, y, reduction="none")
    return (losses * w).sum() / w.sum()


def _risks(logits, y, w, groups):
    return torch.stack([_risk(logits[groups == g], y[groups == g], w[groups == g]) for g in groups.unique()])


def _formula(method, logits, y, w, groups, a, b):
    """The method's objective, as its paper writes it."""
    if method == "irm":  # Arjovsky et al. (2019): mean_e R_e + penalty · mean_e (∂R_e(s·z)/∂s at 1)²
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        risks = _risks(logits * scale, y, w, groups)
        slopes = [torch.autograd.grad(risk, scale, create_graph=True)[0] for risk in risks]
        return risks.mean() + 7 * (torch.stack(slopes) ** 2).mean()
    if method == "vrex":  # Krueger et al. (2021), eq. 8: the mean risk + penalty · the risks' variance
        risks = _risks(logits, y, w, groups)
        return risks.mean() + 7 * risks.var(correction=0)
    if method == "groupdro":  # Sagawa et al. (2020), algorithm 1, from equal weights
        risks = _risks(logits, y, w, groups)
        return (torch.softmax(0.3 * risks.detach(), 0) * risks).sum()
    penalty = 7 * ((a - b) ** 2).mean() if method in ("ncm", "matchdg") else 0
    return _risk(logits, y, w) + penalty


@pytest.mark.parametrize("upweighted", [False, True])
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("method", ["erm", "ncm", "matchdg", "irm", "vrex", "groupdro"])
def test_gradient_is_that_of_the_formula(method: str, classes: int, upweighted: bool) -> None:
    torch.manual_seed(classes)
    rng = np.random.default_rng(classes)
    y, groups, weights = rng.permutation(N) % classes, rng.permutation(N) % 3, rng.uniform(0.2, 3, N)
    part = TrainingSet(X=np.zeros((N, 1)), y=y, n_classes=classes, codes={"envs": groups}, weights=weights)
    rows = DeviceRows(part, "cpu")
    body = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 5)).double()
    head = torch.nn.Linear(5, 1 if classes == 2 else classes).double()
    x, pairs = torch.randn(N, 6).double(), torch.randn(2, PAIRS, 6).double()
    chosen = torch.from_numpy(rng.permutation(N)[:32])

    def gradients(value: torch.Tensor) -> list[torch.Tensor]:
        return torch.autograd.grad(value, [*body.parameters(), *head.parameters()])

    def parts() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return head(body(x[chosen])), body(pairs[0]), body(pairs[1])

    objective = Objective(
        Config(method=method, upweighted=upweighted, penalty=7, eta=0.3), rows, protocol="common"
    )
    logits, a, b = parts()
    beside = (a, b) if method in ("ncm", "matchdg") else None
    found, told = objective(logits, Batch(rows, chosen, torch.Generator(), None), beside)
    logits, a, b = parts()
    w = torch.from_numpy(weights if upweighted else np.ones(N))[chosen]
    truth = [torch.from_numpy(codes)[chosen] for codes in (y, groups)]
    expected = _formula(method, logits, truth[0], w, truth[1], a, b)
    for mine, theirs in zip(gradients(found), gradients(expected), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-12)
    assert float(told[0]) == pytest.approx(_risk(logits, truth[0], w).item())
    assert float(told[1]) == pytest.approx(((a - b) ** 2).mean().item() if beside else 0)


def test_every_pair_comes_as_often_as_any_other_or_once_more() -> None:
    pairs = np.arange(14).reshape(7, 2)
    batches = pair_batches(pairs, 4, 9, torch.Generator().manual_seed(0))
    counts = np.bincount(np.concatenate(batches)[:, 0] // 2, minlength=7)
    assert {len(own) for own in batches} == {4}
    assert set(counts.tolist()) == {5, 6}
    assert all(len(np.unique(own)) == 8 for own in batches[:1])
    assert len(pair_batches(pairs, 100, 2, torch.Generator())[0]) == 7


@pytest.mark.parametrize("score", ["bound_01", "cell_error"])
def test_an_epoch_of_one_answer_is_kept_only_where_there_is_no_other(score: str) -> None:
    """Flips of a constant are none, so its bound may be the least."""
    told = {"val_log_loss": 0.6, "val_accuracy": 0.55, "bound_01": 0.5}
    history = [
        told | {score: 0.46, "val_answers": 2.0},
        told | {score: 0.30, "val_answers": 1.0, "val_accuracy": 0.6},
        told | {score: 0.45, "val_answers": 2.0},
    ]
    assert best_epochs(history)["bound"] == 2
    assert best_epochs(history)["in-domain"] == 1, "other rules look at other things"
    assert best_epochs([one | {"val_answers": 1.0} for one in history])["bound"] == 1
    assert best_epochs([one | {"val_answers": 2.0} for one in history])["bound"] == 1


def test_epochs_are_compared_by_the_cell_error_where_it_is_known() -> None:
    known = [(0.40, 0.30, 0.6), (0.35, 0.32, 0.6), (0.50, 0.30, 0.5)]
    names = ("bound_01", "cell_error", "cell_log_loss")
    history = [dict(zip(names, one, strict=True)) | {"val_log_loss": 0.1 * i} for i, one in enumerate(known)]
    assert best_epochs(history)["bound"] == 2, "ties by the log loss with every cell weighted equally"
    assert best_epochs([{**one, "cell_error": float("nan")} for one in history])["bound"] == 1
