"""Whether ``ncm fit`` by default writes the best probe that the data allow, and whether its verdict is true.

    export OMP_NUM_THREADS=1
    python tests/benchmarks/bench_best_probe.py real --pacs P.h5 --leaves L.h5 -o real.jsonl
    python tests/benchmarks/bench_best_probe.py hard -o hard.jsonl --processes 8
    python tests/benchmarks/bench_best_probe.py verdicts --seeds 300 -o verdicts.jsonl
    python tests/benchmarks/bench_best_probe.py augmented --pacs P.h5 --views gray=G.h5 blur=B.h5 -o v.jsonl
    python tests/benchmarks/bench_best_probe.py --smoke                  a little of everything, in seconds

Stores are made by ``ncm embed FOLDER --layout domain/label``, views with ``--augment`` as well. Each finished
run is a line of the file that -o names, and a run that is there already isn't repeated. Markdown tables are
printed at the end. --earlier FILE compares with the lines of another version (PYTHONPATH=OTHER, the same
command).

``real``: a class in one domain in 45 of 50 training rows, reversed in the test, as in recipes/dogs.yaml;
pairs of training rows, and with spare rows. ``hard``: generators of `best_probe_problems`, beside fixed
ranks, of which an oracle takes the best. ``verdicts``: one simulated problem a seed. ``augmented``: pairs of
training rows and their views. ± is a standard error: over seeds in a setting, over settings in a mean.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from best_probe_problems import GENERATORS, Problem, draw_any, draw_hard, write_store
from best_probe_tables import TABLES

from ncm_cli.errors import InputError
from ncm_cli.pairs.options import PairsOptions
from ncm_cli.pairs.pairs import pairs
from ncm_cli.probes.evaluate import evaluate
from ncm_cli.probes.fit import fit
from ncm_cli.probes.options import EvalOptions, FitOptions
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.tables import write_csv

Job = dict[str, Any]

SETTINGS = {
    "dog/elephant art_painting/cartoon": ("pacs", "dog", "elephant", "art_painting", "cartoon"),
    "house/person photo/art_painting": ("pacs", "house", "person", "photo", "art_painting"),
    "giraffe/horse cartoon/sketch": ("pacs", "giraffe", "horse", "cartoon", "sketch"),
    "guitar/horse photo/sketch": ("pacs", "guitar", "horse", "photo", "sketch"),
    "dog/person photo/cartoon": ("pacs", "dog", "person", "photo", "cartoon"),
    "person/dog art_painting/sketch": ("pacs", "person", "dog", "art_painting", "sketch"),
    "healthy/late_blight GH/RS": ("leaves", "healthy", "late_blight", "GH", "RS"),
    "healthy/late_blight RS/GH": ("leaves", "healthy", "late_blight", "RS", "GH"),
}
"""Store, first and second class, and the domains where most of either are."""

SPLITS = ("train", "val", "test")
COMMON, RARE = (45, 15, 5), (5, 2, 45)
"""Images of each split of a group that is common or rare in training."""

SIZES = ("64x500", "64x6000", "512x3000", "64x50000")
"""Dimensions and training rows of hard problems. Only the first generator has every size and error."""

LARGE = 6000
"""Training rows above which one seed is enough."""

ERRORS = (0.15, 0.2, 0.25, 0.3)
RANKS = (1, 2, 4, 8, 16)
PAIRS = 200


class Heard(Reporter):
    """Keeps the warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, message: str) -> None:
        self.warnings.append(message)


def measured(probe: Path, features: Path) -> dict[str, float]:
    """A probe on the test rows."""
    found = evaluate(EvalOptions(probe=probe, features=features, where="split=test", groups="label,domain"))
    return {
        "accuracy": found["accuracy"],
        "balanced": found["balanced_accuracy"],
        "worst_group": found["worst_group"]["accuracy"],
        "answers": found["predicted_classes"],
    }


def match(folder: Path, kind: str, seed: int, count: int | None = None) -> int:
    """Write pairs.h5: random pairs of training rows (train) and spare rows, or nearest ones; how many."""
    options = {
        "match": "nearest" if kind == "nearest" else "random",
        "same": "label",
        "across": "domain",
        "where": "split=train|pool" if kind == "spare" else "split=train",
        "features": folder / "features.h5",
        "seed": seed,
        "output": folder / "pairs.h5",
    }
    try:
        return int(pairs(PairsOptions(**options, count=count))["pairs"])
    except InputError as error:
        if count is None or "more pairs than can be made" not in error.what:
            raise
        return int(pairs(PairsOptions(**options))["pairs"])


