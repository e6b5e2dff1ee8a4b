"""The page that a report is: which tables, in which order, about which step."""

from __future__ import annotations

from collections.abc import Iterator

from torchledger.journal.statements import PHASES, MemoryStatement, RunStatement, StepReport
from torchledger.read.utilization import read_utilization
from torchledger.render.findings import audit_table, growing_table, unseen_facts
from torchledger.render.names import clean, module_label, shorten
from torchledger.render.rows import has_allocator_reading, step_shown
from torchledger.render.tables import (
    Facts,
    Section,
    byte_module_table,
    category_table,
    copy_table,
    count_table,
    device_table,
    flop_module_table,
    flop_table,
    largest_table,
    phase_peak_table,
)
from torchledger.units import format_bytes, format_count, format_flops, format_number, format_seconds, format_share


def report_sections(run: RunStatement) -> tuple[Section, ...]:
    """What a report has to say, in order: faults, what it is about, FLOPs, bytes, notes.

    All tables are about one step, so that their numbers belong together: the step with the highest peak.

    >>> [section.title for section in report_sections(RunStatement())]
    ['torchledger: nothing was recorded']
    """
    return tuple(_sections(run))


def _sections(run: RunStatement) -> Iterator[Section]:
    if run.faults:
        lines = tuple(("fault", clean(fault)) for fault in run.faults)
        yield Facts("FAULTS inside torchledger: the numbers below may be wrong. Please report them.", lines, loud=True)
    step = step_shown(run)
    if step is None or not _has_numbers(run):
        yield Facts("torchledger: nothing was recorded", (("steps", _why_nothing(run)),))
        if (unseen := unseen_facts(run)) is not None:
            yield unseen
        return
    yield Facts("torchledger", tuple(_summary(run, step)))
    yield from _flop_sections(run, step)
    device = run.main_device if run.main_device in step.memory else step.main_device
    if device in step.memory:
        yield from _memory_sections(step, device)
    yield from (table for table in (growing_table(run), *map(audit_table, run.steps)) if table is not None)
    notes = dict.fromkeys(clean(note) for note in _notes_of(step))
    if notes:
        yield Facts("Notes", tuple(("note", note) for note in notes))
    if (unseen := unseen_facts(run)) is not None:
        yield unseen


def _has_numbers(run: RunStatement) -> bool:
    """Whether any step has a byte, a FLOP or a call in it."""
    steps = run.steps if run.remainder is None else (*run.steps, run.remainder)
    flops = [run.flops, *(step.flops for step in steps)]
    return any(f.total or f.uncounted or f.int_ops or f.compiled_regions for f in flops) or any(
        memory.peak.total_bytes or memory.reserved_peak_bytes or memory.external_bytes or memory.copies
        for step in steps
        for memory in step.memory.values()
    )


def _why_nothing(run: RunStatement) -> str:
    if not run.steps and run.unrecorded.n_steps:
        return f"none was recorded: the schedule left out all of the {format_number(run.unrecorded.n_steps, 'step')}"
    if not run.steps:
        return "none was recorded: no op ran inside the ledger, or its schedule left every step out"
    return "no op of torch ran in them on this thread; other threads and processes are not seen"


def _summary(run: RunStatement, step: StepReport) -> Iterator[tuple[str, str]]:
    if run.environment:
        yield "environment", "; ".join(_environment(run))
        if isinstance(note := run.environment.get("note"), str):
            yield "note", clean(note)
    yield "steps", _steps_line(run, step)
    total, model = run.flops.total, run.flops.model
    if run.n_steps > 1:
        yield "all steps", f"{format_flops(total)} on the hardware, {format_flops(model)} of the model"
    if step.tokens:
        flops = step.flops
        yield "tokens", f"{format_count(step.tokens)} a step"
        per_token = [format_count(round(n / step.tokens)) for n in (flops.total, flops.model)]
        yield "FLOPs a token", f"{per_token[0]} on the hardware, {per_token[1]} of the model"
    else:
        yield "FLOPs a token", "N/A: the tokens of a step are not known (give tokens_per_step)"
    yield "MFU, HFU", _utilization_line(run)
    if run.peak.total_bytes:
        peak = run.peak
        where = f", in {peak.phase} at {clean(peak.op)} of {module_label(peak.module)}" if peak.op else ""
        yield "peak", f"{format_bytes(peak.total_bytes)} on {clean(run.main_device)}{where}"
    if run.remainder is not None:
        yield "remainder", _remainder_line(run.remainder)
    yield "duration", f"{format_seconds(step.duration_s)} under recording, which takes longer than the step by itself"


def _remainder_line(remainder: StepReport) -> str:
    """What ran after the last step: an evaluation, say."""
    flops = remainder.flops
    phases = (
        ", ".join(f"{format_flops(n)} of {phase}" for phase in PHASES if (n := getattr(flops, phase))) or "no product"
    )
    return f"what ran after the last step, in no number here: {phases}; peak {format_bytes(remainder.peak.total_bytes)}"


