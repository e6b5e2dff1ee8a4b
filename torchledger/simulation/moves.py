"""From the host to the device and back, and what is made in the one place for the other."""

from __future__ import annotations

from typing import Any

import torch

from torchledger.simulation import host, sparse
from torchledger.simulation.blocks import HOST, storage_of
from torchledger.simulation.contracts import Mode
from torchledger.simulation.keys import GENUINE_META, META
from torchledger.simulation.operators import Operator

aten = torch.ops.aten
_Tensor = torch.Tensor
_empty_strided = torch.empty_strided
_MIXING = (
    aten.copy_,
    aten._to_copy,
    aten.index,
    aten.index_put,
    aten.index_put_,
    aten._index_put_impl_,
    aten._unsafe_index,
    aten._unsafe_index_put,
    aten.lift,
    aten.lift_fresh,
    aten.set_,
    aten._pin_memory,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward,
    aten._pack_padded_sequence,
    aten._has_compatible_shallow_copy_type,
    aten.set_data,
    aten.repeat_interleave,
    aten.split_with_sizes,
    aten.is_same_size,
    aten._ctc_loss,
    aten._ctc_loss_backward,
    aten._cudnn_rnn,
    aten._cudnn_rnn_backward,
)


def device_name(place: int) -> str:
    """``cuda:0``, or ``cpu`` for the host, or the program's own ``meta``."""
    return {HOST: "cpu", GENUINE_META: "meta"}.get(place, f"cuda:{place}")


def may_differ(operator: Operator) -> bool:
    """Whether an op takes arguments from two devices."""
    packet = getattr(operator.op, "overloadpacket", None)
    return packet in _MIXING


def check_same_device(operator: Operator, tensor: torch.Tensor, place: int) -> None:
    """Complain as a device does about a host tensor, unless it is a mere number.

    Raises:
        RuntimeError: it is more.
    """
    if (tensor.dim() and tensor.numel()) and not may_differ(operator):
        raise_two_devices(place, GENUINE_META if tensor.device.type == "meta" else HOST, operator.name)


def raise_two_devices(one: int, other: int, op: str) -> None:
    """Raise what torch raises.

    Raises:
        RuntimeError: always.
    """
    names = sorted((device_name(one), device_name(other)), reverse=True)
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {names[0]} and {names[1]}! "
        f"(in {op})"
    )


def make_elsewhere(
    mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any], device: torch.device, place: int | None
) -> Any:
    """An op whose result is to lie on a device that is real: the host, or the program's own ``meta``."""
    if device.index == GENUINE_META:
        kwargs = {**kwargs, "device": META}
    if place is not None:
        # `zeros_like(x, device="cpu")`: only the shape of x counts.
        args = [_stand_in(arg) if isinstance(arg, _Tensor) else arg for arg in args]
    elif device.type == "cpu" and (out := host.make_without_data(mode, operator, args, kwargs)) is not None:
        return out
    return operator.call(*args, **kwargs)


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    shape = tensor.shape
    return _empty_strided(shape, [0] * len(shape), dtype=tensor.dtype, device="cpu")


def to_copy(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """`aten._to_copy`: another dtype, layout or device."""
    source = args[0]
    block = mode.block_of(source)
    place = None if block is None else block.place
    target = mode.target(kwargs.get("device"), place)
    if place is None and (target is None or (isinstance(target, torch.device) and target.index != GENUINE_META)):
        return operator.call(*args, **kwargs)
    plain = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory", "non_blocking")}
    if isinstance(target, torch.device) and target.type == "meta":
        return operator.call(source, **plain, device=META) if place is None else mode.results.run(operator, args, plain)
    if source.layout is not torch.strided:
        if source.layout is torch.sparse_coo and isinstance(target, int) and target >= 0:
            return sparse.from_host(mode, source, kwargs.get("dtype") or source.dtype, target)
        return mode.device.refuse_layout(source, "a copy")
    if place is None:
        if source.device.type == "meta":
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")
        shape_of = _empty_strided(source.shape, source.stride(), dtype=source.dtype, device=META)
        out = mode.results.make(operator, (shape_of,), plain)
    else:
        out = mode.results.make(operator, args, plain)
    if isinstance(target, torch.device):
        return bring_back(mode, source, out)
    assert target is not None
    mode.blocks.enter(out, target, mode.device.stream)
    mode.values.copy(source, out)
    return out


def bring_back(mode: Mode, source: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A host tensor like one on the device: with its values as far as they are known, else with assumed ones."""
    if like.numel() * like.element_size() > host.LARGEST_READ:
        mode.blocks.enter(like, HOST)
        return like
    out = _empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
    if mode.values.of(source) is None:
        mode.device.note_assumed(out)
    return out.copy_(mode.values.read(source))


def copy_into(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """`aten.copy_`: also from one device to another."""
    target, source = args[0], args[1]
    there, here = mode.block_of(target), mode.block_of(source)
    if there is None and here is None:
        return operator.call(*args, **kwargs)
    if there is None:
        assert here is not None
        if here.place == HOST:
            host.refuse_reading(source, "copied into a tensor with data")
        return target.copy_(mode.values.read(source))
    if there.place >= 0 and here is not None and here.place == there.place:
        mode.results.check(operator, args[:2], {})
    else:
        target.shape == source.shape or torch.broadcast_shapes(target.shape, source.shape)
    mode.values.write(operator, args[:2], {})
    return target


def lift_fresh(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """`aten.lift_fresh`: a tensor that was made just now."""
    return operator.call(*args, **kwargs) if mode.block_of(args[0]) is None else args[0]


__all__ = ["bring_back", "check_same_device", "copy_into", "lift_fresh", "make_elsewhere", "storage_of", "to_copy"]
