"""QuickGELU or GELU: which a checkpoint was trained with, as far as that can be told.

OpenAI trained CLIP with QuickGELU, x·sigmoid(1.702 x). The weights have the same names and shapes either way,
so loading them under a plain-GELU name gives plausible, worse features without an error.

Where an open_clip model's architecture, preprocessing and weights come from.

open_clip models: any name and tag, local checkpoints, and models of one's own configuration.

``--model`` may be a name of open_clip's, ``hf-hub:ORG/REPO``, ``local-dir:FOLDER`` (with open_clip's
``open_clip_config.json`` and a checkpoint) or the path of a configuration, ``MODEL.json``, holding either
open_clip's ``model_cfg`` layout or the ``embed_dim``/``vision_cfg``/``text_cfg`` of its model files.
"""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ncm_cli.errors import InputError, listing, nearest
from ncm_cli.images import network, weights
from ncm_cli.images.encoder import DEFAULT_MODEL, EncoderRequest, describe, effective_pretrained
from ncm_cli.progress import Reporter

if TYPE_CHECKING:
    import torch

OPENAI_SETTINGS = ("input_resolution", "context_length", "vocab_size")
"""Entries that only state dicts of OpenAI's own archives hold."""


def uses_quick_gelu(tower: torch.nn.Module) -> bool | None:
    """Whether an image tower uses QuickGELU; None where it has neither activation: then it can't matter."""
    names = {type(part).__name__ for part in tower.modules()}
    if "QuickGELU" in names:
        return True
    return False if "GELU" in names else None


def warn_on_mismatch(
    model_quick: bool, path: Path, model: str, tag_quick: bool | None, likely: bool, reporter: Reporter
) -> None:
    """Warn where the weights' activation is known to be the other one, or can't be known and might be.

    ``tag_quick`` is what open_clip records for a tag; None for a local file, which is looked at.
    ``likely``: nothing about the model rules the other activation out.
    """
    trained, evidence = (tag_quick, "its tag") if tag_quick is not None else evidence_in(path)
    names = {True: "QuickGELU", False: "GELU"}
    used = names[model_quick]
    other = model.removesuffix("-quickgelu") if model_quick else f"{model}-quickgelu"
    if trained is None:
        if likely and not model_quick:
            reporter.warn(
                f"{path.name} doesn't say whether it was trained with GELU or QuickGELU; {used} is used, as "
                f"the model {model} says. For weights trained with QuickGELU, such as OpenAI's, use "
                f"--model {other}"
            )
    elif trained != model_quick:
        reporter.warn(
            f"QuickGELU mismatch: the model {model} uses {used}, but the weights were trained with "
            f"{names[trained]} ({evidence}): features will be wrong. Use --model {other}"
        )


def evidence_in(path: Path) -> tuple[bool | None, str]:
    """Whether a local checkpoint was trained with QuickGELU (None: it doesn't say), and how that is known."""
    for look in (_known_file, _openai_archive, _beside, _by_name):
        found, how = look(path)
        if found is not None:
            return found, how
    return None, ""


def _known_file(path: Path) -> tuple[bool | None, str]:
    """OpenAI's own files by their digest, which is part of their address."""
    from open_clip.pretrained import get_pretrained_url, list_pretrained_models_by_tag

    urls = [get_pretrained_url(model, "openai") for model in list_pretrained_models_by_tag("openai")]
    digests = {url.split("/")[-2] for url in urls if "openaipublic" in url}
    known = digests and weights.digest(path)["sha256"] in digests
    return (True, "it is OpenAI's own file") if known else (None, "")


def _openai_archive(path: Path) -> tuple[bool | None, str]:
    """A TorchScript archive or a state dict with OpenAI's settings in it."""
    if not zipfile.is_zipfile(path):
        return None, ""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        if any(name.endswith("/constants.pkl") for name in names):
            return True, "it is a TorchScript archive, as OpenAI's are"
        index = next((name for name in names if name.endswith("data.pkl")), None)
        text = archive.read(index) if index else b""
    if all(name.encode() in text for name in OPENAI_SETTINGS):
        return True, "it holds the settings of an OpenAI archive"
    return None, ""


def _beside(path: Path) -> tuple[bool | None, str]:
    """The configuration that open_clip saves beside a checkpoint."""
    config = path.parent / "open_clip_config.json"
    try:
        model = json.loads(config.read_text(encoding="utf-8"))["model_cfg"]
        return bool(model.get("quick_gelu", False)), f"{config.name} beside it says so"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None, ""


