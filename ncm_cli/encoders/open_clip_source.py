"""Where an open_clip model's architecture, preprocessing and weights come from."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ncm_cli.errors import InputError, listing, nearest

from . import fetch, weights
from .base import DEFAULT_MODEL, EncoderRequest, effective_pretrained

CONFIG_NAME = "open_clip_config.json"

_PREFERRED = ("open_clip_model", "open_clip_pytorch_model", "model", "pytorch_model")
"""Stems of the checkpoint that a folder is meant to be loaded from, as open_clip ranks them."""


@dataclass(frozen=True)
class Source:
    """Where a model's architecture, preprocessing and weights come from.

    ``config`` is None for a name in open_clip's registry; ``checkpoint`` is None for random weights.
    """

    name: str
    config: dict[str, Any] | None = None
    preprocess: dict[str, Any] = field(default_factory=dict)
    checkpoint: Path | None = None
    tag_quick_gelu: bool | None = None


def find_source(request: EncoderRequest) -> Source:
    """What to build and load; every error of names, tags, paths and configurations."""
    model = request.model
    if model.startswith("local-dir:"):
        return _local_folder(request, Path(model.removeprefix("local-dir:")).expanduser())
    if model.startswith("hf-hub:"):
        return _hub(request, model.removeprefix("hf-hub:"))
    if weights.names_a_config(model):
        path = Path(model).expanduser()
        if not path.is_file():
            raise InputError("no such model configuration", where=path, expected="an open_clip .json file")
        config, preprocess = _read_config(path)
        return Source(path.stem, config, preprocess, _checkpoint_file(request, path.stem))
    return _registered(request, model)


def _registered(request: EncoderRequest, model: str) -> Source:
    from open_clip import list_models, list_pretrained_tags_by_model
    from open_clip.constants import HF_WEIGHTS_NAME
    from open_clip.pretrained import _clean_tag, download_pretrained, get_pretrained_cfg

    name = model.replace("/", "-")
    names = list_models()
    if name not in names:
        if Path(model).expanduser().is_dir():
            raise InputError(
                "--model names a folder",
                where=model,
                fix=f"--model local-dir:{model} if it holds {CONFIG_NAME}",
            )
        close = nearest(name, names)
        raise InputError(
            f"open_clip has no model named {model!r}",
            where="--model",
            expected=f"one of {len(names)} names such as {DEFAULT_MODEL}, timm:NAME, pixels:SIZE, "
            "hf-hub:ORG/REPO, local-dir:FOLDER or a configuration .json",
            fix=f"did you mean {close!r}?" if close else None,
        )
    if request.random_init:
        return Source(name)
    tags = list_pretrained_tags_by_model(name)
    pretrained = weights.require_weights(
        effective_pretrained(request),
        model=name,
        example=f"a checkpoint file, or one of the tags: {listing(tags, 40)}"
        if tags
        else "a checkpoint file",
    )
    found = weights.resolve(pretrained, tags, model=name, tag_of=_clean_tag)
    if isinstance(found, Path):
        return Source(name, checkpoint=found)
    tag = get_pretrained_cfg(name, found)
    repository, _, filename = tag.get("hf_hub", "").rpartition("/")
    cache = None if repository else Path("~/.cache/clip").expanduser()
    with fetch.fetching(f"the weights of {name} with tag {found!r}", f"--pretrained {found}", cache):
        if repository:
            checkpoint = fetch.hub_file(repository, _hub_names(filename or HF_WEIGHTS_NAME))
        else:
            checkpoint = Path(download_pretrained(tag, cache_dir=cache))
    return Source(name, None, tag, checkpoint, bool(tag.get("quick_gelu", False)))


def _local_folder(request: EncoderRequest, folder: Path) -> Source:
    if not folder.is_dir():
        raise InputError("no such model folder", where=folder, expected=f"a folder with {CONFIG_NAME}")
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise InputError(f"the model folder has no {CONFIG_NAME}", where=folder)
    config, preprocess = _read_config(path)
    name = f"local-dir:{folder.name}"
    if request.random_init:
        return Source(name, config, preprocess)
    return Source(name, config, preprocess, _checkpoint_in(folder))


def _hub(request: EncoderRequest, repository: str) -> Source:
    from open_clip.constants import HF_WEIGHTS_NAME

    with fetch.fetching(f"the model hf-hub:{repository}", f"--model hf-hub:{repository}"):
        path = fetch.hub_file(repository, [CONFIG_NAME])
        names = _hub_names(HF_WEIGHTS_NAME)
        checkpoint = None if request.random_init else fetch.hub_file(repository, names)
    config, preprocess = _read_config(path)
    return Source(f"hf-hub:{repository}", config, preprocess, checkpoint)


def _hub_names(filename: str) -> list[str]:
    """What a weights file may be called on the hub, the safe format first, as open_clip looks for it."""
    from open_clip.pretrained import _get_safe_alternatives

    return [*_get_safe_alternatives(filename), filename]


def _checkpoint_file(request: EncoderRequest, model: str) -> Path | None:
    """The file of ``--pretrained`` for a model that has no tags."""
    if request.random_init:
        return None
    pretrained = weights.require_weights(
        effective_pretrained(request), model=model, example="a checkpoint file"
    )
    return Path(weights.resolve(pretrained, (), model=model))


def _checkpoint_in(folder: Path) -> Path:
    """The one checkpoint of a model folder: the preferred name, or the only one there is."""
    files = [path for path in sorted(folder.iterdir()) if path.suffix in weights.CHECKPOINT_SUFFIXES]
    for stem in _PREFERRED:
        named = [path for path in files if path.stem == stem]
        if named:
            return min(named, key=lambda path: path.suffix != ".safetensors")
    if len(files) == 1:
        return files[0]
    raise InputError(
        "the model folder holds several checkpoints" if files else "the model folder holds no checkpoint",
        where=folder,
        found=listing(path.name for path in files) if files else None,
        expected="one checkpoint, or one called open_clip_model.safetensors",
    )


def _read_config(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model and preprocessing parts of an open_clip configuration file."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InputError("the model configuration can't be read as JSON", where=path, found=error) from error
    config = read.get("model_cfg", read) if isinstance(read, dict) else None
    needed = ("embed_dim", "vision_cfg", "text_cfg")
    if not isinstance(config, dict) or not all(name in config for name in needed):
        raise InputError(
            "not an open_clip model configuration", where=path, expected=f"the keys {', '.join(needed)}"
        )
    preprocess = read.get("preprocess_cfg") or {}
    return config, preprocess if isinstance(preprocess, dict) else {}
