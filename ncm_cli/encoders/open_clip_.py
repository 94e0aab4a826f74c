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
from pathlib import Path
from typing import Any

from ncm_cli.errors import InputError
from ncm_cli.progress import Reporter

from . import activation, checkpoint, torch_, weights
from .base import EncoderRequest, describe
from .open_clip_source import CONFIG_NAME, Source, find_source


def load(request: EncoderRequest, *, device: str, reporter: Reporter) -> torch_.TorchEncoder:
    """The encoder of an open_clip request: ``encode_image`` on the model's own preprocessing."""
    import torch
    from open_clip.transform import PreprocessCfg, image_transform_v2

    source = find_source(request)
    where = torch_.choose_device(device, request.precision, reporter)
    model = _build(request, source)
    if source.checkpoint is None:
        sha256 = checkpoint.state_sha256(model)
    else:
        _load_checkpoint(model, source, reporter)
        sha256 = weights.digest(source.checkpoint)["sha256"]
    quick = activation.uses_quick_gelu(model.visual)
    if source.checkpoint is not None and quick is not None:
        activation.warn_on_mismatch(
            quick, source.checkpoint, source.name, source.tag_quick_gelu, _mix_up_is_likely(source), reporter
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
                f"open_clip can't build the model {source.name}", found=checkpoint.first_line(error, 12)
            ) from error


def _load_checkpoint(model: Any, source: Source, reporter: Reporter) -> None:
    """Load the checkpoint by open_clip's own rules; the image tower must be complete."""
    from open_clip.factory import load_checkpoint

    path = source.checkpoint
    assert path is not None
    kind = checkpoint.check_checkpoint(path)
    with checkpoint.reading(path, source.name):
        if kind == "torchscript":
            found = _load_torchscript(model, path)
        else:
            found = load_checkpoint(model, str(path), strict=False, weights_only=True)
    if not found:  # big_vision's NumPy files, which open_clip checks itself
        return
    lacking = [name for name in found.missing_keys if name.startswith("visual.")]
    checkpoint.refuse_other_keys(lacking, found.unexpected_keys, path=path, model=source.name)
    if found.missing_keys:
        reporter.detail(f"{path.name} has no text tower: the image tower is all that is used")


def _load_torchscript(model: Any, path: Path) -> Any:
    """OpenAI's own archives: half-precision tensors and three entries that are settings, not weights."""
    from open_clip.model import convert_to_custom_text_state_dict

    state = checkpoint.torchscript_tensors(path)
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
