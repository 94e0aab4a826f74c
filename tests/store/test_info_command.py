"""``ncm info``: every file of ours is described, checked and, if it is a probe, exported."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from ncm_cli import Result, load
from ncm_cli.errors import InputError
from ncm_cli.main import run
from ncm_cli.probes.evaluate import logits
from ncm_cli.results.lines import read_sources
from ncm_cli.store.columns import ImageFile
from ncm_cli.store.files import write_result
from ncm_cli.store.journal import Journal, journal_folder
from ncm_cli.store.probe import TUNED, write_probe
from tests.world import HEAVY, run_light

from .conftest import make_probe

COMMON = ("format", "rows", "dim", "columns", "encoder", "fingerprint", "failed")


@pytest.fixture
def describe(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run ``ncm info ... --json``; returns what it printed."""

    def call(*arguments: object) -> Any:
        code = run(["info", *map(str, arguments), "--json"])
        printed = capsys.readouterr()
        assert code == 0, printed.err
        return json.loads(printed.out)

    return call


def test_a_feature_store(write_store: Callable[..., Path], describe: Callable[..., Any]) -> None:
    path = write_store()
    found = describe(path, "--verify")
    assert set(COMMON) < set(found)
    assert (found["format"], found["rows"], found["dim"], found["verified"]) == ("ncm-features", 40, 8, True)
    label = found["columns"]["label"]
    assert sum(label["counts"].values()) == 40
    assert list(label["counts"]) == ["cat", "dog", "fox"]
    place = found["columns"]["place"]
    assert sum(place["counts"].values()) + place["missing"] == 40
    assert found["columns"]["age/years"]["kind"] == "numeric"
    assert found["encoder"]["model"] == "pixels:8"
    assert found["failed"] == [{"id": "bad", "path": "/pictures/bad.png", "reason": "cut short"}]
    assert found["bytes"] == path.stat().st_size


def test_other_files(
    pairs_path: Path, probe_path: Path, tmp_path: Path, describe: Callable[..., Any]
) -> None:
    pairs, probe = describe(pairs_path, "--verify"), describe(probe_path, "--verify")
    assert (pairs["format"], pairs["rows"], pairs["held_out"], pairs["rank"]) == ("ncm-pairs", 12, 3, 6)
    assert (probe["format"], probe["classes"], probe["rank"]) == ("ncm-probe", ["cat", "dog"], 2)
    assert pairs["fingerprint"] == probe["fingerprint"]
    assert probe["content_sha256"] == make_probe().sha256
    write_result(tmp_path / "r.json", "eval", {"n": 5, "accuracy": 0.5})
    result = describe(tmp_path / "r.json")
    assert (result["format"], result["kind"], result["rows"]) == ("ncm-result", "eval", 5)
    with Journal.open(tmp_path / "f.h5", {"model": "pixels:8"}) as journal:
        journal.append([ImageFile("a", "/a.png", 1, 2, "")], np.ones((1, 4)))
    unfinished = describe(journal_folder(tmp_path / "f.h5"))
    assert (unfinished["format"], unfinished["rows"], unfinished["dim"]) == ("ncm-journal", 1, 4)
    for found in (pairs, probe, result, unfinished):
        assert set(COMMON) < set(found)


