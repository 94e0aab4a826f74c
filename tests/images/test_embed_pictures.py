"""What ``ncm embed`` makes of folders and pictures as people have them: names, depths, deep samples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ncm_cli.errors import InputError, MismatchError
from ncm_cli.images.encoder import load_encoder
from ncm_cli.images.request import EncoderRequest
from ncm_cli.progress import SILENT
from ncm_cli.store.features import FeatureStore

RAMP = np.arange(64).reshape(8, 8)


def save_float(path: Path, top: float, low: float = 0.0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((low + RAMP * ((top - low) / 63)).astype(np.float32)).save(path, "TIFF")


def test_images_at_any_depth_are_embedded_without_labels(pictures: Any) -> None:
    """ml4a/ml4a-ofx#28."""
    names = ["1.png", "a/2.png", "a/b/3.png"]
    for name in names:
        pictures.picture(f"images/{name}")
    report = pictures.embed(source=pictures.folder / "images")
    assert report.rows == 3
    with FeatureStore(pictures.output) as store:
        assert store.ids == tuple(names) and store.columns == {}
    assert pictures.said.notes[0] == "no labels"
    with pytest.raises(InputError, match="don't lie where the layout says") as caught:
        pictures.embed(source=pictures.folder / "images", layout="label", output=pictures.folder / "g.h5")
    assert "without --layout" in str(caught.value) and "domain/label" not in str(caught.value)


def test_folders_in_folders_ask_for_their_meaning_with_a_line_that_works(pictures: Any) -> None:
    """ml4a/ml4a-ofx#28."""
    pictures.picture("images/photo/dog/1.png")
    with pytest.raises(InputError, match="--layout domain/label"):
        pictures.embed(source=pictures.folder / "images")
    assert pictures.embed(source=pictures.folder / "images", layout="domain/label").rows == 1


def spoil(folder: Path) -> list[str]:
    """Files that can't be embedded beside one that can: names that aren't UTF-8, links to nowhere."""
    folder.mkdir()
    Image.new("RGB", (8, 8), "red").save(folder / "good.png")
    good, base = (folder / "good.png").read_bytes(), os.fsencode(folder)
    os.mkdir(base + b"/d\xff")  # noqa: PTH102
    for name in (b"caf\xe9.png", b"d\xff/1.png"):
        with open(base + b"/" + name, "wb") as stream:  # noqa: PTH123
            stream.write(good)
    (folder / "gone.png").symlink_to("nowhere.png")
    (folder / "loop.png").symlink_to("loop.png")
    return ["caf\\xe9.png", "d\\xff/1.png", "gone.png", "loop.png"]


def test_names_that_are_not_utf8_and_dangling_links_fail_and_the_rest_is_embedded(tmp_path: Path) -> None:
    """ahupp/python-magic#144."""
    bad = spoil(tmp_path / "images")
    line = [sys.executable, "-m", "ncm_cli", "embed", tmp_path / "images", "-o", tmp_path / "f.h5"]
    line += ["--model", "pixels:2", "--json"]
    for written in (True, False):
        done = subprocess.run(list(map(str, line)), capture_output=True, check=False)
        assert done.returncode == 5, done.stderr
        report = json.loads(done.stdout)
        assert report["rows"] == 1 and report["written"] is written
        reasons = {row["id"]: row["reason"] for row in report["failed"]}
        assert sorted(reasons) == sorted(bad)
        for name in bad:
            assert name.encode() in done.stderr
    assert all("isn't UTF-8" in reasons[name] for name in bad if "\\" in name)
    assert reasons["gone.png"] == "no such file" and "symbolic links" in reasons["loop.png"]
    done = subprocess.run([*map(str, line), "--max-failures", "4"], capture_output=True, check=False)
    assert done.returncode == 0


def test_a_store_of_equal_content_lends_no_row_to_a_name_that_cannot_be_stored(
    pictures: Any, tmp_path: Path
) -> None:
    """ahupp/python-magic#144."""
    spoil(tmp_path / "images")
    pictures.embed(source=tmp_path / "images", output=tmp_path / "other.h5", max_failures=4)
    report = pictures.embed(source=tmp_path / "images", reuse=tmp_path / "other.h5", max_failures=4)
    assert (report.rows, report.reused, len(report.failed)) == (1, 1, 4)


def test_every_such_image_is_predicted_or_has_its_reason(tmp_path: Path) -> None:
    """ahupp/python-magic#144."""
    from ncm_cli.images.reading import read_image
    from ncm_cli.probes.predict import find_images

    bad = spoil(tmp_path / "images")
    jobs = find_images([tmp_path / "images"])
    assert sorted(job.id for job in jobs) == sorted([*bad, "good.png"])
    preprocess = load_encoder(EncoderRequest(model="pixels:2"), reporter=SILENT).preprocess
    reasons = {job.id: read_image(job, preprocess).reason for job in jobs}
    assert reasons.pop("good.png") == "" and all(reasons.values())


