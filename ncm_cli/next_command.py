"""Suggests the command that usually follows another one, with that one's files."""

from __future__ import annotations

import shlex
import string
from pathlib import Path
from typing import Any

NEXT = {
    "data": "ncm embed {output}/manifest.csv -o features.h5",
    "data digits": "ncm embed {output}/manifest.csv --model pixels:8 -o features.h5",
    "data synthetic": "ncm fit -f {output}/features.h5 -p {output}/clean.h5 -o probe.safetensors",
    "embed": "ncm pairs {pairs_csv} -f {output} -o pairs.h5",
    "pairs": "ncm fit -f {features} -p {output} -o probe.safetensors",
    "fit": "ncm eval {output} -f {features} --where {test}",
    "eval": "ncm report {output}",
    "bound": "ncm report {output} --plots figures",
    "sweep": "ncm report {json}",
    "finetune": "ncm report {json} --plots figures",
}
"""The next command after each. Names in braces are those of options that name files, or of `_known`."""


def next_command(words: str, options: Any) -> str | None:
    """A shell line for the command that comes after ``words``, such as ``fit`` or ``data digits``.

    None if no command follows, or if a file that it needs isn't known.
    """
    line = NEXT.get(words) or NEXT.get(words.partition(" ")[0])
    if line is None or getattr(options, "leave_out", None) is not None:
        return None
    values: dict[str, str] = {}
    for name in {name for _, name, _, _ in string.Formatter().parse(line) if name}:
        value = _known(name, options) or getattr(options, name, None)
        if value is None or not isinstance(value, str | Path) or str(value) == "-":
            return None
        values[name] = shlex.quote(str(value))
    return line.format(**values)


def _known(name: str, options: Any) -> str | Path | None:
    """``json``: the output's .json; ``pairs_csv``: a table beside the source; ``test``: the test rows."""
    if name == "json":
        return Path(options.output).with_suffix(".json")
    if name == "pairs_csv":
        beside = Path(options.source).parent / "pairs.csv"
        return beside if beside.is_file() else None
    if name == "test" and options.test is None:
        from ncm_cli.store.features import FeatureStore
        from ncm_cli.store.roles import split_filter

        with FeatureStore(options.features) as store:
            return split_filter(store, "test")
    return None
