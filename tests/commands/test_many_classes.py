"""With many classes every command lists some of them and counts the others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ncm_cli.main import run

CLASSES = 60


def ncm(line: str) -> int:
    return run(line.split())


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``f.h5`` with ten rows of each class, the first classes the most frequent among its test rows."""
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(CLASSES), 10)
    np.save(tmp_path / "X.npy", (8 * np.eye(CLASSES)[y] + rng.normal(size=(len(y), CLASSES))).astype("f4"))
    split = ["test" if i % 10 < (4 if label < 3 else 1) else "train" for i, label in enumerate(y)]
    rows = [f"r{i},class {label:02},{split[i]}" for i, label in enumerate(y)]
    (tmp_path / "m.csv").write_text("\n".join(["id,label,split", *rows]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    assert ncm("embed m.csv --from-array X.npy --encoder-name x -o f.h5 -q") == 0
    for name, decay in (("p", "0.01"), ("other", "1")):
        assert ncm(f"fit -f f.h5 -o {name}.safetensors --weight-decay {decay} -q") == 0
    return tmp_path


def test_predict_shows_the_most_frequent_classes(many: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert ncm("predict p.safetensors f.h5 --where split=test -o p.csv") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[2:5]] == [["class", f"0{i}", "4"] for i in range(3)]
    assert len(lines) < 30
    assert "and 40 rows of the 40 other classes" in lines


def test_eval_shows_the_worst_groups_and_of_a_comparison_some(
    many: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert ncm("eval p.safetensors -f f.h5 --where split=test --compare other.safetensors") == 0
    out = capsys.readouterr().out
    assert "The 40 worst of 60 groups; --json has all." in out
    assert "and 20 more: --json has all" in out


@pytest.mark.parametrize("name", ["f.h5", "p.safetensors"])
def test_info_counts_the_classes_it_leaves_out(
    name: str, many: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert ncm(f"info {name}") == 0
    out = capsys.readouterr().out
    assert "and 52 more" in out
    assert max(map(len, out.splitlines())) < 250
