"""Formulas that a dispatch mode sends another way, on journals written by hand."""

from __future__ import annotations

import pytest

from torchledger.journal.entries import FORMULA, Journal, Row
from torchledger.read.events import repaired
from torchledger.read.formulas import IN_PLACE, NODES, PATHS, formulas


def row(op: str, nbytes: int = 100, device: str = "cpu") -> Row:
    return (nbytes, device, "backward", 0, f"aten.{op}", (nbytes // 4,), "float32", -1)


def journal(name: str, rows: list[Row], events: list[int], *, begin: int = 0) -> Journal:
    marks = [(0, "phase", "backward"), (begin, FORMULA, name), (len(events), FORMULA, "")]
    return Journal(first=5, blocks=rows, events=[n + 5 if n >= 0 else n - 5 for n in events], marks=marks)


def totals(journal: Journal) -> list[int]:
    held, found = 0, []
    for event in journal.events:
        nbytes = journal.block(event if event >= 0 else ~event).nbytes
        held += nbytes if event >= 0 else -nbytes
        found.append(held)
    return found


MATRIX_EXP = [row("cat", 200), row("zeros_like"), row("cat", 200), row("cat", 400), row("linalg_matrix_exp", 400)]


def test_blocks_that_only_a_mode_makes_are_not_there() -> None:
    before = journal("LinalgMatrixExpBackward0", MATRIX_EXP, [0, 1, 2, 3, ~2, ~0, ~1, 4, ~3, ~4])
    after = repaired(before)
    assert totals(after) == [400, 800, 400, 0]
    assert max(totals(before)) == 900
    assert list(formulas(after)) == []
    assert [mark[0] for mark in after.marks] == [0, 0, 4]


def test_marks_behind_a_formula_move_with_it() -> None:
    before = journal("LinalgMatrixExpBackward0", MATRIX_EXP, [0, 1, 2, 3, ~2, ~0, ~1, 4, ~3, ~4])
    before.marks.append((10, "phase", "optimizer"))
    assert (4, "phase", "optimizer") in repaired(before).marks


@pytest.mark.parametrize(
    "rows",
    [[*MATRIX_EXP[:4], row("exp", 400)], [row("cat", 200, "cuda:0"), *MATRIX_EXP[1:]], MATRIX_EXP[:3]],
    ids=["another op", "another device", "not all"],
)
def test_formulas_that_are_not_known_are_left_and_stay_marked(rows: list[Row]) -> None:
    before = journal("LinalgMatrixExpBackward0", rows, [*range(len(rows)), *(~n for n in range(len(rows)))])
    after = repaired(before)
    assert after.events == before.events
    assert [name for name, _, _ in formulas(after)] == ["LinalgMatrixExpBackward0"]


def test_something_that_lives_on_is_no_buffer_of_the_mode_alone() -> None:
    before = journal("LinalgMatrixExpBackward0", MATRIX_EXP, [0, 1, 2, 3, ~2, ~0, 4, ~3, ~4])
    assert repaired(before).events == before.events


def test_writing_in_place_of_the_last_block_of_that_size() -> None:
    rows = [row("scalar_tensor", 4), row("lt"), row("lt"), row("logical_and"), row("where", 400)]
    before = journal("ClampBackward0", rows, [0, 1, 2, 3, 4, ~3, ~2, ~1, ~0, ~4])
    assert totals(before)[:5] == [4, 104, 204, 304, 704]
    assert totals(repaired(before))[:6] == [4, 104, 204, 104, 204, 604]


def test_a_result_takes_the_place_of_what_was_computed() -> None:
    path = PATHS["CumprodBackward0"][0]
    rows = [row(op.removeprefix("aten.")) for op in path.ops]
    n = len(rows)
    before = journal("CumprodBackward0", rows, [*range(n), *(~i for i in range(n - 1)), ~(n - 1)])
    after = repaired(before)
    assert [event - 5 for event in after.events if event >= 0] == [0, 1, 7, 8, 9, n - 1]
    assert max(totals(after)) == 600


def test_tables_hold_together() -> None:
    for paths in PATHS.values():
        for path in paths:
            assert set(path.lasting) <= set(path.kept) < {*range(len(path.ops) + 1)}
            assert path.at not in path.kept
    assert all(" " not in name for name in NODES)
    assert all(op.startswith("aten.") for pairs in IN_PLACE.values() for pair in pairs for op in pair)
