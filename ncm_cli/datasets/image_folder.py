"""Writes a manifest with seeded splits for any folder of images, or for PACS (``domain/class/file``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli.datasets.options import SPLITS, FolderOptions, PacsOptions, parse_counts
from ncm_cli.errors import InputError, listing, unknown
from ncm_cli.images.folder import check_depth, walk_images
from ncm_cli.images.manifest import absolute_text, alike_categories
from ncm_cli.images.options import parse_layout
from ncm_cli.options import parse_where
from ncm_cli.progress import Reporter
from ncm_cli.store.digests import printable
from ncm_cli.store.tables import read_table, write_csv

PACS_COLUMNS = ("id", "path", "label", "domain", "split")

PUBLISHED = {"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929}
"""Images of each domain (Li et al., Deeper, Broader and Artier Domain Generalization, 2017); 9,991 in all."""

Folders = tuple[str, ...]
"""The folders of an image, one for each level of the layout; images in the same folders are a group."""


def build_folder(options: FolderOptions, folder: Path, reporter: Reporter) -> dict[str, Any]:
    """Write the manifest; images aren't copied, but named by absolute paths.

    Each group of images is split separately. With ``--test``, the rows that it selects are the test rows, and
    a share of the others is for validation.

    Raises
    ------
    InputError
        No images, images at another depth, or a filter with an unknown column or without rows.
    """
    layout = parse_layout(options.layout)
    folders_of = {
        image: tuple(image.split("/")[:-1]) for image in _images(options.source, len(layout), reporter)
    }
    kept = _selected(options.where, "--where", folders_of, layout)
    if options.counts is not None:
        counts = parse_counts(options.counts) or _read_counts(Path(options.counts), layout)
        known = sorted(" / ".join(group) for group in set(kept.values()))
        for name in map(" / ".join, counts):
            if name not in known:
                raise unknown("group of images", name, known, where=f"--counts {options.counts}")
        kept = {image: group for image, group in kept.items() if group in counts}
        splits = _counted(kept, counts, options)
    else:
        test = _selected(options.test, "--test", folders_of, layout) if options.test else None
        splits = _shared(options, kept, test)
        for gap in _gaps(options, layout, kept, splits):
            reporter.warn(gap)
    columns = {name: [group[level] for group in kept.values()] for level, name in enumerate(layout)}
    for warning in alike_categories(columns, "label", ()):
        reporter.warn(warning)
    base = absolute_text(options.source)
    rows = [(image, f"{base}/{image}", *group, splits[image]) for image, group in kept.items()]
    write_csv(folder / "manifest.csv", ("id", "path", *layout, "split"), rows)
    counted = Counter((group, splits[image]) for image, group in kept.items())
    names = [*SPLITS, *sorted(set(splits.values()) - set(SPLITS))]
    table = [
        {" / ".join(layout): " / ".join(group)} | {name: counted[group, name] for name in names}
        for group in sorted(set(kept.values()))
    ]
    return {"rows": len(rows), "images_found": len(folders_of), "counts": {"rows": table}}


def _images(source: Path, depth: int, reporter: Reporter) -> list[str]:
    """The images that a manifest can name; warnings list the images that it can't."""
    if not source.is_dir():
        raise InputError("no such folder", where=source, expected="a folder of images")
    images, others = walk_images(source)
    if others:
        reporter.note(f"{len(others)} other files are left out")
    unwritable = [image for image in images if printable(image) != image]
    images = [image for image in images if printable(image) == image]
    # Tables drop blanks around a value, so two labels could become one.
    blank = [image for image in images if any(part != part.strip(" \t") for part in image.split("/")[:-1])]
    dangling = [image for image in images if not (source / image).exists()]
    images = sorted(set(images) - set(dangling) - set(blank))
    lacks = {"names that aren't UTF-8": unwritable, "links that lead nowhere": dangling}
    for what, names in (lacks | {"folders whose name begins or ends with a blank": blank}).items():
        if names:
            all_names = f"{what}: {listing(map(printable, names), limit=len(names))}"
            if not images:
                raise InputError("no image in the folder is there", where=source, found=all_names)
            reporter.warn(f"left out, {all_names}")
    check_depth(source, images, depth)
    return images


def _selected(
    where: str | None, flag: str, folders_of: Mapping[str, Folders], layout: Folders
) -> dict[str, Folders]:
    """The images that match a filter."""
    kept = dict(folders_of)
    for term in parse_where(where or ""):
        if term.column not in layout:
            raise unknown("folder level", term.column, layout, where=f"{flag} {where}")
        level = layout.index(term.column)
        known = sorted({group[level] for group in folders_of.values()})
        for value in term.values:
            if value not in known:
                raise unknown(term.column, value, known, where=f"{flag} {where}")
        kept = {name: group for name, group in kept.items() if (group[level] in term.values) != term.negated}
    if not kept:
        raise InputError("no image meets the filter", where=f"{flag} {where}")
    return kept


def _shuffled(
    kept: Mapping[str, Folders], order: Iterable[Folders], seed: int
) -> Iterator[tuple[Folders, list[str]]]:
    """The groups in ``order``, each with its images in random order."""
    together: dict[Folders, list[str]] = {}
    for image, group in kept.items():
        together.setdefault(group, []).append(image)
    rng = np.random.default_rng(seed)
    for group in order:
        yield group, [together[group][i] for i in rng.permutation(len(together[group]))]


