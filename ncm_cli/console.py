"""Lays out what a terminal shows: tables, progress, errors, a spectrum as text. The only module that uses
rich."""

from __future__ import annotations

import dataclasses
import json as json_module
import os
import re
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

from rich.cells import cell_len
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
from rich.text import Text

from ncm_cli.progress import Reporter, Task

GAP = "  "
"""The blanks between two columns of a table."""

MIN_TEXT_WIDTH = 16
"""Columns of text are wrapped no narrower than this."""

MAX_PAGE_WIDTH = 100
"""Most characters in a line of a help topic, however wide the terminal is."""

PAGE_STYLES = {"markdown.code": "cyan", "markdown.h2": "bold underline", "markdown.h3": "bold"}
"""Styles that are readable on dark and on light terminals."""

LOG_SECONDS = 60.0
"""Seconds between two lines of progress if stderr isn't a terminal."""

MAX_BAR = 36
"""Characters in the longest bar of a spectrum, so that its line has fewer than 80."""

MAX_UNTHINNED = 12
"""Each rank up to this one has a line in a spectrum; higher ranks are thinned out."""

_SPELT = """
    …... ±+- ≤<= ≥>= →-> √sqrt ᵀ^T ²^2 ₁_1 \u0303~ ⊥_perp θtheta λlambda ΛLambda σsigma εeps δdelta
"""
"""Characters, each followed by its spelling in ASCII."""

_ASCII: dict[int, int | str] = {
    **str.maketrans("─━│┃┌┐└┘├┤┬┴┼╭╮╰╯▶◀█–×‖−·•", "--||+++++++++++++><#-x|-**"),
    **{ord(word[0]): word[1:] for word in _SPELT.split()},
}

# File names and values in tables may hold anything; a terminal would obey these characters.
_CONTROL = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"
} | {code: f"\\u{code:04x}" for code in (0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))}

_UNSEEN = {code: f"\\u{code:04x}" for code in _CONTROL if code >= 0x7F}
"""Control characters that JSON doesn't escape by itself, with escapes in JSON's form."""

MAX_LINE = 1_000
"""Most characters in a line of a message or in a cell: names in a user's file may have any length."""

_ID = re.compile(r"\bid(_[ab])?\b")
_WORDS = re.compile(r"[^\W\d]{2,}\s+[^\W\d]{2,}")


_BEFORE_NUMBER, _GLUE = re.compile(r"(?<=\S) (?=[-+(]?[.\d]|%)"), "\ue000"
"""The blank before a number or percent sign, where no line is wrapped; and the character put in its place."""


def _is_utf8(stream: IO[str]) -> bool:
    return (getattr(stream, "encoding", None) or "ascii").lower().replace("-", "") == "utf8"


def plain(text: str, stream: IO[str] | None = None) -> str:
    """``text`` as the stream can show it: without UTF-8, box drawing and Greek become ASCII.

    Control characters other than tabs and line ends, and marks that change the direction of writing, become
    escapes.
    """
    stream = stream or sys.stdout
    encoding = getattr(stream, "encoding", None) or "ascii"
    text = text.translate(_CONTROL) if _is_utf8(stream) else text.translate(_CONTROL).translate(_ASCII)
    return text.encode(encoding, "backslashreplace").decode(encoding)


def bounded(text: str) -> str:
    """The text; if it is longer than `MAX_LINE` characters, its two ends and its length."""
    if len(text) <= MAX_LINE:
        return text
    omission = f"... ({len(text):,} characters) ..."
    half = (MAX_LINE - len(omission)) // 2
    return text[:half] + omission + text[-half:]


def _message(text: str) -> str:
    """A message for stderr: lines are bounded, and all but the first are indented, as part of one message."""
    first, *others = (bounded(line) for line in plain(text, sys.stderr).split("\n"))
    return "\n".join([first, *(line if line[:1].isspace() else f"  {line}" for line in others)])


def _console(stream: IO[str], *, styles: bool = True) -> Console:
    return Console(
        file=stream,
        # Output that isn't a terminal isn't wrapped; without a width, rich would take it from COLUMNS.
        width=None if stream.isatty() else 80,
        force_terminal=None if styles else False,
        force_jupyter=False,  # otherwise rich shows each line in a display of its own, not on the stream
        highlight=False,
        soft_wrap=False,
        emoji=False,
        markup=False,
    )


class Escaped:
    """Standard output for data on a terminal, with control characters escaped."""

    def write(self, text: str) -> int:
        """Write what `plain` makes of a text."""
        return sys.stdout.write(plain(text))

    def flush(self) -> None:
        """Flush it."""
        sys.stdout.flush()


