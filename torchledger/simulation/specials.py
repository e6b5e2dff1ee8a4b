"""Ops that the simulation runs in a way of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from torchledger.simulation import moves
from torchledger.simulation.operators import Operator

if TYPE_CHECKING:
    from torchledger.simulation.mode import SimulationMode

aten = torch.ops.aten
Special = Callable[["SimulationMode", Operator, Any, dict[str, Any]], Any]


def local_scalar(mode: SimulationMode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """`.item()`: the known value, or an assumed one."""
    tensor = args[0]
    if mode.block_of(tensor) is None:
        return operator.call(*args, **kwargs)
    return operator.call(mode.values.read(tensor))


def foreach(mode: SimulationMode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """Functional `_foreach_...` ops whose results are like their first list."""
    place = mode.locate(operator, args, kwargs)
    if place is None:
        return operator.call(*args, **kwargs)
    results = mode.results
    other = args[1] if len(args) > 1 else None
    scalar = other if isinstance(other, int | float | bool | complex | torch.Tensor) else None
    outs = []
    for index, tensor in enumerate(args[0]):
        dtype = tensor.dtype
        operand = scalar if scalar is not None else other[index] if isinstance(other, list | tuple) else None
        if isinstance(operand, int | float | bool | complex | torch.Tensor):
            dtype = torch.result_type(tensor, operand)
        out = results.fresh(tensor.shape, dense_strides(tensor), dtype)
        mode.blocks.enter(out, place, mode.device.stream)
        outs.append(out)
    mode.values.follow(operator, args, kwargs, outs)
    return tuple(outs)


def foreach_norm(mode: SimulationMode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """`_foreach_norm` and the like: one number for each tensor."""
    place = mode.locate(operator, args, kwargs)
    if place is None:
        return operator.call(*args, **kwargs)
    outs = []
    for tensor in args[0]:
        out = mode.results.fresh((), (), kwargs.get("dtype") or tensor.dtype)
        mode.blocks.enter(out, place, mode.device.stream)
        outs.append(out)
    return tuple(outs)


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of `empty_like`: the same order of dimensions, without gaps."""
    if tensor.is_contiguous():
        return tensor.stride()
    strides = [0] * tensor.dim()
    step = 1
    for dim in sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.shape[d])):
        strides[dim] = step
        step *= max(tensor.shape[dim], 1)
    return tuple(strides)


def _foreach_specials() -> dict[Any, Special]:
    found: dict[Any, Special] = {}
    names = "add sub mul div sqrt rsqrt reciprocal neg abs exp log pow maximum minimum clamp_max clamp_min lerp sign"
    for name in (*names.split(), "addcmul", "addcdiv", "sigmoid", "tanh", "expm1"):
        packet = getattr(aten, f"_foreach_{name}", None)
        if packet is not None:
            for overload in packet.overloads():
                if not overload.endswith("out") and not overload.startswith("ScalarAndTensor"):
                    found[getattr(packet, overload)] = foreach
    for name in ("_foreach_norm", "_foreach_max"):
        if hasattr(aten, name):
            found[getattr(getattr(aten, name), "Scalar" if name == "_foreach_norm" else "default")] = foreach_norm
    return found


SPECIALS: dict[Any, Special] = {
    aten._local_scalar_dense.default: local_scalar,
    aten._to_copy.default: moves.to_copy,
    aten.copy_.default: moves.copy_into,
    aten.lift_fresh.default: moves.lift_fresh,
    **_foreach_specials(),
}
