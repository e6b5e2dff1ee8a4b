"""From the blocks and events of a journal to a statement of bytes for each device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from torchledger.journal.entries import EXTERNAL, LATE, DeviceReading, Journal, Row
from torchledger.journal.statements import CATEGORIES, PHASES, Allocation, Copies, MemorySnapshot, MemoryStatement
from torchledger.read.events import births, deaths, phase_spans

LARGEST_ROWS = 12
"""How many rows a snapshot's ``largest`` has."""


@dataclass(slots=True)
class _Instant:
    """A position among the events (how many have happened) and the total at it."""

    total: int
    position: int
    phase: str = ""
    number: int | None = None
    """The block whose coming made it, None where it was there when a phase began."""


@dataclass(slots=True)
class _Run:
    """One pass over the events of one device."""

    start: int = 0
    total: int = 0
    external: int = 0
    external_peak: int = 0
    peak: _Instant = field(default_factory=lambda: _Instant(0, 0))
    by_phase: dict[str, _Instant] = field(default_factory=dict)
    held: list[int] = field(default_factory=lambda: [0] * len(CATEGORIES))
    maxima: list[int] = field(default_factory=lambda: [0] * len(CATEGORIES))


def memory_statements(journal: Journal, settled: dict[int, int], events: list[int]) -> dict[str, MemoryStatement]:
    """The statement of each device that a block of the step lies on.

    Args:
        journal: The step.
        settled: The category of each block, from `settle`.
        events: The events as `repaired_events` gives them.
    """
    runs = _run(journal, settled, events)
    copies = _copies(journal)
    reader = _SnapshotReader(journal, settled, events)
    unrepaired = _run(journal, settled, journal.events) if journal.readings and events is not journal.events else runs
    statements = {}
    for device, run in sorted(runs.items()):
        reading = journal.readings.get(device)
        start = reader.snapshot(device, 0)
        end = reader.snapshot(device, len(events))
        peak = reader.instant(device, run.peak)
        by_phase = {p: reader.instant(device, run.by_phase[p]) for p in PHASES if p in run.by_phase}
        maxima = dict(zip(CATEGORIES, run.maxima, strict=True))
        requested = allocated = reserved = peak.total_bytes
        if reading is not None:
            gap = reading.requested_peak - unrepaired[device].peak.total
            peak = _with_reading(peak, reading, gap)
            start = _with_reading(start, reading, reading.requested_start - start.total_bytes)
            end = _with_reading(end, reading, reading.requested_end - end.total_bytes)
            maxima["workspace"] += peak.workspace
            maxima["unexplained"] += max(peak.unexplained, 0)
            requested, allocated, reserved = reading.requested_peak, reading.allocated_peak, reading.reserved_peak
        statements[device] = MemoryStatement(
            start=start,
            end=end,
            peak=peak,
            peak_by_phase=by_phase,
            copies=copies.get(device, ()),
            requested_peak_bytes=requested,
            allocated_peak_bytes=allocated,
            reserved_peak_bytes=reserved,
            category_peaks=maxima,
            external_bytes=run.external_peak,
            notes=_notes(journal),
        )
    return statements or {"cpu": MemoryStatement(category_peaks=dict.fromkeys(CATEGORIES, 0))}


def _run(journal: Journal, settled: dict[int, int], events: list[int]) -> dict[str, _Run]:
    runs: dict[str, _Run] = defaultdict(_Run)
    roles, first = journal.roles, journal.first
    external = set()
    for number, role in roles.items():
        if role & EXTERNAL:
            external.add(number)
    for number, row in _there_before(journal):
        run = runs[row[1]]
        if number in external:
            run.external += row[0]
        else:
            run.start += row[0]
            run.held[settled[number]] += row[0]
    for run in runs.values():
        run.total = run.start
        run.external_peak = run.external
        run.peak = _Instant(run.start, 0)
        run.maxima = list(run.held)
    blocks, carried = journal.blocks, journal.carried
    spans = [*phase_spans(journal), (len(events) + 1, "")]
    span, phase = 0, ""
    for position, event in enumerate(events):
        while spans[span][0] <= position:
            phase = spans[span][1]
            _begin_phase(runs, phase, position)
            span += 1
        if event >= 0:
            row = blocks[event - first]
            nbytes = row[0]
            run = runs[row[1]]
            if event in external:
                run.external += nbytes
                run.external_peak = max(run.external_peak, run.external)
                continue
            run.total = total = run.total + nbytes
            category = settled[event]
            run.held[category] = held = run.held[category] + nbytes
            if held > run.maxima[category]:
                run.maxima[category] = held
            if total > run.peak.total:
                run.peak = _Instant(total, position + 1, row[2], event)
            best = run.by_phase.get(row[2])
            if best is None or total > best.total:
                run.by_phase[row[2]] = _Instant(total, position + 1, row[2], event)
        else:
            number = ~event
            row = blocks[number - first] if number >= first else carried[number]
            run = runs[row[1]]
            if number in external:
                run.external -= row[0]
                continue
            run.total -= row[0]
            run.held[settled[number]] -= row[0]
    for position, phase in spans[span:-1]:
        _begin_phase(runs, phase, position)
    return runs


def _begin_phase(runs: dict[str, _Run], phase: str, position: int) -> None:
    for run in runs.values():
        best = run.by_phase.get(phase)
        if best is None or run.total > best.total:
            run.by_phase[phase] = _Instant(run.total, position, phase)


def _there_before(journal: Journal) -> Iterable[tuple[int, Row]]:
    yield from journal.carried.items()
    for number, role in journal.roles.items():
        if role & LATE and number >= journal.first:
            yield number, journal.blocks[number - journal.first]


