"""Convolutions: cuDNN's outputs lie as its inputs do, channels first or last.

Source: ``cudnn_conv_suggest_memory_format`` in ``aten/src/ATen/native/ConvUtils.h`` of torch 2.13.
"""

from __future__ import annotations

from typing import Any

import torch

from torchledger.simulation.contracts import Mode
from torchledger.simulation.operators import Operator

aten = torch.ops.aten


def convolution(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """`aten.convolution`."""
    place = mode.locate(operator, args, kwargs)
    if place is None:
        return operator.call(*args, **kwargs)
    out = _laid_out(mode, mode.results.make(operator, args, kwargs), args[0], args[1])
    mode.enter(out, place)
    return out


def convolution_backward(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """`aten.convolution_backward`: gradients of the input, the weight and the bias."""
    place = mode.locate(operator, args, kwargs)
    if place is None:
        return operator.call(*args, **kwargs)
    gradient, x, weight = args[:3]
    made = mode.results.make(operator, args, kwargs)
    outs = tuple(
        _laid_out(mode, out, first, weight) if out is not None and index < 2 else out
        for index, (out, first) in enumerate(zip(made, (gradient, x, None), strict=True))
    )
    mode.enter(outs, place)
    return outs


def _laid_out(mode: Mode, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if not (_is_channels_last(x) or _is_channels_last(weight)) or out.dim() not in (4, 5):
        return out
    wanted = torch.channels_last if out.dim() == 4 else torch.channels_last_3d
    if out.is_contiguous(memory_format=wanted):
        return out
    order = [0, *range(2, out.dim()), 1]
    strides, step = [0] * out.dim(), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(out.shape[dim], 1)
    return mode.results.fresh(out.shape, strides, out.dtype)


def _is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether a tensor's strides are those of channels last, and not those of channels first as well."""
    if tensor.dim() not in (4, 5):
        return False
    wanted = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return tensor.is_contiguous(memory_format=wanted) and not tensor.is_contiguous()


SPECIALS = {
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
}
