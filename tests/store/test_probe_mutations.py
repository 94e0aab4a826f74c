"""A probe whose digest is right, and whatever in it is not: refused where it is read, or read as it was."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save

from ncm_cli.errors import InputError
from ncm_cli.main import run
from ncm_cli.store.probe import _file_digest, read_probe
from ncm_cli.store.schema import misfit

ODD: tuple[Any, ...] = (
    *(None, True, -1, 0.5, 10**30, 1e308, float("nan"), float("inf"), 10**400),
    *("", "x", "NaN", "\0", "a\nb", "\ud800", [], [None], [1], ["x"], {}, {"a": 1}, [[1, {}]]),
)

CLASSES = (
    *('"ab"', '{"-1": 1, "1": 2}', '["1"]', '["1", "1"]', '["-1", "1", "2"]', "[1, 2]", '[null, "1"]'),
    *(
        '[["a"], "b"]',
        '["", "1"]',
        "[true, false]",
        '["\\ud800", "1"]',
        "[" * 3000,
        "[NaN, 1]",
        "",
        '["\\udc80", "1"]',
    ),
)

Mutated = tuple[dict[str, np.ndarray], dict[str, str], str]


class Made:
    """A probe of ``ncm fit``, and the files that it was made of."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.features = folder, folder / "syn" / "features.h5"
        sizes = "--dim 8 --spurious 2 --rows 40 --val-rows 30 --test-rows 30 --pairs 40 --holdout-pairs 0"
        self.do(f"data synthetic -o {folder}/syn {sizes}")
        pairs = f"-f {self.features} -p {folder}/syn/noisy-0.1.h5"
        choice = "--groups label --scaling standard --rank 1:2 --weight-decay 1e-2,1e-1"
        self.do(f"fit {pairs} {choice} -o {folder}/fitted")
        self.do(f"fit -f {self.features} --weight-decay 1e-1 -o {folder}/other")
        self.do(f"eval {folder}/fitted -f {self.features} -o {folder}/r.json")
        with safe_open(folder / "fitted", "numpy") as file:
            self.metadata = dict(file.metadata())
            self.tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        self.meta = json.loads(self.metadata["meta"])
        bound = f"bound PROBE {pairs} --oracle-pairs {folder}/syn/oracle.h5 --ranks 0:1 --bootstrap 0"
        self.commands = {
            "info": "info PROBE",
            "export": f"info PROBE --export sklearn -o {folder}/x.npz",
            "eval": f"eval PROBE -f {self.features} --where split=test --compare {folder}/other --json",
            "compare": f"eval {folder}/other -f {self.features} --where split=test --compare PROBE",
            "predict": f"predict PROBE {self.features} --where split=test -o -",
            "bound": f"{bound} --oracle-train split=val",
            "report": f"report {folder}/r.json PROBE",
            "page": f"report {folder}/r.json PROBE --html {folder}/page.html",
        }

    def do(self, line: str) -> str:
        code, said = self.run(f"{line} --quiet")
        assert code == 0, said
        return said

    def run(self, line: str) -> tuple[int, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(line.replace("PROBE", str(self.folder / "mutated")).split())
        return code, out.getvalue() + err.getvalue()

    def readable(self) -> bool:
        try:
            read_probe(self.folder / "mutated")
        except InputError:
            return False
        return True

    def write(self, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
        sealed = metadata | {"sha256": _file_digest(tensors, metadata)}
        (self.folder / "mutated").write_bytes(save(tensors, metadata=sealed))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("mutations"))


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every field of the record; of a list's items those of the first two."""
    if place:
        yield place
    for key in (
        value if isinstance(value, dict) else range(min(len(value), 2)) if isinstance(value, list) else ()
    ):
        yield from _places(value[key], (*place, key))


def _record(made: Made, rng: random.Random) -> Mutated:
    """Something odd in the place of any value, or nothing."""
    meta = copy.deepcopy(made.meta)
    place = rng.choice(list(_places(meta)))
    holder = meta
    for key in place[:-1]:
        holder = holder[key]
    value = rng.choice(ODD)
    if rng.random() < 0.15:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    return made.tensors, made.metadata | {"meta": json.dumps(meta)}, f"{place}: {value!r}"


def _text(made: Made, rng: random.Random) -> Mutated:
    name = rng.choice([name for name in made.metadata if name not in ("meta", "sha256", "target")])
    value = rng.choice(CLASSES if name == "classes" else ("", "x", "null", "-1", "9" * 30, "\0", "0.9", "²"))
    return made.tensors, made.metadata | {name: value}, f"{name}: {value!r}"


CHANGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "float32": lambda values: values.astype(np.float32),
    "int64": lambda values: values.astype(np.int64),
    "bool": lambda values: values.astype(bool),
    "shorter": lambda values: values[:-1],
    "turned": lambda values: values.T.copy() if values.ndim > 1 else values[:, None],
    "flat": lambda values: values.reshape(-1)[:0],
    "one number": lambda values: np.array(1.0),
    "NaN": lambda values: values * np.nan,
    "infinite": lambda values: values + np.inf,
}


