"""Options are declared once: the grammar of each, and how choices are refused."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from PIL import Image

from ncm_cli import notebook as api
from ncm_cli.errors import InputError, UsageError
from ncm_cli.given import options_from
from ncm_cli.main import run
from ncm_cli.options import (
    COLUMN_METAVARS,
    Term,
    argument,
    at_home,
    check,
    fields_of,
    option,
    parse_names,
    parse_numbers,
    parse_ranks,
    parse_where,
    where_text,
)
from ncm_cli.registry import BUILDERS, STEPS, options_of
from ncm_cli.store.columns import Column
from ncm_cli.store.files import jsonable
from ncm_cli.store.outputs import refuse_replacing
from ncm_cli.store.probe import write_probe
from tests import world


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    source: Path = argument(help="in", role="input")
    kind: str | None = option(None, help="kind", choices=("one", "two"))
    col: tuple[str, ...] = option((), help="columns")
    rank: str = option("auto", help="ranks", parse=parse_ranks)
    where: str | None = option(None, help="rows", metavar="WHERE")
    share: float = option(0.5, help="share", above=0, most=1)
    part: float = option(0.5, help="part", least=0, below=1)

    def refusals(self) -> Iterator[UsageError]:
        if self.kind and self.col:
            yield UsageError("--kind says it all", fix="leave --col out")


def test_fields_know_type_optional_and_repeated() -> None:
    source, kind, col, rank, *_ = fields_of(Sample)
    assert (source.type, source.required, source.positional) == (Path, True, True)
    assert (kind.type, kind.optional, kind.required) == (str, True, False)
    assert (col.type, col.repeated) == (str, True)
    assert rank.flag == "--rank"


def test_check_refuses_choices_and_grammars() -> None:
    assert check(Sample(source=Path("a"), kind="two")).kind == "two"
    with pytest.raises(UsageError, match="--kind doesn't take 'tow'"):
        check(Sample(source=Path("a"), kind="tow"))
    with pytest.raises(UsageError, match="rank grid"):
        check(Sample(source=Path("a"), rank="2-24"))
    with pytest.raises(UsageError, match="a row filter that can't be read"):
        check(Sample(source=Path("a"), where="split"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"share": 0.0}, "--share must be above 0"),
        ({"share": 1.5}, "--share must be at most 1"),
        ({"share": float("nan")}, "--share must be finite"),
        ({"part": -0.5}, "--part must be at least 0"),
        ({"part": 1.0}, "--part must be below 1"),
        ({"kind": "one", "col": ("a",)}, "--kind says it all"),
    ],
)
def test_check_refuses_numbers_out_of_bounds_and_what_cannot_go_together(
    values: dict[str, object], message: str
) -> None:
    assert check(Sample(source=Path("a"), share=1.0, part=0.0, kind="one"))
    with pytest.raises(UsageError, match=message):
        check(Sample(source=Path("a"), **values))  # type: ignore[arg-type]


def test_options_as_json_are_plain() -> None:
    assert jsonable(Sample(source=Path("a"), col=("x",))) == {
        "source": "a",
        "kind": None,
        "col": ["x"],
        "rank": "auto",
        "where": None,
        "share": 0.5,
        "part": 0.5,
    }


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("16", (16,)),
        ("2:5", (2, 3, 4, 5)),
        ("0:64:32", (0, 32, 64)),
        ("0,8,8,4:5", (0, 4, 5, 8)),
        ("auto", None),
    ],
)
def test_ranks(text: str, ranks: tuple[int, ...] | None) -> None:
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize("text", ["", "a", "-1", "5:2", "1:2:0", "1:2:3:4", "1.5", "2:", "0:999999999"])
def test_bad_ranks(text: str) -> None:
    with pytest.raises(UsageError, match="rank grid"):
        parse_ranks(text)


def test_numbers_and_names() -> None:
    assert parse_numbers("1e-3") == (1e-3,)
    assert parse_numbers("1,0.1,1") == (1.0, 0.1)
    assert parse_numbers("log:1e-4:1:5") == pytest.approx((1e-4, 1e-3, 1e-2, 1e-1, 1))
    assert parse_names(" label, place,") == ("label", "place")
    for text in ("", "x", "log:0:1:3", "nan", "log:1:2", "log:1:2:999999999"):
        with pytest.raises(UsageError, match="numbers"):
            parse_numbers(text)


def test_where() -> None:
    assert parse_where("split=test & domain!=sketch|photo") == (
        Term("split", ("test",)),
        Term("domain", ("sketch", "photo"), negated=True),
    )
    assert parse_where("  ") == ()
    assert parse_where('split="train|a" & "a & b" != x|" y "|"say ""hi""" & c=5"|"d"e|f=g') == (
        Term("split", ("train|a",)),
        Term("a & b", ("x", " y ", 'say "hi"'), negated=True),
        Term("c", ('5"', '"d"e', "f=g")),
    )
    for text in ("split", "=x", "a=b & ", "a=|b"):
        with pytest.raises(UsageError, match="row filter"):
            parse_where(text)


