"""A tar archive gives the rows of the folder that it was made of, and what it loses is said."""

from __future__ import annotations

import io
import json
import os
import random
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ncm_cli.errors import InputError
from ncm_cli.images.archives import read_archives
from ncm_cli.images.folder import read_folder
from ncm_cli.images.manifest import ColumnNames, Manifest
from ncm_cli.images.paths import expanded, fetch
from ncm_cli.images.reading import read_image
from ncm_cli.images.request import EncoderRequest, Preprocess
from ncm_cli.images.samples import DecodeError

FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)


def write(path: Path, *names: str, content: Callable[[str], bytes] = str.encode) -> Path:
    """An archive of files whose content is their name."""
    with tarfile.open(path, "w") as tar:
        for name in names:
            member, data = tarfile.TarInfo(name), content(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def read(path: Path | str) -> Manifest:
    return read_archives(str(path), ColumnNames())


def held(manifest: Manifest) -> list[bytes]:
    assert manifest.files is not None
    return [fetch(file.path) for file in manifest.files]


def ids_of(path: Path) -> list[str]:
    manifest = read(path)
    assert all(id.startswith(f"{path.stem}/") for id in manifest.ids)
    return [id.removeprefix(f"{path.stem}/") for id in manifest.ids]


@pytest.mark.parametrize(
    ("names", "ids"),
    [
        (("a.jpg", "b.jpg", "v1.5.jpg", "v1.6.jpg"), ["a", "b", "v1.5", "v1.6"]),
        (("2024.05.01-12.00.jpg",), ["2024"]),
        (("2024.05.01-12.00.jpg", "2024.05.02-12.00.jpg"), ["2024.05.01-12.00", "2024.05.02-12.00"]),
        (("a.left.png", "a.right.png"), ["a.left", "a.right"]),
        (("a.png", "a.jpg", "IMG"), ["IMG", "a.jpg", "a.png"]),
        (("pics/._a.jpg", "pics/a.jpg", "__MACOSX/pics/._a.jpg", ".ipynb_checkpoints/x.jpg"), ["pics/a"]),
        (("./a.jpg", "./b/.c.jpg"), ["./a"]),
        (("b.v2/a.jpg", "b.v2/c.jpg"), ["b.v2/a", "b.v2/c"]),
    ],
)
def test_every_image_of_a_folder_is_a_row(tmp_path: Path, names: tuple[str, ...], ids: list[str]) -> None:
    """webdataset/webdataset#237, huggingface/datasets#7144: names with several dots."""
    assert ids_of(write(tmp_path / "t.tar", *names)) == ids


@pytest.mark.parametrize(
    ("names", "rows", "left"),
    [
        (("a.jpg", "b.jpg", "a.cls", "b.cls"), {"a": "a.cls", "b": "b.cls"}, ""),
        (("a.left.png", "a.cls", "a.png"), {"a": "a.cls"}, "further images of samples (1)"),
        (("a.left.png", "a.right.png", "a.cls"), {"a.left": "a.cls", "a.right": "a.cls"}, ""),
        (("v1.5.jpg", "v1.5.cls", "v1.6.jpg", "v1.6.cls"), {"v1.5": "v1.5.cls", "v1.6": "v1.6.cls"}, ""),
        (("a.jpg", "a.cls", "a.txt", "README", "b.cls"), {"a": "a.cls"},
         "files without suffix (1), .txt files (1), samples without an image (1)"),
        (("a.jpg", "a.cls", "__meta__/x.json", ".b.jpg"), {"a": "a.cls"},
         ".json files (1), hidden files (1)"),
    ],
)  # fmt: skip
def test_samples_keep_their_labels_and_the_rest_is_counted(
    tmp_path: Path, names: tuple[str, ...], rows: dict[str, str], left: str
) -> None:
    """webdataset/webdataset#407: members of a sample that don't follow each other."""
    manifest = read(write(tmp_path / "t.tar", *names))
    assert dict(zip(manifest.ids, manifest.text["cls"], strict=True)) == {
        f"t/{key}": label for key, label in rows.items()
    }
    said = [note for note in manifest.notes if "left out" in note]
    for part in left.split(", ") if left else ():
        assert part in said[0]
    assert len(said) == bool(left)


def test_entries_that_no_column_takes_are_counted(tmp_path: Path) -> None:
    entries = {"box": [1], "none": None, "long": "x" * 5000, "place": "sea"}
    manifest = read(
        write(tmp_path / "t.tar", "a.jpg", "a.json", content=lambda _: json.dumps(entries).encode())
    )
    assert manifest.text == {"place": ["sea"]}
    (note,) = (note for note in manifest.notes if "left out" in note)
    assert "'box'" in note and "'long'" in note and "'none'" not in note


def test_links_are_what_they_lead_to(tmp_path: Path) -> None:
    """mxmlnkn/ratarmount#28: hard links, and symbolic links to members."""
    folder = tmp_path / "pics"
    (folder / "b").mkdir(parents=True)
    (folder / "a.jpg").write_bytes(b"a")
    os.link(folder / "a.jpg", folder / "z.jpg")
    (folder / "b" / "up.jpg").symlink_to("../a.jpg")
    (folder / "b" / "chain.jpg").symlink_to("up.jpg")
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        tar.add(folder, "pics")
        for name, target in (("gone.jpg", "x"), ("round.jpg", "round.jpg"), ("out.jpg", "/etc/passwd")):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            tar.addfile(link)
        pipe = tarfile.TarInfo("pipe.jpg")
        pipe.type = tarfile.FIFOTYPE
        tar.addfile(pipe)
    manifest = read(tmp_path / "t.tar")
    assert manifest.ids == ["t/pics/a", "t/pics/b/chain", "t/pics/b/up", "t/pics/z"]
    assert held(manifest) == [b"a"] * 4
    (note,) = (note for note in manifest.notes if "left out" in note)
    assert "links to no file in the archive (3)" in note and "members that aren't plain files (1)" in note


@pytest.mark.parametrize("padding", [0, 512, 10_000 * 512])
def test_archives_one_after_the_other_are_all_read(tmp_path: Path, padding: int) -> None:
    """vasi/pixz#6: `cat a.tar b.tar`."""
    path = write(tmp_path / "t.tar", "a.jpg")
    path.write_bytes(path.read_bytes() + bytes(padding) + write(tmp_path / "u.tar", "b.jpg").read_bytes())
    manifest = read(path)
    assert manifest.ids == ["t/a", "t/b"] and held(manifest) == [b"a.jpg", b"b.jpg"]
    assert not manifest.warnings


TREES = st.dictionaries(
    st.tuples(
        st.sampled_from(["", "cat/", "dog/", ".git/", "v1.5/"]),
        st.text("ab.1é ", min_size=1, max_size=6).filter(
            lambda name: name.strip(".") and name == name.strip()
        ),
        st.sampled_from([".jpg", ".PNG", "", ".txt", ".tar.gz"]),
    ),
    st.sampled_from(["file", "file", "file", "link"]),
    min_size=1,
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TREES, st.sampled_from(FORMATS), st.randoms(use_true_random=False), st.booleans(), st.booleans())
def test_a_folder_and_its_archive_give_the_same_rows(
    tmp_path: Path, tree: dict[Any, str], form: int, order: random.Random, dotted: bool, hard: bool
) -> None:
    folder = tmp_path / f"folder{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    names = list({"".join(name): kind for name, kind in tree.items()}.items())
    first = folder / "1st.jpg"
    first.write_bytes(b"first")
    written = ["1st.jpg"]
    for name, kind in names:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if path.exists():
            continue
        if kind == "file":
            path.write_bytes(name.encode())
        else:
            os.link(first, path) if hard else path.symlink_to("../1st.jpg" if "/" in name else "1st.jpg")
        written.append(name)
    order.shuffle(written)
    archive = folder.with_suffix(".tar")
    with tarfile.open(archive, "w", format=form) as tar:
        for name in written:
            tar.add(folder / name, f"./{name}" if dotted else name)
    known = read_folder(folder, None, ColumnNames())
    found = read(archive)
    assert held(found) == held(known)  # so many, in this order
    for id, whole in zip(found.ids, known.ids, strict=True):
        name = id.removeprefix(f"{archive.stem}/").removeprefix("./")
        assert whole == name or whole.startswith(f"{name}.")
    assert found.text.get("label") == known.text.get("label")


def test_folders_are_labels_as_on_disk(tmp_path: Path) -> None:
    manifest = read(write(tmp_path / "t.tar", "dog/1.jpg", "cat/1.jpg", "cat/2.txt"))
    assert (manifest.label_column, manifest.text["label"]) == ("label", ["cat", "dog"])
    assert "the folders' names are the labels" in manifest.notes
    manifest = read(write(tmp_path / "t.tar", "pics/dog/1.jpg", "pics/cat/1.jpg"))
    assert manifest.text["label"] == ["cat", "dog"]
    assert read(write(tmp_path / "t.tar", "pics/1.jpg", "pics/2.jpg")).text == {}
    assert read(write(tmp_path / "t.tar", "a/b/1.jpg", "c/d/2.jpg")).text == {}


def test_a_cut_anywhere_is_an_error_a_warning_or_a_failed_row(tmp_path: Path) -> None:
    """Archives that end at a boundary, or within a member that isn't read."""
    whole = write(tmp_path / "w.tar", *(f"{i}.{kind}" for i in range(6) for kind in ("jpg", "cls", "txt")))
    data, path = whole.read_bytes(), tmp_path / "t.tar"
    rows, used = read(whole), data.index(bytes(1024))
    for cut in [*range(0, used + 513, 256), used + 1]:
        path.write_bytes(data[:cut])
        try:
            manifest = read(path)
            unread = 0
            for place in [file.path for file in manifest.files or ()]:
                try:
                    fetch(place)
                except DecodeError:
                    unread += 1
        except InputError:
            continue
        assert unread or len(manifest) <= len(rows), cut
        assert manifest.warnings, cut


def test_a_cut_after_the_first_closing_block_is_warned_of(tmp_path: Path) -> None:
    whole = write(tmp_path / "w.tar", "a.jpg", "b.jpg")
    (tmp_path / "t.tar").write_bytes(whole.read_bytes()[:2560])
    assert "after the first of the two empty blocks" in read(tmp_path / "t.tar").warnings[0]
    assert not read(whole).warnings


@pytest.mark.parametrize("format", FORMATS)
def test_names_that_are_not_utf8_are_rows_that_fail_as_in_a_folder(tmp_path: Path, format: int) -> None:
    folder, name = tmp_path / "f", os.fsdecode(b"caf\xe9")
    with tarfile.open(tmp_path / "f.tar", "w", format=format) as tar:
        for label in (name, "dog"):
            (folder / label).mkdir(parents=True)
            (folder / label / "1.jpg").write_bytes(b"x")
            tar.add(folder / label / "1.jpg", f"{label}/1.jpg")
    on_disk, archived = read_folder(folder, None, ColumnNames()), read(tmp_path / "f.tar")
    assert archived.ids == ["f/caf\\xe9/1", "f/dog/1"] and on_disk.ids == ["caf\\xe9/1.jpg", "dog/1.jpg"]
    assert archived.text["label"] == on_disk.text["label"] == ["caf\\xe9", "dog"]
    for manifest in (on_disk, archived):
        assert manifest.files is not None
        assert (
            "isn't UTF-8" in read_image(manifest.files[0], Preprocess(EncoderRequest(), (np.asarray,))).reason
        )


def test_a_flip_in_a_header_is_an_error(tmp_path: Path) -> None:
    data = bytearray(write(tmp_path / "t.tar", "a.jpg", "b.jpg").read_bytes())
    for at in range(0, 512, 7):
        data[at] ^= 2
        (tmp_path / "t.tar").write_bytes(data)
        with pytest.raises(InputError, match="an archive that can't be read"):
            read(tmp_path / "t.tar")
        data[at] ^= 2


def header(**changes: Any) -> bytearray:
    member = tarfile.TarInfo("a.jpg")
    for name, value in changes.items():
        setattr(member, name, value)
    return bytearray(member.tobuf(tarfile.GNU_FORMAT))


def summed(head: bytearray) -> bytes:
    head[148:156] = b"%06o\0 " % (sum(head[:148]) + 256 + sum(head[156:]))
    return bytes(head)


def hostile() -> dict[str, bytes]:
    octal = header()
    octal[124:136] = b"-0000001000\0"
    digits = tarfile.TarInfo("x")
    digits.type, digits.size = tarfile.XHDTYPE, 1 << 20
    chain = b"".join(bytes(header(type=tarfile.GNUTYPE_LONGNAME, size=1)) + bytes(512) for _ in range(3000))
    plain = bytes(header(size=0))
    return {
        "a size below zero": bytes(header(size=-1024)),
        "a size below zero in octal digits": summed(octal),
        "a size that no file has": bytes(header(size=1 << 63)),
        "a link below zero": bytes(header(type=tarfile.SYMTYPE, size=-512)) + plain,
        "a long name of gigabytes": bytes(header(type=tarfile.GNUTYPE_LONGNAME, size=1 << 33)),
        "an extended header of gigabytes": bytes(header(type=tarfile.XHDTYPE, size=1 << 33)),
        "an extended header of digits": digits.tobuf() + b"1" * (1 << 20) + plain,
        "headers without end": chain + plain,
        "a JSON of gigabytes": bytes(header(name="a.json", size=1 << 33)),
    }


@pytest.mark.parametrize("kind", hostile())
def test_what_would_hang_or_fill_memory_is_refused(tmp_path: Path, kind: str) -> None:
    with (tmp_path / "t.tar").open("wb") as stream:
        stream.write(write(tmp_path / "u.tar", "a.jpg").read_bytes()[:1024] + hostile()[kind])
        stream.truncate(1 << 34)
    start = time.monotonic()
    with pytest.raises(InputError, match="an archive that can't be read"):
        read(tmp_path / "t.tar")
    assert time.monotonic() - start < 2


def test_a_pipe_is_no_archive(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t.tar")
    with pytest.raises(InputError, match="an archive that can't be read"):
        read(tmp_path / "t.tar")


@pytest.mark.parametrize("pattern", ["{0..99999999999}.tar", "{0..999}{0..999}{0..9}", "{a,b}" * 3000])
def test_braces_for_too_many_files_are_refused(pattern: str) -> None:
    with pytest.raises(InputError, match="too many files"):
        expanded(pattern)
