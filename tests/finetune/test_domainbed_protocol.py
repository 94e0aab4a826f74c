"""``--protocol domainbed`` against the updates of DomainBed's algorithms, with two outputs, by autograd."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ncm_cli.finetune import train
from ncm_cli.finetune.finetune import finetune
from ncm_cli.finetune.options import FinetuneOptions, checkpoint_files
from ncm_cli.images.embed import embed
from ncm_cli.images.options import EmbedOptions
from ncm_cli.images.weights import tuned_facts
from ncm_cli.probes.evaluate import evaluate
from ncm_cli.probes.options import EvalOptions
from ncm_cli.store.features import FeatureStore

MODEL = "domainbed:MNIST_CNN"
LR, BEGINS, META = 1e-3, 2, 0.3


def options_of(data: Path, output: Path, **more: Any) -> FinetuneOptions:
    given = {
        "source": data / "manifest.csv",
        "output": output,
        "model": MODEL,
        "random_init": True,
        "representation": 128,
        "image_size": 16,
        "protocol": "domainbed",
        "envs": "domain",
        "test": "split=test",
        "epochs": 1,
        "batch_size": 4,
        "lr": LR,
        "workers": "0",
    } | more
    return FinetuneOptions(**given)


class Reference:
    """DomainBed's update of each algorithm: one list entry (x, y) for each environment."""

    def __init__(self, method: str, network: torch.nn.Module) -> None:
        self.method, self.network = method, network
        self.inner: dict[str, Any] | None = None
        self.weights: Tensor | None = None
        self.steps = 0
        self.optimiser = torch.optim.Adam(network.parameters(), LR)

    def update(self, parts: list[tuple[Tensor, Tensor]]) -> None:
        if self.method == "fish":
            self._fish(parts)
            return
        losses = torch.stack([functional.cross_entropy(self.network(x), y) for x, y in parts])
        objective = losses.mean()
        penalty = 50.0 if self.steps >= BEGINS else 1.0
        if self.method == "irm":
            objective = losses.mean() + penalty * sum(self._irm(x, y) for x, y in parts) / len(parts)
        if self.method == "vrex":
            objective = losses.mean() + penalty * ((losses - losses.mean()) ** 2).mean()
        if self.method == "groupdro":
            weights = torch.ones(len(parts)).double() if self.weights is None else self.weights
            weights = weights * (0.3 * losses.detach()).exp()
            self.weights = weights / weights.sum()
            objective = (losses * self.weights).sum()
        if self.method in ("irm", "vrex") and self.steps == BEGINS:
            self.optimiser = torch.optim.Adam(self.network.parameters(), LR)
        self.optimiser.zero_grad()
        objective.backward()
        self.optimiser.step()
        self.steps += 1

    def _irm(self, x: Tensor, y: Tensor) -> Tensor:
        scale, logits = torch.ones((), dtype=torch.float64, requires_grad=True), self.network(x)
        slopes = [
            torch.autograd.grad(
                functional.cross_entropy(logits[half::2] * scale, y[half::2]), scale, create_graph=True
            )[0]
            for half in (0, 1)
        ]
        return slopes[0] * slopes[1]

    def _fish(self, parts: list[tuple[Tensor, Tensor]]) -> None:
        clone = copy.deepcopy(self.network)
        optimiser = torch.optim.Adam(clone.parameters(), LR)
        if self.inner is not None:
            optimiser.load_state_dict(self.inner)
        for x, y in parts:
            optimiser.zero_grad()
            functional.cross_entropy(clone(x), y).backward()
            optimiser.step()
        self.inner = optimiser.state_dict()
        with torch.no_grad():
            for mine, inner in zip(self.network.parameters(), clone.parameters(), strict=True):
                mine += META * (inner - mine)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["erm", "irm", "vrex", "groupdro", "fish"])
def test_an_epoch_is_that_of_domainbeds_algorithm(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    seen: dict[str, Any] = {"batches": []}
    plain_draw, plain_epoch = train.drawn_batches, train.Training.epoch

    def draw(*given: Any) -> Any:
        for chosen in plain_draw(*given):
            seen["batches"].append(chosen)
            yield chosen

    def epoch(self: train.Training, number: int, pictures: Any, task: Any) -> Any:
        # In float64: Adam makes whole steps of what is rounding noise in float32.
        seen["training"], seen["pictures"] = self, pictures
        both = torch.nn.Sequential(self.module, self.head).double()
        seen["before"] = copy.deepcopy(both)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            facts = plain_epoch(self, number, pictures, task)
        seen["after"] = copy.deepcopy(both)
        both.float()
        return facts

    monkeypatch.setattr(train, "drawn_batches", draw)
    monkeypatch.setattr(train.Training, "epoch", epoch)
    given: dict[str, Any] = {
        "irm": {"penalty": 50.0, "anneal": BEGINS},
        "vrex": {"penalty": 50.0, "anneal": BEGINS},
        "groupdro": {"eta": 0.3},
        "fish": {"meta_lr": META},
    }.get(method, {})
    finetune(options_of(data, tmp_path / "run.safetensors", method=method, weight_decay=0.0, **given))
    training, network = seen["training"], seen["before"].train()
    start = [parameter.detach().clone() for parameter in network.parameters()]
    expected = Reference(method, network)
    labels, domains = (
        torch.as_tensor(np.asarray(codes)) for codes in (training.train.y, training.train.codes["envs"])
    )
    assert len(seen["batches"]) == 4
    for chosen in seen["batches"]:
        (items,) = seen["pictures"].batches([training.at["train"][chosen.numpy()]])
        x = torch.from_numpy(np.stack(items)).permute(0, 3, 1, 2).double() / 255
        assert [int((domains[chosen] == domain).sum()) for domain in range(3)] == [4, 4, 4]
        parts = [domains[chosen] == domain for domain in range(3)]
        expected.update([(x[part], labels[chosen][part]) for part in parts])
    moved = 0.0
    for mine, theirs, first in zip(seen["after"].parameters(), network.parameters(), start, strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-9), (mine - theirs).abs().max()
        moved = max(moved, float((mine.detach() - first).abs().max()))
    assert moved > LR / 2


@pytest.mark.slow
@pytest.mark.parametrize("representation", [128, 6])
def test_the_checkpoint_gives_the_features_that_were_evaluated(
    data: Path, tmp_path: Path, representation: int
) -> None:
    output, store = tmp_path / "run.safetensors", tmp_path / "run.h5"
    given = {
        "pairs": data / "pairs.h5",
        "penalty": 1.0,
        "representation": representation,
        "groups": "label,color",
    }
    body = finetune(options_of(data, output, **given))
    checkpoint, probe, _ = checkpoint_files(output)
    facts = tuned_facts(checkpoint)
    assert (facts["representation"], facts["image_size"]) == (representation, 16)
    embed(EmbedOptions(source=data / "manifest.csv", model=MODEL, pretrained=str(checkpoint), output=store))
    with FeatureStore(store) as features:
        assert features.dim == representation
        assert features.fingerprint == body["fingerprint"]
    for part, own in zip(("val", "test"), body["evals"], strict=True):
        again = evaluate(
            EvalOptions(probe=probe, features=store, where=f"split={part}", groups="label,color")
        )
        assert own["accuracy"] == again["accuracy"]
        assert own["log_loss"] == pytest.approx(again["log_loss"], rel=1e-5)
    stamp = checkpoint.read_bytes()
    assert finetune(options_of(data, output, fresh=True, **given))["written"]
    assert checkpoint.read_bytes() == stamp, "the seed decides all"
