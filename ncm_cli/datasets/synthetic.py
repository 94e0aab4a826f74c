"""The paper's synthetic data: a linear spurious-correlation model, written as stores.

Paper, appendix "Synthetic Dataset": z_inv ~ N(0, I), y = sign(z_invᵀθ_y), z_spu ~ N(y/|I|, σ_s I) with σ_s by
domain, x = g(z_inv, z_spu) with a random orthonormal g. Labels have no noise.

σ_s is a standard deviation here. With 0.1 and 0.2 in training and 10 in test, ERM's accuracy is about .55 on
the test domain, as published; with variances it would be above .7.

A row has the same exogenous noise u in every domain: z_spu = y/|I| + σ_s u. So it has an exact twin in each
other domain, and twins differ only by (σ − σ')u in the spurious subspace.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.blocks import Array
from ncm_cli.datasets.options import SyntheticOptions
from ncm_cli.options import parse_numbers
from ncm_cli.progress import Reporter
from ncm_cli.solvers.projection import FEATURE_EPS
from ncm_cli.store.columns import Column
from ncm_cli.store.digests import fingerprint
from ncm_cli.store.features import write_features
from ncm_cli.store.files import jsonable
from ncm_cli.store.pairs import PairStore, write_pairs

CLASSES = ("-1", "1")


@dataclasses.dataclass(frozen=True, slots=True)
class Latents:
    """Rows before a domain is chosen: invariant part, label, exogenous noise of the spurious part."""

    invariant: Array
    """(n, d − |I|)."""
    label: NDArray[np.int32]
    """Codes of `CLASSES` (n,)."""
    exogenous: Array
    """u (n, |I|)."""

    def __len__(self) -> int:
        return len(self.label)


class Model:
    """One draw of the generator: the orthonormal map and the label's weights."""

    def __init__(self, options: SyntheticOptions, rng: np.random.Generator) -> None:
        self._rng = rng
        self._spurious = options.spurious
        self._theta = rng.normal(size=options.dim - options.spurious)
        mixing, upper = np.linalg.qr(rng.normal(size=(options.dim, options.dim)))
        # Fixing the signs makes the map uniform over the orthonormal matrices and the same on every platform.
        self._mixing = mixing * np.sign(np.diag(upper))

    def draw(self, n: int) -> Latents:
        """Draw ``n`` rows."""
        invariant = self._rng.normal(size=(n, len(self._theta)))
        label = (invariant @ self._theta > 0).astype(np.int32)
        return Latents(invariant, label, self._rng.normal(size=(n, self._spurious)))

    def observe(self, rows: Latents, scale: float) -> NDArray[np.float32]:
        """float32 (n, d) features of ``rows`` in the domain with this spurious scale."""
        centre = (2.0 * rows.label - 1)[:, None] / self._spurious
        latent = np.hstack([rows.invariant, centre + scale * rows.exogenous])
        return (latent @ self._mixing.T).astype(np.float32)


@dataclasses.dataclass(frozen=True, slots=True)
class Observed:
    """Rows of one split and domain."""

    split: str
    domain: str
    ids: list[str]
    label: NDArray[np.int32]
    features: NDArray[np.float32]


def build_synthetic(options: SyntheticOptions, folder: Path, reporter: Reporter) -> dict[str, Any]:
    """Write features.h5, oracle.h5, clean.h5 and a pair store for each level of noise.

    ``split`` is train, val, test, ``twin`` (of the test rows, in a training domain) or ``oracle`` (training
    rows of the test domain); ``domain`` is the spurious scale.
    """
    scales = parse_numbers(options.scales)
    rng = np.random.default_rng(options.seed)
    model = Model(options, rng)

    def observed(split: str, rows: Latents, scale: float) -> Observed:
        ids = [f"{split}-{scale:g}-{row:05d}" for row in range(len(rows))]
        return Observed(split, f"{scale:g}", ids, rows.label, model.observe(rows, scale))

    parts = [
        observed(split, model.draw(n), scale)
        for split, n in (("train", options.rows), ("val", options.val_rows))
        for scale in scales
    ]
    parts.append(observed("oracle", model.draw(options.rows * len(scales)), options.test_scale))
    latents = model.draw(options.test_rows)
    test = observed("test", latents, options.test_scale)
    # All training domains have the same share, so each twin's domain is drawn uniformly.
    domain = rng.integers(0, len(scales), size=options.test_rows)
    twins, twinned = [], []
    for code, scale in enumerate(scales):
        rows = np.flatnonzero(domain == code)
        in_domain = Latents(latents.invariant[rows], latents.label[rows], latents.exogenous[rows])
        twins.append(observed("twin", in_domain, scale))
        twinned += rows.tolist()
    parts += [test, *(part for part in twins if part.ids)]
    _write_features(folder / "features.h5", parts, options)
    ids, label = [test.ids[row] for row in twinned], test.label[twinned]
    originals = Observed("test", test.domain, ids, label, test.features[twinned])
    ids = [name for part in twins for name in part.ids]
    copies = Observed("twin", "", ids, label, np.concatenate([part.features for part in twins]))
    write_pairs(folder / "oracle.h5", _pair_store("oracle", originals, copies, options))
    latents = model.draw(options.pairs + options.holdout_pairs)
    names = [[f"pair-{row:04d}-{scale:g}" for row in range(len(latents))] for scale in scales[:2]]
    first, second = (
        Observed("pair", "", pair_ids, latents.label, model.observe(latents, scale))
        for pair_ids, scale in zip(names, scales[:2], strict=True)
    )
    clean = _pair_store("clean", first, second, options, holdout=options.holdout_pairs, noise=0.0)
    write_pairs(folder / "clean.h5", clean)
    for level in parse_numbers(options.noise):
        noisy = add_noise(clean, options, level)
        write_pairs(folder / f"noisy-{level:g}.h5", noisy)
        norm = noisy.diagnostics["epsilon_norm"]
        reporter.detail(f"noisy-{level:g}.h5: spectral norm of the noise {norm:.4g}")
    counts = [{"split": part.split, "domain": part.domain, "n": len(part.ids)} for part in parts]
    total = sum(len(part.ids) for part in parts)
    return {"rows": total, "pairs": options.pairs, "counts": {"rows": counts}}


