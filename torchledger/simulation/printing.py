"""How simulated tensors are printed: small ones with their values, as far as these are known or assumed."""

from __future__ import annotations

from typing import Any

import torch

from torchledger.simulation.blocks import HOST
from torchledger.simulation.contracts import Device
from torchledger.simulation.values import LARGEST_KNOWN

TYPE_NAMES = {
    torch.float32: "FloatTensor",
    torch.float64: "DoubleTensor",
    torch.float16: "HalfTensor",
    torch.bfloat16: "BFloat16Tensor",
    torch.int64: "LongTensor",
    torch.int32: "IntTensor",
    torch.int16: "ShortTensor",
    torch.int8: "CharTensor",
    torch.uint8: "ByteTensor",
    torch.bool: "BoolTensor",
}


def describe(device: Device, tensor: torch.Tensor, original: Any) -> str:
    """What `repr` says of a simulated tensor."""
    if tensor.layout is not torch.strided:
        size = f"size={tuple(tensor.shape)}, nnz={tensor._nnz()}"
        return f"tensor(..., device='cuda:0', {size}, dtype={tensor.dtype}, layout={tensor.layout})"
    block = device.blocks.live[id(tensor.untyped_storage())]
    where = "" if block.place == HOST else f", device='cuda:{block.place}'"
    known = device.values.of(tensor) if tensor.numel() <= LARGEST_KNOWN else None
    if known is None and tensor.dim() == 0 and block.place != HOST:
        known = device.values.read(tensor.detach())
    if known is None:
        shape = ", ".join(map(str, tensor.shape))
        return f"tensor(...{where}, size=({shape}), dtype={tensor.dtype})"
    shown = str(original(known.detach()))[:-1] + where
    if tensor.grad_fn is not None:
        shown += f", grad_fn=<{type(tensor.grad_fn).__name__}>"
    elif tensor.requires_grad:
        shown += ", requires_grad=True"
    return shown + ")"
