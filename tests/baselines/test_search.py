"""The grammar of ``--search`` and ``--methods``, and what is drawn from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ncm_cli.baselines.choice import chunks, plan_configs
from ncm_cli.baselines.options import SweepOptions, parse_methods, parse_search
from ncm_cli.errors import InputError, UsageError
from ncm_cli.options import check, parse_space
from ncm_cli.progress import SILENT
from ncm_cli.solvers.methods import HYPER, METHODS
from tests.world import Heard


def options(**changes: object) -> SweepOptions:
    base = {
        "features": Path("f.h5"),
        "pairs": Path("p.h5"),
        "output": Path("s.h5"),
        "envs": "domain",
        "seeds": 2,
    }
    return SweepOptions(**{**base, **changes})


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-3", (1e-3,)),
        ("1e-3,1e-2", (1e-3, 1e-2)),
        ("2:5", (2, 3, 4, 5)),
        ("0:64:32", (0, 32, 64)),
        ("0,8:10", (0, 8, 9, 10)),
        ("lin:0:1:3", (0, 0.5, 1)),
        ("log:1:100:3", (1, 10, 100)),
        ("log:1e-4:1:5", (1e-4, 1e-3, 1e-2, 1e-1, 1)),
    ],
)
def test_spaces_with_values(text: str, values: tuple[float, ...]) -> None:
    assert parse_space(text).values == pytest.approx(values)


def test_ranges_are_drawn_in_their_own_scale() -> None:
    shares = (np.arange(1000) + 0.5) / 1000
    log = [parse_space("log:1e-4:1").at(share, whole=False) for share in shares]
    assert np.median(log) == pytest.approx(1e-2, rel=0.02)
    assert min(log) >= 1e-4 and max(log) <= 1
    linear = [parse_space("lin:2:4").at(share, whole=False) for share in shares]
    assert np.mean(linear) == pytest.approx(3, rel=1e-3)
    ranks = {parse_space("log:16:256").at(share, whole=True) for share in shares}
    assert all(rank == int(rank) for rank in ranks)
    assert min(ranks) == 16 and max(ranks) == 256
    assert {parse_space("0,0.5,1").at(share, whole=False) for share in shares} == {0, 0.5, 1}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "log:",
        "log:1",
        "log:0:1",
        "log:2:1",
        "lin:1:2:0",
        "5:2",
        "1:2:3:4",
        "1.5:3",
        "nan",
        "log:1:inf",
        "log:1:2:99999999999",
        "2:99999999999",
        "a",
    ],
)
def test_other_spaces_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="can't be read"):
        parse_space(text)


def test_names_get_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="did you mean 'weight_decay'"):
        parse_search("weight_decy=1e-3")
    with pytest.raises(UsageError, match="did you mean 'groupdro'"):
        parse_search("gruopdro.eta=1")
    with pytest.raises(UsageError, match="no hyper-parameter of irm named 'rank'"):
        parse_search("irm.rank=2:4")
    with pytest.raises(UsageError, match="did you mean 'vrex'"):
        parse_methods("erm,vrx")
    with pytest.raises(UsageError, match="a search that can't be read"):
        parse_search("lr")
    with pytest.raises(UsageError, match=r"lr can't be 0"):
        parse_search("lr=0,1e-3")
    with pytest.raises(UsageError, match=r"rank can't be 1\.5"):
        parse_search("rank=1.5")
    with pytest.raises(UsageError, match=r"p_sel can't be 2"):
        parse_search("p_sel=lin:0:2")


def test_a_search_that_no_method_would_use_is_refused() -> None:
    with pytest.raises(UsageError, match="for a method that isn't swept"):
        check(options(methods="erm", search=("irm.penalty=1",)))
    with pytest.raises(UsageError, match="--search lr is given twice"):
        check(options(methods="erm", search=("lr=1e-3", "lr=1e-2")))
    both = options(methods="erm,irm", search=("lr=1e-3", "irm.lr=1e-2"))
    assert {cell.hyper["lr"] for cell in plan_configs(both, available_rank=9, reporter=SILENT)} == {
        1e-3,
        1e-2,
    }


def test_a_search_for_all_methods_may_be_of_none_with_a_word_about_it() -> None:
    """So that a list of methods can be shortened without touching what is searched."""
    heard = Heard()
    searched = options(methods="erm", search=("eta=0.1", "lr=1e-3", "penalty=1:9"), seeds=1)
    cells = plan_configs(check(searched), available_rank=9, reporter=heard)
    assert {name for cell in cells for name in cell.hyper} == {"lr", "weight_decay"}
    assert heard.warnings == ["no effect: --search eta, penalty, which none of the methods has"]


def test_every_default_space_is_in_range_and_known_to_a_method() -> None:
    for name, hyper in HYPER.items():
        assert any(name in method.hyper for method in METHODS.values()), name
        parse_search(f"{name}={hyper.space}")
        assert parse_space(hyper.grid).values


def test_methods_share_draws_and_do_not_change_with_company() -> None:
    def drawn(methods: str, **changes: object) -> dict[str, list[dict[str, float]]]:
        cells = plan_configs(options(methods=methods, seeds=1, **changes), available_rank=30, reporter=SILENT)
        found: dict[str, list[dict[str, float]]] = {}
        for cell in cells:
            found.setdefault(cell.label, []).append(dict(cell.hyper))
        return found

    every = drawn("erm,irm,ncm,fish")
    assert drawn("ncm")["ncm"] == every["ncm"]
    assert drawn("irm,erm")["irm"] == every["irm"]
    assert [hyper["lr"] for hyper in every["erm"]] == [hyper["lr"] for hyper in every["irm"]]
    assert drawn("ncm", seed=1)["ncm"] != every["ncm"]
    assert len(every["irm"]) == 16
    ranks = [hyper["rank"] for hyper in every["ncm"]]
    assert len(set(ranks)) > 10
    rates = np.sort(np.log10([hyper["lr"] for hyper in every["erm"]]))
    # One draw in each sixteenth of the range: no gap is wider than two of them.
    assert np.diff(rates).max() <= 2 * 3 / 16


@pytest.mark.parametrize("steps", [1, 2, 40, 100, 251, 5000])
def test_anneal_lies_within_the_steps_of_the_training(steps: int) -> None:
    """100 epochs of few rows are 100 steps; beyond them irm and vrex would never begin."""
    heard, known = Heard(), options(methods="erm,irm,vrex", seeds=1)
    cells = plan_configs(known, available_rank=9, reporter=heard, steps=steps)
    anneals = [cell.anneal for cell in cells if cell.method != "erm"]
    assert max(anneals) < steps and len(set(anneals)) >= min(12, steps - steps // 2)
    assert len(heard.warnings) == (steps <= 250)
    assert all(f"irm, vrex: training has {steps:,} steps" in text for text in heard.warnings)
    if steps > 250:
        assert cells == plan_configs(known, available_rank=9, reporter=SILENT)
    grid = options(methods="irm", seeds=1, grid=True)
    assert {cell.anneal for cell in plan_configs(grid, available_rank=9, reporter=SILENT, steps=steps)} == (
        {100} if steps > 100 else {steps // 2}
    )
    asked = options(methods="irm", seeds=1, search=("anneal=300",))
    heard = Heard()
    assert {cell.anneal for cell in plan_configs(asked, available_rank=9, reporter=heard, steps=steps)} == {
        300
    }
    assert [("never begins" in text) for text in heard.warnings] == [True] * (steps <= 300)


def test_one_method_can_have_a_space_of_its_own() -> None:
    cells = plan_configs(
        options(methods="irm,vrex", search=("penalty=1:9", "irm.penalty=77"), seeds=1),
        available_rank=0,
        reporter=SILENT,
    )
    assert {cell.hyper["penalty"] for cell in cells if cell.method == "irm"} == {77}
    assert {cell.hyper["penalty"] for cell in cells if cell.method == "vrex"} <= set(range(1, 10))


def test_a_grid_is_every_combination_with_every_seed() -> None:
    cells = plan_configs(
        options(
            methods="ncm,erm",
            grid=True,
            search=("rank=0:4:2", "weight_decay=log:1e-4:1e-2:3"),
            seeds=3,
            seed=5,
        ),
        available_rank=9,
        reporter=SILENT,
    )
    assert len(cells) == (3 * 3 + 3) * 3
    assert {cell.seed for cell in cells} == {5, 6, 7}
    assert {(cell.hyper["rank"], cell.hyper["weight_decay"]) for cell in cells if cell.method == "ncm"} == {
        (rank, decay) for rank in (0, 2, 4) for decay in (1e-4, 1e-3, 1e-2)
    }
    with pytest.raises(UsageError, match="a grid needs values"):
        check(options(methods="erm", grid=True, search=("lr=log:1e-4:1",)))


def test_equal_configurations_are_trained_once() -> None:
    cells = plan_configs(
        options(methods="erm", search=("lr=1e-3", "weight_decay=0"), trials=16, seeds=1),
        available_rank=0,
        reporter=SILENT,
    )
    assert len(cells) == 1


def test_ranks_beyond_the_pairs_are_left_out_or_refused() -> None:
    notes = Heard()
    cells = plan_configs(
        options(methods="ncm", search=("rank=2:24",), grid=True, seeds=1), available_rank=5, reporter=notes
    )
    assert [cell.hyper["rank"] for cell in cells] == [2, 3, 4, 5]
    assert any("numerical rank" in note for note in notes.notes)
    drawn = plan_configs(
        options(methods="ncm", search=("rank=log:1:64",), seeds=1), available_rank=7, reporter=Heard()
    )
    assert max(cell.hyper["rank"] for cell in drawn) <= 7
    for text in ("rank=16:24", "rank=log:16:24", "rank=40"):
        with pytest.raises(InputError, match="above the pairs' numerical rank"):
            plan_configs(options(methods="ncm", search=(text,)), available_rank=5, reporter=SILENT)


def test_methods_follow_what_is_given() -> None:
    assert options(pairs=None, envs=None).chosen_methods == (("erm", False),)
    every = [name for name, _ in options(groups="label", erase="place").chosen_methods]
    assert every == list(METHODS)
    for method, need in (("irm", "--envs"), ("ncm", "--pairs"), ("dfr", "--groups"), ("leace", "--erase")):
        with pytest.raises(UsageError, match=f"{method} needs {need}"):
            check(options(pairs=None, envs=None, methods=method))
    with pytest.raises(UsageError, match=r"erm\+upweight needs --upweight"):
        check(options(methods="erm+upweight"))
    both = options(methods="erm,erm+upweight", upweight="label")
    assert both.chosen_methods == (("erm", False), ("erm", True))
    heard = Heard()
    plan_configs(options(methods="erm", upweight="label"), available_rank=9, reporter=heard)
    plan_configs(both, available_rank=9, reporter=heard)
    assert heard.notes == ["--upweight applies to all methods, since none is named NAME+upweight"]
    assert options(methods="erm,ncm", upweight="label").chosen_methods == (("erm", True), ("ncm", True))


def test_chunks_hold_one_seed_and_one_way_of_training() -> None:
    cells = plan_configs(
        options(groups="label", erase="place", trials=200, seeds=2), available_rank=24, reporter=SILENT
    )
    found = chunks(cells, logits=3)
    assert sorted(i for members in found for i in members) == list(range(len(cells)))
    for members in found:
        assert len({cells[i].seed for i in members}) == 1
        assert len({cells[i].method if cells[i].method in ("dfr", "leace") else "" for i in members}) == 1
        assert len(members) * 3 <= 512
