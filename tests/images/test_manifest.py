"""Manifests and folders: ids, columns, labels, and files that must be there."""

from __future__ import annotations

import os
import random
import re
import subprocess
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ncm_cli.errors import InputError, UsageError
from ncm_cli.images.folder import read_folder
from ncm_cli.images.manifest import ColumnNames, Manifest, is_number, ordered_categories, read_manifest
from ncm_cli.store.columns import Column, NumericColumn
from ncm_cli.store.tables import plain_numbers


def manifest_of(folder: Path, text: str, *, files: bool = False, **choice: Any) -> Manifest:
    path = folder / "m.csv"
    path.write_text(text, encoding="utf-8")
    return read_manifest(path, ColumnNames(**choice), root=None, with_files=files)


def column(manifest: Manifest, name: str) -> Column:
    found = manifest.columns(range(len(manifest)))[name]
    assert isinstance(found, Column)
    return found


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")


def test_default_names_keep_every_other_column(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, "id,path,label,split,place\na,1.png,cat,train,land\nb,2.png,dog,test,\n")
    assert manifest.ids == ["a", "b"]
    assert (manifest.label_column, manifest.split_column) == ("label", "split")
    made = manifest.columns([0, 1])
    assert list(made) == ["label", "split", "place"]
    assert column(manifest, "place").text() == ["land", ""]
    assert column(manifest, "place").codes.tolist() == [0, -1]


def test_ids_stay_distinct_text(tmp_path: Path) -> None:
    """apache/arrow#46853, pandas-dev/pandas#10647."""
    manifest = manifest_of(tmp_path, "id,label\n001,a\n01,a\n1,a\nNA,b\nnull,b\nnan,b\n")
    assert manifest.ids == ["001", "01", "1", "NA", "null", "nan"]


def test_a_blank_id_is_refused_with_its_row(tmp_path: Path) -> None:
    """pandas-dev/pandas#10647."""
    with pytest.raises(InputError, match="an id is blank") as caught:
        manifest_of(tmp_path, "id,label\na,x\n,x\nb,x\n ,x\n")
    assert "row 2 (line 3), row 4 (line 5)" in str(caught.value)


def test_repeated_ids_are_refused_and_listed(tmp_path: Path) -> None:
    """neural-cherche#4, D-SCRIPT#12."""
    with pytest.raises(InputError, match="2 ids are used more than once") as caught:
        manifest_of(tmp_path, "id,path\n7,a.png\n8,b.png\n7,c.png\n9,d.png\n9,d.png\n")
    assert "'7' in row 1 (line 2), row 3 (line 4)" in str(caught.value)
    assert "'9' in row 4 (line 5), row 5 (line 6)" in str(caught.value)


def test_a_saved_index_is_no_id_and_no_column(tmp_path: Path) -> None:
    """mindsdb_python_sdk#86."""
    manifest = manifest_of(tmp_path, ",id,label\n0,a,cat\n1,b,dog\n")
    assert manifest.ids == ["a", "b"]
    assert list(manifest.text) == ["label"]


def test_a_store_without_labels_is_told(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, "id,y\na,1\n")
    assert manifest.label_column is None
    assert any("no column named 'label'" in note for note in manifest.notes)


def test_without_an_id_column_the_path_is_the_id(tmp_path: Path) -> None:
    touch(tmp_path, "a.png", "b.png")
    manifest = manifest_of(tmp_path, "path,label\na.png,x\nb.png,y\n", files=True)
    assert manifest.ids == ["a.png", "b.png"]
    assert any("'path' is the id" in note for note in manifest.notes)


def test_zero_and_one_as_floats_are_classes(tmp_path: Path) -> None:
    """scikit-learn/scikit-learn#16987."""
    manifest = manifest_of(tmp_path, "id,label\na,0.0\nb,1.0\nc,1.0\nd,0.0\n")
    assert column(manifest, "label").categories == ("0.0", "1.0")


def test_half_stars_are_classes(tmp_path: Path) -> None:
    """scikit-learn/scikit-learn#16987."""
    body = "".join(f"x{i},{(i % 10 + 1) / 2}\n" for i in range(100))
    assert len(column(manifest_of(tmp_path, "id,label\n" + body), "label").categories) == 10


