"""``ncm finetune`` from manifest to report, and after a kill."""

from __future__ import annotations

import csv
import io
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ncm_cli.errors import InputError, MismatchError, UsageError
from ncm_cli.finetune.finetune import finetune, unfinished_file
from ncm_cli.finetune.options import PENALTIES, FinetuneOptions, checkpoint_files
from ncm_cli.images.embed import embed
from ncm_cli.images.options import EmbedOptions
from ncm_cli.images.weights import tuned_facts, write_tuned
from ncm_cli.options import check, command_words
from ncm_cli.pairs.options import PairsOptions
from ncm_cli.pairs.pairs import pairs
from ncm_cli.probes.evaluate import evaluate, logits
from ncm_cli.probes.metrics import decide
from ncm_cli.probes.options import EvalOptions, FitOptions
from ncm_cli.probes.reading import read_problem
from ncm_cli.progress import SILENT
from ncm_cli.results.options import ReportOptions
from ncm_cli.results.report import report
from ncm_cli.solvers.methods import FINETUNE_METHODS
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.pairs import read_pairs
from ncm_cli.store.probe import read_probe
from tests.world import Heard, write_pair_store

MODEL = "timm:test_resnet"


def options_of(data: Path, output: Path, **more: Any) -> FinetuneOptions:
    """Three short epochs of a small network on the bars."""
    given = {
        "source": data / "manifest.csv",
        "pairs": data / "pairs.h5",
        "output": output,
        "model": MODEL,
        "random_init": True,
        "image_size": 16,
        "representation": 8,
        "groups": "label,color",
        "test": "split=test",
        "epochs": 3,
        "batch_size": 16,
        "lr": 0.01,
        "penalty": 1.0,
        "workers": "0",
    } | more
    return FinetuneOptions(**{name: value for name, value in given.items() if value is not ...})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pairs": None, "method": "ncm"}, "needs --pairs"),
        ({"method": "irm"}, "irm needs --envs"),
        ({"method": "vrex"}, "vrex needs --envs"),
        ({"method": "fish", "penalty": None}, "fish needs --envs"),
        ({"meta_lr": 0.1}, "has no --meta_lr"),
        ({"protocol": "domainbed", "momentum": 0.5}, "has no --momentum"),
        ({"method": "groupdro", "penalty": None}, "groupdro needs --dro-groups"),
        ({"method": "erm"}, "has no --penalty"),
        ({"rule": "oracle", "test": None}, "needs test rows"),
        ({"rule": "worst-group", "groups": None}, "needs groups"),
        ({"model": "ViT-B-32"}, "network that ncm finetune doesn't train"),
        ({"output": Path("x.pt")}, "ends in .safetensors"),
    ],
)
def test_options_that_do_not_go_together_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check(options_of(Path("d"), **{"output": Path("run.safetensors")} | given))


@pytest.mark.slow
def test_the_files_agree_with_embed_and_eval(data: Path, tmp_path: Path) -> None:
    output = tmp_path / "run.safetensors"
    body = finetune(options_of(data, output))
    checkpoint, probe, result = checkpoint_files(output)
    store = tmp_path / "run.h5"
    embed(EmbedOptions(source=data / "manifest.csv", model=MODEL, pretrained=str(checkpoint), output=store))
    picked = body["rules"]["bound"]
    for part, own in zip(("val", "test"), body["evals"], strict=True):
        again = evaluate(
            EvalOptions(probe=probe, features=store, where=f"split={part}", groups="label,color")
        )
        for name in ("n", "accuracy", "adjusted_accuracy", "worst_group", "groups"):
            assert own[name] == again[name], name
        assert own["log_loss"] == pytest.approx(again["log_loss"], rel=1e-5)
        assert picked["metrics"][f"{part}_accuracy"] == pytest.approx(own["accuracy"], abs=1e-12)
        assert picked["metrics"][f"{part}_adjusted_accuracy"] == pytest.approx(own["adjusted_accuracy"])
        assert picked["metrics"][f"{part}_worst_group"] == own["worst_group"]["accuracy"]
    # timm itself reads the checkpoint.
    import timm

    model = timm.create_model("test_resnet", num_classes=8)
    model.load_state_dict(load_file(checkpoint))
    # Nothing is left to do, and nothing of other settings is replaced.
    stamps = [path.read_bytes() for path in checkpoint_files(output)]
    assert not finetune(options_of(data, output, workers="2"))["written"]
    assert stamps == [path.read_bytes() for path in checkpoint_files(output)]
    with pytest.raises(MismatchError, match="other settings") as refused:
        finetune(options_of(data, output, lr=0.02))
    assert "options.lr" in str(refused.value)
    assert finetune(options_of(data, output, lr=0.02, epochs=1, fresh=True))["written"]
    assert not unfinished_file(output).exists()
    assert result.exists()


