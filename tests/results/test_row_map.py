"""The map of a page: which rows it shows and where; mouse, finger and keyboard reach each of them."""

from __future__ import annotations

import collections
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ncm_cli.main import run
from ncm_cli.results import row_map
from ncm_cli.results.row_map import fair_sample
from ncm_cli.store.tables import csv_text

CLASSES = ("<b>cat</b>", "dog & co", "owl")
STRANGE = '"><img src=x onerror=alert(1)>'


def test_rows_are_drawn_alike_from_all_groups() -> None:
    rng = np.random.default_rng(1)
    for most in (0, 1, 7, 40, 90, 400, 5000):
        sizes = rng.integers(1, 300, size=9)
        codes = rng.permutation(np.repeat(np.arange(-1, 8), sizes))
        found = fair_sample(codes, most)
        assert len(found) == min(most, len(codes)) and (np.diff(found) > 0).all()
        assert np.array_equal(found, fair_sample(codes, most)), "the same each time"
        drawn = np.bincount(codes[found] + 1, minlength=9)
        # A group with fewer rows than another one in the sample is there whole, but for one of a last round.
        assert all(n == size or n >= drawn.max() - 1 for n, size in zip(drawn, sizes, strict=True))


def _made(folder: Path, classes: int = 3, *, pictures: bool = True) -> Path:
    """The page of two probes on rows whose label shows in one channel and the place in another."""
    rng = np.random.default_rng(0)
    rows, pairs, places = [], [], ("land", "water")
    (folder / "images").mkdir(parents=True)
    for i in range(150):
        label, place = i % classes, int(rng.random() < 0.5) if i >= 90 else (i % classes) % 2
        for twin in (place, 1 - place)[: 1 + (i < 40)]:
            pixels = rng.integers(0, 90, (6, 6, 3), dtype=np.uint8)
            pixels[:, :, 0] += np.uint8(8 * label)
            pixels[:, :, 1] += np.uint8(160 * twin)
            name = f"{i}-{places[twin]}"
            Image.fromarray(pixels).save(folder / "images" / f"{name}.png")
            split = "train" if i < 60 else "val" if i < 90 else "test"
            split = split if twin == place else "unused"
            id = f"{name} {STRANGE}" if i == 149 else name
            rows.append((id, f"images/{name}.png", CLASSES[label], places[twin], split))
        if i < 40:
            pairs.append((f"{i}-{places[place]}", f"{i}-{places[1 - place]}"))
    (folder / "m.csv").write_text(csv_text(("id", "path", "label", "place", "split"), rows))
    (folder / "p.csv").write_text(csv_text(("id_a", "id_b"), pairs))
    store, made = str(folder / "f.h5"), str(folder / "p.h5")
    if pictures:
        line = ["embed", str(folder / "m.csv"), "--model", "pixels:6"]
    else:
        np.save(folder / "x.npy", rng.normal(size=(len(rows), 8)).astype(np.float32))
        line = ["embed", str(folder / "m.csv"), "--from-array", str(folder / "x.npy"), "--encoder-name", "x"]
    assert run([*line, "-o", store, "-q"]) == 0
    assert run(["pairs", str(folder / "p.csv"), "-f", store, "-o", made, "-q"]) == 0
    for method, more in (("erm", []), ("ncm", ["-p", made, "--rank", "2"])):
        probe, result = str(folder / f"{method}.safetensors"), str(folder / f"{method}.json")
        line = ["fit", "-f", store, "-o", probe, "--method", method, "--weight-decay", "1e-3", *more]
        assert run([*line, "-q"]) == 0
        line = ["eval", probe, "-f", store, "--where", "split=test", "--groups", "label,place", "-o", result]
        assert run([*line, "-q"]) == 0
    return folder


def _page(folder: Path, *names: str) -> str:
    page = folder / "page.html"
    assert run(["report", *(str(folder / name) for name in names), "--html", str(page), "-q"]) == 0
    return page.read_text("utf-8")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _made(tmp_path_factory.mktemp("map"))


def _panels(text: str) -> list[str]:
    map = text.partition('<div class="panels">')[2].partition('<div class="card">')[0]
    return re.findall("<svg.*?</svg>", map, re.DOTALL)


