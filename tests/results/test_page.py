"""The page of a report: what users wrote stays text, nothing is fetched, and it works in a real browser."""

from __future__ import annotations

import itertools
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ncm_cli.main import run
from ncm_cli.results.lines import read_sources
from ncm_cli.results.located import FileFinder, Located
from ncm_cli.results.page import _joined
from ncm_cli.results.plots import drawable
from ncm_cli.store.files import HEADER, read_result, write_result

ROOT = Path(__file__).resolve().parents[2]

EVIL = '"><img src=x onerror=alert(1)>'
CLASSES = ("<script>alert(2)</script>", "b & w")


class Parsed(HTMLParser):
    """Elements as (tag, attributes), and text but for scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += "" if self.elements and self.elements[-1][0] in ("script", "style") else data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def pictures(self) -> list[dict[str, str | None]]:
        """But for plots, and for the similar training rows beside an error."""
        pictures = [one for one in self.all("img") if not str(one["src"]).startswith("data:image/svg")]
        return [one for one in pictures if one.get("class") != "small" and one.get("class") != "small crisp"]


def _made(folder: Path) -> Path:
    """An evaluation with its probe, store and pictures, named as nobody should name them."""
    rng = np.random.default_rng(0)
    lines = ["id,path,label,place,split"]
    (folder / "images").mkdir(parents=True)
    for i in range(40):
        pixels = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{i}.png")
        split = "train" if i < 20 else "test"
        quoted = f"{i} {EVIL}".replace('"', '""')
        lines.append(f'"{quoted}",images/{i}.png,{CLASSES[i % 2]},{EVIL[2:5]}{i // 2 % 2},{split}')
    (folder / "manifest.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    features, probe, result = (folder / name for name in ("f.h5", "erm.safetensors", "eval.json"))
    assert run(["embed", str(folder / "manifest.csv"), "--model", "pixels:4", "-o", str(features)]) == 0
    assert run(["fit", "-f", str(features), "-o", str(probe), "--weight-decay", "0.1"]) == 0
    line = ["eval", str(probe), "-f", str(features), "--where", "split=test", "--groups", "label,place"]
    assert run([*line, "-o", str(result)]) == 0
    return result


def _page(*results: Path) -> Parsed:
    out = results[0].parent / "page.html"
    assert run(["report", *map(str, results), "--html", str(out)]) == 0
    return Parsed(out.read_text("utf-8"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _made(tmp_path_factory.mktemp("page"))


def test_what_users_wrote_stays_text_and_nothing_is_fetched(made: Path) -> None:
    images = made.parent / "images"
    for i in range(20, 34):
        (images / f"{i}.png").write_bytes((images / "1.png").read_bytes())
        if i < 27:
            (images / f"{i}.png").unlink()
    found, body = _page(made), read_result(made)
    assert len(found.all("script")) == 1
    assert not any(name.startswith("on") for _, attributes in found.elements for name in attributes)
    assert EVIL in found.text and CLASSES[0] in found.text and CLASSES[1] in found.text
    assert "://" not in (made.parent / "page.html").read_text("utf-8")
    assert all(str(one["src"]).startswith("data:image/") and one["alt"] for one in found.all("img"))
    wrong = body["n"] - round(body["n"] * body["accuracy"])
    assert f"{wrong} of {body['n']} rows are wrong" in found.text
    missing = [str(one["aria-label"]) for one in found.all("div") if one.get("class") == "nothing"]
    changed = sum("changed since it was embedded" in why for why in missing)
    assert 0 < changed < len(missing) and all("no picture of" in why for why in missing)
    groups = [one["data-group"] for one in found.all("li") if "data-group" in one]
    assert len(groups) == len(found.pictures()) + len(missing) > wrong
    ids = [str(one["id"]) for _, one in found.elements if "id" in one]
    assert len(ids) == len(set(ids))
    assert {str(one["href"])[1:] for one in found.all("a")} <= set(ids)


def test_text_from_the_right_turns_nothing_else_around() -> None:
    assert _joined({"a": "b", "c": "שלום"}) == "a=b, c=\u2068שלום\u2069"
    assert drawable("a\u202eb\udcff") == "a b "


def test_files_are_found_by_what_they_hold(made: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(made.parent, moved)
    store, other = moved / "f.h5", moved / "other.h5"

    def found(*given: Path) -> Located:
        with FileFinder(read_sources([moved / "eval.json", *given])) as files:
            assert files.of(files.sources.evals[0], "probe").path == moved / "erm.safetensors"
            return files.of(files.sources.evals[0], "feature store")

    assert found().path == store
    shutil.move(made.parent / "f.h5", tmp_path / "f.h5")
    try:
        store.rename(other)
        assert "isn't there; pass the right file to ncm report along with the results" in found().why
        assert found(other).path == other
        assert run(["embed", str(moved / "images"), "--model", "pixels:4", "-o", str(store)]) == 0
        assert "has changed since" in found().why
        assert found(other).path == other
    finally:
        shutil.move(tmp_path / "f.h5", made.parent / "f.h5")


@pytest.mark.slow
def test_pages_without_rows_classes_or_evaluations(made: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    np.save(tmp_path / "x.npy", rng.normal(size=(60, 3)).astype(np.float32))
    parts = ["train"] * 30 + ["test"] * 30
    rows = [f"r{i},{rng.normal():.3f},c{i % 30},{part}" for i, part in enumerate(parts)]
    (tmp_path / "m.csv").write_text("id,age,kind,split\n" + "\n".join(rows) + "\n")
    store = str(tmp_path / "f.h5")
    line = ["embed", str(tmp_path / "m.csv"), "--from-array", str(tmp_path / "x.npy"), "-o", store]
    assert run([*line, "--encoder-name", "x", "--numeric", "age"]) == 0
    for target, task in (("age", "regression"), ("kind", "classification")):
        probe, result = tmp_path / f"{target}.safetensors", tmp_path / f"{target}.json"
        line = ["fit", "-f", store, "-o", str(probe), "--target", target, "--task", task]
        assert run([*line, "--weight-decay", "0.1"]) == 0
        assert run(["eval", str(probe), "-f", store, "--where", "split=test", "-o", str(result)]) == 0
        found = _page(result)
        assert "a row of an array has no picture" in found.text and not found.pictures()
        assert ("Furthest off" if target == "age" else "most frequent confusions of 30 classes") in found.text
        only = _page(probe)
        assert "What it gets wrong" not in only.text and "SHA-256" in only.text
    second = tmp_path / "second.safetensors"
    line = ["fit", "-f", str(made.parent / "f.h5"), "-o", str(second), "--weight-decay", "1e-4"]
    assert run(line) == 0
    for given in (["report", str(made), str(second)], ["report", str(tmp_path / "compared.json")]):
        if "compared" in given[1]:
            line = ["eval", str(made.parent / "erm.safetensors"), "-f", str(made.parent / "f.h5")]
            assert run([*line, "--where", "split=test", "--compare", str(second), "-o", given[1]]) == 0
        assert run([*given, "--html", str(tmp_path / "two.html")]) == 0
        found = read_result(tmp_path / "compared.json")["comparison"] if "compared" in given[1] else {}
        text = Parsed((tmp_path / "two.html").read_text("utf-8")).text
        assert "Against erm (accuracy " in text and f"Fixed: {found.get('only_this_right', '')}" in text
        assert f"Broken: {found.get('only_other_right', '')}" in text
    body = {name: value for name, value in read_result(made).items() if name not in HEADER}
    write_result(tmp_path / "gone.json", "eval", body | {"probe": body["probe"] | {"sha256": "0" * 64}})
    assert "has changed since; pass the right file" in _page(tmp_path / "gone.json").text


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the digits recipe with one seed and few ranks."""
    folder = tmp_path_factory.mktemp("digits")
    recipe = str(ROOT / "recipes" / "digits.yaml")
    settings = [word for one in ("seed=[0]", "ranks=0:60:20", "path=0:60:20") for word in ("--set", one)]
    only = [word for kind in ("data", "embed", "pairs", "fit", "eval") for word in ("--only", kind)]
    assert run(["run", recipe, *settings, *only, "--out", str(folder / "run")]) == 0
    page = folder / "page.html"
    assert run(["report", str(folder / "run"), "--html", str(page)]) == 0
    assert page.stat().st_size < 5_000_000
    return page


