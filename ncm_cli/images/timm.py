"""``timm:NAME``: pooled features of a timm model, without its classifier."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ncm_cli.errors import InputError, unknown
from ncm_cli.images import network, weights
from ncm_cli.images.encoder import EncoderRequest, describe, effective_pretrained
from ncm_cli.progress import Reporter

if TYPE_CHECKING:
    import torch

_EXAMPLE = "'default' for timm's own weights, one of its tags, or a checkpoint file"


def load(request: EncoderRequest, *, device: str, reporter: Reporter) -> network.TorchEncoder:
    """The encoder of a ``timm:NAME`` request: ``num_classes=0``, timm's own evaluation transform."""
    name = request.model.removeprefix("timm:")
    source = _source(request, name)
    where = network.choose_device(device, request.precision, reporter)
    model, sha256 = _build(request, name, source)
    transform, config = _transform(model)
    model.eval().to(where)
    if where != "cpu":
        import torch

        model.to(memory_format=torch.channels_last)
    height, width = config["input_size"][-2:]
    squash = config["crop_mode"] in {"squash", "border"}
    return network.TorchEncoder(
        request,
        network=model,
        transform=transform,
        shortest=None if squash else int(max(height, width) / config["crop_pct"]),
        dim=network.measured_dim(model, (height, width), where, request.precision),
        device=where,
        description=describe(
            request,
            kind="timm",
            model=f"timm:{name}",
            weights_sha256=sha256,
            activation=network.activations(model),
            image_size=[int(height), int(width)],
            preprocess={
                "resize": config["crop_mode"],
                "interpolation": config["interpolation"],
                "crop": float(config["crop_pct"]),
                "mean": network.numbers(config["mean"]),
                "std": network.numbers(config["std"]),
            },
            projection="pooled",
        ),
    )


def _source(request: EncoderRequest, name: str) -> Path | str | None:
    """A checkpoint file, a full model name with its tag, or None for random weights."""
    import timm

    base, _, tag = name.partition(".")
    if not timm.is_model(base):
        raise unknown("timm model", base, timm.list_models(), where="--model")
    tags = [full.partition(".")[2] for full in timm.list_pretrained(f"{base}.*")]
    if tag and tag not in tags:
        raise unknown(f"weights tag of the timm model {base}", tag, tags, where="--model")
    if request.random_init:
        return None
    pretrained = weights.require_weights(
        effective_pretrained(request), model=f"timm:{name}", example=_EXAMPLE
    )
    if pretrained == "default":
        if not tags:
            raise InputError(f"timm has no weights for {base}", fix="--pretrained FILE, or --random-init")
        return name
    found = weights.resolve(pretrained, tags, model=f"timm:{base}")
    return found if isinstance(found, Path) else f"{base}.{found}"


def _build(request: EncoderRequest, name: str, source: Path | str | None) -> tuple[torch.nn.Module, str]:
    """The model with its weights, and the weights' SHA-256."""
    import timm

    if isinstance(source, str):
        return _published(source)
    with network.own_random_numbers(request.seed):
        model = timm.create_model(name, pretrained=False, num_classes=0)
    if source is None:
        return model, weights.state_sha256(model)
    _load_file(model, source, f"timm:{name}")
    return model, weights.digest(source)["sha256"]


def _published(name: str) -> tuple[torch.nn.Module, str]:
    """A model with timm's own weights; the digest is the downloaded file's where that can be found."""
    import timm
    import torch

    config: Any = timm.get_pretrained_cfg(name)
    what, option = f"the weights of timm:{name}", f"--model timm:{name.partition('.')[0]}"
    if config.hf_hub_id:
        names = [config.hf_hub_filename or "model.safetensors", "pytorch_model.bin"]
        with weights.fetching(what, option):
            path = weights.hub_file(config.hf_hub_id, names)
        # Given as a file, so that timm doesn't ask the hub again.
        overlay, loading = {"file": str(path)}, weights.reading(path, f"timm:{name}")
    else:
        cache = Path(torch.hub.get_dir()) / "checkpoints"
        path = cache / Path(config.url or "").name
        overlay, loading = {}, weights.fetching(what, option, cache)
    with loading, network.own_random_numbers(0):
        model = timm.create_model(
            name, pretrained=True, num_classes=0, pretrained_cfg_overlay=overlay or None
        )
    return model, weights.digest(path)["sha256"] if path.is_file() else weights.state_sha256(model)


def _load_file(model: torch.nn.Module, path: Path, name: str) -> None:
    """Load every tensor of the model from a checkpoint; the classifier's, which it may have, are dropped."""
    named = weights.tensors(path, name)
    dropped = _classifiers(model)
    kept = {key: value for key, value in named.items() if not key.startswith(dropped)}
    if set(kept) != set(model.state_dict()):
        # Checkpoints in a model's original names: timm keeps the renaming beside the model.
        rename = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
        if rename is not None:
            with weights.reading(path, name):
                renamed = rename(dict(named), model)
            kept = {key: value for key, value in renamed.items() if not key.startswith(dropped)}
    with weights.reading(path, name):
        found = model.load_state_dict(kept, strict=False)
    weights.refuse_other_keys(found.missing_keys, found.unexpected_keys, path=path, model=name)


def _classifiers(model: torch.nn.Module) -> tuple[str, ...]:
    """The prefixes of a model's classifier tensors."""
    config: Any = getattr(model, "pretrained_cfg", {}) or {}
    names = config.get("classifier") or ()
    return tuple(f"{name}." for name in ([names] if isinstance(names, str) else names))


def _transform(model: torch.nn.Module) -> tuple[Any, dict[str, Any]]:
    from timm.data import create_transform, resolve_data_config

    config = resolve_data_config({}, model=model)
    config["crop_mode"] = config.get("crop_mode") or "center"
    return create_transform(**config, is_training=False), config
