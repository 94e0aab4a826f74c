"""The Markdown tables of bench_best_probe.py, from its finished runs."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Found = dict[str, Any]
"""A finished run: its job, its probes on the test rows, its verdict."""

MEASURES = ("accuracy", "worst_group")

LEAST = 0.02
"""What is worth having."""


def table(heading: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a Markdown table."""
    lines = [heading, ["---"] * len(heading), *rows]
    print("\n".join(f"| {' | '.join(map(str, line))} |" for line in lines), end="\n\n")


def spread(values: Sequence[float]) -> str:
    """Mean ± standard error."""
    own = np.array(values, float)
    error = f" ± {own.std(ddof=1) / len(own) ** 0.5:.3f}" if len(own) > 1 else ""
    return f"{own.mean():.3f}{error}" if len(own) else "–"


def of(found: Found, probe: str, measure: str) -> float:
    """A measure of one probe of a run."""
    return float(found["probes"][probe][measure])


def grouped(found: Sequence[Found], *names: str) -> dict[tuple[Any, ...], list[Found]]:
    """Runs by what their jobs say."""
    groups: dict[tuple[Any, ...], list[Found]] = defaultdict(list)
    for one in found:
        groups[tuple(one["job"][name] for name in names)].append(one)
    return groups


def settings_of(found: Sequence[Found], of_run: Callable[[Found], float]) -> list[float]:
    """The mean over seeds in each setting."""
    return [float(np.mean([of_run(one) for one in own])) for own in grouped(found, "setting").values()]


def with_earlier(found: Sequence[Found], earlier: Sequence[Found]) -> list[Found]:
    """Runs of which each has the probe of an earlier version beside its own."""
    before = {json.dumps(one["job"], sort_keys=True): one for one in earlier if "error" not in one}
    made = []
    for one in found:
        same = before.get(json.dumps(one["job"], sort_keys=True))
        more = {"earlier": same["probes"]["ncm fit"]} if same else {}
        made.append(one | {"probes": one["probes"] | more})
    return made


def common(found: Sequence[Found]) -> list[str]:
    """The probes that every run has, in order."""
    return [name for name in found[0]["probes"] if all(name in one["probes"] for one in found)]


def codes(found: Sequence[Found]) -> str:
    return ", ".join(f"{code} {n}" for code, n in Counter(one["code"] for one in found).most_common())


def real(found: Sequence[Found], earlier: Sequence[Found]) -> None:
    """Means over settings of every probe, then each setting."""
    for (kind,), own in grouped(with_earlier(found, earlier), "pairs").items():
        print(f"pairs: {kind}; verdicts: {codes(own)}\n")
        rows = []
        for name in common(own):
            less = [
                spread(settings_of(own, lambda one, m=m, n=name: of(one, "ncm fit", m) - of(one, n, m)))
                for m in MEASURES
            ]
            mean = [spread(settings_of(own, lambda one, m=m, n=name: of(one, n, m))) for m in MEASURES]
            rows.append([name, *mean, *(less if name != "ncm fit" else ("–", "–"))])
        table(["probe", "accuracy", "worst group", "ncm fit less it: accuracy", "worst group"], rows)
        names = [name for name in ("ncm fit", "earlier", "erm", "erm-upweighted") if name in common(own)]
        rows = [
            [
                setting,
                *(spread([of(one, n, m) for one in runs]) for m in MEASURES for n in names),
            ]
            for (setting,), runs in grouped(own, "setting").items()
        ]
        table(["setting", *(f"{n}, {m.replace('_', ' ')}" for m in MEASURES for n in names)], rows)


def hard(found: Sequence[Found], earlier: Sequence[Found]) -> None:
    """Worst group and accuracy beside ERM and the best fixed rank (of the mean over seeds), and constants."""
    rows = []
    for keys, own in grouped(found, "generator", "pairs", "dim", "rows", "error").items():
        ranks = [name for name in common(own) if name.startswith("rank ")]
        best = max(ranks, key=lambda name: np.mean([of(one, name, "worst_group") for one in own]))
        names = ("ncm fit", "erm", best)
        means = [
            f"{np.mean([of(one, name, m) for one in own]):.3f}"
            for m in ("worst_group", "accuracy")
            for name in names
        ]
        behind = np.mean([of(one, "ncm fit", "worst_group") - of(one, best, "worst_group") for one in own])
        worse = sum(of(one, "ncm fit", "answers") < 2 <= of(one, "erm", "answers") for one in own)
        rows.append(
            [*keys, len(own), *means[:2], f"{means[2]} ({best})", f"{behind:+.3f}", *means[3:], worse]
        )
    worst = [f"worst group, {name}" for name in ("ncm fit", "ERM", "best rank")]
    right = [f"accuracy, {name}" for name in ("ncm fit", "ERM", "best rank")]
    keys = ["generator", "pairs", "dimensions", "rows", "core error", "runs"]
    table([*keys, *worst, "less best rank", *right, "constant, ERM none"], rows)
    behind = {tuple(row[:5]): float(str(row[9])) for row in rows}
    low = {key: value for key, value in behind.items() if value < -0.05}
    mean = np.mean(list(behind.values()))
    print(f"mean worst group less the best rank's {mean:+.3f}; less than -.05 in {len(low)} of {len(rows)}")
    summary = defaultdict(list)
    for (generator, kind, *_), value in behind.items():
        summary[generator, kind].append(value)
    table(["generator", "pairs", "less best rank"], [[*key, spread(own)] for key, own in summary.items()])
    print(
        f"constants where ERM is none: {sum(int(str(row[-1])) for row in rows)}; verdicts: {codes(found)}\n"
    )


