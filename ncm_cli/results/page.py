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
import os
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
from ncm_cli.results.lines import ORACLE, Found, Line, Sources, facts_of
from ncm_cli.results.pictures import BUDGET, SIDE, Thumbnails, look
from ncm_cli.results.plots import image_url
from ncm_cli.results.tables import Cell, ReportTable, Spread, cells, measured, ranks_of, tables, trained_on
from ncm_cli.store.columns import categories_of
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.pairs import read_pairs
from ncm_cli.store.probe import Probe, read_probe
from ncm_cli.store.roles import Groups, make_groups, read_target

Codes = NDArray[np.int64]

HERE = Path(__file__).with_name("page")

SECTIONS = {
    "groups": ("Accuracy by group", "groups"),
    "errors": ("What it gets wrong",),
    "versus": ("Fixed and broken",),
    "confusion": ("Confusion matrix",),
    "rank": ("How the rank was chosen", "rank-path", "Did the pairs help"),
    "pairs": ("The pairs", "spectrum", "Pairs"),
    "bound": ("Bound on the test risk", "accuracy", "bound", "Bound", "Test accuracy"),
    "results": ("All results",),
    "known": ("Known values", "Known values"),
    "made": ("How it was made",),
}
"""By anchor, as they stand: heading, and how names of figures and titles of tables in it begin; others
are among the results."""

