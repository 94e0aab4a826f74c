"""``ncm data folder``: splits within groups, whole domains held out, and what is never deleted."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from ncm_cli.datasets.base import data
from ncm_cli.datasets.options import FolderOptions
from ncm_cli.errors import InputError, UsageError
from ncm_cli.main import run
from ncm_cli.store.files import writer_lock
from tests.world import Heard, rows_of


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for domain in ("photo", "sketch"):
        for label in ("dog", "horse"):
            folder = tmp_path / "photos" / domain / label
            folder.mkdir(parents=True)
            for i in range(10):
                Image.new("RGB", (4, 4), (i, 0, 0)).save(folder / f"{i}.png")
    return tmp_path / "photos"


def _rows(options: FolderOptions) -> list[dict[str, str]]:
    data(options)
    return rows_of(options.output / "manifest.csv")


def _options(photos: Path, **changed: object) -> FolderOptions:
    base = FolderOptions(source=photos, output=photos.parent / "data", layout="domain/label")
    return dataclasses.replace(base, **changed)  # type: ignore[arg-type]


def test_every_group_is_split_on_its_own(photos: Path) -> None:
    rows = _rows(_options(photos))
    counts = Counter((row["domain"], row["label"], row["split"]) for row in rows)
    assert len(rows) == 40
    assert set(counts.values()) == {2, 6}
    assert all(counts[d, c, "test"] == counts[d, c, "val"] == 2 for d, c, _ in counts)
    assert all(Path(row["path"]).is_file() for row in rows)
    assert rows == _rows(_options(photos))
    assert rows != _rows(_options(photos, seed=1))


def test_a_whole_domain_is_the_test(photos: Path) -> None:
    rows = _rows(_options(photos, test="domain=sketch"))
    assert {row["domain"] for row in rows if row["split"] == "test"} == {"sketch"}
    assert {row["domain"] for row in rows if row["split"] != "test"} == {"photo"}
    assert Counter(row["split"] for row in rows) == {"test": 20, "train": 16, "val": 4}


def test_where_keeps_some(photos: Path) -> None:
    assert {row["label"] for row in _rows(_options(photos, where="label!=dog"))} == {"horse"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layout": "label"}, "don't lie where the layout says"),
        ({"layout": "split/label"}, "column that the manifest has already"),
        ({"where": "lable=dog"}, "did you mean 'label'"),
        ({"test": "domain=skech"}, "did you mean 'sketch'"),
        ({"where": "label!=dog|horse"}, "no image meets the filter"),
        ({"val_fraction": 1.5}, "--val-fraction must be below 1"),
        ({"source": Path("nowhere")}, "no such folder"),
    ],
)
def test_what_is_refused(photos: Path, changed: dict[str, object], message: str) -> None:
    options = _options(photos, **changed)
    with pytest.raises((InputError, UsageError)) as caught:
        data(options)
    assert message in str(caught.value)
    assert not options.output.exists()


def test_an_earlier_build_is_replaced_but_nothing_else(photos: Path) -> None:
    options = _options(photos)
    data(options)
    data(options)
    (options.output / "features.h5").write_text("hours of work")
    with pytest.raises(InputError, match="holds other files") as caught:
        data(options)
    assert "features.h5" in str(caught.value)
    assert (options.output / "features.h5").read_text() == "hours of work"


def _make(root: Path, sizes: dict[str, int]) -> Path:
    for folder, n in sizes.items():
        (root / folder).mkdir(parents=True)
        for i in range(n):
            (root / folder / f"{i}.png").write_bytes(b"")
    return root


def _warnings(root: Path, **changed: object) -> list[str]:
    heard = Heard()
    data(_options(root, **changed), reporter=heard)
    return heard.warnings


def test_classes_too_small_for_a_split_are_named_with_what_it_needs(tmp_path: Path) -> None:
    """alteryx/evalml#760."""
    root = _make(tmp_path / "photos", {"ant": 12, "bee": 4, "cat": 3, "dog": 2, "eel": 1})
    val, test = _warnings(root, layout="label")
    assert val.startswith(
        "no val rows of cat (3), dog (2), eel (1): with these shares a label needs 3 images"
    )
    assert "beside its test rows" in val
    assert test.startswith("no test rows of dog (2), eel (1): with these shares a label needs 3 images;")
    for options in ({"val_fraction": 0.0, "test_fraction": 0.0}, {"where": "label=ant|bee"}):
        assert _warnings(root, layout="label", **options) == []
    (val,) = _warnings(root, layout="label", test_fraction=0.0)
    assert val.startswith("no val rows of dog (2), eel (1)")


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2, 0.3, 0.5, 0.7])
def test_what_a_split_needs_is_what_gives_it_a_row(tmp_path: Path, share: float) -> None:
    root = _make(tmp_path / "photos", {str(n): n for n in range(1, 13)})
    rows = _rows(_options(root, layout="label", val_fraction=share, test_fraction=0.0))
    smallest = min(int(row["label"]) for row in rows if row["split"] == "val")
    warnings = [
        w for w in _warnings(root, layout="label", val_fraction=share, test_fraction=0.0) if "no val" in w
    ]
    assert len(warnings) == (smallest > 1)
    assert all(f"a label needs {smallest} images" in warning for warning in warnings)