def verdicts(found: Sequence[Found], earlier: Sequence[Found]) -> None:
    """How often limits hold and verdicts are right, by kind of pairs."""
    kinds = ("counterfactual", "train", "spare")
    named = {kind: [one for one in found if one["facts"]["kind"] == kind] for kind in kinds}
    named |= {"matched, classes alike": [one for one in found if _alike(one)], "all": list(found)}
    matched = [name for name in named if name not in ("counterfactual", "all")]
    print("by accuracy: classes as in training; balanced: every class alike, as matched pairs are scored\n")
    for measure, shown in (("accuracy", list(named)), ("balanced", matched)):
        print(f"{measure}:\n")
        heading = ["pairs", "problems", "upper limit ≥ error", "cell error's", "helps right", "no-gain wrong"]
        heading += ["no-gain wrong, of what is written", "gain of written", "left to the best"]
        table(heading, [_judged(kind, named[kind], measure) for kind in shown if named[kind]])
    rows = [
        [kind, *(sum(one["code"] == code for one in own) for code in CODES)] for kind, own in named.items()
    ]
    table(["pairs", *CODES], rows)
    for one in found:
        limit = (one["bound"] or {}).get("high", np.inf)
        if limit < _error(one) or (one["code"] == "helps" and _gain(one) <= 0):
            facts = {name: round(v, 2) if isinstance(v, float) else v for name, v in one["facts"].items()}
            erm = 1 - of(one, "erm", "accuracy")
            said = f"{one['code']}, limit {limit:.3f}, error {_error(one):.3f}, ERM {erm:.3f}"
            more = f"every class alike: gain {_gain(one, 'balanced'):.3f}"
            print(f"seed {one['job']['seed']}: {said}, {more}, {facts}")


CODES = ("helps", "no-gain", "undecided", "too-few", "constant", "unmeasured")


def _alike(one: Found) -> bool:
    """Whether a problem has matched pairs and two equal classes."""
    return one["facts"]["kind"] != "counterfactual" and one["facts"]["share"] == 0.5


def _error(one: Found, measure: str = "accuracy") -> float:
    return 1 - of(one, "ncm fit", measure)


def _gain(one: Found, measure: str = "accuracy") -> float:
    return of(one, "ncm fit", measure) - of(one, "erm", measure)


def _judged(kind: str, own: Sequence[Found], measure: str) -> list[object]:
    """A line of the table of verdicts."""

    def share(values: Sequence[bool]) -> str:
        return f"{sum(values)} of {len(values)}" + (f" ({np.mean(values):.1%})" if values else "")

    helps = [one for one in own if one["code"] == "helps"]
    none = [one for one in own if one["code"] == "no-gain"]
    left = [one["best"][measure] - of(one, "ncm fit", measure) for one in own]
    return [
        kind,
        len(own),
        *(
            share([one[name]["high"] >= _error(one, measure) for one in own if one[name]])
            for name in ("bound", "cell_error")
        ),
        share([_gain(one, measure) > 0 for one in helps]),
        share([one["best"][measure] - of(one, "erm", measure) >= LEAST for one in none]),
        share([one["best"][measure] - of(one, "ncm fit", measure) >= LEAST for one in none]),
        spread([_gain(one, measure) for one in own]),
        spread(left),
    ]


def augmented(found: Sequence[Found], earlier: Sequence[Found]) -> None:
    """Test accuracy against ERM, what headlines say, and warnings, by augmentation."""
    rows = []
    for (view,), own in [*grouped(found, "view").items(), (("all",), list(found))]:
        claims = [one for one in own if one["code"] in ("helps", "no-gain")]
        named = sum(str(one["augment"]) in _headline(one) for one in claims)
        still = [one for one in own if _still(one)]
        warned = sum(any("across domains doesn't fall" in text for text in one["warnings"]) for one in still)
        limits = sum(one["bound"]["high"] >= _error(one) for one in own if one["bound"])
        less = spread(settings_of(own, _gain))
        accuracies = [
            spread(settings_of(own, lambda one, n=n: of(one, n, "accuracy"))) for n in ("ncm fit", "erm")
        ]
        rows.append(
            [
                view,
                len(own),
                *accuracies,
                less,
                f"{named} of {len(claims)}",
                f"{warned} of {len(still)}",
                f"{limits} of {len(own)}",
                codes(own),
            ]
        )
    heading = [
        "view",
        "runs",
        "ncm fit",
        "ERM",
        "difference",
        "claims that name it",
        "warned where flips don't fall",
    ]
    table([*heading, "upper limit ≥ error", "verdicts"], rows)
    headlines = Counter(map(_headline, found))
    table(["headline", "runs"], [[text, n] for text, n in headlines.most_common()])


def _headline(one: Found) -> str:
    """The first words of a verdict; amounts of augmentations have a colon, too."""
    return str(one["text"]).split(": ")[0]


def _still(one: Found) -> bool:
    """Whether flips across domains were measured and don't fall."""
    before, after = one["erm_across_flip_rate"], one["across_flip_rate"]
    return before is not None and after is not None and after >= before


TABLES: dict[str, Callable[[Sequence[Found], Sequence[Found]], None]] = {
    "real": real,
    "hard": hard,
    "verdicts": verdicts,
    "augmented": augmented,
}