@pytest.mark.slow
def test_matched_pairs_are_scored_by_the_error_on_their_members(data: Path, tmp_path: Path) -> None:
    """Counted again from the network and the probe that were kept."""
    with (data / "manifest.csv").open(newline="") as stream:
        rows = {row["id"]: row for row in csv.DictReader(stream)}
    own = [row for row in rows.values() if row["split"] in ("train", "twin")]
    table, members = tmp_path / "table.csv", []
    for label in "01":
        sides = [[row["id"] for row in own if (row["label"], row["color"]) == (label, side)] for side in "01"]
        members += list(zip(*sides, strict=False))
    assert len(members) > 16
    table.write_text("id_a,id_b\n" + "".join(f"{a},{b}\n" for a, b in members))
    output, store, matched = (tmp_path / name for name in ("run.safetensors", "run.h5", "matched.h5"))
    source = data / "manifest.csv"
    embed(EmbedOptions(source=source, model=MODEL, random_init=True, output=tmp_path / "any.h5"))
    pairs(PairsOptions(source=table, features=tmp_path / "any.h5", output=matched))
    body = finetune(options_of(data, output, pairs=matched))
    checkpoint, probe, _ = checkpoint_files(output)
    embed(EmbedOptions(source=source, model=MODEL, pretrained=str(checkpoint), output=store))
    again = tmp_path / "again.h5"
    pairs(PairsOptions(source=table, features=store, output=again))
    options = FitOptions(features=store, pairs=again, output=tmp_path / "x", upweight="none")
    problem = read_problem(options, oracle=False, reporter=SILENT)
    assert problem.cells == ("label", "color") and problem.pairs is not None
    fold = problem.pairs.folds(5, 0)[0]
    apart = {
        id
        for ids in (read_pairs(matched).id_a, read_pairs(matched).id_b)
        for id in np.array(ids)[fold.measured]
    }
    told = read_probe(probe)
    with FeatureStore(store) as features:
        kept = [i for i, id in enumerate(features.ids) if id in apart or rows[id]["split"] == "val"]
        answers = decide(logits(told, features.read(np.array(kept))))
        wrong = [
            told.classes[answer] != rows[features.ids[i]]["label"]
            for i, answer in zip(kept, answers, strict=True)
        ]
        cells = np.array([rows[features.ids[i]]["label"] + rows[features.ids[i]]["color"] for i in kept])
    found = [np.mean(np.array(wrong)[cells == cell]) for cell in np.unique(cells)]
    assert body["rules"]["bound"]["metrics"]["cell_error"] == pytest.approx(np.mean(found), abs=1e-9)