@pytest.mark.parametrize("count", [3, 400])
def test_measurements_as_classes_are_refused_with_the_row(tmp_path: Path, count: int) -> None:
    """scikit-learn/scikit-learn#16987."""
    values = [1.0, *np.random.default_rng(3).random(count - 1).round(3)]
    body = "".join(f"x{i},{value}\n" for i, value in enumerate(values))
    with pytest.raises(InputError, match="measurements, not classes") as caught:
        manifest_of(tmp_path, "id,label\n" + body)
    assert "row 2 (line 3)" in str(caught.value)
    assert "--numeric label" in str(caught.value)


def test_a_blank_label_is_refused_with_the_row(tmp_path: Path) -> None:
    """scikit-learn/scikit-learn#16987."""
    with pytest.raises(InputError, match="1 label is blank") as caught:
        manifest_of(tmp_path, "id,label\na,0.0\nb,\nc,1.0\n")
    assert "row 2 (line 3)" in str(caught.value)


def test_numeric_columns_hold_numbers_and_gaps(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, "id,y,age\na,0.13,3\nb,0.52,\n", label_col="y", numeric=("y", "age"))
    made = manifest.columns([0, 1])
    assert isinstance(made["y"], NumericColumn)
    assert made["y"].values.tolist() == [0.13, 0.52]
    assert np.isnan(made["age"].values[1])  # type: ignore[union-attr]
    assert manifest.label_column == "y"


@pytest.mark.parametrize("word", ["nan", "inf", "1_000", "0x10", "1,5,2", "ten"])
def test_a_numeric_column_with_a_word_is_refused(tmp_path: Path, word: str) -> None:
    with pytest.raises(InputError, match="other than numbers") as caught:
        manifest_of(tmp_path, f'id,y\na,1\nb,"{word}"\n', numeric=("y",))
    assert "row 2 (line 3)" in str(caught.value)


def test_one_order_of_classes_for_all_rows(tmp_path: Path) -> None:
    """scikit-learn/scikit-learn#10324."""
    manifest = manifest_of(tmp_path, "id,label,split\na,fox,train\nb,cat,train\nc,dog,test\nd,fox,test\n")
    assert column(manifest, "label").categories == ("cat", "dog", "fox")
    assert column(manifest, "label").codes.tolist() == [2, 0, 1, 2]


@pytest.mark.parametrize(
    ("values", "order"),
    [
        (["10", "9", "-1"], ("-1", "9", "10")),
        (["1", "01", "1.0"], ("01", "1", "1.0")),
        (["10", "9", "a"], ("10", "9", "a")),
        (["b", "", "a"], ("a", "b")),
        (["1e3", "2"], ("2", "1e3")),
        (["é", "z", "E"], ("E", "z", "é")),
    ],
)
def test_categories_are_sorted_and_numbers_by_value(values: list[str], order: tuple[str, ...]) -> None:
    assert ordered_categories(values) == order


def test_what_counts_as_a_number() -> None:
    assert all(map(is_number, ["0", "-1.5", "+2.", ".5", "1e-3"]))
    assert not any(map(is_number, ["", "nan", "inf", "1e999", "1_0", "٣", "1 2"]))


@pytest.mark.parametrize(
    ("header", "choice"),
    [
        (
            "img_id,img_filename,y,split,place,place_filename",
            {"id_col": "img_id", "path_col": "img_filename", "label_col": "y"},
        ),
        (
            "img_id,filename,y,split,a,place_filename",
            {"id_col": "img_id", "path_col": "filename", "label_col": "y"},
        ),
    ],
)
def test_waterbirds_columns_by_name(tmp_path: Path, header: str, choice: dict[str, str]) -> None:
    """bit-ml/bee."""
    body = "1,a.jpg,0,0,1,/p/x.jpg\n2,b.jpg,1,1,0,/p/y.jpg\n3,c.jpg,1,2,1,/p/z.jpg\n"
    manifest = manifest_of(tmp_path, f"{header}\n{body}", **choice)
    assert column(manifest, "split").categories == ("0", "1", "2")
    assert manifest.split_column == "split"
    assert manifest.label_column == "y"
    assert len(manifest.text) == 4


