"""Weights: where they are, what they hold, and their digest. Nothing is ever unpickled freely."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ncm_cli.store.atomic import sha256_file

if TYPE_CHECKING:
    from .base import EncoderRequest


def facts(request: EncoderRequest) -> dict[str, Any]:
    """The part of a request's key that says which weights and configuration, by content where they are local.

    A path that isn't there counts by its text: loading it will say what is wrong.
    """
    from .base import effective_pretrained

    if request.random_init:
        found: dict[str, Any] = {"weights": {"random_init": request.seed}}
    else:
        named = effective_pretrained(request)
        found = {"weights": digest(named) if named and names_a_file(named) else named}
    if request.model.endswith(".json") and Path(request.model).is_file():
        found |= {"model": Path(request.model).stem, "config": digest(request.model)}
    elif request.model.startswith("local-dir:"):
        folder = Path(request.model.removeprefix("local-dir:")).expanduser()
        files = sorted(path for path in folder.glob("*") if path.is_file()) if folder.is_dir() else []
        found["files"] = {path.name: digest(path) for path in files}
    return found


def names_a_file(pretrained: str) -> bool:
    """Whether ``--pretrained`` is an existing file rather than a tag.

    A tag never has a suffix or a separator, so a stray file called ``openai`` doesn't hide the tag.
    """
    path = Path(pretrained).expanduser()
    return looks_like_a_path(pretrained) and path.is_file()


def looks_like_a_path(pretrained: str) -> bool:
    """Whether ``--pretrained`` is written like a path: with a separator, a suffix or a tilde."""
    path = Path(pretrained)
    return bool(
        path.suffix or len(path.parts) > 1 or pretrained.startswith(("~", ".")) or os.sep in pretrained
    )


def digest(path: str | Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file, remembered while its size and time of change stay the same."""
    state = Path(path).expanduser().stat()
    return {"size": state.st_size, "sha256": _sha256(str(path), state.st_size, state.st_mtime_ns)}


@lru_cache(maxsize=64)
def _sha256(path: str, size: int, mtime_ns: int) -> str:
    return sha256_file(Path(path).expanduser())
