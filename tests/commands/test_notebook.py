"""The Python API: `load` tells every file, `run` does every command, and notebooks show tables."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
import warnings
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ncm_cli
from ncm_cli import FeatureStore, NCMClassifier, PairStore, Probe, Result, load, run
from ncm_cli.baselines.choice import SweepTable
from ncm_cli.errors import InputError, UsageError
from ncm_cli.main import run as command
from ncm_cli.store.pairs import read_pairs
from tests.world import write_store

SMALL = {"dim": 8, "spurious": 2, "rows": 200, "val_rows": 100, "test_rows": 100, "pairs": 40}
FILES = {"features": "features.h5", "pairs": "pairs.h5"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """features.h5, pairs.h5, probe.safetensors and result.json."""
    made = tmp_path_factory.mktemp("api")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        assert run("data synthetic", output="data", **SMALL)["rows"] == 1200
        (made / "data/features.h5").rename("features.h5")
        (made / "data/noisy-0.1.h5").rename("pairs.h5")
        found = run("fit", **FILES, output=made / "probe.safetensors", rank=2, weight_decay=[1e-2, 1e-1])
        assert found["rank"] == 2
        run(
            "eval",
            probe="probe.safetensors",
            features="features.h5",
            where="split=test",
            output="result.json",
        )
    return made


@pytest.fixture
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("name", [name for name in ncm_cli.__all__ if name != "__version__"])
def test_examples_of_the_api_are_true(inside: Path, name: str) -> None:
    public = getattr(ncm_cli, name)
    assert public.__doc__
    (test,) = doctest.DocTestFinder(recurse=False).find(public, name)
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0
    page = Path(ncm_cli.__file__).parent / "help" / "api.md"
    assert re.search(rf"`(ncm_cli\.)?{name}\b", page.read_text(encoding="utf-8"))


class Cells(HTMLParser):
    """The texts of a page's cells and blocks; a tag that isn't ours is a failure."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert tag == "pre", tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_each_file_is_told_and_shown(inside: Path) -> None:
    kinds = {"features.h5": FeatureStore, "pairs.h5": PairStore, "probe.safetensors": Probe}
    words = {"features.h5": "400", "pairs.h5": "noisy", "probe.safetensors": "verdict"}
    for name, kind in kinds.items():
        found = load(name)
        assert type(found) is kind
        assert any(words[name] in text for text in Cells(found._repr_html_()).texts), name
        assert repr(found).startswith(f"{kind.__name__}(")
        assert len(repr(found)) < 200


@pytest.mark.slow
def test_a_sweep_and_its_table_are_shown(inside: Path) -> None:
    run("sweep", **FILES, methods="erm", epochs=1, trials=1, seeds=1, test="split=test", output="s.json")
    result, table = load("s.json"), load("s.h5")
    assert (type(result), type(table)) == (Result, SweepTable)
    assert all("erm" in " ".join(Cells(found._repr_html_()).texts) for found in (result, table))


def test_a_result_is_what_json_prints_and_shows_what_a_terminal_does(
    inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"probe": "probe.safetensors", "features": "features.h5", "where": "split=test"}
    found = run("eval", **options)
    line = "eval probe.safetensors -f features.h5 --where split=test"
    assert command(line.split()) == 0
    terminal = capsys.readouterr().out.split()
    assert " ".join(Cells(found._repr_html_()).texts).split() == terminal
    stored = load("result.json")
    assert stored.kind == "eval"
    assert found.items() >= {name: found[name] for name in ("n", "accuracy", "worst_group")}.items()
    assert Cells(stored._repr_html_()).texts == Cells(found._repr_html_()).texts


def test_names_of_users_stay_text(inside: Path) -> None:
    names = ["<script>alert(1)</script>", "a&b\x1b[1m"]
    encoder = {"kind": "array", "model": "<img src=x>", "precision": "fp32", "normalize": False}
    write_store(Path("odd.h5"), np.eye(3), {"label": [names[0], names[1], names[1]]}, encoder=encoder)
    page = load("odd.h5")._repr_html_()
    texts = " ".join(Cells(page).texts)
    assert "<script>alert(1)</script> 1" in texts
    assert "\x1b" not in page


