"""``ncm info``: what a file of ncm holds, or versions and devices."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path
from typing import Any

from ncm_cli import __version__
from ncm_cli.baselines.choice import SweepTable, read_sweep
from ncm_cli.console import Ui
from ncm_cli.errors import InputError
from ncm_cli.finetune.options import checkpoint_files
from ncm_cli.images.weights import require_whole, tuned_facts
from ncm_cli.results.options import InfoOptions
from ncm_cli.store import hdf5, journal, pairs, probe, recognise
from ncm_cli.store.columns import Column
from ncm_cli.store.digests import MAKE_AGAIN, damaged
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.files import HEADER, read_json, read_result, sha256_file
from ncm_cli.store.probe import TUNED

FAILURES_SHOWN = 10
CATEGORIES_SHOWN = 8

COMMON = ("rows", "dim", "columns", "encoder", "fingerprint", "failed")
"""Facts that are given for every format; null if they don't apply."""


def run(options: InfoOptions, ui: Ui) -> None:
    """Describe a file, or the system."""
    if options.system:
        _show_system(ui)
    if options.file is None:
        return
    facts = describe(options.file, options, ui)
    if not ui.json:
        show(facts, ui)
    elif not options.system:
        ui.result(facts)
    if facts["verified"]:
        ui.note(f"verified: all contents of {options.file} match their digests")
    if options.output is not None:
        ui.note(f"wrote {options.output}")
        if options.export == "sklearn":
            ui.note("ncm help files shows how to load it as a model")


def describe(path: Path, options: InfoOptions, ui: Ui) -> dict[str, Any]:
    """The facts of a file, which is verified or exported if asked.

    Raises `InputError` for a file that isn't ncm's or is damaged.
    """
    kind = recognise(path)
    if options.export is not None and kind != "probe":
        raise InputError("--export needs a probe", where=path, found=f"a {kind}")
    ui.reporter.detail(f"{path}: {kind}")
    facts: dict[str, Any]
    if kind == "features":
        with FeatureStore(path) as store:
            if options.verify:
                with ui.reporter.task("verifying", total=store.rows, unit="rows") as task:
                    store.verify(task.advance)
            facts = contents_of(store)
    elif kind == "checkpoint":
        facts = {"format": TUNED, **tuned_facts(path)}
        if options.verify:
            _verify_checkpoint(path, tuned_facts(path))
    elif kind == "probe":
        content = probe.read_probe(path)
        facts = contents_of(content)
        if options.export is not None and options.output is not None:
            probe.EXPORTERS[options.export](options.output, content)
    elif kind == "pairs":
        facts = contents_of(pairs.read_pairs(path))
    elif kind == "sweep":
        facts = contents_of(read_sweep(path))
    elif kind == "journal":
        journal_facts = journal.read_facts(path)
        names = ("output", "rows", "dim", "damaged", "shards", "key", "content_sha256", "ncm_version")
        facts = {name: journal_facts.get(name) for name in names}
    elif kind == "data":
        document = read_json(path)
        facts = {
            name: document.get(name) for name in ("builder", "created", "ncm_version", "options", "entries")
        }
    else:
        result = read_result(path)
        facts = {name: result.get(name) for name in ("kind", "created", "ncm_version", "content_sha256")}
        facts |= {"rows": result.get("n"), "names": [name for name in result if name not in HEADER]}
    sealed = facts.get("content_sha256") is not None
    if kind in ("features", "pairs", "sweep"):
        sealed = "header_sha256" in hdf5.root_attributes(path)
    if options.verify and facts.get("damaged"):
        ui.reporter.warn(f"{facts['damaged']:,} rows are damaged and will be made again: {path}")
    elif options.verify and not sealed:
        ui.reporter.warn(f"no digests, so changes can't be detected ({MAKE_AGAIN}): {path}")
    files = [file for file in path.iterdir() if file.name[0] != "."] if path.is_dir() else [path]  # not locks
    size = sum(file.stat().st_size for file in files)
    verified = options.verify and sealed and not facts.get("damaged")
    head = {"format": f"ncm-{kind}", "path": str(path), "bytes": size, **dict.fromkeys(COMMON)}
    return {**head, **facts, "verified": verified}


def _verify_checkpoint(path: Path, facts: dict[str, Any]) -> None:
    """Check a checkpoint of ``ncm finetune`` by its own digest, and by the result beside it."""
    require_whole(path, facts)
    result = checkpoint_files(path)[2]
    if not result.is_file():
        return
    if sha256_file(path) != read_result(result, kind="finetune").get("checkpoint"):
        raise damaged(path, f"contents that don't match the digest in {result.name}")


def _attributes(content: Any, names: str) -> dict[str, Any]:
    return {name: getattr(content, name) for name in names.split()}


