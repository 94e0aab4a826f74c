"""Published weights: from the Hugging Face cache, or downloaded into it."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ncm_cli.errors import InputError

from .checkpoint import first_line


@contextmanager
def fetching(what: str) -> Iterator[None]:
    """Turn any failure of a download into one InputError; libraries raise dozens of kinds of it.

    The hub client's warnings are silenced meanwhile: the failure is reported here.
    """
    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{what} could not be fetched, and the cache lacks it",
            found=first_line(error),
            fix="run once with a network connection, or give a local file with --pretrained FILE",
        ) from error
    finally:
        log.setLevel(level)


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
