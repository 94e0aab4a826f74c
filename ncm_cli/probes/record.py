"""The record of a fitted probe: its rows and pairs, how it was fitted, and warnings that go with it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from ncm_cli.blocks import Mask
from ncm_cli.probes.problem import Pairs, Problem, Variant, pairs_digest, rows_digest
from ncm_cli.solvers.training_set import Fit, TrainingSet
from ncm_cli.store.digests import fingerprint
from ncm_cli.store.probe import Probe, record_ids


def flags_of(problem: Problem, oracle: bool) -> list[str]:
    """Warnings to show wherever this probe's numbers are shown."""
    flags = ["ORACLE: chosen by looking at the test rows"] if oracle else []
    if problem.options.overlap == "keep":
        if problem.copies:
            flags.append(f"OVERLAP: {problem.copies} training images are validation or test images")
        if problem.pairs is not None and (overlapping := problem.pairs.overlapping):
            flags.append(f"OVERLAP: {overlapping} pairs have a validation or test row as a member")
    return flags


def pairs_used(pairs: Pairs, used: Mask, held_out: Mask) -> dict[str, Any]:
    """The pairs' file and the counts of two masks (k,); for several stores, the sums and ``stores``."""
    masks = {"used": used, "held_out": held_out}
    stores = [
        {
            "path": str(path),
            "content_sha256": store.content_sha256,
            **{name: int(mask[pairs.kind == at].sum()) for name, mask in masks.items()},
        }
        for at, (path, store) in enumerate(zip(pairs.paths, pairs.stores, strict=True))
    ]
    if len(stores) == 1:
        return stores[0]
    return {**{name: int(mask.sum()) for name, mask in masks.items()}, "stores": stores}


def pairs_record(pairs: Pairs, rank: int) -> dict[str, Any]:
    """The record of the pairs of a fit: their files, strategies and numerical rank, and how many are used."""
    record = pairs_used(pairs, pairs.usable, pairs.held_out)
    for store, facts in zip(pairs.stores, record.get("stores") or [record], strict=True):
        facts["strategy"] = store.strategy
    return record | {"numerical_rank": rank}


def origin_of(problem: Problem, training: TrainingSet, variant: Variant) -> dict[str, Any]:
    """The record of a variant's rows and of the pairs; reads every row."""
    pairs, parts = problem.pairs, {"train": problem.rows(variant), "val": problem.val}
    sources = () if pairs is None else itertools.chain(*(store.sources for store in pairs.stores))
    paired = pairs and pairs_record(pairs, training.rank) | {
        "used_sha256": pairs_digest(problem),
        "left_out": int((~pairs.usable).sum()),
        "sources": [dict(source) for source in sources],
    }
    return {
        "rows": {name: record_ids(rows.ids) for name, rows in parts.items() if rows is not None},
        "data": {
            "features": {
                "path": str(problem.options.features),
                "content_sha256": problem.content_sha256,
                "train_sha256": rows_digest(problem, variant),
            }
            | ({"row_numbers_of": problem.row_numbers_of} if problem.row_numbers_of else {}),
            "pairs": paired,
            **problem.roles.where,
            "train_rows": len(training.X),
            "val_rows": 0 if problem.val is None else len(problem.val.ids),
        },
    }


def probe_of(
    problem: Problem, training: TrainingSet, best: Fit, record: Mapping[str, Any], origin: Mapping[str, Any]
) -> Probe:
    """A probe fitted on ``training``; ``record`` says how, and `origin_of` makes ``origin``."""
    scaling, spectrum = training.scaling, training.spectrum
    meta = {
        "encoder": problem.encoder,
        "fingerprint": fingerprint(problem.encoder),
        "scaling": {"kind": scaling.kind, "factor": scaling.factor},
        **record,
        "rank": best.rank,
        "converged": best.converged,
        **origin,
    }
    return Probe(
        weight=best.weight,
        bias=best.bias,
        basis=np.ascontiguousarray(training.basis(best.rank)),
        singular_values=np.zeros(0) if spectrum is None else spectrum.singular_values[: spectrum.rank],
        mean=scaling.mean,
        scale=scaling.scale,
        classes=problem.target.classes,
        task="regression" if problem.regression else "classification",
        target=problem.target.name,
        meta=meta,
    )
