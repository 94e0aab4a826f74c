"""The page of a report: one self-contained HTML file with pictures and plots.

It is about one evaluation, the *subject*, and shows the others beside it. What the probe gets wrong is
computed again from the probe and the rows that the result names. Where a file is missing or has changed
since, the page says so instead of showing it.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from ncm_cli import __version__
from ncm_cli.errors import InputError, NcmError
from ncm_cli.options import command_words
from ncm_cli.probes import metrics
from ncm_cli.probes.evaluate import SEEN, Answers, answers_of
from ncm_cli.progress import Reporter
from ncm_cli.registry import options_of
from ncm_cli.results.figures import figures
from ncm_cli.results.lines import ORACLE, Line, Source, Sources
from ncm_cli.results.located import FileFinder, written
from ncm_cli.results.pictures import PAIR_BUDGET, PAIR_SIDE, Thumbnails, look
from ncm_cli.results.plots import image_url
from ncm_cli.results.repetitions import facts_of
from ncm_cli.results.row_map import map_of
from ncm_cli.results.similar import TrainingRows
from ncm_cli.results.tables import Cell, ReportTable, Spread, cells, measured, ranks_of, trained_on
from ncm_cli.store.columns import categories_of
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.probe import Probe
from ncm_cli.store.roles import Groups, make_groups, read_target

Codes = NDArray[np.int64]

HERE = Path(__file__).with_name("page")

SECTIONS = {
    "groups": ("Accuracy by group", "groups"),
    "errors": ("What it gets wrong",),
    "versus": ("Fixed and broken",),
    "map": ("What was removed",),
    "near": ("Nearly equal to training rows",),
    "confusion": ("Confusion matrix",),
    "rank": ("How the rank was chosen", "rank-path", "Did the pairs help"),
    "pairs": ("The pairs", "spectrum", "Pairs"),
    "bound": ("Bound on the test risk", "accuracy", "bound", "Bound", "Test accuracy"),
    "results": ("All results",),
    "known": ("Known values", "Known values"),
    "made": ("How it was made",),
}
"""By anchor, in page order: the heading, then the name and title prefixes of its figures and tables. Anything
unmatched goes under "All results"."""

MAX_TILES, MAX_GROUP_TILES, MAX_GALLERY = 24, 6, 72
"""Most pictures in a gallery: from all rows, from each group if there is a group filter, and in total."""

MAX_MATRIX = 20
"""Most classes in a confusion matrix; with more, that many of the most frequent confusions are listed."""


def page(
    sources: Sources,
    evals: Sequence[Line],
    bounds: Sequence[Line],
    made: Sequence[ReportTable],
    reporter: Reporter,
) -> str:
    """The HTML page of the sources and the tables ``made`` of them; ``evals`` and ``bounds`` are lines."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = "".join(path.read_text("utf-8") for path in sorted(HERE.glob("*.js")))
    with FileFinder(sources) as files:
        context = _context(files, evals, bounds, made, reporter)
    return environment.get_template("page.html.j2").render(
        dict.fromkeys(SECTIONS) | context,
        version=__version__,
        sections={name: title for name, (title, *_) in SECTIONS.items() if context.get(name)},
        style=Markup("".join(path.read_text("utf-8") for path in sorted(HERE.glob("*.css"), reverse=True))),
        script=Markup(script),
        script_sha256=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii"),
    )


def _caption(answers: Answers, index: int) -> str:
    """The true and the predicted answer, and the latter's probability."""
    pair, names = (answers.truth[index], answers.predicted[index]), answers.probe.classes
    if not names:
        return "{:.3g} → {:.3g}".format(*pair)
    return "{} → {}, {:.2f}".format(*(_apart(names[code]) for code in pair), answers.confidence[index])


