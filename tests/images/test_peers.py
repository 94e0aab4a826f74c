"""What clip-retrieval and img2dataset write is read as it is.

The writers here do what clip-retrieval's `NumpyWriter` (clip_inference/writer.py, 2.45) and img2dataset's
`WebDatasetSampleWriter`, `FilesSampleWriter` and `ParquetSampleWriter` (writer.py, 1.47) do.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import ncm_cli
from ncm_cli.errors import InputError, UsageError
from ncm_cli.main import run
from ncm_cli.store.features import FeatureStore

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pandas = pytest.importorskip("pandas")

DIM = 6


def clip_retrieval(
    folder: Path,
    sizes: list[int],
    *,
    names: str = "img/{part}-{row}.jpg",
    digits: int = 1,
) -> np.ndarray:
    """The files of partitions with these numbers of samples; returns the images' features (n, d)."""
    features = []
    for part, n in enumerate(sizes):
        vectors = np.random.default_rng(part).normal(size=(n, DIM)).astype(np.float16)
        number = str(part).zfill(digits)
        for kind in ("img", "text"):
            (folder / f"{kind}_emb").mkdir(parents=True, exist_ok=True)
            np.save(folder / f"{kind}_emb/{kind}_emb_{number}.npy", vectors if kind == "img" else -vectors)
        frame = pandas.DataFrame(
            {
                "image_path": [names.format(part=part, row=row) for row in range(n)],
                "caption": [f"a caption {row}" for row in range(n)],
                "label": [["cat", "dog"][row % 2] for row in range(n)],
                "exif": ["{" + "x" * 5000 + "}"] * n,
                "tags": [["a", "b"]] * n,
            }
        )
        if part == 1:
            frame["only_here"] = 7
        (folder / "metadata").mkdir(exist_ok=True)
        frame.to_parquet(folder / f"metadata/metadata_{number}.parquet")
        features.append(vectors)
    return np.concatenate(features).astype(np.float32)


def embedded(source: Path, **options: Any) -> FeatureStore:
    output = source.with_suffix(".h5")
    ncm_cli.run("embed", source=source, output=output, **options)
    store = ncm_cli.load(output)
    assert isinstance(store, FeatureStore)
    return store