class Ui:
    """A command's standard output and error, and how much it says on them.

    Lines are wrapped at ``width`` characters. Without it they are wrapped at the terminal's width or, in a
    pipe, at ``COLUMNS`` if that is set.
    """

    def __init__(
        self, *, quiet: bool = False, verbose: bool = False, json: bool = False, width: int | None = None
    ) -> None:
        self.json = json
        self._width = width
        self.silent = json or quiet
        self.reporter: Reporter = ConsoleReporter(quiet=quiet, verbose=verbose)
        self._out = _console(sys.stdout, styles=width is None)

    def result(self, value: Any) -> None:
        """Print ``value`` as JSON on stdout: floats in full precision, NaN and infinities as null."""
        from ncm_cli.store.files import jsonable

        value = jsonable(value)
        text = json_module.dumps(value, indent=2, allow_nan=False, ensure_ascii=not _is_utf8(sys.stdout))
        text = text.translate(_UNSEEN)
        if re.search("[\ud800-\udfff]", text):  # from a file name that isn't UTF-8
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
        most: int | None = None,
    ) -> None:
        """Print a table on stdout, unless ``--json`` or ``--quiet``.

        The first ``left`` columns are aligned left, the others right; rows beyond ``most`` are only counted.
        To fit, headings and texts are wrapped at blanks, but numbers and ids never.
        Columns that still don't fit make another table below, with the left ones repeated.
        """
        if self.silent:
            return
        if most is not None and (omitted := len(rows) - most) > 0:
            rows, footer = rows[:most], f"and {omitted:,} more: --json has all"
        # Without the blanks, no line is wrapped between a number and its deviation.
        cells = [[_one_line(cell_text(cell).replace(" ± ", "±")) for cell in row] for row in rows]
        laid_out = [
            _Column(_one_line(name), [row[index] for row in cells], left=index < left)
            for index, name in enumerate(columns)
        ]
        room = self._room
        if title:
            self.text(_one_line(title))
        for index, block in enumerate(_blocks(laid_out, room)):
            if index:
                self.text("")
            for line in _lines([column.heading for column in block], block, bottom=True):
                self._out.print(Text(line, "bold"), soft_wrap=True)
            width = sum(column.width for column in block) + len(GAP) * (len(block) - 1)
            self.text("─" * (width if room < sys.maxsize else min(width, MAX_PAGE_WIDTH)))
            for row in range(len(rows)):
                self.text("\n".join(_lines([column.cells[row] for column in block], block)))
        self.text("\n".join([*([footer] if footer else []), ""]))

    def text(self, text: str) -> None:
        """Print lines on stdout, unless ``--json`` or ``--quiet``."""
        if not self.silent:
            print(plain(text))

    def prose(self, text: str) -> None:
        """Print sentences on stdout, wrapped at blanks, but never between a word and its number."""
        room = self._room
        for line in text.split("\n") if room < sys.maxsize else ():
            glued = _BEFORE_NUMBER.sub(_GLUE, line)
            wrapped = textwrap.wrap(glued, room, break_long_words=False, break_on_hyphens=False) or [""]
            self.text("\n".join(wrapped).replace(_GLUE, " "))
        if room == sys.maxsize:
            self.text(text)

    @property
    def _room(self) -> int:
        """Characters in a line; `sys.maxsize` in a pipe without ``COLUMNS``."""
        if self._width is not None:
            return self._width
        if sys.stdout.isatty():
            return self._out.width
        given = os.environ.get("COLUMNS", "")
        return int(given) if given.isdecimal() and int(given) else sys.maxsize

    def markdown(self, text: str) -> None:
        """Show Markdown: rendered on a terminal, through ``$PAGER`` if it is long; elsewhere as text."""
        if self.silent or not sys.stdout.isatty():
            self.text(text.rstrip())
            return
        import pydoc

        from rich.markdown import Markdown, TableElement
        from rich.theme import Theme

        class Table(TableElement):
            def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
                table: Any
                for table in super().__rich_console__(console, options):
                    for column in table.columns:
                        column.overflow = "fold"  # rather than be cut
                    # A blank line separates rows of several lines.
                    table.leading = int(console.measure(table).maximum >= options.max_width)
                    yield table

        class Page(Markdown):
            elements = Markdown.elements | {"table_open": Table}

        self._out.width = min(self._out.width, MAX_PAGE_WIDTH)
        text = re.sub(r"^```\w+", "```", text, flags=re.MULTILINE)  # code in the terminal's own colours
        with self._out.capture() as captured, self._out.use_theme(Theme(PAGE_STYLES)):
            self._out.print(Page(text, code_theme="ansi_dark", hyperlinks=False))
        shown = captured.get() if _is_utf8(sys.stdout) else captured.get().translate(_ASCII)
        if shown.count("\n") < self._out.height:
            sys.stdout.write(shown)
        else:
            os.environ.setdefault("LESS", "R")  # else less shows the codes of colours
            pydoc.pager(shown)

    def note(self, text: str) -> None:
        """Print a line on stderr, unless ``--quiet``."""
        self.reporter.note(text)


