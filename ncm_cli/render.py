"""What people see: tables, progress, errors. The only module that knows rich."""

from __future__ import annotations

import json as json_module
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Task as RichTask
from rich.table import Table
from rich.text import Text

from ncm_cli.progress import Reporter, Task

LOG_WIDTH = 80
"""Columns of a table that doesn't go to a terminal."""

LOG_SECONDS = 60.0
"""Seconds between two progress lines when stderr is no terminal."""

_ASCII = str.maketrans(
    {
        **dict.fromkeys("─━", "-"),
        **dict.fromkeys("│┃", "|"),
        **dict.fromkeys("┌┐└┘├┤┬┴┼╭╮╰╯", "+"),
        "▶": ">",
        "◀": "<",
        "█": "#",
        "–": "-",
        "×": "x",
        "…": "...",
        "±": "+-",
        "≤": "<=",
        "θ": "theta",
        "λ": "lambda",
        "σ": "sigma",
        "ε": "eps",
        "√": "sqrt",
        "→": "->",
        "‖": "|",
        "Λ": "Lambda",
        "ᵀ": "^T",
        "²": "^2",
        "₁": "_1",
        "\u0303": "~",
        "δ": "delta",
        "≥": ">=",
        "−": "-",
        "·": "*",
        "⊥": "_perp",
    }
)


def _is_utf8(stream: IO[str]) -> bool:
    return (getattr(stream, "encoding", None) or "ascii").lower().replace("-", "") == "utf8"


def _can_show(text: str, stream: IO[str]) -> bool:
    """Whether a stream can show ``text``: it is UTF-8, and the text has no name of a file that isn't."""
    if not _is_utf8(stream):
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# Names of files and values of tables may hold anything; a terminal would obey these characters.
_CONTROL = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"
} | {code: f"\\u{code:04x}" for code in (0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))}


def plain(text: str, stream: IO[str] | None = None) -> str:
    """``text`` as the stream can show it: box drawing and Greek become ASCII where there is no UTF-8.

    Control characters other than tabs and line ends, and marks that turn the direction of writing, are
    shown as escapes.
    """
    target = stream or sys.stdout
    text = text.translate(_CONTROL)
    if not _is_utf8(target):
        text = text.translate(_ASCII)
    encoding = getattr(target, "encoding", None) or "ascii"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _console(stream: IO[str]) -> Console:
    width = None if stream.isatty() else LOG_WIDTH
    return Console(file=stream, width=width, highlight=False, soft_wrap=False, emoji=False, markup=False)


class Ui:
    """The two streams of one command, and how much is said on them."""

    def __init__(self, *, quiet: bool = False, verbose: bool = False, json: bool = False) -> None:
        self.quiet = quiet
        self.json = json
        self.reporter: Reporter = ConsoleReporter(quiet=quiet, verbose=verbose)
        self._out = _console(sys.stdout)

    def result(self, value: Any) -> None:
        """Print ``value`` as JSON on stdout (floats at full precision; NaN isn't allowed)."""
        text = json_module.dumps(value, indent=2, allow_nan=False, ensure_ascii=False)
        if not (text.isascii() or _can_show(text, sys.stdout)):
            text = json_module.dumps(value, indent=2, allow_nan=False)
        sys.stdout.write(text + "\n")

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        *,
        title: str | None = None,
        footer: str | None = None,
        left: int = 1,
    ) -> None:
        """Print a table on stdout, unless ``--json`` or ``--quiet``.

        The first ``left`` columns are aligned left, the rest right.
        """
        if self.json or self.quiet:
            return
        style = box.SIMPLE_HEAD if _is_utf8(sys.stdout) else box.ASCII2
        made = Table(box=style, title=title, title_justify="left", caption=footer, caption_justify="left")
        for index, column in enumerate(columns):
            made.add_column(plain(column), justify="left" if index < left else "right", overflow="fold")
        for row in rows:
            # Without the blanks a narrow column doesn't break a number from its deviation.
            made.add_row(*(Text(plain(cell_text(cell).replace(" ± ", "±"))) for cell in row))
        with self._out.capture() as captured:
            self._out.print(made)
        lines = [line.rstrip() for line in captured.get().splitlines()]
        print("\n".join(lines).strip("\n") + "\n")

    def text(self, text: str) -> None:
        """Print lines on stdout as they are, unless ``--json`` or ``--quiet``."""
        if not (self.json or self.quiet):
            print(plain(text))

    def note(self, text: str) -> None:
        """A line on stderr, unless ``--quiet``."""
        self.reporter.note(text)


def cell_text(cell: object) -> str:
    """How a table shows a value: three decimals, thousands with commas, a dash for nothing."""
    if cell is None:
        return "–"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    if isinstance(cell, float):
        return f"{cell:.3f}" if 1e-3 <= abs(cell) < 1e4 or cell == 0 else f"{cell:.3g}"
    return str(cell)


def print_error(title: str, what: str, parts: Sequence[tuple[str, str]]) -> None:
    """One error on stderr: what is wrong, then where, found, expected, and what to do."""
    console = _console(sys.stderr)
    console.print(Text.assemble((f"{title}: ", "bold red"), plain(what, sys.stderr)), soft_wrap=True)
    for label, text in parts:
        console.print(Text.assemble((f"  {label}: ", "bold"), plain(text, sys.stderr)), soft_wrap=True)


class _Rate(ProgressColumn):
    def render(self, task: RichTask) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} {task.fields['unit']}/s", style="cyan")


class _LoggedTask(Task):
    """Progress for logs: one line a minute."""

    def __init__(self, label: str, total: int | None, unit: str) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._done = 0
        self._start = self._last = time.monotonic()

    def advance(self, n: int = 1) -> None:
        self._done += n
        now = time.monotonic()
        if now - self._last < LOG_SECONDS:
            return
        self._last = now
        rate = self._done / (now - self._start)
        left = f", {(self._total - self._done) / rate / 60:.0f} min left" if self._total and rate else ""
        of = f" of {self._total:,}" if self._total else ""
        print(
            f"{self._label}: {self._done:,}{of} {self._unit}, {rate:,.1f}/s{left}",
            file=sys.stderr,
            flush=True,
        )


class _BarTask(Task):
    def __init__(self, progress: Progress, label: str, total: int | None, unit: str) -> None:
        self._progress = progress
        self._id = progress.add_task(label, total=total, unit=unit)

    def advance(self, n: int = 1) -> None:
        self._progress.advance(self._id, n)


class ConsoleReporter(Reporter):
    """Progress bars on a terminal, plain lines in a log; all of it on stderr."""

    def __init__(self, *, quiet: bool, verbose: bool) -> None:
        self._quiet, self._verbose = quiet, verbose
        self._console = _console(sys.stderr)

    @contextmanager
    def task(self, label: str, total: int | None = None, unit: str = "rows") -> Iterator[Task]:
        if self._quiet:
            yield Task()
        elif not self._console.is_terminal:
            yield _LoggedTask(label, total, unit)
        else:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                _Rate(),
                TimeRemainingColumn(),
            )
            with Progress(*columns, console=self._console, transient=True) as progress:
                yield _BarTask(progress, label, total, unit)

    def note(self, message: str) -> None:
        if not self._quiet:
            self._console.print(plain(message, sys.stderr), soft_wrap=True)

    def detail(self, message: str) -> None:
        if self._verbose and not self._quiet:
            self.note(message)

    def warn(self, message: str) -> None:
        self._console.print(
            Text.assemble(("warning: ", "bold yellow"), plain(message, sys.stderr)), soft_wrap=True
        )
