"""Row filters: ``split=test & domain!=sketch``, ``place=land|water``."""

from __future__ import annotations

import dataclasses

from ncm_cli.errors import UsageError


@dataclasses.dataclass(frozen=True, slots=True)
class Term:
    """``column=a|b`` or, with ``negated``, ``column!=a|b``."""

    column: str
    values: tuple[str, ...]
    negated: bool = False


def parse_where(text: str) -> tuple[Term, ...]:
    """The terms of a filter, all of which a row must meet; an empty text is no term.

    Raises `UsageError` for text that isn't terms joined by ``&``.
    """
    if not text.strip():
        return ()
    return tuple(_term(part, text) for part in text.split("&"))


def _term(part: str, text: str) -> Term:
    column, equals, values = part.partition("=")
    negated = column.endswith("!")
    name = column.removesuffix("!").strip()
    alternatives = tuple(value.strip() for value in values.split("|"))
    if not equals or not name or not all(alternatives):
        raise UsageError(
            "a row filter that can't be read",
            where=part.strip() or "an empty term",
            found=repr(text),
            expected="terms like split=test or place!=land|water, joined by &",
        )
    return Term(name, alternatives, negated)