def fitted(folder: Path, scaling: str, seed: int, **changed: Any) -> dict[str, Any]:
    """``ncm fit`` by default on features.h5 and pairs.h5: its probes in the test, its verdict."""
    heard, features = Heard(), folder / "features.h5"
    options = {
        "features": features,
        "pairs": folder / "pairs.h5",
        "output": folder / "probe.safetensors",
        "scaling": scaling,
        "seed": seed,
        "save_controls": folder / "controls",
    }
    body = fit(FitOptions(**options | changed), reporter=heard)
    verdict = body["verdict"]
    found = {"ncm fit": measured(folder / "probe.safetensors", features)}
    if changed.get("save_controls", True):
        controls = sorted((folder / "controls").glob("*.safetensors"))
        found |= {path.stem: measured(path, features) for path in controls if path.stem != "constant"}
    facts = {name: body.get(name) for name in ("rank", "weight_decay", "upweight", "pair_rows", "pairs")}
    told = {name: verdict.get(name) for name in ("code", "text", "bound", "cell_error", "gain")}
    for name in ("across_flip_rate", "erm_across_flip_rate"):
        told[name] = (verdict.get(name) or {}).get("value")
    return {"probes": found, **facts, **told, "warnings": heard.warnings}


def beside(folder: Path, scaling: str, seed: int, **changed: Any) -> dict[str, float]:
    """Another fit on the same files, on the test rows."""
    output, options = folder / "beside.safetensors", {"scaling": scaling, "seed": seed, "save_controls": None}
    fit(
        FitOptions(
            features=folder / "features.h5", pairs=folder / "pairs.h5", output=output, **options | changed
        )
    )
    return measured(output, folder / "features.h5")


@cache
def rows_of(store: Path) -> tuple[np.ndarray, dict[str, np.ndarray], list[str], dict[str, Any]]:
    """Features, label and domain, ids and encoder of a store."""
    with FeatureStore(store) as opened:
        columns = {name: np.array(opened.columns[name].text()) for name in ("label", "domain")}
        X = np.asarray(opened.rows_of(np.arange(opened.rows))[:], np.float32)
        return X, columns, list(opened.ids), dict(opened.encoder)


def dealt(folder: Path, store: Path, setting: tuple[str, ...], seed: int) -> None:
    """Write features.h5: the rows of two classes in two domains, dealt to splits."""
    X, columns, ids, encoder = rows_of(store)
    _, first, second, domain, other = setting
    rng, kept, splits = np.random.default_rng(seed), [], []
    for label in (first, second):
        for place in (domain, other):
            own = rng.permutation(np.flatnonzero((columns["label"] == label) & (columns["domain"] == place)))
            common = (label == first) == (place == domain)
            given = np.repeat(SPLITS, COMMON if common else RARE).tolist()
            kept += own.tolist()
            splits += given + ["pool"] * (len(own) - len(given))
    chosen = {name: values[kept] for name, values in columns.items()} | {"split": splits}
    write_store(folder / "features.h5", X[kept], chosen, ids=[ids[i] for i in kept], encoder=encoder)


def real(job: Job, stores: dict[str, Path]) -> dict[str, Any]:
    setting = SETTINGS[job["setting"]]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dealt(folder, stores[setting[0]], setting, job["seed"])
        match(folder, job["pairs"], job["seed"])
        found = fitted(folder, "norm", job["seed"])
        found["probes"]["method ncm"] = beside(folder, "norm", job["seed"], method="ncm")
    return found


