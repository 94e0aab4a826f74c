"""``ncm pairs``: matched rows -> differences, their spectrum, and what speaks for and against them.

Pairs come from a table of matched ids, where every problem is found before any is reported, or from
`matched`. Can they be trusted? A pair store says which are held out, which straddle training and test, which
repeat others or have no difference, and which are likely wrong matches, as JSON values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli.errors import InputError, listing, nearest
from ncm_cli.options import as_json, check, given_flags
from ncm_cli.pairs.diagnostics import diagnose
from ncm_cli.pairs.matched import Matcher, same_id
from ncm_cli.pairs.members import Mask, Members, Rows, Stores
from ncm_cli.pairs.options import PairsOptions, parse_holdout
from ncm_cli.pairs.texts import text_members
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.solvers.projection import spectrum
from ncm_cli.store.columns import Column
from ncm_cli.store.digests import fingerprint, require_same_encoder, without_view
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.pairs import TEXT, PairStore, write_pairs
from ncm_cli.store.roles import role_of, split_column, split_values, unrecognised
from ncm_cli.store.rows import FeatureRows
from ncm_cli.store.tables import Table, read_table

SHOWN = 50
"""Problems that an error lists one by one."""

HINTED = 5
"""Unknown ids of a column that get a suggestion: looking for one reads every id of the store."""


def pairs(options: PairsOptions, *, reporter: Reporter = SILENT) -> dict[str, Any]:
    """Make pairs, describe them, and write the pair store; what ``--json`` prints.

    Raises
    ------
    UsageError
        Not one of a table, ``--match`` and ``--prompts``, or options that don't fit the strategy.
    InputError
        Ids, columns or filters that aren't there, prompts that can't be used, or no pair left.
    MismatchError
        Two stores of different encoders, or a text tower of another encoder than the store's.
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
            return _matched(options, (store_a, store_b), reporter)


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
    # The size of the members bounds how exactly their differences can be known in float32.
    square = np.einsum("kd,kd->", features_a, features_a, dtype=np.float64) / max(features_a.size, 1)
    fitted = delta[:, ~members.holdout] if members.holdout.any() else delta
    found = spectrum(fitted, magnitude=float(np.sqrt(square)))
    labels = [_labels(stores[0], members.a), _labels(stores[1], members.b)]
    diagnostics = diagnose(members, labels, delta, together, found, options.seed, reporter)
    base = without_view(stores[0].encoder)
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
        singular_values=found.singular_values[: found.rank],
        strategy=strategy,
        options=as_json(options),
        encoder=base,
        fingerprint=fingerprint(base),
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
    """What a pair store records of a feature store; of an augmented view also the augmentation."""
    view = (store.encoder.get("view") or {}).get("augment")
    return {"path": str(store.path), "content_sha256": store.content_sha256} | (
        {"augment": view} if view else {}
    )


def find_members(options: PairsOptions, stores: Stores, reporter: Reporter) -> Members:
    """The pairs of the table, or those that ``--match`` chooses."""
    if options.source is None:
        if options.match == "same-id":
            return same_id(options, stores, reporter)
        return Matcher(options, stores, reporter).run()
    table = read_table(options.source, what="table of pairs")
    if options.holdout_col is None and "holdout" in table.columns:
        reporter.warn("the table's column 'holdout' isn't used: --holdout-col holdout uses it")
    return _from_table(table, options, stores)


