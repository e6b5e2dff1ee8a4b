"""What stands beside the accounts: what ops hold inside themselves, what grows, and what was not seen."""

from __future__ import annotations

from torchledger.journal.rows import AuditRow, Growth
from torchledger.journal.statements import RunStatement, StepReport
from torchledger.render.names import clean, module_label, shape_label
from torchledger.render.tables import Column, Facts, Table
from torchledger.units import format_bytes, format_count

MOST_ROWS = 12
"""How many rows of a table are shown one by one."""


def audit_table(step: StepReport) -> Table | None:
    """What ops held inside themselves in an audited step, or None where it was not audited.

    >>> rows = (AuditRow("aten.mm", "head", "forward", 64, 2),)
    >>> from torchledger.journal.statements import FlopStatement
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


def _audit_notes(step: StepReport) -> list[str]:
    notes = []
    if len(step.audit) > MOST_ROWS:
        n, largest = len(step.audit) - MOST_ROWS, step.audit[MOST_ROWS].nbytes
        notes.append(f"{format_count(n)} more rows, of {format_bytes(largest)} or less")
    peak = step.audited_peak
    if peak is not None:
        inside = f"{format_count(peak.inside_bytes)} of them inside it" if peak.inside_bytes else "none of them inside it"
        where = f"in {clean(peak.op)} of {module_label(peak.module)}, {peak.phase}" if peak.op else "at the step's start"
        notes.append(f"the peak with them: {_both(peak.total_bytes)}, {where} ({inside})")
        dispatched = step.memory["cpu"].peak if "cpu" in step.memory else None
        if dispatched is not None and dispatched.op:
            at = f"in {clean(dispatched.op)} of {module_label(dispatched.module)}, {dispatched.phase}"
            notes.append(f"the peak without them: {_both(dispatched.total_bytes)}, {at}")
    return notes


def growing_table(run: RunStatement) -> Table | None:
    """What grows step after step, or None where nothing does.

    >>> growing_table(RunStatement()) is None
    True
    """
    if not run.growing:
        return None
    last = max((step.index for step in run.steps), default=0)
    shown = run.growing[:MOST_ROWS]
    cells = [(*_per_step(row.bytes_per_step), *_kind(row, last), clean(row.where or "")) for row in shown]
    if rest := run.growing[MOST_ROWS:]:
        cells.append((*_per_step(sum(row.bytes_per_step for row in rest)), "everything else", *[""] * 5))
    n_totals = int(len(run.growing) > 1)
    if n_totals:
        cells.append((*_per_step(sum(row.bytes_per_step for row in run.growing)), "total", *[""] * 5))
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
    return Table(title, columns[:n_columns], rows, n_totals=n_totals)


def _kind(row: Growth, last: int) -> tuple[str, str, str, str, str]:
    n_steps = last - row.since_step + 1
    tensor = clean(f"{row.dtype} {shape_label(row.shape)}")
    return row.category, module_label(row.module), clean(row.op), tensor, f"{format_count(n_steps)} steps"


def unseen_facts(run: RunStatement) -> Facts | None:
    """What ran and was not seen, or None where nothing is known to.

    >>> unseen_facts(RunStatement(blind_spots=("a thread",))).lines
    (('unseen', 'a thread'),)
    """
    if not run.blind_spots:
        return None
    return Facts("Not seen", tuple(("unseen", clean(line)) for line in run.blind_spots))


def _per_step(nbytes: int) -> tuple[str, str]:
    return f"+{format_count(nbytes)}", format_bytes(nbytes, signed=True)


def _both(nbytes: int) -> str:
    return f"{format_bytes(nbytes)} ({format_count(nbytes)} bytes)"
