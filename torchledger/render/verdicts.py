"""Verdicts as text: what was measured and what was allowed, then what fills the memory, then how to accept it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, cast

from tabulate import tabulate

from torchledger.gate.differences import diff_snapshots
from torchledger.gate.judging import Verdict
from torchledger.journal.statements import PHASES, MemorySnapshot, RunStatement, StepReport
from torchledger.render.names import clean, inert, module_label, shape_label
from torchledger.render.rows import count_rows, largest_rows
from torchledger.units import format_bytes, format_count, format_flops, format_gap, format_number, format_share

_ROWS = 6


def render_broken(
    run: RunStatement,
    broken: Iterable[Verdict],
    *,
    base: MemorySnapshot | None = None,
    head: MemorySnapshot | None = None,
    accept: str = "",
) -> str:
    """What a failure says: a line a number, the largest rows, what grew from ``base`` to ``head``, how to accept it.

    >>> print(render_broken(RunStatement(), [Verdict("peak", 3, 2, 2, "OVER", 0, "cpu")]))
    peak 3 B > budget 2 B (+1 B, +50.0 %) on cpu
    """
    verdicts = tuple(broken)
    held = [verdict for verdict in verdicts if verdict.budget is not None]
    parts = ["\n".join([*(verdict_line(run, verdict) for verdict in held), *_missing_lines(run, verdicts)])]
    step = _step_of(run, held, "bytes")
    if step is not None and run.main_device in step.memory:
        peak = step.memory[run.main_device].peak
        if base is not None and base.largest:
            parts.append(_growth_text(base, peak if head is None else head))
        parts.append(_peak_text(step, peak))
    step = _step_of(run, held, "flops")
    if step is not None:
        parts.append(_flops_text(step))
    parts.append(accept)
    return inert("\n\n".join(part for part in parts if part))


def verdict_line(run: RunStatement, verdict: Verdict) -> str:
    """One line: what was measured, against what, how much it differs, and where.

    >>> verdict_line(RunStatement(), Verdict("flops", 900, 1000, 1000, "WIN", 0, "cpu"))
    'WIN: flops 0.90 kFLOP < baseline 1.00 kFLOP (-0.10 kFLOP, -10.0 %) on cpu'
    """
    where = describe_place(run, verdict.device)
    word = "" if verdict.outcome in ("OVER", "PASS") else f"{verdict.outcome}: "
    assert verdict.budget is not None
    measured, budget, gap = _gap(verdict.measured, verdict.budget, verdict.unit)
    sign = ">" if verdict.measured > verdict.budget else "<" if verdict.measured < verdict.budget else "="
    against = "budget" if verdict.outcome in ("OVER", "PASS") else "baseline"
    share = format_share(verdict.measured - verdict.budget, verdict.budget)
    changes = [gap, f"+{share}" if share[:1].isdigit() and verdict.measured > verdict.budget else share]
    slack = "" if verdict.allowed == verdict.budget or verdict.outcome == "PASS" else _slack(verdict)
    more = ", ".join(filter(None, changes))
    return f"{word}{verdict.key} {measured} {sign} {against} {budget} ({more}) on {where}{slack}"


def _missing_lines(run: RunStatement, verdicts: Iterable[Verdict]) -> Iterator[str]:
    """One line for all numbers that have no baseline."""
    missing: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.budget is None:
            missing.setdefault(verdict.outcome, []).append(verdict)
    for outcome, found in missing.items():
        named = [f"{verdict.key} {_in_unit(verdict.measured, verdict.unit)}" for verdict in found[:3]]
        more = [f"and {len(found) - 3} more"] if len(found) > 3 else []
        yield f"{outcome}: no baseline for {', '.join(named + more)} on {describe_place(run, found[0].device)}"


def describe_place(run: RunStatement, device: str) -> str:
    """A device with its name, and the version of torch.

    >>> describe_place(RunStatement(environment={"torch": "2.13.0+cpu", "devices": {"cpu": {"name": "x86_64"}}}), "cpu")
    'cpu (x86_64), torch 2.13.0'
    """
    devices = run.environment.get("devices")
    entry = devices.get(device) if isinstance(devices, dict) else None
    name = entry.get("name") if isinstance(entry, dict) else None
    place = f"{device} ({name})" if isinstance(name, str) and name and name != device else device
    version = run.environment.get("torch")
    torch = f", torch {version.partition('+')[0]}" if isinstance(version, str) else ""
    return clean(place + torch)


def _slack(verdict: Verdict) -> str:
    assert verdict.allowed is not None
    return f"; with its tolerance {_in_unit(verdict.allowed, verdict.unit)}"


def _gap(measured: int, budget: int, unit: str) -> tuple[str, str, str]:
    if unit == "count":
        return format_count(measured), format_count(budget), format_count(measured - budget, signed=True)
    return format_gap(measured, budget, cast(Literal["bytes", "flops"], unit))


def _in_unit(value: int, unit: str) -> str:
    return {"bytes": format_bytes, "flops": format_flops}.get(unit, format_count)(value)


def _step_of(run: RunStatement, verdicts: Iterable[Verdict], unit: str) -> StepReport | None:
    """The step of the first verdict in that unit."""
    index = next((verdict.step_index for verdict in verdicts if verdict.unit == unit), None)
    return next((step for step in run.steps if step.index == index), None)


def _peak_text(step: StepReport, peak: MemorySnapshot) -> str:
    rows, rest = largest_rows(peak, limit=_ROWS)
    where = f", in {peak.phase} at {clean(peak.op) or 'no op'} of {module_label(peak.module)}" if peak.phase else ""
    cells = [
        (
            format_bytes(row.nbytes),
            row.category,
            module_label(row.module),
            clean(row.op),
            row.phase,
            clean(f"{row.dtype} {shape_label(row.shape)}") + (f" x{row.n_blocks}" if row.n_blocks > 1 else ""),
            clean(row.where or ""),
        )
        for row in rows
    ]
    if rows and rest:
        cells.append((format_bytes(rest), "everything else", "", "", "", "", ""))
    return f"At the peak of step {step.index}{where}:\n{_aligned(cells)}".rstrip()


def _growth_text(base: MemorySnapshot, peak: MemorySnapshot) -> str:
    """What moved, the largest first, and behind it what is in no row that a baseline keeps."""
    entries = diff_snapshots(base, peak)
    moved = [entry for entry in entries if entry.kind != "rest"]
    rest = [f"{entry.category} {format_bytes(entry.change, signed=True)}" for entry in entries if entry.kind == "rest"]
    lines = [
        f"  {module_label(entry.module)} {entry.category} "
        f"{format_bytes(entry.change, signed=True)}: {clean(' '.join(filter(None, (entry.op, entry.words))))}"
        for entry in moved[:_ROWS]
    ]
    if len(moved) > _ROWS:
        lines.append(f"  and {format_number(len(moved) - _ROWS, 'smaller change')}")
    if rest:
        lines.append(f"  in rows too small to be kept: {', '.join(rest)}")
    return "\n".join(["What changed at the peak since the baseline:", *lines]) if lines else ""


def _flops_text(step: StepReport) -> str:
    flops = step.flops
    owns = {module: split.self_total for module, split in flops.by_module.items() if split.self_total}
    cells = [
        *((format_flops(row.n), "by op", clean(row.name)) for row in count_rows(flops.by_op, limit=_ROWS // 2)),
        *((format_flops(row.n), "in module", module_label(row.name)) for row in count_rows(owns, limit=_ROWS // 2)),
    ]
    if not cells:
        return ""
    phases = ", ".join(f"{phase} {format_flops(getattr(flops, phase))}" for phase in PHASES if getattr(flops, phase))
    return f"FLOPs of step {step.index} ({phases}):\n{_aligned(cells)}"


def _aligned(cells: Sequence[tuple[str, ...]]) -> str:
    if not cells:
        return ""
    align = ["right", *["left"] * (len(cells[0]) - 1)]
    text = tabulate(cells, tablefmt="plain", disable_numparse=True, colalign=align)
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())


def accept_budget(broken: Iterable[Verdict]) -> str:
    """How to write the limits that the measured numbers would keep.

    >>> accept_budget([Verdict("peak", 3000, 2, 2, "OVER", 0, "cpu")])
    'To accept what was measured: peak=3000'
    """
    return "To accept what was measured: " + ", ".join(f"{verdict.key}={verdict.measured}" for verdict in broken)


def broken_only(verdicts: Iterable[Verdict]) -> Iterator[Verdict]:
    """The verdicts that are no ``PASS``.

    >>> list(broken_only([Verdict("peak", 1, 2, 2, "PASS", 0, "cpu")]))
    []
    """
    return (verdict for verdict in verdicts if verdict.outcome != "PASS")
