"""Digests of JSON, arrays and texts, such as an encoder's fingerprint; and compact columns of texts."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError, MismatchError

MAX_JSON_DEPTH = 100
"""Deepest nesting of JSON that is read: deeper than in any file of ncm, and safe for recursion."""

ABSENT = "(absent)"
"""Shown as the value of a field that only the other description has."""


def parse_json(text: str | bytes, **options: Any) -> Any:
    """The value of JSON from an untrusted file; ``options`` are those of `json.loads`.

    Raises ValueError for text that isn't JSON or is nested deeper than `MAX_JSON_DEPTH`.
    """
    try:
        value = json.loads(text, **options)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    level = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        nested = [item for item in level if isinstance(item, dict | list)]
        if not nested:
            return value
        level = [
            item
            for container in nested
            for item in (container.values() if isinstance(container, dict) else container)
        ]
    raise ValueError(f"JSON that is nested more than {MAX_JSON_DEPTH} deep")


def canonical_json(value: Any) -> str:
    """JSON in one form only: sorted keys, no blanks, shortest floats, no NaN.

    Raises ValueError or TypeError for values that JSON can't represent.
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


def differences(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    in_a: str = "there",
    in_b: str = "asked for",
    *,
    ignore_view: bool = False,
) -> str | None:
    """The fields in which two descriptions differ, for an error's ``found``; None if they are equal.

    ``in_a`` and ``in_b`` follow the values of each: "model: ViT-B-32 there, ViT-L-14 asked for".
    """
    fields = differing_fields(a, b, ignore_view=ignore_view)
    lines = [f"{name}: {_short(x)} {in_a}, {_short(y)} {in_b}" for name, x, y in fields]
    return "\n    ".join(["", *lines] if len(lines) > 1 else lines) or None


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


OTHER_WEIGHTS = "--pretrained FILE names the weights that the features were made with"
"""The advice if the loaded encoder didn't make the features."""


