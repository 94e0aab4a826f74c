"""Runs commands and opens files from Python; notebooks show both as the tables of a terminal."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from html import escape
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

from ncm_cli.baselines.choice import SweepTable, read_sweep
from ncm_cli.commands import info
from ncm_cli.console import Ui
from ncm_cli.errors import InputError, UsageError, listing, unknown
from ncm_cli.given import options_from
from ncm_cli.images.weights import tuned_facts
from ncm_cli.options import fields_of
from ncm_cli.progress import SILENT
from ncm_cli.registry import BUILDERS, WORKING, options_of, screen_of, work_of
from ncm_cli.results.report import Report
from ncm_cli.store import recognise
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.files import jsonable, read_json, read_result
from ncm_cli.store.pairs import PairStore, read_pairs
from ncm_cli.store.probe import Probe, read_probe
from ncm_cli.store.result_record import SCHEMAS

WITH_TABLES = ("pairs", "fit", "eval", "bound", "sweep", "finetune", "report")
"""Results that have tables; others are shown as `ncm info` shows a file."""

WIDTH = 100
"""Characters of a line of a table in a notebook."""

PAGE_HEIGHT = 720
"""Height of a report's page in a notebook, in pixels; the page scrolls inside it."""


class Result(dict[str, Any]):
    """The result of a command as ``--json`` prints it, shown in a notebook as tables.

    ``kind`` is the command's name. A report is also shown with its plots and its page.
    """

    def __init__(self, body: dict[str, Any], kind: str, made: Any = None) -> None:
        """``made`` is what a terminal shows, if that isn't ``body``."""
        super().__init__(body)
        self.kind = kind
        self._made = body if made is None else made

    def _repr_html_(self) -> str:
        return html(self) + (_inline(self._made) if isinstance(self._made, Report) else "")


def load(path: Path | str) -> FeatureStore | PairStore | Probe | SweepTable | Result:
    """Open any file that ncm writes; its contents decide what it is, not its name.

    Results, the facts of a checkpoint and the marker of a data set are a `Result`, with a ``kind``.

    Raises `InputError` for a damaged file, a file that ncm doesn't write and a folder of unfinished work, and
    `UsageError` for a ``path`` of another type.

    Examples
    --------
    >>> probe = load("probe.safetensors")
    >>> probe
    Probe(method='ncm', rank=2, target='label', dim=8)
    >>> load("pairs.h5")
    PairStore(pairs=90, rank=8, strategy='noisy', dim=8)
    >>> load("result.json").kind
    'eval'
    """
    if not isinstance(path, str | Path):
        raise UsageError("path takes the path of a file", found=repr(path))
    if not str(path):
        raise InputError("not the path of a file", where="load", found="''")
    kind = recognise(path)
    if kind == "result":
        body = read_result(path)
        return Result(body, str(body.get("kind")))
    if kind == "checkpoint":
        return Result(tuned_facts(path), kind)
    if kind == "data":
        return Result(read_json(path), kind)
    if kind == "journal":
        raise InputError("unfinished work", where=path, fix="run the same command again to resume it")
    readers: dict[str, Any] = {
        "features": FeatureStore,
        "pairs": read_pairs,
        "probe": read_probe,
        "sweep": read_sweep,
    }
    return readers[kind](path)


def run(command: str, /, **given: Any) -> Result:
    """Run ``ncm COMMAND``, and return what ``--json`` prints.

    Options have their long names, with underscores: ``ncm fit --weight-decay 1e-2`` is
    ``run("fit", weight_decay=1e-2)``. Several values are a list, or text separated by commas. Progress, notes
    and warnings go to standard error.

    Raises `UsageError` for an unknown option or a value that it doesn't take, and the command's own errors.

    Examples
    --------
    >>> result = run("eval", probe="probe.safetensors", features="features.h5", where="split=test")
    >>> result.kind, result["n"], result["worst_group"]["group"]
    ('eval', 100, {'label': '1'})
    """
    step, _, builder = command.partition(" ") if isinstance(command, str) else ("", "", "")
    if step not in WORKING or (step == "data" and builder not in BUILDERS):
        commands = [name for name in WORKING if name != "data"] + [f"data {name}" for name in BUILDERS]
        raise UsageError(f"no command {command!r} to run", expected=listing(commands))
    options = options_of(command)
    fields = {field.name: field for field in fields_of(options)}
    for name in given:
        if name not in fields:
            raise unknown("option", name, fields, where=command, error=UsageError)
    if missing := [name for name, field in fields.items() if field.required and given.get(name) is None]:
        raise UsageError(f"{command} needs {listing(missing)}")
    result = work_of(step)(options_from(options, given), reporter=Ui().reporter)
    return Result(jsonable(result), step, result)


def html(shown: Any) -> str:
    """A store, a probe, a sweep's table or a result as HTML: the tables of a terminal."""
    text = ""
    if isinstance(shown, Result) and shown.kind in WITH_TABLES:
        show = screen_of(shown.kind).show
        with suppress(LookupError, TypeError, ValueError):  # a result of another version may lack keys
            text = _printed(show, shown._made)
    if not text:
        if not isinstance(shown, Result):
            facts = info.contents_of(shown)
        else:
            facts = {"names": list(shown)} if shown.kind in SCHEMAS else shown
        name = getattr(shown, "kind", type(shown).__name__)
        head = {"format": name, "path": str(getattr(shown, "path", "")), "failed": ()}
        text = _printed(info.show, {**dict.fromkeys(info.COMMON), **head, **facts})
    return f'<pre style="overflow-x:auto; line-height:1.3">{escape(text)}</pre>'


def _inline(report: Report) -> str:
    """The plots and the page of a report as HTML, without those whose files no longer exist.

    The page is in a frame of its own, so that the notebook and the page can't affect each other.
    """
    parts = []
    for path in (path for path in report.plots if path.suffix == ".svg" and path.is_file()):
        url = f"data:image/svg+xml;base64,{b64encode(path.read_bytes()).decode('ascii')}"
        parts.append(f'<img alt="{escape(path.stem)}" src="{url}" style="max-width:100%">')
    if report.html is not None and report.html.is_file():
        page = escape(report.html.read_text(encoding="utf-8"))
        frame = f"width:100%; height:{PAGE_HEIGHT}px; border:0"
        allowed = "allow-scripts allow-downloads allow-popups"
        parts.append(f'<iframe sandbox="{allowed}" style="{frame}" srcdoc="{page}"></iframe>')
    return "".join(f"<div>{part}</div>" for part in parts)


def _printed(show: Callable[[Any, Ui], object], shown: Any) -> str:
    stream = TextIOWrapper(BytesIO(), encoding="utf-8")
    with redirect_stdout(stream):
        ui = Ui(width=WIDTH)
        ui.reporter = SILENT
        show(shown, ui)
    stream.seek(0)
    return stream.read()