def contents_of(found: FeatureStore | pairs.PairStore | probe.Probe | SweepTable) -> dict[str, Any]:
    """The facts of an open store, a probe or a sweep's table, without those of its file."""
    if isinstance(found, SweepTable):
        methods = {name: found.method.count(name) for name in dict.fromkeys(found.method)}
        facts = {"rows": len(found.method), "methods": methods, "seeds": sorted(set(found.seed.tolist()))}
        facts |= {"checkpoints": len(found.epochs), "diverged": int(found.diverged.sum())}
        return facts | {"options": found.options}
    if isinstance(found, probe.Probe):
        facts = _attributes(found, "dim task target classes rank encoder fingerprint created ncm_version")
        facts |= {name: value for name, value in found.meta.items() if name not in (*facts, "rows")}
        return facts | {"classes": list(found.classes), "content_sha256": found.sha256}
    if isinstance(found, pairs.PairStore):
        facts = {"rows": found.pairs, "held_out": int(found.holdout.sum())}
        facts |= _attributes(found, "dim rank strategy sources diagnostics encoder fingerprint")
        facts |= _attributes(found, "content_sha256 created ncm_version options")
        return facts | {"singular_values": found.singular_values.tolist()}
    names = "rows dim dtype columns label_column split_column encoder fingerprint"
    facts = _attributes(found, f"{names} content_sha256 created ncm_version options")
    facts["columns"] = {name: _column(column) for name, column in found.columns.items()}
    facts["failed"] = [dataclasses.asdict(row) for row in found.failed]
    return facts


def _column(column: Any) -> dict[str, Any]:
    if isinstance(column, Column):
        return {"kind": "categorical", "counts": column.counts(), "missing": column.missing}
    present = column.values[column.values == column.values]
    low, high = (float(present.min()), float(present.max())) if present.size else (None, None)
    return {"kind": "numeric", "min": low, "max": high, "missing": column.missing}


def _show_system(ui: Ui) -> None:
    from ncm_cli.images.reading import cores
    from ncm_cli.recipes.run import versions  # loads the modules of all steps

    package_versions = {"ncm": __version__, **versions()}
    devices = [f"cpu: {platform.machine()}, {cores()} cores"]
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
    if ui.json:
        ui.result({"versions": package_versions, "platform": platform.platform(), "devices": devices})
        return
    rows = [(name, version or "not installed") for name, version in package_versions.items()]
    ui.table(["package", "version"], rows, left=2)
    ui.text("\n".join([platform.platform(), *devices]))


def show(facts: dict[str, Any], ui: Ui) -> None:
    """The facts of a file as tables, without those that are unknown."""
    known = {name: value for name, value in facts.items() if value is not None and value not in ({}, [])}
    rows = [(name, _short(value)) for name, value in known.items() if name not in _ELSEWHERE | _LONG]
    rows += _choice_rows(facts.get("selection") or {})
    ui.table([facts["format"], ""], rows, title=facts["path"], left=2)
    if facts["columns"]:
        lines = [(name, *_column_cells(name, column, facts)) for name, column in facts["columns"].items()]
        ui.table(["column", "role", "values", "missing"], lines, left=3)
    if facts["failed"]:
        failed = [(row["id"], row["reason"]) for row in facts["failed"]]
        ui.table(["failed id", "reason"], failed, left=2, most=FAILURES_SHOWN)


_ELSEWHERE = {"format", "path", "columns", "failed", "label_column", "split_column", "verified"}
_LONG = {"options", "diagnostics", "singular_values", "data", "key", "selection"}
"""Only ``--json`` shows them, in full."""


def _choice_rows(selection: dict[str, Any]) -> list[tuple[str, str]]:
    """How a probe was chosen, its bound, and the verdict on its pairs."""
    if not selection:
        return []
    count, folds = len(selection.get("path") or []), selection.get("folds")
    parts = f"{folds} folds of pairs" if folds and folds > 1 else "held-out pairs"
    measured = f", measured on {parts}" if folds and selection["rule"] == "bound" else ""
    mark = "ORACLE: " if selection.get("oracle") else ""
    rows = [("chosen by", f"{mark}{selection['rule']}, of {count:,} candidates{measured}")]
    verdict = selection.get("verdict") or {}
    if bound := verdict.get("bound"):
        rows.append(("bound", f"{bound['value']:.3g} (95 %: {bound['low']:.3g} to {bound['high']:.3g})"))
    rows += [("verdict", verdict["text"])] if verdict else []
    return rows + [(f"on {store['path']}", store["text"]) for store in verdict.get("stores", ())]


def _short(value: Any) -> str:
    if isinstance(value, dict):
        nested = {
            name for name, item in value.items() if isinstance(item, list | dict) and len(str(item)) > 60
        }
        shown = {name: item for name, item in value.items() if item is not None and name not in nested}
        return ", ".join(f"{name} {_short(item)}" for name, item in shown.items())
    if isinstance(value, list):
        return _listed([_short(item) for item in value])
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _listed(items: list[str]) -> str:
    shown = ", ".join(items[:CATEGORIES_SHOWN])
    return f"{shown} and {len(items) - CATEGORIES_SHOWN:,} more" if len(items) > CATEGORIES_SHOWN else shown


def _column_cells(name: str, column: dict[str, Any], facts: dict[str, Any]) -> tuple[str, str, int]:
    role = {facts["label_column"]: "label", facts["split_column"]: "split"}.get(name, "")
    if column["kind"] == "categorical":
        values = _listed([f"{category} {count:,}" for category, count in column["counts"].items()])
    elif column["min"] is None:
        values = "numbers, all missing"
    else:
        values = f"numbers from {column['min']:g} to {column['max']:g}"
    return role, values, column["missing"]
