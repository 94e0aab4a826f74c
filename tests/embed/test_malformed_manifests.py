"""Whatever a manifest looks like, it is read or refused: never another exception."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from ncm_cli.errors import NcmError
from ncm_cli.options.embed import EmbedOptions
from ncm_cli.stages.embed import embed
from ncm_cli.store.features import FeatureStore

NAMES = ["id", "path", "label", "split", "", "Unnamed: 0", "x/y", "é", "a\tb", "id ", '"id"', "\ufeffid"]
CELLS = ["a.png", "b.png", "", "NA", "1", "01", "0.5", "-1", "nan", "é b", '"', '""', '"x\ny"', "..", ".",
         "/", "\0", "a\\b.png", "x" * 300, " a.png ", "=1+1", "\udcff", "1e999", "٣"]  # fmt: skip

cells = st.one_of(st.sampled_from(CELLS), st.text(max_size=6))


@st.composite
def tables(draw: st.DrawFn) -> bytes:
    """A manifest gone wrong in any of the usual ways, or a few that are right."""
    delimiter = draw(st.sampled_from([",", ";", "\t", "|", ":", ", "]))
    end = draw(st.sampled_from(["\n", "\r\n", "\r", "\n\n"]))
    header = draw(st.lists(st.one_of(st.sampled_from(NAMES), st.text(max_size=4)), max_size=5))
    if draw(st.booleans()):
        header = ["id", "path", *header[:2]]
    width = st.just(len(header)) if draw(st.booleans()) else st.integers(0, 6)
    rows = draw(st.lists(width.flatmap(lambda n: st.lists(cells, min_size=n, max_size=n)), max_size=6))
    text = end.join(delimiter.join(row) for row in [header, *rows]) + draw(
        st.sampled_from(["", end, '"', "\0"])
    )
    encoding = draw(
        st.sampled_from(["utf-8", "utf-8", "utf-8", "utf-16", "latin-1", "utf-32-le", "utf-8-sig"])
    )
    data = text.encode(encoding, "replace")
    return draw(st.sampled_from([data, data, data[: len(data) // 2], data + b"\xff\xfe", b"\xef\xbb\xbf"]))


options = st.fixed_dictionaries(
    {},
    optional={
        "id_col": st.sampled_from(["id", "path", "x/y", "é"]),
        "label_col": st.sampled_from(["label", "split", "id", "é"]),
        "split_col": st.sampled_from(["split", "label"]),
        "col": st.sampled_from([(), ("x/y",), ("id", "path")]),
        "numeric": st.sampled_from([(), ("label",), ("split", "id")]),
    },
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.one_of(tables(), st.binary(max_size=80)), chosen=options)
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
            with FeatureStore.open(output) as store:
                assert store.rows == report.rows == len(store.ids) > 0
                store.verify()
