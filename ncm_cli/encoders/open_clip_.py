"""open_clip models: any name and tag, local checkpoints, and models of one's own configuration.

``--model`` may be a name of open_clip's, ``hf-hub:ORG/REPO``, ``local-dir:FOLDER`` (with open_clip's
``open_clip_config.json`` and a checkpoint) or the path of a configuration, ``MODEL.json``, holding either
open_clip's ``model_cfg`` layout or the ``embed_dim``/``vision_cfg``/``text_cfg`` of its model files.
"""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ncm_cli.errors import InputError, listing, nearest
from ncm_cli.progress import Reporter

from . import activation, torch_, weights
from .base import DEFAULT_MODEL, EncoderRequest, describe, effective_pretrained

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


def load(request: EncoderRequest, *, device: str, reporter: Reporter) -> torch_.TorchEncoder:
    """The encoder of an open_clip request: ``encode_image`` on the model's own preprocessing."""
    import torch
    from open_clip.transform import PreprocessCfg, image_transform_v2

    source = _source(request)
    where = torch_.choose_device(device, request.precision, reporter)
    model = _build(request, source)
    if source.checkpoint is None:
        sha256 = weights.state_sha256(model)
    else:
        _load_checkpoint(model, source, reporter)
        sha256 = weights.digest(source.checkpoint)["sha256"]
    quick = activation.uses_quick_gelu(model.visual)
    if source.checkpoint is not None and quick is not None:
        activation.warn_on_mismatch(
            quick, source.checkpoint, source.name, source.tag_quick_gelu, _has_twin(source.name), reporter
        )
    model.eval().to(where)
    if where != "cpu":
        model.to(memory_format=torch.channels_last)
    config = PreprocessCfg(**model.visual.preprocess_cfg)
    _warn_on_preprocess(source, model.visual.preprocess_cfg, reporter)
    height, width = config.input_size[-2:]
    return torch_.TorchEncoder(
        request,
        network=model.encode_image,
        transform=image_transform_v2(config, is_train=False),
        shortest=max(height, width) if config.resize_mode == "shortest" else None,
        dim=torch_.measured_dim(model.encode_image, (height, width), where, request.precision),
        device=where,
        description=describe(
            request,
            kind="open_clip",
            model=source.name,
            weights_sha256=sha256,
            activation=torch_.activations(model.visual),
            image_size=[int(height), int(width)],
            preprocess=_preprocess_facts(config),
            projection="encode_image",
        )
        | ({"config_sha256": _config_sha256(source.config)} if source.config is not None else {}),
    )


def _source(request: EncoderRequest) -> Source:
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
        example=f"a checkpoint file, or one of the tags: {listing(tags, 40)}",
    )
    found = weights.resolve(pretrained, tags, model=name, tag_of=_clean_tag)
    if isinstance(found, Path):
        return Source(name, checkpoint=found)
    tag = get_pretrained_cfg(name, found)
    with weights.fetching(f"the weights of {name} with tag {found!r}"):
        repository, _, filename = tag.get("hf_hub", "").rpartition("/")
        if repository:
            checkpoint = weights.hub_file(repository, _hub_names(filename or HF_WEIGHTS_NAME))
        else:
            checkpoint = Path(download_pretrained(tag))
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

    with weights.fetching(f"the model hf-hub:{repository}"):
        path = weights.hub_file(repository, [CONFIG_NAME])
        names = _hub_names(HF_WEIGHTS_NAME)
        checkpoint = None if request.random_init else weights.hub_file(repository, names)
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


