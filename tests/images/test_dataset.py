"""Pictures in the rows of Parquet and Arrow files, as Hugging Face's `datasets` and others write them."""

from __future__ import annotations

import io
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import ncm_cli
from ncm_cli.errors import InputError
from ncm_cli.images.dataset import data_files, read_dataset
from ncm_cli.images.manifest import ColumnNames, Manifest
from ncm_cli.images.paths import fetch
from ncm_cli.images.samples import DecodeError
from ncm_cli.store.features import FeatureStore

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def picture(seed: int) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 255, (9, 7, 3), dtype=np.uint8)
    return Image.fromarray(values)


def png(seed: int) -> bytes:
    stream = io.BytesIO()
    picture(seed).save(stream, "PNG")
    return stream.getvalue()


def table(rows: range, **more: Any) -> Any:
    images = [{"bytes": png(row), "path": None} for row in rows]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = {"image": pa.array(images, kind), "label": [["cat", "dog"][row % 2] for row in rows]}
    return pa.table({**columns, **more})


def read(path: Path, **names: Any) -> Manifest:
    return read_dataset(path, data_files(path), ColumnNames(**names))


def held(manifest: Manifest) -> list[bytes]:
    assert manifest.files is not None
    return [fetch(file.path) for file in manifest.files]


def embedded(source: Path, output: Path, **options: Any) -> FeatureStore:
    ncm_cli.run("embed", source=source, output=output, model="pixels:4", **options)
    store = ncm_cli.load(output)
    assert isinstance(store, FeatureStore)
    return store


def plain(folder: Path, rows: range) -> Path:
    """The same pictures as files."""
    for row in rows:
        place = folder / ["cat", "dog"][row % 2] / f"{row:03}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(png(row))
    return folder


