"""Whether pairs of two kinds remove two nuisances that pairs of one kind alone leave, and what verdicts say.

    export OMP_NUM_THREADS=1
    python tests/benchmarks/bench_two_nuisances.py made -o made.jsonl
    python tests/benchmarks/bench_two_nuisances.py pacs --pacs P.h5 --gray G.h5 -o pacs.jsonl
    python tests/benchmarks/bench_two_nuisances.py --smoke               a little of it, in seconds

``made``: simulated rows whose colour and position each agree with the label in 9 of 10 training rows. Pairs
are twins in the other colour, and twins in the other position (``counterfactual``) or rows of one label in
different positions (``matched``). In ``few positions`` there are 20 times as many colour pairs; in ``idle
position`` the position tells nothing of the label, so that its pairs have nothing to remove.
``pacs``: two classes, most pictures of one class in one domain and in colour, most of the other in another
domain and in grey (P.h5 by ``ncm embed FOLDER --layout domain/label``, G.h5 with ``--augment grayscale`` as
well). Pairs are a training row and the same picture in grey, or in colour, and random pairs across domains,
to which 15 spare pictures of each class and domain belong as well.

Test rows have every combination equally often; the worst group is the worst of these. A store's verdict is
right if it says ``helps`` and the error falls by .02 or more on rows on which its nuisance alone is turned
against the label, or if it says ``no-gain`` and the error doesn't. Each finished run is a line of the file
that -o names; a run that is there isn't repeated. ± is the standard deviation over seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from best_probe_problems import write_store

from ncm_cli.pairs.options import PairsOptions
from ncm_cli.pairs.pairs import pairs
from ncm_cli.probes.evaluate import evaluate
from ncm_cli.probes.fit import fit
from ncm_cli.probes.options import EvalOptions, FitOptions
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.tables import write_csv

Job = dict[str, Any]

SETTINGS = ("counterfactual", "matched", "few positions", "idle position")
DIM, TRAIN, VAL, EACH = 64, 2000, 600, 500
AGREE, TEST_OF_CELL = 0.9, 28
CLASSES = {
    "dog/elephant art_painting/cartoon": ("dog", "elephant", "art_painting", "cartoon"),
    "giraffe/horse cartoon/sketch": ("giraffe", "horse", "cartoon", "sketch"),
    "house/person photo/art_painting": ("house", "person", "photo", "art_painting"),
    "guitar/horse photo/cartoon": ("guitar", "horse", "photo", "cartoon"),
}
"""First and second class, and the domains where most of either are."""

LEAST_FALL = 0.02
"""A smaller fall of the error is none: it is the verdict's own limit of no gain."""


