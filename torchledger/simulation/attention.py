"""Which kernel `scaled_dot_product_attention` takes on a CUDA device.

Source: ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``, ``sdp_utils_cpp.h`` and ``attention.cpp`` of torch 2.9
to 2.15; for CUDA, dense tensors.
"""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple

import torch

from torchledger.simulation.contracts import Device
from torchledger.simulation.facts import torch_version

_Tensor = torch.Tensor
aten = torch.ops.aten
MATH, FLASH, EFFICIENT, CUDNN = 0, 1, 2, 3
_DEFAULT_ORDER = [FLASH, EFFICIENT, MATH, CUDNN, 4]
_HALF = (torch.float16, torch.bfloat16)


class Params(NamedTuple):
    """One call."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    is_causal: bool
    gqa: bool

    @property
    def needs_grad(self) -> bool:
        """Whether a backward may follow."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in self[:3])


def choose_backend(device: Device, params: Params) -> int:
    """The backend that CUDA takes: `MATH`, `FLASH`, `EFFICIENT` or `CUDNN`.

    Raises:
        RuntimeError: every backend that could run is turned off, in torch's words.
    """
    params = _normalized(params)
    for backend in _order(device):
        if backend == FLASH and torch._C._get_flash_sdp_enabled() and _flash_runs(device, params):
            return FLASH
        if backend == EFFICIENT and torch._C._get_mem_efficient_sdp_enabled() and _efficient_runs(device, params):
            return EFFICIENT
        if backend == CUDNN and torch._C._get_cudnn_sdp_enabled() and _cudnn_runs(device, params):
            return CUDNN
        if backend == MATH and torch._C._get_math_sdp_enabled():
            return MATH
    raise RuntimeError("No available kernel. Aborting execution.")


def _normalized(params: Params) -> Params:
    if torch_version() < (2, 14) or any(t.dim() != 3 for t in params[:3]):
        return params
    mask = params.mask
    while mask is not None and mask.dim() < 4:
        mask = mask.unsqueeze(0)
    q, k, v = (t.unsqueeze(0) for t in params[:3])
    return params._replace(query=q, key=k, value=v, mask=mask)


def _order(device: Device) -> list[int]:
    order = list(torch._C._get_sdp_priority_order())
    if order == _DEFAULT_ORDER and prefers_cudnn(device):
        return [CUDNN, FLASH, EFFICIENT, MATH]
    return order


def prefers_cudnn(device: Device) -> bool:
    """Whether cuDNN's attention comes first: on compute capability 9 and 10, when cuDNN is newer than 9.15.0."""
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
        return False
    return device.versions.cudnn_number > 91500 and device.capability[0] in (9, 10)


def _flash_runs(device: Device, params: Params) -> bool:
    q, k, v = params[:3]
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4 or params.mask is not None:
        return False
    width = q.shape[-1]
    if k.shape[-1] != width or v.shape[-1] != width or width > 256:
        return False
    if not (8, 0) <= device.capability <= (12, 1) or not _low_precision(device, params):
        return False
    capability = device.capability
    narrow = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    if params.needs_grad and narrow and not (width <= 192 or (not params.dropout and width > 224)):
        return False
    if params.is_causal and q.shape[-2] != k.shape[-2]:
        return False
    return _dense_shapes(params) and _last_stride_is_one(params, ignore_singleton=True)


def _efficient_runs(device: Device, params: Params) -> bool:
    q, k, v = params[:3]
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4 or not (5, 0) <= device.capability <= (12, 1):
        return False
    alignment = _gemm_alignment(device, q.dtype)
    width, out_width = q.shape[-1], v.shape[-1]
    if width != k.shape[-1] or width % alignment or not width or out_width % alignment or not out_width:
        return False
    if torch_version() >= (2, 14) and device.capability >= (8, 0):
        nbytes = alignment * q.element_size()
        if any(t.numel() and t.storage_offset() * t.element_size() % nbytes for t in (q, k, v)):
            return False
    # Grouped queries: not before torch 2.14.
    if not _dense_shapes(params, gqa=torch_version() >= (2, 14)):
        return False
    if not _last_stride_is_one(params, ignore_singleton=False):
        return False
    allowed = (torch.float16, torch.float32, *((torch.bfloat16,) if device.capability >= (8, 0) else ()))
    return q.dtype is k.dtype is v.dtype and q.dtype in allowed


def _cudnn_runs(device: Device, params: Params) -> bool:
    q, k, v = params[:3]
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4 or not (8, 0) <= device.capability <= (12, 1):
        return False
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    if not _low_precision(device, params) or params.dropout * 16 != math.floor(params.dropout * 16):
        return False
    version = device.versions.cudnn_number
    if params.dropout and 91100 < version < 91400:
        return False
    width, out_width = q.shape[3], v.shape[3]
    recent = device.capability == (9, 0) or device.capability[0] == 10
    limit = 128
    if recent and version > 92200 and torch_version() >= (2, 14):
        limit = 256
    elif recent and version >= 91100 and (width, out_width) == (192, 128):
        limit = 192
    if width > limit or out_width > limit or width % 8 or out_width % 8 or k.shape[2] == 1:
        return False
    if params.dropout and q.shape[2] == 1:
        return False
    if params.needs_grad and limit == 256:
        narrow = width <= 128 and out_width <= 128
        if not narrow and (width, out_width) not in ((192, 128), (256, 256)):
            return False
    return (
        _mask_fits(params)
        and _dense_shapes(params, same_heads=False)
        and _last_stride_is_one(params, ignore_singleton=True)
    )


