"""The options of ``ncm pairs``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from ncm_cli.errors import UsageError
from ncm_cli.images.options import TextOptions, parse_prompt
from ncm_cli.options import argument, given_flags, option
from ncm_cli.store.pairs import COUNTERFACTUAL, MATCHED

MATCHES = ("random", "nearest", "same-id", "iterative")
STRADDLES = ("exclude", "error", "keep")

_MATCHING = "Matching"
_SPLITS = "Held-out pairs and splits"


def parse_holdout(text: str) -> float | int:
    """``0.25`` is a fraction of the pairs, ``64`` a number of pairs, ``0`` none."""
    try:
        number = float(text)
        if not number >= 0 or (number >= 1 and (number != int(number) or "." in text)):
            raise ValueError
    except (ValueError, OverflowError):
        raise UsageError(
            "--holdout can't be read",
            found=repr(text),
            expected="a fraction below 1 such as 0.25, a number of pairs such as 64, or 0",
        ) from None
    return number if 0 < number < 1 else int(number)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairsOptions(TextOptions):
    """Options of ``ncm pairs``; the fields are the long options and the recipe's keys."""

    source: Path | None = argument(
        None,
        help="Table of matched ids (CSV, TSV or Parquet), unless --match makes the pairs.",
        role="input",
        held="table",
    )
    features: Path = option(help="Feature store that holds the rows.", role="input", flags=("-f",))
    output: Path = option(help="Pair store to write.", role="output", flags=("-o",), writes=("pairs",))
    features_b: Path | None = option(
        None, help="Store of the second members, if not --features; of the same encoder.", role="input"
    )
    a_col: str = option(
        "id_a", help="Column of the table with the first member's id.", metavar="COLUMN", columns_of="source"
    )
    b_col: str = option(
        "id_b", help="Column of the table with the second member's id.", metavar="COLUMN", columns_of="source"
    )
    match: str | None = option(None, help="How to make pairs without a table.", choices=MATCHES)
    kind: str | None = option(
        None,
        help="What the pairs are: counterfactual (one thing seen twice) or matched (different rows of one "
        "label). By default, random, nearest and iterative pairs are matched, and a table's pairs if their "
        "members have one label and differ in a column of the store.",
        choices=(COUNTERFACTUAL, MATCHED),
    )
    prompts: tuple[str, ...] = option(
        (),
        help="A prompt such as 'a {class} on land': every two prompts make a pair of texts. Prompts joined "
        "by | are a set of their own; a file has one set per line. May be repeated.",
        metavar="PROMPT",
        role="name-or-input",
        parse=parse_prompt,
    )
    seed: int = option(0, least=0, help="Seed of every random choice.")

    same: str | None = option(
        None, help="Columns that both members share, such as label.", group=_MATCHING, metavar="COLUMNS"
    )
    across: str | None = option(
        None,
        help="Columns of which at least one differs, such as domain.",
        group=_MATCHING,
        metavar="COLUMNS",
    )
    where: str | None = option(
        None,
        help="Rows that may be paired. By default all for same-id, and for the others the training rows, if "
        "the split column names them.",
        metavar="WHERE",
        group=_MATCHING,
    )
    count: int | None = option(
        None, least=1, help="Number of pairs; by default as many as possible.", group=_MATCHING
    )
    rounds: int = option(10, least=1, help="Maximum rounds of iterative.", group=_MATCHING)
    dims: int | None = option(
        None,
        least=1,
        help="Dimensions of iterative's representation; by default one fewer than classes, at least 2.",
        group=_MATCHING,
    )

    drop: Path | None = option(
        None,
        help="Table of pairs (columns id_a and id_b) to leave out, as the page of ncm report writes it; the "
        "other pairs stay the same.",
        metavar="FILE",
        role="input",
        held="table",
    )

    holdout: str = option(
        "0",
        help="Pairs to hold out for choosing the rank, instead of cross-fitting: a fraction, or a number.",
        group=_SPLITS,
        parse=parse_holdout,
    )
    holdout_col: str | None = option(
        None,
        help="Column of the table that says which pairs are held out (1/0, yes/no).",
        group=_SPLITS,
        metavar="COLUMN",
        columns_of="source",
    )
    straddling: str = option(
        "exclude",
        help="What to do with pairs of a training and a test row.",
        choices=STRADDLES,
        group=_SPLITS,
    )
    test: str | None = option(
        None,
        help="The test rows, if not those of a split named test, testing or heldout.",
        group=_SPLITS,
        metavar="WHERE",
    )

    def refusals(self) -> Iterator[UsageError]:
        """Why these options can't be used together."""
        yield from super().refusals()
        ways = [self.source is not None, self.match is not None, bool(self.prompts)]
        if sum(ways) != 1:
            fix = f"ncm pairs PAIRS.csv -f F.h5 -o P.h5, or --match {'|'.join(MATCHES)}"
            if self.source is not None and self.prompts:
                fix = f"--prompts before each prompt: --prompts {self.prompts[0]!r} --prompts '{self.source}'"
            yield UsageError(
                "pairs come either from a table, from --match or from --prompts",
                found="several of them" if any(ways) else "none of them",
                fix=fix,
            )
        if not self.prompts and (idle := given_flags(self, {"classes", "class_map"})):
            yield UsageError(f"{idle[0]} needs --prompts", fix="--prompts 'a photo of a {class} on land' ...")
        if self.kind == MATCHED and (self.prompts or self.match == "same-id"):
            what = "views of one row aren't different rows" if self.match else "prompts aren't rows"
            yield UsageError(f"--kind {MATCHED} is for different rows", found=what, fix="leave --kind out")
        if self.holdout_col and self.source is None:
            yield UsageError("--holdout-col needs a table of pairs", fix="--holdout 0.25 holds out at random")
        if self.match is None:
            row_options = ("features_b", "test") if self.prompts else ()
            for name in row_options:
                if getattr(self, name) is not None:
                    flag = f"--{name.replace('_', '-')}"
                    yield UsageError(f"{flag} is for rows, not for --prompts", fix=f"leave {flag} out")
            for name in ("same", "across", "where", "count"):
                if getattr(self, name) is not None:
                    yield UsageError(
                        f"--{name} needs --match",
                        fix="with a table, the table alone says which rows are paired",
                    )
        elif self.features_b is None and self.match == "same-id":
            yield UsageError(
                "--match same-id pairs the rows of two stores", fix="name the other store with --features-b"
            )
        elif self.features_b is None and self.across is None:
            yield UsageError(
                f"--match {self.match} in one store needs --across",
                expected=f"a column in which the members differ: ncm info {self.features} lists them",
                fix="such as --same label --across domain",
            )
        if self.match == "iterative" and self.same is None:
            yield UsageError(
                "--match iterative needs --same: MatchDG matches within a class", fix="such as --same label"
            )