def test_tables(
    write_store: Callable[..., Path], pairs_path: Path, probe_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, shown in ((write_store(), "label"), (pairs_path, "held_out"), (probe_path, "cat, dog")):
        assert run(["info", str(path)]) == 0
        printed = capsys.readouterr()
        assert shown in printed.out
        assert printed.err == ""


def test_verify_finds_what_a_look_does_not(
    write_store: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_store()
    with h5py.File(path, "r+") as file:
        file["features"][20, 3] += 1
    assert run(["info", str(path)]) == 0
    assert run(["info", str(path), "--verify"]) == 3
    printed = capsys.readouterr()
    assert "damaged file" in printed.err
    assert "rows 0 to 39" in printed.err


def test_verify_says_what_it_can_not_tell(
    write_store: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sealed = tmp_path / "new.json"
    write_result(sealed, "eval", {"n": 5})
    store = write_store()
    with h5py.File(store, "r+") as file:
        del file.attrs["header_sha256"]
    with Journal.open(tmp_path / "f.h5", {"model": "pixels:8"}) as journal:
        journal.append([ImageFile(id, "/a.png", 1, 2, "") for id in "ab"], np.ones((2, 4)))
    unfinished = journal_folder(tmp_path / "f.h5")
    log = unfinished / "rows.log"
    log.write_bytes(log.read_bytes()[:-1] + b"x")
    for path, said in (
        (sealed, ""),
        (
            store,
            "no digests, so changes can't be detected (make it again, with --fresh where the command has it)",
        ),
        (unfinished, "1 rows are damaged and will be made again"),
    ):
        assert run(["info", str(path), "--verify", "--json"]) == 0
        printed = capsys.readouterr()
        assert json.loads(printed.out)["verified"] is (said == "")
        assert said in printed.err


def test_errors(tmp_path: Path, pairs_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.csv").write_text("id,label\n")
    for arguments, code, message in (
        ([str(tmp_path / "x.csv")], 3, "not a file of ncm"),
        ([str(tmp_path / "nobody")], 3, "no such file"),
        ([str(tmp_path)], 3, "a folder without a journal"),
        (["--verify"], 2, "nothing to describe"),
        ([str(pairs_path), "--export", "npz"], 2, "go together"),
        ([str(pairs_path), "--export", "pickle", "-o", "x"], 2, "doesn't take 'pickle'"),
        ([str(pairs_path), "--export", "npz", "-o", str(tmp_path / "o")], 3, "needs a probe"),
    ):
        assert run(["info", *arguments]) == code
        assert message in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_system(describe: Callable[..., Any]) -> None:
    found = describe("--system")
    assert {"ncm", "python", "torch", "open_clip_torch", "timm"} <= set(found["versions"])
    assert found["devices"][0].startswith("cpu: ")
    assert found["devices"][1].startswith("cuda")


def test_describing_a_file_imports_nothing_heavy(write_store: Callable[..., Path], probe_path: Path) -> None:
    program = (
        "import sys\nfrom ncm_cli.main import run\n"
        "assert all(run(['info', path, '--verify']) == 0 for path in sys.argv[1:])\n"
    )
    run_light(program, write_store(), probe_path, heavy=HEAVY | {"scipy"})


def test_a_row_of_zeros_has_its_scores_in_onnx(tmp_path: Path) -> None:
    """Scaling by the norm divides by none."""
    pytest.importorskip("onnx")
    from onnx.reference import ReferenceEvaluator

    probe, path, output = make_probe(("a", "b", "c")), tmp_path / "p", tmp_path / "p.onnx"
    write_probe(path, probe)
    assert run(["info", str(path), "-q", "--export", "onnx", "-o", str(output)]) == 0
    X = np.zeros((2, 6), np.float32)
    scores = ReferenceEvaluator(str(output)).run(None, {"features": X})[0]
    np.testing.assert_allclose(scores, logits(probe, X), rtol=1e-4, atol=1e-5)


def test_export_to_onnx_without_onnx(
    probe_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert run(["info", str(probe_path), "--export", "onnx", "-o", str(tmp_path / "x.onnx")]) == 3
    assert "ncm-cli[onnx]" in capsys.readouterr().err
    assert not (tmp_path / "x.onnx").exists()


def _checkpoint(path: Path) -> Path:
    from safetensors.numpy import save_file

    facts = {"ncm_format": TUNED, "ncm_format_version": 1, "model": "timm:x"}
    facts |= {"representation": 2, "image_size": None}
    save_file({"fc.weight": np.zeros((2, 2), np.float32)}, path, {TUNED: json.dumps(facts)})
    return path


def test_checkpoints_are_opened_and_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = _checkpoint(tmp_path / "net"), tmp_path / "out.npz"
    found = load(path)
    assert isinstance(found, Result)
    assert (found.kind, found["model"]) == ("checkpoint", "timm:x")
    assert "timm:x" in found._repr_html_()
    assert run(["info", str(path)]) == 0
    for form in ("npz", "sklearn", "onnx"):
        assert run(["info", str(path), "--export", form, "-o", str(out)]) == 3
    said = capsys.readouterr().err
    assert "--export needs a probe" in said
    assert "wrote" not in said
    assert not out.exists()
    with pytest.raises(InputError, match="ncm report doesn't read"):
        read_sources([path])


def test_the_marker_of_a_data_set_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [word for name in ("rows", "val-rows", "test-rows", "pairs") for word in (f"--{name}", "9")]
    assert run(["data", "synthetic", "-o", str(tmp_path / "d"), *small, "-q"]) == 0
    assert run(["info", str(tmp_path / "d/dataset.json")]) == 0
    assert "synthetic" in capsys.readouterr().out
    found = load(tmp_path / "d/dataset.json")
    assert isinstance(found, Result)
    assert (found.kind, found["builder"]) == ("data", "synthetic")
    assert "synthetic" in found._repr_html_()
    sources = read_sources([tmp_path / "d"])
    assert {path.name for path, _ in sources.pairs} == {"clean.h5", "noisy-0.1.h5", "oracle.h5"}
    assert [path.name for path in sources.features] == ["features.h5"]
