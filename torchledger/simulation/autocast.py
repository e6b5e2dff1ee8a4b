"""Autocast as CUDA does it: which ops cast their arguments to what, and the cache of cast weights.

Which ops have an autocast kernel for CUDA is asked of the installed torch, which knows it without a CUDA device; how
each of them casts stands here. Source: ``aten/src/ATen/autocast_mode.h`` and ``.cpp`` of torch 2.9 to 2.15.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from torchledger import internals
from torchledger.patching import Patches
from torchledger.simulation.contracts import Device

_Tensor = torch.Tensor
_to = torch.Tensor.to
aten = torch.ops.aten


def _split(names: str) -> frozenset[str]:
    return frozenset(names.split())


LOWER_PRECISION = _split(
    "_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution prelu "
    "addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot "
    "_thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell "
    "_scaled_dot_product_flash_attention scaled_dot_product_attention cudnn_convolution cudnn_convolution_transpose "
    "_cudnn_rnn"
)
"""Floating arguments are cast to the autocast dtype."""
FLOAT32 = _split(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm "
    "native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss "
    "cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss "
    "margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
    "binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d "
    "upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d "
    "upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa "
    "linalg_matrix_sqrth"
)
"""Floating arguments are cast to float32."""
FLOAT32_RESULT = _split("prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum")
"""Where the op's optional dtype is not given, it is float32."""
APPENDED_DTYPE = frozenset({"norm"})
"""They call the overload that has a dtype, with float32."""
WIDEST = _split("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")
"""Floating arguments are cast to the widest dtype among them."""
BANNED = frozenset({"binary_cross_entropy"})


def _lower_dtype() -> torch.dtype:
    dtype: torch.dtype = torch.get_autocast_dtype("cuda")
    return dtype


class WeightCache:
    """The casts of weights that autocast keeps until it is left."""

    def __init__(self) -> None:
        self._casts: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype, lower: torch.dtype) -> torch.Tensor:
        """A tensor in another dtype; a float32 leaf that needs a gradient is cast to the lower one once."""
        may_keep = (
            dtype is lower
            and tensor.dtype is torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
            and torch.is_autocast_cache_enabled()
        )
        if not may_keep:
            return _to(tensor, dtype)
        found = self._casts.get(id(tensor))
        if found is not None and found[0]() is tensor:
            return found[1]
        cast = _to(tensor, dtype)
        self._casts[id(tensor)] = (weakref.ref(tensor), cast)
        return cast

    def clear(self) -> None:
        """Forget all casts."""
        self._casts.clear()