class _SnapshotReader:
    """Snapshots at positions of one step; what is alive all along is added up once."""

    def __init__(self, journal: Journal, settled: dict[int, int], events: list[int]) -> None:
        self._journal = journal
        self._settled = settled
        came, went = births(events), deaths(events)
        never = len(events)
        self._passing: dict[str, list[tuple[int, int, int, Row]]] = defaultdict(list)
        """(came, went, number, row): alive at a position p if came < p <= went."""
        self._lasting: dict[str, _Sum] = defaultdict(_Sum)
        roles, paths = journal.roles, journal.modules
        for number, row in _there_before(journal):
            if roles.get(number, 0) & EXTERNAL:
                continue
            if number in went:
                self._passing[row[1]].append((-1, went[number], number, row))
            else:
                self._lasting[row[1]].add(row, settled[number], paths)
        for number, position in came.items():
            row = journal.blocks[number - journal.first]
            if not roles.get(number, 0) & EXTERNAL:
                self._passing[row[1]].append((position, went.get(number, never), number, row))
        self._cache: dict[tuple[str, int], MemorySnapshot] = {}

    def instant(self, device: str, instant: _Instant) -> MemorySnapshot:
        """The snapshot of an instant, named after what ran then."""
        snapshot = self.snapshot(device, instant.position)
        if instant.number is None:
            return replace(snapshot, phase=instant.phase)
        row = self._journal.block(instant.number)
        return replace(snapshot, phase=row.phase, module=self._journal.modules[row.module], op=row.op)

    def snapshot(self, device: str, position: int) -> MemorySnapshot:
        """What is alive after so many events."""
        cached = self._cache.get((device, position))
        if cached is None:
            here = self._lasting[device].copy()
            settled, paths = self._settled, self._journal.modules
            for came, went, number, row in self._passing[device]:
                if came < position <= went:
                    here.add(row, settled[number], paths)
            cached = self._cache[device, position] = here.snapshot(self._journal.sites)
        return cached


_Key = tuple[int, str, int, str, tuple[int, ...], str, int, int]


class _Sum:
    """Bytes by category, module and row."""

    def __init__(self) -> None:
        self.categories = [0] * len(CATEGORIES)
        self.modules: dict[str, int] = {}
        self.rows: dict[_Key, list[int]] = {}
        self._paths: list[str] = []

    def copy(self) -> _Sum:
        other = _Sum()
        other.categories = list(self.categories)
        other.modules = dict(self.modules)
        other.rows = {key: list(value) for key, value in self.rows.items()}
        other._paths = self._paths
        return other

    def add(self, row: Row, category: int, paths: list[str]) -> None:
        nbytes, _, phase, module, op, shape, dtype, site = row
        self._paths = paths
        self.categories[category] += nbytes
        path = paths[module]
        self.modules[path] = self.modules.get(path, 0) + nbytes
        key = (category, phase, module, op, shape, dtype, site, nbytes)
        entry = self.rows.get(key)
        if entry is None:
            self.rows[key] = [nbytes, 1]
        else:
            entry[0] += nbytes
            entry[1] += 1

    def snapshot(self, sites: list[str]) -> MemorySnapshot:
        best = sorted(self.rows.items(), key=lambda item: (-item[1][0], item[0]))[:LARGEST_ROWS]
        largest = tuple(
            Allocation(
                nbytes=total,
                category=CATEGORIES[category],
                phase=phase,
                module=self._paths[module],
                op=op,
                shape=tuple(shape),
                dtype=dtype,
                n_blocks=n,
                where=sites[site] if site >= 0 else None,
            )
            for (category, phase, module, op, shape, dtype, site, _), (total, n) in best
        )
        by_category: dict[str, Any] = dict(zip(CATEGORIES, self.categories, strict=True))
        return MemorySnapshot(
            total_bytes=sum(self.categories),
            **by_category,
            by_module=dict(sorted(self.modules.items())),
            largest=largest,
        )


def _with_reading(snapshot: MemorySnapshot, reading: DeviceReading, gap: int) -> MemorySnapshot:
    """A snapshot with what the allocator counts beyond the dispatched bytes: known workspaces first, then the rest."""
    workspace = min(reading.workspace, gap) if gap > 0 else 0
    modules = dict(snapshot.by_module)
    if gap:
        modules["(outside)"] = modules.get("(outside)", 0) + gap
    return replace(
        snapshot,
        total_bytes=snapshot.total_bytes + gap,
        workspace=snapshot.workspace + workspace,
        unexplained=snapshot.unexplained + gap - workspace,
        by_module=modules,
    )


def _copies(journal: Journal) -> dict[str, tuple[Copies, ...]]:
    sums: dict[tuple[str, str, str], list[int]] = {}
    for kind, device, nbytes, module in journal.copies:
        entry = sums.setdefault((device, kind, journal.modules[module]), [0, 0])
        entry[0] += nbytes
        entry[1] += 1
    rows: dict[str, list[Copies]] = defaultdict(list)
    for (device, kind, path), (nbytes, calls) in sorted(sums.items(), key=lambda item: (-item[1][0], item[0])):
        rows[device].append(Copies(kind, nbytes, calls, path))
    return {device: tuple(found) for device, found in rows.items()}


def _notes(journal: Journal) -> tuple[str, ...]:
    if journal.compiled_regions:
        return (
            f"{journal.compiled_regions} compiled regions ran: what they allocate inside themselves is not known here.",
        )
    return ()
