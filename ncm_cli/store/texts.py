"""The texts of many rows (ids, paths, digests), as UTF-8 of one width: a quarter of what str take."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from ncm_cli.store.digests import TEXT_ERRORS


class Texts(Sequence[str]):
    """n texts as a sequence of str; a slice, positions or a mask select others. Equal to a tuple of the same.

    ``raw`` (n,) is an array of NumPy's type ``S``: UTF-8, padded with NUL. Its order is that of the str.
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
                one.decode("utf-8", TEXT_ERRORS) for one in self.raw[start : start + (1 << 16)].tolist()
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(tuple(self))

    def joined(self, other: Texts) -> Texts:
        """These texts, then others."""
        return Texts(np.concatenate([self.raw, other.raw]))

    @functools.cached_property
    def order(self) -> NDArray[np.int64]:
        """(n,) positions in the order of the texts; of equal ones the first comes first."""
        return np.argsort(self.raw, kind="stable")

    @property
    def repeat(self) -> bool:
        """Whether a text is there twice."""
        ordered = self.raw[self.order]
        return bool((ordered[1:] == ordered[:-1]).any())

    def positions(self, texts: Iterable[str]) -> NDArray[np.int64]:
        """int64 (m,): where each text is, the first of equal ones; −1 where it isn't."""
        wanted = np.array([*map(_utf8, texts)], dtype="S")
        if not len(self):
            return np.full(len(wanted), -1)
        at = np.searchsorted(self.raw, wanted, sorter=self.order)
        found = self.order[np.minimum(at, len(self) - 1)]
        return np.where((at < len(self)) & (self.raw[found] == wanted), found, -1)

    def same(self) -> NDArray[np.int64]:
        """int64 (n,): the first position of each one's text; a blank one's is its own."""
        ordered = self.raw[self.order]
        starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        first = np.empty(len(self), np.int64)
        first[self.order] = np.repeat(self.order[starts], np.diff([*starts, len(self)]))
        return np.where(self.raw == b"", np.arange(len(self)), first)


def _utf8(text: str) -> bytes:
    """A text's bytes as stored; those of a text that can't be stored are no stored text's."""
    try:
        return text.encode("utf-8", TEXT_ERRORS)
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
