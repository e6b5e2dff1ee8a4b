"""What to say when memory runs out: who holds it."""

from __future__ import annotations

from torchledger.journal.entries import Journal
from torchledger.journal.statements import main_device
from torchledger.read.categories import settle
from torchledger.read.events import repaired
from torchledger.read.memory import memory_statements
from torchledger.units import format_bytes

ROWS = 8


def holdings_note(journal: Journal, op: str, module: str, phase: str) -> str:
    """What asked for more, and what is alive on the main device now: the text of a note for the error.

    Args:
        journal: The step so far.
        op: The op that found no memory.
        module: The module in which it ran.
        phase: The phase.
    """
    asked = f"torchledger: {op} asked for more in {module or 'the model'} ({phase})"
    journal = repaired(journal)
    events = journal.events
    statements = memory_statements(journal, settle(journal, events), events)
    device = main_device({name: statement.end.total_bytes for name, statement in statements.items()})
    if device not in statements:
        return f"{asked}; no tensor that the ledger saw is alive."
    held = statements[device].end
    lines = [f"{asked}, while {format_bytes(held.total_bytes)} of tensors are alive on {device}:"]
    lines += [f"  {format_bytes(n):>12}  {name}" for name, n in _largest(held.by_category)]
    lines.append("  by module that made them:")
    lines += [f"  {format_bytes(n):>12}  {name or '(model)'}" for name, n in _largest(held.by_module)]
    lines.append("  largest rows:")
    for row in held.largest[:ROWS]:
        shape = "x".join(map(str, row.shape))
        lines.append(
            f"  {format_bytes(row.nbytes):>12}  {row.n_blocks} x {row.category} {shape} {row.dtype} "
            f"from {row.op or 'before the step'} in {row.module or '(model)'}"
        )
    return "\n".join(lines)


def _largest(bytes_by_name: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(((k, v) for k, v in bytes_by_name.items() if v), key=lambda item: -item[1])[:ROWS]
