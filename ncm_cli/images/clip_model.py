"""Models of open_clip: by one of its names or by a configuration.

``--model`` is one of open_clip's names, ``hf-hub:ORG/REPO``, ``local-dir:FOLDER`` (with
``open_clip_config.json`` and a checkpoint) or the path of a configuration, ``MODEL.json``, in open_clip's
``model_cfg`` layout or in that of its model files.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from ncm_cli.errors import InputError, listing, nearest
from ncm_cli.images import weights
from ncm_cli.images.clip_config import (
    CONFIG_NAME,
    read_clip_config,
    require_fitting,
    require_side,
    settings_of,
)
from ncm_cli.images.model import LoadedModel, activations, three_floats
from ncm_cli.images.options import DEFAULT_MODEL
from ncm_cli.images.request import EncoderRequest
from ncm_cli.images.torchscript import torchscript_tensors
from ncm_cli.progress import Reporter
from ncm_cli.solvers.device import no_random_numbers, own_random_numbers
from ncm_cli.store.digests import digest_of
from ncm_cli.store.files import read_json

if TYPE_CHECKING:
    import torch


HUB_NAMES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
"""The checkpoint of a repository that names none, the better one first."""


OPENAI_SETTINGS = ("input_resolution", "context_length", "vocab_size")
"""Entries that only state dicts of OpenAI's own archives hold."""


_PREFERRED = ("open_clip_model", "open_clip_pytorch_model", "model", "pytorch_model")
"""Stems of the checkpoint that a folder is meant to be loaded from, as open_clip ranks them."""


@dataclass(frozen=True)
class ClipSource:
    """Where an open_clip model's architecture, preprocessing and weights come from.

    ``config`` is None for a name in open_clip's registry; ``checkpoint`` is None for random weights.
    """

    name: str
    config: dict[str, Any] | None = None
    preprocess: dict[str, Any] = field(default_factory=dict)
    checkpoint: Path | None = None
    tag_quick_gelu: bool | None = None


def load_open_clip(request: EncoderRequest, reporter: Reporter) -> LoadedModel:
    """A model with its own preprocessing; its features are those of ``encode_image``."""
    import torch
    from open_clip.transform import PreprocessCfg, image_transform_v2
    from open_clip.utils import to_2tuple

    source = find_clip(request)
    model = _build(request, source)
    lacks: list[str] = []
    if source.checkpoint is None:
        sha256 = weights.state_sha256(model.state_dict())
    else:
        lacks = _load_checkpoint(model, source.checkpoint, source.name, reporter)
        sha256 = weights.digest(source.checkpoint)["sha256"]
        warn_on_activation(model.visual, source, reporter)
    with settings_of(request.model):
        config = PreprocessCfg(**model.visual.preprocess_cfg)
        height, width = map(int, config.input_size[-2:])
        crop = {"shortest": "center", "longest": "pad", "squash": None}[config.resize_mode]
        preprocess = {
            "resize": config.resize_mode,
            "interpolation": "bilinear" if config.interpolation == "bilinear" else "bicubic",
            "crop": crop,
            "mean": three_floats(config.mean),
            "std": three_floats(config.std),
        }
        transform = image_transform_v2(config, is_train=False)
        require_side((height, width), request.model)
        transform(Image.new("RGB", (8, 8)))
        if source.preprocess and (height, width) != to_2tuple(getattr(model.visual, "image_size", None)):
            with torch.inference_mode():  # raises if the network takes one size only
                model.eval().encode_image(torch.zeros(1, 3, height, width))
    warn_on_preprocess(source, model.visual.preprocess_cfg, reporter)
    return LoadedModel(
        module=model,
        encode=model.encode_image,
        transform=transform,
        size=(height, width),
        shortest=max(height, width) if config.resize_mode == "shortest" else None,
        facts={
            "kind": "open_clip",
            "model": source.name,
            "weights_sha256": sha256,
            "activation": activations(model.visual),
            "preprocess": preprocess | ({"fill": config.fill_color} if crop == "pad" else {}),
            "projection": "encode_image",
        }
        | ({"config_sha256": digest_of(source.config)} if source.config is not None else {}),
        tokenizer=functools.partial(_tokenizer, request, source),
        lacks=lacks,
    )