@pytest.mark.slow
def test_seeds_of_every_method_are_lines_of_a_report(data: Path, tmp_path: Path) -> None:
    for method in FINETUNE_METHODS:
        for seed in (0, 1) if method in ("ncm", "erm") else (0,):
            own = {"penalty": 1.0 if method in PENALTIES else ..., "envs": "domain", "seed": seed}
            more = {"upweight": "label,color"} if method == "groupdro" else {}
            finetune(
                options_of(
                    data, tmp_path / f"{method}{seed}.safetensors", method=method, epochs=2, **own, **more
                )
            )
    results = tuple(tmp_path.glob("*.json"))
    made = report(ReportOptions(results=results, plots=tmp_path / "figures"))
    lines = {row[0].text: row for row in made.tables[0].rows}
    assert lines.keys() == {"ncm", "erm", "irm", "vrex", "groupdro+upweight", "fish", "matchdg"}
    assert [cell.spread.n for cell in lines["ncm"][3:]] == [2, 2, 2, 2]
    assert (tmp_path / "figures" / "convergence.svg").is_file()


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(data: Path, tmp_path: Path) -> None:
    whole, killed = (tmp_path / f"{name}.safetensors" for name in ("whole", "killed"))
    asked = {"precision": "fp32", "epochs": 10, "augment": "brightness:0.5"}
    finetune(options_of(data, whole, **asked))
    given = options_of(data, killed, **asked)
    words = command_words(FinetuneOptions, vars(given))
    command = [sys.executable, "-m", "ncm_cli", "finetune", *map(str, words), "--quiet"]
    for least in (1, 4):  # in the middle of an epoch, or of writing what is known after one
        with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
            while process.poll() is None and _epochs(unfinished_file(killed)) < least:
                time.sleep(0.005)
            process.kill()
        assert process.returncode == -signal.SIGKILL
    with pytest.raises(MismatchError, match="unfinished run of other settings"):
        finetune(options_of(data, killed, **asked | {"seed": 5}))
    body = finetune(given)
    assert body["history"] == finetune(options_of(data, whole, **asked))["history"]
    assert load_equal(whole, killed)
    assert checkpoint_files(whole)[1].stat().st_size and not unfinished_file(killed).exists()
    assert not list(tmp_path.glob("*.tmp"))


def _epochs(file: Path) -> int:
    if not file.exists():
        return 0
    state = file.read_bytes().partition(b"\n")[2]
    return len(torch.load(io.BytesIO(state), weights_only=True)["history"])


