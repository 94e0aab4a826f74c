"""The options of ``ncm finetune``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import ClassVar

from ncm_cli.errors import UsageError
from ncm_cli.images.options import BACKGROUND, PRECISIONS, SourceOptions, parse_augment
from ncm_cli.options import option, parse_device, parse_names, parse_workers
from ncm_cli.probes.options import PairPaths, RowOptions, refuse_same_store
from ncm_cli.probes.rules import FINETUNE_RULES
from ncm_cli.solvers.methods import FINETUNE_METHODS, FINETUNE_PROTOCOLS, WEIGHT_DECAY

PENALTIES = {"ncm": 500.0, "matchdg": 500.0, "irm": 100.0, "vrex": 10.0}
"""The default of ``--penalty``, for the methods that have one: the paper's; vrex's is DomainBed's."""

_NEEDS = {"ncm": "pairs", "irm": "envs", "vrex": "envs", "fish": "envs", "matchdg": "envs"}

_TAKEN_BY = {
    "penalty": tuple(PENALTIES),
    "anneal": ("irm", "vrex"),
    "eta": ("groupdro",),
    "meta_lr": ("fish",),
}
"""The options that only some methods have."""

_rows = partial(option, None, group="Rows")
_network = partial(option, group="Network")
_training = partial(option, group="Training")
_run = partial(option, group="Running")


def parse_network(text: str) -> str:
    """``timm:NAME`` or ``domainbed:NAME``; the name is checked when the network is made."""
    if not text.startswith(("timm:", "domainbed:")):
        raise UsageError(
            "a network that ncm finetune doesn't train",
            found=f"--model {text}",
            expected="timm:NAME, or domainbed:MNIST_CNN",
            fix="--model timm:resnet50.tv_in1k, which is torchvision's ResNet-50 (IMAGENET1K_V1)",
        )
    return text