def _tokenizer(request: EncoderRequest, source: ClipSource) -> Any:
    """The tokenizer of a source's text tower."""
    import open_clip

    text = (source.config or open_clip.get_model_config(source.name) or {}).get("text_cfg", {})
    tokenizer_name = text.get("hf_tokenizer_name")
    if not request.model.endswith(".json"):
        # Without it transformers asks on the terminal whether to run the tokenizer's code.
        options = {"trust_remote_code": False} if tokenizer_name else {}
        return open_clip.get_tokenizer(source.name if source.config is None else request.model, **options)
    if tokenizer_name:
        raise InputError(
            "an open_clip configuration that names a tokenizer to fetch",
            where=request.model,
            found=f"hf_tokenizer_name {tokenizer_name!r}",
            fix=f"put it, as {CONFIG_NAME}, in a folder with the tokenizer's files: --model local-dir:FOLDER",
        )
    # open_clip looks configurations up by name or folder, never by their file.
    options = {"context_length": text.get("context_length"), **text.get("tokenizer_kwargs", {})}
    return open_clip.get_tokenizer("", **options)


def find_clip(request: EncoderRequest) -> ClipSource:
    """The source of a requested model; raises all errors about names, tags, paths and configurations."""
    model, example = request.model, "a checkpoint file"
    kind, _, location = model.partition(":")
    if kind == "hf-hub":
        with weights.fetching(f"the model {model}", f"--model {model}"):
            path = weights.hub_file(location, [CONFIG_NAME])
            checkpoint = None if request.random_init else weights.hub_file(location, HUB_NAMES)
        return ClipSource(model, *read_clip_config(path, hub=True), checkpoint)
    if kind == "local-dir":
        folder = Path(location).expanduser()
        if not folder.is_dir():
            raise InputError("no such model folder", where=folder, expected=f"a folder with {CONFIG_NAME}")
        if not (folder / CONFIG_NAME).is_file():
            raise InputError(f"the model folder has no {CONFIG_NAME}", where=folder)
        config = read_clip_config(folder / CONFIG_NAME, hub=False)
        checkpoint = None if request.random_init else _checkpoint_in(folder)
        return ClipSource(f"local-dir:{folder.name}", *config, checkpoint)
    if model.endswith(".json"):
        path = Path(model).expanduser()
        if not path.is_file():
            raise InputError("no such model configuration", where=path, expected="an open_clip .json file")
        config = read_clip_config(path, hub=False)
        chosen = weights.chosen_weights(request, path.stem, (), example)
        return ClipSource(path.stem, *config, None if chosen is None else Path(chosen))
    return _registered(request, model)


def _registered(request: EncoderRequest, model: str) -> ClipSource:
    from open_clip import list_models, list_pretrained_tags_by_model
    from open_clip.pretrained import download_pretrained, get_pretrained_cfg

    name = model.replace("/", "-")
    names = list_models()
    if name not in names:
        if Path(model).expanduser().is_dir():
            fix = f"--model local-dir:{model} if it holds {CONFIG_NAME}"
            raise InputError("--model names a folder", where=model, fix=fix)
        close = nearest(name, names)
        raise InputError(
            f"open_clip has no model named {model!r}",
            where="--model",
            expected=f"one of {len(names)} names such as {DEFAULT_MODEL}, timm:NAME, pixels:SIZE, "
            "hf-hub:ORG/REPO, local-dir:FOLDER or a configuration .json",
            fix=f"did you mean {close!r}?" if close else None,
        )
    tags = list_pretrained_tags_by_model(name)
    example = "a checkpoint file" + (f", or one of the tags: {listing(tags, 40)}" if tags else "")
    source = weights.chosen_weights(request, name, tags, example)
    if not isinstance(source, str):
        return ClipSource(name, checkpoint=source)
    tag = get_pretrained_cfg(name, source)
    repository, _, file = tag.get("hf_hub", "").rpartition("/")
    cache = None if repository else Path("~/.cache/clip").expanduser()
    with weights.fetching(f"the weights of {name} with tag {source!r}", f"--pretrained {source}", cache):
        if repository:
            safe = [f"{file[:-4]}.safetensors"] if file.endswith((".bin", ".pth")) else []
            names = HUB_NAMES if file in ("", HUB_NAMES[-1]) else [*safe, file]
            checkpoint = weights.hub_file(repository, names)
        else:
            checkpoint = Path(download_pretrained(tag, cache_dir=cache))
    return ClipSource(name, None, tag, checkpoint, bool(tag.get("quick_gelu", False)))


