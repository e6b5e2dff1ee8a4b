"""From the blocks and events of a journal to a statement of bytes for each device."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

from torchledger.journal.entries import EXTERNAL, DeviceReading, Journal
from torchledger.journal.statements import CATEGORIES, PHASES, Copies, MemorySnapshot, MemoryStatement, StepReport
from torchledger.read.categories import settle
from torchledger.read.events import phase_spans, repaired
from torchledger.read.formulas import formulas
from torchledger.read.snapshots import PEAK_ROWS, SnapshotReader, there_before
from torchledger.units import format_number

_NOTED_PART = 100
"""What makes less than this part of the peak needs no note."""

Dispatched = dict[str, tuple[int, int, int]]
"""Start, peak and end of the dispatched bytes of each device."""


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
    """The statement of each device that a block of the step lies on, from what was dispatched alone.

    Args:
        journal: The step.
        settled: The category of each block, from `settle`.
        events: The events as `repaired` gives them.
    """
    runs = _run(journal, settled, events)
    copies = _copies(journal)
    reader = SnapshotReader(journal, settled, events)
    statements = {}
    for device, run in sorted(runs.items()):
        start = reader.snapshot(device, 0)
        end = reader.snapshot(device, len(events))
        peak = _named(reader.snapshot(device, run.peak.position), run.peak, journal)
        by_phase = {
            phase: _named(reader.snapshot(device, instant.position), instant, journal)
            for phase in PHASES
            if (instant := run.by_phase.get(phase)) is not None
        }
        statements[device] = MemoryStatement(
            start=start,
            end=end,
            peak=peak,
            peak_by_phase=by_phase,
            copies=copies.get(device, ()),
            requested_peak_bytes=peak.total_bytes,
            allocated_peak_bytes=peak.total_bytes,
            reserved_peak_bytes=peak.total_bytes,
            category_peaks=dict(zip(CATEGORIES, run.maxima, strict=True)),
            external_bytes=run.external_peak,
            notes=_notes(journal, device, peak.total_bytes),
        )
    return statements or {"cpu": MemoryStatement(category_peaks=dict.fromkeys(CATEGORIES, 0))}


def with_peak_rows(step: StepReport, journal: Journal) -> StepReport:
    """The step whose peaks have all their rows, up to `PEAK_ROWS`, so that they can be compared row by row.

    Reading a journal once more takes as long as the first time: this is for the one step that a report is about.
    """
    journal = repaired(journal)
    events = journal.events
    settled = settle(journal, events)
    reader = SnapshotReader(journal, settled, events)
    memory = dict(step.memory)
    for device, run in _run(journal, settled, events).items():
        if device in memory:
            rows = reader.snapshot(device, run.peak.position, n_rows=PEAK_ROWS).largest
            memory[device] = replace(memory[device], peak=replace(memory[device].peak, largest=rows))
    return replace(step, memory=memory)


def dispatched_bytes(journal: Journal, settled: dict[int, int]) -> Dispatched:
    """What each device held of dispatched bytes while the ledger was on, sums of gradients out of place included."""
    return {
        device: (run.start, run.peak.total, run.total) for device, run in _run(journal, settled, journal.events).items()
    }


def with_readings(
    statements: dict[str, MemoryStatement], readings: dict[str, DeviceReading], dispatched: Dispatched
) -> dict[str, MemoryStatement]:
    """The same statements with what the allocators counted beyond the dispatched bytes."""
    return {
        device: _with_allocator(statement, readings[device], dispatched[device][1]) if device in readings else statement
        for device, statement in statements.items()
    }


def _with_allocator(statement: MemoryStatement, reading: DeviceReading, dispatched_peak: int) -> MemoryStatement:
    start, end = statement.start, statement.end
    before, after = (
        reading.workspace if known is None else known for known in (reading.workspace_start, reading.workspace_end)
    )
    if reading.in_place:
        dispatched_peak = statement.peak.total_bytes
    peak = _with_reading(statement.peak, reading.workspace, reading.requested_peak - dispatched_peak)
    maxima = dict(statement.category_peaks)
    maxima["workspace"] += peak.workspace
    maxima["unexplained"] += max(peak.unexplained, 0)
    return replace(
        statement,
        start=_with_reading(start, before, reading.requested_start - start.total_bytes),
        end=_with_reading(end, after, reading.requested_end - end.total_bytes),
        peak=peak,
        category_peaks=maxima,
        notes=(*statement.notes, *_workspace_note(reading)),
        requested_peak_bytes=reading.requested_peak,
        allocated_peak_bytes=reading.allocated_peak,
        reserved_peak_bytes=reading.reserved_peak,
    )


def _workspace_note(reading: DeviceReading) -> tuple[str, ...]:
    if reading.cublas is None or not reading.workspace:
        return ()
    copies = reading.workspace - reading.cublas
    rest = f", and {copies:,} bytes of copies inside an op" if copies else ""
    return (f"workspace at the allocator's highest instant: {reading.cublas:,} bytes of cuBLAS{rest}",)


def _named(snapshot: MemorySnapshot, instant: _Instant, journal: Journal) -> MemorySnapshot:
    """The snapshot of an instant, with what ran then."""
    if instant.number is None:
        return replace(snapshot, phase=instant.phase)
    row = journal.block(instant.number)
    return replace(snapshot, phase=row.phase, module=journal.modules[row.module], op=row.op)


def _run(journal: Journal, settled: dict[int, int], events: list[int]) -> dict[str, _Run]:
    runs: dict[str, _Run] = defaultdict(_Run)
    external = {number for number, role in journal.roles.items() if role & EXTERNAL}
    for number, row in there_before(journal):
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
    _pass(journal, settled, events, runs, external)
    return runs


def _pass(
    journal: Journal, settled: dict[int, int], events: list[int], runs: dict[str, _Run], external: set[int]
) -> None:
    """Walk through the events once."""
    blocks, carried, first = journal.blocks, journal.carried, journal.first
    spans = [*phase_spans(journal), (len(events) + 1, "")]
    span, next_span = 0, spans[0][0]
    for position, event in enumerate(events):
        while next_span <= position:
            _begin_phase(runs, spans[span][1], position)
            span += 1
            next_span = spans[span][0]
        if event < 0:
            number = ~event
            row = blocks[number - first] if number >= first else carried[number]
            run = runs[row[1]]
            if number in external:
                run.external -= row[0]
            else:
                run.total -= row[0]
                run.held[settled[number]] -= row[0]
            continue
        row = blocks[event - first]
        nbytes, run = row[0], runs[row[1]]
        if event in external:
            run.external += nbytes
            run.external_peak = max(run.external_peak, run.external)
            continue
        run.total = total = run.total + nbytes
        category = settled[event]
        run.held[category] = held = run.held[category] + nbytes
        if held > run.maxima[category]:
            run.maxima[category] = held
        phase = row[2]
        best = run.by_phase.get(phase)
        if best is None or total > best.total:
            run.by_phase[phase] = instant = _Instant(total, position + 1, phase, event)
            if total > run.peak.total:
                run.peak = instant
    for position, phase in spans[span:-1]:
        _begin_phase(runs, phase, position)


def _begin_phase(runs: dict[str, _Run], phase: str, position: int) -> None:
    for run in runs.values():
        best = run.by_phase.get(phase)
        if best is None or run.total > best.total:
            run.by_phase[phase] = _Instant(run.total, position, phase)


def _with_reading(snapshot: MemorySnapshot, known: int, gap: int) -> MemorySnapshot:
    """A snapshot with what the allocator counts beyond the dispatched bytes: known workspaces first, then the rest."""
    workspace = min(known, gap) if gap > 0 else 0
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


def _notes(journal: Journal, device: str, peak_bytes: int) -> tuple[str, ...]:
    notes = []
    if journal.compiled:
        regions = format_number(len(journal.compiled), "compiled region")
        notes.append(f"{regions} ran: what they allocate inside themselves is not known here.")
    held: dict[str, int] = defaultdict(int)
    for name, begin, end in formulas(journal):
        born = [journal.block(event) for event in journal.events[begin:end] if event >= 0]
        held[name.partition(" ")[0]] += sum(block.nbytes for block in born if block.device == device)
    notes += [
        f"{name} makes other buffers under a ledger than without one: {nbytes:,} bytes are told as they were."
        for name, nbytes in held.items()
        if nbytes * _NOTED_PART > peak_bytes
    ]
    return tuple(notes)
