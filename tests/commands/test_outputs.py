"""No command writes over what it read, nor over what isn't its own kind of output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import ncm_cli
from ncm_cli.errors import UsageError
from ncm_cli.main import run
from ncm_cli.options import fields_of
from ncm_cli.registry import STEPS, options_of
from ncm_cli.store.outputs import KINDS, refuse_other

ROWS = [
    "--dim",
    "8",
    "--spurious",
    "2",
    "--rows",
    "60",
    "--val-rows",
    "60",
    "--test-rows",
    "60",
    "--pairs",
    "30",
]
STORE, PAIRS = ["-f", "data/features.h5"], ["-p", "data/noisy-0.1.h5"]

FILES = {
    "features": ["f.h5"],
    "pairs": ["p.h5"],
    "probe": ["probe.safetensors", "controls/erm.safetensors"],
    "eval": ["eval.json"],
    "bound": ["bound.json"],
    "sweep": ["s.h5"],
    "sweep-csv": ["s.csv"],
    "sweep-result": ["s.json"],
    "predictions": ["predictions.csv"],
    "tables": ["t.table", "t.markdown", "t.latex", "t.csv"],
    "page": ["page.html"],
    "export": ["x.npz", "x.sklearn"],
}
COMMANDS = {
    "f.h5": ["embed", "photos", "--model", "pixels:2", "--layout", "label"],
    "p.h5": ["pairs", "--match", "random", "--same", "label", "--across", "domain", *STORE],
    "probe.safetensors": ["fit", *STORE, *PAIRS, "--rank", "0,2", "--save-controls", "controls"],
    "eval.json": ["eval", "probe.safetensors", *STORE, "--where", "split=test"],
    "bound.json": [
        "bound",
        "probe.safetensors",
        *STORE,
        "--oracle-pairs",
        "data/oracle.h5",
        "--bootstrap",
        "0",
    ],
    "s.h5": ["sweep", *STORE, "--methods", "erm", "--trials", "1", "--seeds", "1", "--epochs", "1"],
    "predictions.csv": ["predict", "probe.safetensors", "data/features.h5"],
    **{
        f"t.{form}": ["report", "eval.json", "--format", form]
        for form in ("table", "markdown", "latex", "csv")
    },
    "x.npz": ["info", "probe.safetensors", "--export", "npz"],
    "x.sklearn": ["info", "probe.safetensors", "--export", "sklearn"],
}


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of every kind, each written twice by its command: the second time over the first."""
    folder = tmp_path_factory.mktemp("outputs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for i in range(4):
            path = folder / "photos" / "ab"[i % 2] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (2, 2), (60 * i, 0, 0)).save(path)
        for _ in range(2):
            assert run(["data", "synthetic", "-o", "data", *ROWS, "-q"]) == 0
            for output, words in COMMANDS.items():
                assert run([*words, "-o", output, "-q"]) == 0, output
            assert run(["report", "eval.json", "--html", "page.html", "-q"]) == 0
    return folder


@pytest.fixture
def inside(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("kind", FILES)
def test_each_kind_of_output_is_told_from_every_other(inside: Path, kind: str) -> None:
    for other, names in FILES.items():
        for name in names:
            if other == kind:
                refuse_other(name, kind)
            else:
                with pytest.raises(UsageError, match="isn't") as refused:
                    refuse_other(name, kind)
                assert refused.value.found == KINDS[other][0]


@pytest.mark.slow
def test_a_command_replaces_nothing_but_its_own_kind_of_output(inside: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes.md"
    notes.write_text("# my notes\n")
    picture = inside / "photos/a/0.png"
    kinds = {name: kind for kind, names in FILES.items() for name in names}
    foreign = [*(inside / names[0] for names in FILES.values()), notes, picture]
    before = _contents(inside)
    commands = [([*words, "-o"], kinds[output]) for output, words in COMMANDS.items()]
    commands.append((["report", "eval.json", "--html"], "page"))
    for words, kind in commands:
        for file in foreign:
            if (own := kinds.get(file.name, "")) != kind and not (words[0] == "sweep" and "sweep" in own):
                assert run([*words, str(file), "-q"]) == 2, (words, file)
    assert _contents(inside) == before
    assert notes.read_text() == "# my notes\n"


@pytest.mark.slow
def test_files_beside_the_named_output_and_in_folders_count(inside: Path, tmp_path: Path) -> None:
    mine = tmp_path / "s.csv"
    mine.write_text("my,own,table\n")
    for suffix in (".h5", ".json"):
        assert run([*COMMANDS["s.h5"], "-o", str(tmp_path / f"s{suffix}"), "-q"]) == 2
    network = tmp_path / "erm.safetensors"
    network.write_bytes(b"weights")
    words = [*COMMANDS["probe.safetensors"][:-1], str(tmp_path), "-o", str(tmp_path / "probe"), "-q"]
    assert run(words) == 2
    assert (mine.read_text(), network.read_bytes()) == ("my,own,table\n", b"weights")


@pytest.mark.slow
def test_plots_replace_plots_alone(inside: Path, tmp_path: Path) -> None:
    words = ["report", "p.h5", "--plots", str(tmp_path), "-o", str(tmp_path / "t.txt"), "-q"]
    assert (run(words), run(words)) == (0, 0)
    (tmp_path / "t.txt").unlink()
    for suffix in ("png", "pdf"):
        plot = next(tmp_path.glob(f"*.{suffix}"))
        kept = plot.read_bytes()
        Image.new("RGB", (2, 2)).save(plot)
        before = _contents(tmp_path)
        assert run(words) == 2
        assert _contents(tmp_path) == before
        plot.write_bytes(kept)


@pytest.mark.parametrize("way", [run, None])
def test_what_is_read_in_a_folder_is_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Callable[[list[str]], int] | None
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["data", "synthetic", "-o", "data", *ROWS, "-q"]) == 0
    assert run(["fit", *STORE, *PAIRS, "--rank", "2", "--folds", "2", "-o", "oi/probe", "-q"]) == 0
    assert run(["eval", "oi/probe", *STORE, "-o", "oi/r.json", "-q"]) == 0
    photo = tmp_path / "photos/a/dog/001.png"
    photo.parent.mkdir(parents=True)
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(photo)
    before = _contents(tmp_path)
    tries = (
        ("report", {"results": ["oi"], "output": "oi/r.json"}),
        ("report", {"results": ["oi"], "html": "data/features.h5"}),
        ("predict", {"probe": "oi/probe", "source": "photos", "output": "photos/a/dog/001.png"}),
        ("data folder", {"source": "data", "output": "data"}),
    )
    for name, given in tries:
        if way is None:
            with pytest.raises(UsageError, match="would replace"):
                ncm_cli.run(name, **given)
            continue
        words = name.split()
        for field, value in given.items():
            flag = [] if field in ("results", "probe", "source") else [f"--{field}"]
            words += [*flag, value[0] if isinstance(value, list) else str(value)]
        assert way([*words, "-q"]) == 2
    assert _contents(tmp_path) == before


def test_an_empty_file_is_as_good_as_none(tmp_path: Path) -> None:
    file = tmp_path / "out"
    file.touch()
    for kind in KINDS:
        refuse_other(file, kind)


@pytest.mark.parametrize("options", [*(s for s in STEPS if s != "data"), "info"])
def test_every_output_says_what_it_is(options: str) -> None:
    for field in fields_of(options_of(options)):
        if field.role == "output" and field.metavar != "DIR":
            assert field.writes, field.flag
            assert {*field.writes} <= {*KINDS}
