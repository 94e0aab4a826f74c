"""Training rows beside a page's errors, and those that a row nearly equals."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.neighbors import NearestNeighbors

from ncm_cli.main import run
from ncm_cli.solvers import neighbours
from ncm_cli.solvers.neighbours import most_similar, normalized_rows
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.tables import csv_text

TWINS = {70: 3, 75: 10}
"""Test pictures that are training pictures, a little brighter."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noise pictures whose label barely shows, so that some are wrong."""
    folder = tmp_path_factory.mktemp("similar")
    rng = np.random.default_rng(0)
    rows, pixels = [], rng.integers(0, 200, (90, 8, 8, 3), dtype=np.uint8)
    labels = rng.integers(2, size=90)
    pixels[:, :, :, 0] += (labels * 12).astype(np.uint8)[:, None, None]
    for twin, of in TWINS.items():
        pixels[twin], labels[twin] = pixels[of] + np.uint8(3), labels[of]
    for i in range(90):
        Image.fromarray(pixels[i]).save(folder / f"{i}.png")
        rows.append((f"i{i}", f"{i}.png", "<cat>" if labels[i] else "dog", "train" if i < 60 else "test"))
    (folder / "m.csv").write_text(csv_text(("id", "path", "label", "split"), rows))
    store, probe = str(folder / "f.h5"), str(folder / "p.safetensors")
    assert run(["embed", str(folder / "m.csv"), "--model", "pixels:8", "-o", store, "-q"]) == 0
    assert run(["fit", "-f", store, "-o", probe, "--weight-decay", "0.1", "-q"]) == 0
    assert run(["eval", probe, "-f", store, "--where", "split=test", "-o", str(folder / "e.json"), "-q"]) == 0
    return folder


def test_the_most_similar_rows_are_those_of_another_search(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).normal(size=(300, 12)).astype(np.float32)
    monkeypatch.setattr(neighbours, "BLOCK_COLUMNS", 23)
    monkeypatch.setattr(neighbours, "BLOCK_ROWS", 9)
    found, cosines = most_similar(normalized_rows(x, "cosine"), np.arange(200, 300), np.arange(200), 3)
    distance, place = NearestNeighbors(n_neighbors=3, metric="cosine").fit(x[:200]).kneighbors(x[200:])
    assert np.array_equal(found, place)
    np.testing.assert_allclose(cosines, 1 - distance, atol=1e-6)
    few, _ = most_similar(normalized_rows(x, "cosine"), np.arange(5, 9), np.arange(2), 3)
    assert few.shape == (4, 2)


def test_errors_have_similar_training_rows_and_leaks_are_shown(made: Path) -> None:
    page = made / "page.html"
    assert run(["report", str(made / "e.json"), "--html", str(page), "-q"]) == 0
    text = page.read_text("utf-8")
    lists = re.findall('<li data-group="[^"]*">(.*?)</ul>', text, re.DOTALL)
    assert lists and "Beside it: the most similar training rows" in text
    with FeatureStore(made / "f.h5") as store:
        x, ids = store.read().astype(float), list(store.ids)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    for part in lists:
        of = re.findall("<code>(i\\d+)</code>", part)[0]
        shown = re.findall('<li title="(i\\d+)">', part)
        cosines = x[:60] @ x[ids.index(of)]
        assert shown == [ids[place] for place in np.argsort(-cosines)[:3]]
        assert [float(value) for value in re.findall("<small>([.\\d]+)</small>", part)] == pytest.approx(
            np.sort(cosines)[::-1][:3], abs=0.006
        )
    assert "&lt;cat&gt; <small>" in text and "<cat>" not in text
    assert "2 of 30 rows nearly equal a training row" in text
    twins = text.partition('<ul class="twins">')[2].partition("</ul>")[0]
    assert set(re.findall("<code>(i\\d+)</code>", twins)) == {"i70", "i3", "i75", "i10"}


def test_without_the_training_rows_nothing_is_claimed(made: Path, tmp_path: Path) -> None:
    rows = (made / "m.csv").read_text().splitlines()
    tests = [row for row in rows if not row.endswith("train")]
    (made / "t.csv").write_text("\n".join(tests))
    line = ["embed", str(made / "t.csv"), "--model", "pixels:8", "-o", str(tmp_path / "t.h5"), "-q"]
    assert run(line) == 0
    (tmp_path / "p.safetensors").write_bytes((made / "p.safetensors").read_bytes())
    store = made / "f.h5"
    store.rename(made / "gone.h5")
    try:
        line = ["eval", str(tmp_path / "p.safetensors"), "-f", str(tmp_path / "t.h5")]
        assert run([*line, "-o", str(tmp_path / "e.json"), "-q"]) == 0
        page = tmp_path / "page.html"
        assert run(["report", str(tmp_path / "e.json"), "--html", str(page), "-q"]) == 0
        text = page.read_text("utf-8")
        assert "What it gets wrong" in text and "Beside it" not in text and 'twins">' not in text
    finally:
        (made / "gone.h5").rename(store)
