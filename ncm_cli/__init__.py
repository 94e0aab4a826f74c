"""Robust linear probes on frozen image embeddings by noisy counterfactual matching.

The Python API is imported lazily, so that ``import ncm_cli`` stays cheap.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.2.0"

_API = {
    "FeatureStore": "ncm_cli.store.features",
    "PairStore": "ncm_cli.store.pairs",
    "Probe": "ncm_cli.store.probe",
    "NCMClassifier": "ncm_cli.probes.estimator",
    "NCMRegressor": "ncm_cli.probes.estimator",
    "SpuriousProjection": "ncm_cli.probes.estimator",
}

__all__ = ["__version__", *_API]


def __getattr__(name: str) -> Any:
    if name in _API:
        return getattr(importlib.import_module(_API[name]), name)
    raise AttributeError(f"module 'ncm_cli' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
