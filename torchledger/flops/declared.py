"""Formulas that users declare: for aten and custom ops, higher-order ops, Triton kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.utils._pytree import tree_map

from torchledger.errors import UsageError
from torchledger.flops.rules import Cost, Entry, Formula, UnknownCostError, counts

DECLARED: dict[str, Entry] = {}
"""Formulas by packet (``mylib.op``), overload (``mylib.op:out``) or higher-order op (``wrap``)."""
KERNELS: dict[int, tuple[Any, Formula]] = {}
"""Formulas of Triton kernels by identity, with the kernel, which they keep alive."""


def declare(target: object, function: Callable[..., Any], raw: bool) -> None:
    """Make ``function`` the formula of ``target``.

    Raises:
        UsageError: ``target`` is nothing that can have a formula.
    """
    counted = with_tensors(function) if raw else with_shapes(function)
    target = getattr(target, "_opoverload", target)
    if isinstance(target, OpOverloadPacket):
        name = target._qualified_op_name.replace("::", ".")
        for key in [key for key in DECLARED if key.startswith(f"{name}:")]:
            del DECLARED[key]
        overload = getattr(target, target.overloads()[0])
        DECLARED[name] = Entry(counted, tensor_positions(overload), "exact", "declared", False)
    elif isinstance(target, OpOverload):
        key = name_of(target)
        if target._overloadname != "default":
            key = f"{key}:{target._overloadname}"
        DECLARED[key] = Entry(counted, tensor_positions(target), "exact", "declared", False)
    elif isinstance(target, HigherOrderOperator):
        DECLARED[target.name()] = Entry(counted, (), "exact", "declared", False)
    elif is_triton_kernel(target):
        kernel = innermost_kernel(target)
        KERNELS[id(kernel)] = (kernel, counted)
    else:
        raise UsageError(
            f"formula() was given {target!r}: it takes an op (torch.ops.mylib.op, one of its overloads, or what "
            f"torch.library.custom_op returned), a higher-order op, or a Triton kernel."
        )


def name_of(op: OpOverload | HigherOrderOperator) -> str:
    """``aten.mm`` for ``aten::mm.out``; a higher-order op's own name."""
    if isinstance(op, OpOverload):
        return str(op._schema.name).replace("::", ".")
    return str(op.name())


def declared_entry(op: OpOverload | HigherOrderOperator) -> Entry | None:
    """What the user declared for ``op``: here, or through ``torch.utils.flop_counter`` if that is loaded."""
    name = name_of(op)
    if isinstance(op, OpOverload):
        own = DECLARED.get(f"{name}:{op._overloadname}") or DECLARED.get(name)
    else:
        own = DECLARED.get(name)
    return own


def torch_entry(op: OpOverload | HigherOrderOperator) -> Entry | None:
    """The formula that ``torch.utils.flop_counter.register_flop_formula`` was given for ``op``."""
    known = torch_formulas()
    if isinstance(op, OpOverload):
        function, positions = known.get(op._overloadpacket), tensor_positions(op)
    else:
        function, positions = known.get(op), ()
    if function is None:
        return None
    return Entry(with_tensors(function), positions, "exact", "torch.utils.flop_counter", False)


def torch_formulas() -> dict[Any, Callable[..., Any]]:
    """The registry of ``torch.utils.flop_counter``; empty while nothing has imported that."""
    module = sys.modules.get("torch.utils.flop_counter")
    found: dict[Any, Callable[..., Any]] = getattr(module, "flop_registry", {})
    return found


def with_shapes(function: Callable[..., Any]) -> Formula:
    """Call ``function`` with shapes in place of tensors, and the result's as ``out_shape``."""

    def counted(result: Any, /, *args: Any, **kwargs: Any) -> int | Cost:
        args, kwargs, out_shape = tree_map(_shape, (args, kwargs, result))
        return _settled(function(*args, out_shape=out_shape, **kwargs))

    return counted


def with_tensors(function: Callable[..., Any]) -> Formula:
    """Call ``function`` with the tensors themselves, and the result as ``out_val``."""

    def counted(result: Any, /, *args: Any, **kwargs: Any) -> int | Cost:
        return _settled(function(*args, out_val=result, **kwargs))

    return counted


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, torch.Tensor) else value


def _settled(flops: Any) -> int | Cost:
    return flops if isinstance(flops, Cost) else int(flops)


def tensor_positions(op: OpOverload) -> tuple[int, ...]:
    """The positions of an op's tensor arguments."""
    arguments = [argument for argument in op._schema.arguments if not argument.kwarg_only]
    return tuple(i for i, argument in enumerate(arguments) if str(argument.type) in ("Tensor", "Optional[Tensor]"))


def is_triton_kernel(target: object) -> bool:
    """Whether ``target`` is a kernel of Triton, by where its class comes from, or torch's wrapper of one."""
    if hasattr(target, "kernel") and type(target).__name__ == "TraceableTritonKernelWrapper":
        return True
    return any(base.__module__.partition(".")[0] == "triton" for base in type(target).__mro__)


def innermost_kernel(kernel: Any) -> Any:
    """The function inside an autotuner, heuristics, or torch's wrapper."""
    while True:
        inside = getattr(kernel, "kernel", None) or getattr(kernel, "fn", None)
        if inside is None or not is_triton_kernel(inside):
            return kernel
        kernel = inside


@counts("triton_kernel_wrapper_mutation", "triton_kernel_wrapper_functional", ran=False, source="declared")
def triton_kernel(result: Any, /, *args: Any, **kwargs: Any) -> Cost:
    """What the kernel's formula says.

    A kernel has none until one is declared; until then it is uncounted, under its own name.
    """
    table = sys.modules["torch._higher_order_ops.triton_kernel_wrap"].kernel_side_table
    kernel = innermost_kernel(table.get_kernel(kwargs["kernel_idx"]))
    name = f"triton.{getattr(kernel, '__name__', None) or getattr(kernel.fn, '__name__', 'kernel')}"
    _, function = KERNELS.get(id(kernel), (kernel, None))
    if function is None:
        known = torch_formulas().get(kernel)
        if known is None:
            raise UnknownCostError(name)
        function = with_tensors(known)
    cost = function(None, *args, **kwargs)
    return cost._replace(name=name) if isinstance(cost, Cost) else Cost(cost, name=name)