class TestClipRetrieval:
    @pytest.mark.parametrize("digits", [1, 2, 4])
    def test_rows_are_in_the_order_of_the_numbers(self, digits: int, tmp_path: Path) -> None:
        sizes = [3, 5, *[1] * 10]
        X = clip_retrieval(tmp_path / "emb", sizes, digits=digits)
        store = embedded(tmp_path / "emb", encoder_name="ViT-B/32")
        assert np.array_equal(store.read(), X)
        assert list(store.ids) == [
            f"img/{part}-{row}.jpg" for part, n in enumerate(sizes) for row in range(n)
        ]
        assert store.column("only_here").text() == [""] * 3 + ["7"] * 5 + [""] * 10
        assert (store.label_column, list(store.columns)) == ("label", ["caption", "label", "only_here"])
        assert store.encoder["model"] == "ViT-B/32"

    def test_what_is_left_out_and_the_texts_are_named(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        X = clip_retrieval(tmp_path / "emb", [4])
        embedded(tmp_path / "emb")
        said = " ".join(capsys.readouterr().err.split())
        assert "columns that aren't short text are left out: 'tags', 'exif'" in said
        assert f"--from-array {tmp_path}/emb/text_emb takes them instead" in said
        texts = embedded(tmp_path / "emb", from_array=tmp_path / "emb/text_emb", fresh=True)
        assert np.array_equal(texts.read(), -X)

    def test_repeated_names_are_no_ids(self, tmp_path: Path) -> None:
        clip_retrieval(tmp_path / "emb", [2, 2], names="{row}")
        assert list(embedded(tmp_path / "emb").ids) == ["0", "1", "2", "3"]
        with pytest.raises(InputError, match="2 ids are used more than once"):
            embedded(tmp_path / "emb", id_col="image_path", fresh=True)

    def test_another_number_of_rows_names_the_file(self, tmp_path: Path) -> None:
        clip_retrieval(tmp_path / "emb", [3, 3])
        path = tmp_path / "emb/img_emb/img_emb_1.npy"
        np.save(path, np.load(path)[:2])
        with pytest.raises(InputError, match="different numbers of rows") as caught:
            embedded(tmp_path / "emb")
        assert caught.value.where == path
        assert "2 rows in it, 3 in metadata_1.parquet" in str(caught.value)

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        clip_retrieval(tmp_path / "emb", [2, 2, 2])
        shutil.copytree(tmp_path / "emb", tmp_path / "less")
        (tmp_path / "emb/img_emb/img_emb_1.npy").unlink()
        (tmp_path / "less/metadata/metadata_2.parquet").unlink()
        for name, missing in (("emb", "metadata_1.parquet"), ("less", "img_emb_2.npy")):
            with pytest.raises(InputError, match="arrays and metadata of other files") as caught:
                embedded(tmp_path / name)
            assert missing in str(caught.value)

    def test_other_widths_are_refused(self, tmp_path: Path) -> None:
        clip_retrieval(tmp_path / "emb", [2, 2])
        np.save(tmp_path / "emb/img_emb/img_emb_1.npy", np.zeros((2, 3)))
        with pytest.raises(InputError, match="different widths"):
            embedded(tmp_path / "emb")

    def test_options_of_images_are_refused(self, tmp_path: Path) -> None:
        clip_retrieval(tmp_path / "emb", [2])
        with pytest.raises(UsageError, match="--model can't be combined with --from-array"):
            embedded(tmp_path / "emb", model="pixels:4")

    def test_an_encoder_name_needs_features(self, tmp_path: Path) -> None:
        (tmp_path / "m.csv").write_text("path\na.png\n")
        with pytest.raises(UsageError, match="--encoder-name names what made --from-array"):
            embedded(tmp_path / "m.csv", encoder_name="x")

    def test_it_is_embedded_again_without_a_change(self, tmp_path: Path) -> None:
        clip_retrieval(tmp_path / "emb", [4])
        assert embedded(tmp_path / "emb").content_sha256 == embedded(tmp_path / "emb").content_sha256

    def test_a_recipe_notices_a_change(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        clip_retrieval(tmp_path / "emb", [4])
        recipe = tmp_path / "r.yaml"
        recipe.write_text("name: r\nsteps:\n  - embed: {source: emb, encoder_name: x, output: f.h5}\n")
        times = []
        for change in (False, False, True):
            if change:
                clip_retrieval(tmp_path / "emb", [5])
            assert run(["run", str(recipe), "--quiet"]) == 0
            times.append((tmp_path / "runs/r/f.h5").stat().st_mtime_ns)
        assert times[0] == times[1] < times[2]


KEYS = [f"{shard:05}{row:04}" for shard in range(2) for row in range(5)]
FAILED = {KEYS[2], KEYS[8]}


def jpeg(key: str) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (8, 6), (int(key) % 251, int(key) % 13 * 19, 40)).save(stream, "JPEG")
    return stream.getvalue()


def img2dataset(folder: Path, form: str) -> Path:
    """Two shards of five addresses, two of which failed."""
    fields = ["url", "caption", "label", "key", "status", "error_message", "exif", "tags"]
    schema = pa.schema([(name, pa.list_(pa.string()) if name == "tags" else pa.string()) for name in fields])
    folder.mkdir()
    for shard in range(2):
        rows = list(_addresses(shard))
        if form == "parquet":
            schema_of_form = schema.append(pa.field("jpg", pa.binary()))
            rows = [row | {"jpg": None if row["key"] in FAILED else jpeg(row["key"])} for row in rows]
        else:
            schema_of_form = schema
        pq.write_table(pa.Table.from_pylist(rows, schema_of_form), folder / f"{shard:05}.parquet")
        (folder / f"{shard:05}_stats.json").write_text(json.dumps({"count": 5, "successes": 4}))
        done = [row for row in rows if row["key"] not in FAILED]
        members = {
            f"{row['key']}.{suffix}": data
            for row in done
            for suffix, data in (
                ("jpg", jpeg(row["key"])),
                ("txt", row["caption"].encode()),
                ("json", json.dumps({k: v for k, v in row.items() if k != "jpg"}, indent=4).encode()),
            )
        }
        if form == "webdataset":
            with tarfile.open(folder / f"{shard:05}.tar", "w") as tar:
                for name, data in members.items():
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
        if form == "files":
            (folder / f"{shard:05}").mkdir()
            for name, data in members.items():
                (folder / f"{shard:05}" / name).write_bytes(data)
    return folder


def _addresses(shard: int) -> Iterator[dict[str, Any]]:
    for row in range(5):
        key = KEYS[shard * 5 + row]
        failed = key in FAILED
        yield {
            "url": f"https://example.org/{key}",
            "caption": f"caption of {key}",
            "label": ["cat", "dog"][row % 2],
            "key": key,
            "status": "failed_to_download" if failed else "success",
            "error_message": "HTTP Error 404" if failed else None,
            "exif": "{}",
            "tags": ["a"],
        }


class TestImg2dataset:
    @pytest.mark.parametrize("form", ["webdataset", "files", "parquet"])
    def test_all_its_forms_give_the_same_rows(self, form: str, tmp_path: Path) -> None:
        store = embedded(img2dataset(tmp_path / "out", form), model="pixels:4")
        kept = [key for key in KEYS if key not in FAILED]
        ids = [key if form == "parquet" else f"{key[:5]}/{key}" for key in kept]
        assert list(store.ids) == ids
        assert store.column("caption").text() == [f"caption of {key}" for key in kept]
        assert store.label_column == "label"
        assert store.files is not None
        digests = {key: hashlib.sha256(jpeg(key)).hexdigest() for key in kept}
        assert list(store.files.sha256) == list(digests.values())
        assert "tags" not in store.columns

    def test_failed_addresses_are_counted(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        embedded(img2dataset(tmp_path / "files", "files"), model="pixels:4")
        assert "2 of 10 addresses have no picture and are left out" in capsys.readouterr().err
        embedded(img2dataset(tmp_path / "rows", "parquet"), model="pixels:4")
        assert "2 of 10 rows have no picture and are left out" in capsys.readouterr().err

    def test_pictures_without_a_row_are_refused(self, tmp_path: Path) -> None:
        folder = img2dataset(tmp_path / "files", "files")
        (folder / "00000/strange.jpg").write_bytes(jpeg("1"))
        with pytest.raises(InputError, match="pictures that aren't in any table of downloads") as caught:
            embedded(folder, model="pixels:4")
        assert "00000/strange" in str(caught.value)

    def test_a_folder_of_archives_and_pictures_is_one_of_pictures(self, tmp_path: Path) -> None:
        folder = img2dataset(tmp_path / "out", "webdataset")
        (folder / "cat").mkdir()
        (folder / "cat/a.jpg").write_bytes(jpeg("1"))
        assert list(embedded(folder, model="pixels:4").ids) == ["cat/a.jpg"]

    def test_options_of_tables_are_refused(self, tmp_path: Path) -> None:
        for form, what in (("webdataset", "holds archives"), ("files", "is a folder")):
            folder = img2dataset(tmp_path / form, form)
            with pytest.raises(UsageError, match="--id-col is for tables") as caught:
                embedded(folder, model="pixels:4", id_col="key")
            assert what in str(caught.value)