def _opened(browser: Any, page: Path, width: int, scheme: str = "light") -> tuple[Any, list[str]]:
    """A page at a width, and what has gone wrong or over the network since it was opened."""
    opened = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said: list[str] = []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    local = (f"file://{page}", "data:", "blob:")
    opened.on("request", lambda one: None if one.url.startswith(local) else said.append(one.url))
    opened.goto(f"file://{page}")
    return opened, said


@pytest.mark.slow
@pytest.mark.parametrize("which", ["digits", "made"])
def test_it_fits_wide_and_narrow_screens_light_and_dark(
    browser: Any, which: str, request: pytest.FixtureRequest
) -> None:
    page: Path = request.getfixturevalue(which)
    if page.suffix != ".html":
        _page(page)
        page = page.parent / "page.html"
    papers, filters = set(), set()
    for width, scheme in ((1280, "light"), (360, "dark")):
        opened, said = _opened(browser, page, width, scheme)
        assert opened.evaluate("document.documentElement.scrollWidth") == width
        papers.add(opened.evaluate("getComputedStyle(document.documentElement).backgroundColor"))
        filters.add(opened.evaluate("getComputedStyle(document.querySelector('.plot img')).filter"))
        assert opened.evaluate("[...document.images].every((image) => image.naturalWidth > 0)")
        assert said == []
        # A script that somebody smuggled in could send nothing either.
        opened.evaluate("fetch('http://localhost:1/').catch(() => 0)")
        assert any("Content Security Policy" in one for one in said)
        levels = opened.evaluate("[...document.querySelectorAll('h1,h2,h3')].map((one) => +one.tagName[1])")
        assert levels[0] == 1 and levels.count(1) == 1
        assert all(later <= level + 1 for level, later in itertools.pairwise(levels))
        opened.close()
    assert len(papers) == len(filters) == 2, "dark plots have colours of their own"


