"""Suspicious pairs on a page: what is said of each, and that unticking gives a list that ncm pairs takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ncm_cli.main import run
from ncm_cli.results import pictures as pictures_module
from ncm_cli.results.located import Located
from ncm_cli.results.pictures import Thumbnails, look
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.pairs import read_pairs
from ncm_cli.store.tables import csv_text, read_table

WRONG = range(4)
STRANGE = ['a,"1"', "b <i>2</i>", "c;3", "d"]
"""Ids of the wrong pairs' first members."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 pictures and their twins in the other channel, four of them another picture's; one file is gone."""
    folder = tmp_path_factory.mktemp("pairs")
    rng = np.random.default_rng(0)
    shapes = rng.integers(0, 9, (44, 6)) @ rng.integers(0, 5, (6, 64))
    rows = []
    for side in (0, 1):
        for i in range(40):
            pixels = np.zeros((64, 3), np.uint8)
            pixels[:, side] = shapes[i + 40 if side and i in WRONG else i]
            name = STRANGE[i] if i in WRONG and not side else f"{i}-{side}"
            Image.fromarray(pixels.reshape(8, 8, 3)).save(folder / f"{i}-{side}.png")
            rows.append((name, f"{i}-{side}.png", "even" if i % 2 or (side and i == 2) else "odd"))
    (folder / "manifest.csv").write_text(csv_text(("id", "path", "label"), rows))
    listed = [(rows[i][0], rows[i + 40][0]) for i in range(40)]
    (folder / "pairs.csv").write_text(csv_text(("id_a", "id_b"), [*listed, listed[7]]))
    store = str(folder / "f.h5")
    assert run(["embed", str(folder / "manifest.csv"), "--model", "pixels:8", "-o", store, "-q"]) == 0
    (folder / "2-1.png").unlink()
    return folder


def _make(folder: Path, name: str, *more: str) -> Path:
    table, store, output = (str(folder / file) for file in ("pairs.csv", "f.h5", f"{name}.h5"))
    assert run(["pairs", table, "-f", store, "-o", output, "-q", *more]) == 0
    return Path(output)


def _page(pairs: Path) -> Path:
    page = pairs.with_suffix(".html")
    assert run(["report", str(pairs), "--html", str(page)]) == 0
    return page


def test_each_suspicious_pair_says_why(pairs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _make(pairs, "whole")
    made = read_pairs(path)

    def found(budget: int = 100_000) -> dict[str, Any]:
        with FeatureStore(pairs / "f.h5") as store:
            return look(path, made, [Located(Path(), store)], Thumbnails(budget=budget))

    whole = found()
    assert made.diagnostics["stand_out"] == 4 and whole["suspicious"] == 5 and whole["of"] == 41
    ids = [tuple(tile.id for tile in pair["tiles"]) for pair in whole["pairs"]]
    assert {a for a, _ in ids[:4]} == {*STRANGE} and ids[4] == ("7-0", "7-1")
    assert len({*ids}) == len(ids) == 11
    assert all("times as much is unexplained" in pair["reasons"][0] for pair in whole["pairs"][:4])
    assert [pair["suspicious"] for pair in whole["pairs"]] == [True] * 5 + [False] * 6
    assert "listed more than once" in whole["pairs"][4]["reasons"][0]
    at = [a for a, _ in ids].index(STRANGE[2])
    assert whole["pairs"][at]["reasons"][1:] == ["the labels differ"]
    assert [tile.why for tile in whole["pairs"][at]["tiles"]] == ["", "no such file"]
    assert whole["command"].startswith(f"ncm pairs {pairs}/pairs.csv --features")
    assert whole["command"].endswith("--drop drop.csv") and not whole["dropped"]
    monkeypatch.setattr(pictures_module, "MAX_SUSPICIOUS", 3)
    short = found(budget=200)
    assert (len(short["pairs"]), short["more"]) == (9, 2)
    assert short["pairs"][3]["tiles"][0].why == "the page is full"
    gone = look(path, made, [Located(Path(), why="the store isn't there")], Thumbnails())
    assert gone["missing"] == "the store isn't there" and not gone["pairs"][0]["tiles"][0].src


@pytest.mark.slow
def test_unticked_pairs_are_downloaded_and_dropped(browser: Any, pairs: Path) -> None:
    page = _page(_make(pairs, "looked-at"))
    opened = browser.new_page(accept_downloads=True)
    opened.goto(f"file://{page}")
    form = opened.locator("form.pairs")
    button, boxes = form.get_by_role("button"), form.get_by_role("checkbox")
    assert button.is_disabled()
    assert form.locator("i").count() == 0 and form.locator(".nothing").text_content() == "no such file"
    unticked = []
    for at in (0, 2):
        boxes.nth(at).focus()
        opened.keyboard.press("Space")
        unticked.append(tuple(boxes.nth(at).get_attribute(f"data-{side}") for side in "ab"))
    assert form.locator("output").text_content().startswith("2 dropped")
    with opened.expect_download() as saved:
        button.click()
    assert saved.value.suggested_filename == "drop.csv"
    drop = pairs / "drop.csv"
    saved.value.save_as(drop)
    assert drop.read_text("utf-8") == form.locator("textarea").input_value()
    rows = read_table(drop).rows
    assert [(row["id_a"], row["id_b"]) for row in rows] == unticked
    opened.reload()
    assert [boxes.nth(at).is_checked() for at in range(3)] == [False, True, False]
    assert len(form.locator("textarea").input_value().splitlines()) == 3 and not button.is_disabled()
    assert form.locator("output").text_content().startswith("2 dropped")
    boxes.nth(2).check()
    opened.reload()
    assert [boxes.nth(at).is_checked() for at in range(3)] == [False, True, True]
    opened.evaluate("localStorage.setItem(Object.keys(localStorage)[0], '{')")
    opened.reload()
    assert boxes.nth(0).is_checked() and button.is_disabled()
    opened.evaluate("void (Storage.prototype.setItem = () => { throw new Error('barred') })")
    boxes.nth(0).uncheck()
    assert not button.is_disabled()
    again = _page(_make(pairs, "dropped", "--drop", str(drop)))
    made = read_pairs(pairs / "dropped.h5")
    assert made.pairs == 39 and not {*zip(made.id_a, made.id_b, strict=True)} & {*unticked}
    opened.goto(f"file://{again}")
    form.get_by_role("checkbox").first.uncheck()
    listed = form.locator("textarea").input_value().splitlines()[1:]
    assert len(listed) == 3
    drop.write_text(form.locator("textarea").input_value())
    _make(pairs, "dropped", "--drop", str(drop))
    assert read_pairs(pairs / "dropped.h5").pairs == 38
    opened.close()
