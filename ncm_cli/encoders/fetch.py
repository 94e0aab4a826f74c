"""Published weights: from the Hugging Face cache, or downloaded into it."""

from __future__ import annotations

import errno
import importlib
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ncm_cli.errors import InputError

_CACHE_ERRORS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.ENOTDIR, errno.EEXIST})
_ELSEWHERE = "--pretrained FILE, or --model local-dir:FOLDER, for weights that are here"


@contextmanager
def fetching(what: str, option: str, cache: str | Path | None = None) -> Iterator[None]:
    """Turn any failure of a download into one InputError; libraries raise dozens of kinds of it.

    ``option`` is what asks for it, and ``cache`` the folder that keeps it, if not the hub's. The hub client's
    own words are left out, logged or raised: they advise for programs.
    """
    from huggingface_hub import constants

    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except InputError:
        raise
    except Exception as error:
        why, fix = _reason(error, offline=cache is None and constants.HF_HUB_OFFLINE)
        raise InputError(
            f"{what} could not be fetched, and the cache lacks it",
            where=f"{option}; cache folder {cache or constants.HF_HUB_CACHE}",
            found=why,
            fix=f"{fix}; or {_ELSEWHERE}",
        ) from error
    finally:
        log.setLevel(level)


def _reason(error: Exception, *, offline: bool) -> tuple[str, str]:
    """Why a download failed, and what to do."""
    if isinstance(error, OSError) and error.errno in _CACHE_ERRORS:
        why = f"the cache can't be written: {os.strerror(error.errno).lower()}"
        return why, "make it writable, or name another with HF_HOME=FOLDER"
    if offline:
        why = "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, so the network isn't used"
        return why, "unset it once, with a network connection"
    status = getattr(getattr(error, "response", None), "status_code", None) or getattr(error, "code", None)
    if status is not None:
        return (
            f"the server answered {status}",
            "check the name; a private or gated model needs HF_TOKEN=TOKEN",
        )
    return f"the server can't be reached ({type(error).__name__})", "run once with a network connection"


def hub_file(repository: str, filenames: Sequence[str]) -> Path:
    """The first of several files that a Hugging Face repository has: from the cache, else downloaded.

    Without a connection the hub client retries for most of a minute, so the connection is tried once first.
    """
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    hub: Any = importlib.import_module("huggingface_hub.utils")
    for filename in filenames:
        cached = try_to_load_from_cache(repository, filename)
        if isinstance(cached, str):
            return Path(cached)
    if not constants.HF_HUB_OFFLINE:
        hub.get_session().head(constants.ENDPOINT, timeout=10)
    for filename in filenames[:-1]:
        try:
            return Path(hf_hub_download(repository, filename))
        except hub.EntryNotFoundError:
            continue
    return Path(hf_hub_download(repository, filenames[-1]))