def cell_text(cell: object) -> str:
    """A value as tables show it: three decimals, commas at thousands, a dash for None."""
    if cell is None:
        return "–"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    if isinstance(cell, float):
        return f"{cell:.3f}" if 1e-3 <= abs(cell) < 1e4 or cell == 0 else f"{cell:.3g}"
    return str(cell)


def _one_line(text: str) -> str:
    return bounded(plain(text).replace("\n", "\\n").replace("\t", "\\t"))


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)


@dataclasses.dataclass(slots=True)
class _Column:
    """A column of a table that is being laid out."""

    heading: str
    cells: list[str]
    left: bool
    width: int = 0

    @property
    def wraps(self) -> bool:
        """Whether its cells may be wrapped: numbers and ids may not."""
        return not _ID.search(self.heading) and (self.left or any(map(_WORDS.search, self.cells)))

    @property
    def natural(self) -> int:
        """The width with every cell on one line."""
        return max(map(cell_len, self.cells), default=0)

    @property
    def least(self) -> int:
        """The width after the heading, and the cells if they may be wrapped, are wrapped at every blank."""
        words = max([MIN_TEXT_WIDTH, *map(_longest_word, self.cells)]) if self.wraps else sys.maxsize
        return max(_longest_word(self.heading), min(self.natural, words))


def _blocks(columns: Sequence[_Column], room: int) -> Iterator[list[_Column]]:
    """Columns that fit beside one another, with their widths; the left ones are in every block."""
    left = [column for column in columns if column.left]
    block = [*left]
    for column in columns[len(left) :]:
        if len(block) > len(left) and _excess([*block, column], room, least=True) > 0:
            yield _fitted(block, room)
            block = [*left]
        block.append(column)
    yield _fitted(block, room)


def _excess(columns: Sequence[_Column], room: int, *, least: bool = False) -> int:
    widths = (column.least if least else column.width for column in columns)
    return sum(widths) + len(GAP) * (len(columns) - 1) - room


def _fitted(columns: list[_Column], room: int) -> list[_Column]:
    """Set the columns' widths: headings are wrapped before texts are, the widest first."""
    for column in columns:
        column.width = max(cell_len(column.heading), column.natural)
    least_widths = [column.least for column in columns]
    wrapped_headings = [
        max(least, column.natural) for column, least in zip(columns, least_widths, strict=True)
    ]
    for floors in (wrapped_headings, least_widths):
        while _excess(columns, room) > 0:
            wide = [column for column, floor in zip(columns, floors, strict=True) if column.width > floor]
            if not wide:
                break
            max(wide, key=lambda column: column.width).width -= 1
    return columns


def _lines(cells: Sequence[str], columns: Sequence[_Column], *, bottom: bool = False) -> list[str]:
    """The lines of a table's row, several if cells are wrapped; ``bottom`` aligns cells at the last line."""
    wrapped = [
        textwrap.wrap(cell, max(column.width, 1), break_long_words=False, break_on_hyphens=False)
        if cell_len(cell) > column.width
        else [cell]
        for cell, column in zip(cells, columns, strict=True)
    ]
    height = max(map(len, wrapped), default=1)
    padded = []
    for texts, column in zip(wrapped, columns, strict=True):
        empty = [""] * (height - len(texts))
        texts = [*empty, *texts] if bottom else [*texts, *empty]
        blanks = [" " * (column.width - cell_len(text)) for text in texts]
        padded.append([a + b if column.left else b + a for a, b in zip(texts, blanks, strict=True)])
    return [GAP.join(parts).rstrip() for parts in zip(*padded, strict=True)] or [""]


def print_error(title: str, what: str, parts: Sequence[tuple[str, str]]) -> None:
    """Print an error on stderr: what is wrong, then where, found, expected, and what to try."""
    console = _console(sys.stderr)
    console.print(Text.assemble((f"{title}: ", "bold red"), _message(what)), soft_wrap=True)
    for label, text in parts:
        console.print(Text.assemble((f"  {_message(label)}: ", "bold"), _message(text)), soft_wrap=True)