def draw_made(folder: Path, setting: str, seed: int) -> dict[str, tuple[str, ...]]:
    """Write features.h5 and the pair stores of a simulated problem; the columns that tell each nuisance."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(DIM, 7)))[0].T
    colour_pairs, position_pairs = (1000, 50) if setting == "few positions" else (200, 200)
    cells = np.array(list(itertools.product((-1, 1), repeat=3)) * EACH)
    n = TRAIN + VAL
    label = rng.choice((-1, 1), n)
    colour, position = (np.where(rng.random(n) < AGREE, label, -label) for _ in range(2))
    if setting == "idle position":
        position = rng.choice((-1, 1), n)
    drawn = np.concatenate([np.stack([label, colour, position], axis=1), cells])
    split = np.repeat(["train", "val", "test"], [TRAIN, VAL, len(cells)])
    noise, size = rng.normal(size=(len(drawn), DIM)), 1 + 0.3 * rng.normal(size=(len(drawn), 6))

    def rows(which: np.ndarray, turned: int | None = None) -> np.ndarray:
        """Features of some rows; of their twins with one nuisance ``turned`` (1 colour, 2 position)."""
        told = drawn[which].copy()
        fresh = noise[which]
        if turned is not None:
            told[:, turned] *= -1
            fresh = fresh + 0.3 * rng.normal(size=fresh.shape)  # a twin is no exact one
        X = fresh + 1.0 * told[:, :1] * basis[0]
        X += (1.2 * size[which, :3] * told[:, 1:2]) @ basis[1:4]
        return X + (1.2 * size[which, 3:] * told[:, 2:]) @ basis[4:7]

    X, ids = [rows(np.arange(len(drawn)))], [f"r{row}" for row in range(len(drawn))]
    columns = [drawn]
    splits = [split]
    kinds = {"colour": (1, colour_pairs), "position": (2, position_pairs)}
    order = rng.permutation(TRAIN)
    for name, (at, count) in kinds.items():
        chosen, order = order[:count], order[count:]
        twins = drawn[chosen].copy()
        twins[:, at] *= -1
        X.append(rows(chosen, at))
        ids += [f"{name}-{row}" for row in chosen]
        columns.append(twins)
        splits.append(np.repeat("twin", count))
        write_csv(folder / f"{name}.csv", ("id_a", "id_b"), [(f"r{row}", f"{name}-{row}") for row in chosen])
    told = np.concatenate(columns)
    words = {"label": ("a", "b"), "colour": ("red", "green"), "position": ("left", "right")}
    texts = {
        name: np.array(two)[(told[:, at] > 0).astype(int)] for at, (name, two) in enumerate(words.items())
    }
    write_store(folder / "features.h5", np.concatenate(X), texts | {"split": np.concatenate(splits)}, ids=ids)
    for name in kinds:
        _pair(folder, name, source=folder / f"{name}.csv", kind="counterfactual")
    if setting == "matched":
        _pair(folder, "position", match="random", same="label", across="position", where="split=train")
    return {"colour": ("colour",), "position": ("position",)}


def draw_pacs(folder: Path, setting: str, seed: int, pacs: Path, gray: Path) -> dict[str, tuple[str, ...]]:
    """Write features.h5 of two classes, with the pair stores, from PACS in colour and in grey."""
    first, second, here, there = CLASSES[setting]
    rng = np.random.default_rng(seed)
    with FeatureStore(pacs) as colour, FeatureStore(gray) as grey:
        ids, label, domain = [*colour.ids], colour.categorical("label"), colour.categorical("domain")
        views = [np.asarray(store.rows_of(np.arange(store.rows))[:]) for store in (colour, grey)]
        if ids != [*grey.ids]:
            raise SystemExit("the two stores have different rows")
    names = {
        "label": np.array(label.categories)[label.codes],
        "domain": np.array(domain.categories)[domain.codes],
    }
    chosen: list[tuple[int, int, str]] = []
    for at, cls in enumerate((first, second)):
        for domain_at, place in enumerate((here, there)):
            own = rng.permutation(np.flatnonzero((names["label"] == cls) & (names["domain"] == place)))
            common = at == domain_at
            counts = {"train": 45 if common else 5, "val": 12 if common else 2, "pool": 15}
            start = 0
            for split, count in counts.items():
                grey_of = rng.random(count) < (AGREE if at else 1 - AGREE)
                chosen += [
                    (int(row), int(is_grey), split)
                    for row, is_grey in zip(own[start : start + count], grey_of, strict=True)
                ]
                start += count
            # Test pictures are shown both ways, so that every combination is equally frequent.
            chosen += [
                (int(row), is_grey, "test") for row in own[start:][:TEST_OF_CELL] for is_grey in (0, 1)
            ]
    at = [row for row, *_ in chosen]
    shown = np.array([is_grey for _, is_grey, _ in chosen])
    split = [part for *_, part in chosen]
    columns = {
        "label": names["label"][at],
        "domain": names["domain"][at],
        "colour": np.array(["colour", "grey"])[shown],
        "split": split,
    }
    keys = [f"{ids[row]}{'#grey' if is_grey else ''}" for row, is_grey, _ in chosen]
    both = np.stack(views)
    write_store(folder / "features.h5", both[shown, at], columns, ids=keys)
    write_store(folder / "other.h5", both[1 - shown, at], columns, ids=keys)
    _pair(folder, "gray", match="same-id", features_b=folder / "other.h5", where="split=train")
    _pair(folder, "random", match="random", same="label", across="domain", where="split=train|pool")
    return {"gray": ("colour",), "random": ("domain",)}


def _pair(folder: Path, name: str, **options: Any) -> None:
    given = {"features": folder / "features.h5", "output": folder / f"{name}.h5", "seed": 0} | options
    given["output"].unlink(missing_ok=True)
    pairs(PairsOptions(**given))


def measured(probe: Path, folder: Path, nuisances: Iterable[str]) -> dict[str, Any]:
    """A probe on the test rows: accuracy, the worst group, and the error where each nuisance is turned."""
    columns = ",".join(["label", *nuisances])
    known = evaluate(
        EvalOptions(probe=probe, features=folder / "features.h5", where="split=test", groups=columns)
    )
    return {
        "accuracy": known["accuracy"],
        "worst_group": known["worst_group"]["accuracy"],
        "groups": [[*group["group"].values(), group["accuracy"]] for group in known["groups"]],
    }


def turned_error(found: dict[str, Any], at: int, majorities: list[dict[str, str]]) -> float:
    """The mean error of groups in which only nuisance ``at`` isn't that of most training rows."""
    errors = []
    for label, *values, accuracy in found["groups"]:
        as_usual = [usual[label] == value for usual, value in zip(majorities, values, strict=True)]
        if [place for place, usual in enumerate(as_usual) if not usual] == [at]:
            errors.append(1 - accuracy)
    return float(np.mean(errors))


def usual_values(folder: Path, column: str) -> dict[str, str]:
    """The commonest value of a column for each label, among the training rows."""
    with FeatureStore(folder / "features.h5") as store:
        train = store.mask("split=train")
        values, labels = store.categorical(column), store.categorical("label")
        return {
            name: values.categories[int(np.bincount(values.codes[train & (labels.codes == code)]).argmax())]
            for code, name in enumerate(labels.categories)
        }


