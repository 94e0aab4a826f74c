"""What a file of a stranger's may do where it is loaded: nothing but say numbers, or be refused."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import sys
import time
import types
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ncm_cli.errors import InputError, NcmError
from ncm_cli.images.clip_model import find_clip
from ncm_cli.images.encoder import load_encoder, request_key, start_loading
from ncm_cli.images.request import EncoderRequest
from ncm_cli.images.torchscript import torchscript_tensors
from ncm_cli.progress import SILENT

from .conftest import TINY


@pytest.fixture(autouse=True)
def no_code_and_no_network(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test in which torch's reader of TorchScript is called or a connection is tried."""
    import torch

    tried: list[object] = []

    def refuse(*args: object, **_: object) -> None:
        tried.append(args)
        raise OSError("tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    if "code" not in request.fixturenames:
        monkeypatch.setattr(torch.jit, "load", refuse)
    yield
    assert tried == []


def load(model: object, pretrained: object = None) -> Any:
    request = EncoderRequest(model=str(model), pretrained=None if pretrained is None else str(pretrained))
    return load_encoder(request, device="cpu", reporter=SILENT)


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A TorchScript archive whose ``__setstate__`` writes the file ``ran`` here."""
    import torch

    class Trap(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.visual = torch.nn.Linear(2, 2)

        @torch.jit.export
        def __getstate__(self) -> tuple[torch.Tensor, bool]:
            return self.visual.weight, self.training

        @torch.jit.export
        def __setstate__(self, state: tuple[torch.Tensor, bool]) -> None:
            torch.save(state[0], "ran")
            self.training = state[1]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.visual(x)

    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates TorchScript
        torch.jit.save(torch.jit.script(Trap()), "trap.pt")
    return tmp_path / "trap.pt"


@pytest.mark.parametrize("model", ["open_clip", "timm:test_resnet"])
def test_the_code_of_an_archive_is_never_run(code: Path, tiny_clip, model: str) -> None:
    import torch

    with pytest.raises(InputError, match="Python objects beyond tensors, which are never loaded") as refused:
        load(tiny_clip.config if model == "open_clip" else model, code)
    assert "a line that converts it, if you trust it" in str(refused.value)
    assert not Path("ran").exists()
    with warnings.catch_warnings(), contextlib.suppress(RuntimeError):
        warnings.simplefilter("ignore")
        torch.jit.load(str(code))  # the positive control
    assert Path("ran").exists()


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A TorchScript archive with values of every plain kind."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.same = torch.nn.Linear(3, 4), torch.nn.Sequential(torch.nn.Linear(1, 1))
            self.register_buffer("turned", torch.arange(6).reshape(2, 3).t().half())
            self.register_buffer("none", torch.zeros(0, 3))
            self.numbers, self.one, self.name = [1, 2], 3.5, "x"
            self.twin = self.layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    path = tmp_path_factory.mktemp("script") / "model.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(Model()), str(path))
    return path


def test_the_tensors_of_an_archive_are_those_of_torchs_own_reader(archive: Path, code: Path) -> None:
    import torch

    ours = torchscript_tensors(archive)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = torch.jit.load(str(archive)).state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype and torch.equal(ours[name], value)


def repacked(source: Path, target: Path, change: Any, compression: int = zipfile.ZIP_STORED) -> Path:
    """An archive with other bytes for ``data.pkl``."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for member in old.infolist():
            data = old.read(member)
            new.writestr(
                member.filename, change(data) if member.filename.endswith("data.pkl") else data, compression
            )
    return target


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torchscript", "torch"])
def test_changed_archives_are_refused_or_give_tensors(
    archive: Path, tiny_clip, tmp_path: Path, kind: str
) -> None:
    rng, refused = np.random.default_rng(0), 0

    def mutated(data: bytes) -> bytes:
        made = bytearray(data)
        for at in rng.integers(len(made), size=int(rng.integers(1, 6))):
            made[at] = int(rng.integers(256))
        return bytes(made)

    source = archive if kind == "torchscript" else tiny_clip.checkpoint
    for _ in range(150):
        path = repacked(source, tmp_path / "x.pt", mutated)
        try:
            load(tiny_clip.config, path)
        except InputError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    "program",
    [
        b"cos\nsystem\n(X\x04\0\0\0ls .tR.",
        b"cbuiltins\neval\n(X\x04\0\0\0__imtR.",
        b"c__torch__\nM\n)\x81}(X\x01\0\0\0wcposix\nsystem\nsb.",
        b"c__torch__\nM\n)\x81c__torch__\nN\nb.",  # a state that is no dictionary
        b"ctorch\nFloatStorage\n}b.",
        b"\x80\x04\x96\xff\xff\xff\xff\xff\xff\xff\x0f.",  # an array of as many bytes
        b"c__torch__\nM\n)\x81q\0}X\x01\0\0\0ah\0sb.",  # a module in itself
        b"(" * 100_000 + b"t" * 99_999 + b".",
        b"ctorch.jit._pickle\nbuild_tensorlist\n(lR.",
        b"ctorch._utils\n_rebuild_parameter\n.",
        b"",
        b".",
    ],
)
def test_programs_in_an_archive_are_refused(archive: Path, tmp_path: Path, tiny_clip, program: bytes) -> None:
    path = repacked(archive, tmp_path / "x.pt", lambda _: program)
    began = time.monotonic()
    with pytest.raises(InputError):
        load(tiny_clip.config, path)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("kind", ["torchscript", "torch"])
