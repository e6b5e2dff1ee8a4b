"""What a step's peak would be with every block checkpointed: an estimate from its journal alone."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from torchledger.journal.entries import EXTERNAL, LATE, Journal
from torchledger.read.categories import INDEX, settle
from torchledger.read.events import births, deaths, phase_spans, repaired

_ACTIVATIONS = INDEX["activations"]
_NUMBERED = re.compile(r"(?:^|\.)[0-9]+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class CheckpointEstimate:
    """The estimated peak, in bytes, with each of ``n_blocks`` blocks of ``group`` checkpointed.

    ``saved_bytes`` are the activations that the blocks would no longer keep, all together.
    """

    peak_bytes: int
    measured_peak_bytes: int
    group: str
    n_blocks: int
    saved_bytes: int


@dataclass(slots=True)
class _Segment:
    """One block: what its forward keeps, where that forward ends, and where its backward begins."""

    kept: list[int]
    forward_end: int
    backward_begin: int


def estimate_checkpointed(journal: Journal, device: str) -> CheckpointEstimate | None:
    """The peak of a device with every repeated block checkpointed, or None where there is nothing to estimate.

    Each block's activations, but for the last one (its output, the next block's input), go when its forward ends, and
    come back when its backward begins. What recompute allocates besides is not counted.

    Args:
        journal: A step without recompute.
        device: Whose bytes.
    """
    phases = {phase for _, phase in phase_spans(journal)}
    if "recompute" in phases or "backward" not in phases:
        return None
    journal = repaired(journal)
    events = journal.events
    came, went = births(events), deaths(events)
    settled = settle(journal, events)
    kept = [
        number
        for number in came
        if settled[number] == _ACTIVATIONS
        and journal.block(number).device == device
        and journal.block(number).phase == "forward"
        and not journal.roles.get(number, 0) & EXTERNAL
    ]
    group = _find_group(journal, kept)
    if group is None:
        return None
    segments = _segments(journal, events, kept, group)
    changes: dict[int, int] = defaultdict(int)
    saved = 0
    for segment in segments.values():
        for number in segment.kept:
            death = went.get(number, len(events))
            if came[number] < segment.forward_end < segment.backward_begin <= death:
                nbytes = journal.block(number).nbytes
                changes[segment.forward_end + 1] -= nbytes
                changes[segment.backward_begin] += nbytes
                saved += nbytes
    if not saved:
        return None
    before, after = _peaks(journal, events, device, changes)
    return CheckpointEstimate(after, before, group, len(segments), saved)


def _find_group(journal: Journal, kept: list[int]) -> str | None:
    """The list of modules whose children hold most activations: ``blocks`` of ``blocks.0`` to ``blocks.11``."""
    held: dict[str, int] = defaultdict(int)
    children: dict[str, set[str]] = defaultdict(set)
    for number in kept:
        block = journal.block(number)
        path = journal.modules[block.module]
        for match in _NUMBERED.finditer(path):
            group = path[: match.start()]
            held[group] += block.nbytes
            children[group].add(path[: match.end()])
    several = [group for group in held if len(children[group]) > 1]
    return max(several, key=lambda group: (held[group], -len(group)), default=None)


def _segments(journal: Journal, events: list[int], kept: list[int], group: str) -> dict[str, _Segment]:
    def block_of(module: int) -> str | None:
        path = journal.modules[module]
        match = next((m for m in _NUMBERED.finditer(path) if path[: m.start()] == group), None)
        return path[: match.end()] if match else None

    segments: dict[str, _Segment] = {}
    for number in kept:
        name = block_of(journal.block(number).module)
        if name is not None:
            segments.setdefault(name, _Segment([], -1, len(events))).kept.append(number)
    for position, event in enumerate(events):
        if event < 0:
            continue
        block = journal.block(event)
        segment = segments.get(block_of(block.module) or "")
        if segment is not None and block.phase == "forward":
            segment.forward_end = position
        elif segment is not None and block.phase == "backward":
            segment.backward_begin = min(segment.backward_begin, position)
    for segment in segments.values():
        del segment.kept[-1]  # the output is the next block's input
    return segments


def _peaks(journal: Journal, events: list[int], device: str, changes: dict[int, int]) -> tuple[int, int]:
    """The highest totals without and with the changes at positions among the events."""

    def size(number: int) -> int:
        block = journal.block(number)
        return 0 if block.device != device or journal.roles.get(number, 0) & EXTERNAL else block.nbytes

    total = sum(size(n) for n in journal.numbers() if n < journal.first or journal.roles.get(n, 0) & LATE)
    before = after = total
    change = 0
    for position, event in enumerate(events):
        change += changes.get(position, 0)
        total += size(event) if event >= 0 else -size(~event)
        before = max(before, total)
        after = max(after, total + change)
    return before, after
