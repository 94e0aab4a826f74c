"""Files behind a scheme, such as s3:// and https://, through fsspec, whose file systems are installed apart.

A server may be slow, silent, busy or endless: the time that it is waited for and the bytes that are taken
from it are bounded here. After ten seconds a line is logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import functools
import html
import io
import logging
import posixpath
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import quote, unquote, urlsplit

from ncm_cli.errors import InputError
from ncm_cli.images.decode import MAX_BYTES
from ncm_cli.store.files import one_line

MAX_ANSWER_SECONDS = 60.0
"""How long a server is waited for: until it answers, between two pieces, and where it says that it's busy."""

NOTICE_SECONDS = 10.0
"""After how long the log says what is waited for."""

MAX_SILENT_REQUESTS = 3
"""Requests in a row without an answer after which a server isn't asked again for `MAX_ANSWER_SECONDS`."""

MIN_BYTES_PER_SECOND = 1024
"""Bytes a second that a picture has to come with, once `MAX_ANSWER_SECONDS` are over."""

PIECE_BYTES, LARGE_BYTES = 1 << 18, 1 << 23
"""Bytes that are read at once; and the size beyond which only one picture at a time is downloaded."""

MAX_FOLDERS, MAX_FOLDER_DEPTH = 100_000, 64
"""Folders of a web server that are read, and levels of them: an index may have no end."""

MAX_INDEX_BYTES = 1 << 26
"""Bytes of a page of HTML."""

BUSY_STATUS = (429, 503)

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")

_SAFE = "%/:?#[]@!$&'()*+,;=~"
"""Characters that aren't escaped in an address."""

_TAG = re.compile(r"<a\s[^<>]*>", re.IGNORECASE)
_HREF = re.compile(r"""\shref\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""", re.IGNORECASE)

_FOLDER_SUFFIX = "_$folder$"
"""The end of the empty keys by which Hadoop stands for folders."""

_log = logging.getLogger(__name__)
_said: dict[str, float] = {}
_silent: dict[str, tuple[int, float]] = {}

T = TypeVar("T")


class TooSlowError(Exception):
    """A server that sends, but hardly anything."""


def reason_of(error: BaseException) -> str:
    """Why a file system refused, in one line; many of their errors have no text."""
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    if isinstance(cause, FileNotFoundError):
        return "no such file"
    return one_line(error.what if isinstance(error, InputError) else cause) or type(cause).__name__


def is_web(path: str) -> bool:
    """Whether a path is the address of a web server."""
    return path.lower().startswith(("http://", "https://"))


def require_installed(path: str) -> None:
    """An `InputError` where nothing that reads such a path is installed."""
    scheme = path.partition("://")[0].lower()
    try:
        import fsspec

        fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        what, fix = f"paths with {scheme}:// can't be read here", "pip install 'ncm-cli[remote]'"
        raise InputError(what, where=path, found=one_line(error), fix=fix) from None


def file_system(path: str) -> tuple[Any, str]:
    """The file system for a path, and the path in its form; raises `InputError` if there is none."""
    require_installed(path)
    scheme = path.partition("://")[0].lower()
    path = scheme + path[len(scheme) :]
    try:
        import fsspec

        if scheme == "ftp":  # what its instances close at their end, connected or not
            fsspec.get_filesystem_class(scheme).ftp = io.BytesIO()
        if "::" in path:  # to fsspec, paths inside one another
            return fsspec.filesystem(scheme), path
        return cast(tuple[Any, str], fsspec.core.url_to_fs(path, **_bounds(scheme)))
    except Exception as error:  # file systems raise what they like
        what = f"{scheme}:// can't be read by a path alone: {reason_of(error)}"
        raise InputError(what, where=path) from (error if _is_late(error) else None)


def _bounds(scheme: str) -> dict[str, Any]:
    """The options of a file system that keep it from waiting for ever, beside the user's own ones."""
    if scheme == "ftp":
        return {"timeout": MAX_ANSWER_SECONDS}
    if not is_web(f"{scheme}://"):
        return {}
    import aiohttp
    import fsspec

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=MAX_ANSWER_SECONDS, sock_read=MAX_ANSWER_SECONDS)
    options = {"timeout": timeout, "response_class": _bounded_response()}
    for scheme_name in ("http", "https"):
        options |= fsspec.config.conf.get(scheme_name, {}).get("client_kwargs", {})
    return {"client_kwargs": options, "simple_links": False}


