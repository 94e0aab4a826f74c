"""A probe applied to features: encoders that must agree, and scaling, which pairs have like rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.blocks import Features, applied, moments
from ncm_cli.errors import InputError, MismatchError, listing
from ncm_cli.probes.options import SCALINGS
from ncm_cli.probes.projection import Array
from ncm_cli.store.digests import differing_fields
from ncm_cli.store.probe import Probe


@dataclasses.dataclass(frozen=True, slots=True)
class Scaling:
    """How features are scaled before anything is fitted on them.

    Attributes
    ----------
    kind
        ``none``; ``norm``: each row divided by its Euclidean norm, times ``factor``; ``standard``: each
        column minus ``mean``, divided by ``scale``.
    factor
        The rows' norm, for ``norm`` only.
    mean, scale : float64 (d,) or None
        For ``standard`` only. A column that is constant on the training rows has scale 1.
    """

    kind: str = "none"
    factor: float = 1.0
    mean: Array | None = None
    scale: Array | None = None

    def apply(self, X: Features) -> Any:
        """Scaled rows, float64 (n, d), of an array an array. A row of zeros stays zero under ``norm``."""
        return applied(X, self._scaled)

    def _scaled(self, X: NDArray[np.floating]) -> Array:
        rows: Array = np.asarray(X, np.float64)
        if self.kind == "norm":
            norms = np.sqrt(np.einsum("nd,nd->n", rows, rows))
            return rows * (self.factor / np.where(norms > 0, norms, 1.0))[:, None]
        if self.mean is not None and self.scale is not None:
            return (rows - self.mean) / self.scale
        return rows

    def magnitude(self, X: NDArray[np.floating]) -> float:
        """Root mean square entry in the scaled unit, before centring: what rounding is relative to."""
        if not len(X):
            return 0.0
        unit = np.asarray(X, np.float64) / self.scale if self.scale is not None else self.apply(X)
        return float(np.sqrt(np.mean(unit**2)))


def fit_scaling(kind: str, factor: float, X: Features) -> Scaling:
    """The scaling of ``kind``; ``X`` (n, d) are the training rows, used by ``standard`` only.

    Raises `InputError` for an unknown kind, a factor that isn't positive, or no rows for ``standard``.
    """
    if kind not in SCALINGS:
        raise InputError(f"no feature scaling named {kind!r}", expected=" | ".join(SCALINGS))
    if kind == "norm" and not (np.isfinite(factor) and factor > 0):
        raise InputError("the scale factor must be above 0", found=factor)
    if kind != "standard":
        return Scaling(kind, float(factor))
    if not len(X):
        raise InputError("standard scaling needs training rows", found="none")
    mean, deviation = moments(X)
    # A constant column's deviation is rounding of its mean, not spread.
    return Scaling(kind, 1.0, mean, np.where(deviation <= 1e-7 * np.abs(mean), 1.0, deviation))


OTHER_WEIGHTS = "--pretrained FILE names the weights that the features were made with"
"""What to do where the encoder that is loaded isn't that of the features."""


def require_same_encoder(
    name_a: object,
    encoder_a: Mapping[str, Any],
    name_b: object,
    encoder_b: Mapping[str, Any],
    *,
    ignore_view: bool = False,
    fix: str = "embed one of them again with the other's options",
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
            fix=fix,
        )


def scaling_of(probe: Probe) -> Scaling:
    """How the probe's features are scaled."""
    scaling = probe.meta.get("scaling") or {}
    kind = scaling.get("kind", "none")
    if kind not in SCALINGS or (kind == "standard" and (probe.mean is None or probe.scale is None)):
        raise InputError("a feature scaling that isn't known", found=kind, expected=" | ".join(SCALINGS))
    return Scaling(kind, float(scaling.get("factor") or 1.0), probe.mean, probe.scale)


def scale_like(probe: Probe, X: Features) -> Any:
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