def _context(
    files: FileFinder,
    evals: Sequence[Line],
    bounds: Sequence[Line],
    made: Sequence[ReportTable],
    reporter: Reporter,
) -> dict[str, Any]:
    """The template's variables: the head, and every section that isn't empty."""
    sources, context = files.sources, dict[str, Any]()
    subject = _subject(evals, files)

    def part(name: str) -> Any:
        anchors = (anchor for anchor, (_, *starts) in SECTIONS.items() if name.startswith(tuple(starts)))
        return context.setdefault(next(anchors, "results"), {"lead": "", "figures": [], "tables": []})

    for plot in figures(sources, evals, bounds, reporter):
        if (
            subject is None
            or not plot.name.startswith("groups")
            or plot.title.startswith(f"{subject.where} (")
        ):
            part(plot.name)["figures"].append((plot, image_url(plot)))
    for table in made:
        part(table.title)["tables"].append(table)
    if sources.pairs:
        part("Pairs")["looks"] = _looks(subject, files)
    recipes = [(run.body.get("provenance") or {}).get("recipe") or {} for run in sources.runs]
    title = ", ".join(recipe["name"] for recipe in recipes if recipe.get("name"))
    context |= {"title": title or "Results", "head": None, "made": _made(subject, files)}
    if subject is not None:
        context["title"] = title or f"{_name(subject)} on {subject.where}"
        rival = _rival(subject, sources.evals)
        probe = files.of(subject, "probe").content
        context["head"] = _head(subject, rival, evals, probe.meta if probe else {})
        if (groups := _group_table(subject, rival)) is not None:
            part("groups")["tables"].append(groups)
        context |= _looked_at(subject, rival, files)
    return context


def _looks(subject: Source | None, files: FileFinder) -> list[dict[str, Any]]:
    """The doubtful pairs of the subject's probe; without a subject, of every pair store."""
    pictures, shown = Thumbnails(side=PAIR_SIDE, budget=PAIR_BUDGET), files.sources.pairs
    if subject is not None and (probe := files.of(subject, "probe")).content is not None:
        of_probe = files.pair_stores(Source(probe.path, probe.content.meta, subject.facts))
        paths = [located.path for located in of_probe]
        shown = [(path, store) for path, store in shown if path in paths] or shown
    looks = []
    for path, store in shown:
        if "suspects" not in store.diagnostics:  # made by a builder, which looks for none
            continue
        named = Source(path, {"options": store.options}, facts_of(path, {}))
        stores = [files.of(named, "feature store", **source) for source in store.sources]
        looks.append(look(path, store, stores, pictures))
    return looks


def _name(source: Source) -> str:
    return str((source.body.get("probe") or {}).get("method") or "probe")


def _subject(evals: Sequence[Line], files: FileFinder) -> Source | None:
    """The evaluation that the page is about; None if there is none.

    Preferred, in this order: rows that its probe hasn't seen, a method other than ERM, a rule that isn't an
    oracle, most verdicts that the pairs help, the largest mean gain. So test rows never influence the choice.
    (Bounds themselves aren't comparable, since each refers to rows that differ as that probe's own pairs do.)
    """

    def rank(candidate: tuple[Line, Source]) -> tuple[Any, ...]:
        line, source = candidate
        probes = (files.of(repetition, "probe").content for repetition in line.sources)
        verdicts = [((probe.meta.get("selection") or {}).get("verdict") or {}) for probe in probes if probe]
        helped = sum(known.get("code") == "helps" for known in verdicts)
        gain = Spread.of((known.get("gain") or {}).get("value") for known in verdicts)
        seen = any((source.body.get("overlap") or {}).values())
        return seen, _name(source) == "erm", line.oracle, -helped, -gain.mean if gain else 0.0

    candidates = ((line, source) for line in evals for source in line.sources)
    return min(candidates, key=rank, default=(None, None))[1]


def _rival(subject: Source, evals: Sequence[Source]) -> Source | None:
    """An evaluation of another probe on the same rows, preferably of ERM and in the same folder."""

    def rows(source: Source) -> tuple[Any, ...]:
        features = source.body.get("features") or {}
        return features.get("content_sha256"), source.where, source.body.get("target")

    def probe(source: Source) -> Any:
        return (source.body.get("probe") or {}).get("sha256")

    rivals = [other for other in evals if rows(other) == rows(subject) and probe(other) != probe(subject)]
    rivals.sort(key=lambda other: (_name(other) != "erm", other.path.parent != subject.path.parent))
    return rivals[0] if rivals else None


