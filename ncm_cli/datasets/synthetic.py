"""The paper's synthetic data: a linear spurious-correlation model, written as stores.

Paper, appendix "Synthetic Dataset": z_inv ~ N(0, I), y = sign(z_invᵀθ_y), z_spu ~ N(y/|I|, σ_s I) with σ_s by
domain, x = g(z_inv, z_spu) with a random orthonormal g. Labels have no noise.

σ_s is taken as a standard deviation. With 0.1 and 0.2 in training and 10 in test that gives ERM about .55 on
the test domain, as published; as a variance it would be above .7.

A row keeps its exogenous noise u in every domain: z_spu = y/|I| + σ_s u. So a row has an exact twin in each
other domain, and twins differ by (σ − σ')u in the spurious subspace only.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.datasets.base import Built, CountTable, building
from ncm_cli.datasets.options import SyntheticOptions
from ncm_cli.options import as_json, check, parse_numbers
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.store.columns import Column
from ncm_cli.store.digests import fingerprint
from ncm_cli.store.features import write_features
from ncm_cli.store.pairs import PairStore, write_pairs

Array = NDArray[np.float64]

CLASSES = ("-1", "1")

FLOAT32_EPS = float(np.finfo(np.float32).eps)


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
        invariant = options.dim - options.spurious
        self._theta = rng.normal(size=invariant)
        gaussian = rng.normal(size=(options.dim, options.dim))
        mixing, upper = np.linalg.qr(gaussian)
        # Fixing the signs makes the map uniform over the orthonormal matrices and the same on every platform.
        self._mixing = mixing * np.sign(np.diag(upper))

    def draw(self, n: int) -> Latents:
        """``n`` rows."""
        invariant = self._rng.normal(size=(n, len(self._theta)))
        label = (invariant @ self._theta > 0).astype(np.int32)
        return Latents(invariant, label, self._rng.normal(size=(n, self._spurious)))

    def observe(self, rows: Latents, scale: float | Array) -> NDArray[np.float32]:
        """Features (n, d) of ``rows`` in the domain, or domains (n, 1), of that spurious scale."""
        centre = (2.0 * rows.label - 1)[:, None] / self._spurious
        latent = np.hstack([rows.invariant, centre + scale * rows.exogenous])
        return (latent @ self._mixing.T).astype(np.float32)


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Rows of one split and domain."""

    split: str
    domain: str
    latents: Latents
    features: NDArray[np.float32]

    @property
    def ids(self) -> list[str]:
        return [f"{self.split}-{self.domain}-{row:05d}" for row in range(len(self.latents))]


def build(options: SyntheticOptions, reporter: Reporter = SILENT) -> Built:
    """Write features.h5, oracle.h5, clean.h5 and a noisy store for each level.

    ``split`` is train, val, test, ``twin`` (of the test rows, in a training domain) or ``oracle`` (training
    rows of the test domain); ``domain`` is the spurious scale.
    """
    check(options)
    scales = parse_numbers(options.scales)
    rng = np.random.default_rng(options.seed)
    model = Model(options, rng)
    encoder = {
        "kind": "synthetic",
        "model": "linear-spurious",
        "seed": options.seed,
        "dim": options.dim,
        "spurious": options.spurious,
    }
    parts, oracle = _parts(options, scales, model, rng)
    levels = _level_names(options)
    with building(options.output, "synthetic", as_json(options)) as folder:
        _write_features(folder / "features.h5", parts, encoder, options)
        write_pairs(folder / "oracle.h5", oracle.store(encoder, options, holdout=0, facts={}))
        clean = _train_pairs(options, scales, model)
        write_pairs(folder / "clean.h5", clean.store(encoder, options, options.holdout_pairs, {"noise": 0.0}))
        for name, level in levels.items():
            noisy, facts = add_noise(clean, options, level)
            write_pairs(
                folder / f"noisy-{name}.h5", noisy.store(encoder, options, options.holdout_pairs, facts)
            )
            reporter.detail(f"noisy-{name}.h5: spectral norm of the noise {facts['epsilon_norm']:.4g}")
    names = ("features", "oracle", "clean", *(f"noisy-{name}" for name in levels))
    rows = tuple((part.split, part.domain, len(part.latents)) for part in parts)
    return Built(
        builder="synthetic",
        output=options.output,
        files={name: options.output / f"{name}.h5" for name in names},
        facts={
            "rows": sum(len(part.latents) for part in parts),
            "pairs": options.pairs,
            "seed": options.seed,
        },
        tables=(CountTable(title="rows", columns=("split", "domain", "n"), rows=rows),),
    )


def _level_names(options: SyntheticOptions) -> dict[str, float]:
    return {f"{level:g}": level for level in parse_numbers(options.noise)}


