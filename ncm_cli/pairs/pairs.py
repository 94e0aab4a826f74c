"""``ncm pairs``: makes pairs, leaves some out (`straddling`, `drop`), and writes the rest to a pair store.

Pairs come from a table of matched ids, whose problems are all reported at once, from `matched` or from
`texts`. `straddling` leaves out pairs of a training and a test row, `drop` those that ``--drop`` names.
`matched` leaves out rows without a partner by ``--same`` and ``--across``, and pairs beyond ``--count``.
Held-out pairs are in the store but not in its spectrum. Later, ``ncm fit`` leaves out pairs with a validation
or test row, by ``--overlap``: `ncm_cli.probes.usable_pairs.read_usable_pairs`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli.blocks import Mask
from ncm_cli.errors import InputError, MismatchError, listing, nearest
from ncm_cli.options import check, given_flags
from ncm_cli.pairs.diagnostics import diagnose
from ncm_cli.pairs.matched import Matcher, same_id
from ncm_cli.pairs.members import Members, Positions, Stores
from ncm_cli.pairs.options import PairsOptions, parse_holdout
from ncm_cli.pairs.texts import text_members
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.solvers.folds import draw_sets
from ncm_cli.solvers.projection import spectrum
from ncm_cli.store.columns import Column
from ncm_cli.store.digests import fingerprint, require_same_encoder, without_view
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.files import jsonable
from ncm_cli.store.pairs import TEXT, PairStore, write_pairs
from ncm_cli.store.roles import role_of, split_column, split_values, unrecognised
from ncm_cli.store.rows import FeatureRows
from ncm_cli.store.table import Table
from ncm_cli.store.tables import read_table

MAX_PROBLEMS = 50
"""Most problems that one error lists."""

MAX_HINTS = 5
"""Most unknown ids in a column that get a suggestion: each takes a pass over all ids of the store."""


def pairs(options: PairsOptions, *, reporter: Reporter = SILENT) -> dict[str, Any]:
    """Make pairs, diagnose them and write the pair store; returns what ``--json`` prints.

    Raises
    ------
    UsageError
        None or several of a table, ``--match`` and ``--prompts``, or options that don't fit the strategy.
    InputError
        Unknown ids, columns or filters, unusable prompts, or no pair left.
    MismatchError
        Two stores of different encoders, or a text tower that isn't the store's encoder's.
    """
    check(options)
    if options.match != "iterative" and (idle := given_flags(options, {"rounds", "dims"})):
        source = "a table or prompts" if options.match is None else f"--match {options.match}"
        reporter.warn(f"no effect with {source}: {', '.join(idle)}")
    first, second = options.features, options.features_b
    with FeatureStore(first) as store_a:
        if options.prompts:
            return _pairs(options, text_members(options, store_a, reporter), [store_a], reporter)
        if second is None or (first.exists() and second.exists() and first.samefile(second)):
            check(dataclasses.replace(options, features_b=None))
            return _matched(options, (store_a, store_a), reporter)
        with FeatureStore(second) as store_b:
            encoders = (store_a.encoder, store_b.encoder)
            require_same_encoder(str(first), encoders[0], str(second), encoders[1], ignore_view=True)
            _require_same_numbers(store_a, store_b)
            return _matched(options, (store_a, store_b), reporter)


def _require_same_numbers(first: FeatureRows, second: FeatureRows) -> None:
    """Raise `MismatchError` if ids are row numbers of different tables, so that equal ids mean nothing."""
    if first.row_numbers_of != second.row_numbers_of:
        numbered = [str(store.path) for store in (first, second) if store.row_numbers_of]
        raise MismatchError(
            "ids that are the row numbers of different tables",
            where=f"{first.path} and {second.path}",
            found=f"rows are numbered in {' and '.join(numbered)}",
            expected="ids that name the same things in both stores",
            fix="embed both with a column of ids: --id-col COLUMN",
        )


def _matched(options: PairsOptions, stores: Stores, reporter: Reporter) -> dict[str, Any]:
    members = straddling(find_members(options, stores, reporter), options, reporter)
    return _pairs(options, members, list(dict.fromkeys(stores)), reporter)


def _pairs(
    options: PairsOptions, members: Members, sources: Sequence[FeatureRows], reporter: Reporter
) -> dict[str, Any]:
    stores = members.stores
    together = members.components()
    members = hold_out(members, together, options, reporter)
    if options.drop is not None:
        members = drop(members, options.drop)
        together = members.components()
    assert members.holdout is not None
    if members.holdout.all():
        raise InputError("every pair is held out, so none is left for the basis")
    features_a, features_b = stores[0].read(members.a), stores[1].read(members.b)
    with np.errstate(over="ignore"):  # an infinite difference is refused just below
        delta = np.ascontiguousarray((features_a - features_b).T)
    # The members' magnitude limits how exactly float32 can hold their differences.
    square = np.einsum("kd,kd->", features_a, features_a, dtype=np.float64) / max(features_a.size, 1)
    fitted = delta[:, ~members.holdout] if members.holdout.any() else delta
    fitted_spectrum = spectrum(fitted, magnitude=float(np.sqrt(square)))
    labels = [_labels(stores[0], members.a), _labels(stores[1], members.b)]
    diagnostics = diagnose(members, labels, delta, together, fitted_spectrum, options.seed, reporter)
    encoder = without_view(stores[0].encoder)
    ids_a, ids_b = zip(*members.ids(), strict=True)
    strategy = TEXT if options.prompts else options.match or "table"
    written = PairStore(
        features_a=features_a,
        features_b=features_b,
        id_a=ids_a,
        id_b=ids_b,
        label_a=labels[0],
        label_b=labels[1],
        holdout=members.holdout,
        singular_values=fitted_spectrum.singular_values[: fitted_spectrum.rank],
        strategy=strategy,
        options=jsonable(options),
        encoder=encoder,
        fingerprint=fingerprint(encoder),
        sources=[_source(store) for store in sources],
        diagnostics=diagnostics,
    )
    write_pairs(options.output, written)
    return {
        "output": str(options.output),
        "strategy": strategy,
        "pairs": len(members),
        "held_out": int(members.holdout.sum()),
        "dropped": len(members.dropped),
        "singular_values": written.singular_values.tolist(),
        "diagnostics": diagnostics,
    }


def _source(store: FeatureRows) -> dict[str, Any]:
    """The record of a feature store in a pair store, with the augmentation if it is a view."""
    view, numbers = (store.encoder.get("view") or {}).get("augment"), store.row_numbers_of
    record = {"path": str(store.path), "content_sha256": store.content_sha256}
    return record | ({"augment": view} if view else {}) | ({"row_numbers_of": numbers} if numbers else {})


def find_members(options: PairsOptions, stores: Stores, reporter: Reporter) -> Members:
    """The pairs of the table, or those that ``--match`` makes."""
    if options.source is None:
        if options.match == "same-id":
            return same_id(options, stores, reporter)
        return Matcher(options, stores, reporter).run()
    table = read_table(options.source, what="table of pairs")
    if options.holdout_col is None and "holdout" in table.columns:
        reporter.note("the table's column 'holdout' isn't used: --holdout-col holdout uses it")
    return _from_table(table, options, stores)


def hold_out(members: Members, component: Positions, options: PairsOptions, reporter: Reporter) -> Members:
    """Members with held-out pairs chosen, unless the table chooses them.

    Pairs that share an id, directly or through others, go to the same side, so that no row of a held-out pair
    is in the basis.
    """
    if members.holdout is not None:
        leaking = np.intersect1d(component[members.holdout], component[~members.holdout])
        if len(leaking):
            reporter.warn(
                f"{int(np.isin(component, leaking).sum())} pairs share an id with pairs on the other side "
                "of the holdout, so the held-out pairs aren't independent of the basis"
            )
        return members
    wanted = parse_holdout(options.holdout)
    count = round(wanted * len(members)) if wanted < 1 else int(wanted)
    if count >= len(members) and count > 0:
        raise InputError(
            f"--holdout {count} leaves no pair for the basis",
            found=f"{len(members)} pairs",
            fix="hold out fewer pairs, or a fraction such as 0.25",
        )
    held = draw_sets(component, count, options.seed)
    if count and held.sum() < count / 2:
        reporter.warn(
            f"only {int(held.sum())} of the {count} pairs wanted are held out: pairs that share ids stay "
            f"together, and the largest such set has {np.bincount(component).max()} of {len(members)} pairs"
        )
    return dataclasses.replace(members, holdout=held)


def drop(members: Members, path: Path) -> Members:
    """Members without the pairs of a table, whose ids may be in either order.

    Raises `InputError` that names the table's rows that are no pair here. Pairs that `straddling` has already
    left out may be in the table.
    """
    table = read_table(path, what="table of pairs to drop")
    ids = members.ids()
    known = {*ids, *members.straddlers}
    listed = list(zip(table.column("id_a"), table.column("id_b"), strict=True))
    # In one store the order of a pair's ids doesn't matter; in two stores (b, a) may be another pair.
    either_way = members.stores[0] is members.stores[1]
    wanted = {pair for pair in listed if pair in known}
    wanted |= {(b, a) for a, b in listed if (b, a) in known and (either_way or (a, b) not in known)}
    unknown = [at for at, (a, b) in enumerate(listed) if not {(a, b), (b, a)} & wanted]
    if unknown:
        raise InputError(
            f"{len(unknown)} of {len(listed)} pairs to drop aren't among the pairs",
            where=path,
            found=_lines([f"{table.row_name(at)}: {' – '.join(listed[at])}" for at in unknown]),
            expected="pairs that the same options make without --drop",
            fix="give the same options, seed and stores that the reviewed pairs were made with",
        )
    keep = np.array([pair not in wanted for pair in ids], dtype=bool)
    if not keep.any():
        raise InputError("every pair is dropped", where=path, found=f"{len(ids)} pairs")
    return dataclasses.replace(members.take(keep), dropped=tuple(members.ids(~keep)))


def straddling(members: Members, options: PairsOptions, reporter: Reporter) -> Members:
    """Members without the pairs of a training and a test row, whose ids are kept; or an error.

    A row whose file is byte for byte that of a test row counts as a test row too. Without a split column no
    pair straddles; a warning tells if the column's values aren't recognised.
    """
    store, test, rule = members.stores[0], options.test, options.straddling
    if test is None and (what := unrecognised(store, ["train", "test"])):
        say = reporter.warn if None in split_values(store).values() else reporter.note
        say(f"{what}: pairs of a training and a test row can't be recognised; --test W names the test rows")
    sides = {store: _sides(store, test) for store in dict.fromkeys(members.stores)}
    first, second = (sides[store] for store in members.stores)
    train, tests = (a[members.a] | b[members.b] for a, b in zip(first, second, strict=True))
    mixed = train & tests
    ids = members.ids(mixed)
    shown = [f"{a} – {b}" for a, b in ids]
    if ids and rule == "error":
        raise InputError(
            f"{len(ids)} pairs straddle training and test",
            found=listing(shown),
            fix="remove them, or --straddling exclude",
        )
    if ids:
        verb = "left out" if rule == "exclude" else "kept"
        reporter.warn(f"{len(ids)} pairs of a training and a test row are {verb}: {listing(shown, 5)}")
    if rule == "exclude":
        members = members.take(~mixed)
    if not len(members):
        raise InputError(
            "every pair straddles training and test",
            fix="pair rows of one side, or --straddling keep if the pairs are for `ncm bound` only",
        )
    in_test = int((tests & ~train).sum())
    if in_test:
        reporter.note(
            f"{in_test} pairs have test rows: that is right for the oracle pairs of ncm bound, "
            "but a probe fitted with them has seen the test domain"
        )
    facts = {**members.facts, "test_pairs": in_test}
    return dataclasses.replace(members, facts=facts, straddlers=tuple(ids))


def _sides(store: FeatureRows, test: str | None) -> tuple[Mask, Mask]:
    """(N,) training and validation rows, and test rows with the training rows that are copies of them."""
    train, tests = np.zeros(store.rows, bool), np.zeros(store.rows, bool)
    split = split_column(store)
    if split is not None:
        roles = [*map(role_of, split.categories), None]
        train = np.array([role in ("train", "val") for role in roles])[split.codes]
        tests = np.array([role == "test" for role in roles])[split.codes]
    if test is not None:
        tests = store.mask(test)
        train = train & ~tests
        if not train.any():
            # If no split is named train, all rows but the test rows are training rows.
            train = ~tests
    nodes = store.content_nodes
    return train, tests | (train & np.isin(nodes, nodes[tests]))


_MARKS = {
    **dict.fromkeys(("1", "1.0", "true", "yes", "y", "t"), True),
    **dict.fromkeys(("0", "0.0", "false", "no", "n", "f"), False),
}


def _from_table(table: Table, options: PairsOptions, stores: Stores) -> Members:
    """The members of each row's pair.

    One `InputError` lists, by row, all blank ids, ids that aren't in the store (ids are text: ``1`` isn't
    ``01``), rows paired with themselves and marks in the held-out column that are neither yes nor no.
    """
    problems: list[tuple[int, str]] = []
    positions: list[Positions] = []
    columns = ((options.a_col, "--a-col"), (options.b_col, "--b-col"))
    for (column, option), store in zip(columns, stores, strict=True):
        ids = table.column(column, option=option)
        at = store.positions(ids)
        unknown = 0
        for index, name in enumerate(ids):
            # A blank matches nothing, even if a store written elsewhere has a blank id.
            if not name.strip():
                problems.append((index, f"{column} is blank"))
            elif at[index] < 0:
                unknown += 1
                hint = _hint(name, store.ids) if unknown <= MAX_HINTS else None
                suggestion = f" (did you mean {hint!r}?)" if hint else ""
                problems.append((index, f"{column} {name!r} isn't in {store.path.name}{suggestion}"))
            elif positions and stores[0] is stores[1] and positions[0][index] == at[index]:
                problems.append((index, f"{name!r} is paired with itself"))
        positions.append(at)
    holdout = None
    if options.holdout_col is not None:
        marks = table.column(options.holdout_col, option="--holdout-col")
        read = [_MARKS.get(mark.casefold()) for mark in marks]
        holdout = np.array([bool(mark) for mark in read], dtype=bool)
        problems += [
            (index, f"{options.holdout_col} is {marks[index]!r}, not 1 or 0")
            for index, mark in enumerate(read)
            if mark is None
        ]
    if problems:
        raise InputError(
            f"{len(problems)} {'problem' if len(problems) == 1 else 'problems'} in the table of pairs",
            where=table.path,
            found=_lines([f"{table.row_name(index)}: {text}" for index, text in sorted(problems)]),
            expected="ids of rows in the store, as text: '1' isn't '001'",
            fix="correct or remove these rows",
        )
    return Members(stores, positions[0], positions[1], holdout)


def _lines(texts: Sequence[str]) -> str:
    """Texts on separate lines, at most the first `MAX_PROBLEMS`."""
    rest = f"\n    and {len(texts) - MAX_PROBLEMS} more" if len(texts) > MAX_PROBLEMS else ""
    return "".join(f"\n    {text}" for text in texts[:MAX_PROBLEMS]) + rest


def _hint(name: str, known: Sequence[str]) -> str | None:
    """An id that differs only in leading zeros, folder or extension, as from a spreadsheet, or a near one."""

    def bare(name: str) -> str:
        text = name.strip().replace("\\", "/").rstrip("/").rsplit("/", 1)[-1].casefold()
        return (Path(text).stem or text).lstrip("0") or "0"

    wanted = bare(name)
    return next((id for id in known if bare(id) == wanted), None) or nearest(name, known[:5000])


def _labels(store: FeatureRows, rows: Positions) -> tuple[str, ...]:
    """Labels of the rows; '' if the store has none."""
    if store.label_column is None:
        return ("",) * len(rows)
    column = store.columns[store.label_column]
    if isinstance(column, Column):
        names = [*column.categories, ""]
        return tuple(names[code] for code in column.codes[rows])
    return tuple("" if value != value else repr(value) for value in column.values[rows].tolist())
