"""``ncm run``: a step runs when its options or its inputs' contents changed, and only then."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ncm_cli.errors import InputError, UsageError
from ncm_cli.recipes import freshness
from ncm_cli.recipes.load import Recipe, read_recipe
from ncm_cli.recipes.run import RunReport, run, shell_lines
from ncm_cli.store.files import sha256_file
from tests.world import Heard

RECIPE = """
name: tiny
vars: {decay: 1e-2, groups: label}
matrix: {seed: [0, 1]}
steps:
  - embed: {source: images.csv, model: "pixels:2", output: features.h5}
  - name: probe
    fit:
      features: features.h5
      method: erm
      weight_decay: ${decay}
      seed: ${seed}
      output: erm-${seed}.safetensors
  - eval:
      probe: erm-${seed}.safetensors
      features: features.h5
      where: split=test
      groups: ${groups}
      output: test-${seed}.json
  - eval:
      probe: erm-${seed}.safetensors
      features: features.h5
      where: split=val
      output: val-${seed}.json
expect:
  - {metric: accuracy, where: split=test, step: probe, min: .9}
  - {metric: accuracy, where: split=test, step: probe, seed: 1, value: .1, tolerance: .05}
  - {metric: accuracy, where: split=test, rule: oracle, min: .9}
"""


def _images(folder: Path, *, bright: int = 200) -> None:
    rng = np.random.default_rng(0)
    (folder / "images").mkdir(exist_ok=True)
    rows = []
    for i in range(48):
        label = i % 2
        picture = rng.integers(0, 50, (4, 4, 3)) + (bright if label else 0)
        image = Image.fromarray(np.minimum(picture, 255).astype(np.uint8))
        # Without compression another picture has the same size.
        image.save(folder / "images" / f"{i}.png", compress_level=0)
        rows.append([f"i{i}", f"images/{i}.png", f"class{label}", ("train", "train", "val", "test")[i // 12]])
    with (folder / "images.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([["id", "path", "label", "split"], *rows])


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A folder with a recipe and its images."""
    _images(tmp_path)
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    return tmp_path


def _load(folder: Path, *sets: str, out: str = "out") -> Recipe:
    return read_recipe(folder / "tiny.yaml", out=Path(out), sets=sets)


def _run(folder: Path, *sets: str, **options: Any) -> RunReport:
    # The paths that a recipe hands to its steps are those of the folder in which it is run.
    return run(_load(folder, *sets), **options)


def test_everything_runs_once(tiny: Path) -> None:
    first = _run(tiny)
    assert first.ran == (
        "embed",
        *("probe (seed 0)", "probe (seed 1)"),
        *("eval (seed 0)", "eval (seed 1)", "eval-2 (seed 0)", "eval-2 (seed 1)"),
    )
    stamps = {path: path.stat().st_mtime_ns for path in (tiny / "out").glob("*.h5")}
    second = _run(tiny)
    assert second.ran == ()
    assert second.skipped == first.ran
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert (second.rows, second.comparisons) == (first.rows, first.comparisons)


def test_an_option_reruns_its_step_and_what_follows(tiny: Path) -> None:
    _run(tiny)
    changed = _run(tiny, "decay=1")
    assert changed.skipped == ("embed",)
    assert len(changed.ran) == 6
    groups = _run(tiny, "decay=1", "groups=label,split")
    assert groups.ran == ("eval (seed 0)", "eval (seed 1)")
    assert _run(tiny, "decay=1", "groups=label,split").ran == ()


def test_another_cell_leaves_the_others_alone(tiny: Path) -> None:
    _run(tiny)
    assert _run(tiny, "seed=[0, 1, 2]").ran == ("probe (seed 2)", "eval (seed 2)", "eval-2 (seed 2)")


def test_contents_count_and_not_times(tiny: Path) -> None:
    _run(tiny)
    later = time.time() + 100
    os.utime(tiny / "images.csv", (later, later))
    os.utime(tiny / "out" / "features.h5", (later, later))
    assert _run(tiny).ran == ()
    text = (tiny / "images.csv").read_text().replace("class1,test", "class0,test", 1)
    (tiny / "images.csv").write_text(text)
    assert "embed" in _run(tiny).ran


def test_a_changed_image_is_seen(tiny: Path) -> None:
    before = _run(tiny).rows
    Image.new("RGB", (4, 4), (9, 9, 9)).save(tiny / "images" / "41.png")
    again = _run(tiny)
    assert again.ran[0] == "embed"
    assert "eval (seed 0)" in again.ran
    assert again.rows != before


