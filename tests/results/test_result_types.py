"""A result whose digest fits, but a field of which has another type: refused, or shown, never a traceback."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ncm_cli import load
from ncm_cli.errors import InputError, NcmError
from ncm_cli.main import run
from ncm_cli.notebook import html
from ncm_cli.probes.evaluate import evaluate
from ncm_cli.probes.options import EvalOptions
from ncm_cli.progress import SILENT
from ncm_cli.results.formats import WRITERS
from ncm_cli.results.lines import lines_of, read_sources
from ncm_cli.results.options import BY, FORMATS, ReportOptions
from ncm_cli.results.report import report
from ncm_cli.results.tables import tables
from ncm_cli.store.files import DIGEST, _digest, read_result, write_result

STORE = ["-f", "data/features.h5"]
FIT = [*STORE, "-p", "data/noisy-0.1.h5", "--rank", "0,2", "--folds", "2"]
EVAL = ["--groups", "label;domain", "--compare", "erm"]
BOUND = ["--oracle-pairs", "data/oracle.h5", "-p", "data/noisy-0.1.h5", "--clean-pairs", "data/clean.h5"]
GRIDS = ["--bootstrap", "2", "--ranks", "0,1,2", "--pair-counts", "5,10", "--oracle-train", "split=val"]
SMALL = ["--methods", "erm,ncm", "--trials", "1", "--seeds", "2", "--epochs", "1"]
COMMANDS = (
    ["data", "synthetic", "-o", "data", "--dim", "8", "--spurious", "2", "--rows", "60", "--pairs", "30"],
    ["fit", *FIT, "-o", "probe"],
    ["fit", *STORE, "--method", "erm", "-o", "erm"],
    ["eval", "probe", *STORE, *EVAL, "-o", "eval.json"],
    ["bound", "probe", *STORE, *BOUND, *GRIDS, "-o", "bound.json"],
    ["sweep", *STORE, "-p", "data/noisy-0.1.h5", "--folds", "2", *SMALL, "-o", "sweep.json"],
    ["run", "recipe.yaml", "--out", "out"],
)
RECIPE = """\
name: small
matrix: {seed: [0, 1]}
steps:
  - eval: {probe: probe, features: data/features.h5, where: split=test, output: 'e${seed}.json'}
expect:
  - {metric: accuracy, where: split=test, value: 0.5, tolerance: 0.5, source: here}
"""
OTHERS = (None, True, 7, -1, 1.5, "x", "", [], {}, [1], [[1]], {"a": 1}, 10**400, "\ud800", "\udcff")
NAMES = ("eval", "bound", "sweep", "finetune", "report")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A result of every kind."""
    made = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        Path("recipe.yaml").write_text(RECIPE)
        for words in COMMANDS:
            assert run([*words, "-q"]) == 0, words
    (made / "out/report.json").rename(made / "report.json")
    evaluated = read_result(made / "eval.json")
    values = {"val_accuracy": 0.5, "val_worst_group": None, "flip_rate": 0.25}
    body = {
        "output": "f.safetensors",
        "method": "ncm",
        "seed": 0,
        "rule": "in-domain",
        "oracle": False,
        "epoch": 1,
        "epochs": 2,
        "rules": {"in-domain": {"oracle": False, "epoch": 1, "metrics": values}, "oracle": None},
        "history": {"epoch": [1, 2], "val_accuracy": [0.5, 0.25], "val_log_loss": [0.5, None]},
        "evals": [{name: evaluated[name] for name in ("kind", "n", "accuracy", "probe", "options")}],
        "probe": evaluated["probe"],
        "data": {"train_rows": 9, "pairs": {"path": "p.h5", "used": 3, "held_out": 1}},
        "options": {"source": "m.csv", "pairs": "p.h5", "output": "f.safetensors", "test": None},
    }
    write_result(made / "finetune.json", "finetune", body)
    return made


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every field is; of a list the first two."""
    if place:
        yield place
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value[:2]):
            yield from _places(item, (*place, key))


def _signed(document: dict[str, Any], path: Path) -> Path:
    try:
        document[DIGEST] = _digest(document)
    except (TypeError, ValueError):
        document[DIGEST] = None
    path.write_text(json.dumps(document))
    return path


def _use(path: Path) -> None:
    """Whatever is done with results, but for pictures."""
    sources = read_sources([path])
    for by in BY:
        evals = lines_of(sources.evals, by, SILENT, columns=True)
        for table in tables(sources, evals, lines_of(sources.bounds, by, SILENT), by, "seeds"):
            for form in FORMATS:
                WRITERS[form](table)
    html(load(path))


def _draw(path: Path) -> None:
    report(ReportOptions(results=(path,), html=path.with_suffix(".html"), plots=path.parent / "plots"))


def _try_all(
    folder: Path, name: str, tmp_path: Path, count: int, use: Callable[[Path], object] = _use
) -> int:
    document = json.loads((folder / f"{name}.json").read_text())
    header = ("ncm_format", "ncm_format_version", DIGEST)
    every = [(place, other) for place in _places(document) if place[0] not in header for other in OTHERS]
    refused = 0
    for place, other in random.Random(name).sample(every, count):
        changed = inner = copy.deepcopy(document)
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = other
        path = _signed(changed, tmp_path / f"{name}.json")
        try:
            use(path)
        except NcmError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{name}: {other!r} at {place}") from error
    return refused


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_field_of_another_type_is_no_traceback(folder: Path, tmp_path: Path, name: str) -> None:
    _use(folder / f"{name}.json")
    assert _try_all(folder, name, tmp_path, 120) > 30


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_nor_where_pages_and_plots_are_made(folder: Path, tmp_path: Path, name: str) -> None:
    assert _try_all(folder, name, tmp_path, 5, _draw)


@pytest.mark.slow
def test_nor_where_a_probe_is_compared_with_it(folder: Path, tmp_path: Path) -> None:
    given = {"probe": folder / "erm", "features": folder / "data" / "features.h5"}
    assert _try_all(folder, "eval", tmp_path, 60, lambda path: evaluate(EvalOptions(**given, compare=path)))


def test_the_field_is_named(tmp_path: Path) -> None:
    write_result(tmp_path / "r.json", "eval", {"n": 3, "groups": [{"group": {"a": "b"}, "n": 7}]})
    found = json.loads((tmp_path / "r.json").read_text())
    found["groups"][0]["n"] = "many"
    (tmp_path / "r.json").write_text(json.dumps({**found, DIGEST: _digest(found)}))
    with pytest.raises(InputError, match="a value that ncm doesn't write") as refused:
        read_result(tmp_path / "r.json")
    assert str(refused.value.where).endswith("r.json, groups.0.n")
    assert (refused.value.found, refused.value.expected) == ("'many'", "a whole number")


@pytest.mark.parametrize("deep", ["[", '{"a":'])
def test_what_is_nested_without_end_is_refused(tmp_path: Path, deep: str) -> None:
    for count in (150, 950, 30_000):
        closed = deep * count + "1" + ("]" if deep == "[" else "}") * count
        (tmp_path / "r.json").write_text('{"ncm_format": "ncm-result", "n": ' + closed + "}")
        with pytest.raises(InputError, match="not a JSON file that can be read"):
            read_result(tmp_path / "r.json")