def _tensor(made: Made, rng: random.Random) -> Mutated:
    name, how = rng.choice(list(made.tensors)), rng.choice(["absent", "another", *CHANGES])
    tensors = dict(made.tensors)
    if how == "absent":
        del tensors[name]
    elif how == "another":
        tensors["more"] = tensors[name]
    else:
        tensors[name] = CHANGES[how](tensors[name])
    return tensors, made.metadata, f"{name}: {how}"


def _answers(said: str, command: str) -> Any:
    """What is measured, in the output of a command."""
    return json.loads(said)["accuracy"] if command == "eval" else said


@pytest.mark.slow
def test_no_mutation_ends_in_a_traceback_or_in_other_numbers(made: Made) -> None:
    """All commands take what can be read; of what can't be, one, as all of them read it by `read_probe`."""
    rng = random.Random(0)
    made.write(made.tensors, made.metadata)
    before = {name: made.do(line) for name, line in made.commands.items() if name in ("eval", "predict")}
    refused = 0
    for _ in range(30):
        mutate = rng.choices([_record, _text, _tensor], [3, 1, 1])[0]
        tensors, metadata, what = mutate(made, rng)
        made.write(tensors, metadata)
        codes = set()
        names = list(made.commands) if made.readable() else rng.sample(list(made.commands), 1)
        for name in names:
            code, said = made.run(f"{made.commands[name]} --quiet")
            assert code in (0, 2, 3, 4), (what, name, said)
            codes.add(code)
            if code == 0 and name in before and mutate is _record:
                assert _answers(said, name) == _answers(before[name], name), (what, name)
        if mutate is not _record and "sha256" not in what:
            refused += codes == {3} or 0 in codes
    assert refused


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("name", ["weight", "bias", "basis", "singular_values", "mean", "scale"])
def test_tensors_of_another_form_are_refused(made: Made, name: str, how: str) -> None:
    changed = CHANGES[how](made.tensors[name])
    if (name, how) in (("singular_values", "shorter"), ("singular_values", "flat")):
        pytest.skip("any number of them will do")
    made.write(made.tensors | {name: changed}, made.metadata)
    with pytest.raises(InputError):
        read_probe(made.folder / "mutated")


@pytest.mark.parametrize("classes", CLASSES)
def test_classes_are_distinct_words(made: Made, classes: str) -> None:
    made.write(made.tensors, made.metadata | {"classes": classes})
    with pytest.raises(InputError):
        read_probe(made.folder / "mutated")


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("scaling", "kind"), "none", "the feature scaling none"),
        (("scaling", "kind"), "other", "a feature scaling that isn't known"),
        (("selection", "chosen"), 99, "a chosen candidate that isn't in the path"),
        (("selection", "chosen"), -1, "a chosen candidate that isn't in the path"),
        (("rows", "train"), "AAAA", "ids of the train rows"),
        (("rows", "val"), "!" * 12, "ids of the val rows"),
        (("encoder", "model"), "another", "a fingerprint of another encoder"),
        (("hyper_parameters", "weight_decay"), None, "a fit without its weight decay"),
        (
            ("selection", "verdict", "bound", "low"),
            "x",
            "meta.selection.verdict.bound.low is 'x', not a number",
        ),
        (("data", "pairs"), float("inf"), "meta.data.pairs is inf"),
        (("options", "seed"), True, "meta.options.seed is True, not a whole number"),
        (("flags", 0), "\ud800", "meta.flags.0"),
    ],
)
def test_what_a_record_contradicts_is_named(
    made: Made, place: tuple[Any, ...], value: Any, said: str
) -> None:
    meta = copy.deepcopy(made.meta) | {"flags": ["one"]}
    holder: Any = meta
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    made.write(made.tensors, made.metadata | {"meta": json.dumps(meta)})
    with pytest.raises(InputError) as caught:
        read_probe(made.folder / "mutated")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("value", "schema", "name"),
    [
        (1, float, None),
        (1.0, int, ""),
        (True, int, ""),
        (True, float, ""),
        ([1, "x"], list[int], "1"),
        ({"a": {"b": None}}, dict[str, dict[str, int]], "a.b"),
        ({"a": [float("nan")]}, Any, "a.0"),
        ({"\ud800": 1}, Any, "\ud800"),
        (None, int | None, None),
        ([{"a": "x"}], list[dict[str, int]] | list[dict[str, float]], "0.a"),
    ],
)
def test_schemas(value: Any, schema: Any, name: str | None) -> None:
    fault = misfit(value, schema)
    assert (fault and fault[0]) == name