TILES, OF_EACH, MOST = 24, 6, 72
"""Pictures of a gallery; one with a filter has some of every group as well, up to a limit."""

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
    with FileFinder(sources) as files:
        context = _context(files, evals, bounds, by, reporter)
    return environment.get_template("page.html.j2").render(
        dict.fromkeys(SECTIONS) | context,
        version=__version__,
        sections={name: title for name, (title, *_) in SECTIONS.items() if context.get(name)},
        style=Markup("".join(path.read_text("utf-8") for path in sorted(HERE.glob("*.css"), reverse=True))),
        script=Markup(script),
        script_sha256=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii"),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Located:
    """A file that another one names: where it is and what it holds, or why not."""

    path: Path
    made: Any = None
    why: str = ""


_READ = {"probe": read_probe, "feature store": FeatureStore, "pair store": read_pairs}


class FileFinder(contextlib.ExitStack):
    """Finds files by what was recorded of them: among those given, moved along, or where they were."""

    def __init__(self, sources: Sources) -> None:
        """``sources`` gets the probes that evaluations are of, and the pairs that probes were fitted with."""
        super().__init__()
        self._known: dict[tuple[str, str], Located] = {}
        self._given = {
            "probe": [found.path for found in sources.probes],
            "feature store": sources.features,
            "pair store": [path for path, _ in sources.pairs],
        }
        probes = {one.path: one for one in sources.probes}
        for found in sources.evals:
            if (own := self.of(found, "probe")).made is not None and own.path not in probes:
                meta = own.made.meta
                probes[own.path] = Found(own.path, meta, facts_of(own.path, meta, itself=own.made))
        pairs = dict(sources.pairs)
        for found in probes.values():
            if (own := self.of(found, "pair store")).made is not None:
                pairs.setdefault(own.path, own.made)
        self.sources = dataclasses.replace(sources, probes=list(probes.values()), pairs=list(pairs.items()))

    def of(self, found: Found, word: str, **known: str) -> Located:
        """A file of a kind that an evaluation or a probe names, or one known by its ``path``."""
        data = found.body.get("data") or {}
        named = {"probe": "probe", "feature store": "features", "pair store": "pairs"}[word]
        known = known or found.body.get(named) or data.get(named) or {}
        digest = known.get("sha256") or known.get("content_sha256")
        if not known.get("path"):
            return Located(Path(), why=f"no {word} is recorded in {found.path}")
        path, was = Path(known["path"]), written(found)
        moved = [found.path.parent / os.path.relpath(path, Path(was).parent)] if was else []
        key = (word, digest or str(path))
        if key not in self._known:
            given = self._given[word] if digest else []  # without a digest any file would do
            self._known[key] = self._find(word, digest, dict.fromkeys([*given, *moved, path]))
        return self._known[key]

    def _find(self, word: str, digest: str | None, candidates: Mapping[Path, None]) -> Located:
        *_, path = candidates
        why = f"the {word} {path} isn't there"
        for candidate in filter(Path.is_file, candidates):
            try:
                made: Any = _READ[word](candidate)
            except NcmError as error:
                why = f"the {word} {candidate} can't be read: {error.what}"
                continue
            if isinstance(made, FeatureStore):
                self.enter_context(made)
            if digest in (None, made.sha256 if isinstance(made, Probe) else made.content_sha256):
                return Located(candidate, made)
            if candidate not in self._given[word]:
                why = f"the {word} {candidate} has changed since"
        return Located(path, why=f"{why}; name the right one beside the results")


def written(found: Found) -> str:
    """The file as the command that wrote it was told."""
    return (found.body.get("options") or {}).get("output") or ""


def _caption(answers: Answers, index: int) -> str:
    """True and predicted answer, with the probability of the latter."""
    pair, names = (answers.truth[index], answers.predicted[index]), answers.probe.classes
    if not names:
        return "{:.3g} → {:.3g}".format(*pair)
    return "{} → {}, {:.2f}".format(*(_apart(names[code]) for code in pair), answers.confidence[index])


def _context(
    files: FileFinder, evals: Sequence[Line], bounds: Sequence[Line], by: str, reporter: Reporter
) -> dict[str, Any]:
    """What the template shows: the head, and each section that there is something for."""
    sources, context = files.sources, dict[str, Any]()
    subject = _subject(evals, files)

    def part(name: str) -> Any:
        own = next(
            (key for key, (_, *starts) in SECTIONS.items() if name.startswith(tuple(starts))), "results"
        )
        return context.setdefault(own, {"lead": "", "figures": [], "tables": []})

    for plot in figures(sources, evals, bounds, reporter):
        if (
            subject is None
            or not plot.name.startswith("groups")
            or plot.title.startswith(f"{subject.where} (")
        ):
            part(plot.name)["figures"].append((plot, image_url(plot)))
    for table in tables(sources, evals, bounds, by):
        part(table.title)["tables"].append(table)
    if sources.pairs:
        part("Pairs")["looks"] = _looks(subject, files)
    recipes = [(found.body.get("provenance") or {}).get("recipe") or {} for found in sources.runs]
    title = ", ".join(recipe["name"] for recipe in recipes if recipe.get("name"))
    context |= {"title": title or "Results", "head": None, "made": _made(subject, files)}
    if subject is not None:
        context["title"] = title or f"{_name(subject)} on {subject.where}"
        rival = _rival(subject, sources.evals)
        probe = files.of(subject, "probe").made
        context["head"] = _head(subject, rival, evals, probe.meta if probe else {})
        if (groups := _group_table(subject, rival)) is not None:
            part("groups")["tables"].append(groups)
        context |= _looked_at(subject, rival, files)
    return context


def _looks(subject: Found | None, files: FileFinder) -> list[dict[str, Any]]:
    """The doubtful pairs that the subject's probe was fitted with; without a subject, of every pair store."""
    pictures, shown = Thumbnails(side=SIDE, budget=BUDGET), files.sources.pairs
    if subject is not None and (probe := files.of(subject, "probe")).made is not None:
        own = files.of(Found(probe.path, probe.made.meta, subject.facts), "pair store").path
        shown = [one for one in shown if one[0] == own] or shown
    looks = []
    for path, store in shown:
        if "suspects" not in store.diagnostics:  # of a builder, which looks for none
            continue
        named = Found(path, {"options": store.options}, facts_of(path, {}))
        found = [files.of(named, "feature store", **source) for source in store.sources]
        looks.append(look(path, store, found, pictures))
    return looks


def _name(found: Found) -> str:
    return str((found.body.get("probe") or {}).get("method") or "probe")


def _subject(evals: Sequence[Line], files: FileFinder) -> Found | None:
    """The evaluation that the page tells of: on rows that its probe hasn't seen, of another method than ERM.

    Of several the one of the line whose pairs help by their verdicts, and whose bound fell most: no test row
    has a part in that. (Bounds can't be compared: each is about rows that differ as its own pairs do.)
    """

    def rank(of: tuple[Line, Found]) -> tuple[Any, ...]:
        line, one = of
        probes = (files.of(each, "probe").made for each in line.found)
        verdicts = [((probe.meta.get("selection") or {}).get("verdict") or {}) for probe in probes if probe]
        helped = sum(known.get("code") == "helps" for known in verdicts)
        gain = Spread.of((known.get("gain") or {}).get("value") for known in verdicts)
        seen = any((one.body.get("overlap") or {}).values())
        return seen, _name(one) == "erm", line.oracle, -helped, -gain.mean if gain else 0.0

    return min(((line, one) for line in evals for one in line.found), key=rank, default=(None, None))[1]


def _rival(subject: Found, evals: Sequence[Found]) -> Found | None:
    """The evaluation of another probe on the same rows, ERM's if there is one: of the same seed first."""

    def rows(one: Found) -> tuple[Any, ...]:
        return (one.body.get("features") or {}).get("content_sha256"), one.where, one.body.get("target")

    def probe(one: Found) -> Any:
        return (one.body.get("probe") or {}).get("sha256")

    same = [one for one in evals if rows(one) == rows(subject) and probe(one) != probe(subject)]
    same.sort(key=lambda one: (_name(one) != "erm", one.path.parent != subject.path.parent))
    return same[0] if same else None


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
        seen = [one.body.get("overlap") or {} for one in line.found if one.where == where]
        marks = [ORACLE] * line.oracle + [
            SEEN[part][0] for part in SEEN if any(one.get(part) for one in seen)
        ]
        for name in names if where == subject.where else names[:1]:
            if (own := measured(line.found, where, name)) is not None:
                theirs = measured(other.found, where, name) if other else None
                what = f"{name.replace('_', ' ')}, {where}"
                against = f"{other.label} {theirs.mean:.3f}" if other and theirs else ""
                cards.append({"what": what, "marks": marks, "value": Cell(spread=own), "against": against})
    notes = [f"{ORACLE}: chosen by looking at the test rows"] * line.oracle
    notes += [*(meta.get("flags") or []), *(subject.body.get("warnings") or [])]
    lead = f"{line.label}, rank {ranks_of(line.found) or 'unknown'}"
    lead += f", {extra}" if (extra := trained_on(meta)) else ""
    lead += f" chosen by {line.selection}" if line.rule not in ("", "only-candidate") else ""
    lead += f"; {subject.body.get('n', 0):,} rows of {subject.where}"
    if (seeds := len(line.found) // len(wheres)) > 1:
        lead += f"; mean ± standard deviation over {seeds} seeds, and what follows is of {subject.path}"
    verdict = (meta.get("selection") or {}).get("verdict")
    return {"lead": lead, "cards": cards, "verdict": verdict, "notes": notes}


def _group_table(subject: Found, rival: Found | None) -> ReportTable | None:
    """Groups with rows, the worst first, beside the rival's; None for fewer than two."""
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
    more = [_name(rival), "difference"] if rival else []
    note = f"of {subject.path}" + ("; brackets are 95 % Wilson intervals" if sign > 0 else "")
    note += f"; {len(entries) - len(present)} more groups have no row here" * (len(entries) > len(present))
    title = f"{_name(subject)} on {subject.where}"
    return (
        ReportTable(title, [*columns, "n", name, *more], rows, len(columns), note) if len(rows) > 1 else None
    )


def _joined(group: Mapping[str, str]) -> str:
    return ", ".join(f"{_apart(column)}={_apart(value)}" for column, value in group.items())


def _apart(text: str) -> str:
    """A user's text in a line of others, which it may not turn around: it may be written from the right."""
    return text if text.isascii() else f"\u2068{text}\u2069"


def _looked_at(subject: Found, rival: Found | None, files: FileFinder) -> dict[str, Any]:
    """The sections that need rows: errors, what is fixed and broken, confusion."""
    own = _answers(subject, files)
    if isinstance(own, str):
        return {"errors": {"missing": f"No pictures: {own}."}}
    store = files.of(subject, "feature store").made
    asked = (subject.body.get("options") or {}).get("groups")
    groups = make_groups(store, asked or (own.probe.target if own.probe.classes else ""))
    look = _Look(own, store, groups, Thumbnails())
    context = {"errors": look.errors(subject)}
    if own.probe.classes:
        name, theirs = _other(subject, rival, own, files)
        context["confusion"] = _confusion(own)
        if isinstance(theirs, str):
            context["versus"] = {"missing": f"Nothing to compare with: {theirs}."} if theirs else {}
        elif theirs.probe.classes == own.probe.classes:
            context["versus"] = look.versus(theirs, name)
    return context


def _answers_on(probe: Probe, store: FeatureStore, body: Mapping[str, Any]) -> Answers:
    """A probe's answers for the rows that an eval's result is of."""
    name = body.get("target") or probe.target
    known = (categories_of(store.column(name)).codes >= 0) & read_target(
        store, name, probe.classes or None
    ).known
    rows = np.flatnonzero(store.mask(body.get("where")) & known)
    if not len(rows):
        raise InputError("none of the result's rows is there", where=store.path, found=body.get("where"))
    return answers_of(probe, store.path, store, rows, name)


def _answers(found: Found, files: FileFinder, **other: str) -> Answers | str:
    """What an evaluation's probe, or another one, says of its rows; or why that can't be told."""
    probe, store = files.of(found, "probe", **other), files.of(found, "feature store")
    if probe.why or store.why:
        return probe.why or store.why
    try:
        return _answers_on(probe.made, store.made, found.body)
    except NcmError as error:  # a result of another version or program
        return f"{error.what} ({error.found})"


def _other(subject: Found, rival: Found | None, own: Answers, files: FileFinder) -> tuple[str, Answers | str]:
    """Another probe's name and answers on the same rows, or why there are none; "" where none is named.

    It is the rival evaluation's, else what the subject was compared with, else one among the sources.
    """
    if rival is not None:
        return _name(rival), _answers(rival, files)
    compared = (subject.body.get("options") or {}).get("compare")
    paths = [compared] if compared else [str(one.path) for one in files.sources.probes]
    why = ""
    for path in paths:
        found = _answers(subject, files, path=path)
        if isinstance(found, str):
            why = found
        elif found.probe.sha256 != own.probe.sha256:
            return str(found.probe.meta.get("method") or Path(path).stem), found
    return "", why


@dataclasses.dataclass(frozen=True, slots=True)
class _Look:
    """Galleries of rows."""

    own: Answers
    store: FeatureStore
    groups: Groups
    pictures: Thumbnails

    def errors(self, subject: Found) -> dict[str, Any]:
        """Of the worst group, and of all rows: those that the probe is surest of come first."""
        own, classes, worst = self.own, bool(self.own.probe.classes), None
        ranked = own.surest(~own.right)
        lead = "Under each picture: true → predicted; those furthest off come first."
        if classes:
            lead = (
                f"{len(ranked):,} of {len(own.rows):,} rows are wrong. Under each picture: true → predicted, "
                "and the probability of the prediction."
            )
        key = (subject.body.get("worst_group") or {}).get("group")
        keys = [self.groups.key(index) for index in range(len(self.groups.keys))]
        if key in keys and len(keys) > 1:
            inside = (self.groups.codes[own.rows] == keys.index(key)).any(axis=1)
            here = ranked[inside[ranked]]
            part = f"{len(here):,} of {int(inside.sum()):,} wrong" if classes else f"{len(here):,} rows"
            worst = self.gallery(f"Worst group: {_joined(key)} ({part})", here[:TILES], own)
        title = "Most confident errors" if classes else "Furthest off"
        confident = self.gallery(title, self.some(ranked), own, ranked)
        return {"lead": lead, "galleries": {"worst-errors": worst, "confident-errors": confident}}

    def versus(self, theirs: Answers, name: str) -> dict[str, Any]:
        """Rows that one of two probes gets right."""
        own, hits, others = self.own, self.own.right, theirs.right
        found = metrics.compare(hits, others)
        lead = (
            f"Against {name} (accuracy {metrics.mean(others):.3f}): {found.difference:+.3f}, 95 % interval "
            f"{found.ci_low:+.3f} to {found.ci_high:+.3f}; McNemar's p = {found.p_value:.2g}. Under "
            "each picture: true → predicted by the one that is wrong, and its probability."
        )
        fixed, broken = theirs.surest(hits & ~others), own.surest(others & ~hits)
        parts = {
            "fixed": (f"Fixed: {len(fixed):,} rows that {name} gets wrong", fixed, theirs),
            "broken": (f"Broken: {len(broken):,} rows that only {name} gets right", broken, own),
        }
        galleries = {
            part: self.gallery(title, self.some(ranked, 12, 3), answers, ranked)
            for part, (title, ranked, answers) in parts.items()
        }
        return {"lead": lead, "galleries": galleries}

    def some(self, ranked: Codes, first: int = TILES, of_each: int = OF_EACH) -> Codes:
        """The first of all rows and the first of each group, in their order."""
        group, place = self.group(ranked), np.zeros(len(ranked), dtype=np.int64)
        for one in np.unique(group):
            place[group == one] = np.arange(int((group == one).sum()))
        return ranked[(np.arange(len(ranked)) < first) | (place < of_each)][:MOST]

    def group(self, ranked: Codes) -> Codes:
        """The group of each row in the first crossing; −1 where it is in none."""
        codes = self.groups.codes[self.own.rows[ranked]]
        return codes[:, 0] if codes.shape[1] else np.full(len(ranked), -1, dtype=np.int64)

    def gallery(
        self, title: str, chosen: Codes, answers: Answers, every: Codes | None = None
    ) -> dict[str, Any]:
        """Tiles of rows; with ``every`` row that they are chosen from, a filter by group."""
        places = self.own.rows[chosen].tolist()
        tiles = [self.pictures.row(self.store, self.store.ids[place]) for place in places]
        captions = (_caption(answers, index) for index in chosen.tolist())
        options = []
        if every is not None:
            found, counts = np.unique(self.group(every), return_counts=True)
            for one, count in zip(found.tolist(), counts.tolist(), strict=True):
                options += [(one, f"{_joined(self.groups.key(one))} ({count:,})")] if one >= 0 else []
        group = self.group(chosen).tolist()
        return {"title": title, "tiles": list(zip(tiles, captions, group, strict=True)), "groups": options}


def _confusion(own: Answers) -> dict[str, Any]:
    """Counts of true by predicted class; of many classes the most frequent confusions."""
    names = own.probe.classes
    counts = np.zeros((len(names), len(names)), dtype=np.int64)
    np.add.at(counts, (own.truth, own.predicted), 1)
    totals = counts.sum(axis=1)
    if len(names) <= MATRIX:
        return {"classes": names, "counts": counts.tolist(), "totals": totals.tolist(), "table": None}
    np.fill_diagonal(counts, 0)
    first = np.argsort(-counts, axis=None, kind="stable")[:MATRIX]
    rows = [
        cells(names[i], names[j], f"{counts[i, j]:,}", Spread(counts[i, j] / totals[i]))
        for i, j in zip(*np.unravel_index(first, counts.shape), strict=True)
        if counts[i, j]
    ]
    title = f"The {len(rows)} most frequent confusions of {len(names):,} classes"
    return {"table": ReportTable(title, ("true", "predicted", "rows", "share of the class"), rows, 2)}


def _made(subject: Found | None, files: FileFinder) -> dict[str, Any]:
    """The commands of the subject's files, versions, and the digest of each file."""
    sources, versions = files.sources, {"ncm": subject.body.get("ncm_version") if subject else __version__}
    for run in sources.runs:
        versions |= (run.body.get("provenance") or {}).get("versions") or {}
    listed = [cells(name, str(value)) for name, value in versions.items() if value]
    results = [*sources.evals, *sources.bounds, *sources.sweeps, *sources.runs]
    every = [(one.path, one.body.get("kind"), one.body.get("content_sha256")) for one in results]
    every += [(one.path, "probe", one.facts.seeded["fit probe"].digest) for one in sources.probes]
    every += [(path, "pairs", store.content_sha256) for path, store in sources.pairs]
    rows = [cells(*(str(part or "") for part in one)) for one in every]
    made = [ReportTable("Versions", ("package", "version"), listed, 2)]
    made.append(ReportTable("Files, with the digest of their contents", ("file", "kind", "SHA-256"), rows, 3))
    return {"lines": _shell_lines(subject, files) if subject else [], "tables": made}


def _shell_lines(subject: Found, files: FileFinder) -> list[str]:
    """The commands that made the subject, from the folder of its run if it is of one; as far as is known."""
    probe, store = files.of(subject, "probe"), files.of(subject, "feature store").made
    found = Found(probe.path, probe.made.meta, subject.facts) if probe.made else None
    pairs = files.of(found, "pair store").made if found else None
    steps: dict[tuple[str, str], Mapping[str, Any]] = {
        ("embed", "source"): store.options if store else {},
        ("pairs", "holdout"): pairs.options if pairs else {},
        ("fit", "select"): (found.body.get("options") or {}) if found else {},
        ("zeroshot", "mix"): (found.body.get("options") or {}) if found else {},
        ("eval", "probe"): subject.body.get("options") or {},
    }
    was, run = written(subject), subject.facts.run
    name = f"/{subject.path.absolute().relative_to(run)}" if run else ""
    base = was.removesuffix(name[1:]) if name and was.endswith(name) else ""
    lines = [f"cd {shlex.quote(base)}"] if base else []
    for (kind, own), given in steps.items():
        if own in given:  # else made by another command, as by a builder or a sweep, or not known
            line = f"ncm {kind}"
            for word in command_words(options_of(kind), given):
                # An option a line: for people to read, and for shells to continue.
                line += (" \\\n    " if word.startswith("-") else " ") + shlex.quote(word.removeprefix(base))
            lines.append(line)
    return lines
