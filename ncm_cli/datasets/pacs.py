"""PACS: a manifest with seeded splits over a folder ``domain/class/file``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from ncm_cli.datasets.base import Built, CountTable, absolute, building
from ncm_cli.datasets.options import PacsOptions
from ncm_cli.errors import InputError
from ncm_cli.options import as_json, check
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.store.tables import write_csv

COLUMNS = ("id", "path", "label", "domain", "split")

PUBLISHED = {"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929}
"""Images of each domain (Li et al., Deeper, Broader and Artier Domain Generalization, 2017); 9,991 in all."""

SUFFIXES = {".jpg", ".jpeg", ".png"}


def build(options: PacsOptions, reporter: Reporter = SILENT) -> Built:
    """Write the manifest; the images stay where they are, and are named by absolute paths.

    Each class of each domain is split on its own. Warns where the counts aren't the published ones.
    """
    check(options)
    files = _files(options.pacs)
    found = Counter(domain for domain, _, _ in files)
    if dict(found) != PUBLISHED:
        have = ", ".join(f"{domain} {found.get(domain, 0):,} of {n:,}" for domain, n in PUBLISHED.items())
        extra = sorted(set(found) - set(PUBLISHED))
        other = f"; and other domains: {', '.join(extra)}" if extra else ""
        reporter.warn(f"this isn't the published PACS of 9,991 images: {have}{other}")
    rows = _rows(options, files)
    with building(options.output, "pacs", as_json(options)) as folder:
        write_csv(folder / "manifest.csv", COLUMNS, rows)
    return Built(
        builder="pacs",
        output=options.output,
        files={"manifest": options.output / "manifest.csv"},
        facts={"rows": len(rows), "images_found": len(files), "seed": options.seed},
        tables=(_counts(rows),),
    )


def _files(root: Path) -> list[tuple[str, str, Path]]:
    """(domain, class, file), sorted."""
    if not root.is_dir():
        raise InputError("no such folder", where=root, expected="the PACS folder: domain/class/file")
    files = [
        (domain.name, label.name, file)
        for domain in _folders(root)
        for label in _folders(domain)
        for file in sorted(label.iterdir())
        if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")
    ]
    if not files:
        inner = [folder.name for folder in _folders(root)]
        raise InputError(
            "no images in domain/class/file",
            where=root,
            found=f"folders {', '.join(inner)}" if inner else "no folders",
            expected="photo/dog/056_0001.jpg and so on",
        )
    return files


def _folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def _rows(options: PacsOptions, files: list[tuple[str, str, Path]]) -> list[tuple[object, ...]]:
    rng = np.random.default_rng(options.seed)
    groups: dict[tuple[str, str], list[Path]] = {}
    for domain, label, file in files:
        groups.setdefault((domain, label), []).append(file)
    rows: list[tuple[object, ...]] = []
    for (domain, label), own in groups.items():
        order = rng.permutation(len(own))[: options.limit]
        validation = set(order[: round(len(order) * options.val_fraction)].tolist())
        for index in sorted(order.tolist()):
            file = own[index]
            split = "val" if index in validation else "train"
            rows.append((f"{domain}/{label}/{file.name}", absolute(file), label, domain, split))
    return rows


def _counts(rows: list[tuple[object, ...]]) -> CountTable:
    counted = Counter((row[3], row[4]) for row in rows)
    domains = sorted({str(row[3]) for row in rows})
    table = [(d, counted[d, "train"], counted[d, "val"], PUBLISHED.get(d)) for d in domains]
    return CountTable(title="rows", columns=("domain", "train", "val", "published"), rows=tuple(table))