def run_one(job: Job, draw: Callable[[Path], dict[str, tuple[str, ...]]], options: dict[str, Any]) -> Job:
    """Fit with the pairs of each kind, of both, and of none; what each does on the test rows."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        nuisances = draw(folder)
        columns = [column for of_store in nuisances.values() for column in of_store]
        stores = [folder / f"{name}.h5" for name in nuisances]
        found: dict[str, Any] = {}
        given = {"features": folder / "features.h5", "output": folder / "probe.safetensors"} | options
        for name, own in {
            "none": None,
            **dict(zip(nuisances, stores, strict=True)),
            "both": tuple(stores),
        }.items():
            changed = {"rank": "0", "method": "erm"} if own is None else {}
            report = fit(FitOptions(**given | changed, pairs=own))
            found[name] = measured(given["output"], folder, columns) | {"rank": report["rank"]}
            if (verdict := report["verdict"]) is not None:
                found[name]["code"] = verdict["code"]
                found[name]["stores"] = [
                    {
                        "code": store["code"],
                        "flips": [store["erm_flip_rate"]["value"], store["flip_rate"]["value"]],
                    }
                    for store in verdict.get("stores", ())
                ]
                found[name]["upper"] = verdict["bound"] and verdict["bound"]["high"]
        usual = [usual_values(folder, column) for column in columns]
        errors = {
            name: [turned_error(found[name], at, usual) for at in range(2)] for name in ("none", "both")
        }
        falls = [before - after for before, after in zip(errors["none"], errors["both"], strict=True)]
        return job | {"kinds": [*nuisances], "found": found, "falls": falls}


def jobs(parts: Iterable[str], seeds: int, smoke: bool) -> Iterator[Job]:
    """All runs."""
    for part in parts:
        settings = SETTINGS if part == "made" else tuple(CLASSES)
        for setting in settings[: 1 if smoke else None]:
            yield from ({"part": part, "setting": setting, "seed": seed} for seed in range(seeds))


def table(lines: list[Job]) -> str:
    """The worst groups, ranks and verdicts of each setting, in Markdown."""
    head = "| setting | pairs | worst group | accuracy | rank | verdicts |\n|---|---|---|---|---|---|"
    rows = [head]
    for setting in dict.fromkeys(line["setting"] for line in lines):
        runs = [line for line in lines if line["setting"] == setting]
        for name in runs[0]["found"]:
            own = [run["found"][name] for run in runs]
            worst, right = (_spread([one[key] for one in own]) for key in ("worst_group", "accuracy"))
            ranks = ", ".join(str(one["rank"]) for one in own)
            codes = [one.get("code", "") for one in own]
            rows.append(f"| {setting} | {name} | {worst} | {right} | {ranks} | {_counted(codes)} |")
        for at, kind in enumerate(runs[0]["kinds"]):
            codes = [run["found"]["both"]["stores"][at]["code"] for run in runs]
            said = [code == "helps" for code in codes]
            known = [code in ("helps", "no-gain") for code in codes]
            falls = [run["falls"][at] for run in runs]
            right = sum(
                says == (fall >= LEAST_FALL)
                for says, fall, told in zip(said, falls, known, strict=True)
                if told
            )
            flips = np.mean([run["found"]["both"]["stores"][at]["flips"] for run in runs], axis=0)
            rows.append(
                f"| {setting} | of both: {kind} | error where it is turned falls by {_spread(falls)} | flips "
                f"{flips[0]:.3f} → {flips[1]:.3f} | | {_counted(codes)}; right {right} of {sum(known)} |"
            )
    return "\n".join(rows)


def _spread(values: list[float]) -> str:
    return f"{np.mean(values):.3f} ± {np.std(values, ddof=1) if len(values) > 1 else 0:.3f}"


def _counted(codes: list[str]) -> str:
    return ", ".join(f"`{code}` {codes.count(code)}" for code in dict.fromkeys(codes) if code)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=[], help="made, pacs")
    parser.add_argument("--pacs", type=Path)
    parser.add_argument("--gray", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--setting", help="only this setting")
    parser.add_argument("--method", help="of ncm fit; ncm leaves out group weights and the pairs' rows")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    file = asked.output
    done = [json.loads(line) for line in file.read_text().splitlines()] if file and file.exists() else []
    lines = []
    options = {"rank": "0:6", "weight_decay": "1e-2,1e-1"} if asked.smoke else {}
    for job in jobs(asked.parts or ["made"], 1 if asked.smoke else asked.seeds, asked.smoke):
        if asked.setting not in (None, job["setting"]):
            continue
        old = next((line for line in done if job.items() <= line.items()), None)
        if old is None:
            setting, seed = job["setting"], job["seed"]

            def draw(folder: Path, job: Job = job, setting: str = setting, seed: int = seed) -> Any:
                if job["part"] == "made":
                    return draw_made(folder, setting, seed)
                return draw_pacs(folder, setting, seed, asked.pacs, asked.gray)

            method = {"method": asked.method} if asked.method else {}
            old = run_one(
                job, draw, options | method | ({"scaling": "norm"} if job["part"] == "pacs" else {})
            )
            if file:
                with file.open("a") as stream:
                    stream.write(json.dumps(old) + "\n")
        lines.append(old)
    print(table(lines))


if __name__ == "__main__":
    main()
