"""Encoders that run on torch: models of timm and of open_clip, and how one is run.

``timm:NAME`` gives a model's pooled features, without its classifier. Any other ``--model`` is open_clip's:
one of its names, ``hf-hub:ORG/REPO``, ``local-dir:FOLDER`` (with ``open_clip_config.json`` and a checkpoint)
or the path of a configuration, ``MODEL.json``, in open_clip's ``model_cfg`` layout or its model files'.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from ncm_cli.errors import InputError, listing, nearest, unknown
from ncm_cli.images import weights
from ncm_cli.images.clip_config import (
    CONFIG_NAME,
    read_clip_config,
    require_fitting,
    require_side,
    settings_of,
)
from ncm_cli.images.encoder import CentreCrop, EncoderRequest, Preprocess, Resize
from ncm_cli.images.options import DEFAULT_MODEL
from ncm_cli.images.torchscript import torchscript_tensors
from ncm_cli.progress import Reporter
from ncm_cli.solvers.device import (
    choose_device,
    exact,
    is_short_of_memory,
    no_random_numbers,
    own_random_numbers,
)
from ncm_cli.store.digests import digest_of
from ncm_cli.store.files import read_json

if TYPE_CHECKING:
    import torch

CPU_BATCH = 32
"""On a CPU larger batches gain nothing measurable, and this one bounds memory."""

CUDA_BATCH = 256
"""Fills a current GPU with a ViT-B and fits a ViT-L at 336 pixels in 16 GiB; constant, so that the order of
sums never depends on how much memory happens to be free."""

_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1
"""Names of parameters in glibc's malloc.h."""

_ACTIVATIONS = frozenset(
    {"GELU", "GELUTanh", "QuickGELU", "ReLU", "ReLU6", "SiLU", "Swish", "Mish", "Hardswish", "HardSwish"}
    | {"ELU", "LeakyReLU", "PReLU", "Tanh"}
)
"""By class name: timm and open_clip have classes of their own beside torch's."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model with its weights, as its library makes it, and what the description says of it (``facts``).

    ``encode`` maps (B, 3, H, W) float32 to (B, dim), with (H, W) the ``size``; ``transform`` is the model's
    own published preprocessing, to (3, H, W) float32. ``shortest`` is the side that it gives a picture's
    shorter edge, or None where it can't enlarge much. ``tokenizer`` makes what turns texts into tokens of
    the text tower, and ``lacks`` names that tower's tensors that the weights don't have.
    """

    module: torch.nn.Module
    encode: Callable[[torch.Tensor], torch.Tensor]
    transform: Callable[[Image.Image], torch.Tensor]
    size: tuple[int, int]
    shortest: int | None
    facts: dict[str, Any]
    tokenizer: Callable[[], Any] | None = None
    lacks: Sequence[str] = ()


