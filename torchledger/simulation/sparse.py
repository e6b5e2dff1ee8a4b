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
_empty_strided = torch.empty_strided
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
    if name in ("t", "transpose"):  # no view of a sparse tensor, whatever the schema says
        shape = _empty_strided(first.shape, (0,) * first.dim(), device="meta").transpose(*(args[1:] or (0, 1))).shape
        return _make(mode, first, parts_of(first)[0].shape[1], first.dtype, place, False, shape)
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
    if name in ("mm", "addmm", "mv", "_sparse_addmm", "_sparse_mm"):
        return _multiply(mode, args, place)
    if name == "sparse_mask":
        mask = args[1]
        return _make(mode, mask, parts_of(mask)[0].shape[1], first.dtype, place, True)
    if name in ("_to_dense", "to_dense", "add"):
        dense = mode.results.fresh(first.shape, contiguous_strides(first.shape), first.dtype)
        mode.enter(dense, place)
        return dense
    raise SimulationError(f"{operator.name} of sparse tensors is not simulated: keep the gradient dense in a dry run.")


def from_host(mode: Mode, source: torch.Tensor, dtype: torch.dtype, place: int) -> torch.Tensor:
    """A sparse tensor of the host brought to the device."""
    made = _make(mode, source, parts_of(source)[0].shape[1], dtype, place, source.is_coalesced())
    for known, there in zip((source._indices(), source._values()), parts_of(made), strict=True):
        mode.values.copy(known, there)
    return made


def _multiply(mode: Mode, args: Any, place: int) -> torch.Tensor:
    """A sparse matrix times a dense one, perhaps added to another: the last two of the tensors among the arguments."""
    one, other = [arg for arg in args if isinstance(arg, _Tensor)][-2:]
    if not is_sparse(one) or is_sparse(other):
        raise SimulationError(
            "only a sparse matrix times a dense one is simulated: keep one of both dense in a dry run."
        )
    if one.shape[1] != other.shape[0]:
        shapes = " and ".join("x".join(map(str, tensor.shape)) for tensor in (one, other))
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({shapes})")
    shape = (one.shape[0], *other.shape[1:])
    out = mode.results.fresh(shape, contiguous_strides(shape), other.dtype)
    mode.enter(out, place)
    return out


def _make(
    mode: Mode, like: torch.Tensor, n: int, dtype: torch.dtype, place: int, coalesced: bool, size: Any = None
) -> torch.Tensor:
    old_indices, old_values = parts_of(like)
    indices = mode.results.fresh((old_indices.shape[0], n), (n, 1), torch.int64)
    shape = (n, *old_values.shape[1:])
    values = mode.results.fresh(shape, contiguous_strides(shape), dtype)
    mode.enter((indices, values), place)
    with inside():
        made = aten._sparse_coo_tensor_with_dims_and_tensors(
            like.sparse_dim(), like.dense_dim(), list(size or like.shape), indices, values, dtype=dtype,
            layout=torch.sparse_coo, device=torch.device("meta"), is_coalesced=coalesced,
        )  # fmt: skip
    result: torch.Tensor = mode.device.backend.rekey(made)
    return result