def test_a_class_without_training_rows_is_named(tmp_path: Path) -> None:
    root = _make(tmp_path / "photos", {"ant": 20, "bee": 1})
    train, val = _warnings(root, layout="label", test_fraction=0.9)
    assert train.startswith("no train rows of bee (1)")
    assert val.startswith("no val rows of ant (20), bee (1)")


def test_groups_that_are_held_out_need_no_validation_but_their_labels_test_rows(tmp_path: Path) -> None:
    sizes = {"photo/dog": 10, "photo/cow": 10, "photo/pig": 2, "sketch/dog": 1, "sketch/cow": 1}
    root = _make(tmp_path / "photos", sizes)
    val, test = _warnings(root, test="domain=sketch")
    assert val.startswith("no val rows of photo / pig (2): with these shares a domain / label needs 3 images")
    assert test == "no test rows of pig (2): no image of them meets --test domain=sketch"


def test_of_many_small_classes_the_first_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = _make(tmp_path / "photos", {f"{i:03}": 1 for i in range(100)})
    assert run(["data", "folder", str(root), "-o", str(tmp_path / "data")]) == 0
    out, err = capsys.readouterr()
    assert "011 (1) and 88 more" in err
    assert "and 60 more: --json has all" in out
    assert len(out.splitlines()) < 50


COUNTS = "domain;label;train;val;test\nphoto;dog;5;2;1\nsketch;horse;3;;0\n"


def test_counts_say_how_many_images_each_split_has(photos: Path) -> None:
    table = photos.parent / "counts.csv"
    table.write_text(COUNTS)
    rows = _rows(_options(photos, counts=str(table)))
    assert Counter((row["domain"], row["label"], row["split"]) for row in rows) == {
        ("photo", "dog", "train"): 5,
        ("photo", "dog", "val"): 2,
        ("photo", "dog", "test"): 1,
        ("photo", "dog", "pool"): 2,
        ("sketch", "horse", "train"): 3,
        ("sketch", "horse", "pool"): 7,
    }
    assert rows == _rows(_options(photos, counts=str(table)))
    assert rows != _rows(_options(photos, counts=str(table), seed=1))
    assert _warnings(photos, counts=str(table)) == []


def test_counts_name_any_splits(photos: Path) -> None:
    table = photos.parent / "counts.csv"
    table.write_text("label,domain,first,second\ndog,photo,1,9\n")
    rows = _rows(_options(photos, counts=str(table)))
    assert Counter(row["split"] for row in rows) == {"first": 1, "second": 9}


@pytest.mark.parametrize(
    ("text", "message", "parts"),
    [
        (COUNTS.replace("5", "8"), "too few images of photo / dog", ["found: 10", "expected: 11"]),
        (
            COUNTS.replace("dog", "dgo"),
            "no group of images named 'photo / dgo'",
            ["mean 'photo / dog'", "c.csv"],
        ),
        (COUNTS + "photo;dog;0;0;0\n", "can't be read", ["row 3 (line 4)", "no other row names"]),
        (COUNTS.replace("5", "five"), "can't be read", ["row 1 (line 2)", "whole numbers"]),
        (COUNTS.replace("5", "2.5"), "can't be read", ["row 1 (line 2)", "whole numbers"]),
        (COUNTS.replace("5", "-1"), "can't be read", ["row 1 (line 2)", "whole numbers"]),
        ("label,train\ndog,1\n", "without the columns it needs", ["domain, label, and one column for each"]),
        ("domain,label\nphoto,dog\n", "without the columns it needs", ["domain, label"]),
    ],
)
def test_counts_that_cannot_be_met(photos: Path, text: str, message: str, parts: list[str]) -> None:
    table = photos.parent / "c.csv"
    table.write_text(text)
    options = _options(photos, counts=str(table))
    with pytest.raises(InputError, match=message) as caught:
        data(options)
    for part in parts:
        assert part in str(caught.value)
    assert not options.output.exists()