class TorchEncoder:
    """A model of timm or open_clip on its device, and how to run it."""

    def __init__(self, request: EncoderRequest, device: str, reporter: Reporter) -> None:
        import_library(request.kind)
        import torch

        self.device, self._reporter = choose_device(device, request.precision, reporter), reporter
        self._request, self.model = request, _LOADERS[request.kind](request, reporter)
        try:
            module = self.model.module.eval().to(self.device)
        except RuntimeError as error:
            if not is_short_of_memory(error):
                raise
            what = f"not enough memory on {self.device} for {request.model}"
            raise InputError(what, fix="end what else is on it, or --device cpu") from error
        if self.device == "cpu":
            _keep_freed_memory()
        else:
            module.to(memory_format=torch.channels_last)
        self.batch_size = CPU_BATCH if self.device == "cpu" else CUDA_BATCH
        self.description = request.describe(image_size=list(self.model.size), **self.model.facts)
        steps, scale = picture_steps(self.model.transform)
        self.preprocess = Preprocess(request, steps, self.model.shortest)
        self._scale = [torch.as_tensor(value, device=self.device).view(-1, 1, 1) for value in scale]
        self._copies = torch.cuda.Stream(self.device) if self.device != "cpu" else None
        self._most = sys.maxsize
        self._started = 0

    @functools.cached_property
    def dim(self) -> int:
        """Length of a feature: what a batch gave, or a black picture; towers name it in different places."""
        black = np.zeros((1, 3, *self.model.size), "f4")
        return int(self.encode(list(black)).shape[1])

    def batch(self, items: Sequence[np.ndarray]) -> torch.Tensor:
        """(B, 3, H, W) float32 on the device: what the model's own transform gives for each picture.

        8-bit items are sent on as they are, and scaled and normalised there: on the CPU to the very bits of
        torchvision's ``ToTensor`` and ``Normalize``, whose operations these are.
        """
        import torch

        kind, pinned = torch.from_numpy(np.empty(0, items[0].dtype)).dtype, self._copies is not None
        batch = torch.empty((len(items), *items[0].shape), dtype=kind, pin_memory=pinned)
        np.stack(items, out=batch.numpy())
        if self._copies is not None:
            # On a stream of its own, so that it need not wait for the batch before.
            with torch.cuda.stream(self._copies):
                batch = batch.to(self.device, non_blocking=True)
            work = torch.cuda.current_stream(self.device)
            work.wait_stream(self._copies)
            batch.record_stream(work)
        if batch.dtype == torch.uint8:
            most, mean, std = self._scale
            batch = batch.permute(0, 3, 1, 2)
            # In the layout that the device's kernels are given, which decides how they round.
            batch = batch.contiguous() if self.device == "cpu" else batch
            batch = batch.float().div_(most).sub_(mean).div_(std)
        return batch if self.device == "cpu" else batch.contiguous(memory_format=torch.channels_last)

    def encode(self, items: Sequence[np.ndarray]) -> np.ndarray:
        """(B, dim) float32 features of preprocessed pictures, in order."""
        return self.start(items)()

    def start(self, items: Sequence[np.ndarray]) -> Callable[[], np.ndarray]:
        """Begin to encode pictures; a call of what is returned waits for the (B, dim) float32 features.

        Where memory is short, the pictures are run in halves, quarters and so on, and so are all later ones.
        Raises `InputError` where it doesn't even do for one.
        """
        import torch

        self._started += 1
        # The first batch is slow for other reasons.
        compared = self._started == 2 and self._request.precision != "fp32"
        if compared and self._copies is not None:
            torch.cuda.synchronize(self.device)
        began, parts, at, most = time.perf_counter(), list[Callable[[], np.ndarray]](), 0, self._most
        while at < len(items):
            part = items[at : at + self._most]
            if (made := self._run(part, self._request.precision)) is not None:
                parts.append(made)
                at += len(part)
            elif len(part) > 1:
                self._most = len(part) // 2
            else:
                what = f"not enough memory on {self.device} for one picture"
                raise InputError(what, fix="end what else is on it, or a smaller model")
        if self._most < most:
            self._reporter.warn(
                f"not enough memory on {self.device} for {len(items)} pictures at once: going on with "
                f"{self._most}. As arithmetic rounds differently in batches of other sizes, --batch-size "
                f"{self._most} makes this run the same to the last bit wherever memory is short"
            )
        features: list[np.ndarray] = []
        if compared:
            features = [wait() for wait in parts]
            rate = len(items) / (time.perf_counter() - began)
            self._compare(items[: max(1, len(items) // 4)], rate)
        return lambda: self._request.finish(np.concatenate(features or [wait() for wait in parts]))

    def _run(self, items: Sequence[np.ndarray], precision: str) -> Callable[[], np.ndarray] | None:
        """Queue pictures; what is returned waits for their features. None where memory is short."""
        import torch

        try:
            with torch.inference_mode(), exact(self.device, precision):
                features = self.model.encode(self.batch(items)).float().to("cpu", non_blocking=True)
            self.dim = int(features.shape[1])
            if self._copies is None:
                return features.numpy
            done = torch.cuda.current_stream(self.device).record_event()
        except (RuntimeError, MemoryError) as error:
            if not is_short_of_memory(error):
                raise
            features = None
        if features is None:  # and the error gone, whose traceback held what the layers had made
            if self._copies is not None:
                torch.cuda.empty_cache()
            return None

        def wait() -> np.ndarray:
            done.synchronize()
            return np.asarray(features)

        return wait

    def _compare(self, items: Sequence[np.ndarray], rate: float) -> None:
        """Warn where fp32 does more of these pictures a second than the ``rate`` of the lower precision."""
        full = 0.0
        for _ in range(2):  # of which the first is slow for other reasons
            began, made = time.perf_counter(), self._run(items, "fp32")
            if made is not None:
                made()
                full = len(items) / (time.perf_counter() - began)
        if full > 1.2 * rate:  # less is noise
            self._reporter.warn(
                f"{self._request.precision} is slower than fp32 on {self.device}: {rate:.3g} against "
                f"{full:.3g} pictures/s. Features made with --precision fp32 come faster, and are exact"
            )


def picture_steps(transform: Any) -> tuple[tuple[Callable[[Any], Any], ...], list[Any]]:
    """The steps of a transform that change pictures, and the scale, mean and deviation that follow them.

    Steps are ours where they are known, so that a process that reads images needn't import torch. Of a
    transform that doesn't end in scaling to 0..1 and normalising, all is a step, and the scale is empty.
    """
    from torchvision import transforms

    steps = list(getattr(transform, "transforms", ()))
    ends = len(steps) > 1 and isinstance(steps[-2], transforms.ToTensor)
    if not (ends and type(steps[-1]) is transforms.Normalize):
        return (transform, np.asarray), []
    # Pictures are RGB before the first step, so what makes them so changes nothing.
    kept = [_plain_step(step) for step in steps[:-2] if type(step).__name__ != "MaybeConvertMode"]
    return tuple(kept), [255.0, steps[-1].mean, steps[-1].std]


def _plain_step(step: Any) -> Callable[[Any], Any]:
    """Our own twin of a step of torchvision's for pictures; any other step as it is."""
    from torchvision import transforms
    from torchvision.transforms.functional import pil_modes_mapping

    if type(step) is transforms.Resize and step.max_size is None:
        size = step.size if isinstance(step.size, int) else tuple(step.size)
        if isinstance(size, int) or len(size) == 2:
            return Resize(size, int(pil_modes_mapping[step.interpolation]))
    if type(step) is transforms.CenterCrop:
        return CentreCrop(*map(int, step.size))
    return step


_IMPORTING = threading.Lock()
_COMPILER = "torch._dynamo.utils"


def import_library(kind: str) -> None:
    """Import torch and the library of an encoder's kind, in two thirds of the time of a plain import.

    The garbage collector would go over what modules define again and again, and find nothing.
    """
    with _IMPORTING, contextlib.ExitStack() as stack:
        if gc.isenabled():
            stack.callback(gc.enable)
            gc.disable()
        importlib.import_module("torch")
        if _COMPILER not in sys.modules:
            stack.enter_context(_compiler_put_off())
        importlib.import_module(kind)


@contextlib.contextmanager
def _compiler_put_off() -> Iterator[None]:
    """Torch's compiler takes nearly as long to import as torch: let it be imported when it is made use of.

    Nothing here compiles, but torchvision asks it whether a detection layer can be compiled, and timm marks
    methods of one model that it is to leave alone: both when they are imported.
    """
    compiler: Any = importlib.import_module("torch.compiler")
    marked, stand_in = compiler.disable, ModuleType(_COMPILER)

    def give_way() -> None:
        if sys.modules.get(_COMPILER) is stand_in:
            del sys.modules[_COMPILER]

    def attribute(name: str) -> Any:
        if name.startswith("__"):  # what the import system asks for
            raise AttributeError(name)
        give_way()
        return getattr(importlib.import_module(_COMPILER), name)

    later = {"is_compile_supported": lambda device: attribute("is_compile_supported")(device)}
    vars(stand_in).update(later, __getattr__=attribute)
    sys.modules[_COMPILER] = stand_in
    compiler.disable = lambda function=None, **_: function or (lambda decorated: decorated)
    try:
        yield
    finally:
        compiler.disable = marked
        give_way()


def _keep_freed_memory() -> None:
    """Let glibc keep the memory of large tensors for the next batch instead of returning it to the system.

    Otherwise each layer's output is mapped and faulted in anew: with EfficientNet-Lite0 in batches of 32 that
    took more than half of the processor time. Other C libraries have no ``mallopt`` and need none.
    """
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def activations(module: torch.nn.Module) -> str | None:
    """The kinds of activation in a network, such as ``QuickGELU`` or ``GELU``; joined by + if several."""
    return "+".join(sorted(_ACTIVATIONS & {type(part).__name__ for part in module.modules()})) or None


def _three(values: Any) -> list[float]:
    """Three floats for a description, from one number or a sequence."""
    three = list(values) if isinstance(values, Sequence) else [values] * 3
    if len(three) != 3 or any(isinstance(one, bool | str) or not abs(one) < 1e6 for one in three):
        raise ValueError(f"{values!r}, where one or three numbers are expected")
    return [float(value) for value in three]


def _load_timm(request: EncoderRequest, reporter: Reporter) -> LoadedModel:
    """A model without its classifier, with timm's own evaluation transform; of `ncm finetune`'s checkpoints
    the classifier is the layer to the representation."""
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
    module, sha256 = _timm_with_weights(request, name, base, tags, tuned)
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
                **{name: _three(config[name]) for name in ("mean", "std")},
            },
            "projection": "representation" if tuned else "pooled",
        },
    )


