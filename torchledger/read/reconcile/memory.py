"""From 16 bytes a parameter to the peak: what is not there at that instant, and what is beyond the model's states."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torchledger.errors import UsageError
from torchledger.journal.statements import CATEGORIES, PHASES, MemorySnapshot, StepReport
from torchledger.read.reconcile.advice import give_advice, weigh
from torchledger.read.reconcile.bridge import Bridge, Drafts
from torchledger.units import format_bytes, format_count

MEMORY_TERMS = (
    "weights_dtype",
    "gradients_absent",
    "gradients_dtype",
    "optimizer_recipe",
    "optimizer_scalars",
    "activations",
    "autocast_copies",
    "communication",
    "unsharded_parameters",
    "inputs",
    "buffers",
    "temporaries",
    "workspace",
    "other",
    "sharding",
    "unexplained",
)
_AS_THEY_ARE = tuple(name for name in MEMORY_TERMS if name in CATEGORIES)


class PhasePeak(NamedTuple):
    """The highest instant of one phase: what it holds most of.

    ``advice`` says what would lower it, at the highest of a step's phases; below it is empty.
    """

    phase: str
    total_bytes: int
    module: str
    op: str
    category: str
    category_bytes: int
    advice: str


def memory_bridge(step: StepReport, device: str | None = None) -> Bridge:
    """The bridge from 16·N bytes to the peak of a step's main device.

    Raises:
        UsageError: the step has no parameters, or the device none of its bytes.

    Source: fp32 weights 4, gradients 4, and Adam's two moments 8 bytes a parameter.
    """
    device = device or step.main_device
    if device not in step.memory or not step.evidence.parameters:
        raise UsageError(
            f"step {step.index} has no parameters, or nothing on {device!r}, to reconcile with: give the model to "
            f"Ledger(model)."
        )
    memory = step.memory[device]
    peak = memory.peak
    n = step.evidence.n_parameters
    drafts = Drafts(MEMORY_TERMS)
    for name, value, why in _state_terms(step, peak, n, device):
        if value:
            drafts.add(name, value)
            drafts.explain(name, why)
    for category in _AS_THEY_ARE:
        if value := peak.by_category[category]:
            drafts.add(category, value)
            drafts.explain(category, _largest_of(peak, category))
    where = f" at {peak.op} of {peak.module or 'the model'}" if peak.op else ""
    notes = [f"the peak lies in {peak.phase or 'the start'}{where}"]
    if memory.allocated_peak_bytes != memory.requested_peak_bytes:
        notes.append(
            f"block rounding adds {format_bytes(memory.allocated_peak_bytes - memory.requested_peak_bytes)} to the "
            f"allocated peak, cached segments {format_bytes(memory.reserved_peak_bytes - memory.allocated_peak_bytes)} "
            f"to the reserved one"
        )
    return Bridge(
        predicted=16 * n,
        terms=drafts.terms(),
        measured=peak.total_bytes,
        unit="bytes",
        rule=f"16·N, N {n:,} parameters: fp32 weights 4, gradients 4, Adam's two moments 8",
        notes=tuple(notes),
    )


def _state_terms(step: StepReport, peak: MemorySnapshot, n: int, device: str) -> list[tuple[str, int, str]]:
    """The terms of what 16 bytes a parameter stand for."""
    there = peak.gradient_elements
    state = peak.optimizer_state - peak.optimizer_scalars
    dtypes = sorted({parameter.dtype for parameter in step.evidence.parameters.values()})
    elsewhere = sum(p.n_elements for p in step.evidence.parameters.values() if p.device != device)
    weights = f"weights are {', '.join(dtypes)}" + (f", {format_count(elsewhere)} elsewhere" if elsewhere else "")
    per_parameter = f"optimizer state is {state / n:.4g} bytes a parameter at that instant, not 8" if n else ""
    return [
        ("weights_dtype", peak.parameters - 4 * n, weights),
        ("gradients_absent", -4 * (n - there), f"{format_count(n - there)} parameters have no gradient there"),
        ("gradients_dtype", peak.gradients - 4 * there, "gradients that are not fp32, or sparse"),
        ("optimizer_recipe", state - 8 * n, per_parameter),
        ("optimizer_scalars", peak.optimizer_scalars, "the optimizer's step counts"),
    ]


def _largest_of(snapshot: MemorySnapshot, category: str) -> str:
    """The largest row of a category, in words."""
    if category == "unexplained":
        return "what the allocator counts and no account claims"
    row = next((row for row in snapshot.largest if row.category == category), None)
    if row is None:
        return "none of them among the largest rows"
    times = f"{row.n_blocks} times " if row.n_blocks > 1 else ""
    made = f"{row.op} of {row.module or 'the model'}" if row.phase else "what was there before"
    return f"most of all {times}{made}: {format_bytes(row.nbytes)}"


def phase_peaks(step: StepReport, device: str | None = None) -> tuple[PhasePeak, ...]:
    """The peak of each phase of a step; of the highest, what would lower it."""
    device = device or step.main_device
    snapshots = {phase: s for phase, s in step.memory[device].peak_by_phase.items() if s.total_bytes}
    highest = max(snapshots, key=lambda phase: snapshots[phase].total_bytes, default="")
    found = []
    for phase in PHASES:
        if phase not in snapshots:
            continue
        snapshot = snapshots[phase]
        category = max(snapshot.by_category, key=partial(weigh, snapshot=snapshot))
        nbytes = snapshot.by_category[category]
        advice = give_advice(phase, category, snapshot, step.evidence, device) if phase == highest else ""
        found.append(PhasePeak(phase, snapshot.total_bytes, snapshot.module, snapshot.op, category, nbytes, advice))
    return tuple(found)
