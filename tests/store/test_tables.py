"""CSV and TSV files as people save them."""

from __future__ import annotations

import codecs
import re
import subprocess
from pathlib import Path

import pytest

from ncm_cli.errors import InputError
from ncm_cli.store.sniff import WORDS, sniff
from ncm_cli.store.tables import read_table


def write(folder: Path, content: str | bytes, name: str = "m.csv") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def test_reads_columns_rows_and_line_numbers(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, "id,label\n\na,cat\nb,dog\n"))
    assert table.columns == ("id", "label")
    assert table.rows == [{"id": "a", "label": "cat"}, {"id": "b", "label": "dog"}]
    assert list(table.line_numbers) == [3, 4]
    assert len(table) == 2
    assert table.column("label") == ["cat", "dog"]


def test_a_byte_order_mark_is_no_part_of_the_first_name(tmp_path: Path) -> None:
    """pandas-dev/pandas#4793."""
    plain = read_table(write(tmp_path, "id,label\n1,é\n"))
    marked = read_table(write(tmp_path, codecs.BOM_UTF8 + "id,label\n1,é\n".encode(), "bom.csv"))
    assert marked.columns == plain.columns == ("id", "label")
    assert marked.rows == plain.rows


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_separator_is_found(tmp_path: Path, delimiter: str) -> None:
    """dathere/datapusher-plus#256."""
    lines = [["id", "label", "note"], ["1", "cat", "0.5"], ["2", "dog", "a b"]]
    table = read_table(write(tmp_path, "\n".join(delimiter.join(line) for line in lines)))
    assert table.delimiter == delimiter
    assert table.rows[1] == {"id": "2", "label": "dog", "note": "a b"}


def test_decimal_commas_and_quoted_separators_do_not_mislead(tmp_path: Path) -> None:
    """dathere/datapusher-plus#256."""
    table = read_table(write(tmp_path, 'id;value;"a,b,c,d"\n1;0,5;"x;y"\n2;1,5;z\n'))
    assert table.columns == ("id", "value", "a,b,c,d")
    assert table.rows[0] == {"id": "1", "value": "0,5", "a,b,c,d": "x;y"}


def test_another_separator_is_named_by_the_columns_found(tmp_path: Path) -> None:
    """dathere/datapusher-plus#256."""
    table = read_table(write(tmp_path, "id:label\n1:cat\n"))
    with pytest.raises(InputError, match="no column named 'label'") as caught:
        table.column("label", option="--label-col")
    assert "id:label" in str(caught.value)
    assert "only one column was found" in str(caught.value)


def test_ids_are_text(tmp_path: Path) -> None:
    """apache/arrow#46853."""
    table = read_table(write(tmp_path, "id,label\n001,a\n01,a\n1,a\n1e3,a\n1.0,a\n"))
    assert table.column("id") == ["001", "01", "1", "1e3", "1.0"]


def test_words_for_nothing_stay_words(tmp_path: Path) -> None:
    """pandas-dev/pandas#10647."""
    words = ["NA", "null", "nan", "None", "N/A", "", "#N/A", "TRUE", "-inf"]
    body = "".join(f"{word},x\n" for word in words)
    assert read_table(write(tmp_path, "id,label\n" + body)).column("id") == words


@pytest.mark.parametrize("header", [",id,label", "Unnamed: 0,id,label", " ,id,label", "id,label,"])
def test_a_saved_index_is_ignored(tmp_path: Path, header: str) -> None:
    """mindsdb_python_sdk#86."""
    values = {"id": "7", "label": "cat"}
    row = ",".join(values.get(name, "0") for name in header.split(","))
    table = read_table(write(tmp_path, f"{header}\n{row}\n"))
    assert table.columns == ("id", "label")
    assert table.rows == [values]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_endings(tmp_path: Path, end: str) -> None:
    table = read_table(write(tmp_path, end.join(["id,label", "a,cat", "", "b,dog", ""])))
    assert table.column("id") == ["a", "b"]
    assert list(table.line_numbers) == [2, 4]


def test_a_quoted_field_may_hold_line_breaks_quotes_and_the_separator(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, 'id,note\n1,"two\nlines, and ""quotes"""\n2,"x\r\ny"\n'))
    assert table.column("note") == ['two\nlines, and "quotes"', "x\r\ny"]
    assert list(table.line_numbers) == [2, 4]


