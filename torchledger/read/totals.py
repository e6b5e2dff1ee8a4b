"""FLOP statements added up, over steps or runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torchledger.journal.statements import FlopSplit, FlopStatement, ParameterFlops

_NUMBERS = (
    "total",
    "model",
    "forward",
    "backward",
    "recompute",
    "optimizer",
    "inference",
    "outside",
    "attention_rescore",
    "causal_model",
    "int_ops",
    "approximate",
    "upper_bound",
    "global_excess",
)
_SPLIT = tuple(field.name for field in fields(FlopSplit))
_COUNTS = ("by_op", "by_dtype", "uncounted")


class FlopTotals:
    """A running sum of FLOP statements, cheap enough to be kept at every step.

    Keys keep the order in which they first came.

    >>> totals = FlopTotals()
    >>> totals.add(FlopStatement(total=4, forward=4, by_op={"aten.mm": 4}))
    >>> totals.add(FlopStatement(total=5, forward=5, by_op={"aten.mm": 3, "aten.bmm": 2}))
    >>> totals.statement().by_op
    {'aten.mm': 7, 'aten.bmm': 2}
    """

    __slots__ = ("_compiled", "_counts", "_last", "_modules", "_numbers", "_parameters", "_times")

    def __init__(self) -> None:
        self._numbers = dict.fromkeys(_NUMBERS, 0)
        self._counts: dict[str, dict[str, int]] = {name: {} for name in _COUNTS}
        self._modules: dict[str, list[int]] = {}
        self._parameters: dict[str, list[int]] = {}
        self._compiled: dict[str, int] = {}
        """Regions are the same ones in each step: those of the last step that ran any in a module."""
        self._last: FlopStatement | None = None
        self._times = 0

    def add(self, flops: FlopStatement) -> None:
        """Adds one statement; the same one again costs next to nothing."""
        if flops is self._last:
            self._times += 1
            return
        self._settle()
        self._last, self._times = flops, 1

    def _settle(self) -> None:
        """Posts the statement that came last, as often as it came."""
        flops, times = self._last, self._times
        self._last, self._times = None, 0
        if flops is None:
            return
        numbers = self._numbers
        for name in _NUMBERS:
            numbers[name] += times * getattr(flops, name)
        self._compiled |= flops.compiled_in
        for name, sums in self._counts.items():
            _add_counts(sums, getattr(flops, name), times)
        for module, split in flops.by_module.items():
            row = self._modules.get(module)
            if row is None:
                row = self._modules[module] = [0] * len(_SPLIT)
            for index, name in enumerate(_SPLIT):
                row[index] += times * getattr(split, name)
        for parameter, products in flops.by_parameter.items():
            row = self._parameters.get(parameter)
            if row is None:
                row = self._parameters[parameter] = [0] * 4
            row[0] += times * products.forward
            row[1] += times * products.input_grad
            row[2] += times * products.weight_grad
            row[3] += times * products.recompute

    def statement(self) -> FlopStatement:
        """The sum so far, which later additions leave alone."""
        self._settle()
        found: dict[str, Any] = {name: dict(sums) for name, sums in self._counts.items()}
        found |= self._numbers
        found["compiled_in"] = dict(self._compiled)
        found["compiled_regions"] = sum(self._compiled.values())
        found["by_module"] = {module: FlopSplit(*row) for module, row in self._modules.items()}
        found["by_parameter"] = {parameter: ParameterFlops(*row) for parameter, row in self._parameters.items()}
        return FlopStatement(**found)


def add_flops(first: FlopStatement, second: FlopStatement) -> FlopStatement:
    """The FLOPs of both, each table merged by its keys.

    >>> add_flops(FlopStatement(total=1, outside=1), FlopStatement(total=2, outside=2)).total
    3
    """
    totals = FlopTotals()
    totals.add(first)
    totals.add(second)
    return totals.statement()


def _add_counts(sums: dict[str, int], more: Mapping[str, int], times: int) -> None:
    for key, n in more.items():
        sums[key] = sums.get(key, 0) + times * n
