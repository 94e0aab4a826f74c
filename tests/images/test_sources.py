"""Tar archives of samples and paths with a scheme are embedded like the same pictures in a folder."""

from __future__ import annotations

import errno
import functools
import hashlib
import http.server
import io
import json
import os
import shutil
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ncm_cli.errors import InputError, UsageError, as_written
from ncm_cli.images.archives import read_archives
from ncm_cli.images.manifest import ColumnNames
from ncm_cli.images.options import parse_shard
from ncm_cli.images.paths import expanded, is_remote
from ncm_cli.main import run
from ncm_cli.store.features import FeatureStore

from .conftest import contents


def png(seed: int) -> bytes:
    stream = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def write_archives(folder: Path, count: int = 3, each: int = 4) -> str:
    """Archives of samples with classes and entries; the last sample of each has no entries."""
    for shard in range(count):
        with tarfile.open(folder / f"data-{shard:03d}.tar", "w") as tar:
            for i in range(each):
                # Names over 100 bytes have a header of their own.
                key = f"{'a' * 120 if i == 1 else 'dir'}/{i:04d}"
                add(tar, f"{key}.png", png(10 * shard + i))
                add(tar, f"{key}.cls", str(i % 2).encode())
                if i < each - 1:
                    entries = {"place": f"p{i}", "night": bool(i), "n": 0.5 * i, "box": [1, 2], "none": None}
                    add(tar, f"{key}.json", json.dumps(entries).encode())
    return str(folder / f"data-{{000..{count - 1:03d}}}.tar")


