"""``ncm info``: what a file of ours is and holds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ncm_cli.errors import InputError
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.results.options import InfoOptions
from ncm_cli.store.columns import AnyColumn, Column
from ncm_cli.store.hdf5 import root_attributes
from ncm_cli.store.recognise import Kind, recognise


@dataclasses.dataclass(frozen=True, kw_only=True)
class InfoReport:
    """What a file says of itself. ``facts`` is JSON, its common names the same for every format."""

    kind: Kind
    facts: dict[str, Any]
    exported: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """The facts, as ``--json`` prints them."""
        return self.facts


def info(options: InfoOptions, *, reporter: Reporter = SILENT) -> InfoReport:
    """Describe ``options.file``, read it back if asked, and export it if it is a probe.

    Raises `InputError` for what isn't a file of ours, or is damaged.
    """
    if options.file is None:
        raise ValueError("info needs a file; see `system` for versions")
    path = options.file
    kind = recognise(path)
    if options.export is not None and kind != "probe":
        raise InputError("--export needs a probe", where=path, found=f"a file of kind {kind}")
    reporter.detail(f"{path}: {kind}")
    facts = _common() | _DESCRIBE[kind](path, options.verify, reporter)
    facts = {"format": facts.pop("format"), "path": str(path), "bytes": _size(path), **facts}
    facts["verified"] = options.verify and _is_sealed(path, kind, facts, reporter)
    if options.export is not None and options.output is not None:
        _export(path, options.export, options.output)
    return InfoReport(kind=kind, facts=facts, exported=options.output)


def _is_sealed(path: Path, kind: Kind, facts: dict[str, Any], reporter: Reporter) -> bool:
    """Whether all of a file that has been read has digests, and none was off; warns otherwise."""
    if facts.get("damaged"):
        reporter.warn(f"{facts['damaged']:,} rows are damaged, and will be made anew: {path}")
        return False
    sealed = (
        "header_sha256" in root_attributes(path)
        if kind in ("features", "pairs", "sweep")
        else facts["content_sha256"] is not None
    )
    if not sealed:
        reporter.warn(f"no digests, so changes can't be told (make it again to have them): {path}")
    return sealed


def _common() -> dict[str, Any]:
    return dict.fromkeys(("rows", "dim", "columns", "encoder", "fingerprint", "failed"))


def _size(path: Path) -> int:
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def _features(path: Path, verify: bool, reporter: Reporter) -> dict[str, Any]:
    from ncm_cli.store.features import FORMAT, FeatureStore

    with FeatureStore.open(path) as store:
        if verify:
            with reporter.task("verifying", total=store.rows, unit="rows") as task:
                store.verify(task.advance)
        return {
            "format": FORMAT,
            "rows": store.rows,
            "dim": store.dim,
            "dtype": store.dtype,
            "columns": {name: _column(column) for name, column in store.columns.items()},
            "label_column": store.label_column,
            "split_column": store.split_column,
            "encoder": store.encoder,
            "fingerprint": store.fingerprint,
            "failed": [dataclasses.asdict(row) for row in store.failed],
            "content_sha256": store.content_sha256,
            "created": store.created,
            "ncm_version": store.ncm_version,
            "options": store.options,
        }


def _column(column: AnyColumn) -> dict[str, Any]:
    if isinstance(column, Column):
        return {"kind": "categorical", "counts": column.counts(), "missing": column.missing}
    present = column.values[column.values == column.values]
    ends = (float(present.min()), float(present.max())) if present.size else (None, None)
    return {"kind": "numeric", "min": ends[0], "max": ends[1], "missing": column.missing}


def _pairs(path: Path, verify: bool, reporter: Reporter) -> dict[str, Any]:
    from ncm_cli.store.pairs import FORMAT, read_pairs

    store = read_pairs(path)
    return {
        "format": FORMAT,
        "rows": store.pairs,
        "dim": store.dim,
        "held_out": int(store.holdout.sum()),
        "rank": store.rank,
        "singular_values": store.singular_values.tolist(),
        "strategy": store.strategy,
        "sources": store.sources,
        "diagnostics": store.diagnostics,
        "encoder": store.encoder,
        "fingerprint": store.fingerprint,
        "content_sha256": store.content_sha256,
        "created": store.created,
        "ncm_version": store.ncm_version,
        "options": store.options,
    }


def _sweep(path: Path, verify: bool, reporter: Reporter) -> dict[str, Any]:
    from ncm_cli.store.sweep_table import FORMAT, read_sweep

    table = read_sweep(path)
    return {
        "format": FORMAT,
        "rows": len(table.method),
        "methods": {name: table.method.count(name) for name in dict.fromkeys(table.method)},
        "seeds": sorted({int(seed) for seed in table.seed}),
        "checkpoints": len(table.epochs),
        "diverged": int(table.diverged.sum()),
        "options": table.options,
    }


def _probe(path: Path, verify: bool, reporter: Reporter) -> dict[str, Any]:
    from ncm_cli.store.probe import FORMAT, read_probe

    probe = read_probe(path)
    meta = {
        name: value for name, value in probe.meta.items() if name not in ("encoder", "fingerprint", "rows")
    }
    return {
        "format": FORMAT,
        "dim": probe.dim,
        "task": probe.task,
        "target": probe.target,
        "classes": list(probe.classes),
        "rank": probe.rank,
        "encoder": probe.encoder,
        "fingerprint": probe.fingerprint,
        "content_sha256": probe.sha256,
        "created": probe.created,
        "ncm_version": probe.ncm_version,
        **{name: value for name, value in meta.items() if name not in ("rank", "task", "target")},
    }


def _result(path: Path, verify: bool, reporter: Reporter) -> dict[str, Any]:
    from ncm_cli.store.results import HEADER, read_result

    found = read_result(path)
    return {
        "format": found["ncm_format"],
        "kind": found.get("kind"),
        "created": found.get("created"),
        "ncm_version": found.get("ncm_version"),
        "rows": found.get("n"),
        "names": [name for name in found if name not in HEADER],
        "content_sha256": found.get("content_sha256"),
    }


def _journal(path: Path, verify: bool, reporter: Reporter) -> dict[str, Any]:
    from ncm_cli.store.journal import read_facts

    found = read_facts(path)
    return {
        "format": found["ncm_format"],
        "output": found.get("output"),
        "rows": found["rows"],
        "dim": found["dim"],
        "damaged": found["damaged"],
        "key": found["key"],
        "content_sha256": found.get("content_sha256"),
        "ncm_version": found.get("ncm_version"),
    }


_DESCRIBE = {
    "features": _features,
    "pairs": _pairs,
    "probe": _probe,
    "result": _result,
    "sweep": _sweep,
    "journal": _journal,
}


def _export(path: Path, form: str, output: Path) -> None:
    from ncm_cli.store.probe import EXPORTERS, read_probe

    EXPORTERS[form](output, read_probe(path))


def system() -> dict[str, Any]:
    """Versions of what results depend on, and the devices that torch sees. Imports torch."""
    import os
    import platform
    from importlib import metadata

    from ncm_cli import __version__

    versions: dict[str, str | None] = {"ncm": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    devices = [f"cpu: {platform.machine()}, {cores} cores", *_accelerators()]
    return {"versions": versions, "platform": platform.platform(), "devices": devices}


_PACKAGES = (
    "torch",
    "torchvision",
    "open_clip_torch",
    "timm",
    "numpy",
    "scipy",
    "scikit-learn",
    "h5py",
    "safetensors",
    "pillow",
)


def _accelerators() -> list[str]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return [f"torch can't be imported: {error}"]
    if not torch.cuda.is_available():
        return [f"cuda: none (torch was built for {torch.version.cuda or 'the CPU alone'})"]
    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        found.append(f"cuda:{index}: {facts.name}, {facts.total_memory / 2**30:.1f} GiB")
    return found
