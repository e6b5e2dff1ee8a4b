"""The bytes alive after each event of a step."""

from __future__ import annotations

from collections.abc import Iterator

from torchledger.journal.entries import EXTERNAL, LATE, Journal
from torchledger.journal.statements import CATEGORIES, TimelinePoint
from torchledger.read.categories import settle
from torchledger.read.events import phase_spans, repaired


def timeline(journal: Journal, device: str) -> Iterator[TimelinePoint]:
    """Dispatched bytes of one device: first the start (event 0), then one point after each event, in order.

    ``by_category`` adds up to ``total_bytes`` at every point.
    """
    journal = repaired(journal)
    events = journal.events
    settled = settle(journal, events)
    rows = {**journal.carried, **dict(enumerate(journal.blocks, journal.first))}
    held = dict.fromkeys(CATEGORIES, 0)
    for number, row in rows.items():
        role = journal.roles.get(number, 0)
        if row[1] == device and not role & EXTERNAL and (number < journal.first or role & LATE):
            held[CATEGORIES[settled[number]]] += row[0]
    spans = [*phase_spans(journal), (len(events) + 1, "")]
    total, span, phase = sum(held.values()), 0, ""
    yield TimelinePoint(0, total, dict(held), phase)
    for position, event in enumerate(events):
        while spans[span][0] <= position:
            phase, span = spans[span][1], span + 1
        number = event if event >= 0 else ~event
        row = rows[number]
        if row[1] != device or journal.roles.get(number, 0) & EXTERNAL:
            continue
        nbytes = row[0] if event >= 0 else -row[0]
        total += nbytes
        held[CATEGORIES[settled[number]]] += nbytes
        yield TimelinePoint(position + 1, total, dict(held), phase)
