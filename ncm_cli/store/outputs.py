"""Which files a command may replace: only outputs of the same command, and no file that it reads."""

from __future__ import annotations

import os.path
import re
from pathlib import Path
from typing import Any

from ncm_cli.errors import InputError, UsageError, as_written
from ncm_cli.options import Field, fields_of, is_file, values_of
from ncm_cli.store import hdf5
from ncm_cli.store.files import refuse_no_file, relative
from ncm_cli.store.sniff import sniff

STDOUT = Path("-")
"""An output option's value for standard output, which isn't a file."""

MAX_HEADER_BYTES = 64 << 20
"""Longest header of a safetensors file that is looked at."""

_KIND_BYTES = 1 << 12
"""The number of bytes that is enough to tell all kinds but stores and probes."""


def _store(name: str) -> str:
    # An unreadable file may be a damaged output that the command is to make again.
    return rf"HDF5 ({name}|damaged)\Z"


def _result(kind: str) -> str:
    return rf'\{{\s*"ncm_format":\s*"ncm-result".*"kind":\s*"{kind}"'


KINDS = {
    "features": ("a feature store", _store("ncm-features")),
    "pairs": ("a pair store", _store("ncm-pairs")),
    "sweep": ("a sweep's table", _store("ncm-sweep")),
    "sweep-csv": ("a sweep's table", "method,trial,seed,"),
    "sweep-result": ("a result of ncm sweep", _result("sweep")),
    "eval": ("a result of ncm eval", _result("eval")),
    "bound": ("a result of ncm bound", _result("bound")),
    "finetune": ("a result of ncm finetune", _result("finetune")),
    "head": (
        "a probe of ncm finetune",
        r'.{8}\{(?=.*"ncm_format":\s*"ncm-probe").*\\"command\\": \\"finetune\\"',
    ),
    "probe": ("a probe", r'.{8}\{.*"ncm_format":\s*"ncm-probe"'),
    "checkpoint": ("a checkpoint of ncm finetune", r'.{8}\{.*"ncm-finetuned":'),
    "export": ("an exported probe", r"PK\x03\x04.{26}(weight|coef_)\.npy|.{0,16}ncm-cli"),
    "predictions": ("a table of predictions", "id,(class|value),"),
    "tables": (
        "tables of ncm report",
        r"\*\*[^\n]+\*\*\n\n\| .*\n\|-|% needs \\usepackage\{booktabs\}|table,|[^\n]+\n\n[^\n]+\n--[- ]*\n",
    ),
    "page": ("a page of ncm report", '<!doctype html>.*<meta name="generator" content="ncm '),
    # 180 dots an inch, which no camera writes; matplotlib's own name; the comment that its PDFs begin with.
    "plot": (
        "a plot",
        r"\x89PNG.{29}\0\0\0\x09pHYs\0\0\x1b\xaf\0\0\x1b\xaf|<\?xml.*matplotlib|"
        r"%PDF-1\.4\n%\xac\xdc \xab\xba\n",
    ),
}
"""The kinds of files that commands write: words, and a pattern of the first bytes."""


def check_outputs(options: Any) -> None:
    """Raise `UsageError` or `InputError` if a command with these options can't write, or would lose, a file.

    For an output folder, its writers call `refuse_other` on each file; ``ncm data`` replaces its own folders.
    """
    refuse_replacing(options)
    for field in fields_of(type(options)):
        output = getattr(options, field.name) if field.role == "output" else None
        if output is not None:
            refuse_address(output)
            check_place(field, output)
            for path, kind in zip(field.all_files(output), field.writes, strict=False):
                refuse_other(path, kind)


def check_place(field: Field, output: Path) -> None:
    """Raise `InputError` if an output is a folder or not a regular file, or if its folder is a file."""
    if field.is_folder:
        refuse_no_folder(output)
    elif output != STDOUT:
        for path in field.all_files(output):
            refuse_no_folder(path.parent)
            refuse_no_file(path)


def refuse_address(output: Path) -> None:
    """Raise `UsageError` for addresses such as s3://bucket/f.h5, which would make a folder named ``s3:``."""
    if "://" in (address := as_written(output)):
        fix = "write to this machine, and copy what is made"
        raise UsageError("outputs can't be written to an address", found=address, fix=fix)


def refuse_no_folder(path: Path) -> None:
    """Refuse a folder's path if it, or a folder above it, is a file or read-only; links are followed."""
    real = Path(os.path.realpath(path))
    if not (place := next(filter(os.path.lexists, (real, *real.parents)), real)).is_dir():
        fix = "another place to write to, or move that file away"
        raise InputError("a file where a folder is expected", where=relative(place, Path.cwd()), fix=fix)
    writable = os.access(place, os.W_OK)
    if writable and place.stat().st_dev in _kernel_devices():
        writable = False  # root may write to every folder, but even root can't make a file there
    if not writable:
        raise InputError("a folder that can't be written to", where=place, fix="write to another place")


def _kernel_devices() -> set[int]:
    """The file systems of the kernel's own files."""
    # In some containers they are plain folders of a disk.
    return {os.stat(path).st_dev for path in ("/proc", "/sys") if os.path.ismount(path)}  # noqa: PTH116


def refuse_replacing(options: Any) -> None:
    """Raise `UsageError` if a file would be both read and written, or written twice."""
    fields = fields_of(type(options))
    written: dict[Path, str] = {}
    for field in fields:
        output = getattr(options, field.name) if field.role == "output" else None
        for path in field.all_files(output) if output else ():
            if (other := written.setdefault(path.absolute(), field.flag)) != field.flag:
                raise UsageError(f"{other} and {field.flag} name the same file", where=path, fix="two names")
    for field in fields:
        read = _present(options, field) if field.role in ("input", "name-or-input") else []
        for output in filter(is_file, written):
            if any(path.samefile(output) for path in read):
                name = field.metavar or field.name.upper() if field.positional else field.flag
                raise UsageError(f"the output would replace {name}", where=output, fix="name another file")


def _present(options: Any, field: Field) -> list[Path]:
    """The files that exist among the paths in one field."""
    items = values_of(getattr(options, field.name))
    paths = [Path(item) for item in items if isinstance(item, str | Path) and str(item)]
    return [path for path in paths if is_file(path)]


def refuse_other(path: Path | str, kind: str) -> None:
    """Raise `UsageError` for a file that isn't of this kind of `KINDS`, unless it is empty."""
    path = Path(path)
    if not is_file(path) or not (start := _start(path)).strip():
        return
    words, pattern = KINDS[kind]
    if re.match(pattern.encode(), start, re.DOTALL) is None:
        kinds = (
            name for name, kind_pattern in KINDS.values() if re.match(kind_pattern.encode(), start, re.DOTALL)
        )
        raise UsageError(
            f"the output would replace a file that isn't {words}",
            where=path,
            found=next(kinds, "a file of another kind"),
            fix="name another file, or move this one away",
        )


def _start(path: Path) -> bytes:
    """The bytes that show a file's kind: the first ones, a probe's header, or a store's format."""
    try:
        with path.open("rb") as stream:
            head = stream.read(_KIND_BYTES)
            length = int.from_bytes(head[:8], "little")
            if sniff(head) == "safetensors" and length < MAX_HEADER_BYTES:
                head += stream.read(max(0, 8 + length - _KIND_BYTES))
    except OSError:  # the kind of an unreadable file can't be told; writing it reports the error
        return b""
    if sniff(head) != "HDF5":
        return head
    try:
        return f"HDF5 {hdf5.root_attributes(path).get('ncm_format')}".encode("utf-8", "replace")
    except InputError:
        return b"HDF5 damaged"
