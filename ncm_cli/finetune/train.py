"""Trains a network end to end, by the objectives of ``ncm sweep``, perhaps with a penalty on pairs.

The network is timm's or DomainBed's; its classifier is replaced by a linear layer to the representation, and
a linear head maps that to logits. The data term is one of `ncm_cli.solvers.objectives`, whose derivative with
respect to the logits is propagated back through the network. ncm and matchdg add penalty · the mean squared
difference of the representations of pairs, a mean over pairs and the representation's width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ncm_cli.baselines.choice import METRICS, best_checkpoints
from ncm_cli.blocks import Array, Codes, Mask
from ncm_cli.errors import InputError
from ncm_cli.finetune.options import FinetuneOptions
from ncm_cli.finetune.rows import ManifestRows, TrainingPictures
from ncm_cli.images.network import TorchEncoder
from ncm_cli.images.request import EncoderRequest, Preprocess
from ncm_cli.probes import metrics
from ncm_cli.probes.metrics import PairRows, Rows, decide
from ncm_cli.probes.problem import Pairs, Problem, RawRows
from ncm_cli.probes.rules import RULES, SCORES
from ncm_cli.probes.selection import cell_bound_facts, cell_facts, facts, store_metric
from ncm_cli.progress import Task
from ncm_cli.solvers.batches import (
    Batch,
    DeviceRows,
    drawn_batches,
    epoch_batches,
    generator_of,
    partners,
)
from ncm_cli.solvers.device import exact, is_short_of_memory, own_random_numbers
from ncm_cli.solvers.folds import Fold
from ncm_cli.solvers.methods import Config, Protocol
from ncm_cli.solvers.objectives import OBJECTIVES, Erm, log_losses

Epoch = dict[str, float]
"""The metrics after an epoch, by names of `METRICS` and a few more, without those that aren't known."""


def config_of(options: FinetuneOptions) -> Config:
    """The method and its hyper-parameters, in the form of ``ncm sweep``."""
    names = ("lr", "weight_decay", "anneal", "eta", "meta_lr", "seed")
    return Config(
        method=options.chosen_method,
        upweighted=options.upweight is not None,
        penalty=options.chosen_penalty,
        **{name: getattr(options, name) for name in names},
    )


def network_request(options: FinetuneOptions) -> EncoderRequest:
    """The network to start from."""
    return EncoderRequest(
        model=options.model,
        pretrained=None if options.random_init else options.pretrained,
        precision=options.precision,
        random_init=options.random_init,
        seed=options.seed,
        image_size=options.image_size,
    )