def _timm_with_weights(
    request: EncoderRequest, name: str, base: str, tags: list[str], tuned: Mapping[str, Any]
) -> tuple[torch.nn.Module, str]:
    """The model, and its weights' SHA-256: the file's, where they come from one that can be found.

    ``tuned`` are the facts of a checkpoint of ``ncm finetune``, empty for all else.
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
        return _timm_published(source if default else f"{base}.{source}")
    with own_random_numbers(request.seed), no_random_numbers() if source else contextlib.nullcontext():
        model = timm.create_model(name, pretrained=False, num_classes=width)
    if source is None:
        return model, weights.state_sha256(model.state_dict())
    named = weights.tensors(source, f"timm:{name}")
    classifier: Any = () if width else (getattr(model, "pretrained_cfg", {}) or {}).get("classifier") or ()
    dropped = tuple(f"{head}." for head in ([classifier] if isinstance(classifier, str) else classifier))
    kept = {key: value for key, value in named.items() if not key.startswith(dropped)}
    with weights.reading(source, f"timm:{name}"):
        # Checkpoints in a model's original names: timm keeps the renaming beside the model.
        rename = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
        if rename is not None and set(kept) != set(model.state_dict()):
            renamed = rename(dict(named), model)
            kept = {key: value for key, value in renamed.items() if not key.startswith(dropped)}
        found = model.load_state_dict(kept, strict=False)
    weights.require_keys(found.missing_keys, found.unexpected_keys, path=source, model=f"timm:{name}")
    weights.require_whole(source, tuned, model.state_dict())
    return model, weights.digest(source)["sha256"]


def _timm_published(name: str) -> tuple[torch.nn.Module, str]:
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
        overlay, loading = {"file": str(path)}, weights.reading(path, f"timm:{name}")
    else:
        cache = Path(torch.hub.get_dir()) / "checkpoints"
        path, loading = cache / Path(config.url or "").name, weights.fetching(what, option, cache)
    with loading, own_random_numbers(0), no_random_numbers():
        model = timm.create_model(name, pretrained=True, num_classes=0, pretrained_cfg_overlay=overlay)
    return model, weights.digest(path)["sha256"] if path.is_file() else weights.state_sha256(
        model.state_dict()
    )


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


def _load_open_clip(request: EncoderRequest, reporter: Reporter) -> LoadedModel:
    """A model whose features are ``encode_image`` on its own preprocessing."""
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
            "mean": _three(config.mean),
            "std": _three(config.std),
        }
        transform = image_transform_v2(config, is_train=False)
        require_side((height, width), request.model)
        transform(Image.new("RGB", (8, 8)))
        if source.preprocess and (height, width) != to_2tuple(getattr(model.visual, "image_size", None)):
            with torch.inference_mode():  # a network of one size only raises
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
    """What turns texts into the tokens of a source's text tower."""
    import open_clip

    text = (source.config or open_clip.get_model_config(source.name) or {}).get("text_cfg", {})
    named = text.get("hf_tokenizer_name")
    if not request.model.endswith(".json"):
        # Without it transformers asks on the terminal whether to run the tokenizer's code.
        options = {"trust_remote_code": False} if named else {}
        return open_clip.get_tokenizer(source.name if source.config is None else request.model, **options)
    if named:
        raise InputError(
            "an open_clip configuration that names a tokenizer to fetch",
            where=request.model,
            found=f"hf_tokenizer_name {named!r}",
            fix=f"put it, as {CONFIG_NAME}, in a folder with the tokenizer's files: --model local-dir:FOLDER",
        )
    # open_clip looks configurations up by name or folder, never by their file.
    options = {"context_length": text.get("context_length"), **text.get("tokenizer_kwargs", {})}
    return open_clip.get_tokenizer("", **options)


