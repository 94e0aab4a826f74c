"""Weights: none is an error, each wrong name has its message, nothing is unpickled, content counts."""

from __future__ import annotations

import errno
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ncm_cli.errors import InputError
from ncm_cli.images.encoder import load_encoder, request_key
from ncm_cli.images.request import EncoderRequest
from ncm_cli.progress import SILENT

from .conftest import copied, picture


def test_no_weights_is_an_error_unless_random_ones_are_asked_for(tiny_clip) -> None:
    """IBM/terratorch#320."""
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
def test_typos_paths_and_folders_have_their_own_messages(pretrained: str, message: str, tiny_clip) -> None:
    """mlfoundations/open_clip#934."""
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
        ("{root}/plain.pt.json", "not a JSON file that can be read"),
        ("{root}/other.json", r"not an open_clip model configuration[\s\S]*embed_dim"),
        ("local-dir:{root}/none", "no such model folder"),
        ("local-dir:{root}", "has no open_clip_config.json"),
        ("timm:resnet188", r"no timm model named 'resnet188'[\s\S]*did you mean 'resnet18'\?"),
        ("timm:resnet18.a1_in1kk", r"no weights tag .*'a1_in1kk'[\s\S]*did you mean 'a1_in1k'\?"),
    ],
)
def test_models_that_are_not_there(model: str, message: str, tiny_clip) -> None:
    """mlfoundations/open_clip#934."""
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
    refused(tmp_path / "empty.pt", "an empty file")
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
    moved = copied(tiny_clip.safetensors, tmp_path / "sub" / "moved.safetensors")
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
            InputError, match=r"could not be fetched, and can't be found in the cache[\s\S]*--pretrained"
        ):
            load_encoder(EncoderRequest(model=model, pretrained=pretrained), device="cpu", reporter=SILENT)


def test_a_cached_tag_needs_no_network_and_its_file_is_what_is_hashed(
    offline: Path, tiny_clip, monkeypatch: pytest.MonkeyPatch, heard
) -> None:
    import hashlib

    import open_clip

    snapshot = offline / "models--org--tiny" / "snapshots" / "abc"
    file = copied(tiny_clip.safetensors, snapshot / "open_clip_model.safetensors")
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


def test_cached_timm_weights_need_no_network(offline: Path) -> None:
    import hashlib

    import timm
    from safetensors.torch import save_file

    from ncm_cli.solvers.device import own_random_numbers

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
        batch = encoder.batch([item])  # type: ignore[attr-defined]
        pooled = model.eval().forward_head(model.forward_features(batch), pre_logits=True)
        np.testing.assert_allclose(encoder.encode([item]), pooled.detach().numpy(), atol=1e-5)


def refusal(model: str, pretrained: str | None = None) -> str:
    """What is said of weights that can't be had: named, and without the words or colours of a library."""
    with pytest.raises(InputError, match=r"could not be fetched|can't be loaded|never loaded") as caught:
        load_encoder(EncoderRequest(model=model, pretrained=pretrained), device="cpu", reporter=SILENT)
    text = str(caught.value)
    for foreign in (
        "\x1b",
        "weights_only",
        "safe_globals",
        "your connection",
        "local cache",
        "set_verbosity",
    ):
        assert foreign not in text
    return text


@pytest.mark.parametrize(
    ("model", "pretrained", "option"),
    [
        ("ViT-B-32-quickgelu", None, "--pretrained openai"),
        ("timm:resnet18", "default", "--model timm:resnet18"),
        ("hf-hub:a/b", None, "--model hf-hub:a/b"),
    ],
)
def test_the_offline_switch_the_cache_and_the_next_step_are_named(
    offline: Path, monkeypatch: pytest.MonkeyPatch, model: str, pretrained: str | None, option: str
) -> None:
    from huggingface_hub import constants

    assert f"where: {option}; cache folder {offline}" in refusal(model, pretrained)
    assert "can't be reached" in refusal(model, pretrained)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    text = refusal(model, pretrained)
    assert f"where: {option}; cache folder {offline}" in text
    assert "HF_HUB_OFFLINE" in text and "unset it once" in text and "--pretrained FILE" in text


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(errno.EROFS, "Read-only file system: '/c'"),
            r"cache can't be written: read-only file system",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied: '/c'"),
            r"cache can't be written: permission denied",
        ),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory: '/c'"),
            r"cache can't be written: no such file or directory",
        ),
        (ValueError("please upgrade"), r"can't be reached \(ValueError\)"),
    ],
)
def test_a_cache_that_cannot_be_written_is_named(
    offline: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr("ncm_cli.images.weights.hub_file", fail)
    text = refusal("ViT-B-32-quickgelu")
    assert re.search(said, text) and str(offline) in text
    assert "upgrade" not in text and "'/c'" not in text
    assert ("HF_HOME=FOLDER" in text) is isinstance(error, OSError)


@pytest.mark.parametrize("model", ["timm:resnet18", pytest.param("ViT-B-32", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("module", r"an object of torch\.nn\.modules\.linear\.Linear"),
        ("numpy", r"numpy\.\S+"),
        ("list", "a list, not named tensors|no named tensors"),
    ],
)
def test_a_pt_that_is_not_plain_tensors_says_what_it_holds(
    tmp_path: Path, model: str, name: str, held: str
) -> None:
    import torch

    things = {"module": torch.nn.Linear(2, 2), "numpy": {"a": np.zeros(3)}, "list": [1, 2]}
    torch.save(things[name], tmp_path / "w.pt")
    text = refusal(model, str(tmp_path / "w.pt"))
    assert re.search(held, text) and f"where: {tmp_path / 'w.pt'}" in text
    if name == "list" and model.startswith("timm:"):
        assert "it holds a list, not named tensors" in text


def test_a_numpy_archive_is_told_in_words_of_ours(tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", a=np.zeros(3))
    assert "it is a NumPy archive" in refusal("timm:resnet18", str(tmp_path / "w.npz"))


def test_a_damaged_file_in_the_cache_is_not_called_missing(offline: Path) -> None:
    snapshot = offline / "models--timm--resnet18.a1_in1k" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (offline / "models--timm--resnet18.a1_in1k" / "refs").mkdir()
    (offline / "models--timm--resnet18.a1_in1k" / "refs" / "main").write_text("abc")
    (snapshot / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    text = refusal("timm:resnet18", "default")
    assert "can't be loaded into the model timm:resnet18" in text and str(snapshot) in text