@functools.cache
def _bounded_response() -> type:
    import aiohttp

    large = asyncio.Lock()

    class BoundedResponse(aiohttp.ClientResponse):
        """An answer of which no more is taken than was asked for, or than pictures and indexes have."""

        async def read(self) -> bytes:
            """The body, or ValueError where it has no end or is too slow."""
            if self._body is None:
                most = MAX_INDEX_BYTES if self.content_type == "text/html" else MAX_BYTES
                if asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.request_info.headers.get("Range", "")):
                    most = int(asked[2]) + 1 - int(asked[1])
                try:
                    self._body = await self._bounded(most)
                except BaseException:
                    self.close()  # or it would be waited for, perhaps without end
                    raise
            return await super().read()

        async def text(self, *args: Any, **more: Any) -> str:
            """The links of a page alone, each written as fsspec expects it."""
            return _links(await super().text(*args, **more))

        async def _bounded(self, most: int) -> bytes:
            async with contextlib.AsyncExitStack() as stack:
                kept, start = io.BytesIO(), time.monotonic()
                async for piece in self.content.iter_chunked(PIECE_BYTES):
                    if _grows_large(kept, piece, start, most):
                        await stack.enter_async_context(large)
                return kept.getvalue()

    return BoundedResponse


def _links(page: str) -> str:
    """The links of a page in one form: fsspec's own pattern takes hours where a tag has no end.

    Nor does it know links without quotation marks, or with others in them, or names that begin with http.
    """
    found = (_HREF.search(tag) for tag in _TAG.findall(page))
    links = (next(filter(None, link.groups()), "").strip() for link in found if link)
    links = (f"./{link}" if link.startswith("http") and "://" not in link else link for link in links)
    return "\n".join(
        f'<a href="{link.replace(chr(34), "%22").replace(chr(39), "%27")}">' for link in links if link
    )


def _grows_large(kept: io.BytesIO, piece: bytes, start: float, most: int) -> bool:
    """Add a piece of a file, begun at ``start``; whether it is the one that makes it `LARGE_BYTES`.

    Raises ValueError for too many bytes, `TooSlowError` for too few a second.
    """
    before = kept.tell()
    got, seconds = before + kept.write(piece), time.monotonic() - start
    if got > most:
        kept.close()  # an error keeps what was there when it was raised
        raise ValueError(f"more than {most:,} bytes, the limit")
    if seconds > MAX_ANSWER_SECONDS and got < MIN_BYTES_PER_SECOND * seconds:
        raise TooSlowError(f"{got:,} bytes in {seconds:.0f} s, which is too slow")
    return before <= LARGE_BYTES < got


@contextlib.contextmanager
def word_for(path: str) -> Iterator[None]:
    """Log a line if the block takes more than `NOTICE_SECONDS`, once a minute for each server."""
    server = urlsplit(path).netloc

    def say() -> None:
        if time.monotonic() >= _said.get(server, 0.0):
            _said[server] = time.monotonic() + MAX_ANSWER_SECONDS
            _log.warning("waiting for %s: no end after %.0f s", path, NOTICE_SECONDS)

    timer = threading.Timer(NOTICE_SECONDS, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _patiently(path: str, work: Callable[[], T]) -> T:
    """What ``work`` gives; where the server says that it is busy, it is asked again as it says.

    Raises TimeoutError where it doesn't answer, at once where it didn't answer a moment ago either.
    """
    server = urlsplit(path).netloc
    silent, last = _silent.get(server, (0, 0.0))
    if silent >= MAX_SILENT_REQUESTS and time.monotonic() < last + MAX_ANSWER_SECONDS:
        raise TimeoutError(f"no answer from {server} a moment ago")
    until, pause = time.monotonic() + MAX_ANSWER_SECONDS, 1.0
    with word_for(path):
        while True:
            try:
                found = work()
            except Exception as error:
                late, wait, now = _is_late(error), _busy(error, pause), time.monotonic()
                if late or (wait is not None and now + wait > until):
                    _silent[server] = (_silent.get(server, (0, 0.0))[0] + 1, now)
                if late and not isinstance(error, TooSlowError):
                    raise TimeoutError(f"no answer within {MAX_ANSWER_SECONDS:.0f} s") from None
                if wait is None or now + wait > until:
                    raise
            else:
                _silent.pop(server, None)
                return found
            time.sleep(wait)
            pause *= 2


def _is_late(error: BaseException) -> bool:
    # Before Python 3.11 that of asyncio, which aiohttp and fsspec raise, is another one.
    kinds = (TimeoutError, asyncio.TimeoutError, TooSlowError)
    return any(isinstance(cause, kinds) for cause in (error, error.__cause__))


def _busy(error: Exception, pause: float) -> float | None:
    """The seconds after which a busy server may be asked again, ``pause`` where it doesn't say; else None."""
    for cause in (error, error.__cause__):
        if getattr(cause, "status", None) in BUSY_STATUS:
            wait = str((getattr(cause, "headers", None) or {}).get("Retry-After", "")).strip()
            if wait.isdecimal():
                return max(1.0, float(wait))
            with contextlib.suppress(ValueError, TypeError):
                return max(1.0, email.utils.parsedate_to_datetime(wait).timestamp() - time.time())
            return pause
    return None


def _call(system: Any, name: str, *args: Any) -> Any:
    """The result of a file system's method; raises TimeoutError if it takes too long."""
    if not getattr(system, "async_impl", False):
        return getattr(system, name)(*args)
    from fsspec.asyn import sync

    return sync(system.loop, getattr(system, f"_{name}"), *args, timeout=MAX_ANSWER_SECONDS)


def info(path: str) -> dict[str, Any]:
    """The facts that a file system has on a file, without reading it; raises the file system's errors."""

    def work() -> dict[str, Any]:
        system, name = file_system(path)  # some connect to their server here
        return cast(dict[str, Any], _call(system, "info", name))

    return _patiently(path, work)


def open_remote(path: str) -> BinaryIO:
    """A file to be read from any place of it, some `PIECE_BYTES` at a time."""

    def work() -> BinaryIO:
        system, name = file_system(path)
        return cast(BinaryIO, system.open(name, "rb", block_size=PIECE_BYTES))

    return _patiently(path, work)


def download(path: str) -> bytes:
    """The bytes of a picture; raises what file systems do, and ValueError for more than `MAX_BYTES`."""

    def work() -> bytes:
        system, name = file_system(path)
        if is_web(path):
            return cast(bytes, system.cat_file(name))
        data = cast(bytes, system.cat_file(name, 0, MAX_BYTES + 1))
        if len(data) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES:,} bytes, the limit")
        return data

    return _patiently(path, work)


