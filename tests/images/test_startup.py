"""What a short run waits for: libraries, weights that are loaded over, digests that are known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ncm_cli.errors import InputError
from ncm_cli.images import weights
from ncm_cli.images.encoder import load_encoder, start_loading
from ncm_cli.images.request import EncoderRequest
from ncm_cli.progress import SILENT


def test_a_large_files_digest_is_remembered_while_nothing_of_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "MIN_REMEMBERED_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hashed: list[Path] = []
    real = weights.sha256_file
    monkeypatch.setattr(weights, "sha256_file", lambda path: hashed.append(path) or real(path))

    def in_a_new_process(path: Path) -> str:
        weights._sha256.cache_clear()
        return str(weights.digest(path)["sha256"])

    file, kept = tmp_path / "w.bin", tmp_path / "cache" / "ncm" / "digests.json"
    file.write_bytes(b"one")
    first = in_a_new_process(file)
    assert in_a_new_process(file) == first
    assert hashed == [file]
    # Another content of the same size and, set back, the same time: the time of the change tells.
    times = file.stat()
    file.write_bytes(b"two")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    second = in_a_new_process(file)
    assert second != first
    assert in_a_new_process(file) == second
    assert len(hashed) == 2
    entry = json.loads(kept.read_text())[str(file)]
    for bad in ("{", "[]", "[[[", json.dumps({str(file): 3}), json.dumps({str(file): [*entry[:-1], "x"]})):
        kept.write_text(bad)
        assert in_a_new_process(file) == second
    assert len(hashed) == 7
    kept.unlink()
    kept.parent.rmdir()
    kept.parent.write_text("no folder")
    assert in_a_new_process(file) == second


def test_parameters_that_are_loaded_over_are_not_drawn_and_all_else_is() -> None:
    import torch

    from ncm_cli.solvers.device import no_random_numbers, own_random_numbers

    with own_random_numbers(0), no_random_numbers():
        layer = torch.nn.Linear(300, 300)
        for draw in ("normal_", "uniform_", "kaiming_uniform_", "xavier_uniform_"):
            getattr(torch.nn.init, draw)(layer.weight)
        drawn = torch.rand(3), torch.empty(3).normal_(), torch.nn.init.uniform_(torch.empty(3))
    with own_random_numbers(0):
        # As if nothing had been drawn before.
        expected = torch.rand(3), torch.empty(3).normal_(), torch.nn.init.uniform_(torch.empty(3))
    assert all(map(torch.equal, drawn, expected))


@pytest.mark.parametrize("kind", ["open_clip", "timm"])
def test_no_parameter_stays_undrawn(kind: str, tiny_clip, tmp_path: Path) -> None:
    import timm
    import torch

    path, name = tiny_clip.checkpoint, str(tiny_clip.config)
    if kind == "timm":
        path, name = tmp_path / "w.pt", "timm:vit_tiny_patch16_224"
        torch.save(timm.create_model("vit_tiny_patch16_224", num_classes=0).state_dict(), path)
    encoder = load_encoder(EncoderRequest(model=name, pretrained=str(path)), device="cpu", reporter=SILENT)
    loaded = encoder.model.module.state_dict()  # type: ignore[attr-defined]
    state = torch.load(path, weights_only=True)
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[key], value) for key, value in state.items())


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, ["loading ViT-B-32-quickgelu with openai"]),
        ({"model": "timm:resnet18", "pretrained": "a file"}, ["loading timm:resnet18 with plain.pt"]),
        ({"model": "ViT-B-32", "random_init": True}, ["loading ViT-B-32 with random weights"]),
        ({"model": "local-dir:/x/y"}, ["loading local-dir:/x/y"]),
        ({"model": "pixels:8"}, []),
    ],
)
def test_what_is_loaded_is_said_first(asked: dict[str, Any], said: list[str], heard, tiny_clip) -> None:
    if "pretrained" in asked:
        asked = asked | {"pretrained": str(tiny_clip.checkpoint)}
    start_loading(EncoderRequest(**asked), heard)
    assert heard.notes == said


def test_a_file_that_is_not_there_is_known_before_any_library(heard, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such checkpoint file"):
        start_loading(EncoderRequest(pretrained=str(tmp_path / "w.pt")), heard)
    assert heard.notes == []


@pytest.mark.slow
def test_torchs_compiler_is_not_imported_and_works_when_asked_for() -> None:
    code = """
import gc, sys
from ncm_cli.images.network import import_library
import_library("open_clip")
assert gc.isenabled()
compiler = "torch._dynamo.convert_frame"
assert compiler not in sys.modules, "torchvision imports more than it did"
import torch, torchvision
boxes, picture = torch.tensor([[0, 0.0, 0, 4, 4]]), torch.rand(1, 1, 8, 8)
assert torchvision.ops.roi_align(picture, boxes, (2, 2)).shape == (1, 1, 2, 2)
asked = sys.modules["torchvision.ops.roi_align"].is_compile_supported("cpu")
assert compiler in sys.modules
import torch._dynamo.utils as real
assert real.counters is not None and asked == real.is_compile_supported("cpu")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
