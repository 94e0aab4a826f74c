"""Finds the files that results name: probes, feature stores and pair stores, wherever they were moved."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ncm_cli.errors import NcmError
from ncm_cli.results.lines import Source, Sources
from ncm_cli.results.repetitions import facts_of
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.pairs import read_pairs
from ncm_cli.store.probe import Probe, read_probe


@dataclasses.dataclass(frozen=True, slots=True)
class Located:
    """A file that another one names: its path and content, or why it isn't available."""

    path: Path
    content: Any = None
    why: str = ""


_READ = {"probe": read_probe, "feature store": FeatureStore, "pair store": read_pairs}


class FileFinder(contextlib.ExitStack):
    """Finds files by their recorded digest: among those given, beside moved results, or where they were."""

    def __init__(self, sources: Sources) -> None:
        """Adds to ``sources`` the probes of evaluations and the pairs that probes were fitted with."""
        super().__init__()
        self._known: dict[tuple[str, str], Located] = {}
        self._given = {
            "probe": [probe.path for probe in sources.probes],
            "feature store": sources.features,
            "pair store": [path for path, _ in sources.pairs],
        }
        probes = {probe.path: probe for probe in sources.probes}
        for source in sources.evals:
            probe = self.of(source, "probe")
            if probe.content is not None and probe.path not in probes:
                facts = facts_of(probe.path, probe.content.meta, itself=probe.content)
                probes[probe.path] = Source(probe.path, probe.content.meta, facts)
        pairs = dict(sources.pairs)
        for source in probes.values():
            for pair_store in self.pair_stores(source):
                if pair_store.content is not None:
                    pairs.setdefault(pair_store.path, pair_store.content)
        self.sources = dataclasses.replace(sources, probes=list(probes.values()), pairs=list(pairs.items()))

    def of(self, source: Source, kind: str, **known: str) -> Located:
        """The file of a kind that an evaluation or a probe names, or that ``known`` names by its ``path``."""
        data = source.body.get("data") or {}
        field = {"probe": "probe", "feature store": "features", "pair store": "pairs"}[kind]
        known = known or source.body.get(field) or data.get(field) or {}
        digest = known.get("sha256") or known.get("content_sha256")
        if not known.get("path"):
            return Located(Path(), why=f"no {kind} is recorded in {source.path}")
        path, was = Path(known["path"]), written(source)
        moved = [source.path.parent / os.path.relpath(path, Path(was).parent)] if was else []
        key = (kind, digest or str(path))
        if key not in self._known:
            given = self._given[kind] if digest else []  # without a digest any file would match
            self._known[key] = self._find(kind, digest, dict.fromkeys([*given, *moved, path]))
        return self._known[key]

    def pair_stores(self, probe: Source) -> list[Located]:
        """The pair stores that a probe was fitted with."""
        stores = ((probe.body.get("data") or {}).get("pairs") or {}).get("stores") or [{}]
        names = ("path", "content_sha256")
        return [
            self.of(probe, "pair store", **{name: store[name] for name in names if store.get(name)})
            for store in stores
        ]

    def _find(self, kind: str, digest: str | None, candidates: Mapping[Path, None]) -> Located:
        *_, path = candidates
        why = f"the {kind} {path} isn't there"
        for candidate in filter(Path.is_file, candidates):
            try:
                content: Any = _READ[kind](candidate)
            except NcmError as error:
                why = f"the {kind} {candidate} can't be read: {error.what}"
                continue
            if isinstance(content, FeatureStore):
                self.enter_context(content)
            if digest in (None, content.sha256 if isinstance(content, Probe) else content.content_sha256):
                return Located(candidate, content)
            if candidate not in self._given[kind]:
                why = f"the {kind} {candidate} has changed since"
        return Located(path, why=f"{why}; pass the right file to ncm report along with the results")


def written(source: Source) -> str:
    """The result's output path, as it was given to its command."""
    return (source.body.get("options") or {}).get("output") or ""