INLINE = "photo/dog=5:2:1, sketch/horse=3:0:0"


def test_counts_are_said_inline(photos: Path) -> None:
    table = photos.parent / "counts.csv"
    table.write_text(COUNTS)
    assert _rows(_options(photos, counts=INLINE)) == _rows(_options(photos, counts=str(table)))


def test_inline_counts_are_those_of_the_table(photos: Path) -> None:
    rng, groups = random.Random(0), [f"{d}/{name}" for d in ("photo", "sketch") for name in ("dog", "horse")]
    for _ in range(25):
        sizes = {group: rng.choices(range(4), k=3) for group in rng.sample(groups, rng.randint(1, 4))}
        blank = rng.choice(("", " ", "\n  "))
        text = f",{blank}".join(f"{group}{blank}={':'.join(map(str, own))}" for group, own in sizes.items())
        table = photos.parent / f"a=b{rng.randrange(2)}.csv"
        lines = (",".join([*group.split("/"), *map(str, own)]) for group, own in sizes.items())
        table.write_text("\n".join(["domain,label,train,val,test", *lines]))
        seed = rng.randrange(9)
        inline = _rows(_options(photos, counts=text, seed=seed))
        assert inline == _rows(_options(photos, counts=str(table), seed=seed))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("photo/dog=5:2", "'photo/dog=5:2'"),
        ("photo/dog=5:2:1:0", "'photo/dog=5:2:1:0'"),
        ("photo/dog=5:2:1, sketch/horse", "'sketch/horse'"),
        ("photo/dog=5:2:1,", "''"),
        ("photo/dog=5:2:one", "'photo/dog=5:2:one'"),
        ("photo/dog=5:-2:1", "'photo/dog=5:-2:1'"),
        ("photo/dog=5:2.5:1", "'photo/dog=5:2.5:1'"),
        ("photo/dog=5::1", "'photo/dog=5::1'"),
        (f"photo/dog=5:2:{'9' * 5000}", "'photo/dog=5:2:999"),
        ("photo/=5:2:1", "'photo/=5:2:1'"),
        ("=5:2:1", "'=5:2:1'"),
        ("photo/dog=5:2:1, photo / dog=1:1:1", "'photo / dog=1:1:1'"),
    ],
)
def test_inline_counts_that_cannot_be_read(photos: Path, text: str, part: str) -> None:
    options = _options(photos, counts=text)
    with pytest.raises(UsageError, match="counts that can't be read") as caught:
        data(options)
    assert f"--counts, {part}" in str(caught.value)
    assert "'photo/dog=45:15:5, cartoon/dog=5:2:45'" in str(caught.value)
    assert not options.output.exists()


@pytest.mark.parametrize(
    ("text", "error", "message", "parts"),
    [
        (
            INLINE.replace("5", "8"),
            InputError,
            "too few images of photo / dog",
            ["found: 10", "expected: 11"],
        ),
        (INLINE.replace("5", "9" * 12), InputError, "too few images of photo / dog", ["found: 10"]),
        (INLINE.replace("dog", "dgo"), InputError, "no group of images named", ["mean 'photo / dog'"]),
        ("dog=5:2:1", UsageError, "a folder for each level", ["found: dog", "DOMAIN/LABEL=TRAIN:VAL:TEST"]),
        (
            "photo/dog=5:2:1; sketch/dog=1:1:1",
            UsageError,
            "a folder for each level",
            ["found: photo/dog=5"],
        ),
        ("a/b/c=5:2:1", UsageError, "a folder for each level", ["found: a/b/c"]),
        ("counts.csv", InputError, "table of counts", ["counts.csv"]),
    ],
)
def test_inline_counts_that_cannot_be_met(
    photos: Path, text: str, error: type[Exception], message: str, parts: list[str]
) -> None:
    with pytest.raises(error, match=message) as caught:
        data(_options(photos, counts=text))
    for part in parts:
        assert part in str(caught.value)


