"""A step as the program would have it without a ledger, and when each block came and went."""

from __future__ import annotations

from dataclasses import replace

from torchledger.journal.entries import Journal
from torchledger.read.formulas import rewrite_formulas


def repaired(journal: Journal) -> Journal:
    """The step with what only a dispatch mode makes autograd do taken back: the same blocks, other events and marks."""
    events = _with_sums_in_place(journal)
    return rewrite_formulas(journal if events is journal.events else replace(journal, events=events))


def _with_sums_in_place(journal: Journal) -> list[int]:
    """The step's events, with sums of gradients made in place.

    Under any dispatch mode autograd sums gradients that meet out of place; without one it adds into the earlier of the
    two, when nothing else holds it. So where that one went before the next block came, its going is read as coming
    first: the sum then takes its place, as it does in the program.
    """
    if not journal.inplace_adds:
        return journal.events
    events = list(journal.events)
    for position, old in journal.inplace_adds:
        if old < 0 or position >= len(events):
            continue
        after = position + 1
        while after < len(events) and events[after] < 0:
            if events[after] == ~old and _nbytes(journal, old) == _nbytes(journal, events[position]):
                events[position + 1 : after + 1] = events[position:after]
                events[position] = ~old
                break
            after += 1
    return events


def deaths(events: list[int]) -> dict[int, int]:
    """Position of the event with which each block went."""
    return {~event: position for position, event in enumerate(events) if event < 0}


def births(events: list[int]) -> dict[int, int]:
    """Position of the event with which each block came."""
    return {event: position for position, event in enumerate(events) if event >= 0}


def phase_spans(journal: Journal) -> list[tuple[int, str]]:
    """(position, phase) of each change of phase, in order."""
    return [(position, value) for position, kind, value in journal.marks if kind == "phase"]


def _nbytes(journal: Journal, number: int) -> int:
    row = journal.blocks[number - journal.first] if number >= journal.first else journal.carried[number]
    return row[0]
