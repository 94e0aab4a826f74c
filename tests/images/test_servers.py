"""Servers list folders in their own ways, are slow, silent, busy or without end: what is taken is bounded."""

from __future__ import annotations

import contextlib
import html
import logging
import resource
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest

from ncm_cli.errors import InputError
from ncm_cli.images import remote
from ncm_cli.images.archives import read_archives
from ncm_cli.images.folder import read_folder
from ncm_cli.images.manifest import ColumnNames
from ncm_cli.images.paths import fetch
from ncm_cli.images.reading import read_image
from ncm_cli.images.remote import list_remote
from ncm_cli.images.samples import DecodeError
from ncm_cli.main import run
from ncm_cli.store.columns import ImageFile
from tests.conftest import WebHandler

NAMES = ["sea lake/a 1.jpg", "sea lake/b%2#é?.png", "dog/a&b;c=d.jpg", "dog/x:y.jpg", "dog/+.jpg"]
NAMES += ["r&d/a%26.jpg", "dog/it's.jpg", "dog/http.jpg", "dog/https:x.jpg"]

Serve = Callable[..., str]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds, not minutes; and nothing that another test found out."""
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setattr(remote, "MAX_ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(remote, "NOTICE_SECONDS", 0.2)
    monkeypatch.setattr(remote, "_next_notice", {})
    monkeypatch.setattr(remote, "_unanswered", {})
    fsspec.get_filesystem_class("http").clear_instance_cache()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in [*NAMES, "dog/.hidden.jpg", ".git/x.jpg", "dog/notes.txt"]:
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return tmp_path / "set"


def apache(handler: Any) -> Any:
    """Apache's FancyIndexing: links to sort by, the parent, and names with HTML's escapes."""

    class Apache(handler):  # type: ignore[misc, valid-type]
        def list_directory(self, path: str) -> Any:
            columns = "".join(f'<a href="?C={c};O=A">{c}</a>' for c in "NMSD")
            parent = self.path.rstrip("/").rpartition("/")[0] + "/"
            names = sorted(one.name + "/" * one.is_dir() for one in Path(path).iterdir())
            links = [html.escape(quote(name, safe="/&=;+'")) for name in names]
            links = [f"./{link}" if ":" in link else link for link in links]
            more = f'<a href="{parent}">Parent Directory</a><a href="#top">x</a><a href="mailto:a@b.c">y</a>'
            body = f"<html>{columns}{more}" + "".join(f'<a href="{link}">{link}</a>' for link in links)
            self.send_response(200)
            self.send_header("Content-Type", "text/html;charset=UTF-8")
            self.send_header("Content-Length", str(len(body.encode())))
            self.end_headers()
            self.wfile.write(body.encode())
            return None

    return Apache


@pytest.mark.parametrize("kind", ["python", "apache"])
def test_a_folder_of_a_server_is_the_folder_on_disk(folder: Path, serve: Serve, kind: str) -> None:
    """fsspec/filesystem_spec#1713, fangfufu/httpdirfs#59: names with escapes, links to sort by."""
    address = serve(apache(WebHandler) if kind == "apache" else WebHandler)
    known = read_folder(folder, None, ColumnNames())
    for source in (f"{address}/set", f"{address}/set/"):
        found = read_folder(Path(source), None, ColumnNames())
        assert (found.ids, found.text) == (known.ids, known.text)
        assert found.files is not None
        assert [fetch(file.path).decode() for file in found.files] == found.ids == sorted(NAMES)
        assert found.notes == known.notes


