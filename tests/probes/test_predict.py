"""``ncm predict``: stores and images, in order, with a reason for every image that can't be used."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ncm_cli.errors import InputError, MismatchError, UsageError
from ncm_cli.images.embed import embed
from ncm_cli.images.options import EmbedOptions
from ncm_cli.main import run
from ncm_cli.probes.options import PredictOptions
from ncm_cli.probes.predict import predict
from ncm_cli.progress import SILENT
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.probe import write_probe
from tests.world import ENCODER, make_probe, rows_of, write_store


def _rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def _probe(path: Path, encoder: dict[str, Any], dim: int, classes: tuple[str, ...], **meta: Any) -> Path:
    rng = np.random.default_rng(len(classes))
    rows = 1 if len(classes) < 3 else len(classes)
    weight, bias = rng.normal(size=(rows, dim)), rng.normal(size=rows)
    write_probe(path, make_probe(weight, classes, bias=bias, encoder=encoder, **meta))
    return path


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Six pictures in two folders, deeper than one level."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "photos"
    for i in range(6):
        path = folder / ("a" if i % 2 else "b/c") / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (9, 9, 3), dtype=np.uint8)).save(path)
    return folder


@pytest.fixture
def embedded(pictures: Path, tmp_path: Path) -> Path:
    """The same pictures as a store of pixels:4."""
    names = sorted(path.relative_to(pictures).as_posix() for path in pictures.rglob("*.png"))
    manifest = tmp_path / "manifest.csv"
    manifest.write_text("id,path\n" + "".join(f"{name},photos/{name}\n" for name in names))
    output = tmp_path / "f.h5"
    embed(EmbedOptions(source=manifest, output=output, model="pixels:4"), reporter=SILENT)
    return output


@pytest.fixture
def probe(embedded: Path, tmp_path: Path) -> Path:
    with FeatureStore(embedded) as store:
        return _probe(tmp_path / "p.safetensors", store.encoder, store.dim, ("cat", "dog", "owl"))


def _predict(probe: Path, *source: Path, **more: Any) -> list[dict[str, str]]:
    stream = io.StringIO()
    predict(PredictOptions(probe=probe, source=source, **more), stdout=stream)
    return _rows(stream.getvalue())


def test_a_store_a_folder_and_a_manifest_agree(probe: Path, embedded: Path, pictures: Path) -> None:
    from_store = _predict(probe, embedded)
    assert len(from_store) == 6
    assert _predict(probe, pictures) == from_store
    assert _predict(probe, pictures.parent / "manifest.csv", batch_size="2", workers="0") == from_store
    single = _predict(probe, pictures / "a" / "1.png")
    assert [row["id"] for row in single] == ["1.png"]
    assert single[0]["class"] == from_store[0]["class"]
    assert float(single[0]["margin"]) == pytest.approx(float(from_store[0]["margin"]))


@pytest.mark.parametrize("classes", [("no", "yes"), ("cat", "dog", "owl")])
def test_numbers_agree_with_the_weights(classes: tuple[str, ...], embedded: Path, tmp_path: Path) -> None:
    from ncm_cli.store.probe import read_probe

    with FeatureStore(embedded) as store:
        probe = _probe(tmp_path / "q", store.encoder, store.dim, classes)
        x, ids = store.read().astype(float), store.ids
    made = read_probe(probe)
    z = x @ made.weight.T + made.bias
    z = np.concatenate([np.zeros_like(z), z], axis=1) if len(classes) == 2 else z
    shares = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    rows = _predict(probe, embedded, probabilities=True)
    assert [row["id"] for row in rows] == list(ids)
    for row, scores, share in zip(rows, z, shares, strict=True):
        assert row["class"] == classes[scores.argmax()]
        assert float(row["probability"]) == pytest.approx(share.max(), rel=1e-6)
        assert float(row["margin"]) == pytest.approx(np.diff(np.sort(scores))[-1], rel=1e-6)
        assert [float(row[f"p_{name}"]) for name in classes] == pytest.approx(share.tolist(), rel=1e-6)


def test_regression_has_values(embedded: Path, tmp_path: Path) -> None:
    from ncm_cli.store.probe import read_probe

    with FeatureStore(embedded) as store:
        probe = _probe(tmp_path / "q", store.encoder, store.dim, ())
        x = store.read().astype(float)
    made = read_probe(probe)
    rows = _predict(probe, embedded)
    assert list(rows[0]) == ["id", "value", "reason"]
    assert [float(row["value"]) for row in rows] == pytest.approx(
        (x @ made.weight[0] + made.bias[0]).tolist()
    )


def test_scaling_is_that_of_the_probe(embedded: Path, tmp_path: Path) -> None:
    with FeatureStore(embedded) as store:
        plain = _probe(tmp_path / "q", store.encoder, store.dim, ())
        scaled = _probe(
            tmp_path / "s", store.encoder, store.dim, (), scaling={"kind": "norm", "factor": 10.0}
        )
    assert _predict(plain, embedded) != _predict(scaled, embedded)


def test_images_that_cant_be_used_have_a_reason_and_exit_code_5(
    probe: Path, pictures: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    good = _predict(probe, pictures)
    whole = (pictures / "a" / "1.png").read_bytes()
    (pictures / "a" / "3.png").write_bytes(whole[: len(whole) // 2])
    (pictures / "b" / "c" / "0.png").write_bytes(b"")
    (pictures / "z.jpg").write_text("<html>404</html>")
    output = tmp_path / "out.csv"
    assert run(["predict", str(probe), str(pictures), "-o", str(output)]) == 5
    rows = _rows(output.read_text())
    assert [row["id"] for row in rows] == [*(row["id"] for row in good), "z.jpg"]
    failed = {row["id"]: row["reason"] for row in rows if row["reason"]}
    assert set(failed) == {"a/3.png", "b/c/0.png", "z.jpg"}
    assert all(row["class"] == "" for row in rows if row["id"] in failed)
    expected = [row for row in good if row["id"] not in failed]
    assert [row for row in rows if not row["reason"]] == expected
    assert "z.jpg" in capsys.readouterr().err


def test_a_single_damaged_image_is_a_row_with_a_reason(probe: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"not a picture")
    rows = _predict(probe, bad)
    assert rows[0]["id"] == "bad.jpg" and rows[0]["reason"] and not rows[0]["class"]


def test_another_encoder_is_refused(probe: Path, embedded: Path, pictures: Path, tmp_path: Path) -> None:
    with FeatureStore(embedded) as store:
        changed = {**store.encoder, "decode_policy": 999}
        other = _probe(tmp_path / "o", changed, store.dim, ("a", "b"))
    with pytest.raises(MismatchError, match="different encoders"):
        _predict(other, embedded)
    with pytest.raises(MismatchError, match="different encoders") as caught:
        _predict(other, pictures)
    assert "decode_policy" in str(caught.value) and "--pretrained" in str(caught.value)
    output = tmp_path / "out.csv"
    assert run(["predict", str(other), str(pictures), "-o", str(output)]) == 4
    assert not output.exists()


def test_features_made_elsewhere_predict_from_a_store_only(pictures: Path, tmp_path: Path) -> None:
    encoder = {"kind": "array", "model": "mine"}
    probe = _probe(tmp_path / "q", encoder, 4, ("a", "b"))
    with pytest.raises(InputError, match="made elsewhere") as caught:
        _predict(probe, pictures)
    assert "--from-array" in str(caught.value)
    write_store(tmp_path / "g.h5", np.eye(2, 4), {}, ids=["x", "y"], encoder=encoder)
    assert [row["id"] for row in _predict(probe, tmp_path / "g.h5")] == ["x", "y"]


@pytest.mark.parametrize(
    "changed", [{"precision": "fp8"}, {"precision": ["fp32"]}, {"model": 3}, {"model": None}]
)
def test_an_encoder_that_a_probe_does_not_say_is_refused(
    changed: dict[str, Any], embedded: Path, pictures: Path, tmp_path: Path
) -> None:
    with FeatureStore(embedded) as store:
        probe = _probe(tmp_path / "q", store.encoder | changed, store.dim, ("a", "b"))
    with pytest.raises(InputError, match="which encoder made the features"):
        _predict(probe, pictures)


def test_sources_that_are_nothing_are_errors(probe: Path, tmp_path: Path, pictures: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        _predict(probe, tmp_path / "nope")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no images in the folder"):
        _predict(probe, tmp_path / "empty")
    table = tmp_path / "t.csv"
    table.write_text("id,path\n1,photos/a/1.png\n2,missing.png\n3,gone.png\n")
    with pytest.raises(InputError) as caught:
        _predict(probe, table)
    assert "missing.png" in str(caught.value) and "gone.png" in str(caught.value)
    table.write_text("id,path\n,photos/a/1.png\n")
    with pytest.raises(InputError, match="blank"):
        _predict(probe, table)
    table.write_text("id,file\n1,photos/a/1.png\n")
    with pytest.raises(InputError, match="no column named 'path'") as caught:
        _predict(probe, table)
    assert "--path-col" not in str(caught.value), "predict has no such option"
    with pytest.raises(UsageError, match="--where needs a feature store"):
        _predict(probe, pictures, where="split=test")


def test_a_manifest_needs_no_labels_and_blank_ones_do_no_harm(probe: Path, pictures: Path) -> None:
    table = pictures.parent / "t.csv"
    table.write_text("path,label\nphotos/a/1.png,\nphotos/a/3.png,cat\n")
    assert [row["id"] for row in _predict(probe, table)] == ["photos/a/1.png", "photos/a/3.png"]


def test_where_selects_rows_of_a_store(tmp_path: Path) -> None:

    encoder = {"kind": "array", "model": "mine"}
    columns = {"split": ["test", "train", "test"]}
    write_store(tmp_path / "g.h5", np.eye(3, 4), columns, ids=["x", "y", "z"], encoder=encoder)
    probe = _probe(tmp_path / "q", encoder, 4, ("a", "b"))
    assert [row["id"] for row in _predict(probe, tmp_path / "g.h5", where="split=test")] == ["x", "z"]


def test_ids_with_commas_and_line_breaks_survive(tmp_path: Path) -> None:
    encoder = {"kind": "array", "model": "mine"}
    ids = ["a,b", 'say "hi"', "two\nlines", "é b", "001"]
    write_store(tmp_path / "g.h5", np.eye(5, 6), {}, ids=ids, encoder=encoder)
    probe = _probe(tmp_path / "q", encoder, 6, ("yes, really", "no"))
    output = tmp_path / "o.csv"
    predict(PredictOptions(probe=probe, source=(tmp_path / "g.h5",), output=output))
    assert [row["id"] for row in rows_of(output)] == ids


def test_a_reader_of_stdout_may_leave_early(tmp_path: Path) -> None:
    features = write_store(tmp_path / "g.h5", np.ones((20_000, 4)), {})
    probe = _probe(tmp_path / "q", ENCODER, 4, ("a", "b"))
    command = [sys.executable, "-m", "ncm_cli", "predict", str(probe), str(features)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"id,class,probability,margin,reason\n"
        process.stdout.close()
        said = process.stderr.read()
        assert process.wait(timeout=60) == 0
    assert b"Traceback" not in said


def test_the_weights_are_found_through_the_store_that_was_embedded(
    pictures: Path, embedded: Path, tmp_path: Path
) -> None:
    from ncm_cli.probes.predict import _request
    from ncm_cli.store.probe import read_probe

    with FeatureStore(embedded) as store:
        probe = _probe(
            tmp_path / "q", store.encoder, store.dim, ("a", "b"), data={"features": {"path": str(embedded)}}
        )
    options = PredictOptions(probe=probe, source=(pictures,))
    assert _request(options, read_probe(probe)).model == "pixels:4"
    named = PredictOptions(probe=probe, source=(pictures,), pretrained="weights.safetensors")
    assert _request(named, read_probe(probe)).pretrained == "weights.safetensors"


def test_several_images_are_predicted_as_each_is(
    probe: Path, pictures: Path, embedded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = sorted(pictures.rglob("*.png"))
    rows = _predict(probe, *files)
    assert [row["id"] for row in rows] == [path.name for path in files]
    assert [row["margin"] for row in rows] == [row["margin"] for row in _predict(probe, pictures)]
    (pictures / "1.png").write_bytes((pictures / "a/1.png").read_bytes())
    same = [pictures / "1.png", pictures / "a/1.png"]
    assert [row["id"] for row in _predict(probe, *same)] == [str(path) for path in same]
    with pytest.raises(UsageError, match="named twice"):
        _predict(probe, same[0], same[0])
    for other in (pictures, embedded, tmp_path / "manifest.csv"):
        with pytest.raises(UsageError, match="several sources, all must be images"):
            _predict(probe, same[0], other)
    with pytest.raises(InputError, match="no such file"):
        _predict(probe, same[0], tmp_path / "gone.png")
    assert run(["predict", str(probe), *map(str, files), "-o", str(tmp_path / "o.csv"), "-q"]) == 0
    assert rows_of(tmp_path / "o.csv") == rows


def test_an_array_of_features_is_predicted(probe: Path, embedded: Path, tmp_path: Path) -> None:
    with FeatureStore(embedded) as store:
        features = store.read()
    np.save(tmp_path / "X.npy", features)
    expected = [row | {"id": str(i)} for i, row in enumerate(_predict(probe, embedded))]
    assert _predict(probe, tmp_path / "X.npy") == expected
    features[1, 0] = np.nan
    np.save(tmp_path / "X.npy", features)
    rows = _predict(probe, tmp_path / "X.npy")
    assert (rows[1]["reason"], rows[1]["class"]) == ("numbers that aren't finite", "")
    assert [rows[0], *rows[2:]] == [expected[0], *expected[2:]]
    np.save(tmp_path / "X.npy", features[:, 1:])
    with pytest.raises(MismatchError, match=r"another length[\s\S]*found: 47 numbers[\s\S]*expected: 48"):
        _predict(probe, tmp_path / "X.npy")
    with pytest.raises(UsageError, match="--where needs a feature store"):
        _predict(probe, tmp_path / "X.npy", where="split=test")


def test_weights_are_found_from_another_folder_and_what_is_missing_is_named(
    text_clip: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands ran in one folder with relative paths; predict runs in another."""
    from ncm_cli.probes.predict import _request
    from ncm_cli.store.probe import read_probe

    work = tmp_path / "work"
    (work / "out").mkdir(parents=True)
    weights = work / "weights.safetensors"
    weights.write_bytes((text_clip / "open_clip_model.safetensors").read_bytes())
    config = json.loads((text_clip / "open_clip_config.json").read_text())
    (work / "mine.json").write_text(json.dumps(config["model_cfg"]))
    model = ["--model", "mine.json", "--pretrained", "weights.safetensors"]
    monkeypatch.chdir(work)
    assert run(["embed", str(pictures), *model, "-o", "out/f.h5", "-q"]) == 0
    with FeatureStore("out/f.h5") as store:
        data = {"features": {"path": "out/f.h5"}}
        probe = _probe(work / "out/q.safetensors", store.encoder, store.dim, ("a", "b"), data=data)
    expected = _predict(probe, pictures)
    monkeypatch.chdir(tmp_path)
    assert (
        _predict(probe, pictures) == expected
    )  # out/f.h5 above the probe, weights.safetensors where it says
    options = PredictOptions(probe=probe, source=(pictures,))
    assert _request(options, read_probe(probe)).pretrained == str(work / "out/../weights.safetensors")
    weights.rename(work / "out/weights.safetensors")
    assert _predict(probe, pictures) == expected  # beside the probe
    (work / "out/weights.safetensors").rename(tmp_path / "elsewhere.safetensors")
    with pytest.raises(InputError, match=r"weights of .*aren't there") as caught:
        _predict(probe, pictures)
    assert (
        f"no weights.safetensors, where its feature store says, and no weights.safetensors in {work / 'out'}"
        in str(caught.value)
    )
    assert "--pretrained FILE" in str(caught.value) and "--random-init" not in str(caught.value)
    assert _predict(probe, pictures, pretrained=str(tmp_path / "elsewhere.safetensors")) == expected
    (work / "out/f.h5").unlink()
    with pytest.raises(InputError, match="nothing says which weights") as caught:
        _predict(probe, pictures)
    assert f"no feature store out/f.h5 with its features, here or beside the probe in {work}" in str(
        caught.value
    )
    assert "--random-init" not in str(caught.value)