class Autocast:
    """The kernels of one simulation."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.cache = WeightCache()
        self._keys = internals.DispatchKeySet(device.backend.autocast_key)

    def register(self, library: Any) -> None:
        """Register a kernel for each op that has one on CUDA."""
        key = f"Autocast{self.device.backend.name}"
        for op in cuda_autocast_ops():
            name = op.overloadpacket.__name__
            kernel = self._kernel(op, name)
            if kernel is None:
                self.device.note(
                    f"how autocast casts the arguments of {op} on CUDA is not known: they stay as they are"
                )
            else:
                library.impl(op.name(), kernel, key)

    def _kernel(self, op: OpOverload, name: str) -> Callable[..., Any] | None:
        call, exclude, keys = op._op, internals.exclude_keys, self._keys
        if name in LOWER_PRECISION:

            def lower(*args: Any, **kwargs: Any) -> Any:
                dtype = _lower_dtype()
                with exclude(keys):
                    return call(*self._cast_all(args, dtype), **self._cast_named(kwargs, dtype))

            return lower
        if name in FLOAT32:

            def full(*args: Any, **kwargs: Any) -> Any:
                with exclude(keys):
                    return call(*self._cast_all(args, torch.float32), **self._cast_named(kwargs, torch.float32))

            return full
        if name in FLOAT32_RESULT:

            def full_result(*args: Any, **kwargs: Any) -> Any:
                if kwargs.get("dtype") is None and self._is_eligible(args[0]):
                    args, kwargs = _set_dtype(op, args, kwargs)
                with exclude(keys):
                    return call(*args, **kwargs)

            return full_result
        if name in APPENDED_DTYPE:

            def appended(*args: Any, **kwargs: Any) -> Any:
                dtype = torch.float32 if self._is_eligible(args[0]) else args[0].dtype
                with exclude(keys):
                    if len(args) > 2 or "dim" in kwargs:
                        return aten.norm.ScalarOpt_dim_dtype(*args, **kwargs, dtype=dtype)
                    return aten.norm.ScalarOpt_dtype(args[0], args[1] if len(args) > 1 else 2, dtype=dtype)

            return appended
        if name in WIDEST:

            def widest(*args: Any, **kwargs: Any) -> Any:
                dtype = self._widest((*args, *kwargs.values()))
                with exclude(keys):
                    return call(*self._cast_all(args, dtype), **self._cast_named(kwargs, dtype))

            return widest
        return _refuse if name in BANNED else None

    def _is_eligible(self, value: Any) -> bool:
        if not isinstance(value, _Tensor) or not value.dtype.is_floating_point or value.dtype is torch.float64:
            return False
        block = self.device.blocks.live.get(id(value.untyped_storage()))
        return block is not None and block.place >= 0

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, _Tensor):
            if value.dtype is dtype or not self._is_eligible(value):
                return value
            return self.cache.cast(value, dtype, _lower_dtype())
        if isinstance(value, list | tuple) and any(isinstance(item, _Tensor) for item in value):
            return [self._cast(item, dtype) for item in value]
        return value

    def _cast_all(self, args: Any, dtype: torch.dtype) -> list[Any]:
        return [self._cast(arg, dtype) for arg in args]

    def _cast_named(self, kwargs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
        return {name: self._cast(value, dtype) for name, value in kwargs.items()} if kwargs else kwargs

    def _widest(self, values: Any) -> torch.dtype:
        for value in values:
            for item in value if isinstance(value, list | tuple) else (value,):
                if self._is_eligible(item) and item.dtype == torch.float32:
                    return torch.float32
        return _lower_dtype()


def cuda_autocast_ops() -> list[OpOverload]:
    """The ops for which the installed torch has an autocast kernel for CUDA."""
    found = []
    for name in _names():
        packet = getattr(aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            full = f"aten::{name}" if overload == "default" else f"aten::{name}.{overload}"
            if overload.endswith("out") or "imname" in overload or "names" in overload:
                continue
            try:
                if internals.has_kernel_for_key(full, "AutocastCUDA"):
                    found.append(getattr(packet, overload))
            except RuntimeError:  # an overload of TorchScript alone
                continue
    return found


def _names() -> list[str]:
    return sorted(LOWER_PRECISION | FLOAT32 | FLOAT32_RESULT | APPENDED_DTYPE | WIDEST | BANNED)


def _set_dtype(op: OpOverload, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    for index, argument in enumerate(op._schema.arguments):
        if argument.name == "dtype":
            if index < len(args):
                if args[index] is None:
                    args = (*args[:index], torch.float32, *args[index + 1 :])
            else:
                kwargs = {**kwargs, "dtype": torch.float32}
    return args, kwargs


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
        "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
        "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
        "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
        "safe to autocast."
    )


def mirror(device: Device, autocast: Autocast, patches: Patches) -> None:
    """Let autocast for cuda be autocast for the borrowed keys, and clear our cache where torch clears its own."""
    name = device.backend.name.lower()
    set_enabled, clear = torch.set_autocast_enabled, torch.clear_autocast_cache

    def set_autocast_enabled(*args: Any, **kwargs: Any) -> None:
        set_enabled(*args, **kwargs)
        set_enabled(name, torch.is_autocast_enabled("cuda"))

    def clear_autocast_cache() -> None:
        autocast.cache.clear()
        clear()

    patches.replace(torch, "set_autocast_enabled", set_autocast_enabled)
    patches.replace(torch, "clear_autocast_cache", clear_autocast_cache)
    before = torch.is_autocast_enabled(name)
    patches.on_restore(lambda: set_enabled(name, before))
    patches.on_restore(autocast.cache.clear)
    set_enabled(name, torch.is_autocast_enabled("cuda"))