def test_braces_stand_for_what_a_shell_makes_of_them() -> None:
    assert expanded("a-{08..11}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
    assert expanded("{b,a}-{9..10}") == ["b-9", "b-10", "a-9", "a-10"]
    assert expanded("{t-{0..1},v}.tar") == ["t-0.tar", "v.tar", "t-1.tar"]
    assert expanded("{a}.tar") == ["{a}.tar"]


def test_archives_are_embedded_like_a_folder(pictures: Any) -> None:
    source = write_archives(pictures.folder)
    for shard in range(3):
        for i in range(4):
            (pictures.folder / f"{shard}-{i}.png").write_bytes(png(10 * shard + i))
    pictures.rows = [{"id": f"{s}{i}", "path": f"{s}-{i}.png"} for s in range(3) for i in range(4)]
    pictures.write()
    pictures.embed(output=pictures.folder / "folder.h5")
    report = pictures.embed(source=Path(source), numeric=("n",))
    with FeatureStore(pictures.output) as store, FeatureStore(pictures.folder / "folder.h5") as plain:
        np.testing.assert_array_equal(store.read(), plain.read())
        assert store.files is not None and plain.files is not None
        assert store.files.sha256 == plain.files.sha256
        assert store.files.path[4] == f"{pictures.folder}/data-001.tar#dir/0000.png@0"
        assert store.ids[:2] == ("data-000/dir/0000", f"data-000/{'a' * 120}/0001")
        assert (store.label_column, store.column("cls").text()) == ("cls", ["0", "1", "0", "1"] * 3)
        assert list(store.columns) == ["cls", "place", "night", "n"]
        assert store.column("place").text() == ["p0", "p1", "p2", ""] * 3
        assert store.column("night").text()[:4] == ["false", "true", "true", ""]
        np.testing.assert_array_equal(store.column("n").values[:4], [0, 0.5, 1, np.nan])
    before = contents(pictures.output)
    assert not pictures.embed(source=Path(source), numeric=("n",)).written
    # An archive that was written anew with one other picture: the content decides.
    with tarfile.open(pictures.folder / "data-001.tar", "w") as tar:
        for i in (3, 2, 0):
            key = f"dir/{i:04d}"
            add(tar, f"{key}.png", png(99 if i == 2 else 10 + i))
            add(tar, f"{key}.cls", b"1")
    changed = pictures.embed(source=Path(source), numeric=("n",))
    assert (report.new, changed.new, changed.reused, changed.removed) == (12, 1, 10, 1)
    assert contents(pictures.output)["content"] != before["content"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # it leaves a file open
def test_webdatasets_own_writer_and_reader_agree(pictures: Any) -> None:
    wds = pytest.importorskip("webdataset")
    path = pictures.folder / "w-0.tar"
    with wds.TarWriter(str(path)) as sink:
        for i in range(3):
            sample = {"__key__": f"k{i}", "left.png": png(9), "cls": i, "json": {"x": i}}
            sink.write(sample if i == 1 else sample | {"png": png(i)})
    samples = list(wds.WebDataset(str(path), shardshuffle=False))
    pictures.embed(source=path)
    with FeatureStore(pictures.output) as store:
        assert list(store.ids) == [f"w-0/{sample['__key__']}" for sample in samples]
        assert store.column("cls").text() == [sample["cls"].decode() for sample in samples]
        images = [sample.get("png", sample["left.png"]) for sample in samples]
        assert store.files is not None
        assert list(store.files.sha256) == [hashlib.sha256(image).hexdigest() for image in images]


def test_bad_archives_say_what_is_wrong(pictures: Any) -> None:
    source = write_archives(pictures.folder, count=1)
    path = pictures.folder / "data-000.tar"
    with pytest.raises(InputError, match="2 of 3 archives can't be read"):
        pictures.embed(source=pictures.folder / "data-{000..002}.tar")
    whole = path.read_bytes()
    at = whole.index(png(2))
    path.write_bytes(whole[:at] + bytes(len(png(2))) + whole[at + len(png(2)) :])
    report = pictures.embed(source=Path(source))
    assert [row.id for row in report.failed] == ["data-000/dir/0002"]
    with tarfile.open(path, "w") as tar:
        add(tar, "a.png", png(0))
        add(tar, "b.png", png(1))
    path.write_bytes(path.read_bytes()[:1600])
    (failed,) = pictures.embed(source=path, fresh=True).failed
    assert (failed.id, failed.reason) == ("data-000/b", "cannot be read: the archive ends early")
    path.write_bytes(b"\x1f\x8b" + whole)
    with pytest.raises(InputError, match="an archive that can't be read"):
        pictures.embed(source=path)


@pytest.mark.slow
def test_a_recipe_takes_archives_and_remote_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_archives(tmp_path)
    step = "name: r\nsteps:\n  - embed: {source: '%s', model: 'pixels:2', output: f.h5}\n"
    Path("r.yaml").write_text(step % "data-{000..002}.tar")
    assert run(["run", "r.yaml", "--out", "out"]) == run(["run", "r.yaml", "--out", "out"]) == 0
    assert "1 of 1 steps were up to date" in capsys.readouterr().err
    shutil.copy("data-000.tar", "data-002.tar")
    assert run(["run", "r.yaml", "--out", "out"]) == 0
    assert "its inputs changed" in capsys.readouterr().err
    Path("data-001.tar").unlink()
    assert run(["run", "r.yaml", "--out", "out"]) == 3
    assert "data-001.tar" in capsys.readouterr().err
    Path("r.yaml").write_text(step % "s3://bucket/set")
    assert run(["run", "r.yaml", "--dry-run"]) == 0
    assert "ncm embed s3://bucket/set " in capsys.readouterr().out


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The pictures' folder over HTTP; what is called broken ends early."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if "broken" in self.path:
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b"half")
            elif "forbidden" in self.path:
                self.send_error(403)
            else:
                super().do_GET()

        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Handler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


@pytest.mark.slow
def test_pictures_of_a_server_are_embedded_and_those_that_fail_are_told(
    make_pictures: Any, server: str
) -> None:
    pytest.importorskip("aiohttp")
    pictures = make_pictures(6)
    pictures.embed(output=pictures.folder / "local.h5")
    for i in range(6):
        pictures.rows[i]["path"] = f"{server}/{i}.png"
    for name in ("gone", "broken", "forbidden"):
        pictures.rows.append(pictures.rows[0] | {"id": name, "path": f"{server}/{name}.png"})
    (pictures.folder / "broken.png").write_bytes(b"")
    pictures.write()
    report = pictures.embed(max_failures=3)
    failed = {row.id: row.reason for row in report.failed}
    assert list(failed) == ["gone", "broken", "forbidden"] and failed["gone"] == "no such file"
    assert "403" in failed["forbidden"]
    with pytest.raises(InputError, match="a remote folder can't be read"):
        pictures.embed(source=Path("http://127.0.0.1:1/x"))
    first, local = contents(pictures.output), contents(pictures.folder / "local.h5")
    assert first["features"] == local["features"] and first["files"][3] == local["files"][3]
    os.utime(pictures.picture("2.png"), (2e9, 2e9))  # servers tell the time in seconds
    again = pictures.embed(max_failures=3)
    assert (again.new, again.reused) == (1, 5)
    assert contents(pictures.output)["features"] != first["features"]


@pytest.fixture
def memory() -> Iterator[Any]:
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


@pytest.mark.slow
def test_folders_archives_and_manifests_with_a_scheme(pictures: Any, memory: Any) -> None:
    for i in range(6):
        memory.pipe(f"/set/{'cat' if i % 2 else 'dog'}/{i}.png", png(i))
    memory.pipe("/set/cat/notes.txt", b"no image")
    source = Path("memory://set")
    assert as_written(source) == "memory://set"
    report = pictures.embed(source=source)
    assert report.new == 6 and not pictures.embed(source=source).written
    with FeatureStore(pictures.output) as store:
        assert store.ids[0] == "cat/1.png" and store.column("label").counts() == {"cat": 3, "dog": 3}
        assert store.files is not None and store.files.path[0] == "memory://set/cat/1.png"
        features = store.read()
    lent = pictures.embed(source=source, output=pictures.folder / "e.h5", reuse=pictures.output)
    assert (lent.new, lent.reused) == (0, 6)
    with FeatureStore(pictures.folder / "e.h5") as store:
        assert store.files is not None and (store.files.size > 0).all()
    assert pictures.embed(source=source, output=pictures.folder / "e.h5").reused == 6
    memory.pipe("/set/cat/1.png", png(77))
    assert pictures.embed(source=source).new == 1
    pictures.rows = [{"id": str(i), "path": f"{'cat' if i % 2 else 'dog'}/{i}.png"} for i in (3, 5, 0, 2, 4)]
    pictures.write()
    pictures.embed(root=Path("memory://set"), output=pictures.folder / "b.h5", shard="1/2", batch_size="2")
    pictures.embed(root=Path("memory://set"), output=pictures.folder / "b.h5", shard="0/2", batch_size="2")
    with FeatureStore(pictures.folder / "b.h5") as store:
        np.testing.assert_array_equal(store.read(), features[1:])
        assert store.files is not None and (store.files.size > 0).all() and (store.files.mtime_ns > 0).all()
    assert pictures.embed(root=Path("memory://set"), output=pictures.folder / "b.h5").reused == 5
    with pytest.raises(InputError, match="no images in the folder"):
        pictures.embed(source=Path("memory://set/manifest.csv"))
    local = write_archives(pictures.folder)
    for path in pictures.folder.glob("*.tar"):
        memory.pipe(f"/tars/{path.name}", path.read_bytes())
    pictures.embed(source=Path(local), output=pictures.folder / "c.h5")
    remote = {"source": Path("memory://tars/data-{000..002}.tar"), "output": pictures.folder / "d.h5"}
    pictures.embed(**remote)
    assert not pictures.embed(**remote).written
    assert contents(pictures.folder / "c.h5")["content"] == contents(pictures.folder / "d.h5")["content"]


def test_what_is_not_installed_is_named(pictures: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures.rows = [{"id": "a", "path": "s3://bucket/a.png"}]
    pictures.write()
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(InputError, match="paths with s3://") as error:
        pictures.embed()
    assert "ncm-cli[remote]" in str(error.value)
    with pytest.raises(InputError, match="paths with s3://"):
        pictures.embed(source=Path("s3://bucket/data-{0..1}.tar"))
    assert not is_remote("C:/a.png") and not is_remote("/a/b://c.png")


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ((("a.png", b"1"), ("a.png", b"2")), "a.png twice in one sample"),
        ((("a.png", b"1"), ("a.json", b'["ab"]')), "a.json: not an object"),
        ((("a.png", b"1"), ("a.json", b'{"x": "\\ud800"}')), "a.json: .*surrogates"),
        ((("a.png", b"1"), ("a.json", b'{"\\ud800": null}')), "a.json: .*surrogates"),
        ((("a.png", b"1"), ("a.cls", b"\xff")), "a.cls: .*decode"),
    ],
)
def test_what_a_sample_cannot_hold_is_named_with_its_member(
    tmp_path: Path, members: tuple[tuple[str, bytes], ...], said: str
) -> None:
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        for name, data in members:
            add(tar, name, data)
    with pytest.raises(InputError, match=said):
        read_archives(str(tmp_path / "s.tar"), ColumnNames())


