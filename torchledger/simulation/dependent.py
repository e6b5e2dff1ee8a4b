"""Ops whose results' shapes depend on values: exact where the values are known, else as the user assumes.

``worst`` keeps everything. ``balanced`` gives each expert of a router its share: what came out of `topk`, `argmax` and
the like over E classes is taken to fall on each class equally often, and any other mask to keep half.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from torchledger.simulation.blocks import storage_of
from torchledger.simulation.contracts import Mode
from torchledger.simulation.keys import META
from torchledger.simulation.operators import Operator
from torchledger.simulation.results import contiguous_strides

aten = torch.ops.aten
_Tensor = torch.Tensor


class Shares:
    """What is assumed of unknown integers and masks, by storage: how many classes they fall on."""

    def __init__(self) -> None:
        self.classes: dict[int, int] = {}

    def of(self, tensor: torch.Tensor) -> int:
        """The number of classes, 0 where nothing is known."""
        return self.classes.get(id(storage_of(tensor)), 0)

    def set(self, tensor: torch.Tensor, classes: int) -> None:
        """Say on how many classes the values of a tensor fall."""
        if classes > 0:
            self.classes[id(storage_of(tensor))] = classes

    def forget(self, key: int) -> None:
        """A storage has gone."""
        self.classes.pop(key, None)


def count_kept(mode: Mode, mask: torch.Tensor) -> int:
    """How many elements of a mask (or of numbers) are true."""
    known = mode.values.of(mask)
    if known is not None:
        return int((known != 0).sum())
    device = mode.device
    if device.data_dependent == "worst":
        device.assumptions["mask taken for all true"] += 1
        return mask.numel()
    classes = device.shares.of(mask)
    device.assumptions["mask taken for a balanced share" if classes else "mask taken for half true"] += 1
    return math.ceil(mask.numel() / (classes or 2))


def nonzero(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """`aten.nonzero`: one row of indices for each element that is kept."""
    tensor = args[0]
    block = mode.block_of(tensor)
    if block is None:
        return operator.call(*args, **kwargs)
    n = count_kept(mode, tensor)
    # A device makes it column by column: (n, dim) with strides (1, n).
    out = mode.results.fresh((n, tensor.dim()), (1, n), torch.int64)
    mode.enter(out, block.place)
    known = mode.values.of(tensor)
    if known is not None:
        mode.values.set(out, known.nonzero())
    return out


def masked_select(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """`aten.masked_select`: what the mask keeps, flat."""
    place = mode.locate(operator, args, kwargs)
    if place is None:
        return operator.call(*args, **kwargs)
    source, mask = args
    shape = torch.broadcast_shapes(source.shape, mask.shape)
    n = count_kept(mode, mask) * max(math.prod(shape) // max(mask.numel(), 1), 1)
    out = mode.results.fresh((n,), (1,), source.dtype)
    mode.enter(out, place)
    return out


def index(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """`aten.index`: masks among the indices select as many elements as they keep."""
    place = mode.locate(operator, args, kwargs)
    if place is None:
        return operator.call(*args, **kwargs)
    source, indices = args[0], args[1]
    _check_indexed(mode, source, indices)
    plain, hidden = _without_masks(mode, indices)
    addresses = [mode.device.take_hidden(nbytes) for nbytes in hidden if place >= 0]
    out = mode.results.make(operator, (source, plain), {})
    mode.enter(out, place)
    for address, nbytes in zip(addresses, hidden, strict=False):
        mode.device.give_hidden(address, nbytes)
    mode.values.follow(operator, args, kwargs, out)
    return out


def _check_indexed(mode: Mode, source: torch.Tensor, indices: Any) -> None:
    """Complain as torch does of a host tensor that is indexed with tensors of the device."""
    if mode.block_of(source) is not None or source.device.type != "cpu":
        return
    if any(isinstance(item, _Tensor) and mode.block_of(item) is not None for item in indices):
        raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")


def _without_masks(mode: Mode, indices: Any) -> tuple[list[Any], list[int]]:
    """Indices with each mask replaced by as many index tensors as it has dimensions, and the bytes of those."""
    plain: list[Any] = []
    hidden = []
    for item in indices:
        if isinstance(item, _Tensor) and item.dtype in (torch.bool, torch.uint8):
            n = count_kept(mode, item)
            hidden.append(n * max(item.dim(), 1) * 8)
            plain += [torch.empty_strided((n,), (1,), dtype=torch.int64, device=META) for _ in range(item.dim())]
        elif isinstance(item, _Tensor) and mode.block_of(item) is None:
            plain.append(torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=META))
        else:
            plain.append(item)
    return plain, hidden


def index_put(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """`aten.index_put` and its in-place form: masks among the indices."""
    place = mode.locate(operator, args, kwargs)
    if place is None:
        return operator.call(*args, **kwargs)
    _check_indexed(mode, args[0], args[1])
    _, hidden = _without_masks(mode, args[1])
    for nbytes in hidden:
        if place >= 0:
            mode.device.give_hidden(mode.device.take_hidden(nbytes), nbytes)
    if operator.returns_new:
        if not hidden:
            return mode.run_functional(operator, args, kwargs)
        out = mode.results.fresh(args[0].shape, args[0].stride(), args[0].dtype)
        mode.enter(out, place)
        return out
    mode.values.write(operator, args, kwargs)
    return args[0]


def unique(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """`aten._unique2`, `unique_consecutive` and `unique_dim`: all values differ, unless they are known."""
    tensor = args[0]
    block = mode.block_of(tensor)
    if block is None:
        return operator.call(*args, **kwargs)
    known = mode.values.of(tensor)
    if known is not None:
        real = operator.call(known, *args[1:], **kwargs)
        outs = tuple(mode.results.fresh(t.shape, t.stride(), t.dtype) for t in real)
        mode.enter(outs, block.place)
        for out, value in zip(outs, real, strict=True):
            mode.values.set(out, value)
        return outs
    mode.device.assumptions["values taken to differ from each other"] += 1
    name = operator.op.overloadpacket.__name__
    dim = args[1] if name == "unique_dim" else None
    n = tensor.numel() if dim is None else tensor.shape[dim]
    flags = {argument.name: kwargs.get(argument.name) for argument in operator.op._schema.arguments}
    flags.update(zip((argument.name for argument in operator.op._schema.arguments), args, strict=False))
    first = mode.results.fresh(
        tensor.shape if dim is not None else (n,), tensor.stride() if dim is not None else (1,), tensor.dtype
    )
    shape = tensor.shape if dim is None else (n,)
    inverse = mode.results.fresh(shape if flags.get("return_inverse") else (0,), contiguous_strides(shape if flags.get(
        "return_inverse") else (0,)), torch.int64)  # fmt: skip
    counts = mode.results.fresh((n,) if flags.get("return_counts") else (0,), (1,), torch.int64)
    outs = (first, inverse, counts)[: len(operator.op._schema.returns)]
    mode.enter(outs, block.place)
    return outs


def bincount(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """`aten.bincount`: so many for each class as is assumed of a router."""
    tensor = args[0]
    block = mode.block_of(tensor)
    if block is None:
        return operator.call(*args, **kwargs)
    least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
    known = mode.values.of(tensor)
    if known is not None:
        real = known.bincount(minlength=least)
    else:
        classes = max(mode.device.shares.of(tensor), least, 1)
        real = assumed_counts(mode, tensor.numel(), classes)
    out = mode.results.fresh(real.shape, (1,), torch.int64)
    mode.enter(out, block.place)
    mode.values.set(out, real)
    return out


def assumed_counts(mode: Mode, total: int, classes: int) -> torch.Tensor:
    """How many of ``total`` fall on each class: all on the first in the worst case, else equally many."""
    mode.device.assumptions["counts of classes"] += 1
    if mode.device.data_dependent == "worst":
        counts = [total] + [0] * (classes - 1)
    else:
        counts = [total // classes + (i < total % classes) for i in range(classes)]
    return torch.tensor(counts, dtype=torch.int64, device="cpu")


def repeat_interleave(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """`aten.repeat_interleave.Tensor`: as many indices as the repeats add up to."""
    repeats = args[0]
    block = mode.block_of(repeats)
    if block is None:
        return operator.call(*args, **kwargs)
    known = mode.values.of(repeats)
    n = kwargs.get("output_size")
    if n is None and known is not None:
        n = int(known.sum())
    if n is None:
        mode.device.assumptions["integer taken for 1"] += 1
        n = repeats.numel()
    out = mode.results.fresh((n,), (1,), repeats.dtype)
    mode.enter(out, block.place)
    if known is not None:
        mode.values.set(out, torch.ops.aten.repeat_interleave.Tensor(known))
    return out


def equal(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """`aten.equal`, `aten.allclose`: whether two tensors have the same values; unknown ones are taken to differ."""
    if mode.locate(operator, args, kwargs) is None:
        return operator.call(*args, **kwargs)
    if args[0].shape != args[1].shape:
        return False
    known = [mode.values.of(tensor) for tensor in args[:2]]
    if known[0] is not None and known[1] is not None:
        return operator.call(*known, *args[2:], **kwargs)
    if id(storage_of(args[0])) == id(storage_of(args[1])) and args[0].stride() == args[1].stride():
        return True
    mode.device.assumptions["bool taken for False"] += 1
    return False


def note_classes(mode: Mode, operator: Operator, args: Any, out: Any) -> None:
    """Follow on how many classes integers and masks fall, through the ops that routers are made of."""
    packet: Any = getattr(operator.op, "overloadpacket", None)
    rule = _RULES.get(packet)
    if rule == "chosen":
        source = args[0]
        dim = args[2] if operator.name == "aten.topk" and len(args) > 2 else args[1] if len(args) > 1 else -1
        dim = dim if isinstance(dim, int) and source.dim() and operator.name != "aten.multinomial" else -1
        if operator.name == "aten.topk":
            dim = args[2] if len(args) > 2 else -1
        indices = out[1] if isinstance(out, list | tuple) else out
        mode.device.shares.set(indices, source.shape[dim] if source.dim() else 0)
    elif rule == "all" and mode.device.shares.of(args[0]):
        mode.device.shares.set(out, 1)
    elif rule == "kept" and isinstance(args[0], _Tensor):
        mode.device.shares.set(out, mode.device.shares.of(args[0]))


_RULES = {
    aten.topk: "chosen",
    aten.argmax: "chosen",
    aten.max: "chosen",
    aten.multinomial: "chosen",
    aten.eq: "kept",
    aten.clone: "kept",
    aten.view: "kept",
    aten._to_copy: "kept",
    aten._unsafe_view: "kept",
    aten.gt: "kept",
    aten.ne: "kept",
    aten.sum: "all",
}


SPECIALS = {
    aten.nonzero.default: nonzero,
    aten.masked_select.default: masked_select,
    aten.index.Tensor: index,
    aten._unsafe_index.Tensor: index,
    aten.index_put.default: index_put,
    aten.index_put_.default: index_put,
    aten._index_put_impl_.default: index_put,
    aten._unsafe_index_put.default: index_put,
    aten._unique.default: unique,
    aten._unique2.default: unique,
    aten.unique_consecutive.default: unique,
    aten.unique_dim.default: unique,
    aten.bincount.default: bincount,
    aten.repeat_interleave.Tensor: repeat_interleave,
    aten.equal.default: equal,
    aten.allclose.default: equal,
}