def test_what_is_wrong_is_said(inside: Path) -> None:
    (inside / "other.json").write_text("{}")
    with pytest.raises(InputError, match="not a file of ncm"):
        load("other.json")
    with pytest.raises(UsageError, match="no command 'fitt' to run"):
        run("fitt")
    with pytest.raises(UsageError, match=r"no option named 'feature'[\s\S]*did you mean 'features'"):
        run("fit", feature="x")
    with pytest.raises(UsageError, match="fit needs output"):
        run("fit", features="features.h5")
    with pytest.raises(UsageError, match="folds takes a whole number"):
        run("fit", **FILES, output="p", folds=2.5)
    with pytest.raises(UsageError, match="would replace --features"):
        run("fit", features="features.h5", output="features.h5")
    for odd in (None, 3, ["fit"], b"fit"):
        with pytest.raises(UsageError, match=r"no command .* to run"):
            run(odd)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="path takes the path of a file"):
            load(odd)  # type: ignore[arg-type]
    for name in ("", "a\0b", "a" * 5_000, "b" * 300 + "/c"):
        with pytest.raises(InputError, match="not the path of a file"):
            load(name)
    for odd in (5, 1.5, {"a": 1}, b"f.h5", "a\0b", "a" * 5_000):
        with pytest.raises(UsageError, match=r"takes the path of a file|not the path of a file"):
            run("fit", features=odd, output="p")


NOTEBOOK = """
import ncm_cli
ncm_cli.run("fit", features="features.h5", pairs="pairs.h5", output="again.safetensors", rank=[0, 2])
---
ncm_cli.load("again.safetensors")
---
ncm_cli.run("report", results=["result.json", "pairs.h5"], plots="plots", html="page.html")
"""


@pytest.mark.slow
def test_a_notebook_shows_headings_narrow_rules_plots_and_the_page(inside: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    cells = [nbformat.v4.new_code_cell(code.strip()) for code in NOTEBOOK.split("---")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # of Jupyter's own
        patch.setenv("PYTHONPATH", str(Path(ncm_cli.__file__).parents[1]))
        nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    pages = []
    for cell in notebook.cells:
        shown = [output for output in cell.outputs if output.output_type != "stream"]
        assert [output.output_type for output in shown] == ["execute_result"], shown  # no display beside it
        assert not [output for output in cell.outputs if output.get("name") == "stdout"]
        pages.append(shown[0].data["text/html"])
    fit, probe, report = pages
    lines = Cells(fit).texts[0].splitlines()
    assert lines[0].startswith("choosing by ")
    assert lines[1].split()[:3] == ["rank", "weight", "decay"]
    for text in (fit, probe):
        assert max(map(len, Cells(text).texts[0].splitlines())) <= 100
    assert re.search(r"<pre[^>]*>Methods\n.*accuracy", report, re.DOTALL)
    assert report.count('src="data:image/svg+xml;base64,') == len([*Path("plots").glob("*.svg")]) > 0
    page = re.search(r'<iframe sandbox="allow-scripts[^>]* srcdoc="([^"]*)"', report)
    assert page
    assert unescape(page[1]) == Path("page.html").read_text(encoding="utf-8")
    Path("page.html").unlink()


def test_a_report_whose_files_are_gone_shows_its_tables(inside: Path) -> None:
    found = run("report", results=["result.json"], html="gone.html")
    assert "<iframe" in found._repr_html_()
    Path("gone.html").unlink()
    page = found._repr_html_()
    assert "<iframe" not in page and "Methods" in page
    assert found["html"] == "gone.html"


def test_importing_the_package_loads_nothing() -> None:
    code = "import sys, ncm_cli; print(sorted({'numpy', 'h5py', 'rich', 'sklearn'} & sys.modules.keys()))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
    assert {"load", "run"} <= set(dir(ncm_cli))
    assert NCMClassifier is ncm_cli.NCMClassifier
    assert read_pairs.__annotations__["return"] == "PairStore"