class Rooted(WebHandler):  # type: ignore[misc]
    """Links of whole paths, with escapes; one leads to a folder that is closed."""

    def do_GET(self) -> None:  # noqa: N802
        names = ["a%201.jpg"] if "open" in self.path else ["closed/"]
        body = "".join(f'<a href="{self.path.rstrip("/")}/{name}">x</a>' for name in names).encode()
        self.send_response(403 if "closed" in self.path else 200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_an_address_may_be_written_without_escapes(serve: Serve) -> None:
    address = serve(Rooted)
    for written in (
        f"{address}/sea open",
        f"{address}/sea%20open",
        f"{address}/open".replace("http", "HTTP"),
    ):
        assert read_folder(Path(written), None, ColumnNames()).ids == ["a 1.jpg"]
    with pytest.raises(InputError, match="a remote folder can't be read") as error:
        list_remote(f"{address}/sea lake")
    assert error.value.where == f"{address}/sea%20lake/closed"


def test_links_are_read_however_they_are_written() -> None:
    page = """<!-- x --><A HREF=a.jpg>a</A> <a class=x href='b"1.jpg'>b</a> <a href="it's.jpg"><a
        title=t href="http-1.jpg"> <a href=""> <abbr href=z> <a title="href=q" href = "c d.jpg" >"""
    expected = ["a.jpg", "b%221.jpg", "it%27s.jpg", "./http-1.jpg", "c d.jpg"]
    assert remote._links(page).splitlines() == [f'<a href="{link}">' for link in expected]


@pytest.mark.parametrize("part", ["<a ", "<", '<a href="', "<a href", "<a href = '"])
@pytest.mark.parametrize("end", ["", " " * 1_000_000, " " * 1_000_000 + ">"])
def test_links_of_a_page_without_end_take_no_time(part: str, end: str) -> None:
    """fsspec's pattern tries every blank of a tag that isn't closed: 9 MB took hours."""
    start = time.process_time()
    remote._links(part * 300_000 + end)
    remote._links("<a " + part.removeprefix("<a") * 300_000 + end)
    assert time.process_time() - start < 2


def test_an_index_without_end_is_refused(serve: Serve) -> None:
    class Endless(WebHandler):  # type: ignore[misc]
        def do_GET(self) -> None:  # noqa: N802
            body = b'<a href="a/">a</a><a href="1.jpg">1</a>'
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(body)

    with pytest.raises(InputError, match="a remote folder can't be read") as error:
        list_remote(f"{serve(Endless)}/set")
    assert "folders without end" in str(error.value)


def test_what_stands_for_a_folder_in_a_bucket_is_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec/s3fs#983, mlflow/mlflow#23250: empty keys that end in a slash, or are called as the folder."""
    memory = pytest.importorskip("fsspec").filesystem("memory")
    for name in ("cat/1.jpg", "dog/2.jpg"):
        memory.pipe(f"/bucket/{name}", b"x")
    find = type(memory).find

    def found(self: Any, path: str, **more: Any) -> Any:
        files = find(self, path, **more)
        for name, size in (
            ("/bucket/cat/", 0),
            ("/bucket/", 0),
            ("/bucket/dog", 0),
            ("/bucket/dog_$folder$", 0),
            ("/bucket/whole", 3),
        ):
            files[name] = {"name": name, "size": size, "type": "file"}
        return files

    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "find", found)
        assert sorted(list_remote("memory://bucket")) == ["cat/1.jpg", "dog/2.jpg", "whole"]
    memory.rm("/bucket", recursive=True)


def odd(handler: Any) -> Any:
    class Odd(handler):  # type: ignore[misc, valid-type]
        asked: dict[str, int] = {}  # noqa: RUF012

        def do_GET(self) -> None:  # noqa: N802
            with contextlib.suppress(OSError):
                getattr(self, "do_" + self.path[1:].partition("/")[0])()

        do_HEAD = do_GET  # noqa: N815

        def start(self, status: int = 200, **headers: str) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()

        def do_endless(self) -> None:
            self.start(Content_Type="image/jpeg")
            while self.command == "GET":
                self.wfile.write(b"\xff\xd8\xff" + bytes(1 << 20))

        def do_bomb(self) -> None:
            self.start(Content_Encoding="gzip")
            packer = zlib.compressobj(1, wbits=31)
            while self.command == "GET":
                self.wfile.write(packer.compress(bytes(1 << 22)))

        def do_ranges(self) -> None:
            self.start(206, Content_Length=str(1 << 40))
            while self.command == "GET":
                self.wfile.write(bytes(1 << 20))

        def do_silent(self) -> None:
            time.sleep(4)

        def do_drops(self) -> None:
            self.start(Content_Length="1000000")
            while self.command == "GET":
                self.wfile.write(b"x")
                time.sleep(0.1)

        def do_busy(self) -> None:
            _, kind, times, after = unquote(self.path[1:]).split("/")
            Odd.asked[self.path] = Odd.asked.get(self.path, 0) + (self.command == "GET")
            if Odd.asked[self.path] <= int(times):
                self.start(int(kind), Content_Length="0", Retry_After=after)
            else:
                self.start(Content_Length="2")
                if self.command == "GET":
                    self.wfile.write(b"ok")

    Odd.asked.clear()
    return Odd


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(remote, "MAX_BYTES", 1 << 25)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB, of all tests of this process
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (1 << 20)


@pytest.mark.parametrize(
    ("path", "reason"), [("endless", "more than"), ("bomb", "more than"), ("drops", "slow")]
)
def test_a_picture_without_end_is_refused(serve: Serve, small: None, path: str, reason: str) -> None:
    start = time.monotonic()
    with pytest.raises(DecodeError, match=reason):
        fetch(f"{serve(odd(WebHandler))}/{path}")
    assert time.monotonic() - start < 10


def test_an_archive_without_end_is_refused(serve: Serve, small: None) -> None:
    with pytest.raises(InputError, match="an archive that can't be read"):
        read_archives(f"{serve(odd(WebHandler))}/ranges/x.tar", ColumnNames())


