"""Results as the commands write them, small and with their probes, for tests of reports."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ncm_cli.probes.options import EvalOptions, FitOptions
from ncm_cli.store import files as lock
from ncm_cli.store.files import jsonable, sha256_file, write_result
from ncm_cli.store.probe import read_probe, write_probe
from ncm_cli.theory.options import BoundOptions
from tests.world import make_probe

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def digest(text: str) -> str:
    """Stands for a content's digest."""
    return hashlib.sha256(text.encode()).hexdigest()


@dataclasses.dataclass
class Results:
    """Writes probes, evals and bounds below a folder, and a run's record of them."""

    folder: Path
    made: dict[str, tuple[str, dict[str, str]]] = dataclasses.field(default_factory=dict)

    def probe(
        self,
        name: str = "ncm.safetensors",
        *,
        seed: int = 0,
        weight: float | None = None,
        data: str = "f.h5",
        pairs: str | None = "p.h5",
        model: str = "pixels:2",
        **options: Any,
    ) -> Path:
        """A probe fitted with these options; its weights come from its seed unless they are given."""
        path = self._new(name)
        resolved = FitOptions(
            features=self.folder / data,
            pairs=self.folder / pairs if pairs else None,
            output=path,
            seed=seed,
            method="ncm",
            **options,
        )
        meta = {
            "encoder": {"kind": "pixels", "model": model},
            "method": "ncm",
            "options": jsonable(resolved),
            "data": {
                "features": {"path": data, "content_sha256": digest(data)},
                "pairs": {"path": pairs, "content_sha256": digest(pairs)} if pairs else None,
            },
        }
        probe = make_probe([1.0, seed if weight is None else weight], ("0", "1"), **meta)
        write_probe(path, probe)
        return path

    def eval(
        self, name: str, probe: Path, accuracy: float, *, data: str = "f.h5", rank: int = 8, **options: Any
    ) -> Path:
        """An eval's result; ``data`` names the features that it is of."""
        path = self._new(name)
        options = {"where": "split=test", "groups": None, "target": None, "reference": None} | options
        unknown = {name: options.pop(name) for name in list(options) if not hasattr(EvalOptions, name)}
        made = EvalOptions(probe=probe, features=self.folder / data, output=path, **options)
        body = {
            "n": 200,
            "accuracy": accuracy,
            "worst_group": {"group": {"label": "1"}, "n": 100, "accuracy": accuracy - 0.1},
            "groups": [],
            "oracle": False,
            "task": "classification",
            "target": made.target or "label",
            "reference": {"where": made.reference or "split=train", "missing_share": 0.0},
            "where": made.where,
            "probe": self._known(probe) | {"selection": "bound", "rank": rank},
            "features": {"path": str(made.features), "content_sha256": digest(data)},
            "options": jsonable(made) | unknown,
        }
        write_result(path, "eval", body)
        return path

    def bound(
        self, name: str, probe: Path, value: float, *, body: dict[str, Any] | None = None, **options: Any
    ) -> Path:
        """A bound's result; ``body`` adds to what it found."""
        path = self._new(name)
        inputs = {name: self.folder / f"{name}.h5" for name in ("features", "oracle_pairs", "pairs")}
        found = {
            "term_1": value - 0.25,
            "term_2": 0.25,
            "bound": value,
            "test_risk": value - 0.1,
            "holds": True,
            "exact": True,
            "zero_one": {"bound": 0.3, "test_error": 0.2},
            "intervals": {"bound": [value - 0.05, value + 0.05]},
            "path": [],
            "probe": self._known(probe),
            "options": jsonable(BoundOptions(probe=probe, output=path, **inputs | options)),
        }
        write_result(path, "bound", found | (body or {}))
        return path

    def made_by(self, path: Path, step: str, **cell: str) -> Path:
        """Enter a file into the run's record."""
        self.made[str(path.relative_to(self.folder))] = (step, cell)
        return path

    def record(self, *, running: bool = False) -> None:
        """Write the report that ``ncm run`` ends with, or what there is while it runs in this process."""
        if running:
            jobs = {
                json.dumps([step, cell]): {"outputs": {name: self._digest(name)}}
                for name, (step, cell) in self.made.items()
            }
            (self.folder / ".ncm-run.json").write_text(json.dumps({"jobs": jobs}))
            held = lock._created(lock.lock_path(self.folder.resolve() / "report.json"))
            assert held is not None
            held.close()
        else:
            files = [
                {"file": name, "step": step, "cell": cell, "sha256": self._digest(name)}
                for name, (step, cell) in self.made.items()
            ]
            write_result(self.folder / "report.json", "run", {"provenance": {"files": files}})

    def _digest(self, name: str) -> str:
        path = self.folder / name
        return sha256_file(path) if path.is_file() else digest(name)

    def _known(self, probe: Path) -> dict[str, Any]:
        sha256 = read_probe(probe).sha256 if probe.is_file() else digest(str(probe))
        return {"path": str(probe), "sha256": sha256, "method": "ncm", "rank": 8}

    def _new(self, name: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """Writes below the test's folder."""
    return Results(tmp_path)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless browser; a test is skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright to drive a browser with")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on PATH")
    with playwright.sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=path, args=list(FLAGS))
        yield made
        made.close()