def find_clip(request: EncoderRequest) -> ClipSource:
    """What to build and load; every error of names, tags, paths and configurations."""
    model, example = request.model, "a checkpoint file"
    kind, _, place = model.partition(":")
    if kind == "hf-hub":
        with weights.fetching(f"the model {model}", f"--model {model}"):
            path = weights.hub_file(place, [CONFIG_NAME])
            checkpoint = None if request.random_init else weights.hub_file(place, HUB_NAMES)
        return ClipSource(model, *read_clip_config(path, hub=True), checkpoint)
    if kind == "local-dir":
        folder = Path(place).expanduser()
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
    found = weights.chosen_weights(request, name, tags, example)
    if not isinstance(found, str):
        return ClipSource(name, checkpoint=found)
    tag = get_pretrained_cfg(name, found)
    repository, _, file = tag.get("hf_hub", "").rpartition("/")
    cache = None if repository else Path("~/.cache/clip").expanduser()
    with weights.fetching(f"the weights of {name} with tag {found!r}", f"--pretrained {found}", cache):
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
    named = [path for stem in _PREFERRED for path in files if path.stem == stem]
    if named or len(files) == 1:
        return (named or files)[0]
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
    with weights.reading(path, name):
        if kind == "torchscript":
            # OpenAI's own archives: half-precision tensors and three entries that are settings, not weights.
            state = torchscript_tensors(path)
            state = {key: value.float() for key, value in state.items() if key not in OPENAI_SETTINGS}
            if not hasattr(model, "positional_embedding"):
                state = convert_to_custom_text_state_dict(state)
            found = model.load_state_dict(state, strict=False)
        else:
            if kind == "torch":
                weights.require_own_numbers(path)
            found = load_checkpoint(model, str(path), strict=False, weights_only=True)
    if not found:  # big_vision's NumPy files, which open_clip checks itself
        return []
    lacking = [key for key in found.missing_keys if key.startswith("visual.")]
    weights.require_keys(lacking, found.unexpected_keys, path=path, model=name)
    if found.missing_keys:
        reporter.detail(f"{path.name} has no text tower: the image tower is all that is used")
    return list(found.missing_keys)


