"""The settings that decide features, and what to say when a store was made with others."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ncm_cli.errors import InputError, MismatchError
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.fingerprint import canonical_json, differing_fields

_TELLING = ("kind", "model", "precision", "normalize", "view", "intensity_range")
"""Fields of a request that can't differ between two requests for the same features."""


@dataclass(frozen=True)
class Settings:
    """What a run asks for: the encoder's request key, and the type on disk."""

    key: dict[str, Any]
    dtype: str

    def as_dict(self) -> dict[str, Any]:
        """As stored with the features."""
        return {"encoder": json.loads(canonical_json(self.key)), "dtype": self.dtype}

    def journal_key(self) -> dict[str, Any]:
        """As kept with an unfinished run: the type on disk plays no part in its float32 rows."""
        return {"encoder": self.as_dict()["encoder"]}

    def made(self, store: FeatureStore) -> bool:
        """Whether the very same request made a store: its rows are then valid without a look at the model."""
        return bool(store.request.get("encoder") == self.as_dict()["encoder"])

    def require_same(self, store: FeatureStore, description: dict[str, Any]) -> None:
        """Raise `MismatchError` unless a store's encoder is the one described."""
        if self.made(store):
            return
        fields = differing_fields(store.encoder, description)
        if fields:
            raise other_settings(store.path, fields)

    def require_unmoved(self, loaded: dict[str, Any], stored: dict[str, Any], output: Path) -> None:
        """Raise `MismatchError` if the loaded model isn't what an equal request gave before."""
        fields = differing_fields(stored, loaded)
        if fields:
            raise other_settings(output, fields)


def other_settings(path: Path, fields: list[tuple[str, Any, Any]]) -> MismatchError:
    """The error that names the fields in which a store differs from what is asked."""
    lines = [f"{name}: {_short(there)} there, {_short(asked)} asked for" for name, there, asked in fields]
    return MismatchError(
        "the store was made with other settings",
        where=path,
        found="\n    ".join(["", *lines]),
        expected="one encoder in one store; nothing was changed",
        fix="name another output with -o, use the store's settings, or replace the store with --fresh",
    )


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def open_old(output: Path, settings: Settings) -> FeatureStore | None:
    """The store that is to be brought up to date, if there is one.

    Settings that can be compared without loading a model are compared here, so that a wrong model name
    costs no download.
    """
    if not output.exists():
        return None
    store = _opened(output, "the output is there and isn't a feature store that can be brought up to date")
    try:
        fields = differing_fields({"dtype": store.dtype}, {"dtype": settings.dtype})
        asked = settings.as_dict()["encoder"]
        there = store.request.get("encoder") or {"kind": store.encoder.get("kind")}
        fields += [field for field in differing_fields(there, asked) if field[0].split(".")[0] in _TELLING]
        if fields:
            raise other_settings(output, fields)
    except BaseException:
        store.close()
        raise
    return store


def open_reuse(path: Path, dtype: str) -> FeatureStore:
    """The store named by ``--reuse``; float16 rows can't become float32 ones again."""
    store = _opened(path, "--reuse names something else than a feature store")
    if store.files is None or (store.dtype, dtype) == ("float16", "float32"):
        problem = "no image files" if store.files is None else "float16 rows, where float32 is asked for"
        store.close()
        raise MismatchError("the rows can't be reused", where=path, found=problem)
    return store


def _opened(path: Path, what: str) -> FeatureStore:
    try:
        return FeatureStore.open(path)
    except InputError as error:
        found = "; ".join([error.what, *(text for label, text in error.lines() if label == "found")])
        raise InputError(
            what, where=path, found=found, fix="name another file, delete it, or replace it with --fresh"
        ) from error