def augmented(job: Job, stores: dict[str, Path], views: dict[str, Path]) -> dict[str, Any]:
    setting = SETTINGS[job["setting"]]
    view = views[f"{job['view']} {setting[0]}"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dealt(folder, stores[setting[0]], setting, job["seed"])
        options = {"features": folder / "features.h5", "features_b": view}
        pairs(PairsOptions(match="same-id", where="split=train", output=folder / "pairs.h5", **options))
        _, _, _, encoder = rows_of(view)
        found = fitted(folder, "norm", job["seed"])
        return found | {"augment": (encoder.get("view") or {}).get("augment")}


def hard(job: Job) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder, seed = Path(name), job["seed"]
        problem = draw_hard(
            seed, job["generator"], job["dim"], job["rows"], job["error"], spare=job["pairs"] == "spare"
        )
        problem.write(folder / "features.h5")
        match(folder, job["pairs"], seed, PAIRS)
        found = fitted(folder, "none", seed)
        for rank in RANKS:
            own = beside(folder, "none", seed, method="ncm", rank=str(rank))
            found["probes"][f"rank {rank}"] = own
    return found


def verdicts(job: Job) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder, seed = Path(name), job["seed"]
        problem = draw_any(seed)
        problem.write(folder / "features.h5")
        made = paired(folder, problem, seed)
        found = fitted(folder, "none", seed)
        found["best"] = best(folder, seed)
    return found | {"facts": problem.facts | {"pairs": made}}


def best(folder: Path, seed: int) -> dict[str, float]:
    """The best that any candidate of ``ncm fit``, fitted on all rows and pairs, gets in the test."""
    # Of other versions only the other parts run.
    from ncm_cli.probes.choose import auto_ranks
    from ncm_cli.probes.metrics import row_errors
    from ncm_cli.probes.reading import read_problem
    from ncm_cli.probes.selection import stacked
    from ncm_cli.solvers.solve import train_path

    options = FitOptions(
        features=folder / "features.h5",
        pairs=folder / "pairs.h5",
        output=Path("unused"),
        test="split=test",
        seed=seed,
    )
    problem = read_problem(options, oracle=True, reporter=SILENT)
    assert problem.test is not None
    right: dict[str, list[np.ndarray]] = {"accuracy": [], "balanced": []}
    for variant in problem.variants:
        whole = problem.whole(variant)
        solver = dataclasses.replace(options.solving, tolerance=1e-4)
        fits = train_path(whole, solver, ranks=auto_ranks(whole.rank), decays=options.decays)
        rows = problem.test.scaled(whole.scaling)
        same = row_errors(*stacked(fits), rows)[0] == 0
        right["accuracy"].append(same.mean(axis=1))
        right["balanced"].append(np.mean([same[:, rows.y == y].mean(axis=1) for y in (0, 1)], axis=0))
    return {name: float(np.concatenate(values).max()) for name, values in right.items()}


def paired(folder: Path, problem: Problem, seed: int) -> int:
    """Write pairs.h5 of a simulated problem; how many there are."""
    if problem.kind != "counterfactual":
        return match(folder, problem.kind, seed, problem.pairs)
    table = folder / "pairs.csv"
    write_csv(table, ("id_a", "id_b"), problem.twins)
    files = {"source": table, "features": folder / "features.h5", "output": folder / "pairs.h5"}
    return int(pairs(PairsOptions(**files, kind="counterfactual"))["pairs"])


def views_of(named: Iterable[str], stores: dict[str, Path]) -> dict[str, Path]:
    """The views of each store, which have all of its ids: ``gray pacs``."""
    found = {}
    for text in named:
        name, _, file = text.partition("=")
        ids = set(rows_of(Path(file))[2])
        found |= {f"{name} {key}": Path(file) for key, own in stores.items() if ids >= set(rows_of(own)[2])}
    return found


def jobs_of(
    part: str, args: argparse.Namespace, stores: dict[str, Path], views: dict[str, Path]
) -> Iterator[Job]:
    """What a part runs, the first seed of everything first."""
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    if part == "verdicts":
        yield from ({"part": part, "seed": seed} for seed in seeds)
    settings = [name for name, setting in SETTINGS.items() if setting[0] in stores]
    for seed in seeds if part in ("real", "augmented") else ():
        for setting in settings:
            job = {"part": part, "setting": setting, "seed": seed}
            if part == "real":
                yield from (job | {"pairs": kind} for kind in ("train", "spare"))
            for view in views if part == "augmented" else ():
                name, _, store = view.rpartition(" ")
                if store == SETTINGS[setting][0]:
                    yield job | {"view": name}
    for seed in seeds if part == "hard" else ():
        for generator in args.generators:
            first = generator == GENERATORS[0]
            for dim, rows in (tuple(map(int, size.split("x"))) for size in args.sizes):
                if (rows > LARGE and seed != args.first_seed) or ((rows > LARGE or dim > 64) and not first):
                    continue
                for error in ERRORS if first else ERRORS[1::2]:
                    size = {"dim": dim, "rows": rows, "error": error, "generator": generator}
                    for kind in ("train", "nearest", "spare"):
                        yield {"part": part, "seed": seed, **size, "pairs": kind}


def lines_of(file: Path) -> list[dict[str, Any]]:
    """The finished runs of a file; the half line that a killed run left is none."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines


def timed(job: Job, works: dict[str, Callable[[Job], dict[str, Any]]]) -> dict[str, Any]:
    """A job with what it found; an error that a user would see is one of the findings."""
    try:
        return {"job": job, **works[job["part"]](job)}
    except InputError as error:
        return {"job": job, "error": str(error)}


def run_all(
    jobs: Iterable[Job], work: Callable[[Job], dict[str, Any]], output: Path | None, processes: int
) -> list[dict[str, Any]]:
    """Run what isn't in the file yet, and add each run to it as it ends."""
    known = {json.dumps(one["job"], sort_keys=True): one for one in (lines_of(output) if output else ())}
    every = [(json.dumps(job, sort_keys=True), job) for job in jobs]
    left = [job for key, job in every if key not in known]
    several = multiprocessing.get_context("spawn").Pool(processes) if processes > 1 else None
    with several or contextlib.nullcontext():
        for number, found in enumerate(several.imap_unordered(work, left) if several else map(work, left), 1):
            known[json.dumps(found["job"], sort_keys=True)] = found
            if output:
                with output.open("a", encoding="utf-8") as stream:
                    # A line of its own, whatever a killed run left.
                    stream.write(("\n" if number == 1 else "") + json.dumps(found) + "\n")
            print(f"\r{number} of {len(left)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return [known[key] for key, _ in every]


WORKS: dict[str, Callable[..., dict[str, Any]]] = {
    "real": real,
    "hard": hard,
    "verdicts": verdicts,
    "augmented": augmented,
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(WORKS)}; without any, all")
    parser.add_argument("--seeds", type=int, help="5; of verdicts, 300")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--pacs", type=Path, help="feature store of PACS, with the columns label and domain")
    parser.add_argument("--leaves", type=Path, help="the same of tomato leaves of two stations")
    parser.add_argument(
        "--views", nargs="*", default=[], metavar="NAME=FILE", help="augmented views of either"
    )
    parser.add_argument("--generators", nargs="*", default=list(GENERATORS), choices=list(GENERATORS))
    parser.add_argument("--sizes", nargs="*", default=SIZES, choices=SIZES, help="of hard: dimensions x rows")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path, help="file of finished runs, which goes on from there")
    parser.add_argument("--earlier", type=Path, help="such a file of another version, to compare with")
    parser.add_argument("--smoke", action="store_true", help="a few runs, to see that it works")
    args = parser.parse_args(arguments)
    parts = args.parts or list(WORKS)
    if strange := set(parts) - set(WORKS):
        parser.error(f"no part named {', '.join(sorted(strange))}: {', '.join(WORKS)}")
    with tempfile.TemporaryDirectory() as folder:
        if args.smoke:
            args.pacs, args.leaves, args.views = made_up(Path(folder))
        stores = {name: own for name in ("pacs", "leaves") if (own := getattr(args, name)) is not None}
        views = views_of(args.views, stores)
        works = {**WORKS, "real": partial(real, stores=stores)}
        works["augmented"] = partial(augmented, stores=stores, views=views)
        for part in parts:
            own = argparse.Namespace(
                **vars(args) | {"seeds": args.seeds or (300 if part == "verdicts" else 5)}
            )
            jobs = list(jobs_of(part, own, stores, views))
            if args.smoke:
                jobs = {"real": jobs[:2], "verdicts": jobs[:3], "augmented": jobs[:1]}.get(part, jobs[:1])
            if not jobs:
                print(f"{part}: nothing to run; real needs --pacs or --leaves, augmented --views as well\n")
                continue
            found = run_all(jobs, partial(timed, works=works), args.output, args.processes)
            failed = [one for one in found if "error" in one]
            for one in failed:
                print(f"failed: {one['job']}: {one['error']}", file=sys.stderr)
            earlier = lines_of(args.earlier) if args.earlier else []
            TABLES[part]([one for one in found if "error" not in one], earlier)


def made_up(folder: Path) -> tuple[Path, None, list[str]]:
    """Stores of noise in the form of PACS and of a view of it."""
    rng, pacs = np.random.default_rng(0), [one for one in SETTINGS.values() if one[0] == "pacs"]
    labels = sorted({name for setting in pacs for name in setting[1:3]})
    domains = sorted({name for setting in pacs for name in setting[3:]})
    columns = {"label": np.tile(np.repeat(labels, 80), len(domains))}
    columns["domain"] = np.repeat(domains, 80 * len(labels))
    X = rng.normal(size=(len(columns["label"]), 24))
    for name, values in columns.items():
        for code, value in enumerate(np.unique(values)):
            X[values == value, 7 * (name == "domain") + code] += 3
    turned = X + 3 * rng.normal(size=len(X))[:, None] * np.eye(24)[8]
    files = folder / "pacs.h5", folder / "gray.h5"
    encoder = {"kind": "array", "model": "noise"}
    write_store(files[0], X, columns, encoder=encoder)
    write_store(files[1], turned, columns, encoder=encoder | {"view": {"augment": "grayscale"}})
    return files[0], None, [f"gray={files[1]}"]


if __name__ == "__main__":
    main(sys.argv[1:])
