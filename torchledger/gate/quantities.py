"""The one table of all numbers that can be compared, or held against a budget, and how each is measured."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from torchledger.errors import UsageError
from torchledger.journal.statements import CATEGORIES, PHASES, MemoryStatement, RunStatement, StepReport
from torchledger.units import format_bytes, format_count, format_flops, parse_bytes, parse_count, parse_flops

Unit = Literal["bytes", "flops", "count"]
Dependence = Literal["program", "placement", "kernels", "allocator"]

_FORMATS: dict[str, Callable[..., str]] = {"bytes": format_bytes, "flops": format_flops, "count": format_count}
_PARSERS: dict[str, Callable[..., int]] = {"bytes": parse_bytes, "flops": parse_flops, "count": parse_count}

_DEPENDENCES: dict[str, Dependence] = {
    **dict.fromkeys(("parameters", "buffers", "gradients"), "program"),
    **dict.fromkeys(("optimizer_state", "inputs"), "placement"),
    **dict.fromkeys(("workspace", "unexplained"), "allocator"),
}
"""What decides the bytes of a category; of all others the kernels do."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """One number of a step, by the ``key`` that budgets, baselines and tolerances name it with.

    ``of_step`` measures it, on the step's main device. ``depends_on`` says what decides it: the ``program`` alone, its
    ``placement`` of things on devices (Adam keeps its step counts on the CPU, a loader the batch), the ``kernels`` that
    a device and a version of torch choose, or also the ``allocator`` of an accelerator and its libraries. ``apart`` is
    the part of a program's number that placement or kernels decide after all.
    """

    key: str
    unit: Unit
    title: str
    of_step: Callable[[StepReport], int]
    depends_on: Dependence = "program"
    apart: Callable[[StepReport, str], int] = lambda step, device: 0

    def format(self, value: int, *, signed: bool = False) -> str:
        """``value`` in the quantity's unit.

        >>> find_quantity("peak").format(2048), find_quantity("uncounted_ops").format(3, signed=True)
        ('2.00 KiB', '+3')
        """
        return _FORMATS[self.unit](value, signed=signed)

    def parse(self, value: str | float) -> int:
        """The number that ``value`` names, in bytes, FLOP or pieces.

        Raises:
            QuantityError: it cannot be read, with the forms that can.

        >>> find_quantity("activations").parse("1.5 KiB"), find_quantity("flops").parse("3 GFLOP")
        (1536, 3000000000)
        """
        return _PARSERS[self.unit](value)


@dataclass(frozen=True, slots=True)
class Measured:
    """The highest value of a quantity, the step that it was in, and the device; ``apart`` as in `Quantity`."""

    value: int
    step_index: int
    device: str
    apart: int = 0


def _of_memory(read: Callable[[MemoryStatement], int]) -> Callable[[StepReport], int]:
    def of_step(step: StepReport) -> int:
        memory = step.memory.get(step.main_device)
        return read(memory) if memory is not None else 0

    return of_step


def _category(name: str) -> Quantity:
    def read(memory: MemoryStatement) -> int:
        return memory.category_peaks.get(name, memory.peak.by_category[name])

    def elsewhere(step: StepReport, device: str) -> int:
        return sum(read(memory) for other, memory in step.memory.items() if other != device)

    title = f"highest bytes of {name.replace('_', ' ')}"
    return Quantity(name, "bytes", title, _of_memory(read), _DEPENDENCES.get(name, "kernels"), elsewhere)


WITH_RESCORE = ("flops", "backward_flops", "attention_rescore_flops")
"""FLOPs that hold attention scores computed again, which fused kernels do and others do not."""


def _flops(key: str, field: str, title: str, unit: Unit = "flops") -> Quantity:
    def rescore(step: StepReport, device: str) -> int:
        return step.flops.attention_rescore if key in WITH_RESCORE else 0

    return Quantity(key, unit, title, lambda step: getattr(step.flops, field), apart=rescore)


def _quantities() -> Iterator[Quantity]:
    of = _of_memory
    yield Quantity("peak", "bytes", "highest total of bytes", of(lambda m: m.peak.total_bytes), "kernels")
    yield Quantity("requested", "bytes", "highest bytes asked for", of(lambda m: m.requested_peak_bytes), "kernels")
    yield Quantity(
        "allocated", "bytes", "highest bytes of allocator blocks", of(lambda m: m.allocated_peak_bytes), "allocator"
    )
    yield Quantity(
        "reserved", "bytes", "highest bytes taken from the driver", of(lambda m: m.reserved_peak_bytes), "allocator"
    )
    yield from map(_category, CATEGORIES)
    yield _flops("flops", "total", "FLOPs that the hardware executed")
    yield _flops("model_flops", "model", "FLOPs of the model, without recompute, inference and attention rescore")
    for phase in PHASES:
        yield _flops(f"{phase}_flops", phase, f"FLOPs of the phase {phase}")
    yield _flops("attention_rescore_flops", "attention_rescore", "FLOPs of attention scores computed again")
    yield _flops("int_ops", "int_ops", "operations of integer products", "count")
    yield Quantity(
        "uncounted_ops",
        "count",
        "calls of ops whose cost is unknown",
        lambda step: sum(step.flops.uncounted.values()),
        apart=lambda step, device: sum(step.flops.uncounted.values()),
    )
    yield _flops("compiled_regions", "compiled_regions", "compiled regions that ran", "count")


QUANTITIES: dict[str, Quantity] = {quantity.key: quantity for quantity in _quantities()}
"""All quantities by key, in the order in which tables show them."""


def find_quantity(key: str) -> Quantity:
    """The quantity of that key.

    Raises:
        UsageError: there is none, with the keys that come near, or all.

    >>> find_quantity("activations").unit
    'bytes'
    >>> find_quantity("activation")
    Traceback (most recent call last):
    torchledger.errors.UsageError: there is no quantity 'activation': did you mean 'activations'? [usage]
    """
    found = QUANTITIES.get(key)
    if found is not None:
        return found
    near = difflib.get_close_matches(key[:60].lower(), QUANTITIES, n=3, cutoff=0.7)
    shown = repr(key if len(key) <= 60 else key[:57] + "...")
    if near:
        raise UsageError(f"there is no quantity {shown}: did you mean {' or '.join(map(repr, near))}?")
    raise UsageError(f"there is no quantity {shown}: there are {', '.join(QUANTITIES)}.")


def measure_quantities(run: RunStatement) -> dict[str, Measured]:
    """The highest value of each quantity over the steps that were kept, by key; bytes are those of the main device.

    Of several steps with the same value the one with the highest peak is named, else the first. Without a step there is
    nothing.

    >>> measure_quantities(RunStatement())
    {}
    """
    device = run.main_device
    steps = sorted(run.steps, key=lambda step: step is not run.peak_step)
    alone = {step.index: _on_device(step, device) for step in steps}
    found = {}
    for key, quantity in QUANTITIES.items():
        # A step that did not touch the main device says nothing about its bytes.
        measurable = [step for step in steps if alone[step.index].memory or quantity.unit != "bytes"]
        if measurable:
            step = max(measurable, key=lambda step: quantity.of_step(alone[step.index]))
            value = quantity.of_step(alone[step.index])
            found[key] = Measured(value, step.index, device, quantity.apart(step, device))
    return found


def _on_device(step: StepReport, device: str) -> StepReport:
    """The step with the bytes of that device alone."""
    return replace(step, memory={name: memory for name, memory in step.memory.items() if name == device})
