"""Files in the formats of ncm; `recognise` tells a file's format by its content."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ncm_cli.errors import InputError
from ncm_cli.options import possible
from ncm_cli.store.files import read_json, require_file
from ncm_cli.store.sniff import HEAD_BYTES, sniff

Kind = Literal["features", "pairs", "probe", "checkpoint", "result", "sweep", "data", "journal"]

_KINDS: tuple[Kind, ...] = ("features", "pairs", "sweep", "result", "data")
"""Kinds of files that state their format, ``ncm-KIND``, in a JSON key or an HDF5 attribute."""


def recognise(path: Path | str) -> Kind:
    """The kind of a file or folder that ncm wrote.

    Raises `InputError` for anything else. It says so if the path is that of an interrupted command's output.
    """
    from ncm_cli.store import hdf5, journal
    from ncm_cli.store.probe import TUNED, safetensors_metadata

    path = possible(path, InputError)
    if (path / "journal.json").is_file():
        return "journal"
    unfinished = journal.journal_folder(path)
    if not path.exists() and unfinished.is_dir():
        raise InputError(
            "no such file yet: the command that makes it was interrupted",
            where=path,
            fix=f"run the same command again to resume it; ncm info {unfinished} shows its progress",
        )
    found = "none of ncm's formats"
    if path.is_dir():
        found = "a folder without a journal"
    else:
        with require_file(path).open("rb") as stream:
            head = stream.read(HEAD_BYTES)
        if sniff(head) == "safetensors":
            return "checkpoint" if TUNED in safetensors_metadata(path) else "probe"
        stated = None
        if sniff(head) == "HDF5":
            stated = hdf5.root_attributes(path).get("ncm_format")
            found = f"an HDF5 file with ncm_format {stated!r}"
        elif head.lstrip(b" \t\r\n").startswith(b"{"):
            stated, found = read_json(path).get("ncm_format"), "a JSON file without ncm's header"
        if stated == journal.FORMAT:
            raise InputError("a part of a journal", where=path, fix=f"ncm info {path.parent}")
        for kind in _KINDS:
            if stated == f"ncm-{kind}":
                return kind
    names = ", ".join(f"ncm-{kind}" for kind in ("features", "pairs", "probe", "result", "data"))
    raise InputError("not a file of ncm", where=path, found=found, expected=names)
