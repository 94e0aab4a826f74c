"""Networks of DomainBed: ``domainbed:MNIST_CNN``."""

from __future__ import annotations

from pathlib import Path

from ncm_cli.errors import InputError, unknown
from ncm_cli.images import weights
from ncm_cli.images.clip_config import require_side
from ncm_cli.images.model import LoadedModel, activations
from ncm_cli.images.request import EncoderRequest
from ncm_cli.progress import Reporter
from ncm_cli.solvers.device import own_random_numbers

_NAMES = ("MNIST_CNN",)


def load_domainbed(request: EncoderRequest, reporter: Reporter) -> LoadedModel:
    """A network with random weights, or with those of a checkpoint file; its pictures aren't normalised."""
    from torchvision import transforms

    from ncm_cli.images.mnist_cnn import MnistCnn

    name = request.model.removeprefix("domainbed:")
    if name not in _NAMES:
        raise unknown("network of DomainBed's", name, _NAMES, where="--model")
    if request.weights == "default":
        what = f"DomainBed has no weights for {name}"
        raise InputError(what, fix="--random-init, or --pretrained FILE")
    tuned = weights.tuned_facts(request.weights)
    with own_random_numbers(request.seed):
        module = MnistCnn(tuned.get("representation", MnistCnn.own_width))
    source = weights.chosen_weights(request, request.model, (), "a checkpoint file")
    if isinstance(source, Path):
        with weights.reading_checkpoint(source, request.model):
            incompatible_keys = module.load_state_dict(weights.tensors(source, request.model), strict=False)
        weights.require_keys(
            incompatible_keys.missing_keys,
            incompatible_keys.unexpected_keys,
            path=source,
            model=request.model,
        )
        weights.require_whole(source, tuned, module.state_dict())
    side = request.image_size or tuned.get("image_size") or module.side
    require_side((side, side), request.model)
    black, white = [0.0] * 3, [1.0] * 3
    steps = (transforms.Resize((side, side)), transforms.ToTensor(), transforms.Normalize(black, white))
    return LoadedModel(
        module=module,
        encode=module,
        transform=transforms.Compose(steps),
        size=(side, side),
        shortest=None,
        facts={
            "kind": "domainbed",
            "model": request.model,
            "weights_sha256": weights.digest(source)["sha256"]
            if isinstance(source, Path)
            else weights.state_sha256(module.state_dict()),
            "activation": activations(module),
            "preprocess": {
                "resize": "squash",
                "interpolation": "bilinear",
                "crop": None,
                "mean": black,
                "std": white,
            },
            "projection": "representation" if tuned else "pooled",
        },
    )
