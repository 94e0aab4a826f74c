"""Real images and weights: ERM probes on EfficientNet-Lite0 features of PACS, a domain left out at a time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from ncm_cli.main import run
from ncm_cli.store.columns import Column
from ncm_cli.store.features import FeatureStore

DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
DECAY = 1e-3
EACH = 35
"""Pictures of a class in a domain."""


def _ncm(*words: object) -> None:
    assert run([str(word) for word in words]) == 0, words


@pytest.mark.slow
def test_erm_probes_are_good_and_equal_scikit_learns(
    pacs_dir: Path, effnet_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    features = tmp_path / "f.h5"
    _ncm("data", "pacs", pacs_dir, "-o", tmp_path / "data", "--limit", EACH)
    model = ("--model", "timm:tf_efficientnet_lite0", "--pretrained", effnet_checkpoint)
    _ncm("embed", tmp_path / "data" / "manifest.csv", *model, "-o", features)
    with FeatureStore(features) as store:
        assert store.rows == 4 * 7 * EACH
        label = store.column("label")
        assert isinstance(label, Column)
        X, y = store.read().astype(np.float64), label.codes
        X *= 10 / np.linalg.norm(X, axis=1, keepdims=True)
        masks = {
            domain: [store.mask(f"split={split} & domain!={domain}") for split in ("train", "val")]
            for domain in DOMAINS
        }
    found = {}
    for domain, (train, val) in masks.items():
        probe, result = tmp_path / f"{domain}.safetensors", tmp_path / f"{domain}.json"
        rows = [f"split={split} & domain!={domain}" for split in ("train", "val")]
        where = ("--train", rows[0], "--val", rows[1])
        _ncm("fit", "-f", features, *where, "--scaling", "norm", "--weight-decay", DECAY, "-o", probe)
        _ncm("eval", probe, "-f", features, "--where", rows[1], "-o", result)
        ours = json.loads(result.read_text())["accuracy"]
        theirs = LogisticRegression(C=1 / (train.sum() * DECAY), max_iter=5000, tol=1e-6).fit(
            X[train], y[train]
        )
        found[domain] = (ours, theirs.score(X[val], y[val]))
    with capsys.disabled():
        print("\nvalidation accuracy without", {k: f"{a:.3f} / {b:.3f}" for k, (a, b) in found.items()})
    for domain, (ours, theirs) in found.items():
        assert ours >= 0.8, domain
        assert abs(ours - theirs) <= 0.005, domain