def _checkpoint_in(folder: Path) -> Path:
    """The one checkpoint of a model folder: the preferred name, or the only one there is."""
    files = [path for path in folder.iterdir() if path.suffix in weights.CHECKPOINT_SUFFIXES]
    files.sort(key=lambda path: (path.suffix != ".safetensors", path.name))
    preferred = [path for stem in _PREFERRED for path in files if path.stem == stem]
    if preferred or len(files) == 1:
        return (preferred or files)[0]
    raise InputError(
        f"the model folder holds {'several checkpoints' if files else 'no checkpoint'}",
        where=folder,
        found=listing(path.name for path in files) if files else None,
        expected="one checkpoint, or one called open_clip_model.safetensors",
    )


def _build(request: EncoderRequest, source: ClipSource) -> Any:
    """The model of a source with random weights, its preprocessing set."""
    import open_clip

    preprocess = source.preprocess or None
    with contextlib.ExitStack() as stack:
        stack.enter_context(quiet_root_logger())
        name = source.name
        if source.config is not None:
            # open_clip takes a configuration from its registry, which is global, or from a folder.
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ncm-")))
            whole = {"model_cfg": source.config, "preprocess_cfg": source.preprocess}
            (folder / CONFIG_NAME).write_text(json.dumps(whole), encoding="utf-8")
            name = f"local-dir:{folder}"

        def create(device: str) -> Any:
            return open_clip.create_model(
                name,
                load_weights=False,
                pretrained_text=False,
                force_preprocess_cfg=preprocess,
                device=device,
            )

        try:
            if source.config is not None:
                require_fitting(lambda: create("meta"), request.model, source.checkpoint)
            stack.enter_context(own_random_numbers(request.seed))
            if source.checkpoint is not None:
                stack.enter_context(no_random_numbers())
            return create("cpu")
        except InputError:
            raise
        except Exception as error:  # towers of other libraries fail in their own ways
            what = f"open_clip can't build the model {source.name}"
            raise InputError(what, found=weights.plain_words(error)) from error


def _load_checkpoint(model: Any, path: Path, name: str, reporter: Reporter) -> list[str]:
    """Load the checkpoint by open_clip's own rules; the image tower must be complete.

    Returns the names of other tensors that it lacks.
    """
    from open_clip.factory import load_checkpoint
    from open_clip.model import convert_to_custom_text_state_dict

    kind = weights.checkpoint_kind(path)
    with weights.reading_checkpoint(path, name):
        if kind == "torchscript":
            # OpenAI's own archives: half-precision tensors and three entries that are settings, not weights.
            state = torchscript_tensors(path)
            state = {key: value.float() for key, value in state.items() if key not in OPENAI_SETTINGS}
            if not hasattr(model, "positional_embedding"):
                state = convert_to_custom_text_state_dict(state)
            incompatible_keys = model.load_state_dict(state, strict=False)
        else:
            if kind == "torch":
                weights.require_own_numbers(path)
            incompatible_keys = load_checkpoint(model, str(path), strict=False, weights_only=True)
    if not incompatible_keys:  # big_vision's NumPy files, which open_clip checks itself
        return []
    lacking = [key for key in incompatible_keys.missing_keys if key.startswith("visual.")]
    weights.require_keys(lacking, incompatible_keys.unexpected_keys, path=path, model=name)
    if incompatible_keys.missing_keys:
        reporter.detail(f"{path.name} has no text tower: the image tower is all that is used")
    return list(incompatible_keys.missing_keys)


