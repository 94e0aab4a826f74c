"""The direction of imports, and what must never be imported for a quick command."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from ncm_cli.registry import COMMANDS
from tests.world import run_light

PACKAGE = Path(__file__).resolve().parents[1] / "ncm_cli"

LEVELS = {
    "errors": 0,
    "progress": 0,
    "options": 1,
    "registry": 1,
    "blocks": 1,
    "child": 1,
    "ray_cluster": 1,
    "store": 2,
    "given": 3,
    "solvers": 3,
    "datasets": 4,
    "images": 4,
    "pairs": 4,
    "probes": 4,
    "baselines": 4,
    "finetune": 4,
    "theory": 4,
    "recipes": 5,
    "results": 5,
    "console": 5,
    "completion": 5,
    "next_command": 5,
    "commands": 6,
    "main": 7,
    "notebook": 7,
}
"""A module may import from its own level and from lower ones; none may import itself by a detour."""

MATHEMATICS = {
    "pairs.matching",
    "probes.metrics",
    "probes.selection",
    *(f"solvers.{path.stem}" for path in PACKAGE.glob("solvers/*.py")),
    "theory.theorem",
}
"""These know no file and no console."""

OWNERS = {
    "typer": {"main"},
    "rich": {"console"},
    "h5py": {"store"},
    "jinja2": {"results"},
    "safetensors": {"store", "images"},
    "ray": {"ray_cluster"},
}
"""Packages that only some parts may import."""


QUICK = ("pairs", "eval", "bound", "info")
"""Commands whose ``--help`` comes at once."""


def _part(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


@functools.cache
def _imports(path: Path) -> set[str]:
    return _named(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def _named(nodes: Iterable[ast.AST]) -> set[str]:
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return found


MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if _part(path) not in {"__init__", "__main__"}]


EVERY_IMPORT = [(path, name) for path in MODULES for name in sorted(_imports(path))]


def _name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def test_imports_point_down_only() -> None:
    for path, name in EVERY_IMPORT:
        part, pieces = _part(path), name.split(".")
        if pieces[0] == "ncm_cli" and len(pieces) > 1 and pieces[1] in LEVELS:
            assert LEVELS[pieces[1]] <= LEVELS[part], f"{path.name} ({part}) imports {name}"


def test_only_the_registry_imports_modules_of_ours_by_name() -> None:
    for path in (path for path in MODULES if _name(path) != "registry"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and "import" in getattr(
                node.func, "attr", getattr(node.func, "id", "")
            ):
                assert "ncm_cli" not in ast.unparse(node), path.name


def test_commands_meet_in_files_only() -> None:
    for path in (path for path in MODULES if _part(path) == "commands"):
        others = {name.split(".")[2] for name in _imports(path) if name.startswith("ncm_cli.commands.")}
        assert not others & {other.stem for other in PACKAGE.glob("commands/*.py")}, f"{path.name}: {others}"


def _graph() -> dict[str, set[str]]:
    """Of each module those that it imports, inside functions and for types alone included."""
    graph, known = {}, {_name(path) for path in MODULES}
    packages = {_name(path) for path in MODULES if path.stem == "__init__"}
    for path in MODULES:
        names = {one.removeprefix("ncm_cli.") for one in _imports(path)}
        # From a package its modules may be imported, and what it defines itself.
        modules_alone = {
            name for name in packages if {n for n in names if n.rpartition(".")[0] == name} <= known
        }
        graph[_name(path)] = names & (known - modules_alone - {_name(path)})
    return graph


def test_no_module_imports_itself_by_a_detour() -> None:
    assert list(TopologicalSorter(_graph()).static_order())


def test_no_folder_imports_itself_by_a_detour() -> None:
    folders: dict[str, set[str]] = {}
    for name, others in _graph().items():
        if "." in name:
            folder = name.partition(".")[0]
            inner = {other.partition(".")[0] for other in others if "." in other}
            folders.setdefault(folder, set()).update(inner - {folder})
    assert list(TopologicalSorter(folders).static_order())


@pytest.mark.parametrize("name", sorted(MATHEMATICS))
def test_mathematics_knows_no_file(name: str) -> None:
    files = {"ncm_cli.store", "ncm_cli.console", "h5py", "pathlib"}
    found = _imports(PACKAGE / f"{name.replace('.', '/')}.py")
    assert not {one for one in found if any(one == file or one.startswith(f"{file}.") for file in files)}


def test_packages_stay_where_they_belong() -> None:
    for path, name in EVERY_IMPORT:
        owners = OWNERS.get(name.split(".")[0])
        assert owners is None or _part(path) in owners, f"{path.name} imports {name}"


def test_quick_commands_import_nothing_heavy() -> None:
    lines = ["--help", *(f"{name} --help" for name in QUICK), "help pairs"]
    run_light(f"from ncm_cli.main import run\nfor line in {lines!r}:\n    run(line.split())")


def test_what_shows_a_result_names_the_options_and_the_work_of_its_command() -> None:
    for name, command in COMMANDS.items():
        text = (PACKAGE / "commands" / f"{name}.py").read_text().partition('"""\n')[0]
        if command.work and name not in ("data", "run"):
            assert command.options.replace(":", ".") in text
            assert command.work.partition(":")[0] in text
