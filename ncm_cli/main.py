"""The entry point: the command tree, and the one place where exceptions become exit codes."""

from __future__ import annotations

import contextlib
import errno
import gc
import inspect
import io
import itertools
import mmap
import os
import re
import shlex
import signal
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ncm_cli import __version__
from ncm_cli.completion import completion
from ncm_cli.errors import NcmError, UsageError, listing, system_refusal
from ncm_cli.next_command import next_command
from ncm_cli.options import Field, fields_of, values_of
from ncm_cli.registry import BUILDERS, COMMANDS, TOPICS, Command, examples_of, options_of, screen_of, work_of

PICTURE = r"""
  images ──▶ ncm embed ──▶ features.h5 ──▶ ncm pairs ──▶ pairs.h5
                                │                          │
                                └───────▶ ncm fit ◀────────┘
                                             │
                                     probe.safetensors
                                             │
                     ┌──────────┬────────────┼─────────────┐
                 ncm eval   ncm bound   ncm predict   ncm sweep ──▶ ncm report

  ncm data makes data sets; ncm run does all of it from a YAML recipe; ncm info describes any file.
  ncm COMMAND --help shows two examples of each; ncm help lists topics to read.
"""

INTERRUPTED = 130
"""The exit code after Ctrl-C."""

_START_BYTES, _THREAD_BYTES, _MAX_THREADS = 256 << 20, 64 << 20, 64
"""Bytes of address space that numpy and scipy need and that each OpenBLAS thread adds; the most threads."""


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"ncm {__version__}")
        raise typer.Exit


def build_app(only: str | None = None) -> typer.Typer:
    """The command tree; with ``only``, only that command's options are loaded.

    The other commands then have just a name and a summary, which keeps ``ncm --help`` quick.
    """
    app = typer.Typer(
        name="ncm",
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback(invoke_without_command=True)
    def root(
        context: typer.Context,
        version: Annotated[
            bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
        ] = False,
    ) -> None:
        """Linear probes that hold when the background, the scanner or the style changes.

        ncm help lists topics to read, and ncm help start is the first.
        """
        if context.invoked_subcommand is None:
            from ncm_cli.console import plain

            typer.echo(plain(PICTURE))

    for name, command in COMMANDS.items():
        if only not in (None, name):
            app.command(name, short_help=command.sentence)(lambda: None)
        elif name == "data":
            builders = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help=command.sentence)
            for builder, entry in BUILDERS.items():
                _add(builders, builder, entry, options_of(f"data {builder}"), name)
            app.add_typer(builders, name=name, short_help=command.sentence)
        else:
            _add(app, name, command, options_of(name), name)
    return app


def _add(app: typer.Typer, name: str, command: Command, options: type, module: str) -> None:
    """Add a command, which does its work and then calls ``show(result, ui)`` of its ``module``.

    Instead of these two, a module may have ``run(options, ui)``, which returns an exit code or None.
    """
    fields, words = fields_of(options), name if name == module else f"{module} {name}"

    def invoke(**values: Any) -> None:
        from ncm_cli.console import Ui
        from ncm_cli.given import options_from

        _require_memory()
        ui = Ui(quiet=values.pop("quiet"), verbose=values.pop("verbose"), json=values.pop("json_", False))
        for field in fields:
            _refuse_repetition(field, values[field.name])
        checked = options_from(options, values)
        screen = screen_of(module)
        if hasattr(screen, "run"):
            if code := screen.run(checked, ui):
                raise typer.Exit(code)
        else:
            result = work_of(module)(checked, reporter=ui.reporter)
            if ui.json:
                ui.result(result)
            else:
                screen.show(result, ui)
        following = next_command(words, checked)
        if following and not ui.json and sys.stderr.isatty():
            ui.note(f"next: {following}")

    parameters = [*map(_parameter, fields), *_shared_parameters(command.json)]
    invoke.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    invoke.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    examples, _, next_step = examples_of(words).partition("\nNext:")
    text = f"{command.sentence}\n\n\b\nExamples:\n{textwrap.indent(examples, '  ')}\nNext:{next_step}"
    app.command(
        name,
        help=_markup(text),
        short_help=command.sentence,
        no_args_is_help=any(field.required for field in fields),
    )(invoke)