def _head(
    subject: Source, rival: Source | None, evals: Sequence[Line], meta: Mapping[str, Any]
) -> dict[str, Any]:
    """The headline numbers with their marks, and the verdict on the pairs.

    ``meta`` is the probe's, empty if it isn't known.
    """
    line = next(line for line in evals if subject in line.sources)
    other = next((line for line in evals if rival in line.sources), None)
    names = ("accuracy", "worst_group") if subject.body.get("task") != "regression" else ("mse", "r2")
    wheres = list(dict.fromkeys(source.where for source in line.sources))
    cards = []
    for where in sorted(wheres, key=lambda where: where == subject.where):
        overlaps = [source.body.get("overlap") or {} for source in line.sources if source.where == where]
        marks = [ORACLE] * line.oracle
        marks += [SEEN[part][0] for part in SEEN if any(overlap.get(part) for overlap in overlaps)]
        for name in names if where == subject.where else names[:1]:
            if (value := measured(line.sources, where, name)) is not None:
                theirs = measured(other.sources, where, name) if other else None
                what = f"{name.replace('_', ' ')}, {where}"
                against = f"{other.label} {theirs.mean:.3f}" if other and theirs else ""
                cards.append({"what": what, "marks": marks, "value": Cell(spread=value), "against": against})
    notes = [f"{ORACLE}: chosen by looking at the test rows"] * line.oracle
    notes += [*(meta.get("flags") or []), *(subject.body.get("warnings") or [])]
    lead = f"{line.label}, rank {ranks_of(line.sources) or 'unknown'}"
    lead += f", {extra}" if (extra := trained_on(meta)) else ""
    lead += f" chosen by {line.selection}" if line.rule not in ("", "only-candidate") else ""
    lead += f"; {subject.body.get('n', 0):,} rows of {subject.where}"
    if (seeds := len(line.sources) // len(wheres)) > 1:
        lead += f"; mean ± standard deviation over {seeds} seeds; "
        lead += f"the rest of this page is about {subject.path}"
    verdict = (meta.get("selection") or {}).get("verdict")
    return {"lead": lead, "cards": cards, "verdict": verdict, "notes": notes}


def _group_table(subject: Source, rival: Source | None) -> ReportTable | None:
    """The groups that have rows, the worst first, beside the rival's; None for fewer than two."""
    name, sign = ("mse", -1) if subject.body.get("task") == "regression" else ("accuracy", 1)
    entries = subject.body.get("groups") or []
    present = [entry for entry in entries if entry["n"] and entry.get(name) is not None]
    columns = list(dict.fromkeys(column for entry in entries for column in entry["group"]))
    theirs = {_joined(entry["group"]): entry for entry in (rival.body.get("groups") or [] if rival else [])}

    def value(entry: Mapping[str, Any]) -> Spread | None:
        known = entry.get(name)
        return None if known is None else Spread(known, low=entry.get("ci_low"), high=entry.get("ci_high"))

    rows = []
    for entry in sorted(present, key=lambda entry: sign * entry[name]):
        other = theirs.get(_joined(entry["group"]), {})
        gap = Spread(entry[name] - other[name]) if other.get(name) is not None else None
        row = [entry["group"].get(column, "") for column in columns] + [f"{entry['n']:,}", value(entry)]
        rows.append(cells(*row, *([value(other), gap] if rival else [])))
    extra = [_name(rival), "difference"] if rival else []
    note = f"of {subject.path}" + ("; brackets are 95 % Wilson intervals" if sign > 0 else "")
    note += f"; {len(entries) - len(present)} more groups have no row here" * (len(entries) > len(present))
    title = f"{_name(subject)} on {subject.where}"
    return (
        ReportTable(title, [*columns, "n", name, *extra], rows, len(columns), note) if len(rows) > 1 else None
    )


def _joined(group: Mapping[str, str]) -> str:
    return ", ".join(f"{_apart(column)}={_apart(value)}" for column, value in group.items())


def _apart(text: str) -> str:
    """A user's text isolated, so that right-to-left writing doesn't reorder the text around it."""
    return text if text.isascii() else f"\u2068{text}\u2069"


def _looked_at(subject: Source, rival: Source | None, files: FileFinder) -> dict[str, Any]:
    """The sections that need rows: errors, fixed and broken rows, confusion."""
    answers = _answers(subject, files)
    if isinstance(answers, str):
        return {"errors": {"missing": f"No pictures: {answers}."}}
    store = files.of(subject, "feature store").content
    asked = (subject.body.get("options") or {}).get("groups")
    groups = make_groups(store, asked or (answers.probe.target if answers.probe.classes else ""))
    probe = files.of(subject, "probe")
    trained_on = files.of(Source(probe.path, probe.content.meta, subject.facts), "feature store").content
    training = TrainingRows.of(answers, store, trained_on) if trained_on is not None else None
    pictures = Thumbnails()
    galleries = _Galleries(answers, store, groups, pictures, training)
    context: dict[str, Any] = {"errors": galleries.errors(subject)}
    if training is not None:
        context["near"] = training.near(answers, store, pictures)
    if answers.probe.classes:
        name, theirs = _other(subject, rival, answers.probe, files)
        context["confusion"] = _confusion(answers)
        shown = [(answers, _name(subject))]
        if isinstance(theirs, str):
            context["versus"] = {"missing": f"Nothing to compare with: {theirs}."} if theirs else {}
        elif theirs.probe.classes == answers.probe.classes:
            context["versus"] = galleries.versus(theirs, name)
            shown.append((theirs, name))
        context["map"] = map_of(
            shown,
            store,
            galleries.group(np.arange(len(answers.rows))),
            say_row=lambda index: _caption(answers, index),
            say_group=lambda code: _joined(groups.key(code)),
        )
    return context


def _answers_on(probe: Probe, store: FeatureStore, body: Mapping[str, Any]) -> Answers:
    """A probe's answers for the rows of an eval's result."""
    name, where = body.get("target") or probe.target, body.get("where")
    known = read_target(store, name, probe.classes or None).known
    rows = np.flatnonzero(store.mask(where) & known & (categories_of(store.column(name)).codes >= 0))
    if not len(rows):
        raise InputError("the store has none of the result's rows", where=store.path, found=where)
    return answers_of(probe, store.path, store, rows, name)


def _answers(source: Source, files: FileFinder, **other: str) -> Answers | str:
    """The predictions of an evaluation's probe, or another one, on its rows; or why there are none."""
    probe, store = files.of(source, "probe", **other), files.of(source, "feature store")
    if probe.why or store.why:
        return probe.why or store.why
    try:
        return _answers_on(probe.content, store.content, source.body)
    except NcmError as error:  # a result of another version or program
        return f"{error.what} ({error.found})"


def _other(
    subject: Source, rival: Source | None, probe: Probe, files: FileFinder
) -> tuple[str, Answers | str]:
    """Another probe's name and answers for the same rows, or why there are none; "" if none is named.

    It is the rival evaluation's probe, else what the subject was compared with, else one of the sources.
    """
    if rival is not None:
        return _name(rival), _answers(rival, files)
    compared = (subject.body.get("options") or {}).get("compare")
    paths = [compared] if compared else [str(other.path) for other in files.sources.probes]
    why = ""
    for path in paths:
        answers = _answers(subject, files, path=path)
        if isinstance(answers, str):
            why = answers
        elif answers.probe.sha256 != probe.sha256:
            return str(answers.probe.meta.get("method") or Path(path).stem), answers
    return "", why


@dataclasses.dataclass(frozen=True, slots=True)
class _Galleries:
    """Pictures of rows, with what the subject's probe predicts."""

    answers: Answers
    store: FeatureStore
    groups: Groups
    pictures: Thumbnails
    training: TrainingRows | None

    def errors(self, subject: Source) -> dict[str, Any]:
        """The most confident errors of the worst group and of all rows."""
        answers, worst = self.answers, None
        classes = bool(answers.probe.classes)
        ranked = answers.surest(~answers.right)
        confident, in_worst_group = self.some(ranked), ranked[:0]
        lead = "Under each picture: true → predicted"
        if classes:
            lead = f"{len(ranked):,} of {len(answers.rows):,} rows are wrong. {lead}"
        lead += ", and the probability of the prediction." if classes else "; those furthest off come first."
        if self.training is not None:
            lead += " Beside it: the most similar training rows, by the cosine of their features."
        key = (subject.body.get("worst_group") or {}).get("group")
        keys = [self.groups.key(index) for index in range(len(self.groups.keys))]
        if key in keys and len(keys) > 1:
            inside = (self.groups.codes[answers.rows] == keys.index(key)).any(axis=1)
            in_worst_group = ranked[inside[ranked]]
            part = (
                f"{len(in_worst_group):,} of {int(inside.sum()):,} wrong"
                if classes
                else f"{len(in_worst_group):,} rows"
            )
            worst = self.gallery(f"Worst group: {_joined(key)} ({part})", in_worst_group[:MAX_TILES], answers)
        title = "Most confident errors" if classes else "Furthest off"
        surest = self.gallery(title, confident, answers, ranked)
        galleries = {"worst-errors": worst, "confident-errors": surest}
        shown = np.union1d(in_worst_group[:MAX_TILES], confident)
        similar = self.training.similar_to(answers, self.store, shown) if self.training else {}
        return {"lead": lead, "galleries": galleries, "similar": similar}

    def versus(self, theirs: Answers, name: str) -> dict[str, Any]:
        """Rows that only one of two probes gets right."""
        hits, others = self.answers.right, theirs.right
        test = metrics.compare(hits, others)
        lead = (
            f"Against {name} (accuracy {metrics.mean(others):.3f}): {test.difference:+.3f}, 95 % interval "
            f"{test.ci_low:+.3f} to {test.ci_high:+.3f}; McNemar's p = {test.p_value:.2g}. Under "
            "each picture: true → predicted by the one that is wrong, and its probability."
        )
        fixed, broken = theirs.surest(hits & ~others), self.answers.surest(others & ~hits)
        parts = {
            "fixed": (f"Fixed: {len(fixed):,} rows that only this probe gets right", fixed, theirs),
            "broken": (f"Broken: {len(broken):,} rows that only {name} gets right", broken, self.answers),
        }
        galleries = {
            part: self.gallery(title, self.some(ranked, 12, 3), answers, ranked)
            for part, (title, ranked, answers) in parts.items()
        }
        return {"lead": lead, "galleries": galleries, "similar": {}}

    def some(self, ranked: Codes, first: int = MAX_TILES, of_each: int = MAX_GROUP_TILES) -> Codes:
        """The first ``first`` rows overall and the first ``of_each`` of each group, in ranked order.

        At most `MAX_GALLERY`.
        """
        group, place = self.group(ranked), np.zeros(len(ranked), dtype=np.int64)
        for code in np.unique(group):
            place[group == code] = np.arange(int((group == code).sum()))
        return ranked[(np.arange(len(ranked)) < first) | (place < of_each)][:MAX_GALLERY]

    def group(self, ranked: Codes) -> Codes:
        """Each row's group in the first crossing; −1 for none."""
        codes = self.groups.codes[self.answers.rows[ranked]]
        return codes[:, 0] if codes.shape[1] else np.full(len(ranked), -1, dtype=np.int64)

    def gallery(
        self, title: str, chosen: Codes, answers: Answers, among: Codes | None = None
    ) -> dict[str, Any]:
        """Tiles of rows; with the rows ``among`` which they are chosen, also a filter by group."""
        places = self.answers.rows[chosen].tolist()
        tiles = [self.pictures.row(self.store, self.store.ids[place]) for place in places]
        captions = (_caption(answers, index) for index in chosen.tolist())
        options = []
        if among is not None:
            codes, counts = np.unique(self.group(among), return_counts=True)
            for code, count in zip(codes.tolist(), counts.tolist(), strict=True):
                options += [(code, f"{_joined(self.groups.key(code))} ({count:,})")] if code >= 0 else []
        group = self.group(chosen).tolist()
        shown = list(zip(tiles, captions, group, chosen.tolist(), strict=True))
        return {"title": title, "tiles": shown, "groups": options}


def _confusion(answers: Answers) -> dict[str, Any]:
    """Counts of rows by true and predicted class; of many classes, the most frequent confusions."""
    names = answers.probe.classes
    counts = np.zeros((len(names), len(names)), dtype=np.int64)
    np.add.at(counts, (answers.truth, answers.predicted), 1)
    totals = counts.sum(axis=1)
    if len(names) <= MAX_MATRIX:
        return {"classes": names, "counts": counts.tolist(), "totals": totals.tolist(), "table": None}
    np.fill_diagonal(counts, 0)
    first = np.argsort(-counts, axis=None, kind="stable")[:MAX_MATRIX]
    rows = [
        cells(names[i], names[j], f"{counts[i, j]:,}", Spread(counts[i, j] / totals[i]))
        for i, j in zip(*np.unravel_index(first, counts.shape), strict=True)
        if counts[i, j]
    ]
    title = f"The {len(rows)} most frequent confusions of {len(names):,} classes"
    return {"table": ReportTable(title, ("true", "predicted", "rows", "share of the class"), rows, 2)}


def _made(subject: Source | None, files: FileFinder) -> dict[str, Any]:
    """The commands that made the subject, versions, and the digests of files."""
    sources, versions = files.sources, {"ncm": subject.body.get("ncm_version") if subject else __version__}
    for run in sources.runs:
        versions |= (run.body.get("provenance") or {}).get("versions") or {}
    listed = [cells(name, str(value)) for name, value in versions.items() if value]
    results = [*sources.evals, *sources.bounds, *sources.sweeps, *sources.runs]
    digests = [
        (source.path, source.body.get("kind"), source.body.get("content_sha256")) for source in results
    ]
    digests += [(probe.path, "probe", probe.facts.seeded["fit probe"].digest) for probe in sources.probes]
    digests += [(path, "pairs", store.content_sha256) for path, store in sources.pairs]
    rows = [cells(*(str(part or "") for part in digest)) for digest in digests]
    shown = [
        ReportTable("Versions", ("package", "version"), listed, 2),
        ReportTable("Files, with the digest of their contents", ("file", "kind", "SHA-256"), rows, 3),
    ]
    return {"lines": _shell_lines(subject, files) if subject else [], "tables": shown}


def _shell_lines(subject: Source, files: FileFinder) -> list[str]:
    """The commands that made the subject, as far as they are recorded. If a run made it, paths are relative
    to the run's folder."""
    located, store = files.of(subject, "probe"), files.of(subject, "feature store").content
    probe = Source(located.path, located.content.meta, subject.facts) if located.content else None
    pairs = files.pair_stores(probe) if probe else []
    steps: list[tuple[str, str, Mapping[str, Any]]] = [
        ("embed", "source", store.options if store else {}),
        *(
            ("pairs", "holdout", pair_store.content.options)
            for pair_store in pairs
            if pair_store.content is not None
        ),
        ("fit", "select", (probe.body.get("options") or {}) if probe else {}),
        ("zeroshot", "mix", (probe.body.get("options") or {}) if probe else {}),
        ("eval", "probe", subject.body.get("options") or {}),
    ]
    was, run = written(subject), subject.facts.run
    name = f"/{subject.path.absolute().relative_to(run)}" if run else ""
    base = was.removesuffix(name[1:]) if name and was.endswith(name) else ""
    lines = [f"cd {shlex.quote(base)}"] if base else []
    for kind, own_option, given in steps:
        if own_option in given:  # else the file is unknown, or made by a builder or a sweep
            line = f"ncm {kind}"
            for word in command_words(options_of(kind), given):
                # One option a line, which a shell continues.
                line += (" \\\n    " if word.startswith("-") else " ") + shlex.quote(word.removeprefix(base))
            lines.append(line)
    return lines