def test_a_server_that_never_answers_is_given_up_with_a_word(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    address, start = serve(odd(WebHandler)), time.monotonic()
    with caplog.at_level(logging.WARNING):
        read = read_image(ImageFile("a", f"{address}/silent/a.jpg"), None)  # type: ignore[arg-type]
    assert read.reason == "cannot be read: no answer within 1 s"
    assert [f"waiting for {address}/silent/a.jpg" in text for text in caplog.messages] == [True]
    with pytest.raises(InputError, match="1 of 1 archives can't be read") as error:
        read_archives(f"{address}/silent/a.tar", ColumnNames())
    assert "no answer within 1 s" in str(error.value)
    with pytest.raises(InputError, match="a remote folder can't be read") as error:
        list_remote(f"{address}/silent")
    assert "no answer within 1 s" in str(error.value)
    assert time.monotonic() - start < 8  # fsspec looks once a second
    before = time.monotonic()
    with pytest.raises(DecodeError, match="a moment ago"):
        fetch(f"{address}/silent/b.jpg")  # it isn't waited for again and again
    assert time.monotonic() - before < 0.5


def test_a_silent_server_of_files_is_given_up_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, caplog.at_level(logging.WARNING):
        address = f"ftp://127.0.0.1:{silent.getsockname()[1]}/x"
        with pytest.raises(InputError, match="a remote folder can't be read") as error:
            list_remote(address)
        assert error.value.found == "no answer within 1 s"
        for _ in range(2):
            with pytest.raises(DecodeError, match="no answer within 1 s"):
                fetch(f"{address}.png")
        with pytest.raises(DecodeError, match="a moment ago"):
            fetch(f"{address}.png")
    assert caplog.messages and all(f"waiting for {address}" in text for text in caplog.messages)


@pytest.mark.parametrize("kind", ["429", pytest.param("503", marks=pytest.mark.slow)])
def test_a_busy_server_is_asked_again_as_it_says(
    serve: Serve, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MAX_ANSWER_SECONDS", 3.0)
    address, start = serve(odd(WebHandler)), time.monotonic()
    assert fetch(f"{address}/busy/{kind}/1/1") == b"ok"
    assert 1 <= time.monotonic() - start < 5
    assert fetch(f"{address}/busy/{kind}/2/Fri, 01 Jan 2021 00:00:00 GMT") == b"ok"
    start = time.monotonic()
    for after in ("600", "Fri, 01 Jan 2100 00:00:00 GMT"):
        with pytest.raises(DecodeError, match=kind):
            fetch(f"{address}/busy/{kind}/9/{after}")
    assert time.monotonic() - start < 1


def test_own_settings_of_fsspec_hold(folder: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    class Guarded(WebHandler):  # type: ignore[misc]
        def do_GET(self) -> None:  # noqa: N802
            super().do_GET() if self.headers.get("X-Key") == "k" else self.send_error(403)

    path = f"{serve(Guarded)}/set/dog/+.jpg"
    with pytest.raises(DecodeError, match="403"):
        fetch(path)
    own = {"http": {"client_kwargs": {"headers": {"X-Key": "k"}}}}
    monkeypatch.setattr("fsspec.config.conf", own)
    assert fetch(path) == b"dog/+.jpg"


def test_the_limit_holds_for_other_file_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.pipe("/x/a.jpg", b"12345")
    assert fetch("memory://x/a.jpg") == b"12345"
    monkeypatch.setattr(remote, "MAX_BYTES", 4)
    with pytest.raises(DecodeError, match="more than 4 bytes"):
        fetch("memory://x/a.jpg")
    memory.rm("/x", recursive=True)


ODD_PATHS = """
ftp://127.0.0.1:1/a.png reference://x zip://a.png github://a sftp://x/a.png nothing://x dask://x smb://x/y
hdfs://x webhdfs://x tar://x blockcache://x data://x dbfs://x http://[ http://:x/ https:/// memory://
file://x git:// jupyter://x filecache://x
"""


@pytest.mark.parametrize("path", ODD_PATHS.split())
def test_a_scheme_that_wants_more_than_a_path_fails_with_its_reason(
    pictures: Any, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures.add("good")
    pictures.rows.append({"id": "bad", "path": path})
    given = [str(pictures.write()), "-o", str(pictures.output), "--model", "pixels:2"]
    assert run(["embed", *given]) in (3, 5)
    said = capsys.readouterr().err
    assert path in said or "bad: cannot be read: " in said or "bad: no such file" in said
    for source in (path, f"{path}/a.tar"):
        assert run(["embed", source, *given[1:], "--fresh"]) == 3
        said = capsys.readouterr().err
        assert (path.partition("://")[0] in said or "where: /" in said) and "found: \n" not in said