def test_every_row_is_a_dot_and_misses_are_left_of_zero(made: Path) -> None:
    text = _page(made, "erm.json", "ncm.json")
    panels = _panels(text)
    assert [re.findall("erm|ncm", panel)[0] for panel in panels] == ["erm", "ncm"], "before and after"
    counts = []
    for panel in panels:
        dots = re.findall(r'<use href="#dot(\d)" x="([\d.]+)" y="([\d.]+)" class="dot c(\d)( wrong)?"', panel)
        zero = float(re.findall(r'class="zero" d="M([\d.]+)', panel)[0])
        assert len(dots) == 60
        assert all(shape == colour for shape, _, _, colour, _ in dots)
        wrong = [bool(miss) for *_, miss in dots]
        assert all((float(x) < zero + 0.1) if miss else (float(x) > zero - 0.1) for _, x, _, _, miss in dots)
        assert 0 < sum(wrong) < 60
        counts.append(collections.Counter(colour for _, _, _, colour, _ in dots))
        accuracy = float(re.findall(r"removed: ([\d.]+) right", panel)[0])
        assert accuracy == pytest.approx(1 - np.mean(wrong), abs=1e-3)
    assert counts[0] == counts[1] and sum(counts[0].values()) == 60 and len(counts[0]) == 6
    assert "60 of 60 rows, drawn evenly from all groups" in text
    assert "margin: the true class’s logit less the highest other" in text
    assert STRANGE not in text and CLASSES[0] not in text
    assert len(re.findall("<li data-id=[^>]* data-src=", text)) == 60


def test_nothing_removed_is_no_map_and_rank_0_is_asked_for(made: Path, tmp_path: Path) -> None:
    for name in ("ncm.json", "ncm.safetensors", "f.h5"):
        (tmp_path / name).write_bytes((made / name).read_bytes())
    assert "What was removed" not in _page(made, "erm.json")
    text = _page(tmp_path, "ncm.json")
    assert len(_panels(text)) == 1 and "evaluate a probe of rank 0" in text


def test_a_map_is_a_sample_with_few_bytes(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_map, "MAX_DOTS", 24)
    monkeypatch.setattr(row_map, "MAX_COLOURS", 4)
    monkeypatch.setattr(row_map, "DOT_BUDGET", 2000)
    text = _page(made, "erm.json", "ncm.json")
    assert "24 of 60 rows" in text and "3 other groups" in text
    assert text.count('class="dot c') == 48 and 0 < len(re.findall("<li data-id=[^>]* data-src=", text)) < 24
    assert "the page is full" in text


def test_two_classes_without_pictures(tmp_path: Path) -> None:
    text = _page(_made(tmp_path, classes=2, pictures=False), "erm.json", "ncm.json")
    assert "margin: the logit towards the true class" in text
    assert text.count('data-why="a row of an array has no picture"') == 60


@pytest.mark.slow
def test_mouse_finger_and_keyboard_reach_the_dots(browser: Any, made: Path) -> None:
    _page(made, "erm.json", "ncm.json")
    for width in (390, 768, 1280):
        context = browser.new_context(viewport={"width": width, "height": 900}, has_touch=True)
        opened = context.new_page()
        said: list[str] = []
        opened.on("console", lambda message: said.append(message.text))  # noqa: B023
        opened.on("pageerror", lambda error: said.append(str(error)))  # noqa: B023
        opened.goto(f"file://{made}/page.html")
        assert opened.evaluate("document.documentElement.scrollWidth") == width
        card, panels = opened.locator(".map .card"), opened.locator(".map .panels svg")
        first, second = panels.nth(0).locator(".dot"), panels.nth(1).locator(".dot")
        assert first.count() == second.count() == 60

        def center(dot: Any) -> tuple[float, float]:
            dot.scroll_into_view_if_needed()
            box = dot.bounding_box()
            return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

        # The rightmost dot has no neighbour to be mistaken for.
        at = second.evaluate_all("dots => dots.map(dot => dot.x.baseVal.value)")
        right, ids = int(np.argmax(at)), opened.locator(".map ul[hidden] li")
        opened.mouse.move(*center(second.nth(right)))
        shown = card.locator("code").text_content()
        assert shown == ids.nth(right).get_attribute("data-id")
        assert card.locator("img").evaluate("image => image.naturalWidth") == 6
        assert opened.locator(".map .ring:visible").count() == 2, "in both panels"
        far = int(np.argmin(first.evaluate_all("dots => dots.map(dot => dot.x.baseVal.value)")))
        opened.touchscreen.tap(*center(first.nth(far)))
        assert card.locator("code").text_content() == ids.nth(far).get_attribute("data-id")
        assert card.evaluate("box => box.getBoundingClientRect().bottom <= innerHeight + 1"), "in sight"
        # From the first dot of a panel the arrows go through all of them, in their order along the axis.
        second.nth(0).focus()
        opened.keyboard.press("Home")
        visited = []
        for _ in range(60):
            visited.append(opened.evaluate("document.activeElement.x.baseVal.value"))
            assert opened.evaluate("document.activeElement.getAttribute('aria-label')").startswith(
                str(card.locator("code").text_content())
            )
            opened.keyboard.press("ArrowRight")
        assert visited == sorted(at)
        assert opened.locator(".map [tabindex='0'].dot").count() == 2, "one stop a panel"
        assert said == []
        context.close()
