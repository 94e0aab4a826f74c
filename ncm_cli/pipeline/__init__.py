"""``ncm run``: a recipe's jobs in order, each only when something it depends on has changed."""

from ncm_cli.pipeline.runner import RunReport, chosen, run
from ncm_cli.pipeline.shell import shell_lines

__all__ = ["RunReport", "chosen", "run", "shell_lines"]