def _encoder(options: SyntheticOptions) -> dict[str, Any]:
    named = {name: getattr(options, name) for name in ("seed", "dim", "spurious")}
    return {"kind": "synthetic", "model": "linear-spurious", **named}


def _pair_store(
    strategy: str, a: Observed, b: Observed, options: SyntheticOptions, *, holdout: int = 0, **facts: float
) -> PairStore:
    """The pair store with its last ``holdout`` pairs held out."""
    used, labels = len(a.ids) - holdout, tuple(CLASSES[code] for code in a.label)
    singular = _spectrum(a.features[:used], b.features[:used])
    encoder = _encoder(options)
    return PairStore(
        features_a=a.features,
        features_b=b.features,
        id_a=tuple(a.ids),
        id_b=tuple(b.ids),
        label_a=labels,
        label_b=labels,
        holdout=np.arange(len(a.ids)) >= used,
        singular_values=singular,
        strategy=strategy,
        options=jsonable(options),
        encoder=encoder,
        fingerprint=fingerprint(encoder),
        sources=[],
        diagnostics={"pairs": len(a.ids), "held_out": holdout, "rank": len(singular), **facts},
    )


def _spectrum(a: NDArray[np.float32], b: NDArray[np.float32]) -> Array:
    """Singular values of the differences, above numpy's rank rule at float32 precision."""
    delta = (a - b).T.astype(np.float64)
    values: Array = np.linalg.svd(delta, full_matrices=False)[1]
    return values[values > max(delta.shape) * FEATURE_EPS * values[0]]


def add_noise(clean: PairStore, options: SyntheticOptions, level: float) -> PairStore:
    """The pairs with Gaussian noise on their second members; the diagnostics record its size.

    The noise matrix ε = Δ̃ − Δ of the pairs to learn from has the spectral norm ``level`` · σ_|I| of their
    clean differences; noise of held-out pairs has the same variance. All levels are multiples of one draw.
    """
    used, values = options.pairs, clean.singular_values
    sigma = float(values[min(options.spurious, len(values)) - 1])
    noise = np.random.default_rng([options.seed, 1]).normal(size=clean.features_b.shape)
    noise *= level * sigma / np.linalg.norm(noise[:used], 2)
    features = (clean.features_b - noise).astype(np.float32)
    singular = _spectrum(clean.features_a[:used], features[:used])
    facts = {"rank": len(singular), "noise": level, "sigma": sigma, "epsilon_norm": level * sigma}
    return dataclasses.replace(
        clean,
        features_b=features,
        singular_values=singular,
        strategy="noisy",
        diagnostics={**clean.diagnostics, **facts},
    )


def _write_features(path: Path, parts: Sequence[Observed], options: SyntheticOptions) -> None:
    def column(name: str, texts: list[str]) -> Column:
        categories, codes = np.unique(texts, return_inverse=True)
        return Column(name, codes.astype(np.int32), tuple(categories.tolist()))

    write_features(
        path,
        ids=[name for part in parts for name in part.ids],
        blocks=(part.features for part in parts),
        dim=options.dim,
        columns=[
            Column("label", np.concatenate([part.label for part in parts]), CLASSES),
            column("split", [part.split for part in parts for _ in part.ids]),
            column("domain", [part.domain for part in parts for _ in part.ids]),
        ],
        label_column="label",
        split_column="split",
        encoder=_encoder(options),
        options=jsonable(options),
    )
