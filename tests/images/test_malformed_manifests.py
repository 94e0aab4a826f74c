"""Whatever a manifest looks like, it is read or refused: never another exception."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from ncm_cli.errors import NcmError
from ncm_cli.images.embed import embed
from ncm_cli.images.options import EmbedOptions
from ncm_cli.store.features import FeatureStore

NAMES = ["label", "split", "place", "", "Unnamed: 0", "x/y", "é", "a\tb", "id ", '"id"', "ID", "y"]
CELLS = [
    "a.png",
    "b.png",
    "",
    "NA",
    "1",
    "01",
    "0.5",
    "-1",
    "nan",
    "é b",
    '"x\ny"',
    "..",
    ".",
    "/",
    "a\\b.png",
]
WILD = ['"', '""', "\0", "x" * 300, "=1+1", "\udcff", "1e999", "٣", "\ufeff", "\r", "a;b", "1,5"]

cells = st.one_of(st.sampled_from(CELLS), st.sampled_from(CELLS), st.sampled_from(WILD), st.text(max_size=5))


def mostly(likely: object, *others: object) -> st.SearchStrategy:
    """``likely`` in about nine of ten draws."""
    rare = st.sampled_from(others)
    return st.integers(0, 9).flatmap(lambda n: rare if n == 5 else st.just(likely))


@st.composite
def tables(draw: st.DrawFn) -> bytes:
    """A manifest gone wrong in one or a few of the usual ways, and now and then one that is right."""
    delimiter = draw(mostly(",", ";", "\t", "|", ":", ", "))
    header = [
        "id",
        "path",
        *draw(st.lists(st.sampled_from(NAMES), max_size=4, unique=draw(mostly(True, False)))),
    ]
    header = draw(draw(mostly(st.just(header), st.permutations(header), st.lists(st.text()))))
    tame = draw(st.booleans())
    rows = []
    for i in range(draw(st.integers(0, 5))):
        width = len(header) if draw(mostly(True, False)) else draw(st.integers(0, 6))
        row = draw(st.lists(st.sampled_from(CELLS[:8]) if tame else cells, min_size=width, max_size=width))
        named = {"id": f"row {i}", "path": "b.png"} if draw(mostly(True, False)) else {}
        rows.append([named.get(name, cell) for name, cell in zip(header, row, strict=False)] or row)
    end = draw(mostly("\n", "\r\n", "\r", "\n\n"))
    text = end.join(delimiter.join(row) for row in [header, *rows]) + draw(mostly(end, "", '"', "\0"))
    data = text.encode(draw(mostly("utf-8", "utf-16", "latin-1", "utf-32-le", "utf-8-sig")), "replace")
    return draw(mostly(data, data[: len(data) // 2], data + b"\xff\xfe", b"\xef\xbb\xbf", data * 2))


options = st.fixed_dictionaries(
    {},
    optional={
        "id_col": st.sampled_from(["id", "path", "x/y", "é"]),
        "label_col": st.sampled_from(["label", "split", "id", "é"]),
        "split_col": st.sampled_from(["split", "label"]),
        "numeric": st.sampled_from([(), ("label",), ("split", "id")]),
    },
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=mostly(tables(), st.binary(max_size=80)).flatmap(lambda chosen: chosen), chosen=options)
def test_300_malformed_manifests_are_read_or_refused(data: bytes, chosen: dict) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for picture in ("a.png", "b.png"):
            Image.new("RGB", (2, 2), "red").save(folder / picture)
        source, output = folder / "m.csv", folder / "f.h5"
        source.write_bytes(data)
        try:
            report = embed(
                EmbedOptions(source=source, output=output, model="pixels:1", workers="0", **chosen)
            )
        except NcmError as error:
            assert error.exit_code in (2, 3, 4)
            str(error).encode("utf-8", "backslashreplace")
            assert {path.name for path in folder.iterdir()} == {"a.png", "b.png", "m.csv"}
        else:
            with FeatureStore(output) as store:
                assert store.rows == report.rows == len(store.ids) > 0
                store.verify()
