"""open_clip: features are its own, weights are checked, the activation is recorded and doubted."""

from __future__ import annotations

import json
import logging
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ncm_cli.encoders import activation
from ncm_cli.encoders.base import EncoderRequest, load_encoder, request_key
from ncm_cli.encoders.decode import DecodeError
from ncm_cli.encoders.open_clip_ import _quiet_root_logger
from ncm_cli.errors import InputError, UsageError
from ncm_cli.progress import SILENT
from ncm_cli.store.fingerprint import differing_fields, fingerprint

Picture = Callable[..., Image.Image]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty hub cache, and a hub that can't be reached; returns the cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    return tmp_path / "hub"


def reference(name: str, checkpoint: Path | None = None) -> tuple[Any, Any]:
    """The model and transform that open_clip itself makes."""
    import open_clip

    with _quiet_root_logger():
        pretrained = str(checkpoint) if checkpoint else None
        model, _, transform = open_clip.create_model_and_transforms(name, pretrained=pretrained)
    return model.eval(), transform


def images(picture: Picture) -> list[Image.Image]:
    sizes = [(32, 32), (50, 90), (200, 40), (31, 33), (300, 300)]
    return [picture(h, w, seed) for seed, (h, w) in enumerate(sizes)]


def test_features_are_encode_image_on_its_own_preprocess(tiny_clip, picture: Picture, heard) -> None:
    import torch

    model, transform = reference(f"local-dir:{tiny_clip.folder}")
    encoder = load_encoder(
        EncoderRequest(model=f"local-dir:{tiny_clip.folder}"), device="auto", reporter=heard
    )
    items = [encoder.preprocess(image, str(i)) for i, image in enumerate(images(picture))]
    for item, image in zip(items, images(picture), strict=True):
        assert torch.equal(item, transform(image))
    with torch.no_grad():
        expected = torch.cat([model.encode_image(item[None]) for item in items]).numpy()
    for batch in (1, 2, 5):
        features = np.concatenate([encoder.encode(items[i : i + batch]) for i in range(0, 5, batch)])
        np.testing.assert_allclose(features, expected, atol=1e-5)
    assert features.dtype == np.float32
    assert encoder.dim == 16
    assert any("device: " in note for note in heard.notes)
    assert heard.warnings == []


@pytest.mark.parametrize("name", ["checkpoint", "safetensors", "training"])
def test_every_container_gives_the_same_features(name: str, tiny_clip, picture: Picture) -> None:
    model, _ = reference(f"local-dir:{tiny_clip.folder}")
    request = EncoderRequest(model=str(tiny_clip.config), pretrained=str(getattr(tiny_clip, name)))
    encoder = load_encoder(request, device="cpu", reporter=SILENT)
    item = encoder.preprocess(picture(32, 32), "a")
    np.testing.assert_allclose(
        encoder.encode([item]), model.encode_image(item[None]).detach().numpy(), atol=1e-5
    )


def test_a_model_added_to_open_clips_registry_works_by_name(
    tiny_clip, picture: Picture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import open_clip

    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "tiny", json.loads(tiny_clip.config.read_text()))
    model, transform = reference("tiny", tiny_clip.checkpoint)
    request = EncoderRequest(model="tiny", pretrained=str(tiny_clip.checkpoint))
    encoder = load_encoder(request, device="cpu", reporter=SILENT)
    item = encoder.preprocess(picture(50, 70), "a")
    np.testing.assert_array_equal(item.numpy(), transform(picture(50, 70)).numpy())
    np.testing.assert_allclose(
        encoder.encode([item]), model.encode_image(item[None]).detach().numpy(), atol=1e-5
    )