def test_archives_that_another_program_packed_are_refused(
    archive: Path, tiny_clip, tmp_path: Path, kind: str
) -> None:
    source = archive if kind == "torchscript" else tiny_clip.checkpoint
    path = repacked(source, tmp_path / "x.pt", bytes, zipfile.ZIP_DEFLATED)
    with pytest.raises(InputError, match="packed by another program"):
        load(tiny_clip.config, path)


@pytest.mark.parametrize("model", ["open_clip", "timm:test_vit"])
@pytest.mark.parametrize("old", [False, True])
def test_a_tensor_larger_than_its_numbers_is_refused(
    tiny_clip, tmp_path: Path, model: str, old: bool
) -> None:
    import torch

    state = torch.load(tiny_clip.checkpoint, weights_only=True)
    for name in ("visual.positional_embedding", "pos_embed"):
        state[name] = torch.zeros(1, 1).expand(10**8, 32)
    path = tmp_path / "x.pt"
    torch.save({"state_dict": state}, path, _use_new_zipfile_serialization=not old)
    before = peak()
    with pytest.raises(InputError, match="larger than the numbers that it holds"):
        load(tiny_clip.config if model == "open_clip" else model, path)
    assert peak() - before < 500 << 20


def test_empty_and_odd_files_in_a_models_folder_do_no_harm(tiny_clip, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, tiny_clip, {})
    (folder / "empty.txt").write_bytes(b"")
    (folder / "kernel").symlink_to("/proc/kmsg")
    os.mkfifo(folder / "pipe")
    assert request_key(EncoderRequest(model=f"local-dir:{folder}"))["files"].keys() >= {"empty.txt"}
    load(f"local-dir:{folder}")


def folder_of(tmp_path: Path, tiny_clip, changes: dict[str, Any], preprocess: Any = None) -> Path:
    """A model folder whose configuration has other entries, by dotted names."""
    folder = tmp_path / "own"
    folder.mkdir(exist_ok=True)
    config = json.loads(json.dumps(TINY))
    for name, value in changes.items():
        *parents, last = name.split(".")
        place = config
        for parent in parents:
            place = place[parent]
        place[last] = value
    whole = {"model_cfg": config} | ({} if preprocess is None else {"preprocess_cfg": preprocess})
    (folder / "open_clip_config.json").write_text(json.dumps(whole))
    weights = folder / "open_clip_model.safetensors"
    if not weights.exists():
        weights.hardlink_to(tiny_clip.folder / "open_clip_model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_cfg.timm_model_name": "hf-hub:evil/model"}, "names a model to fetch"),
        ({"vision_cfg.timm_model_name": "hf_hub:evil/model"}, "names a model to fetch"),
        ({"vision_cfg.timm_model_name": "local-dir:/tmp"}, "names a model to fetch"),
        ({"vision_cfg.timm_model_name": "https://evil/model"}, "names a model to fetch"),
        ({"vision_cfg.timm_model_name": ["resnet18"]}, "names a model to fetch"),
        ({"text_cfg.hf_model_name": "evil/model"}, "names a text model to fetch"),
        ({"text_cfg.tokenizer_kwargs": {"trust_remote_code": True}}, "options that a tokenizer may not have"),
        ({"text_cfg.tokenizer_kwargs": {"bpe_path": "/etc/passwd"}}, "options that a tokenizer may not have"),
        ({"text_cfg.tokenizer_kwargs": {"cache_dir": "/tmp/x"}}, "options that a tokenizer may not have"),
        ({"text_cfg.tokenizer_kwargs": 3}, "options that a tokenizer may not have"),
    ],
)
def test_a_configuration_names_nothing_to_fetch(
    tiny_clip, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = folder_of(tmp_path, tiny_clip, changes)
    with pytest.raises(InputError, match=message) as refused:
        load(f"local-dir:{folder}")
    assert "open_clip_config.json" in str(refused.value)
    with pytest.raises(InputError, match=message):
        load(folder / "open_clip_config.json", tiny_clip.checkpoint)


def test_a_tokenizer_is_the_folders_own_and_brings_no_code(
    tiny_clip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, dict[str, Any]]] = []

    class AutoTokenizer:
        @staticmethod
        def from_pretrained(name: object, **options: Any) -> None:
            asked.append((name, options))

    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(AutoTokenizer=AutoTokenizer))
    folder = folder_of(tmp_path, tiny_clip, {"text_cfg.hf_tokenizer_name": "evil/tokenizer"})
    load(f"local-dir:{folder}").model.tokenizer()
    assert asked == [(folder, {"cache_dir": None, "trust_remote_code": False})]
    encoder = load(folder / "open_clip_config.json", tiny_clip.checkpoint)
    with pytest.raises(InputError, match="names a tokenizer to fetch"):
        encoder.model.tokenizer()


