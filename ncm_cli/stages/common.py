"""What several stages need: encoders that must agree, and a probe applied to features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ncm_cli.errors import InputError, MismatchError, listing
from ncm_cli.methods.scaling import KINDS, Scaling
from ncm_cli.store.fingerprint import differing_fields
from ncm_cli.store.probe import Probe


def require_same_encoder(
    name_a: object,
    encoder_a: Mapping[str, Any],
    name_b: object,
    encoder_b: Mapping[str, Any],
    *,
    ignore_view: bool = False,
) -> None:
    """Raise `MismatchError` naming the fields in which two encoder descriptions differ.

    ``ignore_view`` lets a store and its augmented view pass for the same encoder.
    """
    fields = differing_fields(encoder_a, encoder_b, ignore_view=ignore_view)
    if fields:
        raise MismatchError(
            "features of different encoders",
            where=f"{name_a} and {name_b}",
            found=listing((f"{name}: {a!r} against {b!r}" for name, a, b in fields), limit=6),
            expected="the same encoder, weights and preprocessing",
            fix="embed one of them again with the other's options",
        )


def scaling_of(probe: Probe) -> Scaling:
    """How the probe's features are scaled."""
    scaling = probe.meta.get("scaling") or {}
    kind = scaling.get("kind", "none")
    if kind not in KINDS or (kind == "standard" and (probe.mean is None or probe.scale is None)):
        raise InputError("a feature scaling that isn't known", found=kind, expected=" | ".join(KINDS))
    return Scaling(kind, float(scaling.get("factor") or 1.0), probe.mean, probe.scale)


def scale_like(probe: Probe, X: np.ndarray) -> np.ndarray:
    """float64 (n, d): features scaled as the probe's training rows were."""
    if X.shape[-1] != probe.dim:
        raise MismatchError(
            "features of another width than the probe's", found=int(X.shape[-1]), expected=int(probe.dim)
        )
    return scaling_of(probe).apply(X)


def logits(probe: Probe, X: np.ndarray) -> np.ndarray:
    """float64 (n, C): scaled features times weights plus bias; for regression the predictions themselves."""
    made: np.ndarray = scale_like(probe, X) @ probe.weight.T + probe.bias
    return made