class TestHuggingFace:
    @pytest.fixture
    def data(self) -> Any:
        datasets = pytest.importorskip("datasets")
        datasets.disable_progress_bars()
        features = datasets.Features(
            {
                "image": datasets.Image(),
                "kind": datasets.ClassLabel(names=["cat", "dog"]),
                "site": datasets.Value("string"),
                "boxes": datasets.Sequence(datasets.Value("float32")),
            }
        )

        def made(rows: range) -> Any:
            columns = {"image": [picture(row) for row in rows], "kind": [row % 2 for row in rows]}
            columns |= {"site": [f"s{row % 3}" for row in rows], "boxes": [[1.0, 2.0]] * len(rows)}
            return datasets.Dataset.from_dict(columns, features=features)

        return datasets.DatasetDict(train=made(range(25)), test=made(range(25, 35)))

    def check(self, manifest: Manifest) -> None:
        assert manifest.ids == [f"train/{row}" for row in range(25)] + [f"test/{row}" for row in range(10)]
        assert manifest.text["split"] == ["train"] * 25 + ["test"] * 10
        assert manifest.text["kind"] == [["cat", "dog"][row % 2] for row in range(35)]
        assert (manifest.label_column, manifest.split_column) == ("kind", "split")
        assert list(manifest.text) == ["kind", "site", "split"]
        assert [data == png(row) for row, data in enumerate(held(manifest))] == [True] * 35

    def test_what_save_to_disk_writes(self, data: Any, tmp_path: Path) -> None:
        data.save_to_disk(str(tmp_path / "disk"), num_shards={"train": 3, "test": 1})
        assert len(list((tmp_path / "disk/train").glob("*.arrow"))) == 3
        self.check(read(tmp_path / "disk"))
        one = read(tmp_path / "disk/test")
        assert one.ids == [str(row) for row in range(10)]
        assert "split" not in one.text

    def test_a_selection_is_saved_as_selected(self, data: Any, tmp_path: Path) -> None:
        data["train"].select([7, 3]).save_to_disk(str(tmp_path / "few"))
        assert held(read(tmp_path / "few")) == [png(7), png(3)]

    def test_parquet_as_on_the_hub(self, data: Any, tmp_path: Path) -> None:
        (tmp_path / "hub/data").mkdir(parents=True)
        for split, rows in (("train", range(25)), ("test", range(10))):
            for number in range(2):
                part = data[split].select(rows[number * len(rows) // 2 : (number + 1) * len(rows) // 2])
                part.to_parquet(tmp_path / f"hub/data/{split}-{number:05}-of-00002.parquet")
        manifest = read(tmp_path / "hub")
        assert sorted(manifest.ids) == sorted(
            [f"train/{row}" for row in range(25)] + [f"test/{row}" for row in range(10)]
        )
        seeds = {f"train/{row}": row for row in range(25)} | {f"test/{row}": 25 + row for row in range(10)}
        assert [png(seeds[id]) for id in manifest.ids] == held(manifest)

    def test_features_equal_those_of_the_files(self, data: Any, tmp_path: Path) -> None:
        data["train"].save_to_disk(str(tmp_path / "disk"))
        ours = embedded(tmp_path / "disk", tmp_path / "disk.h5")
        files = embedded(plain(tmp_path / "photos", range(25)), tmp_path / "files.h5")
        order = sorted(range(25), key=lambda row: (row % 2, row))
        assert np.array_equal(ours.read(order), files.read())
        assert ours.fingerprint == files.fingerprint

    def test_a_class_that_is_not_known_is_blank_and_refused_as_a_label(
        self, data: Any, tmp_path: Path
    ) -> None:
        unknown = data["test"].map(lambda row: {"kind": -1})
        unknown.save_to_disk(str(tmp_path / "disk"))
        with pytest.raises(InputError, match="labels are blank"):
            read(tmp_path / "disk")
        assert read(tmp_path / "disk", label_col="site").text["kind"] == [""] * 10

    def test_the_list_of_files_names_nothing_outside(self, data: Any, tmp_path: Path) -> None:
        data["test"].save_to_disk(str(tmp_path / "disk"))
        state = json.loads((tmp_path / "disk/state.json").read_text())
        for files in ([{"filename": "../secret.arrow"}], [], None, [{"filename": 3.5}]):
            (tmp_path / "disk/state.json").write_text(json.dumps(state | {"_data_files": files}))
            with pytest.raises(InputError, match="list of files can't be read"):
                read(tmp_path / "disk")


class TestRows:
    def test_ids_of_a_column_stay_with_their_rows(self, tmp_path: Path) -> None:
        pq.write_table(table(range(6), id=list("fedcba")), tmp_path / "a.parquet")
        manifest = read(tmp_path / "a.parquet")
        assert manifest.ids == list("fedcba")
        assert held(manifest) == [png(row) for row in range(6)]
        assert not manifest.numbered

    def test_repeated_ids_are_taken_by_no_one_but_who_asks(self, tmp_path: Path) -> None:
        pq.write_table(table(range(3), id=["a", "b", "a"]), tmp_path / "a.parquet")
        assert read(tmp_path / "a.parquet").ids == ["0", "1", "2"]
        with pytest.raises(InputError, match="1 id is used more than once"):
            read(tmp_path / "a.parquet", id_col="id")
        with pytest.raises(InputError, match="no column named 'ID'"):
            read(tmp_path / "a.parquet", id_col="ID")

    def test_files_are_in_the_order_of_their_numbers(self, tmp_path: Path) -> None:
        for number in (10, 9, 2):
            pq.write_table(table(range(number, number + 1)), tmp_path / f"train-{number}.parquet")
        assert held(read(tmp_path)) == [png(2), png(9), png(10)]
        assert read(tmp_path).text["split"] == ["train"] * 3

    def test_a_column_of_the_table_called_split_counts(self, tmp_path: Path) -> None:
        pq.write_table(table(range(2), split=["val", "test"]), tmp_path / "train.parquet")
        assert read(tmp_path).text["split"] == ["val", "test"]

    def test_rows_without_a_picture_are_counted_and_left_out(self, tmp_path: Path) -> None:
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        images = [{"bytes": png(0), "path": "x"}, None, {"bytes": None, "path": None}, {"bytes": png(3)}]
        for name, column in (
            ("struct", pa.array(images, kind)),
            ("bytes", pa.array([png(0), None, None, png(3)])),
        ):
            pq.write_table(pa.table({"image": column, "label": list("abcd")}), tmp_path / f"{name}.parquet")
            manifest = read(tmp_path / f"{name}.parquet")
            assert manifest.ids == ["0", "3"]
            assert manifest.text["label"] == ["a", "d"]
            assert held(manifest) == [png(0), png(3)]
            assert "2 of 4 rows have no picture and are left out" in manifest.notes

    def test_pictures_beside_the_table_are_found(self, tmp_path: Path) -> None:
        (tmp_path / "a.png").write_bytes(png(1))
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        images = [{"bytes": png(0), "path": "x"}, {"bytes": None, "path": "a.png"}]
        pq.write_table(pa.table({"image": pa.array(images, kind)}), tmp_path / "t.parquet")
        assert held(read(tmp_path / "t.parquet")) == [png(0), png(1)]
        (tmp_path / "a.png").unlink()
        with pytest.raises(InputError, match="1 of 1 image files can't be used") as caught:
            read(tmp_path / "t.parquet")
        assert "row 2: 'a.png' is missing" in str(caught.value)

    def test_several_columns_of_pictures_must_be_told_apart(self, tmp_path: Path) -> None:
        both = pa.table({"left": [png(0)], "right": [png(1)], "raw": [b"none"]})
        pq.write_table(both, tmp_path / "t.parquet")
        with pytest.raises(InputError, match="several columns of pictures"):
            read(tmp_path / "t.parquet")
        assert held(read(tmp_path / "t.parquet", path_col="right")) == [png(1)]
        with pytest.raises(InputError, match="no pictures in the column 'middle'"):
            read(tmp_path / "t.parquet", path_col="middle")
        pq.write_table(pa.table({"raw": [b"none"]}), tmp_path / "n.parquet")
        with pytest.raises(InputError, match="no column of pictures"):
            read(tmp_path / "n.parquet")

    def test_files_with_other_columns_are_refused(self, tmp_path: Path) -> None:
        pq.write_table(table(range(2)), tmp_path / "a.parquet")
        pq.write_table(table(range(2), more=["x", "y"]), tmp_path / "b.parquet")
        with pytest.raises(InputError, match="files of one data set with different columns"):
            read(tmp_path)

    def test_a_table_of_paths_is_a_manifest(self, tmp_path: Path) -> None:
        plain(tmp_path / "photos", range(2))
        paths = ["photos/cat/000.png", "photos/dog/001.png"]
        pq.write_table(pa.table({"path": paths, "label": ["cat", "dog"]}), tmp_path / "m.parquet")
        store = embedded(tmp_path / "m.parquet", tmp_path / "m.h5")
        assert list(store.ids) == paths
        pq.write_table(pa.table({"file": paths, "label": ["cat", "dog"]}), tmp_path / "n.parquet")
        assert embedded(tmp_path / "n.parquet", tmp_path / "n.h5", path_col="file").rows == 2


class TestReading:
    def test_any_order_and_any_number_of_threads_give_the_same_bytes(self, tmp_path: Path) -> None:
        pq.write_table(table(range(150)), tmp_path / "t.parquet", row_group_size=40)
        with pa.ipc.new_stream(tmp_path / "t.arrow", table(range(1)).schema) as stream:
            for start in range(0, 150, 50):
                stream.write_table(table(range(start, start + 50)))
        expected = [png(row) for row in range(150)]
        for name in ("t.parquet", "t.arrow"):
            manifest = read(tmp_path / name)
            assert manifest.files is not None
            order = random.Random(0).sample(range(150), 150)
            with ThreadPoolExecutor(8) as pool:
                for rows in (range(150), order):
                    found = pool.map(fetch, [manifest.files[row].path for row in rows])
                    assert list(found) == [expected[row] for row in rows]

    def test_a_file_of_record_batches_is_read_like_a_stream(self, tmp_path: Path) -> None:
        with pa.ipc.new_file(tmp_path / "t.arrow", table(range(1)).schema) as writer:
            writer.write_table(table(range(3)))
        assert held(read(tmp_path / "t.arrow")) == [png(row) for row in range(3)]

    @pytest.mark.parametrize("kind", ["parquet", "arrow"])
    def test_pictures_are_read_a_few_rows_at_a_time(self, kind: str, tmp_path: Path) -> None:
        rng, path = np.random.default_rng(0), tmp_path / f"t.{kind}"
        large = pa.table({"image": [png(0) + rng.bytes(100_000) for _ in range(400)]})
        if kind == "parquet":
            pq.write_table(large, path, row_group_size=40)  # a page holds up to 1,024 rows of a group
        else:
            with pa.ipc.new_stream(path, large.schema) as writer:
                writer.write_table(large)
        del large
        manifest, before = read(path), pa.total_allocated_bytes()
        assert manifest.files is not None
        most = 0
        for file in manifest.files:
            assert len(fetch(file.path)) > 100_000
            most = max(most, pa.total_allocated_bytes() - before)
        assert most < 20_000_000  # of 40 MB

    def test_a_row_that_is_gone_has_a_reason(self, tmp_path: Path) -> None:
        pq.write_table(table(range(3)), tmp_path / "t.parquet")
        manifest = read(tmp_path / "t.parquet")
        assert manifest.files is not None
        pq.write_table(table(range(2)), tmp_path / "t.parquet")
        with pytest.raises(DecodeError, match="row 2 of 2"):
            fetch(manifest.files[2].path)
        (tmp_path / "t.parquet").unlink()
        with pytest.raises(DecodeError, match="No such file"):
            fetch(manifest.files[0].path)

    def test_a_picture_that_is_none_is_a_failed_row(self, tmp_path: Path) -> None:
        images = [png(0), b"no picture", png(2)]
        pq.write_table(pa.table({"image": images, "label": list("aba")}), tmp_path / "t.parquet")
        store = embedded(tmp_path / "t.parquet", tmp_path / "t.h5", max_failures=1)
        assert list(store.ids) == ["0", "2"]
        assert [row.id for row in store.failed] == ["1"]

    @pytest.mark.parametrize("kind", ["parquet", "arrow"])
    def test_a_damaged_file_is_one_clear_error(self, kind: str, tmp_path: Path) -> None:
        path = tmp_path / f"t.{kind}"
        if kind == "parquet":
            pq.write_table(table(range(4)), path)
        else:
            with pa.ipc.new_stream(path, table(range(1)).schema) as writer:
                writer.write_table(table(range(4)))
        whole, rng, refused = path.read_bytes(), random.Random(1), 0
        for _ in range(150):
            damaged = bytearray(whole)
            damaged[rng.randrange(len(whole))] = rng.randrange(256)
            path.write_bytes(damaged if rng.random() < 0.8 else damaged[: rng.randrange(len(whole))])
            try:
                files = read(path).files
            except InputError as error:
                refused += 1
                assert error.where is not None
                continue
            for file in files or ():
                try:
                    fetch(file.path)
                except DecodeError as error:
                    assert error.reason
        assert refused > 20


class TestGoingOn:
    def test_a_changed_picture_alone_is_embedded_again(self, tmp_path: Path) -> None:
        source, output = tmp_path / "t.parquet", tmp_path / "t.h5"
        pq.write_table(table(range(8)), source)
        first = embedded(source, output).read()
        again = ncm_cli.run("embed", source=source, output=output, model="pixels:4")
        assert (again["written"], again["reused"], again["new"]) == (False, 8, 0)
        changed = table(range(8)).to_pylist()
        changed[3]["image"]["bytes"] = png(99)
        pq.write_table(pa.Table.from_pylist(changed, table(range(1)).schema), source)
        again = ncm_cli.run("embed", source=source, output=output, model="pixels:4")
        assert (again["written"], again["reused"], again["new"]) == (True, 7, 1)
        with FeatureStore(output) as store:
            same = (store.read() == first).all(axis=1)
        assert same.tolist() == [row != 3 for row in range(8)]

    def test_time_alone_changes_nothing_and_verify_compares(self, tmp_path: Path) -> None:
        source, output = tmp_path / "t.parquet", tmp_path / "t.h5"
        pq.write_table(table(range(8)), source)
        embedded(source, output)
        os.utime(source, ns=(1, 10**18))
        again = ncm_cli.run("embed", source=source, output=output, model="pixels:4")
        assert (again["reused"], again["new"]) == (8, 0)

    def test_a_moved_table_and_another_store_lend_their_rows(self, tmp_path: Path) -> None:
        pq.write_table(table(range(8)), tmp_path / "t.parquet")
        embedded(tmp_path / "t.parquet", tmp_path / "t.h5")
        (tmp_path / "t.parquet").rename(tmp_path / "moved.parquet")
        for output, reuse in (("t.h5", None), ("other.h5", tmp_path / "t.h5")):
            again = ncm_cli.run(
                "embed",
                source=tmp_path / "moved.parquet",
                output=tmp_path / output,
                model="pixels:4",
                reuse=reuse,
            )
            assert (again["reused"], again["new"]) == (8, 0)

    def test_shards_make_the_whole_store(self, tmp_path: Path) -> None:
        pq.write_table(table(range(40)), tmp_path / "t.parquet", row_group_size=15)
        whole = embedded(tmp_path / "t.parquet", tmp_path / "whole.h5")
        for shard in ("0/2", "1/2"):
            ncm_cli.run(
                "embed",
                source=tmp_path / "t.parquet",
                output=tmp_path / "parts.h5",
                model="pixels:4",
                shard=shard,
                batch_size=8,
            )
        with FeatureStore(tmp_path / "parts.h5") as parts:
            assert parts.content_sha256 == whole.content_sha256

    def test_features_made_elsewhere_go_with_a_data_set(self, tmp_path: Path) -> None:
        (tmp_path / "d").mkdir()
        pq.write_table(table(range(4)), tmp_path / "d/train-00000-of-00001.parquet")
        X = np.eye(4, dtype=np.float32)
        ncm_cli.run("embed", source=tmp_path / "d", from_array=X, output=tmp_path / "x.h5")
        with FeatureStore(tmp_path / "x.h5") as store:
            assert list(store.ids) == [f"train/{row}" for row in range(4)]
            assert store.column("label").text() == ["cat", "dog", "cat", "dog"]
