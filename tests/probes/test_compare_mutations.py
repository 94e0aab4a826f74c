"""``eval --compare`` with files that were changed at random: read, or one clear line."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ncm_cli.main import run
from ncm_cli.store.probe import write_probe
from tests.world import make_probe, write_store

ODD: tuple[Any, ...] = (None, True, -1, 1e308, "", "x", "01" * 9, [], [None], {}, {"where": 3}, [[1, {}]])


def _flip(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def _insert(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + rng.choice([b"", b"\0", b" ", b"{", b"]", b"\xff", b"[" * 3000]) + data[at:]


def _swap(data: bytes, rng: random.Random) -> bytes:
    a, b = sorted(rng.sample(range(len(data)), 2))
    return data[:a] + data[b:] + data[a:b]


TITLES = ("bad input: ", "files that don't belong together: ")
BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (_flip, _cut, _insert, _swap)


def _unsealed(data: bytes, rng: random.Random) -> bytes:
    """A result of the version that had no digest, with something odd in the place of any value."""
    body = json.loads(data)
    del body["content_sha256"]
    body["ncm_format_version"] = 1
    places = [(body, name) for name in body]
    places += [(one, name) for one in body.values() if isinstance(one, dict) for name in one]
    holder, name = rng.choice(places)
    if rng.random() < 0.2:
        del holder[name]
    else:
        holder[name] = rng.choice(ODD)
    return json.dumps(body).encode()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path, Path]:
    """The command up to what it compares with, another probe, and that one's result."""
    folder = tmp_path_factory.mktemp("compare")
    rng = np.random.default_rng(0)
    write_store(folder / "f.h5", rng.normal(size=(20, 3)), {"label": rng.choice(["a", "b"], 20).tolist()})
    for name in ("p.safetensors", "q.safetensors"):
        write_probe(folder / name, make_probe(rng.normal(size=3), ("a", "b")))
    features = ["-f", str(folder / "f.h5")]
    assert run(["eval", str(folder / "q.safetensors"), *features, "-o", str(folder / "q.json")]) == 0
    command = ["eval", str(folder / "p.safetensors"), *features, "--compare"]
    return command, folder / "q.safetensors", folder / "q.json"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["probe", "result", "unsealed result"])
def test_changed_files_are_read_or_refused_in_one_line(
    kind: str, made: tuple[list[str], Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, probe, result = made
    rng, codes = random.Random(kind), []
    whole = (probe if kind == "probe" else result).read_bytes()
    changed = tmp_path / "changed"
    for trial in range(200):
        change = _unsealed if kind == "unsealed result" else rng.choice(BYTES)
        changed.write_bytes(change(whole, rng))
        codes.append(run([*command, str(changed)]))
        said = capsys.readouterr().err
        assert codes[-1] in (0, 3, 4), (trial, said)
        assert "Traceback" not in said
        titles = [line for line in said.splitlines() if line.startswith(TITLES)]
        assert len(titles) == bool(codes[-1]), said
    assert sum(map(bool, codes)) > 50, "most changes are refused"
    assert run([*command, str(result if "result" in kind else probe)]) == 0


def test_a_probe_whose_header_is_as_long_as_a_result_begins_is_a_probe(
    made: tuple[list[str], Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first bytes of a probe are the length of its header: of 0x7b20 they look like `` {``."""
    from ncm_cli.store.probe import read_probe

    command, path, _ = made
    probe = read_probe(path)
    length = 0
    for _ in range(2):
        meta = {**probe.meta, "note": "x" * (0x7B20 - length if length else 0)}
        write_probe(tmp_path / "long", dataclasses.replace(probe, meta=meta))
        length = int.from_bytes((tmp_path / "long").read_bytes()[:8], "little")
    assert length == 0x7B20
    assert run([*command, str(tmp_path / "long")]) == 0
    assert "Against long" in capsys.readouterr().out