def test_c44_a_models_own_preprocessing_is_used_and_stored(tiny_clip, picture: Picture) -> None:
    own = load_encoder(EncoderRequest(model=f"local-dir:{tiny_clip.folder}"), device="cpu", reporter=SILENT)
    default = load_encoder(
        EncoderRequest(model=str(tiny_clip.config), pretrained=str(tiny_clip.safetensors)),
        device="cpu",
        reporter=SILENT,
    )
    assert own.description["preprocess"] == {
        "resize": "squash",
        "interpolation": "bilinear",
        "crop": None,
        "mean": [0.5, 0.4, 0.3],
        "std": [0.2, 0.3, 0.4],
    }
    wide = picture(40, 120)
    assert not np.allclose(own.preprocess(wide, ""), default.preprocess(wide, ""), atol=0.05)
    fields = {name for name, _, _ in differing_fields(own.description, default.description)}
    assert {"preprocess.resize", "preprocess.mean", "preprocess.interpolation"} <= fields
    assert fingerprint(own.description) != fingerprint(default.description)


def test_c44_default_preprocessing_on_a_model_with_another_is_warned_about(heard) -> None:
    import open_clip

    from ncm_cli.encoders.open_clip_ import _warn_on_preprocess
    from ncm_cli.encoders.open_clip_source import Source

    used = vars(open_clip.transform.PreprocessCfg())
    _warn_on_preprocess(Source("ViT-B-16-SigLIP", checkpoint=Path("w.safetensors")), used, heard)
    assert re.search(
        "w.safetensors gets CLIP's default .* differ in: mean, std, resize_mode", heard.warnings[0]
    )
    _warn_on_preprocess(Source("ViT-B-32", checkpoint=Path("w.safetensors")), used, heard)
    assert len(heard.warnings) == 1


def test_c41_activations_are_recorded_and_are_not_interchangeable(tiny_clip, picture: Picture) -> None:
    plain, quick = (
        load_encoder(
            EncoderRequest(model=str(config), pretrained=str(tiny_clip.checkpoint)),
            device="cpu",
            reporter=SILENT,
        )
        for config in (tiny_clip.config, tiny_clip.quick_config)
    )
    assert plain.description["activation"] == "GELU"
    assert quick.description["activation"] == "QuickGELU"
    assert fingerprint(plain.description) != fingerprint(quick.description)
    item = plain.preprocess(picture(32, 32), "")
    assert np.abs(plain.encode([item]) - quick.encode([item])).max() > 1e-4


