"""Digests of JSON, arrays and texts, the encoder's fingerprint among them, and what doesn't match them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli.errors import InputError

ABSENT = "(absent)"
"""Stands for a field that only the other description has."""


def canonical_json(value: Any) -> str:
    """JSON in one form only: sorted keys, no blanks, shortest floats, no NaN.

    Raises ValueError or TypeError for what JSON can't say.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest_of(value: Any) -> str:
    """SHA-256 over the canonical JSON of ``value``, as 64 hex digits."""
    return hashlib.sha256(canonical_json(value).encode("ascii")).hexdigest()


def fingerprint(description: Mapping[str, Any]) -> str:
    """SHA-256 over the canonical JSON of an encoder's description, as 64 hex digits."""
    return digest_of(dict(description))


def without_view(description: Mapping[str, Any]) -> dict[str, Any]:
    """The description of the encoder alone, without the augmentation of one view."""
    return {name: value for name, value in description.items() if name != "view"}


def differing_fields(
    a: Mapping[str, Any], b: Mapping[str, Any], *, ignore_view: bool = False
) -> list[tuple[str, Any, Any]]:
    """The fields in which two encoder descriptions differ, as (dotted name, value in a, value in b).

    A field that one of them lacks has the value `ABSENT` there. With ``ignore_view`` the augmentation of a
    view doesn't count.
    """
    if ignore_view:
        a, b = without_view(a), without_view(b)
    flat_a, flat_b = dict(_flat(a)), dict(_flat(b))
    names = [*flat_a, *(name for name in flat_b if name not in flat_a)]
    pairs = ((name, flat_a.get(name, ABSENT), flat_b.get(name, ABSENT)) for name in names)
    return [(name, x, y) for name, x, y in pairs if canonical_json(x) != canonical_json(y)]


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flat(item, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", item


MAX_TEXT_BYTES = 4096
"""Longest id, path or category: what file systems allow a path to have."""

MAX_COLUMNS = 5_000
"""Most columns of a store: each is up to three objects of HDF5's, of which a reader takes 20,000."""

TEXT_ERRORS = "surrogateescape"
"""File names that aren't UTF-8 survive a round trip."""


def damaged(path: Path, found: str) -> InputError:
    """The error for a file whose bytes aren't those that were written."""
    return InputError(
        "a damaged file",
        where=path,
        found=found,
        expected="the bytes that ncm wrote",
        fix="restore it from a copy, or make it again",
    )


def require_few_columns(count: int, where: Path | str) -> None:
    """Refuse more columns than a store takes."""
    if count > MAX_COLUMNS:
        raise InputError(
            "more columns than a store takes",
            where=where,
            found=f"{count:,}",
            expected=f"at most {MAX_COLUMNS:,}",
            fix="leave some out of the table; a matrix of features goes into an array (--from-array)",
        )


def require_version(found: object, version: int, path: Path) -> None:
    """Refuse a file of a format version that this program doesn't know."""
    if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= version:
        newer = isinstance(found, int) and found > version
        raise InputError(
            "a format version that can't be read",
            where=path,
            found=f"ncm_format_version {found}",
            expected=f"{version}" if version == 1 else f"1 to {version}",
            fix="install a newer ncm-cli" if newer else None,
        )


def header_digest(attrs: Mapping[str, Any]) -> str:
    """SHA-256 over all root attributes but the digest itself."""
    return digest_of({name: value for name, value in attrs.items() if name != "header_sha256"})


def array_digest(values: np.ndarray) -> str:
    """SHA-256 over type, shape and little-endian values in row-major order."""
    little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    digest = hashlib.sha256(f"{little.dtype.str}{little.shape}".encode())
    digest.update(little.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def text_digest(items: Sequence[bytes] | np.ndarray) -> str:
    """SHA-256 over the UTF-8 texts, each ended by a NUL (which no text may hold)."""
    digest = hashlib.sha256(f"text({len(items)})".encode())
    for start in range(0, len(items), 1 << 16):
        part = items[start : start + (1 << 16)]
        digest.update(b"\0".join([*(part.tolist() if isinstance(part, np.ndarray) else part), b""]))
    return digest.hexdigest()


def encode_text(items: Sequence[str], what: str) -> list[bytes]:
    """UTF-8 bytes of each text; refuses NUL, lone surrogates and texts over 4,096 bytes."""
    encoded = []
    for position, item in enumerate(items):
        try:
            raw = item.encode("utf-8", TEXT_ERRORS)
        except UnicodeEncodeError as error:
            raise InputError(
                f"{what} that isn't Unicode text", where=f"row {position}", found=ascii(item)
            ) from error
        if b"\0" in raw or len(raw) > MAX_TEXT_BYTES:
            raise InputError(
                f"{what} that can't be stored",
                where=f"row {position}",
                found="a NUL character" if b"\0" in raw else f"{len(raw):,} bytes: {item[:40]!r}...",
                expected=f"at most {MAX_TEXT_BYTES:,} bytes of UTF-8 without NUL",
            )
        encoded.append(raw)
    return encoded