def _markup(text: str) -> str:
    """The text, escaped because typer reads brackets as markup, and ``:100:`` in ``5:100:5`` as an emoji."""
    return re.sub(r":(?=\w+:)", ":[b][/b]", text.replace("[", "\\["))


def _refuse_repetition(field: Field, value: Any) -> None:
    if not isinstance(value, list) or len(value) < 2 or field.repeatable:
        return
    given = [str(item) for item in value]
    fix = f"{field.flag} {shlex.quote(field.separator.join(given))}" if field.separator else None
    raise UsageError(
        f"{field.flag} is given {'twice' if len(given) == 2 else f'{len(given)} times'}",
        found=listing(given),
        expected="one value",
        fix=fix,
    )


def _refuse_empty_values(argv: list[str]) -> None:
    """Refuse ``--out ""``, the result of an unset shell variable, since it would mean the current folder."""
    for option, value in itertools.pairwise(["ncm", *argv]):
        if value == "" or re.fullmatch(r"--[a-z-]+=", value):
            raise UsageError(
                "an empty value",
                where=value.removesuffix("=") or option,
                fix="is a shell variable unset?",
            )


def _require_memory() -> None:
    """Refuse a limit on address space (``ulimit -v``) so low that OpenBLAS would wait for memory forever."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return
    asked = os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = min(int(asked) if asked.isdecimal() else cores, _MAX_THREADS)
    needed = _START_BYTES + _THREAD_BYTES * threads
    try:
        mmap.mmap(-1, needed).close()
    except OSError:
        raise NcmError(
            "too little memory to start",
            found=f"a limit of {limit >> 20:,} MiB (ulimit -v)",
            expected=f"{needed >> 20:,} MiB that are free",
            fix="a higher limit, or fewer threads, such as OMP_NUM_THREADS=1",
        ) from None


def _parameter(field: Field) -> inspect.Parameter:
    choices = f" ({' | '.join(field.choices)})" if field.choices else ""
    shown: dict[str, Any] = {"help": _markup(field.help + choices), "metavar": field.metavar}
    if (complete := completion(field)) is not None:
        shown["autocompletion"] = complete
    if field.type is Path:
        # An unreadable file is bad input, like a missing one; click would call it a usage error.
        shown |= {"show_default": not field.required, "readable": False}
    kind: Any = field.type
    default = inspect.Parameter.empty if field.required else field.default
    if field.repeated or not (field.positional or field.type is bool):
        # Options with one value are lists, too; otherwise the last of several values would win silently.
        shown["metavar"] = field.metavar or (None if field.positional else f"<{kind.__name__.lower()}>")
        kind = list[kind]
        if not field.required:
            default = list(values_of(field.default))
            shown |= {} if default else {"show_default": False}
    elif field.optional:
        kind = kind | None
    if field.positional:
        return _keyword(field.name, kind, typer.Argument(**shown), default)
    flag = f"{field.flag}/--no-{field.flag[2:]}" if field.type is bool else field.flag
    panel = None if field.group == "Options" else field.group
    return _keyword(
        field.name, kind, typer.Option(flag, *field.flags, rich_help_panel=panel, **shown), default
    )


def _keyword(name: str, kind: Any, shown: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, shown]
    )


def _shared_parameters(json: bool) -> Iterator[inspect.Parameter]:
    """The options that every command has."""
    options = {
        "quiet": ("Print only warnings, errors and the output of --json.", "--quiet", "-q"),
        "verbose": ("Print more details of what is done.", "--verbose", "-v"),
        "json_": ("Print the result as JSON on stdout.", "--json"),
    }
    for name, (text, *flags) in options.items():
        if json or name != "json_":
            shown = typer.Option(*flags, help=text, rich_help_panel="Output", show_default=False)
            yield _keyword(name, bool, shown, False)


def _named_command(argv: list[str]) -> str:
    """``ncm fit``, ``ncm data digits``, or ``ncm`` if a command line names none."""
    words = [word for word in argv if not word.startswith("-")][:2]
    known = words[:1] if words[:1] and words[0] in COMMANDS else []
    known += words[1:] if known == ["data"] and words[1:] and words[1] in BUILDERS else []
    return " ".join(["ncm", *known])


def _command_in(argv: list[str]) -> str | None:
    """The command that a command line names, "" if none; None for shell completion, which needs them all."""
    if "_NCM_COMPLETE" in os.environ:
        return None
    return next((word for word in argv if not word.startswith("-")), "")


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit with its exit code (`ncm help troubleshooting` lists them)."""
    _guard_streams()
    # Schedulers send SIGTERM. Handled like Ctrl-C, it releases locks and keeps finished rows.
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    code = run(sys.argv[1:] if argv is None else argv)
    with contextlib.suppress(NcmError, OSError):
        sys.stdout.close()  # Python would complain at exit about output whose reader has gone
    gc.freeze()  # otherwise garbage collection at exit spends most of a second on torch's modules
    sys.exit(code)


