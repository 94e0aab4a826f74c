"""``ncm zeroshot``: a probe from prompts alone, without what pairs differ in, or mixed with a fitted one.

Radford et al. 2021, Learning transferable visual models from natural language supervision, section 3.1: the
weights of a class are its prompts' features, each of unit length, averaged and scaled to unit length again;
its logit is the model's own scale times the cosine of picture and weights.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError, MismatchError, listing
from ncm_cli.images.options import words_for
from ncm_cli.images.text import TextTower, filled, load_text_tower, read_classes, read_prompts
from ncm_cli.options import as_json, check, parse_ranks
from ncm_cli.probes.apply import Scaling, require_same_encoder
from ncm_cli.probes.fit import ONLY, resolve_ranks, shift_of
from ncm_cli.probes.metrics import Rows
from ncm_cli.probes.options import ZeroshotOptions
from ncm_cli.probes.path import Fit
from ncm_cli.probes.projection import Spectrum, project
from ncm_cli.probes.rows_and_pairs import Pairs, Roles, pairs_beside
from ncm_cli.probes.selection import CrossFit, choose, judge, units, unmeasured
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.store.columns import Role, Target, read_target, split_filter
from ncm_cli.store.digests import fingerprint, without_view
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.probe import Probe, folded, read_probe, record_ids, write_probe

Array = NDArray[np.float64]

FOLDS = 5
"""Parts of the pairs, each measured without its directions: as many as ``ncm fit`` has."""


def zeroshot(options: ZeroshotOptions, *, reporter: Reporter = SILENT) -> dict[str, Any]:
    """Make the probe, write it, and return what ``--json`` prints.

    Raises
    ------
    InputError
        Features of an encoder without text, classes or prompts that can't be used, or ranks to choose among
        and no labelled rows to choose by.
    MismatchError
        An encoder, pairs or a probe to mix with that aren't of the store's encoder or classes.
    """
    check(options)
    other = None if options.probe is None else read_probe(options.probe)
    share = options.mix or 0.0
    with FeatureStore(options.features) as store:
        target = options.target or (other.target if other else store.label_column or "label")
        if other is None or options.classes or options.class_map:
            words = read_classes(options, store, target)
        else:
            words = {name: words_for(name) for name in other.classes}
        answers = _answers(store, target, tuple(words), named=options.target is not None)
        if other is not None:
            _require_mixable(options, other, store, tuple(words))
        prompts = _templates(options)
        tower = load_text_tower(store, options, reporter)
        weight, bias = from_prompts(tower, prompts, list(words.values()))
        if other is not None:
            own, own_bias, _ = folded(other)
            weight = (1 - share) * weight + share * own
            bias = (1 - share) * bias + share * own_bias
        # Cosines need rows of unit length. A stored row is one, or is made one when the probe is applied.
        scaling = Scaling("none" if store.encoder.get("normalize") else "norm")
        fit = Fit(0, 0.0, weight, bias, True, 0, 0.0)
        removed = _remove(options, store, fit, scaling, answers, reporter)
        fit = without(fit, removed.basis, removed.basis.shape[1])
        encoder, seen = without_view(store.encoder), {} if other is None else other.meta
        selection = removed.selection
        if other is not None:  # the probe was chosen by rows, if this mixture wasn't
            before = seen.get("selection") or {}
            selection |= {"oracle": bool(before.get("oracle"))}
            selection |= {"path": []} if removed.pairs is None else {}
        facts = {"logit_scale": tower.logit_scale, "logit_bias": tower.logit_bias, "mix": share}
        data: dict[str, Any] = seen.get("data") or {}
        meta = {
            "encoder": encoder,
            "fingerprint": fingerprint(encoder),
            "scaling": {"kind": scaling.kind, "factor": scaling.factor},
            "method": "zeroshot" if other is None else "mix",
            "hyper_parameters": facts,
            "prompts": prompts,
            "words": words,
            "mixed_with": None if other is None else {"path": str(options.probe), "sha256": other.sha256},
            "selection": selection,
            "flags": list(seen.get("flags") or ()),
            "options": as_json(options),
            "rank": fit.rank,
            "converged": seen.get("converged", True),
            "rows": {**(seen.get("rows") or {}), **removed.rows},
            "data": {
                "features": {"path": str(options.features), "content_sha256": store.content_sha256},
                "pairs": removed.pairs,
                **{role: removed.where.get(role) or data.get(role) for role in ("train", "val", "test")},
            },
        }
    probe = Probe(
        weight=fit.weight,
        bias=fit.bias,
        basis=removed.basis,
        singular_values=removed.singular_values,
        classes=tuple(words),
        task="classification",
        target=target,
        meta=meta,
    )
    write_probe(options.output, probe)
    shown = ("method", "prompts", "words", "rank", "mixed_with")
    return {
        "output": str(options.output),
        "target": target,
        "classes": list(words),
        **{name: meta[name] for name in shown},
        **facts,
        **{name: selection[name] for name in ("rule", "path", "chosen", "verdict")},
    }


def _answers(store: FeatureStore, target: str, classes: tuple[str, ...], *, named: bool) -> Target | None:
    """The store's answers as codes of these classes; None where it has no such column, and none was named.

    Raises `InputError` for fewer than two classes, or where no row is of any: names must be the column's.
    """
    if len(classes) < 2:
        raise InputError("a classifier needs two classes or more", found=listing(classes))
    if not named and target not in store.columns:
        return None
    found = read_target(store, target, classes)
    if not found.known.any():
        raise InputError(
            f"no row of the store is of any of these classes in column {target!r}",
            where=store.path,
            found=listing(classes),
            expected=f"some of: {listing(store.categorical(target).categories)}",
            fix="name the column's classes, and what they are called in prompts: --classes 0=cat,1=dog",
        )
    return found


def _templates(options: ZeroshotOptions) -> list[str]:
    found = list(dict.fromkeys(read_prompts(options.prompts)))
    for prompt in found:
        if "{" not in prompt:
            raise InputError(
                "a prompt without a place for the class",
                where="--prompts",
                found=repr(prompt),
                expected="text such as 'a photo of a {}', a file with one a line, or openai",
            )
    if not found:
        raise InputError("no prompts", where=f"--prompts {listing(options.prompts)}")
    return found


def _require_mixable(
    options: ZeroshotOptions, other: Probe, store: FeatureStore, classes: tuple[str, ...]
) -> None:
    """Refuse a probe whose weights can't be averaged with those of prompts."""
    require_same_encoder(options.probe, other.encoder, store.path, store.encoder, ignore_view=True)
    if other.classes != classes:
        raise MismatchError(
            "a probe of other classes, or of another order of them, can't be mixed with",
            where=options.probe,
            found=listing(other.classes) if other.classes else "a regression",
            expected=listing(classes),
        )
    if not store.encoder.get("normalize") and not folded(other)[2]:
        raise MismatchError(
            "a probe of rows as they are can't be mixed with zero-shot, which takes rows of unit length",
            where=options.probe,
            found=f"--scaling {(other.meta.get('scaling') or {}).get('kind', 'none')}, features as encoded",
            expected="a probe of rows of one length",
            fix="ncm fit --scaling norm; or ncm embed --normalize, and fit again",
        )


