"""What the recorder knows of an operator, worked out at its first call."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload

from torchledger.flops.registry import is_true_composite, lookup
from torchledger.flops.rules import Formula

aten = torch.ops.aten
SCATTERING = (
    aten.scatter.src,
    aten.scatter_add.default,
    aten.index_add.default,
    aten.index_put.default,
    aten._unsafe_index_put.default,
    aten.put.default,
    aten.index_fill.int_Scalar,
    aten.index_fill.int_Tensor,
    aten.masked_scatter.default,
    aten.diagonal_scatter.default,
)
"""Formulas of autograd's write so into a tensor of their own: in place, but for the mode."""
DECIDING = (aten.eq.Scalar, aten.cumprod.default, aten._embedding_bag_backward.default)
"""Their values tell which way some formulas go without a mode, or what they make inside themselves."""


class Kind(IntEnum):
    """How an op is handled; those below `GENERAL` make no storage and no product."""

    VIEW = 0
    INPLACE = 1
    DETACH = 2
    GENERAL = 3
    RESIZING = 4
    """May change the size of a storage that is there: `.out` overloads, `resize_`, `set_`."""
    COPYING = 5
    """`clone`, `_to_copy`, `index`: values of their argument, perhaps in another layout, dtype, place or order."""
    ADDING = 6
    """`aten.add.Tensor`: what autograd sums gradients with under a dispatch mode."""
    SCATTERING = 7
    """The ops of that name."""
    DECIDING = 8
    """The ops of that name."""
    COMPOSITE = 9
    """Has no kernel but its decomposition (arrives whole under inference mode and for subclasses)."""
    HIGHER_ORDER = 10


class Entry:
    """One operator: how to call it, how it is handled, and what it costs."""

    __slots__ = ("call", "formula", "kind", "lifts", "name", "op", "operands", "reads", "uncounted")

    def __init__(self, op: Any) -> None:
        rule = lookup(op)
        self.op = op
        self.name: str = rule.name
        self.formula: Formula | None = rule.formula
        self.operands: tuple[int, ...] = rule.operands
        self.uncounted: bool = rule.uncounted
        self.kind: int = _kind(op, rule.formula is not None)
        # What `lift_fresh` is given was made for it just now, unseen.
        self.reads = op is not aten.lift_fresh.default
        # May hand over memory that no allocator of torch's gave.
        self.lifts: bool = rule.name in ("aten.lift_fresh", "aten.from_file", "aten.set_")
        # An overload's `__call__` does nothing but call this.
        self.call: Callable[..., Any] = getattr(op, "_op", op) if isinstance(op, OpOverload) else op


def _kind(op: Any, counted: bool) -> int:
    if isinstance(op, HigherOrderOperator):
        return Kind.HIGHER_ORDER
    if op is aten.detach.default:
        return Kind.DETACH
    if op is aten._efficientzerotensor.default:
        return Kind.VIEW  # zeros without memory
    if op is aten.add.Tensor:
        return Kind.ADDING
    if op in SCATTERING:
        return Kind.SCATTERING
    if op in DECIDING:
        return Kind.DECIDING
    if op in (aten.clone.default, aten._to_copy.default, aten.index.Tensor, aten.index_select.default):
        return Kind.COPYING
    if op is aten._weight_norm_interface.default:
        return Kind.COPYING
    if is_true_composite(op) and (not counted or op.overloadpacket in (aten.linear, aten.matmul)):
        return Kind.COMPOSITE
    schema = op._schema
    if op.namespace == "aten" and (
        op.overloadpacket in (aten.resize_, aten.resize_as_, aten.set_, aten.resize, aten.set)
        or any(argument.is_out for argument in schema.arguments)
    ):
        return Kind.RESIZING
    if counted or op is aten.lift_fresh.default:
        return Kind.GENERAL
    aliases = [value.alias_info for value in schema.returns]
    if any(alias is None for alias in aliases):
        return Kind.GENERAL
    if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
        return Kind.INPLACE
    return Kind.VIEW if aliases else Kind.GENERAL