def peak() -> int:
    """Most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize(
    "changes",
    [
        {"vision_cfg.layers": 10**8},
        {"text_cfg.layers": 10**8},
        {"vision_cfg.layers": [10**8, 1, 1, 1]},
        {"vision_cfg.width": 10**6, "text_cfg.width": 10**6},
        {"vision_cfg.image_size": 10**6},
        {"text_cfg.vocab_size": 10**9},
        {"text_cfg.context_length": 10**6},
        {"embed_dim": 10**9},
        {"vision_cfg.mlp_ratio": 1e9},
        {"vision_cfg.timm_model_name": "vit_giant_patch14_clip_224"},
    ],
)
def test_a_configuration_asks_for_no_more_than_its_weights_hold(
    tiny_clip, tmp_path: Path, changes: dict[str, Any]
) -> None:
    load(f"local-dir:{tiny_clip.folder}")  # whatever is imported isn't measured
    folder = folder_of(tmp_path, tiny_clip, changes)
    began, before = time.monotonic(), peak()
    with pytest.raises(InputError, match=r"network is too large|can't build"):
        load(f"local-dir:{folder}")
    assert time.monotonic() - began < 10  # 2 s on a machine of its own
    assert peak() - before < 500 << 20


def test_a_configuration_of_too_many_layers_is_refused_before_any_library(tiny_clip, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, tiny_clip, {"vision_cfg.layers": 10**8})
    request = EncoderRequest(model=f"local-dir:{folder}")
    with pytest.raises(InputError, match="vision_cfg with 100000000 layers"):
        start_loading(request, SILENT)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["model", "preprocess"])
def test_entries_of_any_kind_are_refused_or_work(tiny_clip, tmp_path: Path, where: str) -> None:
    """Every entry of a configuration with values of other kinds: nothing but errors of ours."""
    values: list[Any] = [None, True, -1, 0, 3, 1e8, 10**30, "x", "", [], [1, 2], {}, {"a": 1}, [[[[1]]]]]
    vision, text = ("layers", "width", "patch_size", "image_size", "head_width"), ("layers", "width", "heads")
    names = [
        "embed_dim",
        "vision_cfg",
        "text_cfg",
        "quick_gelu",
        "custom_text",
        "multimodal_cfg",
        "init_logit_bias",
    ]
    names += [
        f"vision_cfg.{name}" for name in (*vision, "mlp_ratio", "pool_type", "act_kwargs", "norm_kwargs")
    ]
    names += [f"text_cfg.{name}" for name in (*text, "context_length", "vocab_size", "pool_type")]
    settings = ["size", "mode", "mean", "std", "interpolation", "resize_mode", "fill_color"]
    refused = 0
    for name in names if where == "model" else settings:
        for value in values:
            changes = {name: value} if where == "model" else {}
            folder = folder_of(tmp_path, tiny_clip, changes, None if where == "model" else {name: value})
            try:
                encoder = load(f"local-dir:{folder}")
                encoder.encode([encoder.preprocess(Image.new("RGB", (40, 40)), "")])
            except NcmError:
                refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    "content", ["[" * 30_000, '{"a":' * 30_000, "[" * 500 + "]" * 500, "{", "\xff", "NaN"]
)
def test_a_configuration_that_is_no_json_is_refused(tiny_clip, tmp_path: Path, content: str) -> None:
    folder = folder_of(tmp_path, tiny_clip, {})
    (folder / "open_clip_config.json").write_text(content, encoding="latin-1")
    with pytest.raises(InputError, match=r"not a JSON file|not an open_clip model config"):
        find_clip(EncoderRequest(model=f"local-dir:{folder}"))
