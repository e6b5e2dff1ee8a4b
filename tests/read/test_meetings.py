"""Notes where a step's start is not the end of the step before."""

from __future__ import annotations

from torchledger.journal.entries import (
    EXTERNAL,
    GRADIENT,
    LATE,
    MAPPED,
    PARAMETER,
    SETTLED_SHIFT,
    UNSURE,
    Journal,
    Row,
    is_external,
)
from torchledger.journal.statements import CATEGORIES
from torchledger.read.meetings import meeting_notes


def row(nbytes: int, phase: str = "") -> Row:
    return (nbytes, "cpu", phase, 0, "", (nbytes // 4,), "float32", -1)


def settled_as(category: str) -> int:
    return (CATEGORIES.index(category) + 1) << SETTLED_SHIFT


def notes(journal: Journal, **categories: list[int]) -> tuple[str, ...]:
    return meeting_notes(journal, {n: CATEGORIES.index(name) for name, found in categories.items() for n in found})


def test_the_first_step_meets_everything() -> None:
    journal = Journal(blocks=[row(1024)], roles={0: LATE})
    assert notes(journal, inputs=[0]) == ()


def test_what_was_met_late_is_said_by_category() -> None:
    journal = Journal(
        first=7,
        carried={2: row(64)},
        blocks=[row(1024), row(2048), row(512), row(8, "forward")],
        roles={2: settled_as("parameters"), 7: LATE, 8: LATE, 9: LATE | PARAMETER},
    )
    assert notes(journal, parameters=[2, 9], inputs=[7, 8], activations=[10]) == (
        "3.00 KiB (3,072 bytes) of inputs were there before, in what this step was the first to touch: "
        "the end of the step before lacks them",
        "512 B (512 bytes) of parameters were there before, in what this step was the first to touch: "
        "the end of the step before lacks them",
    )


def test_what_turned_out_to_be_something_else() -> None:
    journal = Journal(
        first=7,
        carried={2: row(64), 3: row(128)},
        roles={2: settled_as("other") | GRADIENT, 3: settled_as("activations")},
    )
    assert notes(journal, gradients=[2], activations=[3]) == (
        "64 B (64 bytes) at the end of the step before as other turned out to be gradients",
    )


def test_what_is_in_no_total_is_in_no_note_and_doubt_is_said() -> None:
    journal = Journal(first=7, blocks=[row(64), row(128)], roles={7: LATE | EXTERNAL, 8: LATE | UNSURE})
    assert notes(journal, inputs=[7, 8]) == (
        "128 B (128 bytes) of inputs were there before, in what this step was the first to touch: "
        "the end of the step before lacks them",
        "128 B (128 bytes) may lie in memory of another library: nothing tells, so they are counted",
    )


def test_what_the_model_holds_is_counted_wherever_it_lies() -> None:
    assert is_external(EXTERNAL | MAPPED)
    assert not is_external(EXTERNAL | MAPPED | PARAMETER)
    assert not is_external(0)
