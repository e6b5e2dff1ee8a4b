"""What stands beside the accounts: what ops hold inside themselves, what grows, and what was not seen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torchledger.journal.rows import Growth
from torchledger.journal.statements import RunStatement, StepReport
from torchledger.render.names import clean, module_label, shape_label
from torchledger.render.tables import Column, Facts, Table
from torchledger.units import format_bytes, format_count

MOST_ROWS = 12
"""How many rows of a table are shown one by one."""


def audit_table(step: StepReport) -> Table | None:
    """What ops held inside themselves in an audited step, or None where it was not audited.

    >>> from torchledger.journal.rows import AuditRow
    >>> from torchledger.journal.statements import FlopStatement
    >>> rows = (AuditRow("aten.mm", "head", "forward", 64, 2),)
    >>> audit_table(StepReport(1, None, 0.0, FlopStatement(), {}, audit=rows)).rows
    (('64', '64 B', 'aten.mm', 'head', 'forward', '2'),)
    >>> audit_table(StepReport(1, None, 0.0, FlopStatement(), {})) is None
    True
    """
    if not step.audit and step.audited_peak is None:
        return None
    cells = [
        (
            format_count(row.nbytes),
            format_bytes(row.nbytes),
            clean(row.op),
            module_label(row.module),
            row.phase,
            format_count(row.calls),
        )
        for row in step.audit[:MOST_ROWS]
    ]
    columns = (
        Column("bytes"),
        Column("", drop=2),
        Column("op", "name"),
        Column("in module", "name"),
        Column("phase", "text", drop=1),
        Column("calls", drop=3),
    )
    title = f"Held inside ops at most, in one call, of step {step.index} on cpu (in no total)"
    return Table(title, columns, tuple(cells), notes=tuple(_audit_notes(step)))


def _audit_notes(step: StepReport) -> Iterator[str]:
    if len(step.audit) > MOST_ROWS:
        n, largest = len(step.audit) - MOST_ROWS, step.audit[MOST_ROWS].nbytes
        yield f"{format_count(n)} more rows, of {format_bytes(largest)} or less"
    if (peak := step.audited_peak) is None:
        return
    inside = format_count(peak.inside_bytes) if peak.inside_bytes else "none"
    at = _place(peak.op, peak.module, peak.phase)
    yield f"the peak with them: {_both(peak.total_bytes)}, {at} ({inside} of them inside it)"
    if "cpu" in step.memory and (shown := step.memory["cpu"].peak).op:
        yield f"the peak without them: {_both(shown.total_bytes)}, {_place(shown.op, shown.module, shown.phase)}"


def _place(op: str, module: str, phase: str) -> str:
    return f"in {clean(op)} of {module_label(module)}, {phase}" if op else "at the step's start"


def growing_table(run: RunStatement) -> Table | None:
    """What grows step after step, or None where nothing does.

    >>> growing_table(RunStatement()) is None
    True
    """
    if not run.growing:
        return None
    last = max((step.index for step in run.steps), default=0)
    shown = run.growing[:MOST_ROWS]
    cells = [_growing_cells(row, last) for row in shown]
    if rest := run.growing[MOST_ROWS:]:
        cells.append((*_per_step(rest), "everything else", "", "", "", "", ""))
    if len(run.growing) > 1:
        cells.append((*_per_step(run.growing), "total", "", "", "", "", ""))
    columns = (
        Column("bytes a step"),
        Column("", drop=3),
        Column("category", "text"),
        Column("made in", "name"),
        Column("by op", "name"),
        Column("tensor", "name", drop=1),
        Column("for", "text", drop=2),
        Column("where", "name"),
    )
    n_columns = len(columns) if any(row.where for row in shown) else len(columns) - 1
    rows = tuple(row[:n_columns] for row in cells)
    title = "Growing: what step after step leaves behind, and something keeps"
    return Table(title, columns[:n_columns], rows, n_totals=int(len(run.growing) > 1))


def _growing_cells(row: Growth, last_step: int) -> tuple[str, ...]:
    tensor = clean(f"{row.dtype} {shape_label(row.shape)}")
    n_steps = f"{format_count(last_step - row.since_step + 1)} steps"
    made = (row.category, module_label(row.module), clean(row.op))
    return (*_per_step([row]), *made, tensor, n_steps, clean(row.where or ""))


def _per_step(rows: Iterable[Growth]) -> tuple[str, str]:
    nbytes = sum(row.bytes_per_step for row in rows)
    return f"+{format_count(nbytes)}", format_bytes(nbytes, signed=True)


def unseen_facts(run: RunStatement) -> Facts | None:
    """What ran and was not seen, or None where nothing is known to.

    >>> unseen_facts(RunStatement(blind_spots=("a thread",))).lines
    (('unseen', 'a thread'),)
    """
    if not run.blind_spots:
        return None
    return Facts("Not seen", tuple(("unseen", clean(line)) for line in run.blind_spots))


def _both(nbytes: int) -> str:
    return f"{format_bytes(nbytes)} ({format_count(nbytes)} bytes)"