def _build(request: EncoderRequest, source: Source) -> Any:
    """The model of a source with random weights, its preprocessing set."""
    import open_clip

    options: dict[str, Any] = {
        "load_weights": False,
        "pretrained_text": False,
        "force_preprocess_cfg": source.preprocess or None,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(_quiet_root_logger())
        stack.enter_context(torch_.own_random_numbers(request.seed))
        name = source.name
        if source.config is not None:
            # open_clip takes a configuration from its registry, which is global, or from a folder.
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ncm-")))
            whole = {"model_cfg": source.config, "preprocess_cfg": source.preprocess}
            (folder / CONFIG_NAME).write_text(json.dumps(whole), encoding="utf-8")
            name = f"local-dir:{folder}"
        try:
            return open_clip.create_model(name, **options)
        except Exception as error:  # towers of other libraries fail in their own ways
            raise InputError(
                f"open_clip can't build the model {source.name}", found=" ".join(str(error).split())[:500]
            ) from error


def _load_checkpoint(model: Any, source: Source, reporter: Reporter) -> None:
    """Load the checkpoint by open_clip's own rules; the image tower must be complete."""
    from open_clip.factory import load_checkpoint

    path = source.checkpoint
    assert path is not None
    kind = weights.check_checkpoint(path)
    with weights.reading(path, source.name):
        if kind == "torchscript":
            found = _load_torchscript(model, path)
        else:
            found = load_checkpoint(model, str(path), strict=False, weights_only=True)
    if not found:  # big_vision's NumPy files, which open_clip checks itself
        return
    lacking = [name for name in found.missing_keys if name.startswith("visual.")]
    weights.refuse_other_keys(lacking, found.unexpected_keys, path=path, model=source.name)
    if found.missing_keys:
        reporter.detail(f"{path.name} has no text tower: the image tower is all that is used")


def _load_torchscript(model: Any, path: Path) -> Any:
    """OpenAI's own archives: half-precision tensors and three entries that are settings, not weights."""
    from open_clip.model import convert_to_custom_text_state_dict

    state = weights.torchscript_tensors(path)
    for name in activation.OPENAI_SETTINGS:
        state.pop(name, None)
    if not hasattr(model, "positional_embedding"):
        state = convert_to_custom_text_state_dict(state)
    return model.load_state_dict({name: value.float() for name, value in state.items()}, strict=False)


def _warn_on_preprocess(source: Source, used: dict[str, Any], reporter: Reporter) -> None:
    """Warn where a local file gets open_clip's default preprocessing, but the model's own tags all differ.

    A checkpoint file says nothing of preprocessing, and open_clip fills in CLIP's (SigLIP, for one, has its
    own).
    """
    from open_clip import list_pretrained_tags_by_model
    from open_clip.pretrained import get_pretrained_cfg

    if source.checkpoint is None or source.preprocess or source.config is not None:
        return
    names = ("mean", "std", "interpolation", "resize_mode")
    tags = [get_pretrained_cfg(source.name, tag) for tag in list_pretrained_tags_by_model(source.name)]
    differ = [name for name in names if tags and all(_listed(t[name]) != _listed(used[name]) for t in tags)]
    if differ:
        reporter.warn(
            f"{source.checkpoint.name} gets CLIP's default preprocessing, but the published weights of "
            f"{source.name} differ in: {', '.join(differ)}. If it was trained like those, put it in a folder "
            f"with {CONFIG_NAME} that has a preprocess_cfg, and use --model local-dir:FOLDER"
        )


def _listed(value: Any) -> Any:
    """A sequence as a list, so that tuples and lists compare equal; anything else as it is."""
    return list(value) if isinstance(value, list | tuple) else value


def _has_twin(name: str) -> bool:
    """Whether open_clip knows the same architecture with the other activation."""
    from open_clip import list_models

    twin = name.removesuffix("-quickgelu") if name.endswith("-quickgelu") else f"{name}-quickgelu"
    return twin in list_models()


def _preprocess_facts(config: Any) -> dict[str, Any]:
    """The preprocessing that is used, for the description."""
    crop = {"shortest": "center", "longest": "pad", "squash": None}[config.resize_mode]
    facts = {
        "resize": config.resize_mode,
        "interpolation": "bilinear" if config.interpolation == "bilinear" else "bicubic",
        "crop": crop,
        "mean": torch_.numbers(config.mean),
        "std": torch_.numbers(config.std),
    }
    return facts | ({"fill": config.fill_color} if crop == "pad" else {})


def _config_sha256(config: dict[str, Any]) -> str:
    from ncm_cli.store.fingerprint import digest_of

    return digest_of(config)


@contextlib.contextmanager
def _quiet_root_logger() -> Iterator[None]:
    """Drop what open_clip logs on the root logger, such as that no weights were loaded (they are, later)."""
    root = logging.getLogger()
    handler = logging.NullHandler()  # without a handler, logging.warning would install one for good

    def other(record: logging.LogRecord) -> bool:
        return "open_clip" not in record.pathname

    root.addHandler(handler)
    root.addFilter(other)
    try:
        yield
    finally:
        root.removeFilter(other)
        root.removeHandler(handler)