def _by_name(path: Path) -> tuple[bool | None, str]:
    """What the file and its folder are called: a model with its activation, or one of open_clip's tags."""
    from open_clip.pretrained import get_pretrained_cfg, list_pretrained

    text = f"{path.resolve().parent.name}/{path.name}".lower().replace("-", "_")
    if "quickgelu" in text or "quick_gelu" in text:
        return True, "its name says so"
    tags: dict[str, set[bool]] = {}
    for model, tag in list_pretrained():
        tags.setdefault(tag, set()).add(bool(get_pretrained_cfg(model, tag).get("quick_gelu", False)))
    # Short tags (v1, meta) turn up in unrelated names; a tag used with both activations tells nothing.
    telling = (kinds for tag, kinds in tags.items() if len(tag) > 5 and tag in text and len(kinds) == 1)
    said = {kind for kinds in telling for kind in kinds}
    return (said.pop(), "its name holds a tag of open_clip's") if len(said) == 1 else (None, "")


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
    with weights.fetching(f"the weights of {name} with tag {found!r}", f"--pretrained {found}", cache):
        if repository:
            checkpoint = weights.hub_file(repository, _hub_names(filename or HF_WEIGHTS_NAME))
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

    with weights.fetching(f"the model hf-hub:{repository}", f"--model hf-hub:{repository}"):
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


def load(request: EncoderRequest, *, device: str, reporter: Reporter) -> network.TorchEncoder:
    """The encoder of an open_clip request: ``encode_image`` on the model's own preprocessing."""
    import torch
    from open_clip.transform import PreprocessCfg, image_transform_v2

    source = find_source(request)
    where = network.choose_device(device, request.precision, reporter)
    model = _build(request, source)
    if source.checkpoint is None:
        sha256 = weights.state_sha256(model)
    else:
        _load_checkpoint(model, source, reporter)
        sha256 = weights.digest(source.checkpoint)["sha256"]
    quick = uses_quick_gelu(model.visual)
    if source.checkpoint is not None and quick is not None:
        warn_on_mismatch(
            quick, source.checkpoint, source.name, source.tag_quick_gelu, _mix_up_is_likely(source), reporter
        )
    model.eval().to(where)
    if where != "cpu":
        model.to(memory_format=torch.channels_last)
    config = PreprocessCfg(**model.visual.preprocess_cfg)
    _warn_on_preprocess(source, model.visual.preprocess_cfg, reporter)
    height, width = config.input_size[-2:]
    return network.TorchEncoder(
        request,
        network=model.encode_image,
        transform=image_transform_v2(config, is_train=False),
        shortest=max(height, width) if config.resize_mode == "shortest" else None,
        dim=network.measured_dim(model.encode_image, (height, width), where, request.precision),
        device=where,
        description=describe(
            request,
            kind="open_clip",
            model=source.name,
            weights_sha256=sha256,
            activation=network.activations(model.visual),
            image_size=[int(height), int(width)],
            preprocess=_preprocess_facts(config),
            projection="encode_image",
        )
        | ({"config_sha256": _config_sha256(source.config)} if source.config is not None else {}),
    )


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
        stack.enter_context(network.own_random_numbers(request.seed))
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
                f"open_clip can't build the model {source.name}", found=weights.first_line(error, 12)
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
    for name in OPENAI_SETTINGS:
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


def _mix_up_is_likely(source: Source) -> bool:
    """Whether a plain-GELU model may well be meant for QuickGELU weights.

    So it is where the configuration leaves the activation unsaid, and open_clip either registers the
    architecture under both activations or doesn't know it at all.
    """
    import open_clip

    config = source.config or open_clip.get_model_config(source.name) or {}
    if "quick_gelu" in config:
        return False
    shipped = Path(open_clip.__file__).parent / "model_configs" / f"{source.name}.json"
    return f"{source.name}-quickgelu" in open_clip.list_models() or not shipped.is_file()


def _preprocess_facts(config: Any) -> dict[str, Any]:
    """The preprocessing that is used, for the description."""
    crop = {"shortest": "center", "longest": "pad", "squash": None}[config.resize_mode]
    facts = {
        "resize": config.resize_mode,
        "interpolation": "bilinear" if config.interpolation == "bilinear" else "bicubic",
        "crop": crop,
        "mean": network.numbers(config.mean),
        "std": network.numbers(config.std),
    }
    return facts | ({"fill": config.fill_color} if crop == "pad" else {})


def _config_sha256(config: dict[str, Any]) -> str:
    from ncm_cli.store.digests import digest_of

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
