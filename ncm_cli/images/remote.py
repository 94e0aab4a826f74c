"""Files with a scheme, such as s3:// and https://, through fsspec; its file systems are installed separately.

A server may be slow, silent or busy, or send data without end: both the wait and the number of bytes are
bounded here. After ten seconds a line is logged.
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
"""Longest wait for a server: for its answer, between two pieces of it, and while it says that it's busy."""

NOTICE_SECONDS = 10.0
"""A wait longer than this is logged."""

MAX_SILENT_REQUESTS = 3
"""After so many unanswered requests in a row, a server isn't asked again for `MAX_ANSWER_SECONDS`."""

MIN_BYTES_PER_SECOND = 1024
"""Slowest download of a picture that is accepted after `MAX_ANSWER_SECONDS`."""

PIECE_BYTES, LARGE_BYTES = 1 << 18, 1 << 23
"""Bytes of one read; and the size above which only one picture at a time is downloaded."""

MAX_FOLDERS, MAX_FOLDER_DEPTH = 100_000, 64
"""Most folders of a web server that are read, and their greatest depth: indexes can link without end."""

MAX_INDEX_BYTES = 1 << 26
"""Largest HTML page that is read."""

BUSY_STATUS = (429, 503)

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")

_SAFE = "%/:?#[]@!$&'()*+,;=~"
"""Characters that aren't escaped in an address."""

_TAG = re.compile(r"<a\s[^<>]*>", re.IGNORECASE)
_HREF = re.compile(r"""\shref\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""", re.IGNORECASE)

_FOLDER_SUFFIX = "_$folder$"
"""Suffix of the empty keys that Hadoop writes for folders."""

_log = logging.getLogger(__name__)
_next_notice: dict[str, float] = {}
"""When the log may mention a server again."""
_unanswered: dict[str, tuple[int, float]] = {}
"""For each server, unanswered requests in a row, and the time of the last."""

T = TypeVar("T")


class TooSlowError(Exception):
    """A server that sends fewer than `MIN_BYTES_PER_SECOND`."""


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
    """Raise `InputError` if no file system for a path's scheme is installed."""
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

        if scheme == "ftp":  # instances close this attribute when deleted, even if they never connected
            fsspec.get_filesystem_class(scheme).ftp = io.BytesIO()
        if "::" in path:  # fsspec would chain file systems
            return fsspec.filesystem(scheme), path
        return cast(tuple[Any, str], fsspec.core.url_to_fs(path, **_bounds(scheme)))
    except Exception as error:  # file systems raise errors of any class
        what = f"{scheme}:// can't be read by a path alone: {reason_of(error)}"
        raise InputError(what, where=path) from (error if _is_late(error) else None)


def _bounds(scheme: str) -> dict[str, Any]:
    """Options that keep a file system from waiting for ever, with those that the user has configured."""
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
        """A response whose body is bounded by the requested range, or by the limits of pages and pictures."""

        async def read(self) -> bytes:
            """The body; raises what `_grows_large` does."""
            if self._body is None:
                most = MAX_INDEX_BYTES if self.content_type == "text/html" else MAX_BYTES
                if asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.request_info.headers.get("Range", "")):
                    most = int(asked[2]) + 1 - int(asked[1])
                try:
                    self._body = await self._bounded(most)
                except BaseException:
                    self.close()  # otherwise the rest would be awaited, perhaps for ever
                    raise
            return await super().read()

        async def text(self, *args: Any, **kwargs: Any) -> str:
            """Only the links of a page, in the form that fsspec's pattern matches."""
            return _links(await super().text(*args, **kwargs))

        async def _bounded(self, most: int) -> bytes:
            async with contextlib.AsyncExitStack() as stack:
                kept, start = io.BytesIO(), time.monotonic()
                async for piece in self.content.iter_chunked(PIECE_BYTES):
                    if _grows_large(kept, piece, start, most):
                        await stack.enter_async_context(large)
                return kept.getvalue()

    return BoundedResponse


def _links(page: str) -> str:
    """The links of a page, rewritten in one form.

    fsspec's own pattern takes hours on unclosed tags. It also misses links without quotation marks or with
    quotation marks inside, and file names that begin with http.
    """
    matches = (_HREF.search(tag) for tag in _TAG.findall(page))
    links = (next(filter(None, match.groups()), "").strip() for match in matches if match)
    links = (f"./{link}" if link.startswith("http") and "://" not in link else link for link in links)
    return "\n".join(
        f'<a href="{link.replace(chr(34), "%22").replace(chr(39), "%27")}">' for link in links if link
    )


def _grows_large(kept: io.BytesIO, piece: bytes, start: float, most: int) -> bool:
    """Add a piece of a download that began at ``start``; True if this piece takes it past `LARGE_BYTES`.

    Raises ValueError for too many bytes, `TooSlowError` for too few a second.
    """
    before = kept.tell()
    size, seconds = before + kept.write(piece), time.monotonic() - start
    if size > most:
        kept.close()  # the error's traceback would keep it in memory
        raise ValueError(f"more than {most:,} bytes, the limit")
    if seconds > MAX_ANSWER_SECONDS and size < MIN_BYTES_PER_SECOND * seconds:
        raise TooSlowError(f"{size:,} bytes in {seconds:.0f} s, which is too slow")
    return before <= LARGE_BYTES < size


