"""Rows of exact integers: each column adds up to the statement's own total."""

from __future__ import annotations

from dataclasses import replace

from synthetic import gpt_flops, gpt_memory, gpt_report, make_report, make_snapshot, utilized_report
from torchledger.journal.statements import CATEGORIES, MemoryStatement, StepReport
from torchledger.render.rows import (
    category_rows,
    copy_rows,
    count_rows,
    has_allocator_reading,
    largest_rows,
    model_rows,
    phase_peak_rows,
    phase_rows,
    step_shown,
)

FLOPS = gpt_flops()
MEMORY = gpt_memory(unexplained=512)


def test_phases_add_up_to_the_hardware_total_and_lead_to_the_models() -> None:
    assert sum(row.n for row in phase_rows(FLOPS)) == FLOPS.total
    assert FLOPS.total + sum(row.n for row in model_rows(FLOPS)) == FLOPS.model
    assert FLOPS.recompute
    assert FLOPS.attention_rescore


def test_categories_add_up_in_every_column() -> None:
    rows = category_rows(MEMORY)
    assert sum(row.start for row in rows) == MEMORY.start.total_bytes
    assert sum(row.peak for row in rows) == MEMORY.peak.total_bytes
    assert sum(row.end for row in rows) == MEMORY.end.total_bytes
    assert [row.category for row in rows] == [name for name in CATEGORIES if name in {row.category for row in rows}]


def test_unexplained_is_shown_where_an_allocator_was_read() -> None:
    assert has_allocator_reading("cuda:0", MEMORY)
    assert not has_allocator_reading("cpu", MEMORY)
    assert not has_allocator_reading("meta", MEMORY)
    assert not has_allocator_reading("cuda:0", MemoryStatement())
    clean = gpt_memory()
    assert "unexplained" not in [row.category for row in category_rows(clean)]
    assert category_rows(clean, always=["unexplained"])[-1] == ("unexplained", 0, 0, 0)
    assert category_rows(MEMORY)[-1].peak == 512  # also where it is not asked for


def test_largest_rows_and_the_rest_are_the_whole() -> None:
    for limit in (0, 1, 5):
        rows, rest = largest_rows(MEMORY.peak, limit=limit)
        assert sum(row.nbytes for row in rows) + rest == MEMORY.peak.total_bytes
        assert [row.nbytes for row in rows] == sorted((row.nbytes for row in rows), reverse=True)


def test_copies_by_kind() -> None:
    rows = copy_rows([*MEMORY.copies, *MEMORY.copies[:1], replace(MEMORY.copies[1], module="tail", nbytes=5)])
    assert sum(row.nbytes for row in rows) == sum(copy.nbytes for copy in MEMORY.copies) + 3 * 2**20 + 5
    assert [(row.kind, row.calls, row.module) for row in rows] == [
        ("layout", 24, "blocks.0.attn"),
        ("dtype", 4, "head"),
        ("device", 1, "(outside)"),
    ]
    assert rows[1].module_bytes == rows[1].nbytes - 5


def test_folded_counts_add_up() -> None:
    counts = {f"op{i}": i for i in range(30)}
    for limit in (1, 5, 28, 29, 30, 100):
        assert sum(row.n for row in count_rows(counts, limit=limit)) == sum(counts.values())
    assert len(count_rows(counts, limit=29)) == 30  # one row more is no longer than "(1 more)"


def test_phase_peaks() -> None:
    rows = phase_peak_rows(MEMORY)
    assert [row.phase for row in rows] == ["forward", "backward", "optimizer"]
    assert max(row.nbytes for row in rows) == MEMORY.peak.total_bytes


def test_the_page_is_about_the_step_with_the_highest_peak() -> None:
    report = gpt_report()
    assert step_shown(report) is report.steps[1]
    assert step_shown(utilized_report()).index == 1  # type: ignore[union-attr]
    bare = make_report(*(StepReport(i, None, 0.1, FLOPS, {"cpu": MemoryStatement()}) for i in range(2)))
    assert step_shown(bare) is bare.steps[-1]
    some = make_report(StepReport(0, None, 0.1, FLOPS, {"cpu": MemoryStatement(peak=make_snapshot(inputs=1))}))
    assert step_shown(some) is some.steps[0]