def test_blanks_around_names_and_values_are_dropped(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, 'id , label\n1, "a cat"\n2,dog \t\n'))
    assert table.columns == ("id", "label")
    assert table.column("label") == ["a cat", "dog"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        (" \n\n", "is empty"),
        ("id,label\n", "a header and no rows"),
        (",,\n1,2,3\n", "names no column"),
        ("id,label,id\n1,2,3\n", "used twice"),
        ("id,label\n1,a\n2\n", "row 2 has 1 fields where the header has 2"),
        ("id,label\n1,a\n2,b,c\n", "row 2 has 3 fields where the header has 2"),
        ('id,label\n1,"never closed\n2,b\n', "can't be read"),
        ('id,label\n1,"a"b\n', "can't be read"),
        ("id,label\n1,a\0b\n", "NUL"),
        ("id,label\n1," + "x" * 200_000 + "\n", "can't be read"),
        (b"PK\x03\x04rest", "isn't a text file"),
        (b"\x89HDF\r\n\x1a\n", "isn't a text file"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(InputError, match=message) as caught:
        read_table(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_wide_encodings_are_named(tmp_path: Path, encoding: str) -> None:
    path = write(tmp_path, "id,label\n1,cat\n".encode(encoding))
    with pytest.raises(InputError, match="isn't UTF-8") as caught:
        read_table(path)
    assert "iconv" in str(caught.value)


def test_latin_1_is_refused_with_its_place(tmp_path: Path) -> None:
    path = write(tmp_path, "id,label\n1,cat\n2,café\n".encode("latin-1"))
    with pytest.raises(InputError, match="isn't UTF-8") as caught:
        read_table(path)
    assert "byte 0xe9 at position 20, line 3" in str(caught.value)


def test_folders_devices_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder"):
        read_table(tmp_path)
    with pytest.raises(InputError, match="is a device"):
        read_table("/dev/zero")
    with pytest.raises(InputError, match="can't be read"):
        read_table(tmp_path / "absent.csv")
    with pytest.raises(InputError, match="can't be read"):
        read_table(tmp_path / ("x" * 300))
    with pytest.raises(InputError, match="pairs file can't be read"):
        read_table("a\0b", what="pairs file")


def test_an_unknown_column_lists_those_there_and_the_nearest(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, "img_id,img_filename,y,split,place,place_filename\n1,a,0,0,1,b\n"))
    with pytest.raises(InputError, match="no column named 'img_filname'") as caught:
        table.column("img_filname", option="--path-col")
    assert "did you mean 'img_filename'?" in str(caught.value)
    assert "img_id, img_filename, y, split, place, place_filename" in str(caught.value)


def test_a_mark_written_twice_is_no_part_of_the_first_name(tmp_path: Path) -> None:
    """pandas-dev/pandas#4793."""
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbf\xef\xbb\xbfid,label\na,x\n")
    assert read_table(path).columns == ("id", "label")


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize(
    ("above", "separator"),
    [
        (["sep=;"], ";"),
        (["SEP=,"], ","),
        (['"sep=\t"'], "\t"),
        (["sep=\t"], "\t"),
        (["sep=;;; "], ";"),
        (["sep=:"], ":"),
        (["sep=;"], ","),
        (["# made by a tool, in 2024"], ","),
        (["#made by a tool; in 2024", "", "#", "# id, path"], ";"),
        (["# comment", "sep=|"], "|"),
        (["2"], ","),
        (["2"], " "),
        (["# 2 rows", "2"], "\t"),
    ],
)
def test_lines_above_the_header_are_no_part_of_the_table(
    tmp_path: Path, above: list[str], separator: str, mark: str, end: str
) -> None:
    """PowerShell/PowerShell#7776."""
    lines = [separator.join(row) for row in (["id", "path"], ["1", "a.png"], ["#2", "b.png"])]
    table = read_table(write(tmp_path, mark + end.join([*above, *lines])))
    assert table.rows == [{"id": "1", "path": "a.png"}, {"id": "#2", "path": "b.png"}]
    assert list(table.line_numbers) == [len(above) + 2, len(above) + 3]
    assert table.delimiter == separator
    assert any("taken for comments" in note for note in table.notes) == any(a[:1] == "#" for a in above)


@pytest.mark.parametrize("header", ["#id,path", "#,path"])
def test_a_header_that_starts_with_a_number_sign_is_a_header(tmp_path: Path, header: str) -> None:
    table = read_table(write(tmp_path, f"# comment, of two fields\n{header}\n1,a.png\n2,b.png\n"))
    assert table.columns == tuple(header.split(","))
    assert len(table) == 2


def test_a_number_above_one_column_is_its_name(tmp_path: Path) -> None:
    assert read_table(write(tmp_path, "5\n6\n7\n")).rows == [{"5": "6"}, {"5": "7"}]


@pytest.mark.parametrize(
    "text",
    [
        "   id   path    label\n    1   a.png   cat  \n   10   b.png   dog\n",
        "id path label\n1 a.png cat\n10 b.png dog",
        '"id" "path" "label"\n"1" "a.png" "cat"\n"10" "b.png" "dog"\n',
    ],
)
def test_columns_that_blanks_separate_are_read(tmp_path: Path, text: str) -> None:
    assert read_table(write(tmp_path, text)).rows == [
        {"id": "1", "path": "a.png", "label": "cat"},
        {"id": "10", "path": "b.png", "label": "dog"},
    ]


def test_quotation_marks_keep_blanks_together(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, '"path" "label"\n"my dog.png" "a dog"\nb.png cat\n'))
    assert table.rows == [{"path": "my dog.png", "label": "a dog"}, {"path": "b.png", "label": "cat"}]


def test_one_column_of_words_stays_one(tmp_path: Path) -> None:
    assert read_table(write(tmp_path, "caption\na dog\na cat\n")).rows[1] == {"caption": "a cat"}
    assert read_table(write(tmp_path, "the caption\na dog\nmy old cat\n")).columns == ("the caption",)


@pytest.mark.parametrize(
    ("text", "message", "parts"),
    [
        ("Exported by X\nid,path\n1,a\n2,b\n", "header has 1 fields where all rows have 2", ["line 1"]),
        ("Exported by, X\nid,path,y\n1,a,c\n2,b,c\n", "header has 2 fields where all rows", ["line 1"]),
        ("# c\nMy table\nid;path\n1;a\n2;b\n", "header has 1 fields", ["line 2", "semicolons", "sed '2d'"]),
        ("id,path\n1,a,\n2,b,\n", "header has 2 fields where all", ["all rows end with a separator"]),
        ('"id" "x"\n"1" "a" "b"\n"2" "a" "b"\n', "header has 2 fields where all", ["separated by blanks"]),
        ("id,path\n1,a\n# a comment\n2,b\n", "row 2 has 1 fields", ["line 3 is a comment: sed '3d'"]),
        ("id,size\n1,0,5\n2,0,7\n", "row 1 has 3 fields", ["decimal points and no other separators"]),
        ("id,size\n1,2\n2,0,7\n", "row 2 has 3 fields", ["decimal points and no other separators"]),
        ("3\nid,path\n1,a\n2,b\n", "2 rows where the line above the header says 3", ["write 2 there"]),
        ("# a\n# b\n", "comments and no header", []),
        ("# id,path\n1,a\n", "a header and no rows", ["taken for comments: 1"]),
        ('{"path": "a", "y": 1}\n{"path": "b", "y": 2}\n', "isn't a table", ["JSON"]),
        ("[\n  1\n]\n", "isn't a table", ["JSON"]),
        ("<!DOCTYPE html>\n<html>404</html>\n", "isn't a table", ["HTML"]),
    ],
)
def test_what_stands_around_a_table_is_named(
    tmp_path: Path, text: str, message: str, parts: list[str]
) -> None:
    """PowerShell/PowerShell#7776."""
    with pytest.raises(InputError, match=message) as caught:
        read_table(write(tmp_path, text))
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a.png 3\nb.png 4\n", ["look like a row's values", "put a line with the columns' names above them"]),
        ("0,1\n0,2\n", ["look like a row's values"]),
        ("# id,path\n1,a\n2,b\n", ["lines that start with # are taken for comments: 1"]),
        (
            "id path  city\n1 a.png  New York\n2 b.png  Rome\n",
            ["3 words in the header and 4 in row 1 (line 2)"],
        ),
        ("id    path  city\n1           Rome\n2 b.png  Rome\n", ["3 words in the header and 2 in row 1"]),
        ("name\na\n", ["only one column was found", "no commas"]),
    ],
)
def test_a_column_that_is_not_there_says_what_the_table_looks_like(
    tmp_path: Path, text: str, parts: list[str]
) -> None:
    table = read_table(write(tmp_path, text))
    with pytest.raises(InputError, match="no column named 'path'") as caught:
        table.column("path", option="--path-col")
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "Exported by X\nid,path\n1,a.png\n2,b.png\n",
        "# c\nMy table, of ours\r\nid;path\r\n1;a.png\r\n2;b.png\r\n",
        "id,path\n1,a.png\n# a comment\n2,b.png\n",
    ],
)
def test_the_advice_works(tmp_path: Path, text: str) -> None:
    """PowerShell/PowerShell#7776."""
    with pytest.raises(InputError) as caught:
        read_table(write(tmp_path, text, "OLD"))
    command = re.search(r"sed .* > NEW", str(caught.value))
    assert command
    subprocess.run(command[0], shell=True, cwd=tmp_path, check=True)
    assert read_table(tmp_path / "NEW").column("path") == ["a.png", "b.png"]


@pytest.mark.parametrize("first", ["BMI", "mp4_ftyp", "P1 ", "GIF89a"])
def test_a_header_that_begins_like_a_picture_is_read(tmp_path: Path, first: str) -> None:
    (tmp_path / "t.csv").write_text(f"{first},id\n1,2\n")
    assert read_table(tmp_path / "t.csv").columns == (first.strip(), "id")


def test_every_kind_that_is_told_has_words() -> None:
    heads = {
        "HDF5": b"\x89HDF\r\n\x1a\n",
        "safetensors": (200).to_bytes(8, "little") + b"{",
        "zip": b"PK\3\4",
        "npy": b"\x93NUMPY\1\0",
        "LFS": b"\xef\xbb\xbf version https://git-lfs",
        "HTML": b"\n<!doctype HTML>",
        "TIFF": b"MM\0*",
        "DICOM": bytes(128) + b"DICM",
    }
    assert {kind: sniff(head) for kind, head in heads.items()} == {kind: kind for kind in heads}
    assert all(WORDS.values()) and sniff(b"id,path\n") is None