def load_equal(a: Path, b: Path) -> bool:
    first, second = load_file(a), load_file(b)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_bad_pictures_and_strange_pairs_are_refused_before_training(data: Path, tmp_path: Path) -> None:
    with (data / "manifest.csv").open() as stream:
        rows = list(csv.reader(stream))
    (tmp_path / "bad.png").write_bytes(b"<html>404")
    (tmp_path / "none.png").write_bytes(b"")
    for row, name in zip((rows[1], rows[3]), ("bad.png", "none.png"), strict=True):
        row[1] = str(tmp_path / name)
    with (tmp_path / "m.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows(rows)
    shared = {"source": tmp_path / "m.csv", "root": data, "pairs": None, "penalty": None}
    with pytest.raises(InputError, match="2 of 96 images can't be used") as refused:
        finetune(options_of(data, tmp_path / "r.safetensors", **shared))
    assert rows[1][0] in str(refused.value) and rows[3][0] in str(refused.value)
    with (tmp_path / "m.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([row for row in rows if row[0] != "train3-twin"])
    with pytest.raises(InputError, match="1 members of pairs aren't in the source") as refused:
        finetune(options_of(data, tmp_path / "r.safetensors", **shared | {"pairs": data / "pairs.h5"}))
    assert "train3-twin" in str(refused.value)


@pytest.mark.slow
def test_pictures_read_at_every_epoch_give_the_same_bits(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = finetune(options_of(data, tmp_path / "kept.safetensors"))
    monkeypatch.setenv("NCM_MEMORY_MIB", "0")
    second = finetune(options_of(data, tmp_path / "read.safetensors", workers="3"))
    assert first["history"] == second["history"]
    assert np.isfinite(first["history"]["bound_01"]).all()


def test_a_checkpoint_has_the_same_bytes_each_time(tmp_path: Path) -> None:
    """Its digest is part of the fingerprint of all that comes of it."""
    facts = {"model": MODEL, "representation": 2, "image_size": None}
    files, module = [tmp_path / f"{i}.safetensors" for i in range(4)], torch.nn.Linear(2, 2)
    for file in files:
        write_tuned(file, module, facts)
        assert tuned_facts(file).items() >= facts.items()
    assert len({file.read_bytes() for file in files}) == 1


@pytest.mark.slow
def test_a_checkpoint_trained_further_keeps_its_pictures_size(data: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    finetune(options_of(data, first, epochs=1))
    further = {"pretrained": str(first), "random_init": False, "image_size": None}
    body = finetune(options_of(data, second, epochs=1, **further))
    assert tuned_facts(second)["image_size"] == 16
    store = tmp_path / "second.h5"
    embed(EmbedOptions(source=data / "manifest.csv", model=MODEL, pretrained=str(second), output=store))
    again = evaluate(EvalOptions(probe=checkpoint_files(second)[1], features=store, where="split=val"))
    assert body["evals"][0]["log_loss"] == pytest.approx(again["log_loss"], rel=1e-5)


@pytest.mark.slow
def test_pairs_of_several_stores_train_and_are_measured_store_by_store(data: Path, tmp_path: Path) -> None:
    other = read_pairs(data / "pairs.h5")
    ids = ([f"train{i}" for i in range(20, 36)], [f"train{i}" for i in range(36, 48)] * 2)
    second = write_pair_store(
        tmp_path / "q.h5", other.features_a[:12], other.features_b[:12], ids=(ids[0][:12], ids[1][:12])
    )
    stores = (data / "pairs.h5", second)
    body = finetune(options_of(data, tmp_path / "run.safetensors", pairs=stores, epochs=1))
    paired, history = body["data"]["pairs"], body["history"]
    assert [store["path"] for store in paired["stores"]] == [str(path) for path in stores]
    for name in ("used", "held_out"):
        counts = [store[name] for store in paired["stores"]]
        assert min(counts) > 0
        assert paired[name] == sum(counts)
    flips = history["flip_rate_1"][0] + history["flip_rate_2"][0]
    assert history["bound_01"][0] == pytest.approx(1 - history["val_accuracy"][0] + flips)
    again = finetune(options_of(data, tmp_path / "run.safetensors", pairs=stores, epochs=1))
    assert not again["written"], "it is up to date"


@pytest.mark.slow
def test_without_folds_all_pairs_train_and_there_is_no_bound(data: Path, tmp_path: Path) -> None:
    body = finetune(options_of(data, tmp_path / "run.safetensors", folds=0, epochs=1))
    assert body["rule"] == "in-domain"
    assert body["rules"]["bound"] is None
    assert body["data"]["pairs"]["held_out"] == 0
    assert body["data"]["pairs"]["used"] == 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"method": "matchdg", "penalty": None, "envs": "split"}, "one environment only"),
        (
            {"method": "matchdg", "penalty": None, "envs": "label"},
            "no class",
        ),
        ({"model": "timm:test_vit", "image_size": 30}, "takes no pictures of 30 × 30"),
    ],
)
def test_what_can_not_be_trained_is_refused(
    data: Path, tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        finetune(options_of(data, tmp_path / "run.safetensors", **given))


def test_training_images_that_are_validation_images_too_are_left_out(data: Path, tmp_path: Path) -> None:
    manifest = data / "with-copy.csv"
    text = (data / "manifest.csv").read_text()
    manifest.write_text(f"{text}copy,val0.png,0,train,d0,0\n")
    heard = Heard()
    given = {"source": manifest, "pairs": None, "penalty": None, "groups": None, "epochs": 1}
    finetune(options_of(data, tmp_path / "run.safetensors", **given), reporter=heard)
    assert any("1 training images are byte-identical" in warning for warning in heard.warnings)