def from_prompts(tower: TextTower, prompts: list[str], words: list[str]) -> tuple[Array, Array]:
    """Weights (C, d) and biases (C,), both float64, of a probe on rows of unit length; C = 1 for two classes.

    A bias that all classes share (SigLIP's) changes no probability among them.
    """
    texts = [filled(prompt, name) for name in words for prompt in prompts]
    rows = _unit(tower.encode(texts).astype(np.float64)).reshape(len(words), len(prompts), -1)
    weight = tower.logit_scale * _unit(rows.mean(axis=1))
    weight = weight[1:] - weight[:1] if len(weight) == 2 else weight
    return weight, np.zeros(len(weight))


def _unit(rows: Array) -> Array:
    return np.asarray(rows / np.linalg.norm(rows, axis=-1, keepdims=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Removed:
    """The directions of ``--pairs`` that are removed, and how many those are was chosen."""

    basis: Array
    singular_values: Array
    selection: dict[str, Any]
    pairs: dict[str, Any] | None = None
    """What the probe records of the pairs."""
    where: dict[str, str | None] = dataclasses.field(default_factory=dict)
    rows: dict[str, str] = dataclasses.field(default_factory=dict)
    """``val``: the ids of the rows that ranks were judged by, as `record_ids` has them."""


def _remove(
    options: ZeroshotOptions,
    store: FeatureStore,
    fit: Fit,
    scaling: Scaling,
    answers: Target | None,
    reporter: Reporter,
) -> _Removed:
    """What to remove from the weights of a ``fit`` of rank 0."""
    selection = {"rule": ONLY, "oracle": False, "note": "", "folds": 0, "chosen": 0, "verdict": None}
    selection |= {"controls": [], "crossings": []}
    if options.pairs is None:
        only = {"rank": 0, "weight_decay": 0.0, "converged": True}
        none = np.zeros((fit.weight.shape[1], 0))
        return _Removed(basis=none, singular_values=np.zeros(0), selection=selection | {"path": [only]})
    where: dict[Role, str | None] = {"train": None, "val": options.val or split_filter(store, "val")}
    where["test"] = split_filter(store, "test")
    rows = {role: np.zeros(store.rows, bool) if w is None else store.mask(w) for role, w in where.items()}
    pairs = pairs_beside(options.pairs, store, Roles(where=where, rows=rows), "exclude", reporter)
    at = np.flatnonzero(rows["val"] & answers.known) if answers is not None else np.zeros(0, int)
    val = Rows(X=scaling.apply(store.rows_of(at)), y=answers.y[at]) if answers and len(at) else None
    whole = pairs.spectrum(pairs.usable, scaling)
    chosen, rank = _choose(options, fit, pairs, whole, scaling, val, answers, reporter)
    record = {
        "path": str(options.pairs),
        "content_sha256": pairs.store.content_sha256,
        "used": int(pairs.usable.sum()),
        "held_out": int(pairs.held_out.sum()),
        "left_out": int((~pairs.usable).sum()),
        "strategy": pairs.store.strategy,
        "sources": [dict(source) for source in pairs.store.sources],
        "numerical_rank": whole.rank,
    }
    return _Removed(
        basis=np.ascontiguousarray(whole.basis[:, :rank]),
        singular_values=whole.singular_values[: whole.rank],
        selection=selection | chosen,
        pairs=record,
        where={"val": where["val"] if len(at) else None, "test": where["test"]},
        rows={"val": record_ids(store.ids[at])} if len(at) else {},
    )


def _choose(
    options: ZeroshotOptions,
    fit: Fit,
    pairs: Pairs,
    whole: Spectrum,
    scaling: Scaling,
    val: Rows | None,
    answers: Target | None,
    reporter: Reporter,
) -> tuple[dict[str, Any], int]:
    """The rank, and what a probe records of its choice.

    Several ranks are chosen among by validation error + flip rate, as in ``ncm fit``: a pair's flips are
    counted with the directions of the others removed. Without labels nothing can choose: flips alone prefer
    whatever answers always the same.
    """
    asked, shift = parse_ranks(options.rank), shift_of(pairs.store)
    several = asked is None or len(asked) > 1
    if several and val is None:
        raise InputError(
            "several ranks, and nothing to choose by",
            where=options.features,
            found="no labelled validation rows",
            fix=f"--rank {max(whole.gap, 1)}, after which these pairs' singular values fall most; or rows "
            "with a class, --val W",
        )
    try:
        folds = pairs.folds(FOLDS, 0)
    except InputError as error:
        if several:
            raise
        (rank,) = resolve_ranks(options.rank, "ncm", whole.rank, reporter)
        verdict = unmeasured(int(pairs.usable.sum()), 0, f"{error.what} ({error.found})", shift)
        only = {"rank": rank, "weight_decay": 0.0, "converged": True}
        return {"path": [only], "verdict": dataclasses.asdict(verdict)}, rank
    left = [pairs.spectrum(fold.basis & pairs.usable, scaling) for fold in folds]
    ranks = resolve_ranks(options.rank, "ncm", min(part.rank for part in (whole, *left * several)), reporter)
    tried = sorted({0, *ranks})
    parts = (
        ([without(fit, part.basis, rank) for rank in tried], val, pairs.members(fold.measured, scaling))
        for fold, part in zip(folds, left, strict=True)
    )
    found = CrossFit.join(parts, units(pairs.node_a, pairs.node_b, folds), regression=False)
    path = [candidate for candidate in found.candidates if candidate["rank"] in ranks]
    chosen = choose(path, "bound", "classification") if several else 0
    rank = path[chosen]["rank"]
    pick = tried.index(rank)
    if val is None or answers is None:
        why = f"no labelled validation rows; flip rate {found.change(0)} with nothing removed"
        why += f", {found.change(pick)} with rank {rank}" if rank else ""
        verdict = unmeasured(found.pairs, found.units, why, shift)
    else:
        code = int(np.bincount(val.y).argmax())
        constant = float(np.mean(val.y != code))
        verdict = judge(found, pick, 0, constant, repr(answers.classes[code]), shift, least_bound=several)
    made = {"rule": "bound" if several else ONLY, "folds": len(folds), "chosen": chosen}
    return made | {"path": path, "verdict": dataclasses.asdict(verdict)}, rank


def without(fit: Fit, basis: Array, rank: int) -> Fit:
    """A fit whose weights W have lost the first ``rank`` directions Q of a basis: ``W - (W Q) Qᵀ``.

    Where the basis has fewer, all of them are removed.
    """
    return dataclasses.replace(fit, rank=rank, weight=project(fit.weight, basis[:, :rank]))