@contextlib.contextmanager
def log_long_wait(path: str) -> Iterator[None]:
    """Log a line if the block takes more than `NOTICE_SECONDS`, at most once a minute for each server."""
    server = urlsplit(path).netloc

    def say() -> None:
        if time.monotonic() >= _next_notice.get(server, 0.0):
            _next_notice[server] = time.monotonic() + MAX_ANSWER_SECONDS
            _log.warning("still waiting for %s after %.0f s", path, NOTICE_SECONDS)

    timer = threading.Timer(NOTICE_SECONDS, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _with_retries(path: str, work: Callable[[], T]) -> T:
    """The result of ``work``, called again while the server says that it is busy.

    Raises TimeoutError if the server doesn't answer, at once if `MAX_SILENT_REQUESTS` just got no answer.
    """
    server = urlsplit(path).netloc
    count, last = _unanswered.get(server, (0, 0.0))
    if count >= MAX_SILENT_REQUESTS and time.monotonic() < last + MAX_ANSWER_SECONDS:
        raise TimeoutError(f"no answer from {server} a moment ago")
    until, pause = time.monotonic() + MAX_ANSWER_SECONDS, 1.0
    with log_long_wait(path):
        while True:
            try:
                result = work()
            except Exception as error:
                late, wait, now = _is_late(error), _busy(error, pause), time.monotonic()
                if late or (wait is not None and now + wait > until):
                    _unanswered[server] = (_unanswered.get(server, (0, 0.0))[0] + 1, now)
                if late and not isinstance(error, TooSlowError):
                    raise TimeoutError(f"no answer within {MAX_ANSWER_SECONDS:.0f} s") from None
                if wait is None or now + wait > until:
                    raise
            else:
                _unanswered.pop(server, None)
                return result
            time.sleep(wait)
            pause *= 2


def _is_late(error: BaseException) -> bool:
    # Before Python 3.11, asyncio.TimeoutError, which aiohttp and fsspec raise, was another class.
    kinds = (TimeoutError, asyncio.TimeoutError, TooSlowError)
    return any(isinstance(cause, kinds) for cause in (error, error.__cause__))


def _busy(error: Exception, pause: float) -> float | None:
    """Seconds until a busy server may be asked again, ``pause`` if it doesn't say; None if it isn't busy."""
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
    """The file system's metadata of a file, which isn't read; raises the file system's errors."""

    def work() -> dict[str, Any]:
        system, name = file_system(path)  # some connect to their server here
        return cast(dict[str, Any], _call(system, "info", name))

    return _with_retries(path, work)


def open_remote(path: str) -> BinaryIO:
    """A seekable file, read in blocks of `PIECE_BYTES`."""

    def work() -> BinaryIO:
        system, name = file_system(path)
        return cast(BinaryIO, system.open(name, "rb", block_size=PIECE_BYTES))

    return _with_retries(path, work)


def download(path: str) -> bytes:
    """The bytes of a picture; raises the file system's errors, and ValueError for more than `MAX_BYTES`."""

    def work() -> bytes:
        system, name = file_system(path)
        if is_web(path):
            return cast(bytes, system.cat_file(name))
        data = cast(bytes, system.cat_file(name, 0, MAX_BYTES + 1))
        if len(data) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES:,} bytes, the limit")
        return data

    return _with_retries(path, work)


def list_remote(folder: str) -> list[str]:
    """The files in a remote folder, at any depth, by their names relative to it; no hidden ones.

    The same names as for a copy on disk: markers of folders in object stores, and links of an index that
    lead elsewhere, are left out.
    """
    if is_web(folder):
        system, name = file_system(folder)
        return _linked_files(system, quote(name.rstrip("/"), safe=_SAFE))

    def work() -> list[str]:
        system, name = file_system(folder)
        name = name.rstrip("/")
        return [path[len(name) :].lstrip("/") for path in _files(system, name)]

    return [path for path in _listing(folder, work) if not is_hidden(path)]


def is_hidden(name: str) -> bool:
    """Whether a file or one of its folders is hidden."""
    return any(part.startswith(".") and part not in (".", "..") for part in name.split("/"))


def _listing(folder: str, work: Callable[[], T]) -> T:
    """The result of ``work`` on a folder; raises `InputError` with the folder's name if it can't be read."""
    try:
        return _with_retries(folder, work)
    except InputError:
        raise
    except Exception as error:  # file systems raise errors of any class
        raise InputError("a remote folder can't be read", where=folder, found=reason_of(error)) from error


def _files(system: Any, folder: str) -> list[str]:
    """The files in a folder, without the empty ones that represent folders in object stores."""
    entries = system.find(folder, detail=True) if system.isdir(folder) else {}
    folders = {parent for name in entries for parent in map(str, PurePosixPath(name).parents)}
    return [
        name
        for name, facts in entries.items()
        if not (name.endswith("/") or facts.get("type") == "directory")
        and (name.removesuffix(_FOLDER_SUFFIX) not in folders or facts.get("size"))
    ]


def _linked_files(system: Any, url: str) -> list[str]:
    """The files in a folder of a web server, found by the links of its index and of its folders' indexes."""
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
            # Links with a query sort the index; those with a scheme, or upwards, lead elsewhere.
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
