"""Models of timm: ``timm:NAME`` gives pooled features, without the classifier."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ncm_cli.errors import InputError, unknown
from ncm_cli.images import weights
from ncm_cli.images.clip_config import require_side
from ncm_cli.images.model import LoadedModel, activations, three_floats
from ncm_cli.images.request import EncoderRequest
from ncm_cli.progress import Reporter
from ncm_cli.solvers.device import no_random_numbers, own_random_numbers

if TYPE_CHECKING:
    import torch


def load_timm(request: EncoderRequest, reporter: Reporter) -> LoadedModel:
    """A model without its classifier, with timm's own evaluation transform.

    In checkpoints of `ncm finetune`, the classifier is the layer that gives the representation; it is kept.
    """
    import timm
    from timm.data import create_transform, resolve_data_config

    name = request.model.removeprefix("timm:")
    base, _, tag = name.partition(".")
    if not timm.is_model(base):
        raise unknown("timm model", base, timm.list_models(), where="--model")
    tags = [full.partition(".")[2] for full in timm.list_pretrained(f"{base}.*")]
    if tag and tag not in tags:
        raise unknown(f"weights tag of the timm model {base}", tag, tags, where="--model")
    tuned = weights.tuned_facts(request.weights)
    module, sha256 = _with_weights(request, name, base, tags, tuned)
    side = request.image_size or tuned.get("image_size")
    given: dict[str, Any] = {} if side is None else {"input_size": (3, side, side), "crop_pct": 1.0}
    config = resolve_data_config(given, model=module)
    config["crop_mode"] = config.get("crop_mode") or "center"
    height, width = map(int, config["input_size"][-2:])
    require_side((height, width), request.model)
    squash = config["crop_mode"] in {"squash", "border"}
    return LoadedModel(
        module=module,
        encode=module,
        transform=create_transform(**config, is_training=False),
        size=(height, width),
        shortest=None if squash else int(max(height, width) / config["crop_pct"]),
        facts={
            "kind": "timm",
            "model": f"timm:{name}",
            "weights_sha256": sha256,
            "activation": activations(module),
            "preprocess": {
                "resize": config["crop_mode"],
                "interpolation": config["interpolation"],
                "crop": float(config["crop_pct"]),
                **{name: three_floats(config[name]) for name in ("mean", "std")},
            },
            "projection": "representation" if tuned else "pooled",
        },
    )


def _with_weights(
    request: EncoderRequest, name: str, base: str, tags: list[str], tuned: Mapping[str, Any]
) -> tuple[torch.nn.Module, str]:
    """The model, and the SHA-256 of its weights: of their file if there is one, else of the tensors.

    ``tuned`` has the facts of a checkpoint of ``ncm finetune``, and is empty for other weights.
    """
    import timm

    width = tuned.get("representation", 0)
    default = request.weights == "default"
    if default and not tags:
        raise InputError(f"timm has no weights for {base}", fix="--pretrained FILE, or --random-init")
    example = "'default' for timm's own weights, one of its tags, or a checkpoint file"
    shown = f"timm:{name}" if request.weights is None else f"timm:{base}"
    source = name if default else weights.chosen_weights(request, shown, tags, example)
    if isinstance(source, str):
        return _published(source if default else f"{base}.{source}")
    with own_random_numbers(request.seed), no_random_numbers() if source else contextlib.nullcontext():
        model = timm.create_model(name, pretrained=False, num_classes=width)
    if source is None:
        return model, weights.state_sha256(model.state_dict())
    named = weights.tensors(source, f"timm:{name}")
    classifier: Any = () if width else (getattr(model, "pretrained_cfg", {}) or {}).get("classifier") or ()
    dropped = tuple(f"{head}." for head in ([classifier] if isinstance(classifier, str) else classifier))
    kept = {key: value for key, value in named.items() if not key.startswith(dropped)}
    with weights.reading_checkpoint(source, f"timm:{name}"):
        # Checkpoints in a model's original names: timm keeps the renaming beside the model.
        rename = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
        if rename is not None and set(kept) != set(model.state_dict()):
            renamed = rename(dict(named), model)
            kept = {key: value for key, value in renamed.items() if not key.startswith(dropped)}
        incompatible_keys = model.load_state_dict(kept, strict=False)
    weights.require_keys(
        incompatible_keys.missing_keys, incompatible_keys.unexpected_keys, path=source, model=f"timm:{name}"
    )
    weights.require_whole(source, tuned, model.state_dict())
    return model, weights.digest(source)["sha256"]


def _published(name: str) -> tuple[torch.nn.Module, str]:
    """A model with timm's own weights, and their SHA-256."""
    import timm
    import torch

    config: Any = timm.get_pretrained_cfg(name)
    what, option = f"the weights of timm:{name}", f"--model timm:{name.partition('.')[0]}"
    overlay: dict[str, str] | None = None
    if config.hf_hub_id:
        with weights.fetching(what, option):
            names = [config.hf_hub_filename or "model.safetensors", "pytorch_model.bin"]
            path = weights.hub_file(config.hf_hub_id, names)
        # Given as a file, so that timm doesn't ask the hub again.
        overlay, loading = {"file": str(path)}, weights.reading_checkpoint(path, f"timm:{name}")
    else:
        cache = Path(torch.hub.get_dir()) / "checkpoints"
        path, loading = cache / Path(config.url or "").name, weights.fetching(what, option, cache)
    with loading, own_random_numbers(0), no_random_numbers():
        model = timm.create_model(name, pretrained=True, num_classes=0, pretrained_cfg_overlay=overlay)
    return model, weights.digest(path)["sha256"] if path.is_file() else weights.state_sha256(
        model.state_dict()
    )
