"""A manifest with seeded splits over any folder of images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from ncm_cli.datasets.base import Built, CountTable, absolute, building
from ncm_cli.datasets.options import FolderOptions
from ncm_cli.errors import InputError, listing, unknown
from ncm_cli.images.files import list_images
from ncm_cli.images.options import parse_layout
from ncm_cli.options import Term, as_json, check, parse_where
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.store.tables import read_table, write_csv

SPLITS = ("train", "val", "test")

Group = tuple[str, ...]
"""One value for each level of the layout."""


def build(options: FolderOptions, reporter: Reporter = SILENT) -> Built:
    """Write the manifest; the images stay where they are, and are named by absolute paths.

    Every combination of the layout's columns is split on its own. With ``--test`` the rows that it names are
    the test rows, and a share of the others is for validation.

    Raises
    ------
    UsageError
        Fractions out of range, a layout that names the columns of a manifest.
    InputError
        No images, images at another depth, a filter that names no column or no row.
    """
    check(options)
    layout = parse_layout(options.layout)
    if not options.source.is_dir():
        raise InputError("no such folder", where=options.source, expected="a folder of images")
    images, others = list_images(options.source, len(layout))
    if others:
        reporter.note(f"{len(others)} other files are left out")
    lost = [image for image in images if not (options.source / image).exists()]
    if lost:
        what = f"links that lead nowhere: {listing(lost)}"
        if len(lost) == len(images):
            raise InputError("no image in the folder is there", where=options.source, found=what)
        reporter.warn(f"left out, {what}")
        images = sorted(set(images) - set(lost))
    values = [dict(zip(layout, image.split("/"), strict=False)) for image in images]
    kept = _selected(options.where, "--where", values, layout)
    counts = None if options.counts is None else _read_counts(options.counts, layout)
    if counts is not None:
        _require_known(counts, {tuple(values[row].values()) for row in kept}, options)
        kept = [row for row in kept if tuple(values[row].values()) in counts]
    groups = [tuple(values[row].values()) for row in kept]
    if counts is not None:
        splits = _counted(groups, counts, options)
    else:
        held_out = set(_selected(options.test, "--test", values, layout)) if options.test else None
        splits = _splits(options, groups, kept, held_out)
        for gap in _gaps(options, layout, groups, splits):
            reporter.warn(gap)
    rows = [
        (images[row], absolute(options.source / images[row]), *values[row].values(), split)
        for row, split in zip(kept, splits, strict=True)
    ]
    with building(options.output, "folder", as_json(options)) as made:
        write_csv(made / "manifest.csv", ("id", "path", *layout, "split"), rows)
    return Built(
        builder="folder",
        output=options.output,
        files={"manifest": options.output / "manifest.csv"},
        facts={"rows": len(rows), "images_found": len(images), "seed": options.seed},
        tables=(_counts(layout, rows),),
    )


def _selected(
    where: str | None, flag: str, values: list[dict[str, str]], layout: tuple[str, ...]
) -> list[int]:
    """The rows that meet a filter."""
    terms = parse_where(where or "")
    for term in terms:
        if term.column not in layout:
            raise unknown("folder level", term.column, layout, where=f"{flag} {where}")
        known = sorted({row[term.column] for row in values})
        for value in term.values:
            if value not in known:
                raise unknown(term.column, value, known, where=f"{flag} {where}")
    rows = [i for i, row in enumerate(values) if all(_meets(row, term) for term in terms)]
    if not rows:
        raise InputError("no image meets the filter", where=f"{flag} {where}")
    return rows


def _meets(row: dict[str, str], term: Term) -> bool:
    return (row[term.column] in term.values) != term.negated


def _splits(
    options: FolderOptions, groups: list[Group], rows: list[int], held_out: set[int] | None
) -> list[str]:
    """The split of each row, drawn within its group."""
    rng = np.random.default_rng(options.seed)
    splits = ["train"] * len(rows)
    for _, members in sorted(_members(groups).items()):
        own = rng.permutation(members).tolist()
        if held_out is None:
            test = set(own[: round(len(own) * options.test_fraction)])
        else:
            test = {i for i in own if rows[i] in held_out}
        rest = [i for i in own if i not in test]
        for i in test:
            splits[i] = "test"
        for i in rest[: round(len(rest) * options.val_fraction)]:
            splits[i] = "val"
    return splits


def _members(groups: list[Group]) -> dict[Group, list[int]]:
    """The rows of each group."""
    members: dict[Group, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    return members


def _gaps(
    options: FolderOptions, layout: tuple[str, ...], groups: list[Group], splits: list[str]
) -> Iterator[str]:
    """A warning for each split of which a group has no rows though it should, and what it would need.

    With ``--test`` groups that are held out as a whole need test rows alone, and of these each label some.
    """
    sizes, counted = Counter(groups), Counter(zip(groups, splits, strict=True))
    split_up = [group for group in sizes if options.test is None or counted[group, "test"] < sizes[group]]
    shares = {"train": 1 - options.val_fraction, "val": options.val_fraction}
    if options.test is None:
        shares["test"] = options.test_fraction
    for split, share in shares.items():
        lacking = {group: sizes[group] for group in split_up if not counted[group, split]}
        if lacking and share:
            # Shares are rounded: from here on it is one row.
            least = int(0.5 / share) + 1
            beside = "" if split == "test" else " beside its test rows"
            yield (
                f"no {split} rows of {_sized(lacking)}: with these shares a {' / '.join(layout)} needs "
                f"{least} images{beside}; --counts TABLE gives each any number"
            )
    if options.test is not None and "label" in layout:
        level = layout.index("label")
        tested = {group[level] for group in sizes if counted[group, "test"]}
        lacking = Counter((group[level],) for group in groups if group[level] not in tested)
        if lacking:
            yield f"no test rows of {_sized(lacking)}: no image of them meets --test {options.test}"


def _sized(sizes: Mapping[Group, int]) -> str:
    return listing(f"{' / '.join(group)} ({n:,})" for group, n in sorted(sizes.items()))


def _read_counts(path: Path, layout: tuple[str, ...]) -> dict[Group, dict[str, int]]:
    """Of each group (one value a level), how many images go into each split."""
    table = read_table(path, what="table of counts")
    splits = [name for name in table.columns if name not in layout]
    lacking = [name for name in layout if name not in table.columns]
    if lacking or not splits:
        raise InputError(
            "a table of counts without the columns it needs",
            where=path,
            found=listing(table.columns),
            expected=f"{', '.join(layout)}, and one column for each split such as train, val, test",
        )
    found = {}
    for index, row in enumerate(table.rows):
        group = tuple(row[name] for name in layout)
        try:
            numbers = {name: int(row[name] or 0) for name in splits}
            if min(numbers.values()) < 0 or group in found:
                raise ValueError
        except ValueError:
            raise InputError(
                "a row of the table of counts that can't be read",
                where=f"{path}, {table.row_name(index)}",
                found=", ".join(row.values()),
                expected="a group that no other row names, and whole numbers of images",
            ) from None
        found[group] = numbers
    return found


def _require_known(counts: Iterable[Group], known: set[Group], options: FolderOptions) -> None:
    for group in counts:
        if group not in known:
            names = sorted(" / ".join(other) for other in known)
            raise unknown("group of images", " / ".join(group), names, where=options.counts)


def _counted(groups: list[Group], counts: dict[Group, dict[str, int]], options: FolderOptions) -> list[str]:
    """The split of each row: so many at random of each group, the others ``pool``."""
    rng = np.random.default_rng(options.seed)
    splits = ["pool"] * len(groups)
    members = _members(groups)
    for group, numbers in counts.items():
        own = rng.permutation(members[group]).tolist()
        if sum(numbers.values()) > len(own):
            raise InputError(
                f"too few images of {' / '.join(group)}",
                where=options.source,
                found=len(own),
                expected=f"{sum(numbers.values())}, as {options.counts} says",
            )
        for name, number in numbers.items():
            for i in own[:number]:
                splits[i] = name
            own = own[number:]
    return splits


def _counts(layout: tuple[str, ...], rows: list[tuple[str, ...]]) -> CountTable:
    counted = Counter((row[2:-1], row[-1]) for row in rows)
    groups = sorted({row[2:-1] for row in rows})
    splits = [*SPLITS, *sorted({row[-1] for row in rows} - set(SPLITS))]
    table = [(" / ".join(group), *(counted[group, split] for split in splits)) for group in groups]
    return CountTable(title="rows", columns=(" / ".join(layout), *splits), rows=tuple(table))
