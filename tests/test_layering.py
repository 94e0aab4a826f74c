"""The direction of imports, and what must never be imported for a quick command."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "ncm_cli"

LEVELS = {
    "errors": 0,
    "progress": 0,
    "options": 1,
    "methods": 2,
    "store": 2,
    "encoders": 2,
    "datasets": 2,
    "estimator": 3,
    "stages": 3,
    "recipe": 4,
    "pipeline": 4,
    "render": 4,
    "cli": 5,
}
"""A module may import from its own part and from lower levels."""

SIDEWAYS = {("datasets", "store"), ("encoders", "store"), ("cli", "render"), ("pipeline", "recipe")}
"""Imports within one level that are meant: builders write stores, and ``ncm run`` reads recipes."""

OWNERS = {"typer": {"cli"}, "rich": {"render"}, "h5py": {"store"}, "safetensors": {"store", "encoders"}}
"""Packages that only some parts may import."""


def _part(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return found


MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if _part(path) not in {"__init__", "__main__"}]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down_only(path: Path) -> None:
    part = _part(path)
    for name in _imports(path):
        pieces = name.split(".")
        if pieces[0] != "ncm_cli" or len(pieces) < 2 or pieces[1] not in LEVELS or pieces[1] == part:
            continue
        target = pieces[1]
        below = LEVELS[target] < LEVELS[part]
        assert below or (part, target) in SIDEWAYS, f"{path.name} ({part}) imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_packages_stay_where_they_belong(path: Path) -> None:
    for name in _imports(path):
        owners = OWNERS.get(name.split(".")[0])
        assert owners is None or _part(path) in owners, f"{path.name} imports {name}"


def test_stages_meet_in_files_only() -> None:
    stages = {path.stem for path in (PACKAGE / "stages").glob("*.py")}
    for path in (PACKAGE / "stages").glob("*.py"):
        own = path.stem.split("_")[0]
        for name in _imports(path):
            if not name.startswith("ncm_cli.stages."):
                continue
            target = name.split(".")[2]
            if target in stages:
                assert target.split("_")[0] in (own, "common"), f"{path.name} imports {name}"


@pytest.mark.parametrize("command", ["", "pairs", "eval", "bound", "info"])
def test_quick_commands_import_nothing_heavy(command: str) -> None:
    program = (
        "import sys\n"
        "from ncm_cli.cli.main import run\n"
        f"run({[*command.split(), '--help']!r})\n"
        "heavy = {'torch', 'open_clip', 'sklearn', 'timm', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
