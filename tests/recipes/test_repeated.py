"""What a step says for several cells of its matrix is shown once, with the cells that say it again."""

from __future__ import annotations

from ncm_cli.recipes.messages import RepeatedMessages
from ncm_cli.recipes.steps import Job
from tests.world import Heard

SAID = {
    ("fit", 0): ["3 rows are like 'a-1'", "rank 4 is the largest", "rank 5 is the largest"],
    ("fit", 1): ["1,204 rows are like 'b'", "no group"],
    ("fit", 2): ["2 rows are like 'c'"],
    ("eval", 0): ["3 rows are like 'a-1'"],
}


def _say(heard: Heard) -> RepeatedMessages:
    repeated = RepeatedMessages(heard)
    for (step, seed), messages in SAID.items():
        reporter = repeated.reporter_of(Job(step=step, kind=step, cell={"seed": str(seed)}))
        for message in messages:
            reporter.warn(message)
    return repeated


def test_cells_that_say_the_same_are_named_at_the_end() -> None:
    heard = Heard()
    repeated = _say(heard)
    assert heard.warnings == [
        "fit (seed 0): 3 rows are like 'a-1'",
        "fit (seed 0): rank 4 is the largest",
        "fit (seed 0): rank 5 is the largest",
        "fit (seed 1): no group",
        "eval (seed 0): 3 rows are like 'a-1'",
    ]
    repeated.name_others()
    assert heard.warnings[5:] == [
        "likewise, but for names and numbers, fit (seed 1), fit (seed 2): 3 rows are like 'a-1'"
    ]


def test_verbose_shows_all() -> None:
    heard = Heard()
    heard.verbose = True
    _say(heard).name_others()
    assert len(heard.warnings) == sum(map(len, SAID.values()))