def run(argv: list[str]) -> int:
    """Run one command line; returns its exit code. Only a bug raises."""
    if argv[:1] == ["help"] and argv[1:2] != [] and argv[1] in COMMANDS.keys() - TOPICS:
        argv = [*argv[1:], "--help"]
    try:
        _refuse_empty_values(argv)
        with warnings.catch_warnings(record=True) as recorded:
            result = build_app(only=_command_in(argv))(args=argv, prog_name="ncm", standalone_mode=False)
        sys.stdout.flush()
        # Libraries' warnings are shown at the end, but not if there is an error, which they would bury.
        for warning in recorded:
            warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)
    except NcmError as error:
        return _print_refusal(error)
    except (KeyboardInterrupt, typer.Abort):
        result = INTERRUPTED
    except _ReaderGoneError:
        return 0
    except SystemExit as error:
        # typer exits with 1 if the reader of the help has closed the pipe.
        if isinstance(error.__context__, _ReaderGoneError):
            return 0
        raise
    except Exception as error:
        if refusal := system_refusal(error):
            return _print_refusal(refusal)
        # Some versions of typer have their own copy of click; usage errors of both have these attributes.
        if not (hasattr(error, "format_message") and hasattr(error, "exit_code")):
            raise
        context, message = getattr(error, "ctx", None), error.format_message()
        command = context.command_path if context else _named_command(argv)
        # No message means that help was shown, for a command without arguments.
        if not message:
            return UsageError.exit_code
        moved = getattr(options_of("fit"), "moved", {}) if command == "ncm fit" else {}
        fix = moved.get(getattr(error, "option_name", None), f"{command} --help")
        return _print_refusal(UsageError(message, fix=fix))
    # Some versions of typer return the exit code of an interrupt and print nothing.
    if result == INTERRUPTED:
        print("interrupted: run the same command again", file=sys.stderr)
    return result if isinstance(result, int) else 0


def _print_refusal(error: NcmError) -> int:
    from ncm_cli.console import print_error

    print_error(error.title, error.what, error.lines())
    return error.exit_code


class _ReaderGoneError(BrokenPipeError):
    """The reader of standard output has closed it."""


class _Stdout(io.FileIO):
    """Standard output whose errors name it; a plain `OSError` could be about any file."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError as error:
            raise _ReaderGoneError(*error.args) from None
        except OSError as error:
            raise NcmError(
                "standard output can't be written to",
                found="it is closed" if error.errno == errno.EBADF else error.strerror,
                fix="another place to write to; a command with -o FILE prints less with --quiet",
            ) from error


class _Stderr(io.FileIO):
    """Standard error that drops what it can't write: work goes on where a log's reader has gone."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _guard_streams() -> None:
    """Replace the standard streams of a process, of which some may be missing (``>&-``, some daemons).

    Each closed descriptor is opened on the null device; otherwise the next opened file would get its number,
    and receive what libraries print. Writing to a closed standard output is an error; a closed stderr drops
    what is written.
    """
    for number, mode in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # gets the lowest free number, which is this one
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    stderr = io.BufferedWriter(_Stderr(2, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(stderr, encoding=encoding, errors="backslashreplace", line_buffering=True)
    settings: dict[str, Any] = {"encoding": "utf-8"}
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Like Python's own stream, but an unbuffered one is flushed after each line.
        settings = {"encoding": sys.stdout.encoding, "errors": sys.stdout.errors}
        settings["line_buffering"] = sys.stdout.line_buffering or sys.stdout.write_through
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(_Stdout(1, "w", closefd=False)), **settings)
