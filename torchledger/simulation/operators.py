"""What the simulation knows of an operator, worked out at its first call."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload

from torchledger import internals

aten = torch.ops.aten


class Kind(IntEnum):
    """How an op is handled."""

    VIEW = 0
    INPLACE = 1
    OUT = 2
    """May change the size of a storage that is there."""
    FUNCTIONAL = 3
    COMPOSITE = 4
    """Has no kernel but its decomposition; arrives whole in inference mode."""
    HIGHER_ORDER = 5


class Operator:
    """One operator: how to call it and how it is handled."""

    __slots__ = (
        "call",
        "has_device",
        "is_random",
        "kind",
        "name",
        "op",
        "operands",
        "returns_first",
        "returns_new",
        "special",
    )

    def __init__(self, op: Any, special: Callable[..., Any] | None, backend: str) -> None:
        self.op = op
        self.special = special
        self.operands: Callable[[Any], Any] | None = None
        """Gives the matrices among the arguments of a product."""
        self.kind: int = _kind(op, backend)
        # An overload's `__call__` does nothing but call this.
        self.call: Callable[..., Any] = getattr(op, "_op", op) if isinstance(op, OpOverload) else op
        self.name: str = op.name()
        if isinstance(op, HigherOrderOperator):
            self.has_device, self.is_random = False, False
            self.returns_first, self.returns_new = 0, True
            return
        schema = op._schema
        self.name = str(op.overloadpacket)
        self.has_device = any(argument.name == "device" for argument in schema.arguments)
        self.is_random = torch.Tag.nondeterministic_seeded in op.tags
        self.returns_first = len(schema.returns)
        """How many results an in-place op has: its first arguments."""
        self.returns_new = any(value.alias_info is None for value in schema.returns)


def _kind(op: Any, backend: str) -> int:
    if isinstance(op, HigherOrderOperator):
        return Kind.HIGHER_ORDER
    name = op.name()
    has = internals.has_kernel_for_key
    if has(name, "CompositeImplicitAutograd") and not any(has(name, k) for k in ("CPU", "CUDA", "Meta", backend)):
        return Kind.COMPOSITE
    schema = op._schema
    if any(argument.is_out for argument in schema.arguments) or op.overloadpacket in (
        aten.resize_,
        aten.resize_as_,
        aten.set_,
    ):
        return Kind.OUT
    aliases = [value.alias_info for value in schema.returns]
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    if writes:
        return Kind.INPLACE if all(alias is not None for alias in aliases) else Kind.FUNCTIONAL
    if aliases and all(alias is not None for alias in aliases) and op is not aten.lift_fresh.default:
        return Kind.VIEW
    return Kind.FUNCTIONAL
