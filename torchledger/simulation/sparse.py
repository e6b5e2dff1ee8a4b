"""Sparse tensors of the simulated device: indices and values that lie there, and a shape."""

from __future__ import annotations

from typing import Any

import torch

from torchledger.errors import SimulationError
from torchledger.simulation.contracts import Mode
from torchledger.simulation.keys import inside
from torchledger.simulation.operators import Kind, Operator
from torchledger.simulation.results import contiguous_strides

_Tensor = torch.Tensor
aten = torch.ops.aten
_READING = ("is_coalesced", "_nnz", "sparse_dim", "dense_dim", "_dimV", "_dimI", "sym_size", "sym_numel")


def is_sparse(value: Any) -> bool:
    """Whether a value is a sparse tensor in coordinate form."""
    return isinstance(value, _Tensor) and value.layout is torch.sparse_coo


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices and values of a sparse tensor."""
    with inside():
        return tensor._indices(), tensor._values()


def has_sparse(args: Any) -> bool:
    """Whether there are sparse tensors among an op's arguments."""
    return any(is_sparse(item) for arg in args for item in (arg if isinstance(arg, list | tuple) else (arg,)))


def place_of(mode: Mode, args: Any) -> int | None:
    """The place of the first simulated one among the arguments."""
    for arg in args:
        for item in arg if isinstance(arg, list | tuple) else (arg,):
            if isinstance(item, _Tensor):
                block = mode.block_of(parts_of(item)[1] if is_sparse(item) else item)
                if block is not None:
                    return block.place
    return None


def run(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """An op with sparse tensors among its arguments.

    Raises:
        SimulationError: it is none that training with sparse gradients needs.
    """
    place = place_of(mode, args)
    if place is None:
        return operator.call(*args, **kwargs)
    name = getattr(operator.op, "overloadpacket", operator.op).__name__
    first = args[0]
    if operator.kind == Kind.VIEW or name in _READING:
        with inside():
            return mode.keyed(operator.call(*args, **kwargs))
    if operator.kind == Kind.INPLACE:
        return first
    if name in ("_coalesce", "coalesce", "clone", "mul", "div", "neg", "_to_copy", "pow", "sqrt"):
        if name == "_to_copy" and kwargs.get("device") is not None and kwargs["device"].type == "cpu":
            raise SimulationError(
                "a sparse tensor of a simulated device cannot be brought to the host: it has no data."
            )
        indices, values = parts_of(first)
        return _make(mode, first, indices.shape[1], values.dtype, place, name == "_coalesce")
    if name == "add" and is_sparse(first) and is_sparse(args[1]):
        n = parts_of(first)[0].shape[1] + parts_of(args[1])[0].shape[1]
        return _make(mode, first, n, first.dtype, place, False)
    if name == "sparse_mask":
        mask = args[1]
        return _make(mode, mask, parts_of(mask)[0].shape[1], first.dtype, place, True)
    if name in ("_to_dense", "to_dense", "add"):
        dense = mode.results.fresh(first.shape, contiguous_strides(first.shape), first.dtype)
        mode.enter(dense, place)
        return dense
    raise SimulationError(f"{operator.name} of sparse tensors is not simulated: keep the gradient dense in a dry run.")


def _make(mode: Mode, like: torch.Tensor, n: int, dtype: torch.dtype, place: int, coalesced: bool) -> torch.Tensor:
    old_indices, old_values = parts_of(like)
    indices = mode.results.fresh((old_indices.shape[0], n), (n, 1), torch.int64)
    shape = (n, *old_values.shape[1:])
    values = mode.results.fresh(shape, contiguous_strides(shape), dtype)
    mode.enter((indices, values), place)
    with inside():
        made = aten._sparse_coo_tensor_with_dims_and_tensors(
            like.sparse_dim(), like.dense_dim(), list(like.shape), indices, values, dtype=dtype,
            layout=torch.sparse_coo, device=torch.device("meta"), is_coalesced=coalesced,
        )  # fmt: skip
    result: torch.Tensor = mode.device.backend.rekey(made)
    return result