def warn_on_activation(tower: torch.nn.Module, source: ClipSource, reporter: Reporter) -> None:
    """Warn where the weights' activation is known to be the other one, or can't be known and might be.

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
    if trained is not None and trained != quick:
        reporter.warn(
            f"QuickGELU mismatch: the model {name} uses {names[quick]}, but the weights were trained with "
            f"{names[trained]} ({evidence}): features will be wrong. Use --model {other}"
        )
    # Nothing rules the other one out where the configuration leaves it unsaid, and open_clip either registers
    # the architecture under both or doesn't know it at all.
    config = source.config or open_clip.get_model_config(name) or {}
    shipped = Path(open_clip.__file__).parent / "model_configs" / f"{name}.json"
    likely = f"{name}-quickgelu" in open_clip.list_models() or not shipped.is_file()
    if trained is None and not quick and "quick_gelu" not in config and likely:
        reporter.warn(
            f"{file} doesn't say whether it was trained with GELU or QuickGELU; GELU is used, as the model "
            f"{name} says. For weights trained with QuickGELU, such as OpenAI's, use --model {other}"
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
    said = {
        bool(pretrained.get_pretrained_cfg(model, tag).get("quick_gelu", False))
        for model, tag in pretrained.list_pretrained()
        if len(tag) > 5 and tag in text
    }
    return (said.pop(), "its name holds a tag of open_clip's") if len(said) == 1 else (None, "")


def warn_on_preprocess(source: ClipSource, used: dict[str, Any], reporter: Reporter) -> None:
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
    # As lists, since tuples and lists of the same numbers are one.
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


_LOADERS = {"timm": _load_timm, "open_clip": _load_open_clip}
"""By an encoder's kind."""
