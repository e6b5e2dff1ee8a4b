"""Budgets: how much a step may cost, and whether it stayed below."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from torchledger.errors import FaultyReportError, QuantityError, UsageError
from torchledger.gate.judging import Verdict, judge
from torchledger.gate.quantities import QUANTITIES, Measured, find_quantity, measure_quantities
from torchledger.gate.tolerances import EXACT, Tolerance, parse_tolerance
from torchledger.journal.statements import RunStatement
from torchledger.units import format_bytes, format_number, show_value

_TOLERANCE_FORMS = "'2%', '0.5 %' or 0"


@dataclass(frozen=True, slots=True, init=False)
class Budget:
    """The most that a step may cost: sizes, FLOPs and counts by key, and by how much they may be passed.

    Args:
        tolerance: a percentage of each budget by which it may be passed, such as ``"2%"``; none, if left out.
        **limits: a size (``"2 GiB"``), FLOPs (``"3 TFLOP"``) or a whole number for any category of bytes, ``peak``,
            ``requested``, ``allocated``, ``reserved``, ``flops``, ``model_flops``, ``forward_flops`` and the like.

    Raises:
        UsageError: there is no such key, or there is no limit at all.
        QuantityError: a value cannot be read, with the forms that can.

    >>> Budget(peak="2 GiB", recompute_flops=0, tolerance="2%").limits
    {'peak': 2147483648, 'recompute_flops': 0}
    >>> Budget(peak="24 MBananas")
    Traceback (most recent call last):
    torchledger.errors.QuantityError: Budget(peak='24 MBananas'): cannot read '24 MBananas' as a size: write '2GiB'...
    """

    limits: dict[str, int]
    tolerance: Fraction

    def __init__(self, *, tolerance: str | float | Fraction | None = None, **limits: str | float) -> None:
        if not limits:
            raise UsageError("Budget(): give at least one limit, such as Budget(peak='2 GiB').")
        parsed = parse_limits(limits, "Budget")
        for key, value in parsed.items():
            if isinstance(value, Mapping):
                raise UsageError(f"Budget({key}={{...}}): budgets by parameter id are for @pytest.mark.ledger.")
        share = Fraction(0) if tolerance is None else parse_share(tolerance, "Budget")
        object.__setattr__(self, "limits", {key: parsed[key] for key in QUANTITIES if key in parsed})
        object.__setattr__(self, "tolerance", share)


def parse_share(tolerance: object, where: str) -> Fraction:
    """The share that a tolerance such as ``"2%"`` names; ``where`` is the call that a message names.

    Raises:
        QuantityError: it is no percentage.

    >>> parse_share("2.5 %", "Budget")
    Fraction(1, 40)
    """
    if isinstance(tolerance, Fraction) and tolerance >= 0:
        return tolerance
    found = Tolerance(absolute=1)
    if isinstance(tolerance, str):
        with contextlib.suppress(QuantityError):
            found = parse_tolerance(find_quantity("peak"), tolerance)
    elif isinstance(tolerance, int | float) and not isinstance(tolerance, bool) and tolerance == 0:
        found = EXACT
    if found.absolute:
        shown = show_value(tolerance)
        raise QuantityError(
            f"{where}(tolerance={shown}): cannot read {shown} as a tolerance: write {_TOLERANCE_FORMS}."
        )
    return found.relative


def parse_limits(limits: Mapping[str, object], where: str) -> dict[str, int | dict[str, int]]:
    """Each limit as a number, or as numbers by parameter id.

    Raises:
        UsageError: there is no such key, or a dict by parameter id is empty or has keys that are no text.
        QuantityError: a value cannot be read, with the forms that can.

    >>> parse_limits({"peak": {"small": "1 KiB", "large": 4096}}, "mark")
    {'peak': {'small': 1024, 'large': 4096}}
    """
    parsed: dict[str, int | dict[str, int]] = {}
    for key, value in limits.items():
        if key not in QUANTITIES:
            try:
                find_quantity(key)
            except UsageError as error:
                word = key if key.isidentifier() and len(key) <= 60 else show_value(key)
                raise UsageError(f"{where}({word}={show_value(value)}): {error.message}") from None
        if not isinstance(value, Mapping):
            parsed[key] = _parse_limit(key, value, where)
            continue
        if not value or not all(isinstance(name, str) for name in value):
            raise UsageError(
                f"{where}({key}={show_value(value)}): give a dict by parameter id, such as "
                "{'small': '1 GiB', 'large': '4 GiB'}."
            )
        parsed[key] = {name: _parse_limit(key, limit, where, name) for name, limit in value.items()}
    return parsed


def _parse_limit(key: str, value: object, where: str, param_id: str | None = None) -> int:
    try:
        return QUANTITIES[key].parse(value)  # type: ignore[arg-type]
    except QuantityError as error:
        shown = show_value(value) if param_id is None else f"{{{show_value(param_id)}: {show_value(value)}}}"
        raise QuantityError(f"{where}({key}={shown}): {error.message}") from None


def judge_budget(run: RunStatement, budget: Budget) -> tuple[Verdict, ...]:
    """A verdict for each limit: categories against their own highest bytes, ``peak`` against the highest total.

    Raises:
        UsageError: the run has no step, so that nothing was measured.
        FaultyReportError: the ledger failed while it recorded, so that its numbers may be too low.

    >>> judge_budget(RunStatement(), Budget(peak=1))
    Traceback (most recent call last):
    torchledger.errors.UsageError: no step was recorded, so no budget can be held against it...
    """
    if not isinstance(budget, Budget):
        raise UsageError(f"cannot hold a report against {show_value(budget)}: give a torchledger.Budget(peak='2 GiB').")
    measured = measure_quantities(check_measured(run))
    nothing = Measured(0, 0, run.main_device)  # of a run without bytes on its main device
    tolerance = Tolerance(budget.tolerance)
    return tuple(
        judge(key, measured.get(key, nothing), limit, tolerance, is_limit=True) for key, limit in budget.limits.items()
    )


def check_measured(run: RunStatement) -> RunStatement:
    """The run, if its numbers can be held against anything.

    Raises:
        UsageError: the run has no step.
        FaultyReportError: the ledger failed while it recorded.
    """
    if run.faults:
        raise FaultyReportError(
            f"the ledger failed while it recorded ({run.faults[0]}), so its numbers may be too low and no "
            f"budget can be held against them. Please report the fault."
        )
    if not run.steps:
        raise UsageError(
            "no step was recorded, so no budget can be held against it: run the step inside the ledger's block, and in "
            "the active steps of its schedule."
        )
    return run


def find_doubts(run: RunStatement, keys: Mapping[str, int]) -> Iterator[str]:
    """Why a number may be higher than it was measured, in words; nothing for most runs.

    >>> list(find_doubts(RunStatement(), {"peak": 1}))
    []
    """
    units = {QUANTITIES[key].unit for key in keys}
    if "flops" in units and run.flops.uncounted:
        named = ", ".join(f"{op} ({format_number(n, 'call')})" for op, n in sorted(run.flops.uncounted.items())[:5])
        yield f"FLOPs are without {named}, whose cost is unknown"
    if "bytes" in units:
        notes = (note for step in run.steps for memory in step.memory.values() for note in memory.notes)
        yield from dict.fromkeys(notes)
        after = 0 if run.remainder is None else run.remainder.peak.total_bytes
        if after > run.peak.total_bytes:
            yield f"what ran after the last step peaked higher, at {format_bytes(after)}: it is in no step"
    if units & {"flops", "bytes"}:
        yield from run.blind_spots
    if len(run.steps) < run.n_steps:
        yield f"of {run.n_steps:,} steps {len(run.steps):,} were kept (the last, and that of the peak): raise keep="
