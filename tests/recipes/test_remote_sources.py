"""A recipe's pictures may lie behind a scheme: it runs as `ncm embed` does, and notices what changed."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ncm_cli.main import run
from ncm_cli.store.features import FeatureStore
from tests.conftest import WebHandler


@pytest.fixture(params=["with times", "without"])
def server(request: pytest.FixtureRequest, serve: Callable[..., str]) -> str:
    """A web server, and one that tells no times of its files."""

    class Silent(WebHandler):  # type: ignore[misc]
        def send_header(self, keyword: str, value: str) -> None:
            if keyword != "Last-Modified":
                super().send_header(keyword, value)

    return serve(WebHandler if request.param == "with times" else Silent)


def picture(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
    os.utime(path, (1e9 + seed, 1e9 + seed))  # servers tell seconds


@pytest.fixture
def pics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for i, folder in enumerate(("cat", "dog", "dog")):
        picture(tmp_path / "pics" / folder / f"{i} a.png", i)
    return tmp_path / "pics"


def pack(pics: Path) -> None:
    with tarfile.open(pics.with_suffix(".tar"), "w") as tar:
        tar.add(pics, "pics")


def runs(source: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a recipe with this source; what it says."""
    text = f"name: r\nsteps:\n  - embed: {{source: '{source}', model: 'pixels:2', output: f.h5}}\n"
    Path("r.yaml").write_text(text, encoding="utf-8")
    capsys.readouterr()
    assert run(["run", "r.yaml", "--out", "out"]) == 0
    return capsys.readouterr().err


def expect_fresh(source: str, change: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert "up to date" not in runs(source, capsys)
    assert "1 of 1 steps were up to date" in runs(source, capsys)
    before = features()
    change()  # type: ignore[operator]
    assert "its inputs changed" in runs(source, capsys)
    assert (features() != before).any()
    assert "1 of 1 steps were up to date" in runs(source, capsys)


def features() -> np.ndarray:
    with FeatureStore(Path("out/f.h5")) as store:
        return store.read()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["folder", "archive", "manifest"])
def test_of_a_server(server: str, pics: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    pack(pics)
    Path("m.csv").write_text(
        f"id,path\n1,{server}/pics/cat/0%20a.png\n2,pics/dog/1 a.png\n", encoding="utf-8"
    )
    source = {"folder": f"{server}/pics", "archive": f"{server}/pics.tar", "manifest": "m.csv"}[what]

    def change() -> None:
        picture(pics / "cat" / "0 a.png", 9)
        pack(pics)
        os.utime(pics.with_suffix(".tar"), (2e9, 2e9))

    expect_fresh(source, change, capsys)


@pytest.mark.parametrize("what", ["folder", "archive", "manifest"])
def test_of_a_file_url(pics: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    """snakemake/snakemake#2011: a remote file that changed."""
    pack(pics)
    Path("m.csv").write_text(f"id,path\n1,file://{pics}/cat/0 a.png\n", encoding="utf-8")
    source = {"folder": f"file://{pics}", "archive": f"file://{pics}.tar", "manifest": "m.csv"}[what]

    def change() -> None:
        picture(pics / "cat" / "0 a.png", 9)
        pack(pics)

    expect_fresh(source, change, capsys)


def test_of_an_archive_in_memory(pics: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """iterative/dvc#2439, #4693."""
    memory = pytest.importorskip("fsspec").filesystem("memory")
    pack(pics)
    memory.pipe("/x/pics.tar", pics.with_suffix(".tar").read_bytes())

    def change() -> None:
        picture(pics / "cat" / "0 a.png", 9)
        pack(pics)
        memory.pipe("/x/pics.tar", pics.with_suffix(".tar").read_bytes())

    expect_fresh("memory://x/pics.tar", change, capsys)
    memory.rm("/x", recursive=True)


def test_a_source_that_is_gone_is_said(pics: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for source in ("http://127.0.0.1:1/pics", "http://127.0.0.1:1/pics.tar", "memory://nowhere"):
        text = f"name: r\nsteps:\n  - embed: {{source: '{source}', model: 'pixels:2', output: f.h5}}\n"
        Path("r.yaml").write_text(text, encoding="utf-8")
        assert run(["run", "r.yaml", "--out", "out"]) == 3
        assert source in capsys.readouterr().err
