"""Which of our formats a file has, told by its content."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ncm_cli.errors import InputError
from ncm_cli.store import features, journal, pairs, probe, results, sweep_table
from ncm_cli.store.files import read_json, require_file
from ncm_cli.store.hdf5 import root_attributes

Kind = Literal["features", "pairs", "probe", "result", "sweep", "journal"]

_H5_KINDS: dict[str, Kind] = {
    features.FORMAT: "features",
    pairs.FORMAT: "pairs",
    sweep_table.FORMAT: "sweep",
}
_HDF5 = b"\x89HDF\r\n\x1a\n"


def recognise(path: Path | str) -> Kind:
    """The kind of a file or folder of ours.

    Raises `InputError` for anything else; for the name of a store whose making was interrupted it says so.
    """
    path = Path(path)
    if path.is_dir():
        if (path / "journal.json").is_file():
            return "journal"
        raise _foreign(path, "a folder without a journal")
    unfinished = journal.journal_folder(path)
    if not path.exists() and unfinished.is_dir():
        raise InputError(
            "no such file yet: its making was interrupted",
            where=path,
            fix=f"run the same command again to go on; ncm info {unfinished} says how far it is",
        )
    with require_file(path).open("rb") as stream:
        head = stream.read(16)
    if head.startswith(_HDF5):
        return _of_hdf5(path)
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size:
        return "probe"
    if head.lstrip(b" \t\r\n").startswith(b"{"):
        return _of_json(path)
    raise _foreign(path, "none of our formats")


def _of_hdf5(path: Path) -> Kind:
    found = root_attributes(path).get("ncm_format")
    if found not in _H5_KINDS:
        raise _foreign(path, f"an HDF5 file with ncm_format {found!r}")
    return _H5_KINDS[found]


def _of_json(path: Path) -> Kind:
    found = read_json(path)
    if isinstance(found, dict) and found.get("ncm_format") == results.FORMAT:
        return "result"
    if isinstance(found, dict) and found.get("ncm_format") == journal.FORMAT:
        raise InputError("a part of a journal", where=path, fix=f"ncm info {path.parent}")
    raise _foreign(path, "a JSON file without our header")


def _foreign(path: Path, found: str) -> InputError:
    names = (features.FORMAT, pairs.FORMAT, probe.FORMAT, results.FORMAT)
    return InputError("not a file of ncm", where=path, found=found, expected=", ".join(names))