def require_same_encoder(
    name_a: object,
    encoder_a: Mapping[str, Any],
    name_b: object,
    encoder_b: Mapping[str, Any],
    *,
    ignore_view: bool = False,
    fix: str = "embed one of them again with the other's options",
) -> None:
    """Raise `MismatchError` naming the fields in which two encoder descriptions differ.

    ``ignore_view`` lets a store and its augmented view pass for the same encoder.
    """
    if found := differences(encoder_a, encoder_b, "in the first", "in the second", ignore_view=ignore_view):
        raise MismatchError(
            "features of different encoders",
            where=f"{name_a} and {name_b}",
            found=found,
            expected="the same encoder, weights and preprocessing",
            fix=fix,
        )


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flat(item, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", item


MAX_SHOWN = 60
"""Most characters of a value that differs, in an error."""

MAX_TEXT_BYTES = 4096
"""Most bytes in an id, path or category: the limit of file systems for a path."""

MAX_STORE_COLUMNS = 5_000
"""Most columns of a store: each takes up to three HDF5 objects, and readers accept 20,000 objects."""

TEXT_ERRORS = "surrogateescape"
"""How text is encoded and decoded, so that file names that aren't UTF-8 are kept."""

MAKE_AGAIN = "make it again, with --fresh where the command has it"
"""The advice for a file that can't be used; without --fresh some commands refuse to replace it."""


def damaged(path: Path, found: str) -> InputError:
    """The error for a file whose bytes aren't those that were written."""
    return InputError(
        "a damaged file",
        where=path,
        found=found,
        expected="the bytes that ncm wrote",
        fix=f"restore it from a copy, or {MAKE_AGAIN}",
    )


def require_few_columns(count: int, where: Path | str) -> None:
    """Refuse more columns than a store can have."""
    if count > MAX_STORE_COLUMNS:
        raise InputError(
            "more columns than a store takes",
            where=where,
            found=f"{count:,}",
            expected=f"at most {MAX_STORE_COLUMNS:,}",
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
    little_endian = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    digest = hashlib.sha256(f"{little_endian.dtype.str}{little_endian.shape}".encode())
    digest.update(little_endian.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def text_digest(items: Sequence[bytes] | np.ndarray) -> str:
    """SHA-256 over the UTF-8 texts, each ended by a NUL (which no text may hold)."""
    digest = hashlib.sha256(f"text({len(items)})".encode())
    for start in range(0, len(items), 1 << 16):
        part = items[start : start + (1 << 16)]
        digest.update(b"\0".join([*(part.tolist() if isinstance(part, np.ndarray) else part), b""]))
    return digest.hexdigest()


def is_utf8(text: str) -> bool:
    """Whether a text can be encoded in UTF-8; file names with undecodable bytes can't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def encode_text(items: Sequence[str], what: str, *, any_bytes: bool = False) -> list[bytes]:
    """UTF-8 bytes of each text; refuses NUL, lone surrogates and texts over 4,096 bytes.

    With ``any_bytes``, surrogates that stand for bytes of file names become those bytes.
    """
    encoded = []
    for position, item in enumerate(items):
        try:
            raw = item.encode("utf-8", TEXT_ERRORS if any_bytes else "strict")
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


class Texts(Sequence[str]):
    """A column of n texts (ids, paths, digests), in a quarter of the memory of n str.

    Indexing with a slice, positions or a mask gives `Texts`; they equal a tuple of the same texts. ``raw``
    (n,) is an array of NumPy's type ``S``: UTF-8, padded with NUL, which sorts like str.
    """

    def __init__(self, raw: np.ndarray) -> None:
        self.raw = raw

    def __len__(self) -> int:
        return len(self.raw)

    @overload
    def __getitem__(self, which: int | np.integer) -> str: ...
    @overload
    def __getitem__(self, which: slice | np.ndarray) -> Texts: ...
    def __getitem__(self, which: int | np.integer | slice | np.ndarray) -> str | Texts:
        if isinstance(which, (int, np.integer)):
            return bytes(self.raw[which]).decode("utf-8", TEXT_ERRORS)
        return Texts(self.raw[which])

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), 1 << 16):
            yield from (
                raw.decode("utf-8", TEXT_ERRORS) for raw in self.raw[start : start + (1 << 16)].tolist()
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(tuple(self))

    @property
    def not_utf8(self) -> int | None:
        """The position of the first text that isn't UTF-8; None if all are."""
        for start in range(0, len(self), 1 << 16):
            part = self.raw[start : start + (1 << 16)].tolist()
            try:
                b"\0".join(part).decode()
            except UnicodeDecodeError as error:
                return start + b"\0".join(part)[: error.start].count(b"\0")
        return None

    def joined(self, other: Texts) -> Texts:
        """These texts, followed by the others."""
        return Texts(np.concatenate([self.raw, other.raw]))

    @functools.cached_property
    def order(self) -> NDArray[np.int64]:
        """(n,) positions that sort the texts; equal texts keep their order."""
        return np.argsort(self.raw, kind="stable")

    @property
    def repeat(self) -> bool:
        """Whether any text occurs twice."""
        ordered = self.raw[self.order]
        return bool((ordered[1:] == ordered[:-1]).any())

    def positions(self, texts: Iterable[str]) -> NDArray[np.int64]:
        """int64 (m,): the first position of each of ``texts``; −1 if it isn't in the column."""
        wanted = np.array([*map(_utf8, texts)], dtype="S")
        if not len(self):
            return np.full(len(wanted), -1)
        at = np.searchsorted(self.raw, wanted, sorter=self.order)
        nearest = self.order[np.minimum(at, len(self) - 1)]
        return np.where((at < len(self)) & (self.raw[nearest] == wanted), nearest, -1)

    def same(self) -> NDArray[np.int64]:
        """int64 (n,): for each row, the first position of the same text; its own position if it is blank."""
        ordered = self.raw[self.order]
        starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        first = np.empty(len(self), np.int64)
        first[self.order] = np.repeat(self.order[starts], np.diff([*starts, len(self)]))
        return np.where(self.raw == b"", np.arange(len(self)), first)


def _utf8(text: str) -> bytes:
    """A text's bytes as stored; for a text that can't be stored, bytes that equal no stored text's."""
    try:
        return text.encode("utf-8", TEXT_ERRORS)
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def printable(name: str) -> str:
    """``name`` with bytes that aren't UTF-8 as ``\\xe9``, the form in which a store names such a file."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
