"""The options of ``ncm fit``, ``ncm zeroshot``, ``ncm eval`` and ``ncm predict``."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from ncm_cli.errors import UsageError, unknown
from ncm_cli.images.options import TextOptions, parse_prompt
from ncm_cli.options import (
    CROSSINGS,
    LIST,
    argument,
    option,
    parse_batch_size,
    parse_device,
    parse_left_out,
    parse_names,
    parse_numbers,
    parse_ranks,
    parse_workers,
    values_of,
)
from ncm_cli.probes.metric_names import METRICS, parse_metrics
from ncm_cli.probes.rules import FIT_RULES
from ncm_cli.solvers.methods import (
    FIT_METHODS,
    FOLD_TOLERANCE,
    MAX_ITER,
    METHODS,
    SCALINGS,
    SOLVER_OPTIONS,
    SOLVERS,
    TASKS,
    TOLERANCE,
    WEIGHT_DECAYS,
    Solver,
)

SWEPT = "ncm sweep --methods {} ... --save-probes DIR"
"""The command that trains the other methods."""

_choice = functools.partial(option, group="Rank and selection")
_rows = functools.partial(option, group="Rows")
_where = functools.partial(_rows, None, metavar="WHERE")
_columns = functools.partial(_rows, None, metavar="COLUMNS", parse=parse_names)
_training = functools.partial(option, group="Training")

EXCLUDE_NEAR = "exclude-near"
"""The value of ``--overlap`` that leaves out training rows that nearly equal a validation or test row."""


PairPaths = Path | tuple[Path, ...]
"""The value of ``--pairs``: one pair store or several."""

_pairs = functools.partial(
    option,
    None,
    help="Pair store: what its pairs differ in is removed. May be repeated, to remove what all differ in.",
    role="input",
    flags=("-p",),
)


def refuse_same_store(paths: PairPaths | None, flag: str = "--pairs") -> Iterator[UsageError]:
    """Why these pair stores can't be used together, as far as their paths show it."""
    again = [path for path, count in Counter(values_of(paths)).items() if count > 1]
    if again:
        yield UsageError("one pair store is given twice", where=f"{flag} {again[0]}", fix="name it once")


def parse_method(text: str) -> str:
    """``ncm`` or ``erm``; for another existing method the error names the command that trains it."""
    if text in FIT_METHODS:
        return text
    if text in METHODS:
        what, known = f"ncm fit doesn't train {text!r}", " | ".join(FIT_METHODS)
        raise UsageError(what, expected=known, fix=SWEPT.format(text))
    raise unknown("method", text, FIT_METHODS, error=UsageError)


