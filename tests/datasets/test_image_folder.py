"""``ncm data folder``: splits within groups, whole domains held out, and what is never deleted."""

from __future__ import annotations

import csv
import dataclasses
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from ncm_cli.errors import InputError, UsageError
from ncm_cli.options.data import FolderOptions
from ncm_cli.stages.data import data


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
    with (options.output / "manifest.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


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
        ({"val_fraction": 1.5}, "--val-fraction is a share"),
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