def test_an_unknown_column_lists_those_there(tmp_path: Path) -> None:
    """bit-ml/bee."""
    text = "img_id,img_filename,y,split,place,place_filename\n1,a,0,0,1,b\n"
    for choice in (
        {"label_col": "labels"},
        {"split_col": "splits"},
        {"numeric": ("yy",)},
    ):
        with pytest.raises(InputError, match="no column named") as caught:
            manifest_of(tmp_path, text, id_col="img_id", **choice)
        assert "img_id, img_filename, y, split, place, place_filename" in str(caught.value)


def test_minus_one_and_one_make_four_groups(tmp_path: Path) -> None:
    """face-attribute-prediction#5."""
    body = "".join(f"{i},{a},{b}\n" for i, (a, b) in enumerate([(-1, -1), (-1, 1), (1, -1), (1, 1)]))
    manifest = manifest_of(tmp_path, "id,Blond_Hair,Male\n" + body, label_col="Blond_Hair")
    hair, male = column(manifest, "Blond_Hair"), column(manifest, "Male")
    assert hair.categories == male.categories == ("-1", "1")
    assert len(set(zip(hair.codes.tolist(), male.codes.tolist(), strict=True))) == 4


@pytest.mark.parametrize(("written", "on_disk"), [("NFC", "NFD"), ("NFD", "NFC"), ("NFC", "NFC")])
def test_names_are_found_in_either_normal_form(tmp_path: Path, written: str, on_disk: str) -> None:
    """attention-ocr#101."""
    touch(tmp_path, unicodedata.normalize(on_disk, "dossier é/café 1.jpg"))
    text = unicodedata.normalize(written, "id,path\na,dossier é/café 1.jpg\n")
    files = manifest_of(tmp_path, text, files=True).files
    assert files is not None
    assert Path(files[0].path).read_bytes() == b"x"


def test_windows_paths_are_read(tmp_path: Path) -> None:
    touch(tmp_path, "images/sub/a.jpg")
    files = manifest_of(tmp_path, "id,path\na,images\\sub\\a.jpg\n", files=True).files
    assert files is not None
    assert [file.path for file in files] == [str(tmp_path / "images/sub/a.jpg")]


def test_every_missing_file_is_listed(tmp_path: Path) -> None:
    """acoustic-multiclass-training#164."""
    touch(tmp_path, *(f"{i}.png" for i in range(40) if i % 2))
    (tmp_path / "38.png").mkdir()
    body = "".join(f"x{i},{i}.png\n" for i in range(40))
    with pytest.raises(InputError, match="20 of 40 image files") as caught:
        manifest_of(tmp_path, "id,path\n" + body, files=True)
    for i in range(0, 38, 2):
        assert f"row {i + 1} (line {i + 2}): '{i}.png' is missing" in str(caught.value)
    assert "'38.png' is a folder" in str(caught.value)


def test_an_absolute_path_ignores_the_root(tmp_path: Path) -> None:
    """acoustic-multiclass-training#164."""
    touch(tmp_path, "root/a.png", "elsewhere/b.png")
    path = tmp_path / "m.csv"
    path.write_text(f"id,path\na,a.png\nb,{tmp_path}/elsewhere/b.png\n")
    files = read_manifest(path, ColumnNames(), root=tmp_path / "root").files
    assert files is not None
    assert [file.path for file in files] == [str(tmp_path / "root/a.png"), str(tmp_path / "elsewhere/b.png")]


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "loop.png").symlink_to("loop.png")
    long = "x" * 300
    text = f"id,path\na,pipe.png\nb,loop.png\nc,{long}\nd,\ne,/dev/zero\n"
    with pytest.raises(InputError, match="5 of 5 image files") as caught:
        manifest_of(tmp_path, text, files=True)
    for word in ("isn't a regular file", "symbolic links", "too long", "'' is blank"):
        assert word in str(caught.value)


def test_a_folder_gives_sorted_relative_ids_and_columns(tmp_path: Path) -> None:
    touch(tmp_path, "photo/dog/2.jpg", "photo/dog/10.PNG", "art/cat/x", "art/.hidden/y.jpg", "art/cat/.z.jpg")
    touch(tmp_path, "readme.txt")
    manifest = read_folder(tmp_path, ("domain", "label"), ColumnNames())
    assert manifest.ids == ["art/cat/x", "photo/dog/10.PNG", "photo/dog/2.jpg"]
    assert column(manifest, "domain").text() == ["art", "photo", "photo"]
    assert manifest.label_column == "label"
    assert any("readme.txt" in note for note in manifest.notes)