class Objective:
    """The loss of a step: a scalar with the method's gradient, and the terms that are reported.

    For irm and vrex the loss is mean_e R_e + penalty · the squared slopes, or the risks' variance; it isn't
    divided by the penalty as `ncm_cli.solvers.objectives` does for Adam, whose steps don't depend on the size
    of the gradient. fish has erm's loss, on the rows of one environment at a time.
    """

    def __init__(self, config: Config, rows: DeviceRows, *, protocol: Protocol) -> None:
        self.config, self.rows = config, rows
        self.data_term = OBJECTIVES.get(config.method, Erm)([config], rows, protocol=protocol)
        self.steps = 0
        self.penalty_begins = False
        """Whether the penalty took the place of 1 at the last step."""

    def __call__(
        self, logits: Tensor, batch: Batch, pairs: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """The scalar to differentiate, and (2,) the mean log loss and the pairs' mean squared difference.

        Parameters
        ----------
        logits
            (B, C) of the batch's rows.
        pairs
            (m, width) representations of the first and the second members.
        """
        self.penalty_begins = self.data_term.begin(self.steps) is not None
        self.steps += 1
        residual = logits.detach().to(torch.float64, copy=True)[:, None]
        share = batch.shares("pooled", self.config.upweighted)
        terms = [(log_losses(residual, batch.targets) * share).sum()]
        self.data_term.residual_(residual, batch)
        objective = (logits * (residual[:, 0] / self.data_term.scale).to(logits.dtype)).sum()
        if pairs is not None:
            difference = functional.mse_loss(*pairs)
            objective = objective + self.config.penalty * difference
            terms.append(difference.detach().double())
        return objective, torch.stack([*terms, *[torch.zeros_like(terms[0])] * (2 - len(terms))])

    def state(self) -> dict[str, Any]:
        """The state that changes from step to step."""
        tensors = {name: value for name, value in vars(self.data_term).items() if isinstance(value, Tensor)}
        return {"steps": self.steps, "data_term": tensors}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a `state`."""
        self.steps = state["steps"]
        for name, value in state["data_term"].items():
            setattr(self.data_term, name, value.to(self.rows.device))


def pair_batches(pairs: Codes, size: int, steps: int, generator: torch.Generator) -> list[Codes]:
    """Up to ``size`` of the (k, 2) pairs for each step; the uses of any two pairs differ by at most 1."""
    size = min(size, len(pairs))
    shuffled = [
        torch.randperm(len(pairs), generator=generator) for _ in range(-(-size * steps // len(pairs)))
    ]
    order = torch.cat(shuffled).numpy()[: size * steps].reshape(steps, size)
    return [pairs[positions] for positions in order]


def _require_all_stores(pairs: Pairs, fold: Fold) -> None:
    """Refuse a pair store if the held-out fold measures none of its pairs."""
    for at, path in enumerate(pairs.paths):
        if not fold.measured[pairs.kind == at].any():
            raise InputError(
                "the fold of pairs that is held out for the bound has no pair of one store",
                where=path,
                found=f"{int(pairs.usable[pairs.kind == at].sum()):,} pairs",
                fix="more pairs of this store, or --folds 2; --folds 0: no bound",
            )


class Training:
    """A network in training: runs epochs, and measures the network after each.

    Attributes
    ----------
    network
        The network as an `Encoder` of representations.
    head
        The linear layer from representations to logits. With ``--protocol domainbed`` two classes have two
        outputs, whose difference is the one logit: log losses, and slopes with respect to a scale, are those
        of the softmax of the two.
    """

    module: Any

    def __init__(
        self,
        options: FinetuneOptions,
        problem: Problem,
        rows: ManifestRows,
        network: TorchEncoder,
    ) -> None:
        self.options, self.network, self.problem = options, network, problem
        self.fold: Fold | None = None
        if problem.pairs is not None and (options.folds or problem.pairs.held_out.any()):
            self.fold = problem.pairs.folds(options.folds, options.seed)[0]
            _require_all_stores(problem.pairs, self.fold)
        self.train = problem.rows()
        if self.fold is not None:
            self.train = self.train.take(~np.isin(self.train.node, self.fold.untrained_nodes))
        training = problem.training_set(self.train, None)
        self.domainbed = options.protocol == "domainbed"
        self.objective = Objective(
            config_of(options),
            DeviceRows(training, network.device),
            protocol="domainbed" if self.domainbed else "common",
        )
        self._place(rows)
        self.module = network.model.module
        with own_random_numbers(options.seed):
            if self.module.num_classes != options.representation:
                self.module.reset_classifier(options.representation)
            outputs = training.n_classes if self.domainbed else training.logits
            self.head = torch.nn.Linear(options.representation, outputs)
        self.module.to(network.device)
        self.head.to(network.device)
        self._require_size()
        self.parameters = [*self.module.parameters(), *self.head.parameters()]
        self.optimiser = self._new_optimiser()
        kind = network.device.partition(":")[0]
        self.scaler = torch.amp.GradScaler(kind, enabled=options.precision == "fp16")

    def _new_optimiser(self) -> torch.optim.Optimizer:
        options = self.options
        if self.domainbed:
            return torch.optim.Adam(self.parameters, options.lr, weight_decay=options.weight_decay)
        return torch.optim.SGD(
            self.parameters, options.lr, momentum=options.momentum, weight_decay=options.weight_decay
        )

    def _require_size(self) -> None:
        """Refuse a size of pictures that the network can't take, before pictures are read."""
        height, width = self.network.model.size
        blank = torch.zeros(1, 3, height, width, device=self.network.device)
        try:
            with torch.no_grad():
                self.module.eval()(blank)
        except (AssertionError, RuntimeError) as error:  # vision transformers take one size only
            raise InputError(
                f"{self.options.model} takes no pictures of {height} × {width}",
                found=str(error).partition("\n")[0],
                fix="another --image-size, or none for its own",
            ) from error

    def _place(self, rows: ManifestRows) -> None:
        """Find the positions of rows and pairs in the manifest, and the sizes of groups in training."""
        problem, pairs = self.problem, self.problem.pairs
        self.at = {"train": rows.positions(self.train.ids)}
        for part, split_rows in (("val", problem.val), ("test", problem.test)):
            if split_rows is not None:
                self.at[part] = rows.positions(split_rows.ids)
        members = np.zeros((0, 2), np.int64)
        if pairs is not None:
            members = np.stack([rows.positions(ids) for ids in pairs.ids], axis=1)
        none = np.zeros(len(members), dtype=bool)
        self.measured_pairs: Mask = self.fold.measured if self.fold else none
        """(k,) the pairs that are measured."""
        self.trained_pairs: Mask = none
        """(k,) the pairs that are trained on."""
        self.untrained: RawRows | None = None
        if self.fold is not None and problem.cells and problem.members is not None:
            self.untrained = problem.members.take(np.isin(problem.members.node, self.fold.untrained_nodes))
        self.untrained_at = members[:0, 0] if self.untrained is None else rows.positions(self.untrained.ids)
        if pairs is not None and self.options.chosen_method == "ncm":
            self.trained_pairs = pairs.usable & (self.fold.basis if self.fold else True)
        self.pairs, self.measured = members[self.trained_pairs], members[self.measured_pairs]
        self.kind = None if pairs is None or pairs.several is None else pairs.kind[self.measured_pairs]
        self.reference = None
        if problem.groups is not None and len(problem.groups.crossings) == 1:
            self.reference = problem.groups.sizes(rows.mask(problem.roles.where["train"]))

    @property
    def needed(self) -> Codes:
        """The rows whose pictures are needed."""
        pairs = (self.pairs.ravel(), self.measured.ravel())
        return np.unique(np.concatenate([*self.at.values(), *pairs, self.untrained_at]))

    def epoch(self, number: int, pictures: TrainingPictures, task: Task) -> Epoch:
        """Train on every row once, or on as many drawn rows.

        ``number`` counts from 1 and, with the seed, determines what is random.
        """
        options, order = self.options, generator_of(self.options.seed, 2 * number)
        draw = drawn_batches if self.domainbed else epoch_batches
        batches = list(draw(self.objective.rows.strata, len(self.train.ids), options.batch_size, order))
        beside = self._beside(len(batches), generator_of(options.seed, 2 * number + 1))
        parts = [
            np.concatenate([self.at["train"][chosen.numpy()], members.T.ravel()])
            for chosen, members in zip(batches, beside, strict=True)
        ]
        total = torch.zeros(2, dtype=torch.float64, device=self.network.device)
        self.module.train()
        device = self.network.device
        with torch.random.fork_rng(devices=[] if device == "cpu" else [device]):
            torch.manual_seed(int(order.initial_seed() >> 1))  # for layers such as dropout
            stream = pictures.batches(parts, self._augmented(number))
            step = self._meta_step if options.chosen_method == "fish" else self._step
            for chosen, items in zip(batches, stream, strict=True):
                total += step(items, chosen, order) * len(chosen)
                task.advance(len(chosen))
        loss, difference = (total / sum(map(len, batches))).tolist()
        return {"train_loss": loss} | ({"pair_difference": difference} if len(beside[0]) else {})

    def _beside(self, steps: int, generator: torch.Generator) -> list[Codes]:
        """The (m, 2) pairs for each batch; matchdg's are random pairs of a class from two domains."""
        method, pairs = self.options.chosen_method, self.pairs
        if method == "matchdg":
            labels, domains = (
                torch.from_numpy(np.asarray(codes)) for codes in (self.train.y, self.train.codes["envs"])
            )
            partner = partners(labels, domains, torch.rand(len(labels), generator=generator)).numpy()
            paired = np.flatnonzero(partner != np.arange(len(partner)))
            if not len(paired):
                raise InputError("matchdg finds no pairs: no class has training rows in two environments")
            pairs = self.at["train"][np.stack([paired, partner[paired]], axis=1)]
        if method not in ("ncm", "matchdg"):
            return [np.zeros((0, 2), np.int64)] * steps
        return pair_batches(pairs, self.options.pair_batch, steps, generator)

    def _augmented(self, number: int) -> Preprocess | None:
        if self.options.augment is None:
            return None
        preprocess, seed = self.network.preprocess, 1_000_003 * self.options.seed + number
        request = dataclasses.replace(preprocess.request, augment=self.options.augment, seed=seed)
        return dataclasses.replace(preprocess, request=request)

    def _meta_step(self, items: Sequence[np.ndarray], chosen: Tensor, visit: torch.Generator) -> Tensor:
        """One step of fish, as in `ncm_cli.solvers.trainer.FishWeights`; buffers are moved as weights are."""
        before = self.copy(self.network.device)
        batch = Batch(self.objective.rows, chosen, visit, None if self.domainbed else visit)
        total = torch.zeros(2, dtype=torch.float64, device=self.network.device)
        for _, members in batch.visits:
            positions = members.cpu()
            terms = self._step([items[i] for i in positions.tolist()], chosen[positions], visit)
            total += terms * (len(positions) / len(chosen))
        with torch.no_grad():
            for name, module in (("network", self.module), ("head", self.head)):
                for key, value in module.state_dict().items():
                    if value.is_floating_point():
                        value.copy_(torch.lerp(before[name][key], value, self.options.meta_lr))
        return total

    def _step(self, items: Sequence[np.ndarray], chosen: Tensor, _visit: torch.Generator) -> Tensor:
        """One step of the optimiser; rows and pairs go through the network together, as one batch."""
        n, device = len(chosen), self.network.device
        batch = Batch(self.objective.rows, chosen, torch.Generator(), None)
        self.optimiser.zero_grad(set_to_none=True)
        try:
            with exact(device, self.options.precision):
                representations = self.module(self.network.batch(items))
                logits = self.head(representations[:n]).float()
                if self.domainbed and logits.shape[1] == 2:
                    logits = logits[:, 1:] - logits[:, :1]
                a, b = representations[n:].float().chunk(2) if len(items) > n else (None, None)
                loss, terms = self.objective(logits, batch, None if a is None or b is None else (a, b))
                if self.domainbed and self.objective.penalty_begins:
                    self.optimiser = self._new_optimiser()
                self.scaler.scale(loss).backward()
        except (RuntimeError, MemoryError) as error:
            if not is_short_of_memory(error):
                raise
            what = f"not enough memory on {device} for a step of {len(items)} pictures"
            raise InputError(
                what, fix="smaller --batch-size and --pair-batch, or --precision bf16"
            ) from error
        self.scaler.step(self.optimiser)
        self.scaler.update()
        return terms

    def probe(self) -> tuple[Array, Array]:
        """The head as a probe's weight (C, width) and bias (C,)."""
        weight, bias = (
            parameter.detach().cpu().double().numpy() for parameter in (self.head.weight, self.head.bias)
        )
        if self.domainbed and len(bias) == 2:
            return weight[1:] - weight[:1], bias[1:] - bias[:1]
        return weight, bias

    def measure(self, pictures: TrainingPictures) -> Epoch:
        """Metrics of the network on validation rows, test rows and held-out pairs."""
        self.module.eval()
        members = self.measured
        names = [part for part in ("val", "test") if part in self.at]
        parts = [*(self.at[part] for part in names), self.untrained_at, members[:, 0], members[:, 1]]
        features = pictures.features(self.network, np.concatenate(parts)).astype(np.float64)
        split_features = np.split(features, np.cumsum([len(part) for part in parts])[:-1])
        pairs = PairRows(a=split_features[-2], b=split_features[-1]) if len(members) else None
        rows: dict[str, Rows] = {}
        for part, X in zip(names, split_features, strict=False):
            labelled: Any = getattr(self.problem, part)
            rows[part] = Rows(X=X, y=labelled.y, group=labelled.group)
        weight, bias = self.probe()
        epoch = {
            name: float(values[0])
            for name, values in facts(
                weight[None],
                bias[None],
                val=rows["val"],
                test=rows.get("test"),
                pairs=pairs,
                kind=self.kind,
            ).items()
        }
        if self.untrained is not None:
            epoch |= self._cell_facts(weight, bias, rows["val"], split_features[-3])
            of_stores = (store_metric("flip_rate", at) for at in range(len(self.problem.matched)))
            flips = [np.asarray(epoch[name]) for name in of_stores if name in epoch]
            bounds = cell_bound_facts(np.asarray(epoch["cell_error"]), flips, self.problem.matched)
            epoch |= {name: float(value) for name, value in bounds.items()}
        epoch["val_answers"] = float(len(np.unique(decide(np.asarray(rows["val"].X) @ weight.T + bias))))
        for name, split_rows in rows.items():
            if self.reference is not None and split_rows.group is not None:
                right = metrics.row_errors(weight[None], bias[None], split_rows)[0][0] == 0
                table = [
                    metrics.summary(right[split_rows.group[:, 0] == i]) for i in range(len(self.reference))
                ]
                average, _ = metrics.adjusted_average(table, self.reference)
                epoch |= {} if average is None else {f"{name}_adjusted_accuracy": average}
        return epoch

    def _cell_facts(self, weight: Array, bias: Array, val: Rows, X: Array) -> Epoch:
        """Error on validation rows and on members X (q, width) on which the fold isn't trained, with all
        label × domain cells weighted equally."""
        assert self.untrained is not None and self.problem.val is not None
        cell = np.concatenate([self.problem.val.codes["cell"], self.untrained.codes["cell"]])
        y = np.concatenate([self.problem.val.y, self.untrained.y])
        rows = Rows(X=np.concatenate([np.asarray(val.X), X])[cell >= 0], y=y[cell >= 0])
        measured = cell_facts(*metrics.row_errors(weight[None], bias[None], rows), cell[cell >= 0])
        return {name: float(value[0]) for name, value in measured.items()}

    def state(self) -> dict[str, Any]:
        """Everything on which the next epoch depends."""
        return {
            "network": self.module.state_dict(),
            "head": self.head.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "scaler": self.scaler.state_dict(),
            "objective": self.objective.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a `state`."""
        for name in ("optimiser", "scaler"):
            getattr(self, name).load_state_dict(state[name])
        self.objective.load(state["objective"])
        self.take(state)

    def take(self, weights: dict[str, Any]) -> None:
        """Take the network and head of a `state`, or of `copy`."""
        self.module.load_state_dict(weights["network"])
        self.head.load_state_dict(weights["head"])

    def copy(self, device: str = "cpu") -> dict[str, Any]:
        """A copy of network and head, on the CPU unless a device is named."""
        return {
            name: {key: value.detach().to(device, copy=True) for key, value in module.state_dict().items()}
            for name, module in (("network", self.module), ("head", self.head))
        }


def best_epochs(history: Sequence[Epoch]) -> dict[str, int]:
    """The epoch (from 0) that each rule picks; −1 if its metrics aren't known.

    The rule ``bound`` picks an epoch whose network predicts one class for all validation rows only if the
    networks of all epochs do.
    """
    names = dict.fromkeys((*METRICS, *SCORES))
    known = {name: np.array([epoch.get(name, math.nan) for epoch in history]) for name in names}
    constant = np.array([epoch.get("val_answers", 2) < 2 for epoch in history])
    if not constant.all():
        for name in SCORES:
            if name in known:
                known[name] = np.where(constant, np.nan, known[name])
    return {name: int(best_checkpoints(known, rule)) for name, rule in RULES.items()}
