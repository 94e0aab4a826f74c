"""The rows that a command reads: of a table, a folder of images or tar archives."""

from __future__ import annotations

import re

from ncm_cli.errors import UsageError, as_written
from ncm_cli.images.archives import read_archives
from ncm_cli.images.folder import read_folder
from ncm_cli.images.manifest import ColumnNames, Manifest, read_manifest
from ncm_cli.images.options import SourceChoice, parse_layout
from ncm_cli.images.paths import is_remote


def read_source(options: SourceChoice) -> Manifest:
    """The rows that a command reads with these options: of a table, a folder or tar archives."""
    source, names, with_files = options.source, ColumnNames.of(options), options.from_array is None
    text = as_written(source)
    archives = re.search(r"\.tar\W*$", text) and not source.is_dir()
    if archives and with_files and not (options.root or options.layout):
        return read_archives(text, names)
    if not (is_remote(text) or source.is_dir()):
        if options.layout is not None:
            raise UsageError("--layout is for folders", found=f"{text} is no folder")
        return read_manifest(source, names, root=options.root, with_files=with_files)
    if not with_files:
        fix = "write a CSV with the ids and labels in the order of the array's rows"
        raise UsageError("--from-array needs a manifest", found=f"{text} is a folder", fix=fix)
    if options.root is not None:
        raise UsageError("--root is for manifests", found=f"{text} is a folder")
    return read_folder(source, parse_layout(options.layout) if options.layout else None, names)
