"""The command that usually comes after another one, with the files of that one."""

from __future__ import annotations

import shlex
import string
from pathlib import Path
from typing import Any

NEXT = {
    "data": "ncm embed {output}/manifest.csv -o features.h5",
    "data synthetic": "ncm fit -f {output}/features.h5 -p {output}/clean.h5 -o probe.safetensors",
    "embed": "ncm pairs -f {output} --match random --same label -o pairs.h5",
    "pairs": "ncm fit -f {features} -p {output} -o probe.safetensors",
    "fit": "ncm eval {output} -f {features} --where split=test",
    "zeroshot": "ncm eval {output} -f {features}",
    "eval": "ncm report {output}",
    "bound": "ncm report {output} --plots figures",
    "sweep": "ncm report {json}",
    "finetune": "ncm report {json} --plots figures",
}
"""By command: the next one. The names are those of options with files; ``json`` is the output's .json."""


def next_command(words: str, options: Any) -> str | None:
    """A shell line for the command that comes after ``words``, such as ``fit`` or ``data digits``.

    None where none does, or where a file that it takes wasn't named.
    """
    line = NEXT.get(words) or NEXT.get(words.partition(" ")[0])
    if line is None or getattr(options, "leave_out", None) is not None:
        return None
    files: dict[str, Any] = {}
    for name in {name for _, name, _, _ in string.Formatter().parse(line) if name}:
        path = getattr(options, "output" if name == "json" else name, None)
        if not isinstance(path, Path) or str(path) == "-":
            return None
        files[name] = shlex.quote(str(path.with_suffix(".json") if name == "json" else path))
    return line.format(**files)
