"""Reads rows and pairs into the problem that options name or that a probe was fitted on."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli.blocks import Codes, Mask
from ncm_cli.errors import InputError, MismatchError, NcmError, listing
from ncm_cli.options import parse_names, values_of
from ncm_cli.probes.cells import domain_columns, environment_columns, read_cells
from ncm_cli.probes.leaks import treat_near_copies
from ncm_cli.probes.options import FitOptions, PairPaths, RowOptions
from ncm_cli.probes.problem import (
    ROLE_NAMES,
    Pairs,
    Problem,
    RawRows,
    Roles,
    Variant,
    pairs_digest,
    rows_digest,
)
from ncm_cli.probes.usable_pairs import (
    keeps,
    member_rows,
    read_pair_stores,
    read_usable_pairs,
)
from ncm_cli.progress import Reporter
from ncm_cli.solvers.methods import FIT_METHODS
from ncm_cli.store.columns import Column
from ncm_cli.store.digests import without_view
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.pairs import SAME_ID, PairStore
from ncm_cli.store.probe import Probe
from ncm_cli.store.roles import (
    Groups,
    Role,
    Target,
    classes_among,
    label_name,
    make_groups,
    read_target,
    split_filter,
    split_values,
    unrecognised,
    unused_filter,
)
from ncm_cli.store.rows import FeatureRows


def read_problem(
    options: FitOptions,
    *,
    oracle: bool,
    reporter: Reporter,
    columns: Mapping[str, str | None] | None = None,
    compared_with: Probe | None = None,
    store: FeatureRows | None = None,
    pair_stores: Sequence[PairStore] = (),
) -> Problem:
    """Read what the options name, and refuse what doesn't belong together.

    Parameters
    ----------
    columns
        Columns in which training rows need a value, by the option that names them: see `RawRows.codes`. Those
        of ``upweight`` needn't be given.
    compared_with
        A probe to compare a fit on this problem with: its classes are used, and there are no validation or
        test rows.
    store
        The rows, if they are open already; with an empty encoder they accept pairs of any encoder.
    pair_stores
        The pairs, if they are read already.
    """
    with store or FeatureStore(options.features) as store:
        nodes = store.content_nodes
        roles = _roles(store, options, oracle, compared_with is None, reporter)
        copies = _drop_copies(store, roles, options.overlap, reporter)
        if compared_with is None or options.task == "regression":
            target = _target(store, options, roles.rows["train"])
        else:
            target = read_target(store, compared_with.target, compared_with.classes)
        if compared_with is None:
            treat_near_copies(store, roles, target, options.overlap, reporter)
        pairs = None
        if options.pairs is not None:
            pairs = read_usable_pairs(options.pairs, store, roles, options.overlap, reporter, pair_stores)
        groups = make_groups(store, options.groups) if options.groups else None
        domains, matched = _domains(store, options, target, pairs, roles.rows["train"])
        cells = (target.name, *domains) if any(matched) else ()
        upweight = options.named_upweight
        named = {"upweight": upweight, **(columns or {})}
        codes = {option: _codes(store, names) for option, names in named.items() if names}
        derived_codes: dict[str, Codes] = {}
        if domains:
            derived_codes |= read_cells(store, target, domains)
        if upweight is None and (upweight := ",".join(cells or (groups.columns if groups else ()))):
            derived_codes["upweight"] = _codes(store, upweight)

        def rows(mask: Mask) -> RawRows:
            where = np.flatnonzero(mask)
            return RawRows(
                ids=store.ids[where],
                X=store.rows_of(where),
                y=target.y[where],
                node=nodes[where],
                group=None if groups is None else groups.codes[where],
                codes={option: values[where] for option, values in (codes | derived_codes).items()},
            )

        parts: dict[Role, RawRows] = {}
        for role, mask in roles.rows.items():
            if roles.where[role] is None or (role == "test" and not oracle):
                continue
            known = _answered(store, target, mask, ROLE_NAMES[role], reporter)
            for option, values in codes.items() if role == "train" else ():
                flag, names = f"--{option.replace('_', '-')}", named[option]
                refusal = InputError(
                    f"no training row has a value of {names!r}", where=store.path, found=flag
                )
                lacking = f"training rows without a value of {names} ({flag})"
                known = _rows_with(store, known, values >= 0, lacking, refusal, reporter)
            parts[role] = rows(known)
            if role != "train" and groups is not None:
                _tell_groupless(parts[role], ROLE_NAMES[role], groups, reporter)
        extra = _extra(store, roles, target, pairs, rows, bool(cells) or options.pair_rows == "yes")
        members = None
        if domains and pairs is not None:
            measured = member_rows(store, pairs, pairs.of(matched if cells else [True] * len(matched)))
            members = rows(measured & target.known & (derived_codes["cell"] >= 0) & ~roles.val_or_test)
        return Problem(
            content_sha256=store.content_sha256,
            row_numbers_of=store.row_numbers_of,
            encoder=without_view(store.encoder),
            options=options,
            roles=roles,
            target=target,
            train=parts["train"],
            val=parts.get("val"),
            test=parts.get("test"),
            pairs=pairs,
            extra=extra,
            copies=copies,
            groups=groups,
            label_column=store.label_column,
            members=members if members is not None and len(members.ids) else None,
            cells=cells,
            matched=matched,
            upweight=upweight or None,
            variants=_variants(options, upweight, extra),
        )


def read_method_problem(
    options: Any,
    columns: Sequence[str],
    reporter: Reporter,
    *,
    features: Path,
    store: FeatureRows | None = None,
) -> Problem:
    """The problem of ``ncm sweep`` or ``ncm finetune``, which don't choose among rows and group weights.

    ``columns`` are options that name columns in which training rows need a value. Raises `InputError` without
    validation rows.
    """
    names = (field.name for field in dataclasses.fields(RowOptions) if field.name != "upweight")
    given = {name: getattr(options, name) for name in ("pairs", "output", "scaling", "scale_factor", *names)}
    problem = read_problem(
        FitOptions(features=features, upweight=options.upweight or "none", pair_rows="no", **given),
        oracle=options.test is not None,
        reporter=reporter,
        columns={name: getattr(options, name) for name in columns},
        store=store,
    )
    if problem.val is None:
        raise InputError(
            "no validation rows: nothing to choose by",
            where=features,
            fix="--val W: any filter that shares no row with --train and --test",
        )
    return problem


def _domains(
    store: FeatureRows, options: FitOptions, target: Target, pairs: Pairs | None, train: Mask
) -> tuple[tuple[str, ...], tuple[bool, ...]]:
    """The columns of domains, and for each pair store, whether its pairs were matched by label across some.

    If all pairs are augmented: the columns of the training rows' domains.
    """
    if pairs is None:
        return (), ()
    columns = [
        domain_columns(store, target, pair_store, pairs.row_a[pairs.kind == i], pairs.row_b[pairs.kind == i])
        for i, pair_store in enumerate(pairs.stores)
    ]
    matched = tuple(map(bool, columns))
    augmented = all(pair_store.strategy == SAME_ID for pair_store in pairs.stores)
    if any(matched) or not augmented or options.task == "regression":
        return tuple(dict.fromkeys(itertools.chain(*columns))), matched
    return environment_columns(store, target, options.groups, train), matched


def _variants(options: FitOptions, upweight: str | None, extra: RawRows | None) -> tuple[Variant, ...]:
    """The variants to try: with and without group weights, and the pairs' rows, unless an option decides.

    Raises `InputError` for ``--upweight auto`` without cells or groups, and for ``--pair-rows yes`` without
    such rows.
    """
    if options.upweight == "auto" and not upweight:
        raise InputError(
            "--upweight auto, but nothing says which cells to weight equally",
            found="neither pairs that were matched by label across a column, nor --groups",
            fix="--groups label,domain, or --upweight label,domain",
        )
    if options.pair_rows == "yes" and extra is None:
        raise InputError(
            "--pair-rows yes, but the pairs have no labelled rows outside training",
            where=listing(map(str, values_of(options.pairs))),
            fix="pairs with such rows: ncm pairs ... --where 'split=train|pool'; or leave --pair-rows out",
        )
    weights = (False, True) if options.weights_open and upweight else (options.named_upweight is not None,)
    rows = (False, True) if options.rows_open and extra is not None else (options.pair_rows == "yes",)
    return tuple(Variant(weighted, added) for weighted in weights for added in rows)


def _roles(store: FeatureRows, options: FitOptions, oracle: bool, tested: bool, reporter: Reporter) -> Roles:
    """The train, val and test masks by --train, --val and --test; refuses rows that are in two of them.

    Without ``tested`` there are training rows only.
    """
    none = np.zeros(store.rows, dtype=bool)
    where = {role: getattr(options, role) or split_filter(store, role) for role in ROLE_NAMES}
    if not tested:
        where |= {"val": None, "test": None}
    if where["train"] is None:
        raise InputError(
            "nothing says which rows to train on",
            where=store.path,
            found=unrecognised(store, ["train"]) or f"no split column; columns: {listing(store.columns)}",
            fix=f"--train W and --val W, such as --train {unused_filter(store, none)}; or embed a table "
            "with a split column, as ncm data folder writes it",
        )
    rows = {role: none if text is None else _selected(store, text) for role, text in where.items()}
    if oracle and options.test is None:
        test = where["test"]
        example = shlex.quote(test) if test else unused_filter(store, rows["train"])
        raise InputError(
            "--select oracle needs test rows to look at",
            fix=f"--test {example}, or a rule that needs no test domain: --select bound",
        )
    _refuse_shared(store, rows, "val", "train")
    _refuse_shared(store, rows, "val", "test")
    if options.test is not None:
        _refuse_shared(store, rows, "test", "train")
    elif (shared := rows["test"] & rows["train"]).any():
        reporter.warn(f"{int(shared.sum()):,} training rows are also rows of {where['test']}")
        rows["test"] = rows["test"] & ~shared
    what = unrecognised(store, ["test"]) if tested and options.test is None else None
    unused = ""
    if what or where["val"] is None:
        unused = unused_filter(store, np.any(list(rows.values()), axis=0))
    if what:
        say = reporter.warn if None in split_values(store).values() else reporter.note
        say(f"{what}: no rows are kept apart as test rows; --test W names them, such as --test {unused}")
    return Roles(where=where, rows=rows, unused=unused)


def _selected(store: FeatureRows, where: str) -> Mask:
    mask = store.mask(where)
    if not mask.any():
        raise InputError("a row filter selects no rows", where=store.path, found=repr(where))
    return mask


def _refuse_shared(store: FeatureRows, rows: dict[Role, Mask], role: Role, other: Role) -> None:
    shared = np.flatnonzero(rows[role] & rows[other])
    if shared.size:
        raise InputError(
            f"{ROLE_NAMES[role]} rows that are {ROLE_NAMES[other]} rows as well",
            where=store.path,
            found=f"{len(shared):,} rows, such as {store.ids[shared[0]]!r}",
            expected="each row in only one of train, validation and test, since shared rows make the score "
            "look too good",
            fix="choose --train, --val and --test so that no row is in two of them",
        )


def _drop_copies(store: FeatureRows, roles: Roles, overlap: str, reporter: Reporter) -> int:
    """Leave out training rows that are copies of validation or test rows; returns the number of copies."""
    train, others, nodes = roles.rows["train"], roles.val_or_test, store.content_nodes
    copies = np.flatnonzero(train & store.copies_of(others))
    if copies.size:
        twin = np.flatnonzero(others & (nodes == nodes[copies[0]]))[0]
        example = f"{store.ids[copies[0]]!r} is {store.ids[twin]!r}"
        what = f"{len(copies):,} training images are byte-identical to validation or test images ({example})"
        if not store.has_files:
            what = f"{len(copies):,} training rows have the features of validation or test rows ({example})"
        refusal = InputError(what, where=store.path, fix="--overlap exclude leaves them out of training")
        if not keeps(overlap, refusal, "they are left out of training", reporter):
            train[copies] = False
    return len(copies)


def _target(store: FeatureRows, options: FitOptions, train_rows: Mask) -> Target:
    """The target column as codes in the order of the training rows' classes, or as values for regression."""
    name = options.target or label_name(store)
    if options.task == "regression":
        return read_target(store, name, None)
    classes = classes_among(store, name, train_rows)
    if len(classes) < 2:
        raise InputError(
            "only one class among the training rows" if classes else "no training row has a label",
            where=f"{store.path}, column {name!r}",
            found=f"{classes[0]!r} on all {int(train_rows.sum()):,} rows"
            if classes
            else "missing on every row",
            expected="at least two classes",
            fix="another --train or --target",
        )
    return read_target(store, name, classes)