def _copy(source: Path, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(source.read_bytes())
    return target


def test_c41_a_quickgelu_checkpoint_under_a_plain_name_is_warned_about(
    tiny_clip, heard, tmp_path: Path
) -> None:
    named = _copy(tiny_clip.safetensors, tmp_path / "ViT-tiny-quickgelu.safetensors")
    load_encoder(
        EncoderRequest(model=str(tiny_clip.config), pretrained=str(named)), device="cpu", reporter=heard
    )
    assert re.search(
        r"QuickGELU mismatch: the model tiny uses GELU.*--model tiny-quickgelu", heard.warnings[0]
    )
    heard.warnings.clear()
    load_encoder(
        EncoderRequest(model=str(tiny_clip.quick_config), pretrained=str(named)), device="cpu", reporter=heard
    )
    assert heard.warnings == []


def test_c41_a_configuration_beside_the_checkpoint_tells_its_activation(
    tiny_clip, heard, tmp_path: Path
) -> None:
    path = _copy(tiny_clip.safetensors, tmp_path / "x.safetensors")
    config = {"model_cfg": json.loads(tiny_clip.quick_config.read_text())}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    load_encoder(
        EncoderRequest(model=str(tiny_clip.config), pretrained=str(path)), device="cpu", reporter=heard
    )
    assert "open_clip_config.json beside it says so" in heard.warnings[0]


def test_c41_openais_own_archives_are_known(tiny_clip, heard, tmp_path: Path, picture: Picture) -> None:
    """A TorchScript archive of half-precision tensors with OpenAI's three settings in it."""
    import torch

    model, _ = reference(f"local-dir:{tiny_clip.folder}")

    class Archive(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in activation.OPENAI_SETTINGS:
                self.register_buffer(name, torch.tensor(3))
            self.visual = torch.nn.Module()

        def forward(self) -> int:
            return 1

    archive = Archive()
    for name, value in model.state_dict().items():
        *parents, last = name.split(".")
        place: Any = archive
        for parent in parents:
            if not hasattr(place, parent):
                place.add_module(parent, torch.nn.Module())
            place = getattr(place, parent)
        place.register_buffer(last, value.half())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates what OpenAI's files are made with
        torch.jit.save(torch.jit.script(archive), str(tmp_path / "tiny.pt"))
    encoder = load_encoder(
        EncoderRequest(model=str(tiny_clip.config), pretrained=str(tmp_path / "tiny.pt")),
        device="cpu",
        reporter=heard,
    )
    assert "TorchScript archive, as OpenAI's are" in heard.warnings[0]
    item = encoder.preprocess(picture(32, 32), "")
    expected = model.encode_image(item[None]).detach().numpy()
    np.testing.assert_allclose(encoder.encode([item]), expected, atol=5e-3)  # half-precision weights


def test_c41_a_doubtful_activation_is_warned_about_and_a_said_one_is_not(
    tiny_clip, heard, tmp_path: Path
) -> None:
    unsaid = json.loads(tiny_clip.config.read_text())
    del unsaid["quick_gelu"]
    (tmp_path / "unsaid.json").write_text(json.dumps(unsaid))
    load_encoder(
        EncoderRequest(model=str(tmp_path / "unsaid.json"), pretrained=str(tiny_clip.checkpoint)),
        device="cpu",
        reporter=heard,
    )
    assert "doesn't say whether it was trained with GELU or QuickGELU; GELU is used" in heard.warnings[0]
    heard.warnings.clear()
    load_encoder(
        EncoderRequest(model=str(tiny_clip.config), pretrained=str(tiny_clip.checkpoint)),
        device="cpu",
        reporter=heard,
    )
    assert heard.warnings == []


@pytest.mark.parametrize(
    ("name", "quick"),
    [
        ("ViT-B-32-openai.pt", True),
        ("ViT-B-32-quickgelu.pt", True),
        ("vit_b_32-laion2b_s34b_b79k.pt", False),
        ("epoch_10.pt", None),
    ],
)
def test_c41_names_of_files_tell_what_open_clip_knows_of_them(
    name: str, quick: bool | None, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(b"x")
    assert activation.evidence_in(tmp_path / name)[0] is quick


def test_c42_no_weights_is_an_error_unless_random_ones_are_asked_for(picture: Picture, tiny_clip) -> None:
    import torch

    for model in ("ViT-B-32", str(tiny_clip.config), "timm:resnet18"):
        with pytest.raises(InputError, match=r"no weights given for the model[\s\S]*--random-init"):
            load_encoder(EncoderRequest(model=model), device="cpu", reporter=SILENT)
    states = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    one, same, other = (
        load_encoder(
            EncoderRequest(model=str(tiny_clip.config), random_init=True, seed=seed),
            device="cpu",
            reporter=SILENT,
        )
        for seed in (1, 1, 2)
    )
    assert torch.equal(states[0], torch.random.get_rng_state())
    assert states[1] == random.getstate()
    np.testing.assert_array_equal(states[2], np.random.get_state()[1])
    assert one.description == same.description
    assert one.description["weights_sha256"] != other.description["weights_sha256"]
    item = one.preprocess(picture(32, 32), "")
    np.testing.assert_array_equal(one.encode([item]), same.encode([item]))
    assert np.abs(one.encode([item]) - other.encode([item])).max() > 1e-3


@pytest.mark.parametrize(
    ("pretrained", "message"),
    [
        ("openia", r"no tag or file named 'openia'[\s\S]*did you mean 'openai'\?"),
        ("{root}/plainn.pt", r"no such checkpoint file[\s\S]*did you mean .*plain\.pt\?"),
        ("{root}/none/w.pt", r"no such checkpoint file[\s\S]*is not there either"),
        ("{root}", r"names a folder, not a checkpoint file[\s\S]*plain\.pt"),
        ("{root}/tiny.json", r"not a checkpoint file[\s\S]*embed_dim"),
    ],
)
def test_c43_typos_paths_and_folders_have_their_own_messages(
    pretrained: str, message: str, tiny_clip
) -> None:
    request = EncoderRequest(model="ViT-B-32", pretrained=pretrained.format(root=tiny_clip.config.parent))
    request_key(request)
    with pytest.raises(InputError, match=message):
        load_encoder(request, device="cpu", reporter=SILENT)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("ViT-B-33", r"no model named 'ViT-B-33'[\s\S]*did you mean 'ViT-B-32'\?"),
        ("{root}", r"--model names a folder[\s\S]*local-dir:"),
        ("{root}/none.json", "no such model configuration"),
        ("{root}/plain.pt.json", "can't be read as JSON"),
        ("{root}/other.json", r"not an open_clip model configuration[\s\S]*embed_dim"),
        ("local-dir:{root}/none", "no such model folder"),
        ("local-dir:{root}", "has no open_clip_config.json"),
        ("timm:resnet188", r"no timm model named 'resnet188'[\s\S]*did you mean 'resnet18'\?"),
        ("timm:resnet18.a1_in1kk", r"no weights tag .*'a1_in1kk'[\s\S]*did you mean 'a1_in1k'\?"),
    ],
)
def test_c43_models_that_are_not_there(model: str, message: str, tiny_clip) -> None:
    root = tiny_clip.config.parent
    (root / "plain.pt.json").write_text("{")
    (root / "other.json").write_text("[1]")
    request = EncoderRequest(model=model.format(root=root), pretrained="openai")
    request_key(request)
    with pytest.raises(InputError, match=message):
        load_encoder(request, device="cpu", reporter=SILENT)


def test_files_that_are_no_weights_of_the_model_are_refused(tiny_clip, tmp_path: Path) -> None:
    import torch

    def refused(path: Path, message: str, model: str | None = None) -> None:
        request = EncoderRequest(model=model or str(tiny_clip.config), pretrained=str(path))
        with pytest.raises(InputError, match=message) as caught:
            load_encoder(request, device="cpu", reporter=SILENT)
        assert path.name in str(caught.value)

    (tmp_path / "empty.pt").write_bytes(b"")
    refused(tmp_path / "empty.pt", "is empty")
    (tmp_path / "lfs.pt").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    refused(tmp_path / "lfs.pt", "Git LFS pointer")
    whole = tiny_clip.checkpoint.read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    refused(tmp_path / "cut.pt", "damaged or cut short")
    whole = tiny_clip.safetensors.read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    refused(tmp_path / "cut.safetensors", "can't be loaded into the model tiny")
    torch.save({"a": torch.zeros(2)}, tmp_path / "foreign.pt")
    refused(tmp_path / "foreign.pt", r"can't be loaded into|doesn't fit")
    torch.save(torch.zeros(2), tmp_path / "tensor.pt")
    refused(tmp_path / "tensor.pt", "can't be loaded into the model tiny")
    refused(
        tiny_clip.checkpoint,
        r"doesn't fit the model timm:resnet18[\s\S]*lacks: conv1.weight",
        "timm:resnet18",
    )
    state = torch.load(tiny_clip.checkpoint, weights_only=True)
    del state["visual.proj"]
    torch.save(state, tmp_path / "lacking.pt")
    refused(tmp_path / "lacking.pt", r"1 tensors that it lacks: visual\.proj")


class Malicious:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path(self.target),))  # type: ignore[attr-defined]