def warn_on_activation(tower: torch.nn.Module, source: ClipSource, reporter: Reporter) -> None:
    """Warn if the weights were, or may have been, trained with the other activation.

    OpenAI trained CLIP with QuickGELU, x·sigmoid(1.702 x). The weights have the same names and shapes as with
    GELU, so loading them under a plain-GELU name gives plausible, worse features without an error.
    """
    import open_clip

    used = {"QuickGELU", "GELU"} & {type(part).__name__ for part in tower.modules()}
    if not used:  # then it can't matter
        return
    assert source.checkpoint is not None
    quick, name, file = "QuickGELU" in used, source.name, source.checkpoint.name
    trained, evidence = source.tag_quick_gelu, "its tag"
    if trained is None:
        trained, evidence = evidence_in(source.checkpoint)
    names = {True: "QuickGELU", False: "GELU"}
    other = name.removesuffix("-quickgelu") if quick else f"{name}-quickgelu"
    advice = f"use --model {other}"
    if other not in open_clip.list_models():  # a model of one's own
        advice = f'set "quick_gelu": {str(not quick).lower()} in the configuration of the model'
    if trained is not None and trained != quick:
        reporter.warn(
            f"QuickGELU mismatch: the model {name} uses {names[quick]}, but the weights were trained with "
            f"{names[trained]} ({evidence}): features will be wrong. {advice[0].upper()}{advice[1:]}"
        )
    # The other activation is possible if the configuration states none, and open_clip either registers the
    # architecture with both or doesn't know it.
    config = source.config or open_clip.get_model_config(name) or {}
    shipped = Path(open_clip.__file__).parent / "model_configs" / f"{name}.json"
    likely = f"{name}-quickgelu" in open_clip.list_models() or not shipped.is_file()
    if trained is None and not quick and "quick_gelu" not in config and likely:
        reporter.warn(
            f"{file} doesn't say whether it was trained with GELU or QuickGELU; GELU is used, as the model "
            f"{name} says. For weights trained with QuickGELU, such as OpenAI's, {advice}"
        )


def evidence_in(path: Path) -> tuple[bool | None, str]:
    """Whether a local checkpoint was trained with QuickGELU (None: it doesn't say), and how that is known."""
    from open_clip import pretrained

    if weights.checkpoint_kind(path) == "torchscript":
        return True, "it is a TorchScript archive, as OpenAI's are"
    with contextlib.suppress(InputError, KeyError, TypeError, AttributeError):
        model = read_json(path.parent / CONFIG_NAME)["model_cfg"]
        return bool(model.get("quick_gelu", False)), f"{CONFIG_NAME} beside it says so"
    text = f"{path.resolve().parent.name}/{path.name}".lower().replace("-", "_")
    if "quickgelu" in text or "quick_gelu" in text:
        return True, "its name says so"
    # Short tags (v1, meta) turn up in unrelated names; a tag used with both activations tells nothing.
    quick_gelu = {
        bool(pretrained.get_pretrained_cfg(model, tag).get("quick_gelu", False))
        for model, tag in pretrained.list_pretrained()
        if len(tag) > 5 and tag in text
    }
    return (quick_gelu.pop(), "its name holds a tag of open_clip's") if len(quick_gelu) == 1 else (None, "")


def warn_on_preprocess(source: ClipSource, used: dict[str, Any], reporter: Reporter) -> None:
    """Warn if a local file gets open_clip's default preprocessing, but all tags of the model differ from it.

    A checkpoint file doesn't record its preprocessing, and open_clip assumes CLIP's, which is wrong for
    SigLIP, for example.
    """
    from open_clip import list_pretrained_tags_by_model
    from open_clip.pretrained import get_pretrained_cfg

    if source.checkpoint is None or source.preprocess or source.config is not None:
        return
    names = ("mean", "std", "interpolation", "resize_mode")
    tags = [get_pretrained_cfg(source.name, tag) for tag in list_pretrained_tags_by_model(source.name)]
    # Compared as lists, since some are tuples of the same numbers.
    differ = [name for name in names if tags and all(list(tag[name]) != list(used[name]) for tag in tags)]
    if differ:
        reporter.warn(
            f"{source.checkpoint.name} gets CLIP's default preprocessing, but the published weights of "
            f"{source.name} differ in: {', '.join(differ)}. If it was trained like those, put it in a folder "
            f"with {CONFIG_NAME} that has a preprocess_cfg, and use --model local-dir:FOLDER"
        )


@contextlib.contextmanager
def quiet_root_logger() -> Iterator[None]:
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