def hold_out(members: Members, component: Rows, options: PairsOptions, reporter: Reporter) -> Members:
    """Members with their held-out pairs chosen, if they aren't yet.

    Pairs that share an id, directly or through others, go to the same side, so that nothing of a
    held-out pair is in the basis.
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
    held = split_components(component, count, np.random.default_rng(options.seed))
    if count and held.sum() < count / 2:
        reporter.warn(
            f"only {int(held.sum())} of the {count} pairs wanted are held out: pairs that share ids stay "
            f"together, and the largest such set has {np.bincount(component).max()} of {len(members)} pairs"
        )
    return dataclasses.replace(members, holdout=held)


def split_components(component: Rows, count: int, rng: np.random.Generator) -> Mask:
    """(k,) a mask of at most ``count`` pairs made of whole components, taken in random order."""
    sizes = np.bincount(component, minlength=1)
    chosen = np.zeros(len(sizes), dtype=bool)
    for number in rng.permutation(len(sizes)):
        chosen[number] = sizes[number] <= count
        count -= int(sizes[number]) * chosen[number]
    return np.asarray(chosen[component])


def drop(members: Members, path: Path) -> Members:
    """Members without the pairs of a table, whose ids may come in either order.

    Raises `InputError` that names the rows of pairs that aren't there; one that is left out for straddling
    training and test may be among them.
    """
    table = read_table(path, what="table of pairs to drop")
    ids = members.ids()
    known = {*ids, *members.straddlers}
    listed = list(zip(table.column("id_a"), table.column("id_b"), strict=True))
    # In one store a pair is the same the other way round; of two stores it may be another one.
    either_way = members.stores[0] is members.stores[1]
    wanted = {pair for pair in listed if pair in known}
    wanted |= {(b, a) for a, b in listed if (b, a) in known and (either_way or (a, b) not in known)}
    unknown = [at for at, (a, b) in enumerate(listed) if not {(a, b), (b, a)} & wanted]
    if unknown:
        shown = (f"\n    {table.row_name(at)}: {' – '.join(listed[at])}" for at in unknown[:SHOWN])
        raise InputError(
            f"{len(unknown)} of {len(listed)} pairs to drop aren't among the pairs",
            where=path,
            found="".join(shown) + (f"\n    and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else ""),
            expected="pairs that the same options make without --drop",
            fix="give the options and the stores with which the looked-at pairs were made, the seed included",
        )
    keep = np.array([pair not in wanted for pair in ids], dtype=bool)
    if not keep.any():
        raise InputError("every pair is dropped", where=path, found=f"{len(ids)} pairs")
    return dataclasses.replace(members.take(keep), dropped=tuple(members.ids(~keep)))


_TRAIN, _TEST = 1, 2
_BITS = {"train": _TRAIN, "val": _TRAIN, "test": _TEST, None: 0}


def straddling(members: Members, options: PairsOptions, reporter: Reporter) -> Members:
    """Members without the pairs of a training and a test row, which are named; or an error.

    A row whose file is byte for byte that of a test row counts as a test row too. Without a split
    column nothing is known, and nothing straddles; where its values say nothing, that is said.
    """
    store, test, rule = members.stores[0], options.test, options.straddling
    if test is None and (what := unrecognised(store, ["train", "test"])):
        say = reporter.warn if None in split_values(store).values() else reporter.note
        say(f"{what}: pairs of training and test rows can't be told from others; --test W names test rows")
    sides = {store: _sides(store, test) for store in dict.fromkeys(members.stores)}
    both = sides[store][members.a] | sides[members.stores[1]][members.b]
    mixed = both == _TRAIN | _TEST
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
    in_test = int((both == _TEST).sum())
    if in_test:
        reporter.note(
            f"{in_test} pairs hold test rows: right for the oracle pairs of ncm bound, "
            "but a probe fitted with them has seen the test domain"
        )
    facts = {**members.facts, "test_pairs": in_test}
    return dataclasses.replace(members, facts=facts, straddlers=tuple(ids))


def _sides(store: FeatureRows, test: str | None) -> Rows:
    """(N,) bits: 1 training or validation, 2 test, 3 a training row that is also the file of a test row."""
    sides = np.zeros(store.rows, dtype=np.int64)
    split = split_column(store)
    if split is not None:
        sides = np.array([*(_BITS[role_of(name)] for name in split.categories), 0])[split.codes]
    if test is not None:
        chosen = store.mask(test)
        sides = np.where(chosen, _TEST, np.where(sides == _TEST, 0, sides))
        if not (sides & _TRAIN).any():
            # Without a split that is named train, whatever isn't a test row is a training row.
            sides[~chosen] = _TRAIN
    nodes = store.content_nodes
    tests = np.isin(nodes, nodes[sides == _TEST])
    return np.where(tests & (sides == _TRAIN), _TRAIN | _TEST, sides)


_MARKS = {
    **dict.fromkeys(("1", "1.0", "true", "yes", "y", "t"), True),
    **dict.fromkeys(("0", "0.0", "false", "no", "n", "f"), False),
}


def _from_table(table: Table, options: PairsOptions, stores: Stores) -> Members:
    """The members of each row's pair.

    One `InputError` names, with their row numbers, all blank ids, ids that aren't in the store (ids are text:
    ``1`` isn't ``01``), pairs of a row with itself and marks of the held-out column that are neither yes nor
    no.
    """
    problems: list[tuple[int, str]] = []
    found: list[Rows] = []
    columns = ((options.a_col, "--a-col"), (options.b_col, "--b-col"))
    for (column, option), store in zip(columns, stores, strict=True):
        ids = table.column(column, option=option)
        at = store.positions(ids)
        unknown = 0
        for index, name in enumerate(ids):
            # A foreign store may hold a blank id; a blank matches nothing all the same.
            if not name.strip():
                problems.append((index, f"{column} is blank"))
            elif at[index] < 0:
                unknown += 1
                hint = _hint(name, store.ids) if unknown <= HINTED else None
                more = f" (did you mean {hint!r}?)" if hint else ""
                problems.append((index, f"{column} {name!r} isn't in {store.path.name}{more}"))
            elif found and stores[0] is stores[1] and found[0][index] == at[index]:
                problems.append((index, f"{name!r} is paired with itself"))
        found.append(at)
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
        every = [f"\n    {table.row_name(index)}: {text}" for index, text in sorted(problems)]
        rest = f"\n    and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
        raise InputError(
            f"{len(every)} {'problem' if len(every) == 1 else 'problems'} in the table of pairs",
            where=table.path,
            found="".join(every[:SHOWN]) + rest,
            expected="ids of rows in the store, as text: '1' isn't '001'",
            fix="correct or remove these rows",
        )
    return Members(stores, found[0], found[1], holdout)


def _hint(name: str, known: Sequence[str]) -> str | None:
    """An id that differs in what spreadsheets lose (zeros in front, folder, extension), else the nearest."""

    def bare(name: str) -> str:
        text = name.strip().replace("\\", "/").rstrip("/").rsplit("/", 1)[-1].casefold()
        return (Path(text).stem or text).lstrip("0") or "0"

    wanted = bare(name)
    return next((one for one in known if bare(one) == wanted), None) or nearest(name, known[:5000])


def _labels(store: FeatureRows, rows: Rows) -> tuple[str, ...]:
    """Labels of the rows; '' where the store has none."""
    if store.label_column is None:
        return ("",) * len(rows)
    column = store.columns[store.label_column]
    if isinstance(column, Column):
        names = [*column.categories, ""]
        return tuple(names[code] for code in column.codes[rows])
    return tuple("" if value != value else repr(value) for value in column.values[rows].tolist())