def _low_precision(device: Device, params: Params) -> bool:
    allowed = _HALF if device.capability[0] >= 8 else (torch.float16,)
    return params.query.dtype is params.key.dtype is params.value.dtype and params.query.dtype in allowed


def _gemm_alignment(device: Device, dtype: torch.dtype) -> int:
    half = dtype in _HALF
    alignment = 4 if device.capability[0] >= 8 else 1
    if device.capability[0] >= 8 or (device.capability[0] >= 7 and half):
        alignment = max(alignment, 128 // (16 if half else 32))
    return alignment


def _dense_shapes(params: Params, *, gqa: bool = True, same_heads: bool = True) -> bool:
    q, k, v = params[:3]
    if not q.shape[0] == k.shape[0] == v.shape[0] or not q.shape[-2] or not k.shape[-2]:
        return False
    heads, key_heads, value_heads = q.shape[-3], k.shape[-3], v.shape[-3]
    if params.gqa and gqa:
        if same_heads and key_heads != value_heads:
            return False
        return heads % key_heads == 0 and (same_heads or heads % value_heads == 0)
    if heads == key_heads == value_heads:
        return True
    return torch_version() >= (2, 14) and heads > 0 and key_heads == 1 and value_heads == 1


def _last_stride_is_one(params: Params, *, ignore_singleton: bool) -> bool:
    fine = all(t.stride(-1) == 1 for t in params[:3]) or (ignore_singleton and params.query.shape[-1] == 1)
    return fine and (params.mask is None or params.mask.stride(-1) == 1)


def _mask_fits(params: Params) -> bool:
    mask = params.mask
    if mask is None:
        return True
    if mask.requires_grad:
        return False
    wanted = (params.query.shape[0], params.query.shape[1], params.query.shape[2], params.key.shape[2])
    if mask.dim() not in (2, 4):
        return False
    return all(n in (1, full) for n, full in zip(mask.shape, wanted[-mask.dim() :], strict=True))


# The function itself


def attend(
    device: Device, query: Any, key: Any, value: Any, mask: Any, dropout: float, is_causal: bool, scale: Any,
    gqa: bool,
) -> Any:  # fmt: skip
    """What `scaled_dot_product_attention` does on CUDA, up to the kernel that it takes."""
    _check(query, key, value, mask, is_causal)
    backend = choose_backend(device, Params(query, key, value, mask, dropout, is_causal, gqa))
    params = Params(query, key, value, mask, dropout, is_causal, gqa)
    unbatched = backend != MATH and query.dim() == 3
    if unbatched:
        normal = _normalized(params)
        query, key, value, mask = normal.query, normal.key, normal.value, normal.mask
    mask = _additive(mask, query.dtype)
    needs_grad = params.needs_grad
    if backend == CUDNN:
        out = aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, needs_grad, dropout, is_causal, False, scale=scale
        )[0]
    elif backend == FLASH:
        out = _flash(query, key, value, dropout, is_causal, scale)
    elif backend == EFFICIENT:
        if mask is not None:
            mask = _padded_mask(mask, query, key)
        out = aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, needs_grad, dropout, is_causal, scale=scale
        )[0]
    else:
        return aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout, is_causal, None, scale=scale, enable_gqa=gqa
        )[0]
    return out.squeeze(0) if unbatched else out


def _check(query: Any, key: Any, value: Any, mask: Any, is_causal: bool) -> None:
    """Complain of arguments as `validate_sdpa_input` does."""
    if not query.dtype is key.dtype is value.dtype:
        q, k, v = (str(t.dtype).removeprefix("torch.") for t in (query, key, value))
        raise RuntimeError(
            f"Expected query, key, and value to have the same dtype, but got query.dtype: {q} key.dtype: {k} and "
            f"value.dtype: {v} instead."
        )
    if query.dim() < 2 or key.dim() < 2 or value.dim() < 2:
        raise RuntimeError(
            f"Expected query, key, and value to all be  at least 2 dimensional, but got query.dim: {query.dim()}, "
            f"key.dim: {key.dim()} and value.dim: {value.dim()} instead."
        )
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, query.dtype):
        m, q = (str(t.dtype).removeprefix("torch.") for t in (mask, query))
        raise RuntimeError(
            f"Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: {m} and  "
            f"query.dtype: {q} instead."
        )


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if mask is None or mask.dtype is not torch.bool:
        return mask
    added = torch.zeros_like(mask, dtype=dtype)
    added.masked_fill_(mask.logical_not(), -math.inf)
    return added


def _padded_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    width = mask.shape[-1]
    if width % 16:
        return torch.nn.functional.pad(mask, (0, 16 - width % 16))[..., :width]
    if any(mask.stride(d) % 16 for d in range(3)):
        return mask.contiguous()
    return mask


def _flash(query: Any, key: Any, value: Any, dropout: float, is_causal: bool, scale: Any) -> Any:
    width = query.shape[-1]
    scale = 1 / math.sqrt(width) if scale is None else scale
    if width % 8:
        query, key, value = (torch.nn.functional.pad(t, (0, 8 - width % 8)) for t in (query, key, value))
    out = aten._scaled_dot_product_flash_attention(query, key, value, dropout, is_causal, False, scale=scale)[0]
    return out[..., :width] if width % 8 else out
