"""``ncm data``: make one of the data sets on disk."""

from __future__ import annotations

import importlib
from typing import Any

from ncm_cli.datasets.folder import Built
from ncm_cli.methods.threads import blas_threads
from ncm_cli.options.registry import builder_options
from ncm_cli.progress import SILENT, Reporter

BUILDERS = {
    "folder": "image_folder",
    "digits": "digits",
    "synthetic": "synthetic",
    "colored-mnist": "colored_mnist",
    "waterbirds-cf": "waterbirds_cf",
    "pacs": "pacs",
}
"""The module of ncm_cli.datasets whose ``build(options, reporter)`` makes each data set."""


def data(options: Any, *, reporter: Reporter = SILENT) -> Built:
    """Make the data set to which the class of ``options`` belongs."""
    builder = next(name for name in BUILDERS if type(options) is builder_options(name))
    module = importlib.import_module(f"ncm_cli.datasets.{BUILDERS[builder]}")
    # Builders decompose small matrices at most.
    with blas_threads(0):
        built: Built = module.build(options, reporter)
    return built