def _parts(
    options: SyntheticOptions, scales: tuple[float, ...], model: Model, rng: np.random.Generator
) -> tuple[list[Part], Members]:
    parts = []
    for split, n in (("train", options.rows), ("val", options.val_rows)):
        for scale in scales:
            latents = model.draw(n)
            parts.append(Part(split, f"{scale:g}", latents, model.observe(latents, scale)))
    far = f"{options.test_scale:g}"
    latents = model.draw(options.rows * len(scales))
    parts.append(Part("oracle", far, latents, model.observe(latents, options.test_scale)))
    latents = model.draw(options.test_rows)
    test = Part("test", far, latents, model.observe(latents, options.test_scale))
    # P(e) is the training domains' share: each twin's domain is drawn evenly.
    domain = rng.integers(0, len(scales), size=options.test_rows)
    twin_parts = []
    members: dict[str, list[Any]] = {"a": [], "b": [], "id_a": [], "id_b": [], "label": []}
    for code, scale in enumerate(scales):
        chosen = np.flatnonzero(domain == code)
        own = Latents(latents.invariant[chosen], latents.label[chosen], latents.exogenous[chosen])
        twin = Part("twin", f"{scale:g}", own, model.observe(own, scale))
        twin_parts.append(twin)
        members["a"].append(test.features[chosen])
        members["b"].append(twin.features)
        members["id_a"] += [test.ids[row] for row in chosen]
        members["id_b"] += twin.ids
        members["label"].append(own.label)
    oracle = Members(
        np.concatenate(members["a"]),
        np.concatenate(members["b"]),
        tuple(members["id_a"]),
        tuple(members["id_b"]),
        np.concatenate(members["label"]),
        "oracle",
    )
    return [*parts, test, *(part for part in twin_parts if len(part.latents))], oracle


@dataclasses.dataclass(frozen=True, slots=True)
class Members:
    """Pairs before they are a store."""

    a: NDArray[np.float32]
    b: NDArray[np.float32]
    id_a: tuple[str, ...]
    id_b: tuple[str, ...]
    label: NDArray[np.int32]
    strategy: str

    def store(
        self, encoder: dict[str, Any], options: SyntheticOptions, holdout: int, facts: dict[str, Any]
    ) -> PairStore:
        """The pair store with its last ``holdout`` pairs held out."""
        held = np.arange(len(self.a)) >= len(self.a) - holdout
        singular = _spectrum((self.a - self.b)[~held].T.astype(np.float64))
        labels = tuple(CLASSES[code] for code in self.label)
        return PairStore(
            features_a=self.a,
            features_b=self.b,
            id_a=self.id_a,
            id_b=self.id_b,
            label_a=labels,
            label_b=labels,
            holdout=held,
            singular_values=singular,
            strategy=self.strategy,
            options=as_json(options),
            encoder=encoder,
            fingerprint=fingerprint(encoder),
            sources=[],
            diagnostics={"pairs": len(self.a), "held_out": holdout, "rank": len(singular), **facts},
        )


def _spectrum(delta: Array) -> Array:
    """Singular values above numpy's rank rule at float32 precision."""
    values = np.linalg.svd(delta, full_matrices=False)[1]
    return values[values > max(delta.shape) * FLOAT32_EPS * values[0]]


def _train_pairs(options: SyntheticOptions, scales: tuple[float, ...], model: Model) -> Members:
    """Clean counterfactual pairs: one row in the first and in the second training domain."""
    latents = model.draw(options.pairs + options.holdout_pairs)
    ids = [
        tuple(f"pair-{row:04d}-{scale:g}" for row in range(len(latents))) for scale in (scales[0], scales[1])
    ]
    first, second = model.observe(latents, scales[0]), model.observe(latents, scales[1])
    return Members(first, second, ids[0], ids[1], latents.label, "clean")


def add_noise(clean: Members, options: SyntheticOptions, level: float) -> tuple[Members, dict[str, Any]]:
    """The pairs with Gaussian noise on their second members, and its size.

    The noise matrix ε = Δ̃ − Δ of the pairs to learn from has the spectral norm ``level``, in σ_|I| of their
    clean differences or absolute; held-out pairs have noise of the same size an entry. Every level is the
    same draw, multiplied.
    """
    d, used = clean.a.shape[1], options.pairs
    values = _spectrum((clean.a - clean.b)[:used].T.astype(np.float64))
    sigma = float(values[min(options.spurious, len(values)) - 1])
    size = level * sigma if options.noise_unit == "sigma" else level
    noise = np.random.default_rng([options.seed, 1]).normal(size=(len(clean.a), d))
    noise *= size / np.linalg.norm(noise[:used], 2)
    noisy = dataclasses.replace(clean, b=(clean.b - noise).astype(np.float32), strategy="noisy")
    return noisy, {"noise": level, "noise_unit": options.noise_unit, "sigma": sigma, "epsilon_norm": size}


def _write_features(
    path: Path, parts: list[Part], encoder: dict[str, Any], options: SyntheticOptions
) -> None:
    def column(name: str, values: list[str]) -> Column:
        categories = tuple(sorted(set(values)))
        code = {category: index for index, category in enumerate(categories)}
        return Column(name, np.array([code[value] for value in values], dtype=np.int32), categories)

    counts = [len(part.latents) for part in parts]
    columns = [
        Column("label", np.concatenate([part.latents.label for part in parts]), CLASSES),
        column("split", [part.split for part, n in zip(parts, counts, strict=True) for _ in range(n)]),
        column("domain", [part.domain for part, n in zip(parts, counts, strict=True) for _ in range(n)]),
    ]
    write_features(
        path,
        ids=[id for part in parts for id in part.ids],
        blocks=(part.features for part in parts),
        dim=options.dim,
        columns=columns,
        label_column="label",
        split_column="split",
        encoder=encoder,
        options=as_json(options),
    )
