"""Reads open_clip configurations from files, and refuses those that ask for what they may not.

A configuration may name no other model or tokenizer to fetch, no file to read, no code to run, and no network
that the weights beside it can't fill. The size of the network is counted on torch's ``meta`` device, which
takes no memory.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ncm_cli.errors import InputError, listing
from ncm_cli.store.files import read_json

CONFIG_NAME = "open_clip_config.json"

MAX_SIDE = 4096
"""Largest side of the pictures that a network may ask for."""

_TOKENIZER_OPTIONS = {"additional_special_tokens", "clean", "language", "reduction_mask", "strip_sep_token"}

_MAX_PARTS = 6_000
"""Modules, parameters and buffers of a network; 3,500 in the largest that open_clip knows."""

_ALWAYS_ALLOWED_NUMBERS = 1 << 27
"""Numbers that any network may have, four bytes each."""

_MAX_RANDOM_NUMBERS = 1 << 32
"""Numbers of a network without a file of weights to measure it by."""

_MAX_CONFIG_BYTES = 16 << 20

_TOO_LARGE = "a configuration whose network is too large"


def read_clip_config(path: Path, *, hub: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model and preprocessing parts of an open_clip configuration file.

    Raises `InputError` for what `read_config_parts` refuses, and for one that names another model to fetch (a
    text model may be named on the ``hub``, where this one is from), a file to read or code to run.
    """
    config, preprocess = read_config_parts(path)
    _refuse_references(config, path, hub)
    return config, preprocess


def read_config_parts(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parts of `read_clip_config`, checked as far as is possible without importing a library.

    Raises `InputError` if it is no configuration, or has more layers than any network.
    """
    read = read_json(path, limit=_MAX_CONFIG_BYTES)
    config = read.get("model_cfg", read) if isinstance(read, dict) else None
    needed = ("embed_dim", "vision_cfg", "text_cfg")
    if not isinstance(config, dict) or not all(name in config for name in needed):
        raise InputError(
            "not an open_clip model configuration", where=path, expected=f"the keys {', '.join(needed)}"
        )
    for name in needed[1:]:
        if not isinstance(config[name], dict):
            raise InputError(f"an open_clip configuration whose {name} isn't an object", where=path)
    for name, tower in config.items():
        layers = tower.get("layers") if isinstance(tower, dict) else None
        counts = layers if isinstance(layers, list) else [layers]
        if sum(count for count in counts if isinstance(count, int | float)) > _MAX_PARTS:
            found = f"{name} with {layers} layers"
            raise InputError(_TOO_LARGE, where=path, found=found, expected=f"at most {_MAX_PARTS:,}")
    preprocess = read.get("preprocess_cfg")
    return config, preprocess if isinstance(preprocess, dict) else {}


def local_config(model: str) -> Path | None:
    """The configuration file that ``--model MODEL.json`` or ``--model local-dir:FOLDER`` names."""
    kind, _, folder = model.partition(":")
    if kind == "local-dir":
        return Path(folder).expanduser() / CONFIG_NAME
    return Path(model).expanduser() if model.endswith(".json") else None


def _refuse_references(config: dict[str, Any], path: Path, hub: bool) -> None:
    import timm

    vision, text = config["vision_cfg"], config["text_cfg"]
    trunk, tower = vision.get("timm_model_name"), text.get("hf_model_name")
    if trunk is not None and not (isinstance(trunk, str) and timm.is_model(trunk.partition(".")[0])):
        raise InputError(
            "an open_clip configuration that names a model to fetch",
            where=path,
            found=f"timm_model_name {trunk!r}",
            expected="the name of one of timm's own architectures",
        )
    if tower and not hub:
        raise InputError(
            "an open_clip configuration that names a text model to fetch",
            where=path,
            found=f"hf_model_name {tower!r}",
            fix="--model NAME if it is one of open_clip's own, or --model hf-hub:ORG/REPO",
        )
    options = text.get("tokenizer_kwargs", {})
    if strange := sorted(set(options) - _TOKENIZER_OPTIONS) if isinstance(options, dict) else [options]:
        raise InputError(
            "an open_clip configuration with options that a tokenizer may not have",
            where=path,
            found=f"tokenizer_kwargs {listing(strange)}",
            expected=listing(sorted(_TOKENIZER_OPTIONS)),
        )


def require_fitting(build: Callable[[], Any], where: object, checkpoint: Path | None) -> None:
    """Refuse a configuration of a network that the weights can't fill, before memory is taken for it.

    ``build`` makes it, and is called with the device ``meta`` as the default one.
    """
    import torch
    from torch.nn.modules import module

    most = (
        _MAX_RANDOM_NUMBERS if checkpoint is None else _ALWAYS_ALLOWED_NUMBERS + 4 * checkpoint.stat().st_size
    )
    parts, numbers = 0, 0

    def count(_: Any, name: str, value: Any) -> None:
        nonlocal parts, numbers
        parts += 1
        numbers += math.prod(getattr(value, "shape", (0,)))
        if parts > _MAX_PARTS or numbers > most:
            found = f"{numbers:,} numbers" if numbers > most else f"more than {_MAX_PARTS:,} layers"
            expected = f"at most {most:,}, for weights of this size" if numbers > most else None
            raise InputError(_TOO_LARGE, where=where, found=found, expected=expected)

    with contextlib.ExitStack() as stack:
        for kind in ("parameter", "buffer", "module"):
            register = getattr(module, f"register_module_{kind}_registration_hook")
            stack.callback(register(count).remove)
        stack.enter_context(torch.device("meta"))
        build()


def require_side(size: tuple[int, int], where: object) -> None:
    """Refuse a size of pictures that no network takes."""
    if not 1 <= min(size) <= max(size) <= MAX_SIDE:
        found, expected = f"{size[0]} × {size[1]}", f"sides of 1 to {MAX_SIDE}"
        raise InputError("pictures of an impossible size", where=where, found=found, expected=expected)


@contextlib.contextmanager
def settings_of(path: object) -> Iterator[None]:
    """Turn any error from settings of a wrong kind into an `InputError` that names their file."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # open_clip checks none of them
        found = f"{type(error).__name__}: {error}"
        raise InputError("preprocessing settings that can't be used", where=path, found=found) from error
