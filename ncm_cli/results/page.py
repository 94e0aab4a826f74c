"""The page of a report: one HTML file that needs nothing else, to look at rather than to read.

It tells of one evaluation, the *subject*, beside all others. What a probe gets wrong is computed again by its
own code on the rows that the result names, so that no further file is needed. A file that isn't there any
more, or holds something else by now, is said in its place and never shown.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import html
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from ncm_cli import __version__
from ncm_cli.errors import NcmError
from ncm_cli.options import command_words
from ncm_cli.probes import metrics
from ncm_cli.probes.apply import logits
from ncm_cli.probes.evaluate import SEEN
from ncm_cli.progress import Reporter
from ncm_cli.registry import options_of
from ncm_cli.results.lines import ORACLE, Found, Line, Sources, facts_of
from ncm_cli.results.pictures import Pictures
from ncm_cli.results.plots import dark, figures, svg
from ncm_cli.results.report import Cell, Spread, Table, interval_of, number_of, plain, spread, tables
from ncm_cli.store.columns import Groups, categories_of, make_groups, read_target
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.pairs import read_pairs
from ncm_cli.store.probe import Probe, read_probe

HERE = Path(__file__).with_name("page")

SECTIONS = {
    "groups": "Accuracy by group",
    "errors": "What it gets wrong",
    "versus": "Fixed and broken",
    "confusion": "Confusion matrix",
    "rank": "How the rank was chosen",
    "pairs": "The pairs",
    "bound": "Bound on the test risk",
    "results": "All results",
    "known": "Known values",
    "made": "How it was made",
}
"""Anchors and headings, in the order in which they stand."""

TILES = 24
"""Pictures of a gallery; one with a filter has `OF_EACH` of every group as well, up to `MOST`."""
OF_EACH, MOST = 6, 72

WIDE = 60
"""Characters of a shell line after which the next option has a line of its own."""

MATRIX = 20
"""Classes up to which the confusion matrix is drawn; of more, the most frequent confusions are listed."""


def page(sources: Sources, evals: Sequence[Line], bounds: Sequence[Line], by: str, reporter: Reporter) -> str:
    """The page of what was read, as HTML; ``evals`` and ``bounds`` are the sources' own as lines."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = "".join(path.read_text("utf-8") for path in sorted(HERE.glob("*.js")))
    with Files(sources) as files:
        context = _context(sources, evals, bounds, by, files, reporter)
    context = dict.fromkeys(SECTIONS) | context
    return environment.get_template("page.html.j2").render(
        context,
        version=__version__,
        sections={name: title for name, title in SECTIONS.items() if context[name]},
        style=Markup((HERE / "style.css").read_text("utf-8")),
        dark=Markup(dark()),
        script=Markup(script),
        script_sha256=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii"),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Located:
    """A file that another one names: where it is and what it holds, or why not."""

    path: Path
    made: Any = None
    why: str = ""


class Files(contextlib.ExitStack):
    """Finds files by what was recorded of them: among those given, moved along, or where they were."""

    _KINDS: Mapping[str, tuple[Any, str, str]] = {
        "probe": (read_probe, "sha256", "probe"),
        "features": (FeatureStore, "content_sha256", "feature store"),
        "pairs": (read_pairs, "content_sha256", "pair store"),
    }

    def __init__(self, sources: Sources) -> None:
        super().__init__()
        self._given = {
            "probe": [found.path for found in sources.probes],
            "features": sources.features,
            "pairs": [path for path, _ in sources.pairs],
        }
        self._known: dict[tuple[str, str], Located] = {}

    def find(self, kind: str, known: Mapping[str, Any] | None, now: Path, was: str | None) -> Located:
        """The file that one at ``now``, written as ``was``, records as ``known``: its path and digest."""
        known = known or {}
        word = self._KINDS[kind][2]
        path, digest = known.get("path"), known.get("sha256") or known.get("content_sha256")
        if not path:
            return Located(Path(), why=f"no {word} is recorded in {now}")
        key = (kind, digest or path)
        if key not in self._known:
            moved = [now.parent / os.path.relpath(path, Path(was).parent)] if was else []
            self._known[key] = self._find(kind, Path(path), [*self._given[kind], *moved, Path(path)], digest)
        return self._known[key]

    def _find(self, kind: str, path: Path, candidates: list[Path], digest: str | None) -> Located:
        read, attribute, word = self._KINDS[kind]
        why = f"the {word} {path} isn't there"
        for candidate in dict.fromkeys(candidates):
            if not candidate.is_file():
                continue
            try:
                made = read(candidate)
            except NcmError as error:
                why = f"the {word} {candidate} can't be read: {error.what}"
                continue
            if kind == "features":
                self.enter_context(made)
            if digest in (None, getattr(made, attribute)):
                return Located(candidate, made)
            if candidate not in self._given[kind]:
                why = f"the {word} {candidate} has changed since"
        return Located(path, why=f"{why}; name the right one beside the results")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What a probe says of n rows of a store, which are in the order of the store."""

    probe: Probe
    store: FeatureStore
    rows: NDArray[np.int64]
    truth: NDArray[Any]
    """Class codes, or numbers for regression; so is ``predicted``."""
    predicted: NDArray[Any]
    sure: NDArray[np.float64]
    """The probability of the predicted class; for regression, how far off the prediction is."""

    @classmethod
    def of(cls, probe: Probe, store: FeatureStore, body: Mapping[str, Any]) -> Answers:
        """On the rows that an eval's result is of."""
        name = body.get("target") or probe.target
        target = read_target(store, name, probe.classes or None)
        known = categories_of(store.column(name)).codes >= 0
        rows = np.flatnonzero(store.mask(body.get("where")) & known & target.known)
        scores = np.concatenate([logits(probe, features) for _, features in store.blocks(rows)])
        truth = target.y[rows]
        if not probe.classes:
            own = scores[:, 0]
            return cls(
                probe=probe, store=store, rows=rows, truth=truth, predicted=own, sure=np.abs(own - truth)
            )
        predicted = metrics.decide(scores)
        sure = np.exp(-metrics.row_log_loss(scores, predicted))
        return cls(probe=probe, store=store, rows=rows, truth=truth, predicted=predicted, sure=sure)

    @property
    def wrong(self) -> NDArray[np.bool_]:
        """Of regression all are."""
        return self.predicted != self.truth

    def caption(self, index: int) -> str:
        """True and predicted answer, with the probability of the latter."""
        pair = (self.truth[index], self.predicted[index])
        if not self.probe.classes:
            return "{:.3g} → {:.3g}".format(*pair)
        names = [self.probe.classes[int(code)] for code in pair]
        return f"{names[0]} → {names[1]}, {self.sure[index]:.2f}"


def _context(
    sources: Sources,
    evals: Sequence[Line],
    bounds: Sequence[Line],
    by: str,
    files: Files,
    reporter: Reporter,
) -> dict[str, Any]:
    """What the template shows: the head, and each section that there is something for."""
    sources = _gathered(sources, files)
    subject = _subject(sources.evals)
    rival = subject and _rival(subject, sources.evals)
    drawn = _figures(sources, evals, bounds, reporter)
    made: dict[str, list[dict[str, Any]]] = {}
    for table in tables(sources, evals, bounds, by):
        made.setdefault(_section(table.title), []).append(shown(table))
    context: dict[str, Any] = {}
    for name in ("rank", "pairs", "bound", "results", "known"):
        if made.get(name) or drawn.get(name):
            context[name] = {"figures": drawn.get(name, []), "tables": made.get(name, []), "lead": ""}
    context["made"] = _made(subject, sources, files)
    recipes = [(found.body.get("provenance") or {}).get("recipe") or {} for found in sources.runs]
    names = [recipe["name"] for recipe in recipes if recipe.get("name")]
    context["title"] = ", ".join(names) or (f"{_name(subject)} on {subject.where}" if subject else "Results")
    context["head"] = {"lead": "", "cards": [], "verdict": None, "notes": []}
    shown_groups = drawn.get("groups", [])
    if subject is not None:
        own = next((one for one in sources.probes if _is_of(subject, one)), None)
        context["head"] = _head(subject, rival, evals, own.body if own else {})
        if own is not None and "rank" in context:
            context["rank"]["lead"] = _choice(own.body)
        shown_groups = [one for one in shown_groups if one["caption"].startswith(f"{subject.where} (")]
        context |= _looked_at(subject, rival, sources, files)
    if shown_groups or context.get("groups"):
        context["groups"] = {"table": None, **context.get("groups", {}), "figures": shown_groups}
    return context


def _is_of(found: Found, probe: Found) -> bool:
    """Whether an evaluation is of a probe."""
    known = probe.facts.seeded.get("fit probe")
    return known is not None and known.digest == (found.body.get("probe") or {}).get("sha256")


def _choice(meta: Mapping[str, Any]) -> str:
    """How a probe's rank was chosen, in a sentence."""
    selection = meta.get("selection") or {}
    path, rule = selection.get("path") or [], selection.get("rule")
    if len(path) < 2:
        return ""
    chosen = path[selection["chosen"]]
    how = "the least sum of validation error and flip rate" if rule == "bound" else f"by {rule}"
    mark = f"{ORACLE}: " * bool(selection.get("oracle"))
    return (
        f"{mark}Of {len(path):,} candidates of rank {path[0]['rank']} to {path[-1]['rank']}, "
        f"rank {chosen['rank']} with weight decay {chosen['weight_decay']:g} was chosen: {how}."
    )


def _section(title: str) -> str:
    """Where a table of the report stands."""
    starts = {"Known": "known", "Bound": "bound", "Test accuracy": "bound", "Did": "rank", "Pairs": "pairs"}
    return next((name for start, name in starts.items() if title.startswith(start)), "results")


def _gathered(sources: Sources, files: Files) -> Sources:
    """The sources with the probes that the evaluations are of, and the pairs that these were fitted with."""
    probes, pairs = list(sources.probes), list(sources.pairs)
    for found in sources.evals:
        own = files.find("probe", found.body.get("probe"), found.path, _written(found.body))
        if own.made is not None and own.path not in [one.path for one in probes]:
            meta = own.made.meta
            probes.append(Found(own.path, meta, facts_of(own.path, meta, itself=own.made)))
    for found in probes:
        known = (found.body.get("data") or {}).get("pairs")
        store = files.find("pairs", known, found.path, _written(found.body))
        if store.made is not None and store.path not in [path for path, _ in pairs]:
            pairs.append((store.path, store.made))
    return dataclasses.replace(sources, probes=probes, pairs=pairs)


def _written(body: Mapping[str, Any]) -> str | None:
    """The file as the command that wrote it was told."""
    return (body.get("options") or {}).get("output")


def _name(found: Found) -> str:
    return str((found.body.get("probe") or {}).get("method") or "probe")


def _subject(evals: Sequence[Found]) -> Found | None:
    """The evaluation that the page tells of: first on rows that its probe hasn't seen, then not ERM's."""

    def rank(one: Found) -> tuple[Any, ...]:
        seen = sum((one.body.get("overlap") or {}).values())
        return seen > 0, _name(one) == "erm", one.body.get("oracle") is True

    return min(evals, key=rank, default=None)


def _rival(subject: Found, evals: Sequence[Found]) -> Found | None:
    """The evaluation of another probe on the same rows, ERM's if there is one: of the same seed first."""

    def same(one: Found) -> bool:
        keys = ((own.body.get("features"), own.where, own.body.get("target")) for own in (one, subject))
        return len({str(key) for key in keys}) == 1 and one.body.get("probe") != subject.body.get("probe")

    return min(
        filter(same, evals),
        key=lambda one: (_name(one) != "erm", one.path.parent != subject.path.parent),
        default=None,
    )


def _head(
    subject: Found, rival: Found | None, evals: Sequence[Line], meta: Mapping[str, Any]
) -> dict[str, Any]:
    """The numbers that everybody asks for first, with their marks, and the verdict on the pairs.

    ``meta`` is the probe's; empty where that isn't known.
    """
    line = next(own for own in evals if subject in own.found)
    other = next((own for own in evals if rival in own.found), None)
    names = ("accuracy", "worst_group") if subject.body.get("task") != "regression" else ("mse", "r2")
    wheres = list(dict.fromkeys(one.where for one in line.found))
    cards = []
    for where in sorted(wheres, key=lambda where: where == subject.where):
        bodies = [one.body for one in line.found if one.where == where]
        seen = [part for part in SEEN if any((body.get("overlap") or {}).get(part) for body in bodies)]
        marks = [ORACLE] * line.oracle + [SEEN[part][0] for part in seen]
        for name in names if where == subject.where else names[:1]:
            value = _spread(bodies, name)
            theirs = other and _spread([one.body for one in other.found if one.where == where], name)
            if value is None:
                continue
            mean, text = f"{value.mean:.3f}", plain(Cell(spread=value))
            card: dict[str, Any] = {"what": f"{name.replace('_', ' ')}, {where}", "marks": marks}
            card |= {"value": mean, "spread": text.removeprefix(mean).strip()}
            card["against"] = f"{other.label} {theirs.mean:.3f}" if other and theirs else ""
            cards.append(card)
    notes = [f"{ORACLE}: chosen by looking at the test rows"] * line.oracle
    notes += [*(meta.get("flags") or []), *(subject.body.get("warnings") or [])]
    probe, repeated = subject.body.get("probe") or {}, len(line.found) // len(wheres)
    lead = f"{line.label}, rank {probe.get('rank', 'unknown')}"
    lead += f" chosen by {line.selection}" if line.rule else ""
    lead += f"; {subject.body.get('n', 0):,} rows of {subject.where}"
    if repeated > 1:
        lead += f"; mean ± standard deviation over {repeated} seeds, what follows is of {subject.path}"
    verdict = (meta.get("selection") or {}).get("verdict")
    return {"lead": lead, "cards": cards, "verdict": verdict, "notes": notes}


def _spread(bodies: Sequence[Mapping[str, Any]], name: str) -> Spread | None:
    found = [dict(body) for body in bodies]
    interval = interval_of(found[0], name) if len(found) == 1 else None
    return spread([number_of(body, name) for body in found], interval)


def _looked_at(subject: Found, rival: Found | None, sources: Sources, files: Files) -> dict[str, Any]:
    """The sections that need rows: groups, errors, what is fixed and broken, confusion."""
    context: dict[str, Any] = {}
    if table := _group_table(subject, rival):
        context["groups"] = {"table": table}
    own = _answers(subject, files)
    if isinstance(own, str):
        return context | {"errors": {"missing": f"No pictures: {own}."}}
    asked = (subject.body.get("options") or {}).get("groups")
    groups = make_groups(own.store, asked or (own.probe.target if own.probe.classes else ""))
    look = _Look(own, groups, Pictures())
    context["errors"] = look.errors(subject)
    if own.probe.classes:
        context["confusion"] = _confusion(own)
        name, theirs = _other(subject, rival, own, sources, files)
        if isinstance(theirs, str):
            context["versus"] = {"missing": f"Nothing to compare with: {theirs}."} if theirs else None
        elif theirs.probe.classes == own.probe.classes:
            context["versus"] = look.versus(theirs, name)
    return context


def _other(
    subject: Found, rival: Found | None, own: Answers, sources: Sources, files: Files
) -> tuple[str, Answers | str]:
    """Another probe's name and answers on the same rows, or why there are none; "" where none is named.

    It is the rival evaluation's, else what the subject was compared with, else one among the sources.
    """
    if rival is not None:
        return _name(rival), _answers(rival, files)
    compared = (subject.body.get("options") or {}).get("compare")
    known = [{"path": compared}] if compared else []
    known += [{"path": str(one.path)} for one in sources.probes if not _is_of(subject, one)]
    found = [files.find("probe", one, subject.path, _written(subject.body)) for one in known]
    for one in found:
        if one.made is not None and one.made.fingerprint == own.probe.fingerprint:
            name = str(one.made.meta.get("method") or one.path.stem)
            return name, Answers.of(one.made, own.store, subject.body)
    return "", next((one.why for one in found if compared), "")


def _answers(found: Found, files: Files) -> Answers | str:
    """What an evaluation's probe says of its rows; or why that can't be told."""
    was = _written(found.body)
    probe = files.find("probe", found.body.get("probe"), found.path, was)
    store = files.find("features", found.body.get("features"), found.path, was)
    for one in (probe, store):
        if one.made is None:
            return one.why
    try:
        return Answers.of(probe.made, store.made, found.body)
    except NcmError as error:  # a result of another version or program
        return f"{error.what} ({error.found})"


@dataclasses.dataclass(frozen=True, slots=True)
class _Look:
    """Galleries of rows."""

    own: Answers
    groups: Groups
    pictures: Pictures

    def name(self, group: int) -> str:
        return _joined(self.groups.key(group))

    def errors(self, subject: Found) -> dict[str, Any]:
        """Of the worst group, and of all rows: those that the probe is surest of come first."""
        own, classes = self.own, bool(self.own.probe.classes)
        wrong = own.wrong
        ranked = np.flatnonzero(wrong)[np.argsort(-own.sure[wrong], kind="stable")]
        count = f"{len(ranked):,} of {len(wrong):,} rows are wrong. " if classes else ""
        lead = "Under each picture: true → predicted" + (
            ", and the probability of the prediction." if classes else "; those furthest off come first."
        )
        worst, key = None, (subject.body.get("worst_group") or {}).get("group")
        keys = [self.groups.key(index) for index in range(len(self.groups.keys))]
        if key in keys and len(keys) > 1:
            index = keys.index(key)
            inside = (self.groups.codes[own.rows] == index).any(axis=1)
            here = ranked[inside[ranked]]
            part = f"{len(here):,} of {int(inside.sum()):,} wrong" if classes else f"{len(here):,} rows"
            worst = {"title": f"Worst group: {_joined(key)} ({part})"} | self.gallery(here[:TILES], own)
        title = "Most confident errors" if classes else "Furthest off"
        confident = {"title": title} | self.gallery(self.some(ranked), own, ranked)
        return {"lead": count + lead, "worst": worst, "confident": confident, "missing": ""}

    def versus(self, theirs: Answers, name: str) -> dict[str, Any]:
        """Rows that one of two probes gets right."""
        own = self.own
        hits, others = ~own.wrong, ~theirs.wrong
        found = metrics.compare(hits, others)
        lead = (
            f"Against {name} (accuracy {metrics.mean(others):.3f}): {found.difference:+.3f}, 95 % interval "
            f"{found.ci_low:+.3f} to {found.ci_high:+.3f}; McNemar's p = {found.p_value:.2g}. Under "
            "each picture: true → predicted by the one that is wrong, and its probability."
        )
        parts = {}
        for part, mask, wrong in (("fixed", hits & ~others, theirs), ("broken", others & ~hits, own)):
            ranked = np.flatnonzero(mask)[np.argsort(-wrong.sure[mask], kind="stable")]
            right = f"only {name} gets right" if part == "broken" else f"{name} gets wrong"
            title = f"{part.capitalize()}: {len(ranked):,} rows that {right}"
            parts[part] = {"title": title} | self.gallery(self.some(ranked, 12, 3), wrong, ranked)
        return {"lead": lead, "missing": "", **parts}

    def some(
        self, ranked: NDArray[np.int64], first: int = TILES, of_each: int = OF_EACH
    ) -> NDArray[np.int64]:
        """The first of all rows and the first of each group, in their order."""
        group = self.group(ranked)
        place = np.zeros(len(ranked), dtype=np.int64)
        for one in np.unique(group):
            place[group == one] = np.arange(int((group == one).sum()))
        return ranked[(np.arange(len(ranked)) < first) | (place < of_each)][:MOST]

    def group(self, ranked: NDArray[np.int64]) -> NDArray[np.int64]:
        """The group of each row in the first crossing; −1 where it is in none."""
        codes = self.groups.codes[self.own.rows[ranked]]
        return codes[:, 0] if codes.shape[1] else np.full(len(ranked), -1, dtype=np.int64)

    def gallery(
        self, chosen: NDArray[np.int64], answers: Answers, every: NDArray[np.int64] | None = None
    ) -> dict[str, Any]:
        """Tiles of rows; with ``every`` row that they are chosen from, a filter by group."""
        group, store = self.group(chosen), self.own.store
        tiles = [
            {
                "tile": self.pictures.row(store, int(self.own.rows[index])),
                "caption": answers.caption(index),
                "group": int(own),
            }
            for index, own in zip(chosen.tolist(), group, strict=True)
        ]
        counts = np.unique(self.group(every), return_counts=True) if every is not None else ((), ())
        options = [
            (int(one), f"{self.name(int(one))} ({count:,})")
            for one, count in zip(*counts, strict=True)
            if one >= 0
        ]
        return {"tiles": tiles, "filter": options if len(options) > 1 else []}


def _joined(group: Mapping[str, str]) -> str:
    return ", ".join(f"{column}={value}" for column, value in group.items())


def _group_table(subject: Found, rival: Found | None) -> dict[str, Any] | None:
    """Groups with rows, the worst first, beside the rival's."""
    entries = subject.body.get("groups") or []
    measure = "mse" if subject.body.get("task") == "regression" else "accuracy"
    present = [entry for entry in entries if entry["n"] and entry.get(measure) is not None]
    if len(present) < 2:
        return None
    columns = list(dict.fromkeys(name for entry in entries for name in entry["group"]))
    theirs = {_joined(entry["group"]): entry for entry in (rival.body.get("groups") or [] if rival else [])}
    rows = []
    for entry in sorted(
        present, key=lambda entry: entry[measure] if measure == "accuracy" else -entry[measure]
    ):
        row = [Cell(entry["group"].get(column, "")) for column in columns]
        row += [Cell(f"{entry['n']:,}"), Cell(spread=_of_group(entry, measure))]
        if rival and _name(rival):
            other = theirs.get(_joined(entry["group"]), {})
            known = other.get(measure) is not None
            row.append(Cell(spread=_of_group(other, measure) if known else None))
            row.append(Cell(spread=Spread(entry[measure] - other[measure]) if known else None))
        rows.append(row)
    more = [_name(rival), "difference"] if rival else []
    absent = len(entries) - len(present)
    note = f"of {subject.path}; brackets are 95 % Wilson intervals" if measure == "accuracy" else ""
    note += f"; {absent} groups have no row here" if absent else ""
    return shown(
        Table(
            f"{_name(subject)} on {subject.where}", [*columns, "n", measure, *more], rows, len(columns), note
        )
    )


def _of_group(entry: Mapping[str, Any], measure: str) -> Spread:
    return Spread(entry[measure], low=entry.get("ci_low"), high=entry.get("ci_high"))


def _confusion(own: Answers) -> dict[str, Any]:
    """Counts of true by predicted class; of many classes the most frequent confusions."""
    names = own.probe.classes
    counts = np.zeros((len(names), len(names)), dtype=np.int64)
    np.add.at(counts, (own.truth, own.predicted), 1)
    totals = counts.sum(axis=1)
    if len(names) <= MATRIX:
        rows = [
            (
                names[i],
                [
                    {"n": int(n), "share": n / max(totals[i], 1), "right": i == j}
                    for j, n in enumerate(counts[i])
                ],
            )
            for i in range(len(names))
        ]
        return {"classes": names, "rows": rows, "table": None}
    np.fill_diagonal(counts, 0)
    first = np.argsort(-counts, axis=None, kind="stable")[:MATRIX]
    found = [(i, j) for i, j in zip(*np.unravel_index(first, counts.shape), strict=True) if counts[i, j]]
    cells = [
        [
            Cell(names[i]),
            Cell(names[j]),
            Cell(f"{counts[i, j]:,}"),
            Cell(spread=Spread(counts[i, j] / totals[i])),
        ]
        for i, j in found
    ]
    title = f"The {len(cells)} most frequent confusions of {len(names):,} classes"
    return {"table": shown(Table(title, ("true", "predicted", "rows", "share of the class"), cells, 2))}


def _made(subject: Found | None, sources: Sources, files: Files) -> dict[str, Any]:
    """The commands of the subject's files, versions, and the digest of each file."""
    versions: dict[str, Any] = {"ncm": subject.body.get("ncm_version") if subject else __version__}
    for run in sources.runs:
        versions |= (run.body.get("provenance") or {}).get("versions") or {}
    listed = [[Cell(name), Cell(str(value))] for name, value in versions.items() if value]
    results = [*sources.evals, *sources.bounds, *sources.sweeps, *sources.runs]
    every = [(one.path, one.body.get("kind"), one.body.get("content_sha256")) for one in results]
    every += [(one.path, "probe", one.facts.seeded["fit probe"].digest) for one in sources.probes]
    every += [(path, "pairs", store.content_sha256) for path, store in sources.pairs]
    rows = [[Cell(str(part or "")) for part in one] for one in every]
    title = "Files, with the digest of their contents"
    made = [shown(Table("Versions", ("package", "version"), listed, 2))]
    made.append(shown(Table(title, ("file", "kind", "SHA-256"), rows, 3), code=(0, 2)))
    return {"lines": _shell_lines(subject, files) if subject else [], "tables": made}


def _shell_lines(subject: Found, files: Files) -> list[str]:
    """The commands that made the subject, from the folder of its run if it is of one; as far as is known."""
    was, now, run = _written(subject.body) or "", subject.path.absolute(), subject.facts.run
    store = files.find("features", subject.body.get("features"), subject.path, was)
    probe = files.find("probe", subject.body.get("probe"), subject.path, was)
    meta = probe.made.meta if probe.made else {}
    pairs = files.find("pairs", (meta.get("data") or {}).get("pairs"), probe.path, _written(meta))
    steps: list[tuple[str, str, Mapping[str, Any]]] = [
        ("embed", "source", store.made.options if store.made else {}),
        ("pairs", "holdout", pairs.made.options if pairs.made else {}),
        ("fit", "select", meta.get("options") or {}),
        ("eval", "probe", subject.body.get("options") or {}),
    ]
    name = f"/{now.relative_to(run)}" if run else ""
    base = was.removesuffix(name[1:]) if name and was.endswith(name) else ""
    lines = [f"cd {shlex.quote(base)}"] if base else []
    for kind, own, given in steps:
        if own not in given:  # made by another command, as by a builder or a sweep, or unknown
            continue
        broken = [f"ncm {kind}"]
        for word in command_words(options_of(kind), given):
            text = shlex.quote(word.removeprefix(base))
            if word.startswith("-") and len(broken[-1]) > WIDE:
                broken.append(text)
            else:
                broken[-1] += f" {text}"
        lines.append(" \\\n    ".join(broken))
    return lines


def shown(table: Table, code: Sequence[int] = ()) -> dict[str, Any]:
    """A table for the template: of each cell its text, its interval, whether it is bold, what it sorts by.

    Columns ``code`` are names or digests, to be read letter by letter.
    """
    rows = []
    for row in table.rows:
        cells = []
        for cell in row:
            text = plain(cell, intervals=False)
            more = plain(cell).removeprefix(text).strip()
            key = cell.spread.mean if cell.spread else None
            cells.append({"text": text, "more": more, "bold": cell.bold, "key": key})
        rows.append(cells)
    return {
        "title": table.title,
        "columns": table.columns,
        "left": table.left,
        "note": table.note,
        "rows": rows,
        "code": code,
    }


PLACES = {
    "groups": "groups",
    "rank-path": "rank",
    "accuracy": "bound",
    "bound": "bound",
    "spectrum": "pairs",
}
"""The section of figures whose name begins so; others are beside all results."""


def _figures(
    sources: Sources, evals: Sequence[Line], bounds: Sequence[Line], reporter: Reporter
) -> dict[str, list[dict[str, Any]]]:
    """The figures of each section."""
    found: dict[str, list[dict[str, Any]]] = {}
    for plot in figures(sources, evals, bounds, reporter):
        section = next((PLACES[start] for start in PLACES if plot.name.startswith(start)), "results")
        # HTML knows these names; their addresses would look like links to who reads the source.
        made = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg(plot)).replace("xlink:href", "href")
        made = re.sub(r' width="([\d.]+)pt" height="[\d.]+pt"', _larger, made, count=1)
        titled = f">{html.escape(plot.title, quote=False)}</text>" in made
        found.setdefault(section, []).append({"svg": Markup(made), "caption": plot.title, "titled": titled})
    return found


def _larger(width: re.Match[str]) -> str:
    return f' style="width: {1.25 * float(width[1]):.0f}pt"'