def test_a_file_url_keeps_its_root_and_braces_count_down() -> None:
    assert as_written(Path("file:///data/x.tar")) == as_written("file:///data/x.tar") == "file:///data/x.tar"
    assert as_written(Path("s3://bucket/x.tar")) == "s3://bucket/x.tar"
    assert expanded("{2..0}.tar") == ["2.tar", "1.tar", "0.tar"]


@pytest.mark.parametrize("text", ["0/100000000000", f"0/{'9' * 5000}"])
def test_a_shard_of_too_many_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="shard"):
        parse_shard(text)


def test_too_many_open_files_are_no_fault_of_a_picture(
    make_pictures: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures = make_pictures(3)

    def refuse(path: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files", path)

    monkeypatch.setattr("ncm_cli.images.decode.open_regular", refuse)
    given = ["embed", str(pictures.manifest), "-o", str(pictures.output), "--model", "pixels:2"]
    assert run(given) == 3
    assert "too many files are open" in capsys.readouterr().err and not pictures.output.exists()


def test_messages_keep_both_slashes_of_a_scheme() -> None:
    for text in ("http://127.0.0.1/x", "s3://bucket/x", "file:///data/x"):
        assert f"where: {text}" in str(InputError("what", where=Path(text)))
    assert "where: /data/x" in str(InputError("what", where=Path("/data/x")))