def _steps_line(run: RunStatement, step: StepReport) -> str:
    if run.n_steps == 1:
        return "1 recorded"
    why = "has the highest peak" if step is run.peak_step else "is the last one"
    kept = "" if len(run.steps) == run.n_steps else f", {format_count(len(run.steps))} kept"
    alike = len({s.flops.total for s in run.steps}) == 1
    flops = "each step has the same FLOPs" if alike else "the steps differ in FLOPs"
    return f"{format_count(run.n_steps)} recorded{kept}; the tables show step {step.index}, which {why} ({flops})"


def _environment(run: RunStatement) -> Iterator[str]:
    for key, value in sorted(run.environment.items()):
        if key == "note":
            continue
        if isinstance(value, dict):  # of devices, each with its name
            text = ", ".join(
                f"{name} ({entry.get('name')})" for name, entry in value.items() if isinstance(entry, dict)
            )
        else:
            text = str(value) if isinstance(value, str | int | float) else ""
        if text:
            yield f"{clean(key)} {shorten(clean(text), 60)}"


def _utilization_line(run: RunStatement) -> str:
    found = read_utilization(run)
    if found.mfu is None or found.hfu is None:
        return f"N/A: {clean(found.reason)}"
    steps = f"{format_number(run.unrecorded.n_steps, 'unrecorded step')} of {format_seconds(found.seconds)}"
    of = f"of {clean(run.environment['accelerator'])} in {clean(run.environment['dtype'])}"
    return f"{found.mfu:.1%}, {found.hfu:.1%} {of}, over {steps}"


def _flop_sections(run: RunStatement, step: StepReport) -> Iterator[Section]:
    flops, of_step = step.flops, f"of step {step.index}"
    yield flop_table(flops, f"FLOPs {of_step} by phase (1 multiply-add = 2 FLOP)")
    uncounted = run.flops.uncounted or flops.uncounted
    title = "UNCOUNTED ops of all steps: their FLOPs are unknown, and in no total"
    tables = (
        count_table(uncounted, title, "op", "calls"),
        flop_module_table(flops, f"FLOPs {of_step} by module"),
        count_table(flops.by_op, f"FLOPs {of_step} by op", "op", "FLOP"),
        count_table(flops.by_dtype, f"FLOPs {of_step} by dtype", "dtype", "FLOP"),
    )
    yield from (table for table in tables if table is not None)


def _memory_sections(step: StepReport, device: str) -> Iterator[Section]:
    memory = step.memory[device]
    of_step = f"of step {step.index} on {clean(device)}"
    yield category_table(memory, device, f"Bytes {of_step} by category")
    yield Facts(f"Peak {of_step}", tuple(_peak_facts(memory, device)))
    others = {name: statement for name, statement in step.memory.items() if name != device}
    tables = (
        phase_peak_table(memory, f"Peak of each phase {of_step}"),
        byte_module_table(memory.peak, f"Bytes at the peak {of_step} by module", rooted="" in step.flops.by_module),
        largest_table(memory.peak, f"Largest rows at the peak {of_step}"),
        copy_table(memory, f"Copies {of_step}"),
        device_table(others, f"Other devices, step {step.index}"),
    )
    yield from (table for table in tables if table is not None)


def _peak_facts(memory: MemoryStatement, device: str) -> Iterator[tuple[str, str]]:
    peak, start = memory.peak, memory.start.total_bytes
    yield "peak", f"{_both(peak.total_bytes)}, {format_bytes(peak.total_bytes - start, signed=True)} over the start"
    if peak.phase or peak.op:
        yield (
            "where",
            f"in {peak.phase or 'no phase'}, module {module_label(peak.module)}, op {clean(peak.op) or 'none'}",
        )
    if has_allocator_reading(device, memory):
        yield "requested", _both(memory.requested_peak_bytes)
        yield "allocated", _both(memory.allocated_peak_bytes)
        yield "reserved", _both(memory.reserved_peak_bytes)
        yield "rounding", f"{_both(memory.allocated_peak_bytes - memory.requested_peak_bytes)}, allocated - requested"
        yield "fragments", f"{_both(memory.reserved_peak_bytes - memory.allocated_peak_bytes)}, reserved - allocated"
        share = format_share(peak.unexplained, peak.total_bytes)
        yield "unexplained", f"{_both(peak.unexplained)}, {share or '0.0 %'} of the peak"
    if memory.external_bytes:
        yield "external", f"{_both(memory.external_bytes)} that no allocator gave (numpy, mapped files), in no total"


def _both(nbytes: int) -> str:
    return f"{format_bytes(nbytes)} ({format_count(nbytes)} bytes)"


def _notes_of(step: StepReport) -> Iterator[str]:
    yield from step.notes
    for memory in step.memory.values():
        yield from memory.notes
