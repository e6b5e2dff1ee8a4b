"""Two runs held against each other: a verdict for each quantity, and what differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from torchledger.gate.differences import Differences, diff_statements
from torchledger.gate.quantities import QUANTITIES, Measured, Quantity, find_quantity, measure_quantities
from torchledger.gate.tolerances import EXACT, Tolerance, default_tolerance
from torchledger.journal.statements import RunStatement, StepReport, is_accelerator


class Verdict(StrEnum):
    """What a comparison of one number says."""

    REGRESSION = "REGRESSION"
    WIN = "WIN"
    NEW = "NEW"
    GONE = "GONE"
    NO_MATCH = "NO-MATCH"
    PASS = "PASS"


COMPARED = (Verdict.PASS, Verdict.WIN, Verdict.REGRESSION)
"""Verdicts of two numbers that were in fact held against each other."""

REPEAT_THE_PEAK = ("requested", "allocated", "reserved")
"""Where there is no allocator, these are the peak under other names, and go by its tolerance."""

NOTHING_TO_COMPARE = 3


@dataclass(frozen=True, slots=True)
class QuantityVerdict:
    """One quantity of two runs; ``why`` says why two numbers do not match, where they do not."""

    quantity: Quantity
    verdict: Verdict
    base: Measured | None
    head: Measured | None
    tolerance: Tolerance = EXACT
    why: str = ""

    @property
    def change(self) -> int:
        """How much more the head has; 0 where one side has no number."""
        return self.head.value - self.base.value if self.base and self.head else 0


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a run was made, as far as numbers depend on it."""

    device: str
    name: str
    torch: str
    simulated: bool

    @property
    def kind(self) -> str:
        """The device without its number.

        >>> Machine("cuda:0", "NVIDIA H100", "2.13.0", simulated=False).kind
        'cuda'
        """
        return self.device.partition(":")[0]

    @property
    def torch_minor(self) -> str:
        """The version of torch without its patch and build.

        >>> Machine("cpu", "x86_64", "2.13.0+cpu", simulated=False).torch_minor
        '2.13'
        """
        return ".".join(self.torch.split(".")[:2])


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs of one thing, ``name`` (a test's id; empty for a plain report), held against each other."""

    name: str
    verdicts: tuple[QuantityVerdict, ...]
    differences: Differences
    machines: tuple[Machine, Machine]
    notes: tuple[str, ...] = ()

    def of(self, verdict: Verdict) -> tuple[QuantityVerdict, ...]:
        """The quantities of that verdict."""
        return tuple(found for found in self.verdicts if found.verdict is verdict)

    @property
    def verdict(self) -> Verdict:
        """``REGRESSION`` if any quantity is one, else ``WIN`` if any is; ``NO_MATCH`` if nothing could be compared."""
        found = {item.verdict for item in self.verdicts}
        return next((v for v in (Verdict.REGRESSION, Verdict.WIN, Verdict.PASS) if v in found), Verdict.NO_MATCH)


@dataclass(frozen=True, slots=True)
class Comparisons:
    """All that two files have in common, held against each other, and what only one of them has."""

    found: tuple[Comparison, ...]
    only_base: tuple[str, ...] = ()
    only_head: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The worst of all: ``REGRESSION``, then ``WIN``, then ``PASS``; ``NO_MATCH`` where nothing was compared."""
        verdicts = {comparison.verdict for comparison in self.found}
        return next((v for v in (Verdict.REGRESSION, Verdict.WIN, Verdict.PASS) if v in verdicts), Verdict.NO_MATCH)

    @property
    def exit_code(self) -> int:
        """0 fine, 1 a regression, 3 nothing to compare.

        >>> Comparisons(()).exit_code
        3
        """
        if self.verdict is Verdict.NO_MATCH:
            return NOTHING_TO_COMPARE
        return int(self.verdict is Verdict.REGRESSION)


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

    >>> compare_runs(RunStatement(), RunStatement()).verdict
    <Verdict.NO_MATCH: 'NO-MATCH'>
    """
    given = {find_quantity(key).key: tolerance for key, tolerance in (tolerances or {}).items()}
    machines = describe_machine(base), describe_machine(head)
    if "peak" in given and not any(is_accelerator(machine.device) for machine in machines):
        given = dict.fromkeys(REPEAT_THE_PEAK, given["peak"]) | given
    numbers = measure_quantities(base), measure_quantities(head)
    simulated = machines[0].simulated and machines[1].simulated
    verdicts = []
    for key, quantity in QUANTITIES.items():
        before, after = (found.get(key) for found in numbers)
        if before is None and after is None:
            continue
        tolerance = given.get(key) or default_tolerance(quantity, machines[1].device, simulated=simulated)
        why = explain_mismatch(quantity, *machines)
        verdicts.append(QuantityVerdict(quantity, _judge(before, after, tolerance, why), before, after, tolerance, why))
    differences = _differences((base, head), numbers, (machines[0].device, machines[1].device))
    return Comparison(name, tuple(verdicts), differences, machines, tuple(_notes(base, head, *machines)))


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


def describe_machine(run: RunStatement) -> Machine:
    """The main device of a run, its name, and the version of torch, as far as the report says.

    >>> describe_machine(RunStatement(environment={"torch": "2.13.0"}))
    Machine(device='cpu', name='', torch='2.13.0', simulated=False)
    """
    device = run.main_device
    devices = run.environment.get("devices")
    facts = devices.get(device) if isinstance(devices, dict) else None
    facts = facts if isinstance(facts, dict) else {}
    torch = run.environment.get("torch")
    simulated = bool(facts.get("simulated") or (is_accelerator(device) and run.environment.get("simulated")))
    return Machine(device, str(facts.get("name") or ""), torch if isinstance(torch, str) else "", simulated)


def explain_mismatch(quantity: Quantity, base: Machine, head: Machine) -> str:
    """Why the numbers of two machines do not compare; empty where they do.

    What the program alone decides always compares; what kernels decide, on one kind of device; what an accelerator's
    allocator and libraries decide, on the same accelerator and the same minor version of torch.

    >>> machines = [Machine("cuda:0", name, "2.13.0", simulated=False) for name in ("NVIDIA A100", "NVIDIA H100")]
    >>> explain_mismatch(find_quantity("peak"), *machines), explain_mismatch(find_quantity("reserved"), *machines)
    ('', 'NVIDIA A100 against NVIDIA H100')
    """
    if quantity.rests_on == "program":
        return ""
    if base.kind != head.kind:
        return f"{base.kind} against {head.kind}"
    if quantity.rests_on == "kernels" or not is_accelerator(head.device):
        return ""
    if base.simulated != head.simulated:
        return " against ".join("a simulated device" if m.simulated else "a real one" for m in (base, head))
    if base.name != head.name:
        return f"{base.name or 'a device of unknown name'} against {head.name or 'a device of unknown name'}"
    if base.torch_minor != head.torch_minor:
        return f"torch {base.torch or '(unknown)'} against torch {head.torch or '(unknown)'}"
    return ""


def _judge(base: Measured | None, head: Measured | None, tolerance: Tolerance, why: str) -> Verdict:
    if base is None:
        return Verdict.NEW
    if head is None:
        return Verdict.GONE
    if why:
        return Verdict.NO_MATCH
    room = tolerance.room(base.value)
    if head.value > base.value + room:
        return Verdict.REGRESSION
    return Verdict.WIN if head.value < base.value - room else Verdict.PASS


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
            notes.append(f"{base.n_steps} against {head.n_steps} steps; each number is the highest of any step")
        tokens = [run.peak_step.tokens if run.peak_step else None for run in (base, head)]
        if tokens[0] != tokens[1]:
            notes.append(f"{tokens[0]} against {tokens[1]} tokens in the step of the highest peak")
        if before.torch != after.torch:
            notes.append(f"torch {before.torch or '(unknown)'} against {after.torch or '(unknown)'}")
    return notes
