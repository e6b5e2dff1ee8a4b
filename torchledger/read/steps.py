"""Reading one step after another: a step that repeats the one before it is not read again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torchledger.journal.entries import DeviceReading, Journal
from torchledger.journal.evidence import StepEvidence
from torchledger.journal.rows import Growth
from torchledger.journal.statements import FlopStatement, MemoryStatement
from torchledger.read.categories import settle
from torchledger.read.events import repaired
from torchledger.read.evidence import gather_evidence
from torchledger.read.flops import flop_statement
from torchledger.read.growth import GrowthReader
from torchledger.read.memory import Dispatched, dispatched_bytes, memory_statements, with_readings

Allocators = Callable[[Dispatched], dict[str, DeviceReading]]
"""Gives what the allocators counted in a step, from the dispatched bytes of each device."""


@dataclass(frozen=True, slots=True)
class StepReading:
    """What a journal says: its FLOPs, its bytes by device, and the category of each block."""

    flops: FlopStatement
    evidence: StepEvidence
    memory: dict[str, MemoryStatement]
    settled: dict[int, int]
    plain: dict[str, MemoryStatement]
    """``memory`` before what the allocators counted."""
    dispatched: Dispatched


@dataclass(slots=True)
class StepReader:
    """Reads the steps of one ledger in order.

    A training loop does the same in each step, so most journals differ from the last in block numbers alone; then the
    last reading holds. That spares most of what `Ledger.step` costs, and makes kept reports share their statements.
    """

    _last: Journal | None = None
    _reading: StepReading | None = None
    _events: list[int] = field(default_factory=list)
    _categories: list[int] = field(default_factory=list)
    _growth: GrowthReader = field(default_factory=GrowthReader)

    def growing(self) -> tuple[Growth, ...]:
        """What has grown up to the last step that was read."""
        return self._growth.rows(self._last.index) if self._last is not None else ()

    def read(self, journal: Journal, allocators: Allocators | None = None) -> StepReading:
        """The reading of a journal; ``allocators`` are asked, where there are any."""
        events = _relative_events(journal)
        repeats = self._repeats(journal, events)
        reading = self._again(journal, allocators) if repeats else read_journal(journal, allocators)
        self._last, self._reading, self._events = journal, reading, events
        if not repeats:
            self._categories = [reading.settled[n] for n in journal.numbers()]
            self._growth.read(journal, reading.settled)  # what grows never repeats
        return reading

    def _repeats(self, journal: Journal, events: list[int]) -> bool:
        last = self._last
        return (
            last is not None
            and events == self._events
            and journal.marks == last.marks
            and journal.blocks == last.blocks
            and list(journal.carried.values()) == list(last.carried.values())
            and _roles(journal) == _roles(last)
            and journal.copies == last.copies
            and _relative_adds(journal) == _relative_adds(last)
            and journal.modules == last.modules
            and journal.compiled == last.compiled
        )

    def _again(self, journal: Journal, allocators: Allocators | None) -> StepReading:
        assert self._last is not None and self._reading is not None
        before = self._reading
        same = (
            journal.products == self._last.products
            and journal.global_excess == self._last.global_excess
            and journal.uncounted == self._last.uncounted
            and journal.parameters == self._last.parameters
        )
        same_evidence = (
            same
            and journal.readers == self._last.readers
            and journal.batches == self._last.batches
            and journal.segments == self._last.segments
            and journal.enclosing == self._last.enclosing
            and journal.parameter_rows == self._last.parameter_rows
        )
        settled = dict(zip(journal.numbers(), self._categories, strict=True))
        flops = before.flops if same else flop_statement(journal)
        evidence = before.evidence if same_evidence else gather_evidence(journal, settled)
        reading = StepReading(flops, evidence, before.plain, settled, before.plain, before.dispatched)
        return _ask(journal, reading, allocators)


def read_journal(journal: Journal, allocators: Allocators | None = None) -> StepReading:
    """The reading of one journal by itself."""
    as_alone = repaired(journal)
    settled = settle(as_alone, as_alone.events)
    plain = memory_statements(as_alone, settled, as_alone.events)
    dispatched = dispatched_bytes(journal, settled) if allocators else {}
    evidence = gather_evidence(journal, settled)
    return _ask(journal, StepReading(flop_statement(journal), evidence, plain, settled, plain, dispatched), allocators)


def _ask(journal: Journal, reading: StepReading, allocators: Allocators | None) -> StepReading:
    if allocators is None:
        return reading
    dispatched = reading.dispatched or dispatched_bytes(journal, reading.settled)
    journal.readings = allocators(dispatched)
    return replace(reading, memory=with_readings(reading.plain, journal.readings, dispatched), dispatched=dispatched)


def _relative_events(journal: Journal) -> list[int]:
    """The events with blocks numbered from the step's first; carried blocks by their place, below all others."""
    first = journal.first
    place = {~number: -(1 << 40) - index for index, number in enumerate(journal.carried)}
    last = ~first
    return [
        event - first if event >= 0 else event + first if event <= last else place[event] for event in journal.events
    ]


def _roles(journal: Journal) -> tuple[list[int], list[tuple[int, int]]]:
    roles, first = journal.roles, journal.first
    return (
        [roles.get(number, 0) for number in journal.carried],
        [(number - first, role) for number, role in roles.items() if number >= first],
    )


def _relative_adds(journal: Journal) -> list[tuple[int, int]]:
    return [(position, old - journal.first) for position, old in journal.inplace_adds]
