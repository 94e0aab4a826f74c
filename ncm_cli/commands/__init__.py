"""Turns an options class and a handler into a typer command."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ncm_cli.options import Field, at_home, check, fields_of, refuse_replacing
from ncm_cli.registry import COMMANDS

Handler = Callable[[Any, Any], int | None]
"""``handler(options, ui)``; a returned number other than None is the exit code."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One line of a command's help: the shell line, and what it is for."""

    line: str
    note: str


def add_command(
    app: typer.Typer,
    name: str,
    options: type,
    handler: Handler,
    *,
    examples: Sequence[Example],
    next_step: str,
    summary: str | None = None,
    json_output: bool = True,
) -> None:
    """Register ``handler`` under ``name`` with one parameter for each field of ``options``.

    ``summary`` is only needed for a command that `COMMANDS` doesn't list, such as a builder of ``ncm data``.
    """
    sentence = summary or COMMANDS[name]
    fields = fields_of(options)

    def run(**values: Any) -> None:
        from ncm_cli.console import Ui

        ui = Ui(quiet=values.pop("quiet"), verbose=values.pop("verbose"), json=values.pop("json_", False))
        code = handler(_build(options, fields, values), ui)
        if code:
            raise typer.Exit(code)

    parameters = [_parameter(field) for field in fields]
    parameters += _shared(json_output)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(
        name,
        help=_help(sentence, examples, next_step),
        short_help=sentence,
        no_args_is_help=any(field.required for field in fields),
    )(run)


def _build(options: type, fields: Sequence[Field], values: dict[str, Any]) -> Any:
    given = {field.name: at_home(field, values[field.name]) for field in fields}
    given |= {field.name: tuple(given[field.name] or ()) for field in fields if field.repeated}
    made = check(options(**given))
    refuse_replacing(made)
    return made


def _parameter(field: Field) -> inspect.Parameter:
    spec = field.spec
    annotation: Any = list[field.type] if field.repeated else field.type  # type: ignore[name-defined]
    if field.optional and not field.repeated:
        annotation = annotation | None
    shared: dict[str, Any] = {
        "help": _with_choices(spec.help, spec.choices).replace("[", "\\["),
        "metavar": spec.metavar,
    }
    if field.type is Path:
        # What can't be read is bad input, as what isn't there; click would call it a usage error.
        shared |= {"show_default": not field.required, "readable": False}
    if spec.positional:
        info: Any = typer.Argument(**shared)
    else:
        flag = f"{field.flag}/--no-{field.flag[2:]}" if field.type is bool else field.flag
        panel = None if spec.group == "Options" else spec.group
        info = typer.Option(flag, *spec.flags, rich_help_panel=panel, **shared)
    default = inspect.Parameter.empty if field.required else field.default
    if field.repeated and not field.required:
        default = list(field.default)
        if not default:
            info.show_default = False
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, info]
    )


def _with_choices(text: str, choices: Sequence[str]) -> str:
    return f"{text} ({' | '.join(choices)})" if choices else text


def _shared(json_output: bool) -> list[inspect.Parameter]:
    """The options that every command has."""
    panel = "Output"
    flags = [
        ("quiet", "--quiet", "-q", "Only warnings, errors and what --json prints."),
        ("verbose", "--verbose", "-v", "Say more of what is done."),
    ]
    made = []
    for name, long, short, text in flags:
        info = typer.Option(long, short, help=text, rich_help_panel=panel, show_default=False)
        made.append((name, info))
    if json_output:
        info = typer.Option(
            "--json", help="Print the result as JSON on stdout.", rich_help_panel=panel, show_default=False
        )
        made.append(("json_", info))
    return [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, info]
        )
        for name, info in made
    ]


def _shell_lines(line: str) -> str:
    """A shell line cut at blanks with backslashes, so that it can be pasted from an 80-column terminal."""
    pieces = textwrap.wrap(line, 70, break_long_words=False, break_on_hyphens=False)
    return "  " + " \\\n      ".join(pieces)


def _indented(text: str, columns: int) -> str:
    return textwrap.indent(textwrap.fill(text, 76 - columns), " " * columns)


def _help(summary: str, examples: Sequence[Example], next_step: str) -> str:
    shown = "\n".join(f"{_shell_lines(e.line)}\n{_indented(e.note, 6)}" for e in examples)
    text = f"{summary}\n\n\b\nExamples:\n{shown}\n\nNext: {next_step}"
    return text.replace("[", "\\[")  # brackets are markup to typer
