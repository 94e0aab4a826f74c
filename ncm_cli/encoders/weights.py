"""Which weights a request names: the file or tag, and what they are by content."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ncm_cli.errors import InputError, listing, nearest
from ncm_cli.store.atomic import sha256_file

from .checkpoint import check_checkpoint

if TYPE_CHECKING:
    from .base import EncoderRequest

CHECKPOINT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".tar", ".th")


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
    if names_a_config(request.model) and Path(request.model).expanduser().is_file():
        found |= {"model": Path(request.model).stem, "config": digest(request.model)}
    elif request.model.startswith("local-dir:"):
        folder = Path(request.model.removeprefix("local-dir:")).expanduser()
        files = sorted(path for path in folder.glob("*") if path.is_file()) if folder.is_dir() else []
        found |= {"model": f"local-dir:{folder.name}", "files": {path.name: digest(path) for path in files}}
    return found


def names_a_config(model: str) -> bool:
    """Whether ``--model`` is written like the path of an open_clip configuration."""
    return model.endswith(".json")


def names_a_file(pretrained: str) -> bool:
    """Whether ``--pretrained`` is an existing file rather than a tag.

    A tag never has a suffix or a separator, so a stray file called ``openai`` doesn't hide the tag.
    """
    return looks_like_a_path(pretrained) and Path(pretrained).expanduser().is_file()


def looks_like_a_path(pretrained: str) -> bool:
    """Whether ``--pretrained`` is written like a path: with a separator, a suffix or a tilde."""
    return bool(Path(pretrained).suffix) or os.sep in pretrained or pretrained.startswith(("~", "."))


def digest(path: str | Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file, remembered while its size and time of change stay the same."""
    state = Path(path).expanduser().stat()
    return {"size": state.st_size, "sha256": _sha256(str(path), state.st_size, state.st_mtime_ns)}


@lru_cache(maxsize=64)
def _sha256(path: str, size: int, mtime_ns: int) -> str:
    return sha256_file(Path(path).expanduser())


def resolve(
    pretrained: str, tags: Collection[str], *, model: str, tag_of: Callable[[str], str] = str
) -> Path | str:
    """The checkpoint file or the tag that ``--pretrained`` names.

    Parameters
    ----------
    tags
        The tags that the model has.
    tag_of
        A tag's usual spelling, so that ``LAION2b-s34b`` finds ``laion2b_s34b``.

    Raises
    ------
    InputError
        A folder, a missing file, a file that is no checkpoint, an unknown tag: each has its own message.
    """
    path = Path(pretrained).expanduser()
    if names_a_file(pretrained):
        check_checkpoint(path)
        return path
    if tag_of(pretrained) in tags:
        return tag_of(pretrained)
    if path.is_dir():
        files = [found.name for found in sorted(path.iterdir()) if found.suffix in CHECKPOINT_SUFFIXES]
        raise InputError(
            "--pretrained names a folder, not a checkpoint file",
            where=path,
            expected="a file, or a tag",
            fix=f"one of its files: {listing(files)}" if files else None,
        )
    if path.is_file():
        check_checkpoint(path)
        return path
    if looks_like_a_path(pretrained):
        beside = [found.name for found in path.parent.iterdir()] if path.parent.is_dir() else []
        close = nearest(path.name, beside)
        raise InputError(
            "no such checkpoint file",
            where=path,
            found=None if path.parent.is_dir() else f"the folder {path.parent} is not there either",
            fix=f"did you mean {path.parent / close}?" if close else None,
        )
    close = nearest(pretrained, tags)
    raise InputError(
        f"no tag or file named {pretrained!r} for the model {model}",
        where="--pretrained",
        expected=f"a checkpoint file, or one of the tags: {listing(tags, 40)}",
        fix=f"did you mean {close!r}?" if close else None,
    )


def require_weights(pretrained: str | None, *, model: str, example: str) -> str:
    """``pretrained``, or the error for a model without weights: random features must be asked for."""
    if pretrained is None or not pretrained.strip():
        raise InputError(
            f"no weights given for the model {model}",
            where="--pretrained",
            expected=example,
            fix="name the weights, or ask for random ones with --random-init",
        )
    return pretrained