@pytest.mark.parametrize("model", ["open_clip", "timm:resnet18"])
def test_pickled_objects_are_never_run(model: str, tiny_clip, tmp_path: Path) -> None:
    import torch

    trap = Malicious()
    trap.target = str(tmp_path / "ran")  # type: ignore[attr-defined]
    torch.save({"state_dict": {"x": torch.zeros(1)}, "trap": trap}, tmp_path / "evil.pt")
    name = str(tiny_clip.config) if model == "open_clip" else model
    with pytest.raises(InputError, match="Python objects beyond tensors, which are never loaded"):
        load_encoder(
            EncoderRequest(model=name, pretrained=str(tmp_path / "evil.pt")), device="cpu", reporter=SILENT
        )
    assert not (tmp_path / "ran").exists()


def test_weights_are_known_by_content_not_by_path(tiny_clip, tmp_path: Path) -> None:
    moved = _copy(tiny_clip.safetensors, tmp_path / "sub" / "moved.safetensors")
    keys, descriptions = [], []
    for path in (tiny_clip.safetensors, moved):
        request = EncoderRequest(model=str(tiny_clip.config), pretrained=str(path))
        keys.append(request_key(request))
        descriptions.append(load_encoder(request, device="cpu", reporter=SILENT).description)
    assert keys[0] == keys[1]
    assert descriptions[0] == descriptions[1]
    assert descriptions[0]["weights_sha256"] == keys[0]["weights"]["sha256"]
    changed = bytearray(moved.read_bytes())
    changed[-1] ^= 1
    moved.write_bytes(changed)
    assert request_key(request) != keys[0]


