"""The topic ``reference``, made from the same declarations as ``--help``.

``python tests/reference.py`` rewrites it; a test checks that it is up to date.
"""

from __future__ import annotations

from pathlib import Path

from ncm_cli.options import Field, fields_of
from ncm_cli.registry import BUILDERS, COMMANDS, options_of

FILE = Path(__file__).resolve().parents[1] / "ncm_cli" / "help" / "reference.md"


def commands() -> dict[str, tuple[str, type]]:
    """Each command line's words, with its sentence and its options."""
    every = {name: command for name, command in COMMANDS.items() if name != "data"}
    every = {f"data {name}": builder for name, builder in BUILDERS.items()} | every
    return {words: (command.sentence, options_of(words)) for words, command in every.items()}


def reference() -> str:
    """The whole topic, in Markdown."""
    sections = [_section(name, *rest) for name, rest in commands().items()]
    return "\n".join(["# Command reference", *sections, ""])


def _section(name: str, sentence: str, options: type) -> str:
    rows = [f"| `{_name(field)}` | {_default(field)} | {_help(field)} |" for field in fields_of(options)]
    head = ["", f"## `ncm {name}`", "", sentence, "", "| option | default | meaning |", "|---|---|---|"]
    return "\n".join([*head, *rows])


def _name(field: Field) -> str:
    if field.positional:
        return field.metavar or field.name.upper()
    return ", ".join([*field.flags, field.flag])


def _default(field: Field) -> str:
    if field.required:
        return "required"
    if field.default is None or field.default == ():
        return ""
    return f"`{str(field.default).lower() if field.type is bool else field.default}`"


def _help(field: Field) -> str:
    choices = f" (`{'`, `'.join(field.choices)}`)" if field.choices else ""
    repeated = " May be repeated." if field.repeated and "repeated" not in field.help else ""
    return (field.help + choices + repeated).replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    FILE.write_text(reference(), encoding="utf-8")
