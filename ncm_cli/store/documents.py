"""JSON files of ours: each says what it is, and carries a digest of all that it says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ncm_cli.errors import InputError
from ncm_cli.store.atomic import read_json, write_json
from ncm_cli.store.checks import require_version
from ncm_cli.store.fingerprint import digest_of

DIGEST = "content_sha256"

SEALED_SINCE = 2
"""The first version of every such format that has the digest."""


def write_document(path: Path | str, format_name: str, version: int, body: Mapping[str, Any]) -> None:
    """Write ``body`` atomically under a header with its format, version and digest."""
    header = {"ncm_format": format_name, "ncm_format_version": version}
    write_json(path, {**header, DIGEST: _digest({**header, **body}), **body})


def read_document(
    path: Path | str, format_name: str, version: int, *, what: str, fix: str = "make it again"
) -> dict[str, Any]:
    """The whole document; one that an earlier version wrote has no `DIGEST`.

    Raises `InputError` for another file or version, and for one that was changed after it was written.
    """
    path = Path(path)
    found = read_json(path)
    if not isinstance(found, dict) or found.get("ncm_format") != format_name:
        other = found.get("ncm_format") if isinstance(found, dict) else type(found).__name__
        raise InputError(
            f"not {what}", where=path, found=f"ncm_format {other!r}", expected=format_name, fix=fix
        )
    require_version(found.get("ncm_format_version"), version, path)
    stated = found.get(DIGEST)
    if (stated is not None or found["ncm_format_version"] >= SEALED_SINCE) and stated != _digest(found):
        raise InputError(
            f"{what} that was changed after it was written",
            where=path,
            found=f"contents that don't match its {DIGEST}",
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