def test_a_tag_that_is_not_cached_is_one_line_when_offline(offline: Path) -> None:
    for model, pretrained in [
        ("ViT-B-32-quickgelu", None),
        ("timm:resnet18", "default"),
        ("hf-hub:a/b", None),
    ]:
        with pytest.raises(
            InputError, match=r"could not be fetched, and the cache lacks it[\s\S]*--pretrained"
        ):
            load_encoder(EncoderRequest(model=model, pretrained=pretrained), device="cpu", reporter=SILENT)


def test_a_cached_tag_needs_no_network_and_its_file_is_what_is_hashed(
    offline: Path, tiny_clip, monkeypatch: pytest.MonkeyPatch, picture: Picture, heard
) -> None:
    import hashlib

    import open_clip

    snapshot = offline / "models--org--tiny" / "snapshots" / "abc"
    file = _copy(tiny_clip.safetensors, snapshot / "open_clip_model.safetensors")
    (offline / "models--org--tiny" / "refs").mkdir()
    (offline / "models--org--tiny" / "refs" / "main").write_text("abc")
    tag = {"hf_hub": "org/tiny/", "mean": (0.5,) * 3, "std": (0.25,) * 3, "resize_mode": "squash"}
    tag |= {"interpolation": "bilinear", "quick_gelu": True}
    config = json.loads(tiny_clip.config.read_text())
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "tiny", config)
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "tiny", {"some_tag": tag})
    encoder = load_encoder(EncoderRequest(model="tiny", pretrained="Some-Tag"), device="cpu", reporter=heard)
    assert encoder.description["weights_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert encoder.description["preprocess"]["resize"] == "squash"
    assert encoder.description["preprocess"]["std"] == [0.25] * 3
    assert "QuickGELU mismatch" in heard.warnings[0]
    assert "its tag" in heard.warnings[0]


def test_cached_timm_weights_need_no_network(offline: Path, picture: Picture) -> None:
    import hashlib

    import timm
    from safetensors.torch import save_file

    from ncm_cli.encoders.torch_ import own_random_numbers

    snapshot = offline / "models--timm--resnet18.a1_in1k" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (offline / "models--timm--resnet18.a1_in1k" / "refs").mkdir()
    (offline / "models--timm--resnet18.a1_in1k" / "refs" / "main").write_text("abc")
    with own_random_numbers(3):
        model = timm.create_model("resnet18")
    save_file(model.state_dict(), snapshot / "model.safetensors")
    digest = hashlib.sha256((snapshot / "model.safetensors").read_bytes()).hexdigest()
    for pretrained, name in [("default", "timm:resnet18"), ("a1_in1k", "timm:resnet18")]:
        encoder = load_encoder(
            EncoderRequest(model=name, pretrained=pretrained), device="cpu", reporter=SILENT
        )
        assert encoder.description["weights_sha256"] == digest
        item = encoder.preprocess(picture(80, 80), "")
        pooled = model.eval().forward_head(model.forward_features(item[None]), pre_logits=True)
        np.testing.assert_allclose(encoder.encode([item]), pooled.detach().numpy(), atol=1e-5)


def test_c49_low_precision_on_a_cpu_works_or_is_one_line_before_loading(tiny_clip, picture: Picture) -> None:
    weights = str(tiny_clip.checkpoint)
    full, half = (
        load_encoder(
            EncoderRequest(model=str(tiny_clip.config), pretrained=weights, precision=precision),
            device="cpu",
            reporter=SILENT,
        )
        for precision in ("fp32", "bf16")
    )
    items = [full.preprocess(image, "") for image in images(picture)]
    difference = np.abs(full.encode(items) - half.encode(items)).max()
    assert 0 < difference < 0.05
    assert half.encode(items).dtype == np.float32
    assert fingerprint(full.description) != fingerprint(half.description)
    request = EncoderRequest(model=str(tiny_clip.config), pretrained=weights, precision="fp16")
    with pytest.raises(InputError, match="fp16 needs CUDA"):
        load_encoder(request, device="cpu", reporter=SILENT)


def test_a_cuda_request_without_cuda_is_an_error(tiny_clip, monkeypatch: pytest.MonkeyPatch, heard) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    request = EncoderRequest(model=str(tiny_clip.config), pretrained=str(tiny_clip.checkpoint))
    for device in ("cuda", "cuda:3"):
        with pytest.raises(InputError, match=f"--device {device} asks for a CUDA device that isn't there"):
            load_encoder(request, device=device, reporter=SILENT)
    with pytest.raises(UsageError, match="no device named 'gpu'"):
        load_encoder(request, device="gpu", reporter=SILENT)
    with pytest.raises(UsageError, match="no device named 'cuda:x'"):
        load_encoder(request, device="cuda:x", reporter=SILENT)
    assert load_encoder(request, device="auto", reporter=heard).device == "cpu"
    assert heard.notes == ["device: cpu, fp32"]


def test_running_out_of_memory_names_the_batch_size(tiny_clip, picture: Picture) -> None:
    import torch

    request = EncoderRequest(model=str(tiny_clip.config), pretrained=str(tiny_clip.checkpoint))
    encoder = load_encoder(request, device="cpu", reporter=SILENT)
    items = [encoder.preprocess(picture(32, 32), "")] * 6
    for error in (
        torch.cuda.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        MemoryError(),
    ):

        def fail(batch: Any, error: Exception = error) -> Any:
            raise error

        encoder._network = fail  # type: ignore[attr-defined]
        with pytest.raises(InputError, match=r"batch of 6[\s\S]*--batch-size 3"):
            encoder.encode(items)


def test_a_picture_too_narrow_to_resize_is_a_decode_error(tiny_clip) -> None:
    request = EncoderRequest(model=str(tiny_clip.config), pretrained=str(tiny_clip.checkpoint))
    encoder = load_encoder(request, device="cpu", reporter=SILENT)
    assert encoder.preprocess(Image.new("RGB", (20000, 2)), "").shape == (3, 32, 32)
    with pytest.raises(DecodeError, match="500000 x 1 is too narrow"):
        encoder.preprocess(Image.new("RGB", (500_000, 1)), "")


def test_loading_leaves_logging_alone(tiny_clip) -> None:
    root = logging.getLogger()
    before = list(root.handlers), list(root.filters), root.level
    load_encoder(EncoderRequest(model=str(tiny_clip.config), random_init=True), device="cpu", reporter=SILENT)
    assert (list(root.handlers), list(root.filters), root.level) == before


@pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="needs a CUDA device")
def test_cuda_agrees_with_the_cpu(tiny_clip, picture: Picture) -> None:
    import torch

    request = EncoderRequest(model=str(tiny_clip.config), pretrained=str(tiny_clip.checkpoint))
    cpu, cuda = (load_encoder(request, device=device, reporter=SILENT) for device in ("cpu", "cuda"))
    assert cpu.description == cuda.description
    items = [cpu.preprocess(image, "") for image in images(picture)]
    precision = torch.get_float32_matmul_precision()
    np.testing.assert_allclose(cuda.encode(items), cpu.encode(items), atol=1e-5)
    one = np.concatenate([cuda.encode([item]) for item in items])
    np.testing.assert_allclose(one, cuda.encode(items), atol=1e-5)
    assert torch.get_float32_matmul_precision() == precision
    for low in ("bf16", "fp16"):
        half = load_encoder(
            EncoderRequest(model=request.model, pretrained=request.pretrained, precision=low),
            device="cuda",
            reporter=SILENT,
        )
        assert 0 < np.abs(half.encode(items) - cpu.encode(items)).max() < 0.05
