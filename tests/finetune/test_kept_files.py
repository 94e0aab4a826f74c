"""What ``ncm finetune`` finds in its places: damage, leftovers, and files that aren't its own."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ncm_cli.errors import InputError, UsageError
from ncm_cli.finetune import finetune as work
from ncm_cli.finetune.options import checkpoint_files
from ncm_cli.images.encoder import load_encoder
from ncm_cli.images.request import EncoderRequest
from ncm_cli.images.weights import tuned_facts, write_tuned
from ncm_cli.main import run
from ncm_cli.progress import SILENT
from ncm_cli.store.files import write_result
from ncm_cli.store.outputs import check_outputs
from ncm_cli.store.probe import TUNED
from tests.world import Heard

from .test_finetune import options_of

KEY = {"options": {"seed": 0}}


def unfinished(file: Path, key: dict[str, Any] = KEY) -> bytes:
    state = io.BytesIO()
    torch.save({"key": key, "history": [], "network": {"w": torch.arange(6.0)}}, state)
    data = work._head(state.getvalue(), key) + state.getvalue()
    file.write_bytes(data)
    return data


def test_every_flipped_bit_of_an_unfinished_run_is_told(tmp_path: Path) -> None:
    """Without a digest 13 of 60 flips gave other weights and exit 0."""
    file, asked = tmp_path / ".x.partial", SimpleNamespace(fresh=False)
    data = unfinished(file)
    assert work._unfinished(file, KEY, asked)["network"]["w"].tolist() == [0, 1, 2, 3, 4, 5]  # type: ignore[arg-type,index]
    rng, end = np.random.default_rng(0), data.index(b"\n")
    counted = [at for at in range(len(data)) if not end - 64 <= at < end]  # but the digest of the key
    for at in [*rng.choice(counted, 300, replace=False), *range(end - 64)]:
        bad = bytearray(data)
        bad[at] ^= 1 << int(rng.integers(8))
        file.write_bytes(bad)
        with pytest.raises(InputError, match="can't be read") as refused:
            work._unfinished(file, KEY, asked)  # type: ignore[arg-type]
        assert "--fresh starts over" in str(refused.value)
        assert work._unfinished(file, KEY, SimpleNamespace(fresh=True)) is None  # type: ignore[arg-type]
    for cut in rng.integers(len(data), size=20):
        file.write_bytes(data[:cut])
        with pytest.raises(InputError, match="can't be read"):
            work._unfinished(file, KEY, asked)  # type: ignore[arg-type]


def test_what_a_finished_run_left_goes_and_anothers_stays(tmp_path: Path) -> None:
    """Killed before it removed the file, a run was up to date for ever, with thrice its size beside it."""
    output = tmp_path / "run.safetensors"
    file = work.unfinished_file(output)
    for key, stays in ((KEY, False), ({"options": {"seed": 1}}, True)):
        unfinished(file, key)
        work._remove_unfinished(output, KEY)
        assert file.exists() is stays
    file.write_bytes(b"")
    work._remove_unfinished(output, KEY)
    assert file.exists()


@pytest.mark.slow
def test_the_same_command_removes_what_was_left(data: Path, tmp_path: Path) -> None:
    given = options_of(data, tmp_path / "run.safetensors", epochs=1)
    body, file = work.finetune(given), work.unfinished_file(given.output)
    unfinished(file, body["key"])
    assert work.finetune(given)["written"] is False
    unfinished(file, KEY)
    assert work.finetune(given, reporter=(heard := Heard()))["written"] is False
    assert "was left by a run with other settings" in heard.notes[-1]
    file.unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        path.name for path in checkpoint_files(given.output)
    )
    result = checkpoint_files(given.output)[2]
    result.write_text(result.read_text().replace('"epoch": 1', '"epoch": 2'))
    with pytest.raises(InputError, match="--fresh makes it again"):
        work.finetune(given)


@pytest.mark.parametrize("at", range(3))
def test_files_of_others_are_never_replaced(data: Path, tmp_path: Path, at: int) -> None:
    given = options_of(data, tmp_path / "run.safetensors", fresh=True)
    place = checkpoint_files(given.output)[at]
    save_file({"w": torch.zeros(3)}, tmp_path / "other")
    write_result(tmp_path / "eval", "eval", {"n": 1})
    others = [(tmp_path / name).read_bytes() for name in ("other", "eval")]
    header = b'{"__metadata__":{"ncm_format":"ncm-probe","meta":"{\\"command\\": \\"fit\\"}"}}'
    others.append(len(header).to_bytes(8, "little") + header)
    for content in (b'{"mine": 1}', b"[]", b"notes", *others):
        place.write_bytes(content)
        with pytest.raises(UsageError, match="would replace a file that isn't") as refused:
            check_outputs(given)
        assert str(place) in str(refused.value)


@pytest.mark.parametrize("beside", [False, True])
def test_a_checkpoint_is_verified(tmp_path: Path, beside: bool, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, _, result = checkpoint_files(tmp_path / "run.safetensors")
    write_tuned(
        checkpoint, torch.nn.Linear(4, 3), {"model": "timm:x", "representation": 3, "image_size": None}
    )
    if beside:
        write_result(result, "finetune", {"checkpoint": work.sha256_file(checkpoint)})
    assert run(["info", str(checkpoint), "--verify"]) == 0
    assert "verified: all contents" in capsys.readouterr().err
    whole, rng = checkpoint.read_bytes(), np.random.default_rng(0)
    for at in range(0, len(whole), 17):
        bad = bytearray(whole)
        bad[at] ^= 1 << int(rng.integers(8))
        checkpoint.write_bytes(bad)
        assert run(["info", str(checkpoint), "--verify"]) == 3


def test_a_damaged_checkpoint_is_no_network(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    file, network = tmp_path / "x.safetensors", timm.create_model("test_vit", num_classes=3)
    write_tuned(file, network, {"model": "timm:test_vit", "representation": 3, "image_size": None})
    request = EncoderRequest(model="timm:test_vit", pretrained=str(file))
    load_encoder(request, device="cpu", reporter=SILENT)
    whole, rng = file.read_bytes(), np.random.default_rng(0)
    first = 8 + int.from_bytes(whole[:8], "little")
    for at in rng.integers(first, len(whole), 10):
        bad = bytearray(whole)
        bad[at] ^= 1 << int(rng.integers(8))
        file.write_bytes(bad)
        with pytest.raises(InputError, match="a damaged file"):
            load_encoder(request, device="cpu", reporter=SILENT)


@pytest.mark.parametrize(
    "facts",
    [
        '{"ncm_format_version": 1}',
        "[]",
        "3",
        "[" * 30_000,
        '{"ncm_format_version": 1, "representation": 1000000000, "image_size": null}',
        '{"ncm_format_version": 1, "representation": "64", "image_size": null}',
        '{"ncm_format_version": 1, "representation": 3, "image_size": "large"}',
        '{"ncm_format_version": [], "representation": 3, "image_size": 8}',
    ],
)
def test_facts_that_can_not_be_are_refused(tmp_path: Path, facts: str) -> None:
    save_file({"w": torch.zeros(3)}, tmp_path / "x.safetensors", {TUNED: facts})
    with pytest.raises(InputError, match=r"a damaged file|a format version"):
        tuned_facts(tmp_path / "x.safetensors")