def test_a_folder_without_layout_is_flat_or_by_label(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.jpg", "b/2.jpg")
    assert column(read_folder(tmp_path, None, ColumnNames()), "label").text() == ["a", "b"]
    assert read_folder(tmp_path / "a", None, ColumnNames()).text == {}


@pytest.mark.parametrize(
    ("names", "layout", "message"),
    [
        (["a/1.jpg", "2.jpg"], ("label",), "don't lie where the layout says"),
        (["a/1.jpg"], ("domain", "label"), "don't lie where the layout says"),
        (["a/b/1.jpg"], None, "the meaning of the folders isn't given"),
        (["notes.txt"], None, "no images in the folder"),
        ([], None, "no images in the folder"),
    ],
)
def test_folders_of_another_shape_are_refused(
    tmp_path: Path, names: list[str], layout: tuple[str, ...] | None, message: str
) -> None:
    touch(tmp_path, *names)
    with pytest.raises(InputError, match=message):
        read_folder(tmp_path, layout, ColumnNames())


def test_no_layout_is_advised_for_images_that_lie_in_no_folder(tmp_path: Path) -> None:
    touch(tmp_path, "1.jpg", "2.jpg")
    with pytest.raises(InputError, match="2 under 0 folders") as caught:
        read_folder(tmp_path, ("label",), ColumnNames())
    assert "in a manifest" in str(caught.value) and "domain/label" not in str(caught.value)
    assert len(read_folder(tmp_path, None, ColumnNames()).ids) == 2


def test_links_to_folders_are_followed_and_loops_refused(tmp_path: Path) -> None:
    touch(tmp_path, "data/a/1.jpg")
    (tmp_path / "root").mkdir()
    (tmp_path / "root/b").symlink_to(tmp_path / "data/a")
    assert read_folder(tmp_path / "root", None, ColumnNames()).ids == ["b/1.jpg"]
    (tmp_path / "data/a/up").symlink_to(tmp_path / "data")
    with pytest.raises(InputError, match="leads back"):
        read_folder(tmp_path / "data", None, ColumnNames())


def test_names_that_are_not_utf8_are_listed_with_the_bytes_shown(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/f"
    os.makedirs(folder + b"/\xff")  # noqa: PTH103
    for name in (b"caf\xe9.jpg", b"\xff/1.jpg", b"good.jpg"):
        with open(folder + b"/" + name, "wb"):  # noqa: PTH123
            pass
    manifest = read_folder(tmp_path / "f", None, ColumnNames())
    assert manifest.ids == ["caf\\xe9.jpg", "good.jpg", "\\xff/1.jpg"]
    assert manifest.files is not None
    assert [file.size for file in manifest.files] == [-1, 0, -1]


def test_options_of_tables_are_refused_for_folders(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.jpg")
    with pytest.raises(UsageError, match="--id-col is for tables"):
        read_folder(tmp_path, None, ColumnNames(id_col="id"))
    with pytest.raises(InputError, match="no folder level named 'place'"):
        read_folder(tmp_path, None, ColumnNames(label_col="place"))


def test_links_that_lead_nowhere_are_listed(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.jpg", "a/2.mpo")
    (tmp_path / "a/loop.jpg").symlink_to("loop.jpg")
    (tmp_path / "a/gone.jpg").symlink_to("nowhere.jpg")
    manifest = read_folder(tmp_path, None, ColumnNames())
    assert manifest.ids == ["a/1.jpg", "a/2.mpo", "a/gone.jpg", "a/loop.jpg"]
    assert manifest.files is not None
    assert [file.size for file in manifest.files] == [1, 1, -1, -1]


def test_text_that_no_store_takes_is_refused_with_its_row(tmp_path: Path) -> None:
    long = "é" * 2049
    with pytest.raises(InputError, match="'caption' holds text that is too long") as caught:
        manifest_of(tmp_path, f"id,caption\na,x\nb,{long}\n")
    assert "row 2 (line 3)" in str(caught.value)
    assert "leave that column out of the table" in str(caught.value)
    assert manifest_of(tmp_path, f"id,caption\na,{long[:-1]}\n").ids == ["a"]
    with pytest.raises(InputError, match="'id' holds text that is too long"):
        manifest_of(tmp_path, f"id,caption\n{long},x\n")


@pytest.mark.parametrize(
    ("labels", "shown"),
    [
        (["cat", "Cat", "dog"], "'Cat' and 'cat'"),
        (["traffic light", "traffic  light", "x"], "'traffic  light' and 'traffic light'"),
        (["trafficlight", "traffic light", "x"], "'traffic light' and 'trafficlight'"),
        ([unicodedata.normalize(form, "café") for form in ("NFC", "NFD")], r"'cafe\u0301' and 'caf\xe9'"),
        (["dog\u00a0house", "dog house"], r"'dog house' and 'dog\xa0house'"),
        (["dog", "do\u200bg"], r"'dog' and 'do\u200bg'"),
        (["Straße", "STRASSE", "a", "A", "b"], "'A' and 'a', 'STRASSE' and 'Straße'"),
    ],
)
def test_labels_that_look_alike_are_warned_of_with_the_pairs(
    tmp_path: Path, labels: list[str], shown: str
) -> None:
    rows = "".join(f"{i},{label}\n" for i, label in enumerate(labels))
    (warning,) = manifest_of(tmp_path, f"id,label\n{rows}").warnings
    assert "column 'label' that differ only in case, blanks or Unicode form" in warning
    assert f"{shown}; write" in warning
    for label in labels:
        touch(tmp_path, f"photos/{label}/a.png")
    assert read_folder(tmp_path / "photos", ("label",), ColumnNames()).warnings == (warning,)


def test_alike_names_of_domains_are_warned_of_once_each_and_what_is_no_category_is_not(
    tmp_path: Path,
) -> None:
    table = "id,label,place,split,note,size\n" + "".join(
        f"{i},{label},{place},{split},{note},{size}\n"
        for i, (label, place, split, note, size) in enumerate(
            [
                ("a", "Land", "train", "A dog", "1E1"),
                ("b", "land", "Train", "a dog", "1e1"),
                ("a", "land", "test", "x", "2"),
                ("b", "Land", "test", "y", "2"),
            ]
        )
    )
    manifest = manifest_of(tmp_path, table, numeric=("size",))
    assert ["'Land' and 'land'" in warning for warning in manifest.warnings] == [True]
    assert manifest_of(tmp_path, "id,label\n1,cat\n2,dog\n3,cats\n").warnings == ()


def test_of_many_alike_labels_the_first_are_listed(tmp_path: Path) -> None:
    rows = "".join(f"{i}{case},{case}{i}\n" for i in range(1000) for case in "xX")
    (warning,) = manifest_of(tmp_path, f"id,label\n{rows}").warnings
    assert "and 988 more" in warning
    assert len(warning) < 500


@pytest.mark.parametrize("separator", [";", ","])
def test_decimal_commas_are_named_and_the_advice_works(tmp_path: Path, separator: str) -> None:
    quote = '"' if separator == "," else ""
    lines = ["id,size,label".replace(",", separator)]
    lines += [separator.join((str(i), f"{quote}{i},5{quote}", f"{quote}0,{i}1{quote}")) for i in range(9)]
    text = "\n".join(lines) + "\n"
    with pytest.raises(InputError, match="column 'size' holds decimal commas") as caught:
        manifest_of(tmp_path, text, numeric=("size",), label_col="size")
    assert "'0,5' in row 1 (line 2)" in str(caught.value)
    assert "write decimal points" in str(caught.value)
    with pytest.raises(InputError, match="column 'label' holds measurements") as caught:
        manifest_of(tmp_path, text)
    assert "write decimal points" in str(caught.value)
    assert "--numeric label" in str(caught.value)
    command = re.search(r"sed .* > NEW", str(caught.value))
    assert bool(command) == (separator == ";")
    if command:
        (tmp_path / "OLD").write_text(text)
        subprocess.run(command[0], shell=True, cwd=tmp_path, check=True)
        found = manifest_of(tmp_path, (tmp_path / "NEW").read_text(), numeric=("label", "size"))
        values = found.columns(range(9))["size"]
        assert isinstance(values, NumericColumn)
        assert values.values.tolist() == [i + 0.5 for i in range(9)]


@pytest.mark.parametrize(
    ("values", "said", "advice"),
    [
        (["12,500", "1,234"], "may be decimal, or between thousands", "12500 or 12.500 for '12,500'"),
        (["12,500", "980"], "may be decimal, or between thousands", "12500 or 12.500 for '12,500'"),
        (["12,500", "1,234,567"], "separators of thousands", "12500 for '12,500'"),
        (["12,500", "7.25"], "separators of thousands", "12500 for '12,500'"),
        (["12,500.75", "3"], "separators of thousands", "12500.75 for '12,500.75'"),
        (["3,5", "1.234,5"], "separators of thousands", "3.5 for '3,5', 1234.5 for '1.234,5'"),
        (["3,5", "1.234"], "separators of thousands", "3.5 for '3,5', 1234 for '1.234'"),
        (["1.234.567", "5"], "separators of thousands", "1234567 for '1.234.567'"),
        (["3,5", "1.234", "12.5"], "may be decimal, or between thousands", "1234 or 1.234 for '1.234'"),
        (["3,5", "1,234"], "decimal commas", "write decimal points"),
        (["3,5", "0,125", "-1,2e-3"], "decimal commas", "write decimal points"),
        (["3,5", "1.5"], "decimal commas", "write decimal points"),
        (["3,5", "x"], "something other than numbers", "leave it out of --numeric"),
        (["1e400", "3,5"], "numbers that float64 can't hold", "leave it out of --numeric"),
        (["1,00,000"], "something other than numbers", "leave it out of --numeric"),
    ],
)
@pytest.mark.parametrize("separator", [";", ","])
def test_separators_of_thousands_are_no_decimal_commas(
    tmp_path: Path, separator: str, values: list[str], said: str, advice: str
) -> None:
    """SheetJS/sheetjs#2239: advice to write points would divide by a thousand."""
    lines = ["id;size", *(f'{i};"{value}"' for i, value in enumerate(values))]
    with pytest.raises(InputError, match=f"column 'size' holds .*{said}") as caught:
        manifest_of(tmp_path, "\n".join(lines).replace(";", separator), numeric=("size",))
    assert advice in str(caught.value.fix)
    assert ("sed" in str(caught.value.fix)) == (said == "decimal commas" and separator == ";")


def test_a_command_for_decimal_commas_leaves_other_columns_alone(tmp_path: Path) -> None:
    for other in ("12,500", "a1,2.png", "1,5"):
        text = f"id;size;other\n1;3,5;{other}\n2;0,5;{other}\n"
        with pytest.raises(InputError, match="decimal commas") as caught:
            manifest_of(tmp_path, text, numeric=("size",))
        assert ("sed" in str(caught.value.fix)) == (other == "1,5")


@pytest.mark.parametrize(
    "write", [str, lambda n: f"{n:,}", lambda n: f"{n:,}".translate(str.maketrans(",.", ".,"))]
)
def test_numbers_in_either_style_are_never_read_as_others(write: Callable[[float], str]) -> None:
    rng = random.Random(0)
    for _ in range(300):
        numbers = [round(rng.uniform(-1, 1) * 10 ** rng.randint(0, 9), rng.randint(0, 4)) for _ in range(3)]
        found = plain_numbers([write(number) for number in numbers])
        assert found is not None
        meant = {write(number): number for number in numbers}
        assert all(text == "" or float(text) == meant[value] for value, text in found.items()), found


def test_celeba_lists_are_manifests(tmp_path: Path) -> None:
    names = ["5_o_Clock_Shadow", "Blond_Hair", "Male"]
    rows = ["000001.jpg -1  1  1 ", "000002.jpg  1 -1 -1 "]
    touch(tmp_path, "000001.jpg", "000002.jpg")
    manifest = manifest_of(
        tmp_path,
        "\n".join(["2", " ".join(names) + " ", *rows]) + "\n",
        files=True,
        path_col="id",
        label_col="Blond_Hair",
    )
    assert manifest.ids == ["000001.jpg", "000002.jpg"]
    assert manifest.text == {
        "5_o_Clock_Shadow": ["-1", "1"],
        "Blond_Hair": ["1", "-1"],
        "Male": ["1", "-1"],
    }
    assert any("the first column has no name" in note for note in manifest.notes)
