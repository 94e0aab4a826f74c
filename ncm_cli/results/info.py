"""What ``ncm info`` says: a file of ours by the attributes of its own object, or versions and devices."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from ncm_cli import __version__
from ncm_cli.errors import InputError
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.results.options import InfoOptions

COMMON = ("rows", "dim", "columns", "encoder", "fingerprint", "failed")
"""Facts whose names are the same for every format; null where a format hasn't them."""

_WRITTEN = ("content_sha256", "created", "ncm_version")

PACKAGES = (
    *("ncm-cli", "torch", "torchvision", "open_clip_torch", "timm"),
    *("numpy", "scipy", "scikit-learn", "h5py", "safetensors", "pillow"),
)


def info(options: InfoOptions, *, reporter: Reporter = SILENT) -> dict[str, Any]:
    """The facts of ``options.file``, which is read back if asked, and exported if it is a probe.

    Raises `InputError` for what isn't a file of ours, or is damaged.
    """
    from ncm_cli.store.recognise import recognise

    path = options.file
    assert path is not None
    kind = recognise(path)
    if options.export is not None and kind != "probe":
        raise InputError("--export needs a probe", where=path, found=f"a file of kind {kind}")
    reporter.detail(f"{path}: {kind}")
    format_name, facts, sealed = _DESCRIBE[kind](path, options.verify, reporter)
    size = sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]))
    facts = {"format": format_name, "path": str(path), "bytes": size, **dict.fromkeys(COMMON), **facts}
    if options.verify and facts.get("damaged"):
        reporter.warn(f"{facts['damaged']:,} rows are damaged, and will be made anew: {path}")
    elif options.verify and not sealed:
        reporter.warn(f"no digests, so changes can't be told (make it again to have them): {path}")
    facts["verified"] = options.verify and sealed and not facts.get("damaged")
    if options.export is not None and options.output is not None:
        from ncm_cli.store.probe import EXPORTERS, read_probe

        EXPORTERS[options.export](options.output, read_probe(path))
    return facts


Described = tuple[str, dict[str, Any], bool]
"""(format, facts, whether all of the file that was read has digests)."""


def _features(path: Path, verify: bool, reporter: Reporter) -> Described:
    from ncm_cli.store.columns import Column
    from ncm_cli.store.features import FORMAT, FeatureStore

    names = ("rows", "dim", "dtype", "columns", "label_column", "split_column", "encoder", "fingerprint")
    with FeatureStore.open(path) as store:
        if verify:
            with reporter.task("verifying", total=store.rows, unit="rows") as task:
                store.verify(task.advance)
        facts = _attributes(store, *names, "failed", *_WRITTEN, "options")
        for name, column in store.columns.items():
            if isinstance(column, Column):
                said: dict[str, Any] = {"kind": "categorical", "counts": column.counts()}
            else:
                present = column.values[column.values == column.values]
                low, high = (float(present.min()), float(present.max())) if present.size else (None, None)
                said = {"kind": "numeric", "min": low, "max": high}
            facts["columns"] = {**facts["columns"], name: {**said, "missing": column.missing}}
    facts["failed"] = [dataclasses.asdict(row) for row in facts["failed"]]
    return FORMAT, facts, _has_digests(path)


def _has_digests(path: Path) -> bool:
    from ncm_cli.store.hdf5 import root_attributes

    return "header_sha256" in root_attributes(path)


def _attributes(found: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(found, name) for name in names}


def _pairs(path: Path, verify: bool, reporter: Reporter) -> Described:
    from ncm_cli.store.pairs import FORMAT, read_pairs

    store = read_pairs(path)
    facts = {"rows": store.pairs, "dim": store.dim, "held_out": int(store.holdout.sum()), "rank": store.rank}
    facts["singular_values"] = store.singular_values.tolist()
    names = ("strategy", "sources", "diagnostics", "encoder", "fingerprint", *_WRITTEN, "options")
    return FORMAT, facts | _attributes(store, *names), _has_digests(path)


def _sweep(path: Path, verify: bool, reporter: Reporter) -> Described:
    from ncm_cli.store.sweep_table import FORMAT, read_sweep

    table = read_sweep(path)
    facts = {
        "rows": len(table.method),
        "methods": {name: table.method.count(name) for name in dict.fromkeys(table.method)},
        "seeds": sorted({int(seed) for seed in table.seed}),
        "checkpoints": len(table.epochs),
        "diverged": int(table.diverged.sum()),
        "options": table.options,
    }
    return FORMAT, facts, _has_digests(path)


def _probe(path: Path, verify: bool, reporter: Reporter) -> Described:
    from ncm_cli.store.probe import FORMAT, read_probe

    probe = read_probe(path)
    facts = _attributes(
        probe, "dim", "task", "target", "rank", "encoder", "fingerprint", "created", "ncm_version"
    )
    others = {name: value for name, value in probe.meta.items() if name not in (*facts, "rows")}
    return FORMAT, {**facts, "classes": list(probe.classes), "content_sha256": probe.sha256, **others}, True


def _result(path: Path, verify: bool, reporter: Reporter) -> Described:
    from ncm_cli.store.results import FORMAT, HEADER, read_result

    found = read_result(path)
    facts = {name: found.get(name) for name in ("kind", *_WRITTEN)}
    facts |= {"rows": found.get("n"), "names": [name for name in found if name not in HEADER]}
    return FORMAT, facts, facts["content_sha256"] is not None


def _journal(path: Path, verify: bool, reporter: Reporter) -> Described:
    from ncm_cli.store.journal import read_facts

    found = read_facts(path)
    names = ("output", "rows", "dim", "damaged", "key", "content_sha256", "ncm_version")
    facts = {name: found.get(name) for name in names}
    return found["ncm_format"], facts, facts["content_sha256"] is not None


_DESCRIBE: dict[str, Callable[[Path, bool, Reporter], Described]] = {
    "features": _features,
    "pairs": _pairs,
    "probe": _probe,
    "result": _result,
    "sweep": _sweep,
    "journal": _journal,
}


def versions() -> dict[str, str | None]:
    """Python's and the packages' versions; None for what isn't installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def system() -> dict[str, Any]:
    """Versions of what results depend on, and the devices that torch sees. Imports torch."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    devices = [f"cpu: {platform.machine()}, {cores} cores"]
    try:
        import torch
    except (ImportError, OSError) as error:
        devices.append(f"torch can't be imported: {error}")
    else:
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            devices.append(f"cuda:{index}: {facts.name}, {facts.total_memory / 2**30:.1f} GiB")
        if not torch.cuda.is_available():
            devices.append(f"cuda: none (torch was built for {torch.version.cuda or 'the CPU alone'})")
    found = {"ncm": __version__, **versions()}
    del found["ncm-cli"]
    return {"versions": found, "platform": platform.platform(), "devices": devices}
