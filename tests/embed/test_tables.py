"""CSV and TSV files as people save them."""

from __future__ import annotations

import codecs
from pathlib import Path

import pytest

from ncm_cli.errors import InputError
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


def test_c18_a_byte_order_mark_is_no_part_of_the_first_name(tmp_path: Path) -> None:
    plain = read_table(write(tmp_path, "id,label\n1,é\n"))
    marked = read_table(write(tmp_path, codecs.BOM_UTF8 + "id,label\n1,é\n".encode(), "bom.csv"))
    assert marked.columns == plain.columns == ("id", "label")
    assert marked.rows == plain.rows


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_c19_the_separator_is_found(tmp_path: Path, delimiter: str) -> None:
    lines = [["id", "label", "note"], ["1", "cat", "0.5"], ["2", "dog", "a b"]]
    table = read_table(write(tmp_path, "\n".join(delimiter.join(line) for line in lines)))
    assert table.delimiter == delimiter
    assert table.rows[1] == {"id": "2", "label": "dog", "note": "a b"}


def test_c19_decimal_commas_and_quoted_separators_do_not_mislead(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, 'id;value;"a,b,c,d"\n1;0,5;"x;y"\n2;1,5;z\n'))
    assert table.columns == ("id", "value", "a,b,c,d")
    assert table.rows[0] == {"id": "1", "value": "0,5", "a,b,c,d": "x;y"}


def test_c19_another_separator_is_named_by_the_columns_found(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, "id:label\n1:cat\n"))
    with pytest.raises(InputError, match="no column named 'label'") as caught:
        table.column("label", option="--label-col")
    assert "id:label" in str(caught.value)
    assert "only one column was found" in str(caught.value)


def test_c21_ids_are_text(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, "id,label\n001,a\n01,a\n1,a\n1e3,a\n1.0,a\n"))
    assert table.column("id") == ["001", "01", "1", "1e3", "1.0"]


def test_c23_words_for_nothing_stay_words(tmp_path: Path) -> None:
    words = ["NA", "null", "nan", "None", "N/A", "", "#N/A", "TRUE", "-inf"]
    body = "".join(f"{word},x\n" for word in words)
    assert read_table(write(tmp_path, "id,label\n" + body)).column("id") == words


@pytest.mark.parametrize("header", [",id,label", "Unnamed: 0,id,label", " ,id,label", "id,label,"])
def test_c25_a_saved_index_is_ignored(tmp_path: Path, header: str) -> None:
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


def test_c18_a_mark_written_twice_is_no_part_of_the_first_name(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbf\xef\xbb\xbfid,label\na,x\n")
    assert read_table(path).columns == ("id", "label")