def _rows_with(
    store: FeatureRows, rows: Mask, known: Mask, lacking: str, refusal: NcmError, reporter: Reporter
) -> Mask:
    """The rows of a mask that have a value; reports how many have none, and refuses a mask without any.

    A row without a value is left out, so that it doesn't silently become part of a group of its own.
    """
    missing = np.flatnonzero(rows & ~known)
    if missing.size:
        reporter.warn(f"{missing.size:,} {lacking} are left out, such as {store.ids[missing[0]]!r}")
    if not (rows & known).any():
        raise refusal
    return rows & known


def _answered(store: FeatureRows, target: Target, rows: Mask, name: str, reporter: Reporter) -> Mask:
    """The rows of a mask whose target is known."""
    column = store.column(target.name)
    unseen = ""
    if isinstance(column, Column):
        codes = np.unique(column.codes[rows & ~target.known])
        texts = [column.categories[code] for code in codes if code >= 0]
        unseen = f" or with a class that training lacks ({listing(texts)})" if texts else ""
    refusal = InputError(
        f"no {name} row has a known {target.name!r}", where=store.path, fix="another filter or --target"
    )
    lacking = f"{name} rows without a {target.name}{unseen}"
    return _rows_with(store, rows, target.known, lacking, refusal, reporter)


def _codes(store: FeatureRows, names: str) -> Codes:
    """(N,) a code for each combination of the columns ``names``, −1 where one is missing."""
    if ";" in names:
        raise InputError(
            "several crossings where one is expected",
            found=repr(names),
            expected="columns separated by commas; only --groups takes several crossings",
        )
    return make_groups(store, names).codes[:, 0]