def list_remote(folder: str) -> list[str]:
    """The files in a folder with a scheme, at any depth, by their names from it on; no hidden ones.

    Names are those that the folder on disk has: without what stands for a folder in object stores, and
    without links of an index that lead elsewhere.
    """
    if is_web(folder):
        system, name = file_system(folder)
        return _index(system, quote(name.rstrip("/"), safe=_SAFE))

    def work() -> list[str]:
        system, name = file_system(folder)
        name = name.rstrip("/")
        return [path[len(name) :].lstrip("/") for path in _files(system, name)]

    return [path for path in _listing(folder, work) if not is_hidden(path)]


def is_hidden(name: str) -> bool:
    """Whether a file, or a folder that it lies in, is hidden."""
    return any(part.startswith(".") and part not in (".", "..") for part in name.split("/"))


def _listing(folder: str, work: Callable[[], T]) -> T:
    """The result of ``work`` on a folder; raises `InputError` with the folder's name if it can't be read."""
    try:
        return _patiently(folder, work)
    except InputError:
        raise
    except Exception as error:  # file systems raise what they like
        raise InputError("a remote folder can't be read", where=folder, found=reason_of(error)) from error


def _files(system: Any, folder: str) -> list[str]:
    """The files in a folder; of an object store not the empty ones that stand for folders."""
    found = system.find(folder, detail=True) if system.isdir(folder) else {}
    folders = {parent for name in found for parent in map(str, PurePosixPath(name).parents)}
    return [
        name
        for name, facts in found.items()
        if not (name.endswith("/") or facts.get("type") == "directory")
        and (name.removesuffix(_FOLDER_SUFFIX) not in folders or facts.get("size"))
    ]


def _index(system: Any, url: str) -> list[str]:
    """The files in a folder of a web server, by the links of its index and those of its folders."""
    names, waiting, seen = set[str](), [(url, "")], {url}
    while waiting:
        folder, prefix = waiting.pop()
        if prefix.count("/") > MAX_FOLDER_DEPTH or len(seen) > MAX_FOLDERS:
            raise InputError("a remote folder can't be read", where=folder, found="folders without end")
        start = urlsplit(folder).path.rstrip("/") + "/"
        for entry in _listing(folder, functools.partial(_call, system, "ls", folder)):
            written = html.unescape(entry["name"]).rstrip("/")
            link = urlsplit(written)
            name = posixpath.normpath(unquote(link.path.removeprefix(start), errors="surrogateescape"))
            # Queries sort an index; with a scheme, or up, links lead elsewhere.
            if link.query or link.fragment or _SCHEME.match(written[len(folder) + 1 :]):
                continue
            if name.startswith(("/", "..")) or name == "." or is_hidden(name):
                continue
            if entry["type"] != "directory":
                names.add(prefix + name)
            elif written not in seen:
                seen.add(written)
                waiting.append((written, f"{prefix}{name}/"))
    return sorted(names)
