"""A table of encoders: what the pairs gain with each, and how well its probes do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ncm_cli.probes.verdict import VERDICTS
from ncm_cli.results.lines import Source, Sources
from ncm_cli.results.tables import ReportTable, Row, Spread, cells, measured, ranks_of, spread


def encoder_table(sources: Sources, over: str) -> ReportTable:
    """One row for each encoder with a verdict, ordered by what its pairs gain, the least first.

    The numbers of several probes of one encoder are means ``over`` seeds. Evaluations of its probes stand
    beside those of its probes that were fitted without pairs (``--method erm``).
    """
    by_encoder: dict[str, list[Source]] = {}
    if len({_identity(probe.body) for probe in sources.probes if verdict_of(probe)}) < 2:
        return ReportTable("Encoders", (), [])
    for probe in sources.probes:
        by_encoder.setdefault(encoder_name(probe.body, sources.probes), []).append(probe)
    wheres = list(dict.fromkeys(source.where for source in sources.evals))
    rows: list[tuple[float, Row]] = []
    for name, probes in by_encoder.items():
        judged = [probe for probe in probes if verdict_of(probe)]
        if not judged:
            continue
        gain = _estimate(judged, "gain")
        row = cells(name, _said(judged), ranks_of([_as_eval(probe) for probe in judged]), gain)
        row += cells(*(_estimate(judged, measure) for measure in ("erm_flip_rate", "flip_rate")))
        plain = [probe for probe in probes if probe not in judged and probe.body.get("method") == "erm"]
        for where in wheres:
            for measure in ("accuracy", "worst_group"):
                evals = (_evals_of(of_probes, sources) for of_probes in (plain, judged))
                row += cells(*(measured(of_probes, where, measure) for of_probes in evals))
        rows.append((gain.mean if gain else float("inf"), row))
    rows.sort(key=lambda pair: pair[0])
    heads = [f"{where}: {name}" for where in wheres for name in ("accuracy", "worst group")]
    columns = ["encoder", "verdict", "rank", "gain by the pairs", "flips at rank 0", "flips"]
    columns += [text for head in heads for text in (f"{head}, ERM", head)]
    kept = [i for i in range(len(columns)) if i < 3 or any(row[i].spread for _, row in rows)]
    note = "ordered by how much the pairs gain in score on validation rows and pairs; as far as verdicts can "
    note += f"tell, the first encoder needs pairs least; means are over {over}"
    return ReportTable(
        "Encoders",
        tuple(columns[i] for i in kept),
        [[row[i] for i in kept] for _, row in rows],
        3,
        note,
    )


def encoder_name(meta: Mapping[str, Any], probes: Sequence[Source]) -> str:
    """The name of a probe's encoder, with the start of its fingerprint if two encoders share the name."""
    name, fingerprint = _model(meta), str(meta.get("fingerprint") or "")
    fingerprints = {probe.body.get("fingerprint") for probe in probes if _model(probe.body) == name}
    return f"{name} ({fingerprint[:8]})" if len(fingerprints) > 1 else name


def _model(meta: Mapping[str, Any]) -> str:
    return str((meta.get("encoder") or {}).get("model"))


def _identity(meta: Mapping[str, Any]) -> str:
    """What tells encoders apart: the fingerprint; for synthetic data, whose seeds change it, the name."""
    synthetic = (meta.get("encoder") or {}).get("kind") == "synthetic"
    return _model(meta) if synthetic else str(meta.get("fingerprint"))


def verdict_of(probe: Source) -> dict[str, Any]:
    """The verdict of a probe's metadata; empty if there is none."""
    return (probe.body.get("selection") or {}).get("verdict") or {}


def _said(probes: Sequence[Source]) -> str:
    """The heading and code of a verdict; if there are several, each code with its count."""
    codes = Counter(str(verdict_of(probe)["code"]) for probe in probes)
    if len(codes) == 1:
        (code,) = codes
        return f"{VERDICTS.get(code, '')} ({code})"
    return ", ".join(f"{code} {count} of {len(probes)}" for code, count in codes.most_common())


def _estimate(probes: Sequence[Source], name: str) -> Spread | None:
    known = [verdict_of(probe).get(name) for probe in probes]
    values = [estimate["value"] if estimate else None for estimate in known]
    first = known[0] if len(known) == 1 else None
    return spread(values, (first["low"], first["high"]) if first else None)


def _as_eval(probe: Source) -> Source:
    return Source(probe.path, {"probe": {"rank": probe.body.get("rank")}}, probe.facts)


def _evals_of(probes: Sequence[Source], sources: Sources) -> list[Source]:
    """The evaluations of some probes, found by the probe's digest that each evaluation records."""
    digests = {probe.sha256 for probe in probes if probe.sha256}
    return [source for source in sources.evals if (source.body.get("probe") or {}).get("sha256") in digests]