def _tell_groupless(rows: RawRows, name: str, groups: Groups, reporter: Reporter) -> None:
    assert rows.group is not None
    for names, missing in groups.lacking(rows.group):
        if missing == len(rows.ids):
            raise InputError(f"no {name} row has a value of {names!r}", found="--groups")
        if missing:
            reporter.warn(
                f"{missing:,} {name} rows without a value of {names} (--groups) are in none of its groups"
            )


def _extra(
    store: FeatureRows,
    roles: Roles,
    target: Target,
    pairs: Pairs | None,
    rows: Callable[[Mask], RawRows],
    labelled: bool,
) -> RawRows | None:
    """Labelled members of pairs that are neither training, validation nor test rows; None if there are none.

    Their labels are used only if the pairs were matched by them, or with ``labelled``.
    """
    if pairs is None:
        return None
    same = (parse_names(str(pair_store.options.get("same") or "")) for pair_store in pairs.stores)
    by_label = [target.name in {store.label_column if n == "label" else n for n in names} for names in same]
    which = pairs.of([labelled or known for known in by_label])
    mask = member_rows(store, pairs, which) & target.known & ~roles.rows["train"] & ~roles.val_or_test
    return rows(mask) if mask.any() else None


def reread_problem(
    probe: Probe,
    features: Path,
    pairs: PairPaths | None,
    *,
    where: str | None = None,
    reporter: Reporter,
) -> Problem:
    """The problem that a probe was fitted on, read again; with ``where``, on other training rows.

    Several pair stores may be in any order.

    Raises
    ------
    MismatchError
        The probe doesn't record what it was fitted on, ``fit`` doesn't have its method, or rows or pairs
        aren't those that it was fitted on.
    """
    recorded: Mapping[str, Any] = probe.meta.get("options") or {}
    data: Mapping[str, Any] = probe.meta.get("data") or {}
    if not {"features", "method", "solver", "train"} <= set(recorded) or "train_sha256" not in (
        data.get("features") or {}
    ):
        raise MismatchError(
            "the probe doesn't record what it was fitted on, so it can't be fitted again",
            found=f"a probe of ncm {probe.ncm_version}, method {probe.meta.get('method')}",
            fix="name a probe of ncm fit, made by this version",
        )
    names = {field.name for field in dataclasses.fields(FitOptions)}
    values = {name: value for name, value in recorded.items() if name in names}
    values |= {"features": features, "pairs": pairs, "output": Path(str(values["output"])), "select": None}
    if where is not None:
        options = FitOptions(**values | {"train": where, "pairs": None, "method": "erm"})
        return read_problem(options, oracle=False, reporter=reporter, compared_with=probe)
    if values["method"] not in FIT_METHODS:
        raise MismatchError(
            "a probe of a method that ncm fit doesn't train can't be fitted again",
            found=f"method {values['method']}",
            expected=f"method {' or '.join(FIT_METHODS)}",
        )
    fitted = data.get("pairs") or {}
    recorded_stores = fitted.get("stores") or [fitted]
    named = listing(map(str, values_of(pairs)))

    def refusal(what: str, where: Path | str, found: str, expected: str) -> MismatchError:
        fix = "name the stores that the probe was fitted on, or fit it again on these"
        return MismatchError(what, where=where, found=found, expected=expected, fix=fix)

    stores = read_pair_stores(pairs)
    given = {store.content_sha256: at for at, store in enumerate(stores)}
    contents = [store.get("content_sha256") for store in recorded_stores]
    if stores and all(contents):
        if {*given} != {*contents}:
            were = (
                f"{store['content_sha256'][:12]}, which was {store.get('path')}" for store in recorded_stores
            )
            raise refusal(
                "not the pairs that the probe was fitted with",
                named,
                f"content {listing(content[:12] for content in given)}",
                f"content {listing(were)}",
            )
        order = [given[content] for content in contents]
        stores = [stores[at] for at in order]
        values["pairs"] = tuple(values_of(pairs)[at] for at in order)
    problem = read_problem(FitOptions(**values), oracle=False, reporter=reporter, pair_stores=stores)
    used = 0 if problem.pairs is None else int(problem.pairs.usable.sum())
    if data["features"]["train_sha256"] != rows_digest(problem):
        raise refusal(
            "the training rows aren't those that the probe was fitted on",
            features,
            f"{len(problem.train.ids):,} rows of {data['train']}",
            f"the {data['train_rows']:,} rows of the original fit, with unchanged features, targets and "
            "weights",
        )
    if fitted.get("used_sha256") != pairs_digest(problem):
        raise refusal(
            "the pairs aren't those that the probe was fitted on",
            named,
            f"{used:,} pairs without a validation or test row",
            f"the {fitted.get('used', 0):,} pairs of the original fit, with unchanged features",
        )
    return problem
