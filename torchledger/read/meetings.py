"""Where a step's start is not the end of the step before: what was met late, and what turned out otherwise."""

from __future__ import annotations

from collections import defaultdict

from torchledger.journal.entries import LATE, SETTLED_SHIFT, UNSURE, Journal, is_external
from torchledger.journal.statements import CATEGORIES
from torchledger.read.snapshots import there_before
from torchledger.units import format_bytes


def meeting_notes(journal: Journal, settled: dict[int, int]) -> tuple[str, ...]:
    """Lines on what is in a step's start, and in the end of the step before is missing or has another name.

    There is none where the two are the same, category by category. A line of its own says what is counted though
    nothing tells whether an allocator of torch's gave it.

    >>> meeting_notes(Journal(), {})
    ()
    """
    late: dict[str, int] = defaultdict(int)
    changed: dict[tuple[str, str], int] = defaultdict(int)
    unsure = 0
    roles = journal.roles
    for number, row in there_before(journal):
        role, category = roles.get(number, 0), settled[number]
        if is_external(role):
            continue
        before = (role >> SETTLED_SHIFT) - 1
        if role & LATE and number >= journal.first:
            late[CATEGORIES[category]] += row[0]
        elif before >= 0 and before != category:
            changed[CATEGORIES[before], CATEGORIES[category]] += row[0]
    for number in journal.numbers():
        if roles.get(number, 0) & UNSURE:
            unsure += journal.block(number).nbytes
    notes = []
    if journal.first:  # in the first step all is met, and there is no end before it
        notes += [
            f"{_both(nbytes)} of {category} were there before, in what this step was the first to touch: "
            f"the end of the step before lacks them"
            for category, nbytes in sorted(late.items())
            if nbytes
        ]
        notes += [
            f"{_both(nbytes)} at the end of the step before as {before} turned out to be {now}"
            for (before, now), nbytes in sorted(changed.items())
            if nbytes
        ]
    if unsure:
        notes.append(f"{_both(unsure)} may lie in memory of another library: nothing tells, so they are counted")
    return tuple(notes)


def _both(nbytes: int) -> str:
    return f"{format_bytes(nbytes)} ({nbytes:,} bytes)"
