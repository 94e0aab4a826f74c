"""``python -m ncm_cli`` is ``ncm``."""

from ncm_cli.main import main

main()
