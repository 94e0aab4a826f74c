"""``ncm zeroshot`` and pairs of prompts: open_clip's own numbers, and a probe like any other."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ncm_cli.errors import InputError, MismatchError
from ncm_cli.images.text import filled, read_prompts
from ncm_cli.main import run
from ncm_cli.options import check
from ncm_cli.probes import metrics
from ncm_cli.probes.evaluate import evaluate, logits
from ncm_cli.probes.options import EvalOptions, ZeroshotOptions
from ncm_cli.probes.problem import Roles
from ncm_cli.probes.usable_pairs import read_usable_pairs
from ncm_cli.probes.zeroshot import zeroshot
from ncm_cli.progress import SILENT
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.pairs import read_pairs
from ncm_cli.store.probe import Probe, read_probe
from tests.world import Heard

PROMPTS = ("a photo of a {}.", "a drawing of the {class}")


def _made(store: Path, output: Path, **options: Any) -> Probe:
    zeroshot(ZeroshotOptions(features=store, output=output, device="cpu", **options))
    return read_probe(output)


@pytest.mark.parametrize(("store", "classes"), [("raw", None), ("unit", "dog,cat=tabby cat")])
def test_probabilities_are_open_clips_own(
    store: str, classes: str | None, stores: Any, tmp_path: Path
) -> None:
    import torch
    from open_clip import build_zero_shot_classifier

    words = ["cat", "dog", "polar bear"] if classes is None else ["dog", "tabby cat"]
    probe = _made(getattr(stores, store), tmp_path / "z", prompts=PROMPTS, classes=classes)
    templates = [prompt.replace("{class}", "{}") for prompt in PROMPTS]
    with torch.no_grad():
        weights = build_zero_shot_classifier(stores.reference, stores.tokenizer, words, templates)
        cosines = stores.reference.encode_image(stores.images, normalize=True) @ weights
        expected = (stores.reference.logit_scale.exp() * cosines).softmax(dim=-1).numpy()
    with FeatureStore(getattr(stores, store)) as own:
        shares = metrics.probabilities(logits(probe, own.read()))
    assert np.ptp(expected, axis=0).max() > 0.01  # they differ among rows
    np.testing.assert_allclose(shares, expected, atol=1e-6)


@pytest.mark.slow
def test_pairs_are_projected_out_of_the_text_weights(stores: Any, tmp_path: Path) -> None:
    pairs = tmp_path / "p.h5"
    assert run(f"pairs --match random --same label --across place -f {stores.raw} -o {pairs}".split()) == 0
    plain = _made(stores.raw, tmp_path / "z")
    robust = _made(stores.raw, tmp_path / "r", pairs=pairs, rank="2")
    with FeatureStore(stores.raw) as store:
        unit = {id: row / np.linalg.norm(row) for id, row in zip(store.ids, store.read(), strict=True)}
    found = read_pairs(pairs)
    delta = np.stack([unit[a] - unit[b] for a, b in zip(found.id_a, found.id_b, strict=True)], axis=1)
    Q = np.linalg.svd(delta.astype(float))[0][:, :2]
    assert np.abs(plain.weight @ Q).max() > 0.1
    np.testing.assert_allclose(robust.weight, plain.weight - plain.weight @ Q @ Q.T, atol=1e-5)
    assert robust.rank == 2
    # Of several ranks one is chosen by labelled validation rows, and such rows are told by eval.
    chosen = _made(stores.raw, tmp_path / "c", pairs=pairs).meta["selection"]
    bounds = [one["bound_01"] for one in chosen["path"]]
    assert chosen["rule"] == "bound"
    assert len(bounds) > 2
    assert bounds[chosen["chosen"]] == min(bounds)
    with pytest.raises(InputError, match="nothing to choose by") as caught:
        _made(stores.raw, tmp_path / "c", pairs=pairs, classes="dog,cat", val="label=polar_bear")
    assert "--rank" in str(caught.value)


@pytest.mark.slow
def test_pairs_of_several_stores_are_removed_together(stores: Any, tmp_path: Path) -> None:
    paths = [tmp_path / "p.h5", tmp_path / "q.h5"]
    for path, words in zip(paths, ("--match random", "--match nearest"), strict=True):
        words = f"pairs {words} --same label --across place -f {stores.raw} -o {path}"
        assert run(words.split()) == 0
    probe = _made(stores.raw, tmp_path / "c", pairs=tuple(paths))
    with FeatureStore(stores.raw) as store:
        unit = {id: row / np.linalg.norm(row) for id, row in zip(store.ids, store.read(), strict=True)}
    found = [read_pairs(path) for path in paths]
    members = [pair for one in found for pair in zip(one.id_a, one.id_b, strict=True)]
    delta = np.stack([unit[a] - unit[b] for a, b in members], axis=1)
    Q = np.linalg.svd(delta.astype(float))[0][:, : probe.rank]
    assert np.allclose(Q @ Q.T, probe.basis @ probe.basis.T, atol=1e-4)
    path = probe.meta["selection"]["path"]
    for one in path:
        flips = one["flip_rate_1"] + one["flip_rate_2"]
        assert one["bound_01"] == pytest.approx(1 - one["val_accuracy"] + flips)
    verdict = probe.meta["selection"]["verdict"]
    assert [Path(store["path"]).name for store in verdict["stores"]] == ["p.h5", "q.h5"]


def test_directions_that_hold_all_of_the_weights_leave_zeros(stores: Any, tmp_path: Path) -> None:
    pairs, prompts = tmp_path / "p.h5", ("a photo of a cat.", "a photo of a dog.")
    named = [f"--prompts={prompt}" for prompt in prompts]
    assert run(["pairs", *named, "-f", str(stores.raw), "-o", str(pairs)]) == 0
    assert not _made(stores.raw, tmp_path / "z", classes="cat,dog", pairs=pairs, rank="1").weight.any()


def test_what_pairs_lack_is_told_before_a_model_is_loaded(
    stores: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs, words = tmp_path / "p.h5", ["--prompts", "a {}|the {}", "-f", str(stores.unit)]
    assert run(["pairs", *words, "-o", str(pairs)]) == 0
    monkeypatch.setattr("ncm_cli.probes.zeroshot.load_text_tower", None)
    with pytest.raises(InputError, match="numerical rank"):
        _made(stores.unit, tmp_path / "z", pairs=pairs, rank="9")
    with pytest.raises(MismatchError, match="different encoders"):
        _made(stores.raw, tmp_path / "z", pairs=pairs, rank="1")


def test_prompts_are_texts_of_any_length_and_names(tmp_path: Path) -> None:
    long = "a very" * 50
    assert read_prompts([long, "{}" + long]) == [long, "{}" + long]
    check(ZeroshotOptions(features=tmp_path / "f", output=tmp_path / "z", prompts=("{}" + long,)))
    assert filled("a {class}", "{} set") == "a {} set"


@pytest.mark.slow
def test_the_ends_of_a_mixture_are_zero_shot_and_the_probe(stores: Any, tmp_path: Path) -> None:
    fit = tmp_path / "fit"
    line = f"fit -f {stores.raw} --scaling norm --weight-decay 1e-2,1e-1 -o {fit}"
    assert run(line.split()) == 0
    with FeatureStore(stores.raw) as store:
        X = store.read()
    own, plain = logits(read_probe(fit), X), logits(_made(stores.raw, tmp_path / "z"), X)
    for share in (0.0, 0.25, 1.0):
        mixed = _made(stores.raw, tmp_path / "m", probe=fit, mix=share)
        np.testing.assert_allclose(logits(mixed, X), (1 - share) * plain + share * own, atol=1e-9)
    result = evaluate(EvalOptions(probe=tmp_path / "m", features=stores.raw, where="split=train|val"))
    assert result["overlap"] == {"train": 12, "val": 12}  # what the probe has seen
    with pytest.raises(MismatchError, match="another order"):
        _made(stores.raw, tmp_path / "m", probe=fit, mix=0.5, classes="dog,cat,polar_bear")
    assert run(f"fit -f {stores.raw} --rank 0 --weight-decay 1e-2 -o {fit}".split()) == 0
    with pytest.raises(MismatchError, match="unnormalised rows") as caught:
        _made(stores.raw, tmp_path / "m", probe=fit, mix=0.5)
    assert "--scaling norm" in str(caught.value)


@pytest.mark.slow
def test_text_pairs_are_differences_of_encode_text(stores: Any, tmp_path: Path) -> None:
    import torch

    pairs = tmp_path / "t.h5"
    land, water = "a {class} on land", "a {class} on water"
    words = ["pairs", "--prompts", land, "--prompts", water, "--prompts", "{} ashore|{} afloat"]
    assert run([*words, "-f", str(stores.raw), "-o", str(pairs), "--holdout", "2"]) == 0
    found = read_pairs(pairs)
    assert found.strategy == "text"
    assert len(found.id_a) == 6
    assert ("a polar bear on land", "a polar bear on water") in zip(found.id_a, found.id_b, strict=True)
    with torch.no_grad():
        a, b = (stores.reference.encode_text(stores.tokenizer(list(ids))) for ids in (found.id_a, found.id_b))
    np.testing.assert_allclose(found.delta, (a - b).numpy().T, atol=1e-6)
    # A class is held out whole, and so it is in the folds of fit.
    held = {label for label, out in zip(found.label_a, found.holdout, strict=True) if out}
    assert found.holdout.sum() == 2
    assert len(held) == 1
    assert run([*words, "-f", str(stores.unit), "-o", str(pairs)]) == 0
    np.testing.assert_allclose(np.linalg.norm(read_pairs(pairs).features_a, axis=1), 1, atol=1e-6)
    assert run([*words, "-f", str(stores.raw), "-o", str(pairs)]) == 0
    nobody = {role: np.zeros(36, dtype=bool) for role in ("train", "val", "test")}
    with FeatureStore(stores.raw) as store:
        beside = read_usable_pairs(pairs, store, Roles(where={}, rows=nobody), "exclude", SILENT)
    folds = [np.array(found.label_a)[fold.measured].tolist() for fold in beside.folds(5, 0)]
    assert sorted(map(sorted, folds)) == [[name] * 2 for name in ("cat", "dog", "polar_bear")]


@pytest.mark.slow
def test_a_probe_of_prompts_is_a_probe_like_any_other(
    stores: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("oracle.csv").write_text("id_a,id_b\n" + "".join(f"r{24 + i},r{i}\n" for i in range(8)))
    Path("map.csv").write_text("class,text\ndog,hound\ncat,\npolar_bear,bear\n")
    for line in (
        f"pairs oracle.csv -f {stores.raw} --straddling keep -o oracle.h5",
        f"fit -f {stores.raw} --rank 0 --weight-decay 1e-2 -o fit.safetensors",
        f"zeroshot -f {stores.raw} --prompts openai --class-map map.csv -o z.safetensors",
        f"eval fit.safetensors -f {stores.raw} --where split=test --compare z.safetensors -o fit.json",
        f"eval z.safetensors -f {stores.raw} --where split=test --groups label,place -o z.json",
        f"predict z.safetensors {stores.raw} -o rows.csv",
        f"predict z.safetensors {stores.pictures} -o pictures.csv",
        f"bound z.safetensors -f {stores.raw} --oracle-pairs oracle.h5 -o bound.json",
        f"pairs --prompts {{}}@land|{{}}@sea -f {stores.raw} -o texts.h5",
        "info z.safetensors",
        "report z.safetensors z.json bound.json texts.h5 --html page.html",
    ):
        assert run(line.split()) == 0, line
    assert read_probe("z.safetensors").classes == ("dog", "cat", "polar_bear")
    assert len(Path("rows.csv").read_text().splitlines()) == 37
    rows, pictures = (
        [line.partition(",")[2] for line in sorted(Path(name).read_text().splitlines())]
        for name in ("rows.csv", "pictures.csv")
    )
    assert sorted(rows) == sorted(pictures)
    page = Path("page.html").read_text()
    assert "ncm zeroshot" in page  # how it was made
    assert "polar bear@sea" in page
    assert "a text, no picture" in page


@pytest.mark.slow
def test_what_is_not_the_stores_encoder_is_refused(
    stores: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    folder = Path(stores.model.removeprefix("local-dir:"))
    own = folder / "open_clip_model.safetensors"
    state = load_file(own)
    model = tmp_path / "clip.json"
    model.write_text((folder / "open_clip_config.json").read_text())
    weights, moved, towerless = (tmp_path / f"{name}.safetensors" for name in ("own", "moved", "images"))
    save_file(state, weights)
    manifest = stores.pictures / "m.csv"
    embedded = f"embed {manifest} --model {model} --normalize --workers 0 -o {tmp_path}"
    assert run(f"{embedded}/f.h5 --pretrained {weights}".split()) == 0
    clip, there = tmp_path / "clip", tmp_path / "there"
    shutil.copytree(folder, clip)
    assert run(f"embed {manifest} --model local-dir:{clip} --workers 0 -o {tmp_path}/l.h5".split()) == 0
    shutil.move(clip, there / "clip")
    line = f"zeroshot -f {tmp_path}/l.h5 -o {tmp_path}/z"
    assert run(line.split()) == 3
    assert run(f"{line} --pretrained {there}/clip".split()) == 0
    weights.rename(moved)
    line = f"zeroshot -f {tmp_path}/f.h5 -o {tmp_path}/z --pretrained {moved}"
    assert run(line.split()) == 0
    save_file({name: value + 1 for name, value in state.items()}, moved)
    assert run(line.split()) == 4
    assert "weights_sha256" in capsys.readouterr().err
    save_file({name: value for name, value in state.items() if name.startswith("visual.")}, towerless)
    assert run(f"{embedded}/g.h5 --pretrained {towerless}".split()) == 0
    assert run(f"zeroshot -f {tmp_path}/g.h5 -o {tmp_path}/z".split()) == 3
    assert "no complete text tower" in capsys.readouterr().err
    assert run(f"embed {manifest} --model pixels:4 -o {tmp_path}/p.h5".split()) == 0
    for command, output in (("zeroshot", "z"), ("pairs --prompts {}|{}s", "pairs.h5")):
        assert run(f"{command} -f {tmp_path}/p.h5 -o {tmp_path}/{output}".split()) == 3
        assert "no text tower" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--prompts", "a photo"], 3, "place for the class"),
        (["--prompts", "a {color} {}"], 2, "can't be read"),
        (["--classes", "1=cat,2=dog"], 3, "no row of the store is of any of these classes"),
        (["--target", "lable"], 3, "did you mean 'label'?"),
        (["--classes", "cat"], 3, "two classes or more"),
        (["--classes", "cat,cat"], 2, "can't be read"),
        (["--classes", "cat,dog=cat"], 3, "two classes with the same words"),
        (["--mix", "0.5"], 2, "go together"),
        (["--rank", "2"], 2, "need --pairs"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    options: list[str], code: int, said: str, stores: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["zeroshot", "-f", str(stores.raw), "-o", str(tmp_path / "z"), *options]) == code
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "z").exists()


@pytest.mark.slow
def test_prompts_that_are_cut_are_said(stores: Any, tmp_path: Path) -> None:
    heard, prompts = Heard(), ("a {}", "a photo of a {}" + " and so on" * 9)
    options = ZeroshotOptions(features=stores.unit, output=tmp_path / "z", prompts=prompts)
    zeroshot(options, reporter=heard)
    assert "more than 24 tokens are cut, such as 'a photo of a cat and" in heard.warnings[0]


ALIKE = {
    "missile": "Missile",
    "sea lake": "sea  lake",
    "rock & sand": "rock &amp; sand",
    "ice\u00a0floe": "ice floe",
}


@pytest.mark.parametrize(
    ("words", "other", "prompts"),
    [(*words, ("a photo of a {}",)) for words in ALIKE.items()]
    + [("missile", "Missile", ("{}", "a photo of a {}"))],
)
def test_classes_that_the_tokenizer_makes_one_of_are_refused(
    words: str, other: str, prompts: tuple[str, ...], stores: Any, tmp_path: Path
) -> None:
    """CuPL#2, mlfoundations/open_clip#917: their rows of weights were the same."""
    (tmp_path / "c.csv").write_text(f'class,text\ncat,"{words}"\ndog,"{other}"\npolar_bear,\n')
    with pytest.raises(InputError, match="two classes that the model can't tell apart") as caught:
        _made(stores.unit, tmp_path / "z", prompts=prompts, class_map=tmp_path / "c.csv")
    assert caught.value.found == "'cat' and 'dog'"
    assert repr(prompts[0]) in str(caught.value.where)
    assert not (tmp_path / "z").exists()


def test_a_prompt_that_is_cut_before_the_class_is_refused(stores: Any, tmp_path: Path) -> None:
    long = "a photo" + " and so on" * 9 + " of a {}"
    with pytest.raises(InputError, match="two classes that the model can't tell apart") as caught:
        _made(stores.unit, tmp_path / "z", prompts=("a {}", long))
    assert long in str(caught.value.where)
    assert "first 24 tokens" in str(caught.value.expected)


def test_pairs_of_prompts_that_are_the_same_tokens_are_refused(
    stores: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["pairs", "-f", str(stores.unit), "-o", str(tmp_path / "p"), "--prompts", "a {} | A  {}"]
    assert run(command) == 3
    assert "a pair of prompts that the model can't tell apart" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "p").exists()