def test_counts_and_test_exclude_each_other(photos: Path) -> None:
    table = photos.parent / "c.csv"
    table.write_text(COUNTS)
    with pytest.raises(UsageError, match="--counts says which images are test rows"):
        data(_options(photos, counts=str(table), test="domain=sketch"))


def test_links_that_lead_nowhere_are_left_out_and_named(tmp_path: Path) -> None:
    root = _make(tmp_path / "photos", {"cat": 5, "dog": 5})
    for name in ("cat/x.png", "dog/y.png"):
        (root / name).symlink_to("nowhere")
    (warning,) = _warnings(root, layout="label")
    assert warning == "left out, links that lead nowhere: cat/x.png, dog/y.png"
    assert len(_rows(_options(root, layout="label"))) == 10
    for path in root.rglob("?.png"):
        if not path.is_symlink():
            path.unlink()
    with pytest.raises(InputError, match="no image in the folder is there"):
        _warnings(root, layout="label")


def test_names_that_are_not_utf8_are_left_out_and_all_named(tmp_path: Path) -> None:
    root = _make(tmp_path / "photos", {"cat": 20, "dog": 20})
    bad = [*(b"cat/caf\xe9%d.png" % i for i in range(15)), b"d\xff/1.png"]
    for name in bad:
        path = os.path.join(os.fsencode(root), name)  # noqa: PTH118
        os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
        with open(path, "wb"):  # noqa: PTH123
            pass
    (warning,) = _warnings(root, layout="label")
    assert warning.startswith("left out, names that aren't UTF-8: cat/caf\\xe90.png, ")
    assert warning.count("caf\\xe9") == 15 and warning.endswith("d\\xff/1.png")
    rows = _rows(_options(root, layout="label"))
    assert Counter(row["label"] for row in rows) == {"cat": 20, "dog": 20}
    for path in root.rglob("[0-9].png"):
        path.unlink()
    for path in root.rglob("1?.png"):
        path.unlink()
    with pytest.raises(InputError, match="no image in the folder is there") as caught:
        _warnings(root, layout="label")
    assert "names that aren't UTF-8" in str(caught.value)


@pytest.mark.parametrize("other", ["Polar Bear", "polarbear", "ｐolar bear"])
def test_names_of_classes_that_look_alike_are_warned_of(tmp_path: Path, other: str) -> None:
    root = _make(tmp_path / "photos", {"polar bear": 20, other: 20, "dog": 20})
    (warning,) = _warnings(root, layout="label")
    assert "values of column 'label' that differ only in case, blanks or Unicode form" in warning
    assert "polar bear" in warning
    assert _warnings(root, layout="label", where=f"label!={other}") == []


KILLED = """
import os, signal, sys
from ncm_cli.datasets import image_folder
from ncm_cli.main import run
image_folder.write_csv = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
run(["data", "folder", *sys.argv[1:]])
"""


def test_what_a_killed_builder_left_is_removed(photos: Path) -> None:
    options = _options(photos)
    command = ["photos", "--layout", "domain/label", "-o", "data"]
    killed = subprocess.run([sys.executable, "-c", KILLED, *command], cwd=photos.parent, check=False)
    assert killed.returncode == -signal.SIGKILL
    left = {path.name for path in photos.parent.iterdir()}
    assert left == {"photos", ".data.partial", ".data.partial.lock"}
    assert len(_rows(options)) == 40
    assert {path.name for path in photos.parent.iterdir()} == {"photos", "data"}


def test_one_builder_at_a_time(photos: Path) -> None:
    with (
        writer_lock(photos.parent / "data.partial"),
        pytest.raises(InputError, match="another process is writing this output"),
    ):
        data(_options(photos))


def test_the_current_folder_and_a_circle_are_no_output(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    circle = photos.parent / "circle"
    circle.symlink_to(circle)
    with pytest.raises(InputError, match="leads back to itself"):
        data(_options(photos, output=circle))
    (photos.parent / "empty").mkdir()
    monkeypatch.chdir(photos.parent / "empty")
    with pytest.raises(InputError, match="the output is the folder that you are in"):
        data(_options(photos, output=Path()))
    assert {path.name for path in photos.parent.iterdir()} == {"photos", "empty", "circle"}
