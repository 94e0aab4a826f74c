"""``ncm pairs``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ncm_cli.pairs.options import PairsOptions

if TYPE_CHECKING:
    from ncm_cli.console import Ui
    from ncm_cli.pairs.pairs import PairsReport

SUSPECTS_SHOWN = 5


def run(options: PairsOptions, ui: Ui) -> None:
    """Make the pairs and show their diagnostics."""
    from ncm_cli.pairs.pairs import pairs

    report = pairs(options, reporter=ui.reporter)
    if ui.json:
        ui.result(report.to_json())
        return
    _show(report, ui)
    ui.note(f"wrote {report.output}")


def _show(report: PairsReport, ui: Ui) -> None:
    from ncm_cli.console import scree

    found = report.diagnostics
    rows: list[tuple[str, object]] = [
        ("pairs", report.pairs),
        ("of them held out", report.held_out),
        ("numerical rank", found["rank"]),
        ("largest gap", _gap(found)),
        ("labels differ", _count(found["label_disagreement"])),
        ("straddle train and test", _count(found["straddling"])),
        ("hold test rows", found["matching"].get("test_pairs")),
        ("repeated", _count(found["repeated"])),
        ("identical features", _count(found["identical"])),
    ]
    ui.table(["pairs", report.strategy], rows)
    ui.text(scree(report.singular_values.tolist(), gap=found["gap"]))
    suspects = found["suspects"]
    if suspects:
        ui.text("\nLook at these first: the other pairs explain least of their difference.")
        shown = [(pair["id_a"], pair["id_b"], pair["residual"]) for pair in suspects[:SUSPECTS_SHOWN]]
        ui.table(["id_a", "id_b", "unexplained"], shown, left=2)
        median = found["median_residual"]
        ui.text(f"Median {median:.3f}. {len(suspects)} such pairs are stored; --json lists them.")


def _gap(found: dict) -> str | None:
    if found["gap"] == 0:
        return None
    return f"after rank {found['gap']} ({found['gap_ratio']:.2f} times)"


def _count(entry: dict | None) -> int | None:
    return None if entry is None else entry["count"]
