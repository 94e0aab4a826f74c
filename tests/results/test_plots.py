"""The figures of ``ncm report``: the same bytes each time, readable in grey, nothing on top of another."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from ncm_cli.baselines.choice import SweepTable, write_sweep
from ncm_cli.main import run
from ncm_cli.progress import SILENT
from ncm_cli.results import figures, plots
from ncm_cli.results.lines import read_sources
from ncm_cli.results.options import ReportOptions
from ncm_cli.results.report import report
from ncm_cli.results.tables import Spread
from ncm_cli.store.files import HEADER, read_result, write_result

from .conftest import Results
from .test_report import write_eval


def _row(x: int, key: str, test: float) -> dict[str, Any]:
    return {
        "rank": x,
        "pairs": 100,
        "converged": True,
        "term_1": 0.1 + x / 100,
        "theta_m_theta": 1.0,
        "term_2": 10.0 / (1 + x),
        "bound": 0.1 + x / 100 + 10.0 / (1 + x),
        "test_risk": 2.0 / (1 + x),
        "twin_error": 0.05 + x / 200,
        "flip_rate": 0.3 / (1 + x),
        "zero_one_bound": 0.05 + x / 200 + 0.3 / (1 + x),
        "test_error": test,
    } | {key: x}


def write_bound(path: Path, pairs: str, seed: int) -> None:
    """A bound with paths, of a probe that was fitted with the seed."""
    rng = np.random.default_rng(seed)
    body = {
        "spurious_dim": 8,
        "estimates": {"spurious_dim": "given"},
        "oracle": {"test_error": 0.05},
        "summary": {"erm_test_accuracy": 0.55},
        "path": [_row(r, "rank", 0.1 + abs(r - 8) / 50 + rng.normal() / 50) for r in range(17)],
        "pair_counts": [_row(k, "pairs", 0.5 / (1 + k / 10) + rng.normal() / 50) for k in range(0, 60, 5)],
    }
    results = Results(path.parent)
    probe = results.probe(f"{path.stem}.safetensors", seed=seed)
    results.bound(path.name, probe, 1.1, pairs=Path(pairs), body=body)


def _draw(folder: Path, out: Path, **options: Any) -> list[str]:
    made = report(ReportOptions(results=(folder,), plots=out, **options))
    assert all(path.is_file() for path in made.plots)
    return sorted(path.name for path in made.plots)


def _files(name: str) -> list[str]:
    return [f"{name}.pdf", f"{name}.png", f"{name}.svg"]


def _looks_drawn(path: Path) -> None:
    image = np.asarray(Image.open(path).convert("L"))
    assert image.shape[0] > 200 and image.shape[1] > 400
    assert 0.003 < (image < 200).mean() < 0.6


@pytest.mark.slow
def test_bound_results_give_paths_and_tradeoff(tmp_path: Path) -> None:
    for seed in range(3):
        write_bound(tmp_path / f"b{seed}.json", "p.h5", seed)
    names = _draw(tmp_path, tmp_path / "fig")
    assert [name for name in names if name.endswith("png")] == [
        "accuracy-pairs.png",
        "accuracy-rank.png",
        "bound-tradeoff.png",
    ]
    for name in names:
        if name.endswith("png"):
            _looks_drawn(tmp_path / "fig" / name)
    text = (tmp_path / "fig" / "accuracy-rank.svg").read_text(encoding="utf-8")
    assert text.startswith("<?xml") and "dc:date" not in text


@pytest.mark.slow
def test_several_lines_have_one_tradeoff_each(tmp_path: Path) -> None:
    for pairs in ("noisy-1", "noisy-0.1"):
        write_bound(tmp_path / f"{pairs}.json", f"{pairs}.h5", 1)
    names = _draw(tmp_path, tmp_path / "fig", by="pairs")
    assert "bound-tradeoff-noisy-0.1.png" in names and "bound-tradeoff-noisy-1.svg" in names


@pytest.mark.slow
def test_the_same_bytes_each_time(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_bound(tmp_path / "in" / "b.json", "p.h5", 1)
    names = _draw(tmp_path / "in", tmp_path / "one")
    assert names == _draw(tmp_path / "in", tmp_path / "two")
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_group_bars_and_their_numbers(tmp_path: Path) -> None:
    write_eval(tmp_path / "erm.json", "erm", 0.6)
    write_eval(tmp_path / "ncm.json", "ncm", 0.7)
    assert _draw(tmp_path, tmp_path / "fig") == _files("groups-split=test")
    _looks_drawn(tmp_path / "fig" / "groups-split=test.png")


def test_convergence_from_a_sweep(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    methods = tuple(name for name in ("erm", "irm", "ncm") for _ in range(4))
    epochs = np.array([1, 5, 10, 20])
    metrics = {
        name: 1 - 0.5 * np.exp(-epochs / 8)[None, :] + rng.normal(size=(12, 4)) / 100
        for name in ("val_accuracy", "test_accuracy")
    }
    table = SweepTable(
        method=methods,
        trial=np.tile([0, 0, 1, 1], 3),
        seed=np.tile([0, 1, 0, 1], 3),
        hyper={"lr": np.full(12, 1e-3)},
        diverged=np.zeros(12, dtype=bool),
        epochs=epochs,
        metrics=metrics,
        options={},
    )
    write_sweep(tmp_path / "s.h5", table)
    rows = [
        {
            "method": name,
            "rule": "in-domain",
            "oracle": False,
            "trial": 1,
            "hyper_parameters": {},
            "seeds": [0, 1],
            "metrics": {"val_accuracy": 0.9, "test_accuracy": 0.8},
            "sd": {},
        }
        for name in ("erm", "irm", "ncm")
    ]
    write_result(tmp_path / "s.json", "sweep", {"rows": rows, "configurations": 12, "history": "s.h5"})
    assert _draw(tmp_path, tmp_path / "fig") == [
        *_files("convergence-s"),
        *_files("sweep-s"),
    ]
    _looks_drawn(tmp_path / "fig" / "convergence-s.png")


def test_spectrum_and_probe_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = "--dim 12 --spurious 3 --rows 100 --val-rows 50 --test-rows 100 --pairs 20 --holdout-pairs 10"
    assert run(f"data synthetic -o {tmp_path}/data {small}".split()) == 0
    fit = f"fit --features {tmp_path}/data/features.h5 --pairs {tmp_path}/data/noisy-0.1.h5"
    assert run(f"{fit} --rank 0:8 -o {tmp_path}/p.safetensors".split()) == 0
    line = f"report {tmp_path}/p.safetensors {tmp_path}/data/noisy-0.1.h5 --plots {tmp_path}/fig --quiet"
    assert run(line.split()) == 0
    assert sorted(path.name for path in (tmp_path / "fig").glob("*.png")) == [
        "rank-path-p.png",
        "spectrum.png",
    ]
    # Of an evaluation alone, as a page shows: its probe and the pairs are found by their digests.
    data = f"{tmp_path}/data/features.h5"
    assert run(f"eval {tmp_path}/p.safetensors -f {data} -o {tmp_path}/e.json -q".split()) == 0
    assert run(f"report {tmp_path}/e.json --plots {tmp_path}/alone --quiet".split()) == 0
    names = {path.name for path in (tmp_path / "alone").iterdir()}
    assert {*_files("rank-path-p"), *_files("spectrum")} <= names
    # Printers need fonts in the file, not drawings of their letters.
    text = (tmp_path / "alone" / "spectrum.pdf").read_bytes()
    assert text.startswith(b"%PDF") and b"/FontFile2" in text and b"/Type3" not in text


def test_nothing_to_draw_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_result(tmp_path / "b.json", "bound", {"term_1": 0.1, "probe": {}, "options": {}})
    assert run(["report", str(tmp_path), "--plots", str(tmp_path / "fig")]) == 0
    assert "nothing to draw" in capsys.readouterr().err


def _luminance(colour: str) -> float:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_neighbouring_lines_differ_in_grey_style_and_marker() -> None:
    for a, b in zip(plots.COLOURS, plots.COLOURS[1:], strict=False):
        assert abs(_luminance(a) - _luminance(b)) > 0.06, (a, b)
    for names in (plots.MARKERS, plots.LINES):
        assert len(set(names)) == len(names) >= len(plots.COLOURS)


def test_the_legend_covers_no_axes(tmp_path: Path) -> None:
    x = np.arange(5.0)
    with plots.styled_figure(5.6, 4.1) as (made, axes):
        for index in range(6):
            plots.line(axes, x, np.ones((1, 5)) * index, index=index, label=f"a rather long label {index}")
        axes.set(xlabel="rank", ylabel="accuracy")
        plots.name_lines(made, [axes])
        made.canvas.draw()
        legend = made.legends[0].get_window_extent()
        assert not legend.overlaps(axes.get_tightbbox())
        assert legend.x0 >= 0 and legend.x1 <= made.bbox.x1


def test_points_that_not_every_repetition_has_are_left_out() -> None:
    runs = np.array([[1.0, 2.0, 3.0], [1.0, 2.0, np.nan]])
    with plots.styled_figure(4, 3) as (_, axes):
        plots.line(axes, np.arange(3.0), runs, index=0, label="a")
        assert list(axes.lines[0].get_xdata()) == [0, 1]


def test_regression_paths_have_no_accuracy_figure(tmp_path: Path) -> None:
    write_bound(tmp_path / "b.json", "p.h5", 0)
    body = read_result(tmp_path / "b.json")
    for rows in (body["path"], body["pair_counts"]):
        for row in rows:
            row.update(dict.fromkeys(("twin_error", "flip_rate", "zero_one_bound", "test_error")))
    body = {name: body[name] for name in body if name not in HEADER}
    body |= {"summary": None, "oracle": {"test_error": None}, "zero_one": None}
    write_result(tmp_path / "b.json", "bound", body)
    assert _draw(tmp_path, tmp_path / "fig") == _files("bound-tradeoff")


def test_an_accuracy_is_never_below_zero() -> None:
    x, worse = np.arange(3.0), np.array([[1.4, 1.1, 0.9]])
    curves = {"x": x, "twin_error": worse - 0.5, "test_error": worse * np.nan, "zero_one_bound": worse}
    plot = plots.accuracy_plot("p", {"a": curves}, plots.References(), key="rank")
    (axes,) = plot.figure.axes
    assert axes.get_ylim()[0] >= 0
    assert min(plots._y(own).min() for own in plots._named(axes)) == 0


@pytest.mark.slow
def test_the_path_of_a_regression_probe_is_of_its_error(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 6)).astype(np.float32)
    rows = [f"r{i},{v:.4f},{'train' if i % 2 else 'val'}" for i, v in enumerate(9 * x.sum(axis=1))]
    (tmp_path / "m.csv").write_text("\n".join(["id,label,split", *rows]))
    (tmp_path / "p.csv").write_text("id_a,id_b\n" + "".join(f"r{i},r{i + 2}\n" for i in range(1, 80, 4)))
    np.save(tmp_path / "x.npy", x)
    file = {
        name: str(tmp_path / name) for name in ("m.csv", "p.csv", "x.npy", "f.h5", "p.h5", "a.safetensors")
    }
    embed = ["embed", file["m.csv"], "--from-array", file["x.npy"], "--numeric", "label", "-o", file["f.h5"]]
    fit = ["fit", "-f", file["f.h5"], "-p", file["p.h5"], "--rank", "0:4", "--task", "regression"]
    assert run([*embed, "--encoder-name", "e"]) == 0
    assert run(["pairs", file["p.csv"], "-f", file["f.h5"], "-o", file["p.h5"]]) == 0
    assert run([*fit, "-o", file["a.safetensors"]]) == 0
    sources = read_sources([tmp_path / "a.safetensors"])
    (plot,) = figures.figures(sources, [], [], SILENT)
    assert plot.figure.axes[0].get_ylabel() == "MSE"


def test_a_group_that_one_method_lacks(tmp_path: Path) -> None:
    dot = Spread(0.5, low=0.4, high=0.6)
    found = {"erm": {"a": dot, "b": dot}, "ncm": {"a": dot}}
    plot = plots.dot_plot("g", "split=test", {"accuracy": found}, {"a": "a", "b": "b"}, "")
    _looks_drawn(plots.save(plot, tmp_path)[0])


@pytest.mark.slow
def test_a_figure_in_a_page_is_an_image_that_needs_nothing_else(tmp_path: Path) -> None:
    """Long paths stay small, names are text, and nothing reaches out of it."""
    x = np.arange(2000.0)
    own = np.random.default_rng(0).random((1, 2000))
    curves = {"x": x, **dict.fromkeys(("test_error", "twin_error", "zero_one_bound"), own)}
    name = "<script>$a$ 日本語\x1b"
    lines = [{name: curves, "b": curves}, {name: curves}, {"_b": curves, "b": curves}]
    drawn = [plots.accuracy_plot(f"p{i}", one, plots.References(), key="rank") for i, one in enumerate(lines)]
    urls = [plots.image_url(plot) for plot in drawn]
    assert urls == [plots.image_url(plot) for plot in drawn], "the same each time"
    assert all(len(url) < 200_000 for url in urls)
    texts = [base64.b64decode(url.removeprefix("data:image/svg+xml;base64,")).decode() for url in urls]
    trees = [ElementTree.fromstring(text) for text in texts]
    for text, tree in zip(texts, trees, strict=True):
        links = [value for node in tree.iter() for name, value in node.items() if name.endswith("href")]
        links += re.findall(r"url\(([^)]*)\)", text)
        assert all(link.startswith("#") for link in links)
        assert not re.search(r"<(script|image)|DejaVu", text)
    words = ["".join(tree.itertext()) for tree in trees]
    assert "<script>$a$ 日本語" in words[0]
    assert "_b" in words[2]


def test_labels_at_the_ends_of_lines_keep_apart() -> None:
    with plots.styled_figure(5, 3) as (made, axes):
        for index, end in enumerate((0.5, 0.5, 0.501, 0.52)):
            plots.line(
                axes, np.arange(3.0), np.array([[index, 0.1, end]]), index=index, label=f"line {index}"
            )
        plots.name_lines(made, [axes])
        made.canvas.draw()
        boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 4
    assert not made.legends
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert all(box.y0 >= 0 and box.x1 <= made.bbox.x1 for box in boxes)


@pytest.mark.parametrize("ends", [(0.7, 0.9), (0.1, 0.3)], ids=["below", "above"])
def test_an_accuracy_outside_its_interval_is_drawn(tmp_path: Path, ends: tuple[float, float]) -> None:
    """As an altered or foreign result may have it: there is no error bar of a negative length."""
    low, high = ends
    groups = [
        {"group": {"label": name}, "n": 10, "accuracy": 0.5, "ci_low": low, "ci_high": high} for name in "ab"
    ]
    write_eval(tmp_path / "a.json", "erm", 0.5, groups=groups)
    assert _draw(tmp_path, tmp_path / "fig") == _files("groups-split=test")


@pytest.mark.slow
def test_plots_need_no_home_folder(tmp_path: Path) -> None:
    write_bound(tmp_path / "b.json", "a", 0)
    done = subprocess.run(
        [sys.executable, "-m", "ncm_cli", "report", "b.json", "--plots", "plots"],
        env={**os.environ, "MPLCONFIGDIR": os.devnull + "/none"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "atplotlib" not in done.stderr