def checkpoint_files(output: Path) -> tuple[Path, ...]:
    """The files that ``-o NAME.safetensors`` writes: checkpoint, head as a probe, and results."""
    return (output, output.with_suffix(".probe.safetensors"), output.with_suffix(".json"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneOptions(RowOptions, SourceOptions):
    """Options of ``ncm finetune``; the fields are the long options and the recipe's keys."""

    numeric: ClassVar = ()
    from_array: ClassVar = None
    """Fixed options of `EmbedOptions`: images are read, and all columns are categorical."""
    scaling: ClassVar = "none"
    scale_factor: ClassVar = 1.0
    """Fixed options of `TrainingOptions`: representations aren't scaled."""

    pairs: PairPaths | None = option(
        None,
        help="Pair store: its pairs' images are found by id in the source. May be repeated.",
        role="input",
        flags=("-p",),
    )
    output: Path = option(
        help="Checkpoint to write, NAME.safetensors; beside it NAME.probe.safetensors and NAME.json.",
        role="output",
        flags=("-o",),
        files=checkpoint_files,
        writes=("checkpoint", "head", "finetune"),
    )
    method: str | None = option(
        None, help="Without it, ncm if there are pairs and erm if not.", choices=FINETUNE_METHODS
    )
    model: str = option(
        "timm:resnet50.tv_in1k",
        help="A network: timm:NAME, or domainbed:MNIST_CNN.",
        parse=parse_network,
    )
    pretrained: str = option(
        "default",
        help="Weights to start from: default for timm's own, a tag of timm's, or a file.",
        role="name-or-input",
    )
    device: str = option("auto", help="auto, cpu, cuda or cuda:N.", parse=parse_device)

    test: str | None = _rows(
        help="Test rows, measured after every epoch: adds the rules that look at them, marked ORACLE.",
        metavar="WHERE",
    )
    envs: str | None = _rows(
        help="Columns whose combinations are the environments of irm, vrex, groupdro, fish and matchdg.",
        metavar="COLUMNS",
        parse=parse_names,
    )
    dro_groups: str | None = _rows(
        help="Columns of groupdro's groups, if not the environments.", metavar="COLUMNS", parse=parse_names
    )
    folds: int = option(
        5,
        least=0,
        help="Folds that the pairs are cut into; one is held out to measure flip rate and bound. Pairs that "
        "the store holds out replace it. 0: none is held out, and there is no bound.",
        group="Rows",
    )

    random_init: bool = _network(False, help="Start from random weights instead.")
    representation: int = _network(
        64, least=1, help="Width of the representation, between the network and the linear head."
    )
    image_size: int | None = _network(
        None, least=8, help="Side of the pictures that the network gets, if not its default."
    )
    augment: str | None = _network(
        None, help="Change each training image anew at every epoch, as in embed.", parse=parse_augment
    )

    protocol: str = _training(
        "common",
        help="common: SGD, each epoch over every row once. domainbed: objectives, batches and Adam of "
        "DomainBed, as in sweep.",
        choices=FINETUNE_PROTOCOLS,
    )
    epochs: int = _training(300, least=1, help="Passes over the training rows.")
    batch_size: int = _training(
        128,
        least=3,
        help="Rows in a batch (of each environment with --protocol domainbed); at least 3.",
    )
    pair_batch: int = _training(128, least=1, help="ncm, matchdg: pairs added to each batch.")
    lr: float = _training(1e-3, above=0, help="Step size.")
    momentum: float = _training(0.9, least=0, below=1, help="Momentum of SGD.")
    weight_decay: float = _training(WEIGHT_DECAY, least=0, help="λ of loss + (λ/2)‖parameters‖².")
    penalty: float | None = _training(
        None,
        least=0,
        help="Weight of the penalty: 500 for ncm and matchdg, 100 for irm, 10 for vrex.",
    )
    anneal: int = _training(0, least=0, help="irm, vrex: steps before --penalty takes the place of 1.")
    eta: float = _training(1e-2, least=0, help="groupdro: step size of the groups' weights.")
    meta_lr: float = _training(0.5, above=0, help="fish: step size towards the weights of its inner steps.")
    rule: str | None = _training(
        None,
        help="Which epoch's weights are kept; without it, bound if there are pairs and folds, else "
        "in-domain. ORACLE rules look at the test rows.",
        choices=FINETUNE_RULES,
    )
    precision: str = _training("fp32", help="Arithmetic of the network.", choices=PRECISIONS)
    seed: int = _training(
        0, least=0, help="Seed of new weights, batches, the held-out fold of pairs and augmentation."
    )

    workers: str = _run(
        "auto",
        help="Images read at once: a few by threads, many by processes; 0 reads between batches.",
        parse=parse_workers,
    )
    fresh: bool = _run(False, help="Start over: replace a result or an unfinished run of other settings.")

    @property
    def chosen_method(self) -> str:
        """``--method``; without it ncm with pairs, else erm."""
        return self.method or ("erm" if self.pairs is None else "ncm")

    @property
    def chosen_rule(self) -> str:
        """``--rule``; without it bound with pairs and folds, else in-domain."""
        return self.rule or ("in-domain" if self.pairs is None or not self.folds else "bound")

    @property
    def chosen_penalty(self) -> float:
        """``--penalty``, or the method's default; 0 for a method without a penalty."""
        return PENALTIES.get(self.chosen_method, 0.0) if self.penalty is None else self.penalty

    def refusals(self) -> Iterator[UsageError]:
        """Why these options can't be used together."""
        method, rule = self.chosen_method, self.chosen_rule
        if self.output.suffix != ".safetensors":
            yield UsageError("a checkpoint's name ends in .safetensors", found=str(self.output))
        need = _NEEDS.get(method)
        if BACKGROUND in dict(parse_augment(self.augment)):
            yield UsageError("--augment background is for ncm embed; pairs with its view can be used here")
        if need and getattr(self, need) is None:
            value = "FILE" if need == "pairs" else "COLUMN"
            yield UsageError(f"{method} needs --{need}", fix=f"--{need} {value}")
        if method == "groupdro" and self.envs is None and self.dro_groups is None:
            yield UsageError("groupdro needs --dro-groups", fix="--dro-groups label,place, or --envs COLUMN")
        for name, takes in _TAKEN_BY.items():
            default = type(self).__dataclass_fields__[name].default
            if getattr(self, name) != default and method not in takes:
                yield UsageError(f"the method {method!r} has no --{name}", fix=f"leave --{name} out")
        yield from refuse_same_store(self.pairs)
        if (
            self.protocol == "domainbed"
            and self.momentum != type(self).__dataclass_fields__["momentum"].default
        ):
            what = "Adam, with which --protocol domainbed trains, has no --momentum"
            yield UsageError(what, fix="leave --momentum out")
        if rule == "bound" and self.pairs is None:
            yield UsageError("--rule bound needs pairs", fix="--pairs P.h5, or --rule in-domain")
        if rule == "bound" and not self.folds:
            yield UsageError("--rule bound needs folds", found="--folds 0", fix="--folds 5")
        if self.folds == 1:
            yield UsageError("--folds must be at least 2", found=1, fix="--folds 0: no bound")
        if self.random_init and self.pretrained != "default":
            yield UsageError("--random-init and --pretrained name different weights", fix="only one of them")
        if rule.endswith("worst-group") and self.groups is None:
            fix = "--groups label,place: columns whose combinations are the groups"
            yield UsageError(f"--rule {rule} needs groups", fix=fix)
        if rule.startswith("oracle") and self.test is None:
            yield UsageError(f"--rule {rule} needs test rows", fix="--test split=test, or --rule bound")