@pytest.mark.slow
def test_what_is_wider_than_the_screen_fades_and_the_verdicts_fit(browser: Any, digits: Path) -> None:
    for width in (390, 1280):
        opened, said = _opened(browser, digits, width)
        table = opened.locator("section:has(#rank) .scroll:has(table)")
        fits = table.evaluate("box => box.scrollWidth <= box.clientWidth")
        assert fits == (width == 1280) and table.locator("th").count() >= 9
        for box in opened.locator(".scroll").all():
            beyond = box.evaluate("box => box.scrollWidth - box.clientWidth")
            sides = [box.evaluate(f"box => box.classList.contains('{side}')") for side in ("before", "after")]
            assert sides == [False, beyond > 1]
            assert box.get_attribute("tabindex") == "0" and box.get_attribute("aria-label")
            if beyond > 1:
                box.evaluate("box => { box.scrollLeft = box.scrollWidth }")
                opened.wait_for_timeout(50)
                assert "before" in str(box.get_attribute("class")).split()
                assert "after" not in str(box.get_attribute("class")).split()
        assert said == []
        opened.close()


@pytest.mark.slow
def test_tables_are_sorted_and_pictures_filtered_by_keyboard(browser: Any, digits: Path) -> None:
    opened, said = _opened(browser, digits, 1280)
    opened.keyboard.press("Tab")
    assert opened.evaluate("document.activeElement.className") == "skip"
    table = opened.locator("section:has(#groups) table")
    rows = "[...document.querySelector('section:has(#groups) tbody').rows]"
    for ascending in (True, False):
        table.get_by_role("button", name="accuracy").focus()
        opened.keyboard.press("Enter")
        shown = [
            float(text.split()[0])
            for text in opened.evaluate(f"{rows}.map((row) => row.cells[3].textContent)")
        ]
        assert shown == sorted(shown, reverse=not ascending) and len(set(shown)) > 1
        state = table.locator("th[aria-sort]").get_attribute("aria-sort")
        assert state == ("ascending" if ascending else "descending")
    table.get_by_role("button", name="n", exact=True).click()
    sizes = opened.evaluate(f"{rows}.map((row) => row.cells[2].textContent)")
    assert sizes == sorted(sizes, key=int)
    section = opened.locator("section:has(#errors)")
    tiles, choice = section.locator("#confident-errors > li:visible"), section.get_by_label("Group")
    every = tiles.count()
    options = choice.locator("option").all_text_contents()
    counted = 0
    for name in options[1:]:
        choice.select_option(label=name)
        assert section.locator("output").text_content() == f"{tiles.count()} shown"
        counted += tiles.count()
    assert counted == every > 0
    lines = opened.locator("#lines").text_content()
    assert lines.splitlines()[0].startswith("cd ") and "\n    --features seed0/features.h5 \\\n" in lines
    assert said == []
    opened.close()