class _Rate(ProgressColumn):
    def render(self, task: RichTask) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} {task.fields['unit']}/s", style="cyan")


@dataclasses.dataclass
class _LoggedTask(Task):
    """Progress in a log: a line a minute."""

    label: str
    total: int | None
    unit: str
    done: int = 0
    start: float = dataclasses.field(default_factory=time.monotonic)
    last: float = dataclasses.field(default_factory=time.monotonic)

    def advance(self, n: int = 1) -> None:
        self.done += n
        now = time.monotonic()
        if now - self.last < LOG_SECONDS:
            return
        self.last = now
        rate = self.done / (now - self.start)
        left = f", {(self.total - self.done) / rate / 60:.0f} min left" if self.total and rate else ""
        of = f" of {self.total:,}" if self.total else ""
        line = f"{self.label}: {self.done:,}{of} {self.unit}, {rate:,.1f}/s{left}"
        print(line, file=sys.stderr, flush=True)

    def relabel(self, label: str) -> None:
        self.label = _message(label)


class _BarTask(Task):
    def __init__(self, progress: Progress, label: str, total: int | None, unit: str) -> None:
        self._progress = progress
        self._id = progress.add_task(label, total=total, unit=unit)

    def advance(self, n: int = 1) -> None:
        self._progress.advance(self._id, n)

    def relabel(self, label: str) -> None:
        self._progress.update(self._id, description=_message(label))

    def remove(self) -> None:
        """Take the bar away."""
        self._progress.remove_task(self._id)


class ConsoleReporter(Reporter):
    """Progress bars on a terminal, plain lines in a log; all of it on stderr."""

    def __init__(self, *, quiet: bool, verbose: bool) -> None:
        self._quiet, self.verbose = quiet, verbose
        self._console = _console(sys.stderr)
        self._open = 0
        """The tasks that have a bar."""

    @contextmanager
    def task(self, label: str, total: int | None = None, unit: str = "rows") -> Iterator[Task]:
        label = _message(label)
        if self._quiet:
            yield Task()
        elif not self._console.file.isatty():  # a notebook, which shows colours, isn't a terminal
            yield _LoggedTask(label, total, unit)
        else:
            with self._shown_bars() as progress:
                bar = _BarTask(progress, label, total, unit)
                try:
                    yield bar
                finally:
                    bar.remove()

    @contextmanager
    def _shown_bars(self) -> Iterator[Progress]:
        """One display with the bars of all open tasks, since rich shows only one display at a time."""
        if not self._open:
            name = TextColumn("{task.description}", markup=False)
            columns = (name, BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
            self._bars = Progress(*columns, console=self._console, transient=True)
            self._bars.start()
        self._open += 1
        try:
            yield self._bars
        finally:
            self._open -= 1
            if not self._open:
                self._bars.stop()

    def note(self, message: str) -> None:
        if not self._quiet:
            self._console.print(_message(message), soft_wrap=True)

    def detail(self, message: str) -> None:
        if self.verbose:
            self.note(message)

    def warn(self, message: str) -> None:
        text = Text.assemble(("warning: ", "bold yellow"), _message(message))
        self._console.print(text, soft_wrap=True)


def scree(values: Sequence[float], *, gap: int = 0) -> str:
    """Lines with rank, singular value (descending), cumulative share of the squared total, and a bar.

    If there are many ranks, the first dozen have a line each, then one rank for about every factor of 1.4,
    and the last rank. The rank ``gap``, if not 0, is marked as the one before the largest gap.
    """
    n = len(values)
    if not n:
        return "no direction: every difference is zero"
    squares = [value * value for value in values]
    total = sum(squares) or 1.0
    thinned = {int(MAX_UNTHINNED * 2 ** (i / 2)) for i in range(2 * n.bit_length())}
    lines = [f"{'rank':>5}  {'sigma':>10}  {'share':>6}"]
    for rank, value in enumerate(values, start=1):
        if rank <= MAX_UNTHINNED or rank in thinned | {n, gap}:
            bar = "█" * max(1, round(MAX_BAR * value / values[0])) if value > 0 else ""
            mark = "  <- largest gap" if rank == gap else ""
            lines.append(f"{rank:>5}  {value:>10.4g}  {sum(squares[:rank]) / total:>6.1%}  {bar}{mark}")
    return "\n".join(lines)
