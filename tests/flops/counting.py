"""A dispatch mode that does nothing but look up rules and call formulas, and the shape of a row of the test tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from torchledger.flops.containers import CONTAINERS, run_container
from torchledger.flops.registry import Cost, Part, UnknownCostError, is_true_composite, lookup


class Row(NamedTuple):
    """One hand-counted case of a formula.

    ``call`` runs the op, or, where the op cannot run here (``run=False``), returns ``(result, *arguments)``, with a
    dict of keyword arguments last if there are any, on which the formula is called.
    """

    op: str
    flops: int
    call: Callable[[], Any]
    rescore: int = 0
    excess: int = 0
    quality: str = "exact"
    run: bool = True
    parts: tuple[tuple[str, int], ...] | None = None


class Counted(TorchDispatchMode):
    """What was counted while it was on."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.by_op: Counter[str] = Counter()
        self.by_quality: Counter[str] = Counter()
        self.uncounted: Counter[str] = Counter()
        self.rescore = 0
        self.excess = 0
        self.parts: list[Part] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @property
    def total(self) -> int:
        """All floating-point FLOPs."""
        return sum(self.by_quality.values()) - self.by_quality["integer"]

    @property
    def model(self) -> int:
        return self.total - self.rescore

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plain = torch._C._disabled_torch_dispatch_impl
        if any(t.__torch_dispatch__ is not plain and t.__name__ != "FakeTensor" for t in types):
            return NotImplemented
        if isinstance(func, HigherOrderOperator) and func.name() in CONTAINERS:
            with self:
                return run_container(func, args, kwargs)
        rule = lookup(func)
        if rule.formula is None and is_true_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        if rule.uncounted:
            self.uncounted[rule.name] += 1
        if rule.formula is not None:
            try:
                self.add(rule.name, rule.formula(result, *args, **kwargs))
            except UnknownCostError as unknown:
                self.uncounted[unknown.name or rule.name] += 1
        return result

    def add(self, name: str, cost: int | Cost) -> None:
        assert type(cost) in (int, Cost), cost
        cost = cost if isinstance(cost, Cost) else Cost(cost)
        assert type(cost.flops) is int
        self.by_op[cost.name or name] += cost.flops
        self.by_quality[cost.quality] += cost.flops
        self.rescore += cost.rescore
        self.excess += cost.causal_excess
        self.parts += cost.parts


def count(call: Callable[[], Any]) -> Counted:
    """Run ``call`` and count."""
    with Counted() as counted:
        call()
    return counted


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor without values."""
    return torch.empty(*shape, dtype=dtype, device="meta")
