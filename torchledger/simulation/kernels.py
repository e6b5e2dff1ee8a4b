"""Kernels that a CUDA device chooses otherwise than a meta tensor's: registered while a simulation runs.

Most are composites whose C++ asks whether a tensor is on CUDA; here they are asked in Python, for the borrowed keys.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch

from torchledger import internals
from torchledger.patching import Patches
from torchledger.simulation import attention, recurrent
from torchledger.simulation.autocast import Autocast, mirror
from torchledger.simulation.contracts import Device, Mode
from torchledger.simulation.facts import torch_version

aten = torch.ops.aten
# The kernels that read one of these and write float32; bfloat16 came later (`_softmax`'s checks in torch 2.9 and 2.13).
_READ_AS_FLOAT32 = (torch.float16, *((torch.bfloat16,) if torch_version() >= (2, 13) else ()))
_composite_key = internals.composite_implicit_key
WHOLE = ("silu_backward", "mish_backward", "_fused_rms_norm")
"""Composites that have a kernel of their own on CUDA, by which they arrive whole."""


class _Kernels:
    """The composites of one simulation."""

    def __init__(self, device: Device, mode: Mode) -> None:
        self.device = device
        self.mode = mode

    def table(self) -> dict[Any, Callable[..., Any]]:
        """The ops and what stands for their composition."""
        return {
            aten.scaled_dot_product_attention.default: self.attention,
            aten._scaled_dot_product_attention_math.default: self.attention_math,
            aten.dropout.default: self.dropout,
            aten.softmax.int: self.softmax,
            aten.log_softmax.int: self.log_softmax,
            aten.batch_norm.default: self.batch_norm,
            aten.linear.default: self.linear,
            aten.one_hot.default: self.one_hot,
            aten.ctc_loss.IntList: self.ctc_loss,
            aten.ctc_loss.Tensor: self.ctc_loss,
            **recurrent.table(self.device, self.is_on_device),
        }

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on the device."""
        block = self.mode.block_of(tensor)
        return block is not None and block.place >= 0

    def attention(
        self, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        *, scale: Any = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        if not self.is_on_device(query):
            return aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )[0]
        return attention.attend(self.device, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    def attention_math(self, *args: Any, **kwargs: Any) -> Any:
        return self._adding_in_place(aten._scaled_dot_product_attention_math.default, args, kwargs)

    def linear(self, *args: Any, **kwargs: Any) -> Any:
        return self._adding_in_place(aten.linear.default, args, kwargs)

    def dropout(self, tensor: Any, p: float, train: bool) -> Any:
        if train and 0 < p < 1 and tensor.numel() and self.is_on_device(tensor):
            return aten.native_dropout(tensor, p, True)[0]
        return aten.dropout.default._op_dk(_composite_key, tensor, p, train)

    def softmax(self, tensor: Any, dim: int, dtype: Any = None) -> Any:
        if dtype is torch.float32 and tensor.dtype in _READ_AS_FLOAT32 and self.is_on_device(tensor):
            return aten._softmax(tensor, dim, True)
        return aten.softmax.int._op_dk(_composite_key, tensor, dim, dtype)

    def log_softmax(self, tensor: Any, dim: int, dtype: Any = None) -> Any:
        if dtype is torch.float32 and tensor.dtype in _READ_AS_FLOAT32 and self.is_on_device(tensor):
            return aten._log_softmax(tensor, dim, True)
        return aten.log_softmax.int._op_dk(_composite_key, tensor, dim, dtype)

    def batch_norm(
        self, x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float,
        cudnn_enabled: bool,
    ) -> Any:  # fmt: skip
        args = (x, weight, bias, mean, var, training, momentum, eps)
        if not self.is_on_device(x):
            return aten.batch_norm.default._op_dk(_composite_key, *args, cudnn_enabled)
        if cudnn_enabled and _cudnn_normalizes(*args):
            x = x if x.is_contiguous(memory_format=torch.channels_last) and x.dim() == 4 else x.contiguous()
            return aten.cudnn_batch_norm(x, *args[1:])[0]
        return aten.native_batch_norm(*args)[0]

    def one_hot(self, tensor: Any, num_classes: int = -1) -> Any:
        if num_classes < 0 or not self.is_on_device(tensor):
            return aten.one_hot.default._op_dk(_composite_key, tensor, num_classes)
        out = torch.zeros((*tensor.shape, num_classes), dtype=torch.int64, device=tensor.device)
        out.scatter_(-1, tensor.unsqueeze(-1), 1)
        if self.device.values.of(out) is None:
            self.device.shares.set(out, num_classes)
        return out

    def ctc_loss(
        self, log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: int = 0, reduction: int = 1,
        zero_infinity: bool = False,
    ) -> Any:  # fmt: skip
        args = (log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
        if not self.is_on_device(log_probs):
            op = aten.ctc_loss.Tensor if isinstance(input_lengths, torch.Tensor) else aten.ctc_loss.IntList
            return op._op_dk(_composite_key, *args)
        loss = aten._ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)[0]
        if zero_infinity:
            loss = torch.where(loss == math.inf, torch.zeros((), device=loss.device), loss)
        if reduction == 1:
            lengths = torch.as_tensor(target_lengths).to(loss.device, loss.dtype)
            return (loss / lengths.clamp_min(1)).mean()
        return loss.sum() if reduction == 2 else loss

    def _adding_in_place(self, op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a composition that adds in place where no mode is on."""
        mode = self.mode
        before, mode.in_linear = mode.in_linear, True
        try:
            return op._op_dk(_composite_key, *args, **kwargs)
        finally:
            mode.in_linear = before


def _cudnn_normalizes(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> bool:
    """Whether `_batch_norm_impl_index` takes cuDNN (``aten/src/ATen/native/Normalization.cpp``)."""
    if weight is None or bias is None or x.dtype is torch.bfloat16 or weight.dtype is torch.bfloat16:
        return False
    if x.dtype is torch.float16 and weight.dtype is not torch.float32:
        return False
    if (mean is None) != (var is None) or (mean is None and not training):
        return False
    largest = 880801 if training else 65535
    return x.dim() >= 3 and x.shape[0] <= largest and eps >= 1e-5 and x.numel() < 2**31 - 1


def register(device: Device, mode: Mode, patches: Patches) -> None:
    """Register them, until the patches are restored."""
    kernels = _Kernels(device, mode)
    device.autocast = Autocast(device)
    mode.composites = kernels.table()
    library = torch.library.Library("aten", "IMPL")
    patches.on_restore(library._destroy)
    with warnings.catch_warnings():
        # XPU has autocast kernels of its own, which come back with the end of the library.
        warnings.simplefilter("ignore", UserWarning)
        _fill(device, mode, library, patches)
    mirror(device, device.autocast, patches)


def _fill(device: Device, mode: Mode, library: Any, patches: Patches) -> None:
    backend = device.backend.name
    for op, function in mode.composites.items():
        library.impl(op.name(), function, f"Autograd{backend}")
    for name in WHOLE:
        if hasattr(aten, name):
            library.impl(name, _never, backend)
    if not internals.has_backend_fallback(device.backend.autocast_key):
        fallback = torch.library.Library("_", "IMPL")
        patches.on_restore(fallback._destroy)
        fallback.fallback(internals.fallthrough_kernel, f"Autocast{backend}")
    device.autocast.register(library)


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a dispatch mode stands before this kernel")