def _shared(
    options: FolderOptions, kept: Mapping[str, Folders], test: Collection[str] | None
) -> dict[str, str]:
    """The split of each image, by shares of its group."""
    splits = dict.fromkeys(kept, "train")
    for _, images in _shuffled(kept, sorted(set(kept.values())), options.seed):
        drawn = images[: round(len(images) * options.test_fraction)]
        tested = {image for image in (drawn if test is None else images) if test is None or image in test}
        rest = [image for image in images if image not in tested]
        splits |= dict.fromkeys(tested, "test")
        splits |= dict.fromkeys(rest[: round(len(rest) * options.val_fraction)], "val")
    return splits


def _gaps(
    options: FolderOptions, layout: Folders, kept: Mapping[str, Folders], splits: Mapping[str, str]
) -> Iterator[str]:
    """A warning for each split that lacks images of groups that should have some, and how many these need.

    With ``--test``, groups in which all rows are test rows need no others, and each label needs test rows.
    """
    sizes = Counter(kept.values())
    counted = Counter((group, splits[image]) for image, group in kept.items())
    split_up = [group for group in sizes if options.test is None or counted[group, "test"] < sizes[group]]
    shares = {"train": 1 - options.val_fraction, "val": options.val_fraction}
    if options.test is None:
        shares["test"] = options.test_fraction
    for split, share in shares.items():
        lacking = {group: sizes[group] for group in split_up if not counted[group, split]}
        if lacking and share:
            # The least number of images of which the share rounds to one row.
            least = int(0.5 / share) + 1
            beside = "" if split == "test" else " beside its test rows"
            yield (
                f"no {split} rows of {_sized(lacking)}: with these shares a {' / '.join(layout)} needs "
                f"{least} images{beside}; --counts sets any number for each"
            )
    if options.test is not None and "label" in layout:
        level = layout.index("label")
        tested = {group[level] for group in sizes if counted[group, "test"]}
        lacking = Counter((group[level],) for group in kept.values() if group[level] not in tested)
        if lacking:
            yield f"no test rows of {_sized(lacking)}: no image of them meets --test {options.test}"


def _sized(sizes: Mapping[Folders, int]) -> str:
    return listing(f"{' / '.join(group)} ({n:,})" for group, n in sorted(sizes.items()))


def _read_counts(path: Path, layout: Folders) -> dict[Folders, dict[str, int]]:
    """The number of images of each group that go into each split."""
    table = read_table(path, what="table of counts")
    splits = [name for name in table.columns if name not in layout]
    if not splits or not set(layout) <= set(table.columns):
        raise InputError(
            "a table of counts without the columns it needs",
            where=path,
            found=listing(table.columns),
            expected=f"{', '.join(layout)}, and one column for each split such as train, val, test",
        )
    counts: dict[Folders, dict[str, int]] = {}
    for index, row in enumerate(table.rows):
        group = tuple(row[name] for name in layout)
        try:
            numbers = {name: int(row[name] or 0) for name in splits}
            if min(numbers.values()) < 0 or group in counts:
                raise ValueError
        except ValueError:
            raise InputError(
                "a row of the table of counts that can't be read",
                where=f"{path}, {table.row_name(index)}",
                found=", ".join(row.values()),
                expected="a group that no other row names, and whole numbers of images in the columns of "
                f"splits, here {listing(splits)}",
            ) from None
        counts[group] = numbers
    return counts


def _counted(
    kept: Mapping[str, Folders], counts: dict[Folders, dict[str, int]], options: FolderOptions
) -> dict[str, str]:
    """The split of each image: the given numbers of random images of its group; the rest is ``pool``."""
    splits = dict.fromkeys(kept, "pool")
    for group, images in _shuffled(kept, counts, options.seed):
        if (needed := sum(counts[group].values())) > len(images):
            raise InputError(
                f"too few images of {' / '.join(group)}",
                where=options.source,
                found=len(images),
                expected=f"{needed:,}, as --counts {options.counts} says",
            )
        names = [name for name, number in counts[group].items() for _ in range(number)]
        splits |= zip(images, names, strict=False)
    return splits


def build_pacs(options: PacsOptions, folder: Path, reporter: Reporter) -> dict[str, Any]:
    """Write the manifest; images aren't copied, but named by absolute paths.

    Each class of each domain is split separately. Warns if the counts aren't the published ones.
    """
    folders_of = {image: tuple(image.split("/")[:-1]) for image in _images(options.pacs, 2, reporter)}
    sizes = Counter(domain for domain, _ in folders_of.values())
    if dict(sizes) != PUBLISHED:
        have = ", ".join(f"{domain} {sizes[domain]:,} of {n:,}" for domain, n in PUBLISHED.items())
        extra = sorted(set(sizes) - set(PUBLISHED))
        other = f"; and other domains: {', '.join(extra)}" if extra else ""
        reporter.warn(f"this isn't the published PACS of 9,991 images: {have}{other}")
    splits: dict[str, str] = {}
    for _, images in _shuffled(folders_of, sorted(set(folders_of.values())), options.seed):
        drawn = images[: options.limit]
        splits |= dict.fromkeys(drawn, "train")
        splits |= dict.fromkeys(drawn[: round(len(drawn) * options.val_fraction)], "val")
    base = absolute_text(options.pacs)
    rows = [
        (image, f"{base}/{image}", label, domain, splits[image])
        for image, (domain, label) in folders_of.items()
        if image in splits
    ]
    write_csv(folder / "manifest.csv", PACS_COLUMNS, rows)
    counted = Counter((domain, split) for _, _, _, domain, split in rows)
    counts = [
        {"domain": name, **{split: counted[name, split] for split in ("train", "val")}}
        | {"published": PUBLISHED.get(name)}
        for name in sorted(sizes)
    ]
    return {"rows": len(rows), "images_found": len(folders_of), "counts": {"rows": counts}}