def parse_decays(text: str) -> tuple[float, ...]:
    """Numbers as `parse_numbers` reads them, none negative."""
    decays = parse_numbers(text)
    if min(decays) < 0:
        raise UsageError("--weight-decay must be at least 0", found=text)
    return decays


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowOptions:
    """The rows of ``ncm fit``, ``ncm sweep`` and ``ncm finetune``."""

    train: str | None = _where(help="Training rows; without it, those of a split named train or training.")
    val: str | None = _where(
        help="Validation rows; without it, those of a split named val, valid, validation or dev."
    )
    test: str | None = _where(
        help="Test rows, needed by --select oracle and otherwise only kept apart; without it, those of a "
        "split named test, testing or heldout."
    )
    target: str | None = _rows(None, help="Column to predict; without it, the label.", metavar="COLUMN")
    groups: str | None = _columns(
        help="Columns whose combinations are the groups of worst-group rules and controls, as in eval. "
        "May be repeated.",
        separator=CROSSINGS,
    )
    upweight: str | None = _columns(help="Columns whose combinations count equally in training.")
    overlap: str = _rows(
        "exclude",
        help="What to do with pairs and byte-identical images that also occur among validation or test rows; "
        f"{EXCLUDE_NEAR} also leaves out training rows that nearly equal one.",
        choices=("exclude", EXCLUDE_NEAR, "error", "keep"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """The files that ``ncm fit`` and ``ncm sweep`` read and write."""

    features: Path = option(help="Feature store with the rows.", role="input", flags=("-f",))
    pairs: PairPaths | None = _pairs()
    output: Path = option(help="Probe to write.", role="output", flags=("-o",), writes=("probe",))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOptions(RowOptions, StoreOptions):
    """The rows, pairs and scaling of ``ncm fit`` and ``ncm sweep``."""

    leave_out: str | None = _rows(
        None,
        help="Column of domains: each domain is left out of training once and tested on, and NAME-VALUE is "
        "written for it. domain=photo leaves out that domain only, and writes -o as usual.",
        metavar="WHERE",
        parse=parse_left_out,
        separator="",
    )

    scaling: str = _training("none", help="How features are scaled first.", choices=SCALINGS)
    scale_factor: float = _training(10.0, above=0, help="The rows' norm under --scaling norm.")
    epochs: int = _training(100, least=1, help="Passes of adam over the training rows.")
    batch_size: int = _training(256, least=0, help="adam: rows in a batch; 0 for all.")
    device: str = _training("auto", help="Where adam trains: auto, cpu or cuda.", parse=parse_device)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitOptions(TrainingOptions):
    """Options of ``ncm fit``; the fields are the long options and the recipe's keys."""

    moved: ClassVar = dict.fromkeys(
        ("--envs", "--erase", "--penalty", "--anneal", "--eta", "--meta-lr", "--p-sel", "--alpha"),
        SWEPT.format("METHOD"),
    )
    """Options of earlier versions, with the command that replaces each."""

    method: str | None = option(
        None,
        help=f"Method; without it, ncm if there are pairs and erm if not. ({' | '.join(FIT_METHODS)})",
        parse=parse_method,
    )
    rank: str = _choice(
        "auto",
        help="Dimensions to remove: 16, 2:24, 0:64:8, 0,8,56; auto tries 0 to the pairs' rank.",
        parse=parse_ranks,
        separator=LIST,
    )
    weight_decay: str | None = _choice(
        None,
        help="Weight decays to try: 1e-3, or 1e-4,1e-2, or log:1e-4:1:5. Without it, "
        f"{WEIGHT_DECAYS['lbfgs']} for lbfgs and {WEIGHT_DECAYS['adam']} for adam.",
        parse=parse_decays,
        separator=LIST,
    )
    select: str | None = _choice(
        None,
        help="How to choose; without it, bound if there are pairs. The rule oracle looks at the test rows.",
        choices=FIT_RULES,
    )
    folds: int = _choice(
        5,
        least=2,
        help="Folds that the pairs are cut into for --select bound; held-out pairs replace them.",
    )
    upweight: str | None = _choice(
        None,
        help="Columns whose combinations count equally in training; none; or auto, which tries both none and "
        "the label × domain cells of matched pairs, or else --groups. Without it, auto unless --method is "
        "given.",
        metavar="COLUMNS",
        parse=parse_names,
    )
    pair_rows: str | None = _choice(
        None,
        help="Whether to train on the labelled rows of the pairs, too. Without it, auto (both are tried) "
        "unless --method is given.",
        choices=("no", "auto", "yes"),
    )
    save_controls: Path | None = _choice(
        None, help="Folder for the probes that the choice is compared with.", role="output", metavar="DIR"
    )

    task: str = _training("classification", help="What is predicted.", choices=TASKS)
    solver: str | None = _training(
        None,
        help="lbfgs is exact and the default of ncm and erm; adam trains on mini-batches, as in the paper.",
        choices=SOLVERS,
    )
    tolerance: float = _training(
        TOLERANCE,
        above=0,
        help="lbfgs: gradient norm to reach, relative to the rows' norm. If given, it also holds for fits on "
        f"folds, whose default is {FOLD_TOLERANCE:g}.",
    )
    max_iter: int = _training(MAX_ITER, least=1, help="lbfgs: most iterations for one probe.")
    lr: float = _training(1e-3, above=0, help="adam: learning rate.")
    seed: int = _training(0, least=0, help="Seed of the folds of pairs, and for adam of the batches.")

    @property
    def chosen_method(self) -> str:
        """``--method``; without it ncm with pairs, else erm."""
        return self.method or ("erm" if self.pairs is None else "ncm")

    @property
    def chosen_solver(self) -> str:
        """``--solver``; without it lbfgs, which is exact."""
        return self.solver or "lbfgs"

    @property
    def solving(self) -> Solver:
        """The solver with its settings."""
        names = ("tolerance", "max_iter", "lr", "epochs", "batch_size", "seed", "device")
        return Solver(name=self.chosen_solver, **{name: getattr(self, name) for name in names})

    @property
    def fold_solving(self) -> Solver:
        """The solver for fits on folds: its tolerance is looser unless ``--tolerance`` is given."""
        tolerance = FOLD_TOLERANCE if self.tolerance == TOLERANCE else self.tolerance
        return dataclasses.replace(self.solving, tolerance=tolerance)

    @property
    def decays(self) -> tuple[float, ...]:
        """The weight decays to try."""
        return parse_numbers(self.weight_decay or WEIGHT_DECAYS[self.chosen_solver])

    @property
    def named_upweight(self) -> str | None:
        """The columns of ``--upweight``, if it names some."""
        return None if self.upweight in ("none", "auto") else self.upweight

    @property
    def weights_open(self) -> bool:
        """Whether to try training with and without group weights."""
        return self._open(self.upweight)

    @property
    def rows_open(self) -> bool:
        """Whether to try training with and without the pairs' labelled rows."""
        return self._open(self.pair_rows)

    def _open(self, asked: str | None) -> bool:
        """Whether an option leaves a choice open to be made on folds of the pairs."""
        if self.pairs is None or self.select not in (None, "bound") or self.task == "regression":
            return False
        return asked == "auto" or (asked is None and self.method is None and self._several)

    @property
    def several(self) -> bool:
        """Whether there is something to choose among."""
        return self._several or "auto" in (self.upweight, self.pair_rows)

    @property
    def _several(self) -> bool:
        ranks = parse_ranks(self.rank)
        return len(self.decays) > 1 or (self.chosen_method == "ncm" and (ranks is None or len(ranks) > 1))

    @property
    def idle(self) -> set[str]:
        """Names of the options that this solver and scaling don't read."""
        other = "adam" if self.chosen_solver == "lbfgs" else "lbfgs"
        return {*SOLVER_OPTIONS[other], *(() if self.scaling == "norm" else ("scale_factor",))}

    def refusals(self) -> Iterator[UsageError]:
        """Why these options can't be used together."""
        method, alone = self.chosen_method, self.pairs is None
        yield from refuse_same_store(self.pairs)
        if method == "ncm" and alone:
            yield UsageError("ncm needs --pairs", fix="--pairs FILE")
        if self.solver == "adam" and self.task == "regression":
            yield UsageError("regression is solved exactly", found=f"--method {method}", fix="--solver lbfgs")
        if method != "ncm" and parse_ranks(self.rank) not in (None, (0,)):
            asked = f"--rank {self.rank}"
            yield UsageError(
                f"the method {method!r} removes no directions", found=asked, expected="--method ncm"
            )
        if alone and (self.pair_rows == "yes" or "auto" in (self.upweight, self.pair_rows)):
            flag = "--upweight auto" if self.upweight == "auto" else f"--pair-rows {self.pair_rows}"
            yield UsageError(f"{flag} needs pairs", fix="--pairs PAIRS.h5; or --upweight label,domain")
        if self.save_controls is not None and alone:
            what = "--save-controls needs pairs, since controls are measured on them"
            yield UsageError(what, fix="--pairs PAIRS.h5")
        if self.select == "bound" and alone and self.several:
            yield UsageError("--select bound needs pairs", fix="--pairs P.h5, or --select in-domain")
        if self.select == "worst-group" and not self.groups:
            fix = "--groups label,place: columns whose combinations are the groups"
            yield UsageError("--select worst-group needs groups", fix=fix)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroshotOptions(TextOptions):
    """Options of ``ncm zeroshot``; the fields are the long options and the recipe's keys."""

    features: Path = option(help="Feature store of an open_clip model.", role="input", flags=("-f",))
    output: Path = option(help="Probe to write.", role="output", flags=("-o",), writes=("probe",))
    prompts: tuple[str, ...] = option(
        ("a photo of a {}.",),
        help="A prompt with {} for the class, a file with one a line, or openai for CLIP's 80; several are "
        "averaged. May be repeated.",
        metavar="PROMPT",
        role="name-or-input",
        parse=parse_prompt,
    )
    target: str | None = option(
        None, help="Column of the classes; without it, the store's label.", metavar="COLUMN"
    )
    pairs: PairPaths | None = _pairs(group="Rank and selection")
    rank: str = _choice(
        "auto",
        help="Dimensions to remove, as in ncm fit. Several are compared by validation error + flip rate, "
        "which takes labels; a single one takes none.",
        parse=parse_ranks,
        separator=LIST,
    )
    val: str | None = _choice(
        None,
        help="Validation rows; without it, those of a split named val, valid, validation or dev.",
        metavar="WHERE",
    )
    probe: Path | None = option(
        None, help="Fitted probe of the same classes to mix with.", role="input", group="Mixing"
    )
    mix: float | None = option(
        None,
        least=0,
        most=1,
        help="The fitted probe's share of the weights: 0 is zero-shot, 1 the fitted probe.",
        metavar="SHARE",
        group="Mixing",
    )

    def refusals(self) -> Iterator[UsageError]:
        """Why these options can't be used together."""
        yield from super().refusals()
        yield from refuse_same_store(self.pairs)
        if (self.probe is None) != (self.mix is None):
            what = "--probe, the probe to mix with, and --mix, its share, go together"
            yield UsageError(what, fix="--probe PROBE.safetensors --mix 0.5")
        if self.pairs is None and (self.rank != "auto" or self.val):
            yield UsageError("--rank and --val need --pairs", fix="--pairs P.h5")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Options of ``ncm eval``; the fields are the long options and the recipe's keys."""

    probe: Path = argument(help="Probe to evaluate.", role="input")
    features: Path = option(help="Feature store with the rows.", role="input", flags=("-f",))
    where: str | None = option(None, help="Rows to evaluate, such as split=test.", metavar="WHERE")
    groups: str | None = option(
        None,
        help="Columns whose combinations are the groups; without it, the target. May be repeated for several "
        "crossings, as in 'label,male;label,black'.",
        metavar="COLUMNS",
        separator=CROSSINGS,
    )
    reference: str | None = option(
        None,
        help="Rows whose group sizes weight the adjusted average; without it, the probe's training rows.",
        metavar="WHERE",
    )
    target: str | None = option(
        None, help="Column of the true answers, if it isn't the one that was fitted.", metavar="COLUMN"
    )
    metrics: str | None = option(
        None,
        help="More metrics, overall and by group with 95 % intervals: "
        f"{', '.join(METRICS['classification'])}; for regression {', '.join(METRICS['regression'])}; or all.",
        metavar="NAMES",
        parse=parse_metrics,
        separator=LIST,
    )
    compare: Path | None = option(
        None, help="Another probe, or its saved result, to compare with on the same rows.", role="input"
    )
    output: Path | None = option(
        None, help="Result to write, as JSON.", role="output", flags=("-o",), writes=("eval",)
    )


_encoder = functools.partial(option, group="Encoder")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Options of ``ncm predict``; the fields are the long options and the recipe's keys."""

    probe: Path = argument(help="Probe to predict with.", role="input")
    source: tuple[Path, ...] = argument(
        help="What to predict: images, or a folder, a manifest, a feature store or an array of features.",
        metavar="SOURCE...",
        role="input",
    )
    output: Path = option(
        Path("-"),
        help="CSV to write; - is standard output.",
        role="output",
        flags=("-o",),
        writes=("predictions",),
    )
    where: str | None = option(
        None, help="Rows of the store, such as split=test.", metavar="WHERE", columns_of="source"
    )
    probabilities: bool = option(False, help="Add a column of probabilities for each class.")
    pretrained: str | None = _encoder(
        None,
        help="Weights of the probe's encoder: a file or a tag; without it, those that made the features.",
        role="name-or-input",
    )
    device: str = _encoder("auto", help="auto, cpu, cuda or cuda:N.", parse=parse_device)
    batch_size: str = _encoder("auto", help="Images at once.", parse=parse_batch_size)
    workers: str = _encoder(
        "auto", help="Images read at once: a few by threads, many by processes.", parse=parse_workers
    )