def test_samples_without_a_range_fail_and_the_advice_works(
    pictures: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fossasia/visdom#1368."""
    folder = pictures.folder / "images"
    save_float(folder / "a.tif", 1.0)
    save_float(folder / "b.tif", 2.0, low=-1.0)
    with pytest.raises(InputError, match="none of the 2 images") as caught:
        pictures.embed(source=folder)
    assert caught.value.fix == "--intensity-range=-1:2"
    pictures.picture("images/c.png")
    report = pictures.embed(source=folder)
    assert [row.id for row in report.failed] == ["a.tif", "b.tif"]
    assert "here 0 to 1" in report.failed[0].reason
    assert any("--intensity-range=-1:2 --fresh" in warning for warning in pictures.said.warnings)
    with monkeypatch.context() as patch:
        patch.setattr("ncm_cli.images.embed.load_encoder", lambda *_, **__: pytest.fail("loaded a model"))
        assert pictures.embed(source=folder).written is False
    with pytest.raises(MismatchError, match="intensity_range"):
        pictures.embed(source=folder, intensity_range="-1:2")
    report = pictures.embed(source=folder, intensity_range="-1:2", fresh=True, model="pixels:8")
    assert report.rows == 3
    with FeatureStore(pictures.output) as store:
        assert store.encoder["intensity_range"] == [-1, 2]
        found = np.rint(store.read(store.positions(["b.tif"]))[0].reshape(64, 3)[:, 0] * 255)
    np.testing.assert_array_equal(found, np.rint(RAMP.ravel() * 255 / 63))
    assert pictures.embed(source=folder, intensity_range="-1:2", model="pixels:8").written is False


def test_a_range_leaves_8_bit_rows_and_a_plain_store_says_nothing_of_it(make_pictures: Any) -> None:
    pictures = make_pictures(4)
    pictures.embed()
    pictures.embed(intensity_range="0:4095", output=pictures.folder / "ranged.h5")
    with FeatureStore(pictures.output) as a, FeatureStore(pictures.folder / "ranged.h5") as b:
        assert a.read().tobytes() == b.read().tobytes()
        assert "intensity_range" not in a.encoder and a.fingerprint != b.fingerprint


@pytest.mark.parametrize("text", ["1", "2:1", "a:b", "0:inf", "nan:1", "0:1:2", ":"])
def test_a_range_that_is_none_is_a_usage_error(pictures: Any, text: str) -> None:
    from ncm_cli.errors import UsageError
    from ncm_cli.images.options import parse_intensity_range

    with pytest.raises(UsageError, match="range of intensities that can't be read"):
        parse_intensity_range(text)


def test_ranges_that_differ_from_file_to_file_are_told(pictures: Any) -> None:
    tifffile = pytest.importorskip("tifffile")
    (pictures.folder / "images").mkdir()
    for name, top in (("a", 1000), ("b", 3000)):
        tags = [(281, 3, 1, top, True)]
        values = (RAMP * top // 63).astype(np.uint16)
        tifffile.imwrite(pictures.folder / f"images/{name}.tif", values, metadata=None, extratags=tags)
    pictures.embed(source=pictures.folder / "images")
    (warning,) = pictures.said.warnings
    assert "2 different ranges" in warning and "--intensity-range=0:3000" in warning
    pictures.embed(source=pictures.folder / "images", intensity_range="0:3000", fresh=True)
    assert pictures.said.warnings == []


@pytest.mark.parametrize(("top", "tone"), [(4095, "black"), (65535, "")])
def test_a_data_set_that_is_nearly_black_is_noted_once(pictures: Any, top: int, tone: str) -> None:
    for i in range(10):
        image = Image.fromarray((RAMP * (top // 63)).astype(np.uint16))
        image.save(pictures.add(f"x{i}", label="a"))
    pictures.write()
    pictures.embed()
    notes = [note for note in pictures.said.notes if "nearly all" in note]
    assert len(notes) == bool(tone)
    if tone:
        assert "10 of 10 images are nearly all black" in notes[0] and "--intensity-range" in notes[0]


def test_a_data_set_that_is_nearly_white_is_noted_and_one_such_picture_is_not(make_pictures: Any) -> None:
    pictures = make_pictures(4)
    Image.new("RGB", (8, 8), (250, 250, 250)).save(pictures.folder / "0.png")
    pictures.embed()
    assert not any("nearly all" in note for note in pictures.said.notes)
    for i in range(4):
        Image.new("RGB", (8, 8), (250, 250, 240 + i)).save(pictures.folder / f"{i}.png")
    pictures.embed(output=pictures.folder / "white.h5")
    assert sum("4 of 4 images are nearly all white" in note for note in pictures.said.notes) == 1


def test_rows_of_tiffs_that_were_read_by_another_policy_are_made_again_and_no_others(
    make_pictures: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = make_pictures(3)
    Image.fromarray((RAMP * 1024).astype(np.uint16)).save(
        pictures.add("deep", label="cat", split="train", place="0"), "TIFF"
    )
    pictures.write()
    for reuse in (None, pictures.folder / "older.h5"):
        older = pictures.folder / "older.h5" if reuse else pictures.output
        with monkeypatch.context() as patch:
            patch.setattr("ncm_cli.images.encoder.SAMPLE_POLICY", 1)
            assert pictures.embed(output=older).new == 4
        output = pictures.folder / ("new.h5" if reuse else "features.h5")
        report = pictures.embed(output=output, reuse=reuse)
        assert (report.new, report.reused, report.written) == (1, 3, True)
        assert pictures.embed(output=output, reuse=reuse).written is False
        with FeatureStore(older) as a, FeatureStore(output) as b:
            assert a.fingerprint == b.fingerprint


def test_images_to_predict_are_read_as_those_of_the_probes_features_were(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from ncm_cli.probes.options import PredictOptions
    from ncm_cli.probes.predict import _request

    encoder = {"kind": "pixels", "model": "pixels:2", "intensity_range": [0, 4095], "decode": "fast"}
    probe: Any = SimpleNamespace(encoder=encoder, meta={}, fingerprint="")
    options = PredictOptions(probe=tmp_path / "p", source=(tmp_path,), pretrained="x")
    request = _request(options, probe)
    assert (request.intensity_range, request.decode) == ([0, 4095], "fast")
