"""Loads encoders. A new kind is a key of `request.ENCODER_KINDS`, with a loader in `network._LOADERS`.

A prefix of a model's name that isn't a key there is taken for open_clip's. What decides an encoder's features
is in its description and fingerprint.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import threading
from pathlib import Path
from typing import Any

from ncm_cli.images.decode import DECODE_POLICY, SAMPLE_POLICY
from ncm_cli.images.options import (
    refuse_device,
)
from ncm_cli.images.pixels import PixelsEncoder
from ncm_cli.images.request import ENCODER_KINDS, Encoder, EncoderRequest
from ncm_cli.progress import Reporter


def request_key(request: EncoderRequest) -> dict[str, Any]:
    """JSON facts that decide the features, gathered without importing torch.

    Two requests with equal keys give the same features, so stored rows stay valid and no model needs to be
    loaded to know that. Local checkpoints and configurations count by content, not by path.
    """
    key: dict[str, Any] = {
        "kind": request.kind,
        "model": request.model,
        "precision": request.precision if request.has_network else "fp32",
        "normalize": request.normalize,
        "decode_policy": DECODE_POLICY,
        "sample_policy": SAMPLE_POLICY,
        "libraries": {name: _version(name) for name in ENCODER_KINDS[request.kind].distributions},
    }
    if request.has_network:
        from ncm_cli.images.weights import request_facts

        key |= request_facts(request)
    return key | request.views()


def start_loading(request: EncoderRequest, reporter: Reporter) -> None:
    """Note what will be loaded, refuse a bad file of weights, and start to import the library in a thread."""
    if not request.has_network:
        return
    from ncm_cli.images.clip_config import local_config, read_config_parts
    from ncm_cli.images.network import import_library
    from ncm_cli.images.weights import chosen_weights, looks_like_a_path

    if request.pretrained and request.weights is None and not request.random_init:
        reporter.warn(f"no effect: --pretrained {request.pretrained}; {request.model} has its own weights")
    if request.weights and looks_like_a_path(request.weights):
        chosen_weights(request, request.model, (), "a checkpoint file")

    if (config := local_config(request.model)) is not None and config.is_file():
        read_config_parts(config)

    def ahead() -> None:
        with contextlib.suppress(Exception):  # the import that needs it will raise the error again
            import_library(request.kind)

    named = "random weights" if request.random_init else Path(request.weights or "").name
    reporter.note(f"loading {request.model}" + (f" with {named}" if named else ""))
    threading.Thread(target=ahead, name="import").start()


def load_encoder(request: EncoderRequest, *, device: str = "auto", reporter: Reporter) -> Encoder:
    """Load the encoder of a request; raises all errors of model, weights and device.

    Parameters
    ----------
    device
        ``auto`` (CUDA if there is one), ``cpu``, ``cuda`` or ``cuda:N``. ``pixels`` needs none.
    reporter
        Is told the device in use, and warned about an activation that doesn't fit the weights.

    Raises
    ------
    UsageError
        A bad size of ``pixels``, or ``pixels`` on a GPU.
    InputError
        An unknown model or tag, missing or foreign weights, CUDA asked for where there is none.
    """
    if not request.has_network:
        for error in refuse_device(request.model, device):
            raise error
        return PixelsEncoder(request)
    from ncm_cli.images.network import TorchEncoder

    return TorchEncoder(request, device, reporter)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
