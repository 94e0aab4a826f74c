"""What a step says for each cell of its matrix is shown once."""

from __future__ import annotations

from ncm_cli.recipes.messages import RepeatedMessages
from ncm_cli.recipes.steps import Job
from tests.world import Heard


def test_what_differs_in_names_and_numbers_alone_is_said_once() -> None:
    heard = Heard()
    repetitions = RepeatedMessages(heard)
    said = {
        ("fit", 0): ["3 rows are like 'a-1'", "rank 4 is the largest"],
        ("fit", 1): ["1,204 rows are like 'b'", "rank 5 is the largest", "no group"],
        ("eval", 0): ["3 rows are like 'a-1'"],
    }
    for (step, seed), messages in said.items():
        reporter = repetitions.reporter_of(Job(step=step, kind=step, cell={"seed": seed}), f"{step} {seed}: ")
        for message in messages:
            reporter.warn(message)
    assert heard.warnings == [
        "fit 0: 3 rows are like 'a-1'",
        "fit 0: rank 4 is the largest",
        "fit 1: no group",
        "eval 0: 3 rows are like 'a-1'",
    ]
    repetitions.note_left_out()
    assert ["only: 2; --verbose" in note for note in heard.notes] == [True]


def test_without_repetitions_nothing_is_said_of_them() -> None:
    heard = Heard()
    RepeatedMessages(heard).note_left_out()
    assert not heard.notes