def test_every_image_of_a_folder_has_a_row(probe: Path, pictures: Path, tmp_path: Path) -> None:
    (pictures / "plain").write_bytes((pictures / "a/1.png").read_bytes())
    (pictures / "gone.png").symlink_to("nowhere.png")
    (pictures / "loop.png").symlink_to("loop.png")
    (pictures / ".hidden.png").write_bytes(b"x")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/7.png").write_bytes((pictures / "a/1.png").read_bytes())
    (pictures / "linked").symlink_to(tmp_path / "elsewhere")
    rows = {row["id"]: row for row in _predict(probe, pictures)}
    assert {"plain", "gone.png", "loop.png", "linked/7.png"} < set(rows)
    assert ".hidden.png" not in rows
    assert rows["gone.png"]["reason"] == "no such file"
    assert "symbolic links" in rows["loop.png"]["reason"]
    assert rows["plain"]["margin"] == rows["linked/7.png"]["margin"] == rows["a/1.png"]["margin"]


def test_repeated_ids_are_refused(probe: Path, pictures: Path, tmp_path: Path) -> None:
    """neural-cherche#4, D-SCRIPT#12."""
    table = tmp_path / "m.csv"
    table.write_text("id,path\n7,photos/a/1.png\n7,photos/a/3.png\n")
    with pytest.raises(InputError, match="used more than once"):
        _predict(probe, table)


@pytest.mark.parametrize("output", ["-", "p.csv"])
def test_names_that_are_not_ascii_are_written_in_any_locale(
    probe: Path, pictures: Path, tmp_path: Path, output: str
) -> None:
    """attention-ocr#101."""
    (pictures / "a/1.png").rename(pictures / "a/café →.png")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run(
        [sys.executable, "-m", "ncm_cli", "predict", str(probe), str(pictures), "-o", output],
        env={**os.environ, **plain},
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    text = done.stdout if output == "-" else (tmp_path / output).read_bytes()
    assert "a/café →.png" in {row["id"] for row in _rows(text.decode("utf-8"))}


def test_rows_that_are_scored_in_parts_have_the_same_predictions(
    probe: Path, embedded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _predict(probe, embedded, probabilities=True)
    monkeypatch.setattr("ncm_cli.probes.predict.SCORES_AT_ONCE", 6)
    assert _predict(probe, embedded, probabilities=True) == whole
    assert len(whole) == 6
