"""Two runs held against each other: a verdict for each quantity, and what differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torchledger.gate.differences import Differences, diff_statements
from torchledger.gate.judging import Outcome, Verdict, explain_mismatch, judge, worst_outcome
from torchledger.gate.machine import Machine, read_machine
from torchledger.gate.programs import explain_unrelated
from torchledger.gate.quantities import QUANTITIES, Measured, find_quantity, measure_quantities
from torchledger.gate.tolerances import Tolerance, default_tolerance
from torchledger.journal.statements import RunStatement, StepReport, is_accelerator
from torchledger.units import format_count, format_number

REPEAT_THE_PEAK = ("requested", "allocated", "reserved")
"""Where there is no allocator, these are the peak under other names, and go by its tolerance."""

NOTHING_TO_COMPARE = 3


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs of one thing, ``name`` (a test's id; empty for a plain report), held against each other."""

    name: str
    verdicts: tuple[Verdict, ...]
    differences: Differences
    machines: tuple[Machine, Machine]
    notes: tuple[str, ...] = ()
    unrelated: str = ""
    """Why the two are different programs, so that no number of one says anything of the other's; mostly empty."""

    def of(self, outcome: Outcome) -> tuple[Verdict, ...]:
        """The numbers of that outcome."""
        return tuple(found for found in self.verdicts if found.outcome == outcome)

    @property
    def outcome(self) -> Outcome:
        """``REGRESSION`` if any number is one, else ``WIN`` if any is; ``NO-MATCH`` if nothing could be compared."""
        return worst_outcome(found.outcome for found in self.verdicts)


@dataclass(frozen=True, slots=True)
class Comparisons:
    """All that two files have in common, held against each other, and what only one of them has."""

    found: tuple[Comparison, ...]
    only_base: tuple[str, ...] = ()
    only_head: tuple[str, ...] = ()

    @property
    def outcome(self) -> Outcome:
        """The worst of all: ``REGRESSION``, then ``WIN``, then ``PASS``; ``NO-MATCH`` where nothing was compared."""
        return worst_outcome(comparison.outcome for comparison in self.found)

    @property
    def exit_code(self) -> int:
        """0 fine, 1 a regression, 3 nothing to compare.

        >>> Comparisons(()).exit_code
        3
        """
        if self.outcome == Outcome.NO_MATCH:
            return NOTHING_TO_COMPARE
        return int(self.outcome == Outcome.REGRESSION)


def compare_reports(
    base: Mapping[str, RunStatement],
    head: Mapping[str, RunStatement],
    *,
    tolerances: Mapping[str, Tolerance] | None = None,
) -> Comparisons:
    """The runs of two files held against each other, name by name; a file of one run goes with any other such.

    Raises:
        UsageError: a tolerance is for no known quantity.

    >>> compare_reports({"a": RunStatement()}, {"b": RunStatement(), "c": RunStatement()}).only_head
    ('b', 'c')
    """
    for key in tolerances or ():
        find_quantity(key)
    if len(base) == len(head) == 1 and "" in (*base, *head):
        (name,) = (name or other for name, other in zip(head, base, strict=True))
        base, head = ({name: run} for runs in (base, head) for run in runs.values())
    return Comparisons(
        tuple(compare_runs(base[name], head[name], tolerances=tolerances, name=name) for name in head if name in base),
        only_base=tuple(name for name in base if name not in head),
        only_head=tuple(name for name in head if name not in base),
    )


def compare_runs(
    base: RunStatement, head: RunStatement, *, tolerances: Mapping[str, Tolerance] | None = None, name: str = ""
) -> Comparison:
    """One run held against another: each quantity by its highest value over the kept steps.

    Args:
        base: the run that is held against.
        head: the run that is judged.
        tolerances: by the keys of quantities; for others, exact on CPU and simulated devices, else 1 % or 1 MiB. On a
            CPU the peak's is also that of requested, allocated and reserved bytes.
        name: of the thing that both measure.

    Raises:
        UsageError: a tolerance is for no known quantity.

    >>> compare_runs(RunStatement(), RunStatement()).outcome
    <Outcome.NO_MATCH: 'NO-MATCH'>
    """
    given = {find_quantity(key).key: tolerance for key, tolerance in (tolerances or {}).items()}
    machines = read_machine(base), read_machine(head)
    if "peak" in given and not any(is_accelerator(machine.device) for machine in machines):
        given = dict.fromkeys(REPEAT_THE_PEAK, given["peak"]) | given
    numbers = measure_quantities(base), measure_quantities(head)
    unrelated = explain_unrelated(base, head)
    exact = all(machine.is_exact for machine in machines)
    verdicts = []
    for key, quantity in QUANTITIES.items():
        before, after = (found.get(key) for found in numbers)
        if before is None and after is None:
            continue
        tolerance = given.get(key) or default_tolerance(quantity, exact=exact)
        against = None if before is None else before.value
        why = "" if against is None else unrelated or explain_mismatch(quantity, machines, (before, after))
        verdicts.append(judge(key, after, against, tolerance, device=machines[1].device, why=why))
    differences = (
        Differences() if unrelated else _differences((base, head), numbers, (machines[0].device, machines[1].device))
    )
    notes = tuple(_notes(base, head, *machines))
    return Comparison(name, tuple(verdicts), differences, machines, notes, unrelated)


def _differences(
    runs: tuple[RunStatement, RunStatement], numbers: tuple[dict[str, Measured], ...], devices: tuple[str, str]
) -> Differences:
    """What differs between the steps of the highest peak, and between those of the most FLOPs, which may be others."""
    if not all(run.steps for run in runs):
        return Differences()
    of_flops = [_step(run, found["flops"].step_index) for run, found in zip(runs, numbers, strict=True)]
    of_peak = [run.peak_step or step for run, step in zip(runs, of_flops, strict=True)]
    found = diff_statements(of_peak[0], of_peak[1], base_device=devices[0], head_device=devices[1])
    if of_flops == of_peak:
        return found
    flops = diff_statements(of_flops[0], of_flops[1])
    of_flops_alone = ("base_flops", "head_flops", "flop_phases", "flop_ops", "flop_modules", "uncounted")
    return replace(found, **{name: getattr(flops, name) for name in of_flops_alone})


def _step(run: RunStatement, index: int) -> StepReport:
    return next(step for step in run.steps if step.index == index)


def _notes(base: RunStatement, head: RunStatement, before: Machine, after: Machine) -> list[str]:
    """What a reader must know of the two runs before the numbers mean anything."""
    notes = []
    for side, run in (("base", base), ("head", head)):
        notes += [
            f"the ledger of the {side} had a fault, so that its numbers may lack something: {f}" for f in run.faults
        ]
        if not run.steps:
            notes.append(f"the {side} has no step")
    if base.steps and head.steps:
        if base.n_steps != head.n_steps:
            counts = f"{format_count(base.n_steps)} against {format_number(head.n_steps, 'step')}"
            notes.append(f"{counts}; each number is the highest of any step")
        tokens = [run.peak_step.tokens if run.peak_step else None for run in (base, head)]
        if tokens[0] != tokens[1]:
            where = "tokens in the step of the highest peak"
            words = ["an unknown number" if n is None else format_count(n) for n in tokens]
            both = f"{words[0]} against {words[1]}"
            notes.append(f"{where}: {both}" if None in tokens else f"{both} {where}")
        if before.torch != after.torch:
            notes.append(f"torch {before.torch or '(unknown)'} against {after.torch or '(unknown)'}")
    return notes
