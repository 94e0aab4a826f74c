"""Robust linear probes on frozen image embeddings by noisy counterfactual matching.

The Python API is imported lazily, so that ``import ncm_cli`` stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ncm_cli.notebook import Result, load, run
    from ncm_cli.probes.estimator import NCMClassifier, NCMRegressor, SpuriousProjection
    from ncm_cli.store.features import FeatureStore
    from ncm_cli.store.pairs import PairStore
    from ncm_cli.store.probe import Probe

__version__ = "0.8.0"

__all__ = [
    "FeatureStore",
    "NCMClassifier",
    "NCMRegressor",
    "PairStore",
    "Probe",
    "Result",
    "SpuriousProjection",
    "__version__",
    "load",
    "run",
]

_HOMES = {
    "FeatureStore": "store.features",
    "PairStore": "store.pairs",
    "Probe": "store.probe",
    **dict.fromkeys(("Result", "load", "run"), "notebook"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ncm_cli' has no attribute {name!r}")
    from ncm_cli.registry import at_address

    return at_address(f"{_HOMES.get(name, 'probes.estimator')}:{name}")


def __dir__() -> list[str]:
    return __all__
