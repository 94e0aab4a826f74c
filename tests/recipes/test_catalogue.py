"""The recipes that come with ncm are found by name, listed and copied, also from an installed package."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from ncm_cli.errors import InputError
from ncm_cli.main import run
from ncm_cli.recipes.catalogue import copy_recipe, find_recipe, shipped_recipes
from ncm_cli.recipes.load import read_recipe
from tests.world import Heard

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_name_is_the_recipe_that_comes_with_ncm(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "digits", "--dry-run"]) == 0
    lines, said = capsys.readouterr()
    assert "ncm data digits --output runs/colored-digits/seed0/data" in lines
    assert not said


def test_a_file_of_that_name_wins_and_one_beside_it_is_told() -> None:
    shipped = shipped_recipes()["digits"]
    Path("digits.yaml").write_text("name: mine\n")
    assert find_recipe(Path("digits"), heard := Heard()) == shipped
    assert "ncm run digits.yaml runs the file" in heard.notes[0]
    assert find_recipe(Path("digits.yaml"), heard := Heard()) == Path("digits.yaml")
    assert heard.notes == []
    Path("digits").write_text("name: mine\n")
    assert find_recipe(Path("digits"), heard := Heard()) == Path("digits")
    assert "not the recipe that comes with ncm" in heard.notes[0]
    Path("digits").unlink()
    Path("digits").mkdir()  # a folder is no recipe
    assert find_recipe(Path("digits"), Heard()) == shipped


@pytest.mark.parametrize(
    ("asked", "code", "said"),
    [
        (["digit"], 3, "did you mean 'digits'?"),
        (["recipes/digits.yaml"], 3, "ncm run digits, the one that comes with ncm"),
        (["mine.yaml"], 3, "no such file"),
        ([], 2, "ncm run --list shows those that come with ncm"),
        (["--list", "digits"], 2, "leave the name out"),
        (["--list", "--dry-run"], 2, "leave out --dry-run"),
        (["digits", "--copy", "--set", "seed=[0]"], 2, "leave out --set"),
        (["digit", "--copy"], 2, "did you mean 'digits'?"),
    ],
)
def test_what_cant_be_run_is_refused(
    asked: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["run", *asked]) == code
    assert said in capsys.readouterr().err
    assert not list(Path().iterdir())


def test_the_list_has_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in listed] == list(shipped_recipes())
    assert all(one["what"] and one["data"] and one["time"] and Path(one["file"]).is_file() for one in listed)
    assert run(["run", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{one['name']}\n" in shown for one in listed)
    assert max(map(len, shown.splitlines())) <= 84


def test_a_copy_is_the_same_recipe_and_replaces_nothing() -> None:
    assert copy_recipe(Path("digits"), replace=False) == Path("digits.yaml")
    copied, shipped = read_recipe(Path("digits.yaml")), read_recipe(shipped_recipes()["digits"])
    assert copied.jobs == shipped.jobs
    assert "ncm run digits.yaml --set" in Path("digits.yaml").read_text()
    Path("digits.yaml").write_text("name: mine\n")
    with pytest.raises(InputError, match="exists already"):
        copy_recipe(Path("digits"), replace=False)
    assert Path("digits.yaml").read_text() == "name: mine\n"
    copy_recipe(Path("digits"), replace=True)
    assert read_recipe(Path("digits.yaml")).jobs == shipped.jobs


def test_what_a_recipe_says_of_itself_is_checked() -> None:
    Path("r.yaml").write_text("name: r\nabout: {when: now, data: [1]}\nsteps: []\n")
    with pytest.raises(InputError) as caught:
        read_recipe(Path("r.yaml"))
    assert "about.when: no key named 'when'; known: what, data, time" in str(caught.value)
    assert "about.data: expected text, found a list" in str(caught.value)


def test_the_package_is_all_of_its_folders() -> None:
    listed = re.search(r"^packages = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    assert listed
    folders = {file.parent.relative_to(ROOT) for file in (ROOT / "ncm_cli").rglob("__init__.py")}
    named = {folder.as_posix().replace("/", ".") for folder in folders}
    assert set(re.findall(r'"(.*?)"', listed[1])) == named | {"ncm_cli.recipes.shipped"}


OF_THE_SITE = """
import site, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
paths, finders = [*sys.path], [*sys.meta_path]
site.addsitedir(sys.argv.pop(1))
sys.path[:] = [*(path for path in sys.path if path not in paths), *paths]
sys.meta_path[:] = [*(finder for finder in sys.meta_path if finder not in finders), *finders]
from ncm_cli.main import main
main()
"""
"""``ncm`` of a folder of installed packages, whatever else is installed."""


@pytest.mark.slow
def test_the_recipes_are_in_what_is_installed(tmp_path: Path) -> None:
    """A wheel, a source archive and an editable install have them."""
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path / "source"
    files = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, files.stdout.decode().split("\0")):
        if (ROOT / name).is_file():  # else deleted in the working tree
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    names = {f"{name}.yaml" for name in shipped_recipes()}
    build = "from setuptools import build_meta as b; print(b.build_wheel('..'), b.build_sdist('..'))"
    _python("-c", build, cwd=source)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        packed = {Path(name) for name in archive.getnames()}
    assert {path.name for path in packed if path.parent.name == "recipes" and path.suffix == ".yaml"} == names
    assert {path.name for path in (tmp_path / "site/ncm_cli/recipes/shipped").iterdir()} == names
    (tmp_path / "editable").mkdir()
    _python("-c", "from setuptools import build_meta as b; b.build_editable('../editable')", cwd=source)
    with zipfile.ZipFile(next((tmp_path / "editable").glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "editable/site")
    for site, folder in (("site", "site"), ("editable/site", "source")):
        shown = _python("-c", OF_THE_SITE, str(tmp_path / site), "run", "--list", "--json", cwd=tmp_path)
        assert {Path(one["file"]).name for one in json.loads(shown)} == names
        assert all(Path(one["file"]).is_relative_to(tmp_path / folder) for one in json.loads(shown))


def _python(*arguments: str, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
