"""The command tree, made from the registry: each field of a command's options is a typer parameter."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from ncm_cli.options import Field, at_home, check, fields_of, refuse_replacing
from ncm_cli.registry import BUILDERS, COMMANDS, Command, options_of


def add_commands(app: typer.Typer, only: str | None = None) -> None:
    """Add every command; with ``only``, the options of just that one are loaded.

    The others are then listed by name and summary alone, which keeps ``ncm --help`` quick.
    """
    for name, command in COMMANDS.items():
        if only not in (None, name):
            app.command(name, short_help=command.sentence)(lambda: None)
        elif name == "data":
            builders = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help=command.sentence)
            for builder, own in BUILDERS.items():
                _add(builders, builder, own, options_of(f"data {builder}"), name)
            app.add_typer(builders, name=name, short_help=command.sentence)
        else:
            _add(app, name, command, options_of(name), name)


def _add(app: typer.Typer, name: str, command: Command, options: type, module: str) -> None:
    """One command, done by ``run(options, ui)`` of its module, which returns an exit code or None."""
    fields = fields_of(options)

    def invoke(**values: Any) -> None:
        from ncm_cli.console import Ui

        ui = Ui(quiet=values.pop("quiet"), verbose=values.pop("verbose"), json=values.pop("json_", False))
        given = {field.name: at_home(field, values[field.name]) for field in fields}
        given |= {field.name: tuple(given[field.name] or ()) for field in fields if field.repeated}
        made = check(options(**given))
        refuse_replacing(made)
        code = importlib.import_module(f"ncm_cli.commands.{module}").run(made, ui)
        if code:
            raise typer.Exit(code)

    parameters = [*map(_parameter, fields), *_shared(command.json)]
    invoke.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    invoke.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    examples = textwrap.indent(inspect.cleandoc(command.examples), "  ")
    text = f"{command.sentence}\n\n\b\nExamples:\n{examples}\n\nNext: {command.next_step}"
    app.command(
        name,
        help=text.replace("[", "\\["),  # brackets are markup to typer
        short_help=command.sentence,
        no_args_is_help=any(field.required for field in fields),
    )(invoke)


def _parameter(field: Field) -> inspect.Parameter:
    spec = field.spec
    kind: Any = list[field.type] if field.repeated else field.type  # type: ignore[name-defined]
    choices = f" ({' | '.join(spec.choices)})" if spec.choices else ""
    shared: dict[str, Any] = {"help": (spec.help + choices).replace("[", "\\["), "metavar": spec.metavar}
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
    return _keyword(field.name, kind | None if field.optional and not field.repeated else kind, info, default)


def _keyword(name: str, kind: Any, info: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


def _shared(json: bool) -> list[inspect.Parameter]:
    """The options that every command has."""
    every = [
        ("quiet", ("--quiet", "-q"), "Only warnings, errors and what --json prints."),
        ("verbose", ("--verbose", "-v"), "Say more of what is done."),
        ("json_", ("--json",), "Print the result as JSON on stdout."),
    ]
    return [
        _keyword(
            name, bool, typer.Option(*flags, help=text, rich_help_panel="Output", show_default=False), False
        )
        for name, flags, text in (every if json else every[:2])
    ]