@hypothesis.given(st.lists(st.text('a"|&=! ', min_size=1, max_size=5), min_size=2, max_size=4))
def test_every_name_and_value_can_be_filtered_by(texts: list[str]) -> None:
    column, *values = texts
    assert parse_where(where_text(column, *values)) == (Term(column, tuple(values)),)
    assert parse_where(f"{where_text(column, *values)} & x=y")[1] == Term("x", ("y",))


def _class(name: str) -> type:
    return options_of(f"data {name}") if name in BUILDERS else options_of(name)


@pytest.mark.parametrize("options", [*(s for s in STEPS if s != "data"), *BUILDERS])
def test_every_option_has_help_and_a_plain_type(options: str) -> None:
    for field in fields_of(_class(options)):
        assert field.help, field.name
        assert field.type in {str, int, float, bool, Path}, field.name
        assert not field.help.endswith(" "), field.name


@pytest.mark.parametrize("options", [*(s for s in STEPS if s != "data"), *BUILDERS])
def test_an_option_that_speaks_of_columns_or_rows_names_columns(options: str) -> None:
    for field in fields_of(_class(options)):
        takes_text = field.type is str and not field.choices
        if takes_text and re.search(r"\b([Cc]olumns?|[Rr]ows|[Tt]hese images)\b", field.help):
            assert field.metavar in COLUMN_METAVARS, field.flag
            assert field.columns_of in {other.name for other in fields_of(_class(options))}, field.flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class Writing:
    source: Path = argument(help="in", role="input")
    more: tuple[Path, ...] = option((), help="in", role="input")
    weights: str | None = option(None, help="in", role="name-or-input")
    output: Path = option(help="out", role="output")
    seed: int = option(0, help="seed", least=0)


def test_an_output_that_is_an_input_is_refused(tmp_path: Path) -> None:
    file, other, link = tmp_path / "a", tmp_path / "b", tmp_path / "link"
    for path in (file, other):
        path.write_text("x")
    link.symlink_to(file)
    refuse_replacing(Writing(source=file, output=other))
    refuse_replacing(Writing(source=tmp_path, output=tmp_path))
    refuse_replacing(Writing(source=tmp_path / "new", output=tmp_path / "new", weights="openai"))
    for options, name in (
        (Writing(source=file, output=tmp_path / "." / "a"), "SOURCE"),
        (Writing(source=file, output=link), "SOURCE"),
        (Writing(source=file, more=(other,), output=other), "--more"),
        (Writing(source=file, weights=str(other), output=other), "--weights"),
    ):
        with pytest.raises(UsageError, match=f"would replace {name}"):
            refuse_replacing(options)


def test_numbers_below_the_least_are_refused() -> None:
    assert check(Writing(source=Path("a"), output=Path("b"), seed=0)).seed == 0
    with pytest.raises(UsageError, match="--seed must be at least 0"):
        check(Writing(source=Path("a"), output=Path("b"), seed=-1))


@pytest.mark.parametrize("options", [*(s for s in STEPS if s != "data"), *BUILDERS])
def test_no_seed_is_negative(options: str) -> None:
    for field in fields_of(_class(options)):
        assert field.name != "seed" or field.least == 0


