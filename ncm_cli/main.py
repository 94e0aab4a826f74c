"""The entry point: the command tree, and the one place where exceptions become exit codes."""

from __future__ import annotations

import errno
import io
import os
import sys
import warnings
from typing import Annotated, Any

import typer

from ncm_cli import __version__
from ncm_cli.commands import add_commands
from ncm_cli.errors import NcmError

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
  ncm COMMAND --help shows two examples of each.
"""

INTERRUPTED = 130
"""The exit code after Ctrl-C."""

EXPECTED_OS_ERRORS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.ENOENT: "no such file or folder",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EEXIST: "a file where a folder is expected",
    errno.EISDIR: "a folder where a file is expected",
    errno.ENOTDIR: "a file where a folder is expected",
    errno.EROFS: "the file system is read-only",
    errno.ENAMETOOLONG: "the file name is too long",
}


_FIXES = {
    errno.ENOSPC: "free some space and run the same command again",
    errno.EDQUOT: "free some space and run the same command again",
    errno.EACCES: "another place, or the right to read or write there",
    errno.EPERM: "another place, or the right to read or write there",
    errno.EROFS: "another place to write to",
    errno.EEXIST: "another place to write to, or move that file away",
}
"""What to do about some of them."""


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"ncm {__version__}")
        raise typer.Exit


def build_app(only: str | None = None) -> typer.Typer:
    """The command tree; with ``only``, the options of just that command are loaded."""
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
        """Linear probes that hold when the background, the scanner or the style changes."""
        if context.invoked_subcommand is None:
            from ncm_cli.console import plain

            typer.echo(plain(PICTURE))

    add_commands(app, only)
    return app


def _named(argv: list[str]) -> str | None:
    """The command that a command line names, or an empty text; None for shell completion, which needs all."""
    if "_NCM_COMPLETE" in os.environ:
        return None
    return next((word for word in argv if not word.startswith("-")), "")


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit with the code of DESIGN's table."""
    _guard_streams()
    code = run(sys.argv[1:] if argv is None else argv)
    _drop_what_is_left()
    sys.exit(code)


def run(argv: list[str]) -> int:
    """Run one command line; returns its exit code. Only a bug raises."""
    try:
        with warnings.catch_warnings(record=True) as held:
            result = build_app(only=_named(argv))(args=argv, prog_name="ncm", standalone_mode=False)
        sys.stdout.flush()
        # What libraries warn of is held back till here: before an error it would bury what is to be done.
        for one in held:
            warnings.showwarning(one.message, one.category, one.filename, one.lineno)
    except NcmError as error:
        return _refused(error)
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except BrokenPipeError:
        return 0  # who read stdout has had enough
    except SystemExit as error:
        # typer meets a closed pipe by itself where help is cut short, with exit code 1.
        if isinstance(error.__context__, BrokenPipeError):
            return 0
        raise
    except OSError as error:
        if error.errno not in EXPECTED_OS_ERRORS:
            raise
        what, fix = EXPECTED_OS_ERRORS[error.errno], _FIXES.get(error.errno)
        return _refused(NcmError(what, where=error.filename, found=error.strerror, fix=fix))
    except MemoryError:
        return _refused(NcmError("out of memory", fix="fewer rows (--where) or a smaller --batch-size"))
    except Exception as error:
        # typer brings its own copy of click in some versions and not in others, so the usage errors of
        # both are told by what they can do.
        if not (hasattr(error, "format_message") and hasattr(error, "exit_code")):
            raise
        return _usage(error)
    # Some versions of typer turn an interrupt into its exit code without a word.
    if result == INTERRUPTED:
        return _interrupted()
    return result if isinstance(result, int) else 0


class _Stdout(io.FileIO):
    """Standard output that says itself what is wrong with it: an `OSError` could be any file's."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise NcmError(
                "standard output can't be written to",
                found="it is closed" if error.errno == errno.EBADF else error.strerror,
                fix="another place to write to; where a command has -o FILE, it prints less with --quiet",
            ) from error


def _guard_streams() -> None:
    """Standard streams for a process that was started without some (``>&-``, some daemons).

    Each closed descriptor is taken, so that no file gets its number and with it what libraries print.
    Standard output then refuses what is written to it, which nobody would ever see; stderr drops it.
    """
    for number, mode in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # gets the lowest number that is free: this one
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    kept: dict[str, Any] = {"encoding": "utf-8"}
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Python's own buffers, but that an unbuffered stream is flushed at each line.
        kept = {"encoding": sys.stdout.encoding, "errors": sys.stdout.errors}
        kept["line_buffering"] = sys.stdout.line_buffering or sys.stdout.write_through
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(_Stdout(1, "w", closefd=False)), **kept)


def _drop_what_is_left() -> None:
    """Empty the buffer of a stdout that takes nothing more: Python would complain of it at its end."""
    try:
        sys.stdout.flush()
    except (NcmError, OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stdout.flush()


def _interrupted() -> int:
    print("interrupted: run the same command again to go on", file=sys.stderr)
    return INTERRUPTED


def _usage(error: Exception) -> int:
    from ncm_cli.console import print_error

    context = getattr(error, "ctx", None)
    command = context.command_path if context else "ncm"
    message = error.format_message()  # type: ignore[attr-defined]
    if message:  # none where the help was shown in place of a command that names nothing
        print_error("usage", message, [("try", f"{command} --help")])
    return 2


def _refused(error: NcmError) -> int:
    from ncm_cli.console import print_error

    print_error(error.title, error.what, error.lines())
    return error.exit_code


if __name__ == "__main__":
    main()
