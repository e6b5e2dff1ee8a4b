"""Settling what each block is, with hindsight: only the end of a forward pass tells an activation from a temporary."""

from __future__ import annotations

from bisect import bisect_right

from torchledger.journal.entries import (
    AUTOCAST_COPY,
    BUFFER,
    FROM_INPUTS,
    GRADIENT,
    LATE,
    NO_GRAPH,
    OPTIMIZER_STATE,
    PARAMETER,
    READ_BY_FORWARD,
    SETTLED_SHIFT,
    WORKSPACE,
    WRITTEN,
    Journal,
)
from torchledger.journal.statements import CATEGORIES
from torchledger.read.events import deaths, phase_spans

INDEX = {name: index for index, name in enumerate(CATEGORIES)}
_PARAMETERS, _BUFFERS, _STATE = INDEX["parameters"], INDEX["buffers"], INDEX["optimizer_state"]
_GRADIENTS, _COPIES, _INPUTS = INDEX["gradients"], INDEX["autocast_copies"], INDEX["inputs"]
_WORKSPACE = INDEX["workspace"]
_ACTIVATIONS, _TEMPORARIES, _OTHER = INDEX["activations"], INDEX["temporaries"], INDEX["other"]


def settle(journal: Journal, events: list[int]) -> dict[int, int]:
    """The category of each block of a step, as an index into `CATEGORIES`.

    In this order: parameter, buffer, gradient, optimizer state that outlives its step, autocast copy; what an earlier
    step settled; what was there before or came from outside and a forward read: input; made in a forward or a recompute
    with a graph, and alive when the next backward begins or the recompute or the step ends: activation; gone in the
    step: temporary; else other.
    """
    died = deaths(events)
    roles = journal.roles
    boundaries = _boundaries(journal, len(events))
    end = len(events)
    settled: dict[int, int] = {}
    for number in journal.carried:
        role = roles.get(number, 0)
        before = (role >> SETTLED_SHIFT) - 1
        if before < 0 or before == _OTHER:
            # Made outside at the end of one step, read by the next.
            before = _INPUTS if role & READ_BY_FORWARD and not role & WRITTEN else _OTHER
        settled[number] = _by_role(role, outlives=True, default=before)
    for number, row in enumerate(journal.blocks, journal.first):
        role = roles.get(number, 0)
        if role & LATE:
            settled[number] = _by_role(role, outlives=True, default=_OTHER if role & WRITTEN else _INPUTS)
            continue
        gone = died.get(number)
        if role:
            category = _by_role(role, outlives=gone is None, default=-1)
            if category >= 0:
                settled[number] = category
                continue
            if row[2] == "outside" and (role & READ_BY_FORWARD or (role & FROM_INPUTS and gone is None)):
                settled[number] = _INPUTS
                continue
        if (row[2] == "forward" or row[2] == "recompute") and not role & NO_GRAPH:
            if gone is None:
                settled[number] = _ACTIVATIONS
                continue
            # Births are in order of number, so a block's own position is not needed but for the boundary after it.
            settled[number] = -gone - 1  # decided below
            continue
        settled[number] = _OTHER if gone is None else _TEMPORARIES
    _decide_activations(events, boundaries, settled, end)
    return settled


def _decide_activations(events: list[int], boundaries: list[int], settled: dict[int, int], end: int) -> None:
    """Blocks that went within the step were activations if they outlived the next boundary after their birth."""
    for position, event in enumerate(events):
        if event >= 0:
            pending = settled[event]
            if pending < 0:
                gone = -pending - 1
                after = bisect_right(boundaries, position)
                boundary = boundaries[after] if after < len(boundaries) else end
                settled[event] = _ACTIVATIONS if gone >= boundary else _TEMPORARIES


def _boundaries(journal: Journal, end: int) -> list[int]:
    """Positions at which a backward begins, a recompute ends, or the step does."""
    found = [position for position, kind, _ in journal.marks if kind == "backward"]
    before = ""
    for position, phase in phase_spans(journal):
        if before == "recompute":
            found.append(position)
        before = phase
    return sorted({*found, end})


def _by_role(role: int, *, outlives: bool, default: int) -> int:
    if role & PARAMETER:
        return _PARAMETERS
    if role & WORKSPACE:
        return _WORKSPACE
    if role & BUFFER:
        return _BUFFERS
    if role & GRADIENT:
        return _GRADIENTS
    if role & OPTIMIZER_STATE and outlives:
        return _STATE
    if role & AUTOCAST_COPY:
        return _COPIES
    return default
