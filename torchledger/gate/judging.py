"""One number held against another: the one verdict that budgets, baselines and comparisons give."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from torchledger.gate.machine import Machine
from torchledger.gate.quantities import QUANTITIES, Measured, Quantity
from torchledger.gate.tolerances import EXACT, Tolerance
from torchledger.journal.statements import is_accelerator


class Outcome(StrEnum):
    """What became of one number, the worst first: ``OVER`` is for budgets, the others but ``PASS`` for earlier runs."""

    OVER = "OVER"
    REGRESSION = "REGRESSION"
    WIN = "WIN"
    NO_MATCH = "NO-MATCH"
    NEW = "NEW"
    GONE = "GONE"
    PASS = "PASS"


_APART = {
    "flops": "attention runs in other kernels",
    "bytes": "a part lies on another device",
    "count": "other ops run",
}
"""Why a program's own number may differ between kinds of device."""

HELD = (Outcome.OVER, Outcome.REGRESSION, Outcome.WIN, Outcome.PASS)
"""Outcomes of two numbers that were in fact held against each other."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one number: ``measured`` against ``budget``, of which ``allowed`` has the tolerance as well.

    ``budget`` is a limit, or the number of an earlier run; None where there is none, which is ``NEW`` or ``NO-MATCH``.
    ``why`` says why two numbers that are both there do not compare.
    """

    key: str
    measured: int
    budget: int | None
    allowed: int | None
    outcome: str
    step_index: int
    device: str
    tolerance: Tolerance = EXACT
    why: str = ""

    @property
    def quantity(self) -> Quantity:
        """What was measured."""
        return QUANTITIES[self.key]

    @property
    def unit(self) -> str:
        """``bytes``, ``flops`` or ``count``."""
        return self.quantity.unit

    @property
    def change(self) -> int:
        """How much more was measured; 0 where one side has no number."""
        return 0 if self.budget is None or self.outcome == Outcome.GONE else self.measured - self.budget


def judge(
    key: str,
    measured: Measured | None,
    against: int | None,
    tolerance: Tolerance = EXACT,
    *,
    is_limit: bool = False,
    device: str = "",
    why: str = "",
) -> Verdict:
    """The verdict on one number.

    Args:
        key: of the quantity.
        measured: what was measured, if anything was.
        against: a limit, or the number of an earlier run, if there is one.
        tolerance: how far from it the number may lie.
        is_limit: below a limit all is well, while a number below an earlier one is a win.
        device: where it was measured, if it was not.
        why: the two do not compare, for this reason.

    >>> judge("peak", Measured(12, 0, "cpu"), 10).outcome
    'REGRESSION'
    >>> judge("peak", Measured(9, 0, "cpu"), 10, is_limit=True).outcome
    'PASS'
    """
    found = measured or Measured(0, 0, device)
    room = 0 if against is None else tolerance.room(against)
    if against is None:
        outcome = Outcome.NO_MATCH if why else Outcome.NEW
    elif measured is None:
        outcome = Outcome.GONE
    elif why:
        outcome = Outcome.NO_MATCH
    elif found.value > against + room:
        outcome = Outcome.OVER if is_limit else Outcome.REGRESSION
    else:
        outcome = Outcome.WIN if found.value < against - room and not is_limit else Outcome.PASS
    allowed = None if against is None else against + room
    return Verdict(key, found.value, against, allowed, str(outcome), found.step_index, found.device, tolerance, why)


def worst_outcome(outcomes: Iterable[str]) -> Outcome:
    """The one word for several: ``NO-MATCH`` where nothing was held against anything.

    >>> worst_outcome(["PASS", "WIN", "NEW"]), worst_outcome(["NEW"])
    (<Outcome.WIN: 'WIN'>, <Outcome.NO_MATCH: 'NO-MATCH'>)
    """
    found = set(outcomes)
    return next((word for word in HELD if word in found), Outcome.NO_MATCH)


def explain_mismatch(
    quantity: Quantity, machines: tuple[Machine, Machine], numbers: tuple[Measured | None, Measured | None]
) -> str:
    """Why the numbers of two runs do not compare; empty where they do.

    What the program alone decides always compares, unless a part of it that the kind of device decides differs. Where
    the program puts things, and which kernels run, compares on one kind of device; what an accelerator's allocator and
    libraries decide, on the same accelerator and the same minor version of torch.

    >>> from torchledger.gate.quantities import find_quantity
    >>> machines = tuple(Machine("cuda:0", name, "2.13.0", simulated=False) for name in ("NVIDIA A100", "NVIDIA H100"))
    >>> [explain_mismatch(find_quantity(key), machines, (None, None)) for key in ("peak", "reserved")]
    ['', 'NVIDIA A100 against NVIDIA H100']
    """
    base, head = machines
    if base.kind != head.kind:
        if quantity.depends_on != "program":
            return f"{base.kind} against {head.kind}"
        parts = [found.apart if found else 0 for found in numbers]
        if parts[0] == parts[1]:
            return ""
        return f"{_APART[quantity.unit]}: {base.kind} against {head.kind}"
    if quantity.depends_on != "allocator" or not is_accelerator(head.device):
        return ""
    if base.simulated != head.simulated:
        return " against ".join("a simulated device" if m.simulated else "a real one" for m in machines)
    if base.name != head.name:
        return f"{base.name or 'a device of unknown name'} against {head.name or 'a device of unknown name'}"
    if base.torch_minor != head.torch_minor:
        return f"torch {base.torch or '(unknown)'} against torch {head.torch or '(unknown)'}"
    return ""
