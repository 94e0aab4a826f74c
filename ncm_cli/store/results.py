"""JSON documents of ours: each says what it is, and carries a digest of all that it says.

Result files are such documents, with one schema for what eval, bound, sweep and their like find out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ncm_cli import __version__
from ncm_cli.errors import InputError
from ncm_cli.store.digests import digest_of, require_version
from ncm_cli.store.files import jsonable, now, read_json, write_json

FORMAT = "ncm-result"
VERSION = 2

DIGEST = "content_sha256"

HEADER = ("ncm_format", "ncm_format_version", DIGEST, "kind", "ncm_version", "created")


def write_document(path: Path | str, format_name: str, version: int, body: Mapping[str, Any]) -> None:
    """Write ``body`` atomically under a header with its format, version and digest."""
    header = {"ncm_format": format_name, "ncm_format_version": version}
    write_json(path, {**header, DIGEST: _digest({**header, **body}), **body})


def read_document(
    path: Path | str, format_name: str, version: int, *, what: str, fix: str = "make it again"
) -> dict[str, Any]:
    """The whole document.

    Raises `InputError` for another file or version, and for one whose `DIGEST` isn't that of its contents.
    """
    path = Path(path)
    found = read_json(path)
    if not isinstance(found, dict) or found.get("ncm_format") != format_name:
        other = found.get("ncm_format") if isinstance(found, dict) else type(found).__name__
        raise InputError(
            f"not {what}", where=path, found=f"ncm_format {other!r}", expected=format_name, fix=fix
        )
    require_version(found.get("ncm_format_version"), version, path)
    if found.get(DIGEST) != _digest(found):
        off = f"no {DIGEST}, so that no command of ncm since 0.1.0 wrote it"
        raise InputError(
            f"{what} that was changed after it was written",
            where=path,
            found=f"contents that don't match its {DIGEST}" if DIGEST in found else off,
            fix=fix,
        )
    return found


def _digest(document: Mapping[str, Any]) -> str:
    return digest_of({name: _plain(value) for name, value in document.items() if name != DIGEST})


def _plain(value: Any) -> Any:
    """``value`` with 1.0 as 1: other programs that write a document anew don't keep them apart."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def write_result(path: Path | str, kind: str, body: Mapping[str, Any]) -> None:
    """Write ``body`` atomically under a header that says what it is.

    Floats keep full precision; NaN and infinities become null. Raises ValueError if the body has a name that
    the header needs.
    """
    clash = [name for name in HEADER if name in body]
    if clash:
        raise ValueError(f"a result body can't have {clash}")
    facts = {"kind": kind, "ncm_version": __version__, "created": now()}
    write_document(path, FORMAT, VERSION, {**facts, **jsonable(body)})


def read_result(path: Path | str, *, kind: str | None = None) -> dict[str, Any]:
    """A result file's header and body as one object; refuses another kind and what `read_document` does."""
    found = read_document(path, FORMAT, VERSION, what="a result", fix="make it again with ncm")
    if kind is not None and found.get("kind") != kind:
        raise InputError("a result of another kind", where=path, found=found.get("kind"), expected=kind)
    return found