def _repaint(file: Path) -> None:
    """Another picture in place: the same inode, size and time of modification."""
    before = file.stat()
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), (9, 9, 9)).save(buffer, "PNG", compress_level=0)
    with file.open("r+b") as stream:
        stream.write(buffer.getvalue())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (
        *(before.st_ino, before.st_size),
        before.st_mtime_ns,
    )


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are read to compare them, from now on."""
    read: list[str] = []
    monkeypatch.setattr(freshness, "sha256_file", lambda path: read.append(str(path)) or sha256_file(path))
    return read


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes files old enough for the shortcut by size and times, once it is called."""

    def settle() -> None:
        time.sleep(0.05)  # longer than a tick of the file system's clock
        monkeypatch.setattr(freshness, "SETTLED_NS", 0)

    return settle


@pytest.mark.parametrize("shortcut", [False, True])
def test_an_image_repainted_in_place_is_seen(tiny: Path, settled: Any, shortcut: bool) -> None:
    before = _run(tiny).rows
    if shortcut:
        settled()
        assert _run(tiny).ran == ()
    _repaint(tiny / "images" / "41.png")
    again = _run(tiny)
    assert again.ran[:2] == ("embed", "probe (seed 0)")
    assert again.rows != before
    assert _run(tiny).ran == ()


