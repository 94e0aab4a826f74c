"""``ncm zeroshot``: a probe from prompts alone, without what pairs differ in, or mixed with a fitted one.

Radford et al. 2021, Learning transferable visual models from natural language supervision, section 3.1: the
weights of a class are its prompts' features, each of unit length, averaged and scaled to unit length again;
its logit is the model's own scale times the cosine of picture and weights.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ncm_cli.blocks import Array
from ncm_cli.errors import InputError, MismatchError, listing
from ncm_cli.images.text import (
    TextTower,
    filled,
    load_text_tower,
    read_classes,
    read_prompts,
    require_apart,
)
from ncm_cli.options import check, parse_ranks
from ncm_cli.probes.choose import ONLY_CANDIDATE, resolve_ranks
from ncm_cli.probes.controls import about, with_stores
from ncm_cli.probes.crossfit import CrossFit, FoldRows
from ncm_cli.probes.metrics import Rows
from ncm_cli.probes.options import ZeroshotOptions
from ncm_cli.probes.problem import Pairs, Roles
from ncm_cli.probes.record import pairs_record
from ncm_cli.probes.selection import best_candidate
from ncm_cli.probes.usable_pairs import read_usable_pairs
from ncm_cli.probes.verdict import Circumstances, judge, unmeasured
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.solvers.folds import Fold, units
from ncm_cli.solvers.projection import FEATURE_EPS, Scaling, Spectrum, project
from ncm_cli.solvers.training_set import Fit
from ncm_cli.store.digests import fingerprint, require_same_encoder, without_view
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.files import jsonable
from ncm_cli.store.probe import Probe, folded, read_probe, record_ids, write_probe
from ncm_cli.store.roles import Role, Target, read_target, split_filter
from ncm_cli.store.rows import FeatureRows

FOLDS = 5
"""Folds of the pairs, as in ``ncm fit``: each is measured with the directions of the others removed."""


def zeroshot(options: ZeroshotOptions, *, reporter: Reporter = SILENT) -> dict[str, Any]:
    """Make the probe, write it, and return what ``--json`` prints.

    Raises
    ------
    InputError
        Features of an encoder without text, classes or prompts that can't be used, or several ranks without
        labelled rows to choose by.
    MismatchError
        A text tower, pairs or a probe to mix with of another encoder than the store's, or a probe of other
        classes.
    """
    check(options)
    with FeatureStore(options.features) as store:
        other = None if options.probe is None else read_probe(options.probe)
        target = options.target or (other.target if other else store.label_column)
        words = read_classes(options, store, target, other.classes if other else ())
        target = target or "label"
        if other is not None:
            _require_mixable(options.probe, other, store, tuple(words))
        named = options.target is not None
        answers = _answers(store, target, tuple(words), named=named, reporter=reporter)
        prompts = read_prompts(options.prompts)
        if without := [repr(prompt) for prompt in prompts if "{" not in prompt]:
            raise InputError(
                "a prompt without a place for the class",
                where="--prompts",
                found=listing(without),
                expected="text such as 'a photo of a {}', a file with one a line, or openai",
            )
        # Cosines need rows of unit length: stored rows are, or the probe normalises them when it is applied.
        scaling = Scaling("none" if store.encoder.get("normalize") else "norm")
        meta = _record(options, store, scaling, other) | {"prompts": prompts, "words": words}
        # Refuse whatever can be refused before a model is loaded and reads texts, which may take hours.
        removal = (
            None if options.pairs is None else _read_pairs(options, store, scaling, answers, meta, reporter)
        )
        tower = load_text_tower(store, options, reporter)
        weight, bias = from_prompts(tower, prompts, words)
    meta["hyper_parameters"] |= {"logit_scale": tower.logit_scale, "logit_bias": tower.logit_bias}
    if other is not None:
        share, (fitted, fitted_bias, _) = options.mix or 0.0, folded(other)
        weight, bias = (1 - share) * weight + share * fitted, (1 - share) * bias + share * fitted_bias
    basis, singular_values = np.zeros((weight.shape[1], 0)), np.zeros(0)
    if removal is not None:
        chosen = removal.choose(Fit(0, 0.0, weight, bias))
        meta["selection"] |= chosen
        meta["rank"] = rank = chosen["path"][chosen["chosen"]]["rank"]
        basis, singular_values = removal.whole.basis[:, :rank], removal.whole.singular_values
        weight, singular_values = _without(weight, basis), singular_values[: removal.whole.rank]
    probe = Probe(
        weight=weight,
        bias=bias,
        basis=basis,
        singular_values=singular_values,
        classes=tuple(words),
        task="classification",
        target=target,
        meta=meta,
    )
    write_probe(options.output, probe)
    body = {"output": str(options.output), "target": target, "classes": list(words)}
    body |= {name: meta[name] for name in ("method", "prompts", "words", "rank", "mixed_with")}
    chosen = {name: meta["selection"][name] for name in ("rule", "path", "chosen", "verdict")}
    return body | meta["hyper_parameters"] | chosen


def _record(
    options: ZeroshotOptions, store: FeatureRows, scaling: Scaling, other: Probe | None
) -> dict[str, Any]:
    """The record of a probe that is still to be made; a mixture has seen the rows of the other probe, too."""
    encoder, before = without_view(store.encoder), {} if other is None else other.meta
    selection = {"rule": ONLY_CANDIDATE, "chosen": 0, "path": [_only(0)], "verdict": None}
    seen, choice = dict(before.get("rows") or {}), before.get("selection") or {}
    selection["oracle"] = bool(choice.get("oracle"))
    if len(choice.get("path") or ()) == 1:  # there was no choice
        seen.pop("val", None)
    source = {"path": str(options.features), "content_sha256": store.content_sha256}
    roles = {role: (before.get("data") or {}).get(role) for role in ("train", "val", "test")}
    return {
        "encoder": encoder,
        "fingerprint": fingerprint(encoder),
        "scaling": {"kind": scaling.kind, "factor": scaling.factor},
        "method": "mix" if other else "zeroshot",
        "hyper_parameters": {"mix": options.mix or 0.0},
        "mixed_with": {"path": str(options.probe), "sha256": other.sha256} if other else None,
        "selection": selection,
        "flags": before.get("flags") or [],
        "options": jsonable(options),
        "rank": 0,
        "converged": before.get("converged", True),
        "rows": seen,
        "data": {"features": source, **roles},
    }


def _only(rank: int) -> dict[str, Any]:
    return {"rank": rank, "weight_decay": 0.0, "converged": True}


def _answers(
    store: FeatureRows, target: str, classes: tuple[str, ...], *, named: bool, reporter: Reporter
) -> Target | None:
    """The store's targets as codes of these classes; None if it has no label column and none was named.

    Raises `InputError` for fewer than two classes, or if no row is of any: names must be the column's.
    """
    if len(classes) < 2:
        raise InputError("a classifier needs two classes or more", found=listing(classes))
    if not named and store.own_column(target) is None:
        reporter.note(f"the store has no column {target!r}, so none of its rows has a label")
        return None
    target_codes = read_target(store, target, classes)
    counts = np.bincount(target_codes.y[target_codes.known], minlength=len(classes))
    absent = [name for name, rows in zip(classes, counts, strict=True) if not rows]
    if len(absent) == len(classes):
        raise InputError(
            f"no row of the store is of any of these classes in column {target!r}",
            where=store.path,
            found=listing(classes),
            expected=f"some of: {listing(store.categorical(target).categories)}",
            fix="name the column's classes, and what they are called in prompts: --classes 0=cat,1=dog",
        )
    if absent:
        reporter.note(f"no row of the store has {target} {listing(absent, 5)}")
    return target_codes


def from_prompts(tower: TextTower, prompts: list[str], words: dict[str, str]) -> tuple[Array, Array]:
    """Weights (C, d) and biases (C,), both float64, of a probe on rows of unit length; C = 1 for two classes.

    A bias that all classes share (SigLIP's) changes no probability among them. ``words`` has each class's
    words in prompts. Raises `InputError` for two classes that the model can't tell apart in a prompt.
    """
    texts = [filled(prompt, name) for name in words.values() for prompt in prompts]
    tokens = tower.tokens(texts)
    for at, prompt in enumerate(prompts):
        require_apart("two classes", list(words), tokens[at :: len(prompts)], f"--prompts {prompt!r}")
    rows = _unit(tower.encode(tokens).astype(np.float64)).reshape(len(words), len(prompts), -1)
    weight = tower.logit_scale * _unit(rows.mean(axis=1))
    weight = weight[1:] - weight[:1] if len(weight) == 2 else weight
    return weight, np.zeros(len(weight))


def _unit(rows: Array) -> Array:
    return np.asarray(rows / np.linalg.norm(rows, axis=-1, keepdims=True))


def _require_mixable(path: Path | None, probe: Probe, store: FeatureRows, classes: tuple[str, ...]) -> None:
    """Refuse a probe to mix with that has other classes, or wasn't fitted on rows of unit length."""
    require_same_encoder(path, probe.encoder, store.path, store.encoder, ignore_view=True)
    if probe.classes != classes:
        raise MismatchError(
            "a probe of other classes, or of the same classes in another order, can't be mixed with",
            where=path,
            found=listing(probe.classes) if probe.classes else "a regression",
            expected=listing(classes),
        )
    if not store.encoder.get("normalize") and not folded(probe)[2]:
        raise MismatchError(
            "a probe of unnormalised rows can't be mixed with zero-shot, which takes rows of unit length",
            where=path,
            found=f"--scaling {(probe.meta.get('scaling') or {}).get('kind', 'none')}, features as encoded",
            expected="a probe of rows of one length",
            fix="ncm fit --scaling norm; or ncm embed --normalize, and fit again",
        )


def _without(weight: Array, basis: Array) -> Array:
    """Weights (C, d) without directions (d, r): exactly 0 if only rounding of features is left."""
    projected = project(weight, basis)
    return projected * (np.linalg.norm(projected) > FEATURE_EPS * np.linalg.norm(weight))


def _read_pairs(
    options: ZeroshotOptions,
    store: FeatureRows,
    scaling: Scaling,
    answers: Target | None,
    meta: dict[str, Any],
    reporter: Reporter,
) -> _Removal:
    """``--pairs``, the ranks to choose among and the rows to choose by; records the pairs in ``meta``.

    Raises `InputError` for ranks that the pairs don't have, or for several ranks without labelled rows: flips
    alone prefer a constant probe.
    """
    assert options.pairs is not None
    where: dict[Role, str | None] = {"train": None, "val": options.val or split_filter(store, "val")}
    where["test"] = split_filter(store, "test")
    rows = {
        role: np.zeros(store.rows, bool) if text is None else store.mask(text) for role, text in where.items()
    }
    pairs = read_usable_pairs(options.pairs, store, Roles(where=where, rows=rows), "exclude", reporter)
    val, answer = None, 0
    if answers is not None and len(at := np.flatnonzero(rows["val"] & answers.known)):
        val = Rows(X=scaling.apply(store.rows_of(at)), y=answers.y[at])
        meta["rows"]["val"], meta["data"]["val"] = record_ids(store.ids[at]), where["val"]
        answer = int(np.bincount(val.y).argmax())
    whole, asked = pairs.spectrum(pairs.usable, scaling), parse_ranks(options.rank)
    several = asked is None or len(asked) > 1
    if several and val is None:
        raise InputError(
            "several ranks, but nothing to choose by",
            where=options.features,
            found="no labelled validation rows",
            fix=f"--rank {max(whole.gap, 1)}, after which these pairs' singular values fall most; or labelled"
            " rows, --val W",
        )
    folds, why = [], ""
    try:
        folds = pairs.folds(FOLDS, 0)
    except InputError as error:
        if several:
            error.fix = "more pairs, or one --rank, so that there is nothing to choose"
            raise
        why = f"{error.what} ({error.found})"
    fold_spectra = [pairs.spectrum(fold.basis & pairs.usable, scaling) for fold in folds]
    ranks = resolve_ranks(
        options.rank, "ncm", min(part.rank for part in (whole, *fold_spectra * several)), reporter
    )
    meta["data"]["test"] = where["test"]
    meta["data"]["pairs"] = pairs_record(pairs, whole.rank)
    return _Removal(
        pairs,
        scaling,
        whole,
        folds,
        fold_spectra,
        why,
        ranks,
        several,
        val,
        answer,
        () if answers is None else answers.classes,
    )


class _Removal(NamedTuple):
    """The pairs, the ranks to choose among and the rows to choose by, read before weights are computed."""

    pairs: Pairs
    scaling: Scaling
    whole: Spectrum
    folds: list[Fold]
    fold_spectra: list[Spectrum]
    """For each fold, the spectrum of the pairs outside it."""
    why: str
    """Why there are no folds, if there are none."""
    ranks: tuple[int, ...]
    several: bool
    val: Rows | None
    answer: int
    """The validation rows' commonest class, by its code."""
    classes: tuple[str, ...]

    def choose(self, fit: Fit) -> dict[str, Any]:
        """Choose the rank, and return the record of the choice.

        The choice is by validation error + flip rate, as in ``ncm fit``: flips of a fold's pairs are counted
        with the directions of the other pairs removed.
        """
        pairs, shift = self.pairs, about(self.pairs)
        if not self.folds:
            verdict = unmeasured((int(pairs.usable.sum()), 0), self.why, shift)
            return {"chosen": 0, "path": [_only(self.ranks[0])], "verdict": verdict.record()}
        tried = sorted({0, *self.ranks})

        def without(basis: Array, rank: int) -> Fit:  # a basis of fewer directions is removed whole
            return dataclasses.replace(fit, rank=rank, weight=_without(fit.weight, basis[:, :rank]))

        parts = (
            FoldRows(
                [without(part.basis, rank) for rank in tried],
                self.val,
                pairs.members(fold.measured, self.scaling),
            )
            for fold, part in zip(self.folds, self.fold_spectra, strict=True)
        )
        unit = units(pairs.node_a, pairs.node_b, self.folds)
        several: dict[str, Any] = {}
        if pairs.several is not None:
            several = {"kind": pairs.measured_kinds(self.folds), "matched": (False,) * len(pairs.stores)}
        estimates = CrossFit.join(parts, unit, regression=False, answer=self.answer, **several)
        path = [candidate for candidate in estimates.candidates if candidate["rank"] in self.ranks]
        chosen = best_candidate(path, "bound", "classification") if self.several else 0
        pick = tried.index(path[chosen]["rank"])
        if self.val is None:
            why = f"no labelled validation rows; flip rate {estimates.change(0)} with nothing removed"
            why += f", {estimates.change(pick)} with rank {tried[pick]}" if pick else ""
            verdict = unmeasured(estimates, why, shift)
        else:
            case = Circumstances(
                answer=repr(self.classes[self.answer]),
                about=shift,
                least_score=self.several,
                by_score="--rank auto",
            )
            verdict = judge(estimates, pick, 0, case)
            verdict = with_stores(verdict, pairs, estimates, case, written=pick, erm=0, control=0)
        rule = {
            "rule": "bound" if self.several else ONLY_CANDIDATE,
            "folds": len(self.folds),
            "chosen": chosen,
        }
        return rule | {"path": path, "verdict": verdict.record()}