@pytest.mark.parametrize("options", [*(s for s in STEPS if s != "data"), *BUILDERS])
def test_every_path_option_expands_a_tilde_and_no_other_does(
    options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """git-sim#3, near/nearup#14."""
    monkeypatch.setenv("HOME", "/at/home")
    for field in fields_of(_class(options)):
        if field.type is Path:
            assert at_home(field, Path("~/x")) == Path("/at/home/x"), field.flag
            assert at_home(field, Path("a/~/b")) == Path("a/~/b")
            assert at_home(field, Path("~no such user/x")) == Path("~no such user/x")
        elif field.type is str:
            expanded = "~/x" if field.role == "value" else "/at/home/x"
            assert at_home(field, "~/x") == expanded, field.flag


def test_a_tilde_that_the_shell_left_is_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """git-sim#3, near/nearup#14."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    photo = tmp_path / "home" / "photos" / "cat" / "a.png"
    photo.parent.mkdir(parents=True)
    Image.new("RGB", (2, 2)).save(photo)
    assert run(["data", "folder", "~/photos", "--output=~/data", "-q"]) == 0
    shell = ["embed", "~/data/manifest.csv", "--model", "pixels:2", "-o", "~/f.h5", "-q"]
    assert run(shell) == 0
    assert run(["info", "~/f.h5", "-q"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]
    assert (tmp_path / "home" / "f.h5").is_file()


def test_what_was_meant_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"--html can't be standard output"):
        options_from(options_of("report"), {"results": [Path("a.json")], "html": Path("-")})
    assert options_from(options_of("predict"), {"probe": "p", "source": "x", "output": "-"}).output == Path(
        "-"
    )
    column = Column("domain", np.zeros(1, np.int32), ("cartoon", "photo"))
    (term,) = parse_where("domain=photo,cartoon")
    with pytest.raises(InputError, match=r"try: 'domain=photo\|cartoon'"):
        column.matches(term, tmp_path)


@pytest.mark.parametrize("words", [*(s for s in STEPS if s != "data"), *(f"data {b}" for b in BUILDERS)])
def test_an_option_of_one_value_refuses_a_second(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The last one would win in silence: `fit -p a.h5 -p b.h5`, `eval --where split=test --where place=x`."""
    fields = fields_of(options_of(words))
    required = [word for f in fields if f.required for word in ([] if f.positional else [f.flag]) + ["x.csv"]]
    for field in fields:
        if field.positional or field.type is bool or field.repeated:
            continue
        value = field.choices[0] if field.choices else "a=1" if field.metavar == "WHERE" else "1"
        given = [field.flag, value, field.flag, value]
        code = run([*words.split(), *required, *given])
        said = capsys.readouterr().err
        assert code in (2, 3)
        assert (f"{field.flag} is given" in said) != field.repeatable, (field.flag, said)
        if not field.repeatable and not field.separator:
            with pytest.raises(UsageError, match=r"takes one value|doesn't take|takes a|takes the path"):
                options_from(options_of(words), {field.name: [value, value]})


def test_row_filters_given_twice_must_both_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = {"label": list("abab"), "place": list("xxyy"), "split": ["test"] * 4}
    world.write_store(tmp_path / "f.h5", np.eye(4), columns)
    write_probe(tmp_path / "p.safetensors", world.make_probe(np.ones(4), ("a", "b")))
    line = ["eval", str(tmp_path / "p.safetensors"), "-f", str(tmp_path / "f.h5"), "--json"]
    counts = []
    for filters in (["label=a"], ["label=a", "place=y"], ["label=a", " ", "place=y", "split=test"]):
        assert run([*line, *(word for text in filters for word in ("--where", text))]) == 0
        counts.append(json.loads(capsys.readouterr().out)["n"])
        found = api.run("eval", probe=line[1], features=line[3], where=filters)
        assert found["n"] == counts[-1]
    assert counts == [2, 1, 1]
    assert options_from(Sample, {"source": "x", "where": ["a=1", "b=2"]}).where == "a=1 & b=2"
    with pytest.raises(UsageError, match=r"--kind takes one value[\s\S]*found: 2: one, two"):
        options_from(Sample, {"source": "x", "kind": ["one", "two"]})
    assert run([*line, "--target", "label", "--target", "place"]) == 2
    assert "--target is given twice\n  found: label, place" in capsys.readouterr().err
    assert run(["fit", "-f", "f.h5", "-o", "p", "--rank", "0", "--rank", "4"]) == 2
    assert "--rank 0,4" in capsys.readouterr().err
    assert run([*line, "--metrics", "auroc", "--metrics", "ece"]) == 2
    assert "try: --metrics auroc,ece" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "fit -f f.h5 -o p --seed 99999999999999999999999999",
        "sweep -f f.h5 -o s.h5 --trials 1000000000",
        "sweep -f f.h5 -o s.h5 --seeds 1000000000",
    ],
)
def test_numbers_beyond_all_use_are_refused_before_work(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line.split()) == 2
    assert "at most" in capsys.readouterr().err