def test_files_are_read_once_and_only_old_ones_are_trusted(
    tiny: Path, settled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(tiny)
    read = _counted(monkeypatch)
    _run(tiny)
    assert str(tiny / "images" / "0.png") in read
    settled()
    _run(tiny)
    read.clear()
    assert _run(tiny).ran == ()
    assert read == []
    os.utime(tiny / "images" / "0.png")
    assert _run(tiny).ran == ()
    assert str(tiny / "images" / "0.png") in read


def test_a_copied_project_runs_nothing_again(
    tiny: Path, settled: Any, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _run(tiny)
    settled()
    _run(tiny)
    copy = tmp_path_factory.mktemp("copy") / "project"
    shutil.copytree(tiny, copy, copy_function=shutil.copyfile)
    shutil.rmtree(tiny)
    monkeypatch.chdir(copy)
    assert (copy / "images.csv").is_file()
    assert _run(copy).ran == ()
    _repaint(copy / "images" / "41.png")
    assert "embed" in _run(copy).ran


@pytest.mark.parametrize(
    "delimiter", [";", *(pytest.param(mark, marks=pytest.mark.slow) for mark in ("\t", "|"))]
)
def test_tables_of_any_separator(tiny: Path, delimiter: str) -> None:
    table = tiny / "images.csv"
    table.write_text(table.read_text().replace("label", "kind").replace(",", delimiter))
    more = "model: 'pixels:2', label_col: kind"
    text = RECIPE.replace('model: "pixels:2"', more).replace("groups: label", "groups: kind")
    (tiny / "tiny.yaml").write_text(text)
    assert len(_run(tiny).ran) == 7
    _repaint(tiny / "images" / "41.png")
    assert "embed" in _run(tiny).ran
    (tiny / "tiny.yaml").write_text(text.replace("label_col: kind", "label_col: knd"))
    with pytest.raises(InputError, match="no column of the manifest named 'knd'; did you mean 'kind'"):
        _load(tiny)


@pytest.mark.parametrize(
    "source",
    ["built", "linked", *(pytest.param(name, marks=pytest.mark.slow) for name in ("images.csv", "photos"))],
)
def test_images_are_seen_however_a_step_finds_them(tiny: Path, source: str) -> None:
    """By a manifest's spelling of the path, by a manifest that a step makes, in a folder, behind a link."""
    for label in ("class0", "class1"):
        (tiny / "photos" / label).mkdir(parents=True)
    for i in range(48):
        file = tiny / "photos" / f"class{i % 2}" / f"{i}.png"
        shutil.copyfile(tiny / "images" / f"{i}.png", file)
    (tiny / "linked").mkdir()
    (tiny / "linked" / "class0").symlink_to(tiny / "photos" / "class0")
    (tiny / "linked" / "class1").symlink_to(tiny / "photos" / "class1")
    table = tiny / "images.csv"
    table.write_text(table.read_text().replace("images/", "images\\"))
    data = "  - data: {builder: folder, source: linked, output: built}\n" if source == "built" else ""
    where = "built/manifest.csv" if source == "built" else source
    (tiny / "tiny.yaml").write_text(
        f"name: tiny\nsteps:\n{data}  - embed: {{source: {where}, model: 'pixels:2', output: features.h5}}\n"
    )
    assert _run(tiny).ran[-1] == "embed"
    assert _run(tiny).ran == ()
    _repaint(tiny / "images" / "41.png" if source == "images.csv" else tiny / "photos" / "class1" / "41.png")
    assert "embed" in _run(tiny).ran
    assert _run(tiny).ran == ()


def test_images_to_predict_count(tiny: Path) -> None:
    more = "  - predict: {probe: 'erm-0.safetensors', source: other.csv, output: guesses.csv}\n"
    (tiny / "tiny.yaml").write_text(RECIPE.replace("expect:", f"{more}expect:"))
    shutil.copytree(tiny / "images", tiny / "other")
    table = (tiny / "images.csv").read_text()
    (tiny / "other.csv").write_text(table.replace("images/", "other/"))
    assert "predict" in _run(tiny).ran
    before = (tiny / "out" / "guesses.csv").read_text()
    _repaint(tiny / "other" / "41.png")
    assert _run(tiny).ran == ("predict",)
    assert (tiny / "out" / "guesses.csv").read_text() != before


def test_a_folder_with_a_loop_and_a_broken_link_is_compared(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_text("x")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    first = freshness.State(tmp_path).digest(tmp_path)
    assert first == freshness.State(tmp_path).digest(tmp_path)
    (tmp_path / "gone").write_text("y")
    assert first != freshness.State(tmp_path).digest(tmp_path)


def test_outputs_that_were_lost_or_changed_are_made_again(tiny: Path) -> None:
    _run(tiny)
    (tiny / "out" / "test-0.json").unlink()
    assert _run(tiny).ran == ("eval (seed 0)",)
    (tiny / "out" / "test-1.json").write_text("{}")
    assert _run(tiny).ran == ("eval (seed 1)",)


@pytest.mark.slow
def test_force_and_only(tiny: Path) -> None:
    _run(tiny)
    assert _run(tiny, only=["probe"]).skipped == ("probe (seed 0)", "probe (seed 1)")
    assert _run(tiny, only=["probe"], force=True).ran == ("probe (seed 0)", "probe (seed 1)")
    assert len(_run(tiny, only=["eval-2", "embed"], force=True).ran) == 3
    with pytest.raises(UsageError, match="no step named 'prob'"):
        _run(tiny, only=["prob"])


def test_only_needs_what_the_step_reads(tiny: Path) -> None:
    with pytest.raises(InputError, match="an input of step 'probe' isn't there"):
        _run(tiny, only=["probe"])


@pytest.mark.slow
def test_a_new_format_makes_everything_stale(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run(tiny)
    monkeypatch.setattr("ncm_cli.recipes.freshness._formats", lambda: {"store": 99})
    assert len(_run(tiny).ran) == 7


def test_a_moved_run_is_still_up_to_date(tiny: Path) -> None:
    _run(tiny)
    (tiny / "out").rename(tiny / "elsewhere")
    assert run(_load(tiny, out="elsewhere")).ran == ()


def test_other_settings_replace_the_store(tiny: Path) -> None:
    text = RECIPE.replace("pixels:2", "pixels:4")
    _run(tiny)
    (tiny / "tiny.yaml").write_text(text)
    assert "embed" in _run(tiny).ran


def test_the_first_error_stops_and_what_is_done_stays(tiny: Path) -> None:
    (tiny / "tiny.yaml").write_text(RECIPE.replace("where: split=val", "where: split=nope"))
    heard = Heard()
    with pytest.raises(InputError, match="nope"):
        run(_load(tiny), reporter=heard)
    assert "step 6 of 7: eval-2 (seed 0) failed; the steps before it are kept" in heard.warnings
    (tiny / "tiny.yaml").write_text(RECIPE)
    assert _run(tiny).ran == ("eval-2 (seed 0)", "eval-2 (seed 1)")


@pytest.mark.parametrize("text", ["", "[1]", '{"ncm_format": "ncm-run-state", "jobs": 3}', None])
def test_a_damaged_record_is_refused(tiny: Path, text: str | None) -> None:
    """Without it nobody knows which files the run has made."""
    (tiny / "tiny.yaml").write_text(RECIPE.partition("  - eval")[0])
    _run(tiny)
    record = tiny / "out" / ".ncm-run.json"
    whole = record.read_text()
    record.write_text(whole.replace('"exit_code": 0', '"exit_code": 5') if text is None else text)
    with pytest.raises(InputError, match="the record of what this run has made can't be used"):
        _run(tiny)
    record.write_text(whole)
    assert _run(tiny).ran == ()


def _foreign(tiny: Path, name: str) -> Path:
    """A file that is none of the run's, where a step of the recipe would write."""
    path = tiny / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("hours of work")
    return path


@pytest.mark.parametrize("name", ["features.h5", "erm-1.safetensors", "report.json"])
def test_a_file_that_the_run_did_not_make_is_never_replaced(tiny: Path, name: str) -> None:
    path = _foreign(tiny, f"out/{name}")
    with pytest.raises(InputError, match="a step would replace what this run didn't make") as refused:
        _run(tiny, force=True)
    assert str(path) in str(refused.value)
    assert path.read_text() == "hours of work"
    assert [one.name for one in (tiny / "out").glob("[!.]*")] == [name], "no step has run"
    path.unlink()
    assert len(_run(tiny).ran) == 7


@pytest.mark.slow
def test_files_beside_what_a_step_names_are_not_replaced_either(tiny: Path) -> None:
    """A sweep writes three tables, and figures go into a folder."""
    more = (
        "  - sweep: {features: features.h5, methods: erm, trials: 1, seeds: 1, epochs: 1, output: s.json}\n"
        "  - report: {results: s.json, plots: figures}\n"
    )
    (tiny / "tiny.yaml").write_text(
        RECIPE.partition("  - name")[0].replace("matrix: {seed: [0, 1]}\n", "") + more
    )
    for name in ("s.h5", "figures/mine.txt"):
        path = _foreign(tiny, f"out/{name}")
        with pytest.raises(InputError, match="didn't make"):
            run(_load(tiny))
        path.unlink()
    assert run(_load(tiny)).ran == ("embed", "sweep", "report")
    (tiny / "out" / "s.csv").unlink()
    assert run(_load(tiny)).ran[0] == "sweep"


def _outside(tiny: Path) -> Recipe:
    """The recipe with its store beside the run's folder."""
    (tiny / "tiny.yaml").write_text(RECIPE.replace("features.h5", f"{tiny}/shared.h5"))
    return read_recipe(tiny / "tiny.yaml", out=Path("out"), allow_outside=True)


def test_outside_only_what_the_run_made_is_replaced(tiny: Path) -> None:
    path = _foreign(tiny, "shared.h5")
    with pytest.raises(InputError, match="didn't make"):
        run(_outside(tiny))
    path.unlink()
    assert len(run(_outside(tiny)).ran) == 7
    assert run(_outside(tiny), force=True).ran
    path.write_text("another's, since")
    with pytest.raises(InputError, match="didn't make"):
        run(_outside(tiny))
    assert path.read_text() == "another's, since"


@pytest.mark.slow
def test_what_an_interrupted_step_wrote_is_its_own(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between its last byte and the record of it, at the first run as at a later one."""
    for _ in range(2):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(freshness.State, "finished", _interrupt)
            _run(tiny, force=True)
        assert (tiny / "out" / "features.h5").exists()
        assert "embed" in _run(tiny).ran


def _interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_failed_images_are_carried(tiny: Path) -> None:
    (tiny / "images" / "3.png").write_bytes(b"not an image")
    heard = Heard()
    report = run(_load(tiny), reporter=heard)
    assert report.exit_code == 5
    assert len(report.ran) == 7
    assert any("some rows failed" in note for note in heard.warnings)
    assert run(_load(tiny)).exit_code == 5


def test_verdicts(tiny: Path) -> None:
    report = _run(tiny)
    assert [comparison.state for comparison in report.comparisons] == ["reproduced", "missed", "not run"]
    (row,) = report.rows
    assert (row.step, row.seeds) == ("probe", 2)
    assert row.columns["test"] is not None
    assert row.columns["test"].n == 2
    assert row.worst_group is not None


def test_a_value_is_reproduced_within_its_spread_and_near_within_a_wider_tolerance(tiny: Path) -> None:
    known = {
        "value: .98": ("reproduced", 0.02),
        "value: .979": ("missed", 0.02),
        "value: .979, tolerance: .05": ("near", 0.05),
        "value: .94, tolerance: .05": ("missed", 0.05),
        "value: .99, tolerance: .01": ("reproduced", 0.01),
        "value: .985, tolerance: .01": ("missed", 0.01),
        "value: .97, spread: .03": ("reproduced", 0.03),
        "value: .99, spread: 0": ("missed", 0.0),
        "value: .99, spread: .005, tolerance: .02": ("near", 0.02),
        "value: .99, min: 1": ("reproduced", 0.02),
        "value: .99, tolerance: .05, max: .99": ("missed", 0.05),
        "min: 1, max: 1": ("reproduced", None),
        "max: .99": ("missed", None),
    }
    lines = [f"  - {{metric: accuracy, where: split=test, {keys}}}" for keys in known]
    (tiny / "tiny.yaml").write_text("\n".join([RECIPE.partition("  - {metric")[0].rstrip(), *lines]))
    report = _run(tiny)
    assert {comparison.measured.mean for comparison in report.comparisons if comparison.measured} == {1.0}
    states = [(comparison.state, comparison.within) for comparison in report.comparisons]
    assert states == list(known.values())


@pytest.mark.slow
def test_results_of_one_seed_make_rows_and_verdicts_of_their_own(tiny: Path) -> None:
    again = """
  - eval:
      probe: erm-${seed}.safetensors
      features: features.h5
      where: split=test
      output: again-${seed}.json
expect:
"""
    (tiny / "tiny.yaml").write_text(RECIPE.replace("\nexpect:\n", again))
    found = _run(tiny)
    assert [row.cell for row in found.rows] == [{"--groups": "label"}, {"--groups": "none"}]
    assert [row.columns["test"].n for row in found.rows if row.columns["test"]] == [2, 2]
    assert [row.worst_group is not None for row in found.rows] == [True, False]
    shown = [
        (comparison.expectation.filters.get("--groups"), comparison.measured)
        for comparison in found.comparisons
    ]
    assert [(groups, mean.n) for groups, mean in shown if mean] == [
        *(("label", 2), ("none", 2)),
        *(("label", 1), ("none", 1)),
    ]


def test_cells_are_reported_as_written_and_never_averaged(tiny: Path) -> None:
    """omry/omegaconf#341."""
    text = RECIPE.replace("seed: ${seed}", "").replace("seed: 1,", "seed: 7e5678,")
    (tiny / "tiny.yaml").write_text(text.replace("seed", "commit").replace("[0, 1]", "[6e1234, 7e5678]"))
    outcome = _run(tiny)
    assert [row.cell for row in outcome.rows] == [{"commit": "6e1234"}, {"commit": "7e5678"}]
    assert [row.columns["test"].n for row in outcome.rows if row.columns["test"]] == [1, 1]
    own = [one for one in outcome.comparisons if one.expectation.filters.get("commit") == "7e5678"]
    assert {one.measured.n for one in own if one.measured} == {1}
    assert _run(tiny).ran == ()


@pytest.mark.slow
def test_a_value_for_another_variable_is_not_run(tiny: Path) -> None:
    only = "  - {metric: accuracy, where: split=test, decay: 1e-2, min: .9}\n"
    (tiny / "tiny.yaml").write_text(RECIPE + only)
    assert _run(tiny).comparisons[-1].state == "reproduced"
    assert _run(tiny, "decay=1").comparisons[-1].state == "not run"


def test_the_report_records_where_everything_comes_from(tiny: Path) -> None:
    recipe = _load(tiny)
    run(recipe)
    found = json.loads((tiny / "out" / "report.json").read_text())
    assert found["ncm_format"] == "ncm-result"
    assert found["kind"] == "run"
    provenance = found["provenance"]
    assert provenance["recipe"]["sha256"] == recipe.sha256
    assert provenance["versions"]["numpy"] == np.__version__
    files = {entry["file"]: entry for entry in provenance["files"]}
    assert set(files) == {
        "features.h5",
        *(
            f"{name}-{seed}.{kind}"
            for seed in (0, 1)
            for name, kind in (("erm", "safetensors"), ("test", "json"), ("val", "json"))
        ),
    }
    probe = files["erm-1.safetensors"]
    assert probe["seed"] == 1
    assert probe["cell"] == {"seed": "1"}
    assert probe["inputs"]["features[0]"] == files["features.h5"]["sha256"]


def test_a_file_in_place_of_the_folder(tiny: Path) -> None:
    (tiny / "out").write_text("x")
    with pytest.raises(InputError, match="a file where a folder is expected"):
        _run(tiny)


def test_two_runs_of_one_folder_exclude_each_other(tiny: Path) -> None:
    from ncm_cli.store.files import writer_lock

    (tiny / "out").mkdir()
    with writer_lock(tiny / "out" / "report.json"), pytest.raises(InputError, match="writ"):
        _run(tiny)


def _values(out: Path) -> dict[str, Any]:
    """What the files of a run say, without the times and paths that say when and where."""
    from ncm_cli.store.features import FeatureStore
    from ncm_cli.store.probe import read_probe

    found: dict[str, Any] = {}
    for file in sorted(out.rglob("*.json")):
        body = json.loads(file.read_text())
        if body.get("kind") in ("eval", "bound"):
            found[file.name] = {
                name: body.get(name) for name in ("n", "accuracy", "log_loss", "groups", "bound")
            }
    for file in sorted(out.rglob("*.h5")):
        with FeatureStore(file) as store:
            found[file.name] = (store.content_sha256, store.fingerprint, store.ids)
    for file in sorted(out.rglob("*.safetensors")):
        found[file.name] = read_probe(file).sha256
    return found


@pytest.mark.slow
def test_dry_run_lines_give_the_same_files_when_pasted(tiny: Path) -> None:
    lines = shell_lines(_load(tiny, out="by hand's"), _load(tiny, out="by hand's").jobs)
    assert lines[0].startswith("cd ")
    assert not (tiny / "by hand's").exists()
    programs = Path(sys.executable).parent
    done = subprocess.run(
        ["bash", "-euc", "\n".join(lines)],
        cwd="/",
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    _run(tiny)
    assert _values(tiny / "by hand's") == _values(tiny / "out")
    assert len(_values(tiny / "out")) == 7


def _ncm(folder: Path, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ncm_cli", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@pytest.mark.slow
def test_the_command_line(tiny: Path) -> None:
    done = _ncm(tiny, "run", "tiny.yaml", "--out", "out", "--set", "seed=[0]")
    assert done.returncode == 0, done.stderr
    assert "probe" in done.stdout
    assert "reproduced" in done.stdout
    assert "features.h5" in done.stdout
    assert "step 1 of 4: embed" in done.stderr
    dry = _ncm(tiny, "run", "tiny.yaml", "--dry-run", "--out", "never")
    assert dry.stdout.count("ncm eval") == 4
    assert not (tiny / "never").exists()
    parsed = json.loads(_ncm(tiny, "run", "tiny.yaml", "--out", "out", "--set", "seed=[0]", "--json").stdout)
    assert parsed["up_to_date"] == ["embed", "probe (seed 0)", "eval (seed 0)", "eval-2 (seed 0)"]
    strict = _ncm(tiny, "run", "tiny.yaml", "--out", "out", "--strict")
    assert strict.returncode == 3
    assert "1 expected value was missed" in strict.stderr
    assert "±0.05" in strict.stdout  # what "missed" rests on
    wrong = _ncm(tiny, "run", "tiny.yaml", "--set", "sed=1")
    assert wrong.returncode == 3
    assert "did you mean 'seed'" in wrong.stderr


@pytest.mark.slow
@pytest.mark.parametrize("files", [0, 2, 5])
def test_killed_anywhere_it_goes_on(tiny: Path, files: int) -> None:
    """Killed soon after the given number of steps has written its file."""
    expected = _values_of_a_whole_run(tiny)
    rng = np.random.default_rng(files)
    command = [sys.executable, "-m", "ncm_cli", "run", "tiny.yaml", "--out", "killed"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(_results(tiny / "killed")) < files and process.poll() is None:
        time.sleep(0.002)
    time.sleep(float(rng.uniform(0, 0.05)))
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = _ncm(tiny, "run", "tiny.yaml", "--out", "killed")
    assert done.returncode == 0, done.stderr
    assert _values(tiny / "killed") == expected
    assert not [path for path in (tiny / "killed").iterdir() if "partial" in path.name]


def _results(folder: Path) -> list[Path]:
    return [path for path in folder.glob("[!.]*") if path.suffix in (".h5", ".json", ".safetensors")]


def _values_of_a_whole_run(folder: Path) -> dict[str, Any]:
    _run(folder)
    found = _values(folder / "out")
    shutil.rmtree(folder / "out")
    return found


@pytest.mark.slow
def test_rows_used_for_choosing_are_flagged_in_the_table(tiny: Path) -> None:
    """kohpangwei/group_DRO#10."""
    assert not _run(tiny, "decay='1e-2,1e-1'").rows[0].seen
    (tiny / "tiny.yaml").write_text(RECIPE + "table: {test: split=test, test again: split=val}\n")
    (row,) = _run(tiny, "decay='1e-2,1e-1'").rows
    assert row.rule == "in-domain"
    assert row.seen
