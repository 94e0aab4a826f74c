"""Running ``ncm embed`` again: only what changed is read, and settings are never mixed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ncm_cli.errors import InputError, MismatchError
from ncm_cli.images import reading
from ncm_cli.images.embed import embed
from ncm_cli.images.options import EmbedOptions
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.journal import journal_folder
from tests.world import Heard

from .conftest import contents


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are decoded from now on."""
    names: list[str] = []
    plain = reading.read_image

    def counting(job: Any, encoder: Any) -> Any:
        names.append(Path(job.path).name)
        return plain(job, encoder)

    monkeypatch.setattr(reading, "read_image", counting)
    return names


def test_an_unchanged_run_reads_no_image_and_loads_no_model(
    make_pictures: Any, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = make_pictures(12)
    pictures.embed()
    assert len(decoded) == 12  # the positive control: reading is seen
    decoded.clear()
    before = pictures.output.stat()
    monkeypatch.setattr("ncm_cli.images.embed.load_encoder", lambda *_, **__: pytest.fail("loaded a model"))
    report = pictures.embed()
    assert not report.written and (report.new, report.reused) == (0, 12)
    assert decoded == []
    after = pictures.output.stat()
    assert after.st_ino == before.st_ino, "nothing is written; that it is up to date is told by its time"


def test_labels_and_columns_change_without_a_forward_pass(make_pictures: Any, decoded: list[str]) -> None:
    pictures = make_pictures(12)
    pictures.embed()
    before = contents(pictures.output)
    decoded.clear()
    pictures.write([row | {"label": "bird", "new": "1"} for row in pictures.rows])
    report = pictures.embed()
    assert report.written and (report.new, report.reused) == (0, 12) and decoded == []
    after = contents(pictures.output)
    assert after["features"] == before["features"]
    assert set(after["columns"]) == {"label", "split", "place", "new"}
    assert after["columns"]["label"][0] == ("bird",)


def test_new_changed_removed_and_moved_rows(make_pictures: Any, decoded: list[str]) -> None:
    pictures = make_pictures(12)
    pictures.embed()
    decoded.clear()
    pictures.add("new", name="new.png", label="cat", split="train", place="0")
    pictures.picture("5.png")
    rows = [row for row in pictures.rows if row["id"] != "x003"][::-1]
    pictures.write(rows)
    report = pictures.embed()
    assert sorted(decoded) == ["5.png", "new.png"]
    assert (report.new, report.reused, report.removed, report.rows) == (2, 10, 1, 12)
    pictures.embed(output=pictures.folder / "clean.h5")
    assert contents(pictures.output) == contents(pictures.folder / "clean.h5")


def test_a_touched_or_moved_file_is_compared_by_content(make_pictures: Any, decoded: list[str]) -> None:
    pictures = make_pictures(6)
    pictures.embed()
    decoded.clear()
    os.utime(pictures.folder / "2.png", ns=(1, 1))
    (pictures.folder / "moved").mkdir()
    shutil.copy2(pictures.folder / "4.png", pictures.folder / "moved/4.png")
    pictures.rows[4]["path"] = "moved/4.png"
    pictures.write()
    report = pictures.embed()
    assert decoded == [] and report.written
    with FeatureStore(pictures.output) as store:
        assert store.files is not None
        assert store.files.mtime_ns[2] == 1
        assert store.files.path[4].endswith("moved/4.png")
    assert not pictures.embed().written


def test_content_that_changed_behind_size_and_time_is_found_when_contents_are_verified(
    make_pictures: Any, decoded: list[str]
) -> None:
    pictures = make_pictures(6)
    path = pictures.folder / "3.png"
    # An uncompressed format: every picture of that shape has the same number of bytes.
    for name in ("3.png", "other.png"):
        pictures.picture(name.replace("png", "bmp")).replace(pictures.folder / name)
    pictures.embed()
    before, status = contents(pictures.output), path.stat()
    shutil.copy(pictures.folder / "other.png", path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    decoded.clear()
    assert not pictures.embed().written
    report = pictures.embed(verify=True)
    assert report.written and decoded == ["3.png"]
    assert contents(pictures.output)["features"] != before["features"]


def test_another_file_of_equal_size_and_time_under_another_path_is_no_match(make_pictures: Any) -> None:
    pictures = make_pictures(3)
    a = pictures.picture("a.bmp")
    b = pictures.picture("b.bmp")
    pictures.rows[0]["path"] = "a.bmp"
    for path in (a, b):
        os.utime(path, ns=(5, 5))
    pictures.write()
    pictures.embed()
    pictures.rows[0]["path"] = "b.bmp"
    pictures.write()
    assert pictures.embed().new == 1


def test_mended_files_are_embedded_and_only_those(
    make_pictures: Any, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = make_pictures(9)
    good = {name: (pictures.folder / name).read_bytes() for name in ("2.png", "7.png")}
    for name in good:
        (pictures.folder / name).write_bytes(b"broken")
    assert [row.id for row in pictures.embed().failed] == ["x002", "x007"]
    with monkeypatch.context() as patch:
        patch.setattr("ncm_cli.images.embed.load_encoder", lambda *_, **__: pytest.fail("loaded a model"))
        again = pictures.embed()
        assert not again.written and len(again.failed) == 2
    (pictures.folder / "7.png").write_bytes(good["7.png"])
    decoded.clear()
    report = pictures.embed()
    assert set(decoded) == {"2.png", "7.png"}
    assert (report.new, report.reused, len(report.failed)) == (1, 7, 1)
    (pictures.folder / "2.png").write_bytes(good["2.png"])
    assert pictures.embed().failed == ()
    pictures.embed(output=pictures.folder / "clean.h5")
    assert contents(pictures.output) == contents(pictures.folder / "clean.h5")


def test_a_good_file_that_breaks_leaves_the_store(make_pictures: Any) -> None:
    pictures = make_pictures(5)
    pictures.embed()
    (pictures.folder / "1.png").write_bytes(b"broken now")
    report = pictures.embed()
    assert report.rows == 4 and [row.id for row in report.failed] == ["x001"]


def test_all_files_broken_keeps_the_old_store(make_pictures: Any) -> None:
    pictures = make_pictures(3)
    pictures.embed()
    before = contents(pictures.output)
    for path in pictures.folder.glob("*.png"):
        path.write_bytes(b"broken")
    with pytest.raises(InputError, match="none of the 3 images"):
        pictures.embed()
    assert contents(pictures.output) == before


def test_reuse_takes_rows_of_equal_content(make_pictures: Any, decoded: list[str]) -> None:
    pictures = make_pictures(10)
    pictures.embed(output=pictures.folder / "other.h5")
    pictures.write([row | {"id": f"new-{row['id']}"} for row in pictures.rows[2:8]])
    extra = pictures.picture("8.png")
    rows = [{"id": f"n{i}", "path": f"{i}.png", "label": "a"} for i in (8, 3, 1)]
    pictures.write(rows)
    decoded.clear()
    report = pictures.embed(reuse=pictures.folder / "other.h5")
    assert decoded == [extra.name]
    assert (report.new, report.reused) == (1, 2)
    pictures.embed(output=pictures.folder / "clean.h5")
    assert contents(pictures.output) == contents(pictures.folder / "clean.h5")


def test_reuse_of_another_encoder_is_refused(make_pictures: Any) -> None:
    pictures = make_pictures(4)
    other = pictures.folder / "other.h5"
    pictures.embed(output=other, model="pixels:3")
    with pytest.raises(MismatchError, match="other settings") as caught:
        pictures.embed(reuse=other)
    assert "model: pixels:3 there, pixels:2 asked for" in str(caught.value)
    assert not pictures.output.exists()
    other.write_bytes(b"text")
    with pytest.raises(InputError, match="--reuse"):
        pictures.embed(reuse=other)


def test_reuse_of_an_augmented_view_needs_the_same_id(make_pictures: Any) -> None:
    pictures = make_pictures(4)
    other = pictures.folder / "other.h5"
    pictures.embed(output=other, augment="hue:0.4")
    pictures.write([row | {"id": "renamed"} if row["id"] == "x001" else row for row in pictures.rows])
    report = pictures.embed(reuse=other, augment="hue:0.4")
    assert (report.new, report.reused) == (1, 3)


def test_float16_rows_are_not_passed_off_as_float32(make_pictures: Any) -> None:
    pictures = make_pictures(4)
    other = pictures.folder / "other.h5"
    pictures.embed(output=other, dtype="float16")
    with pytest.raises(MismatchError, match="can't be reused"):
        pictures.embed(reuse=other)


def interrupted(pictures: Any, monkeypatch: pytest.MonkeyPatch, batches: int, **options: str) -> None:
    """Embed in batches of 4 until the encoder raises KeyboardInterrupt after some of them, as Ctrl-C does."""
    from ncm_cli.images import encoder as pixels

    plain = pixels.PixelsEncoder.encode
    seen = []

    def encode(self: Any, items: Any) -> np.ndarray:
        if len(seen) == batches:
            raise KeyboardInterrupt
        seen.append(len(items))
        return plain(self, items)

    with monkeypatch.context() as patch:
        patch.setattr(pixels.PixelsEncoder, "encode", encode)
        with pytest.raises(KeyboardInterrupt):
            pictures.embed(batch_size="4", **options)


def test_an_interrupted_run_goes_on_and_ends_like_a_clean_one(
    make_pictures: Any, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = make_pictures(20)
    (pictures.folder / "2.png").write_bytes(b"broken")
    interrupted(pictures, monkeypatch, 3, workers="0")
    assert not pictures.output.exists() and journal_folder(pictures.output).is_dir()
    decoded.clear()
    report = pictures.embed(batch_size="4", workers="0")
    assert len(decoded) == 20 - 11  # three batches are done, but for the broken one
    assert (report.new, len(report.failed)) == (19, 1)
    assert any("going on" in note for note in pictures.said.notes)
    pictures.embed(output=pictures.folder / "clean.h5", batch_size="4")
    assert contents(pictures.output) == contents(pictures.folder / "clean.h5")
    assert not journal_folder(pictures.output).exists()


def test_an_unfinished_run_of_other_settings_is_refused_until_fresh(
    make_pictures: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = make_pictures(8)
    interrupted(pictures, monkeypatch, 1)
    with monkeypatch.context() as patch:
        patch.setattr("ncm_cli.images.embed.load_encoder", lambda *_, **__: pytest.fail("loaded a model"))
        with pytest.raises(MismatchError, match="interrupted run with other settings") as caught:
            pictures.embed(batch_size="4", model="pixels:3")
    assert "pixels:2" in str(caught.value) and "pixels:3" in str(caught.value)
    assert pictures.embed(model="pixels:3", fresh=True).rows == 8


def test_a_change_between_the_kill_and_the_resume_is_seen(
    make_pictures: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = make_pictures(8)
    interrupted(pictures, monkeypatch, 1)
    pictures.picture("1.png")
    pictures.write([row for row in pictures.rows if row["id"] != "x000"])
    pictures.embed(batch_size="4")
    pictures.embed(output=pictures.folder / "clean.h5", batch_size="4")
    assert contents(pictures.output) == contents(pictures.folder / "clean.h5")


HOLD = """
import sys
from ncm_cli.store.files import writer_lock
with writer_lock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_another_library_version_keeps_rows_of_an_equal_fingerprint(
    make_pictures: Any, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ncm_cli.images import embed as stage

    pictures = make_pictures(5)
    plain = stage.request_key
    with monkeypatch.context() as patch:
        patch.setattr(stage, "request_key", lambda request: plain(request) | {"libraries": {"pillow": "0.1"}})
        pictures.embed()
    decoded.clear()
    report = pictures.embed()
    assert report.written and (report.new, report.reused) == (0, 5) and decoded == []
    assert not pictures.embed().written


def test_a_root_that_is_not_there_is_named(make_pictures: Any) -> None:
    pictures = make_pictures(2)
    with pytest.raises(InputError, match="no such folder") as caught:
        pictures.embed(root=pictures.folder / "absent")
    assert "--root" in str(caught.value)


def test_a_second_writer_is_refused(make_pictures: Any) -> None:
    pictures = make_pictures(3)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(pictures.output)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(InputError) as caught:
            pictures.embed()
        assert str(process.pid) in str(caught.value)
        assert os.uname().nodename in str(caught.value)
        process.stdin.close()
    assert pictures.embed().rows == 3


def test_reuse_without_a_model_takes_the_encoder_of_the_store(make_pictures: Any, tmp_path: Path) -> None:
    pictures = make_pictures(4)
    pictures.embed(model="pixels:3", normalize=True)
    again, heard = tmp_path / "again.h5", Heard()
    options = EmbedOptions(source=pictures.manifest, output=again, reuse=pictures.output)
    report = embed(options, reporter=heard)
    assert (report.reused, report.new) == (4, 0)
    assert f"--model pixels:3, as in {pictures.output}" in heard.notes
    with FeatureStore(again) as store, FeatureStore(pictures.output) as first:
        assert store.fingerprint == first.fingerprint
        assert (store.options["model"], store.options["normalize"]) == ("pixels:3", True)
