"""Ops that the simulation runs in a way of their own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from torchledger.simulation import convolutions, dependent, moves, recurrent
from torchledger.simulation.contracts import Mode
from torchledger.simulation.operators import Operator
from torchledger.simulation.products import dtype_name
from torchledger.simulation.results import contiguous_strides

aten = torch.ops.aten
Special = Callable[["Mode", Operator, Any, dict[str, Any]], Any]


def local_scalar(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """`.item()`: the known value, or an assumed one."""
    tensor = args[0]
    if mode.block_of(tensor) is None:
        return operator.call(*args, **kwargs)
    return operator.call(mode.values.read(tensor))


def efficient_attention(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """The state of the random generator that it returns lies on the host."""
    out, logsumexp, *_ = mode.results.make(operator, args, kwargs)
    place = mode.locate(operator, args, kwargs)
    assert place is not None
    mode.enter((out, logsumexp), place)
    return out, logsumexp, *(torch.zeros((), dtype=torch.int64, device="cpu") for _ in range(2))


def layer_norm(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """Mean and reciprocal deviation are float32 on a device, also of half-precision inputs."""
    place = mode.locate(operator, args, kwargs)
    if place is None:
        return operator.call(*args, **kwargs)
    x = args[0]
    for tensor in args[2:4]:
        if tensor is not None and tensor.dtype is not x.dtype:
            raise RuntimeError(f"expected scalar type {dtype_name(x.dtype)} but found {dtype_name(tensor.dtype)}")
    rows = x.shape[: x.dim() - len(args[1])] + (1,) * len(args[1])
    dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    results = mode.results
    out = results.make(operator, args, kwargs)[0]
    strides = contiguous_strides(rows)
    made = (out, results.fresh(rows, strides, dtype), results.fresh(rows, strides, dtype))
    mode.enter(made, place)
    return made


def rms_norm(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """The fused kernel: its output, and the reciprocal deviation in float32."""
    place = mode.locate(operator, args, kwargs)
    if place is None:
        return operator.call(*args, **kwargs)
    x = args[0]
    rows = x.shape[: x.dim() - len(args[1])] + (1,) * len(args[1])
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    fresh = mode.results.fresh
    made = (fresh(x.shape, contiguous_strides(x.shape), x.dtype), fresh(rows, contiguous_strides(rows), dtype))
    mode.enter(made, place)
    return made


def rms_norm_backward(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """Gradients like the input and the weight, those that are asked for."""
    place = mode.locate(operator, args, kwargs)
    if place is None:
        return operator.call(*args, **kwargs)
    _, x, _, _, weight, mask = args[:6]
    fresh = mode.results.fresh
    made = tuple(
        fresh(t.shape, contiguous_strides(t.shape), t.dtype) if wanted and t is not None else None
        for t, wanted in zip((x, weight), mask, strict=True)
    )
    mode.enter(made, place)
    return made


def grouped_mm(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """Of other dtypes than bfloat16 too, which torch's meta kernel does not take."""
    place = mode.locate(operator, args, kwargs)
    if place is None:
        return operator.call(*args, **kwargs)
    results = mode.results
    like = [results.fresh(t.shape, t.stride(), torch.bfloat16) for t in args[:2]]
    named = {name: value for name, value in kwargs.items() if name not in ("bias", "out_dtype")}
    made = results.make(operator, (*like, *args[2:3]), named)
    dtype = kwargs.get("out_dtype") or (args[4] if len(args) > 4 else None) or args[0].dtype
    out = results.fresh(made.shape, made.stride(), dtype)
    mode.enter(out, place)
    return out


def no(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> bool:
    """Questions that a device answers with no."""
    return False


def reduced_loss(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """A reduced loss keeps the storage of the unreduced one: the op's output is made so, and then resized."""
    place = mode.locate(operator, args, kwargs)
    named = dict(zip((argument.name for argument in operator.op._schema.arguments), args, strict=False)) | kwargs
    if place is None or not named.get("reduction", 1):
        return mode.run_functional(operator, args, kwargs)
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    out = mode.results.within(max(math.prod(shape), 1), (), (), torch.result_type(args[0], args[1]))
    mode.enter(out, place)
    return out


def nll_loss(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """A device takes int64 and uint8 classes."""
    if mode.block_of(args[0]) is not None and args[1].dtype not in (torch.int64, torch.uint8):
        raise RuntimeError(
            f"\"nll_loss_forward_reduce_cuda_kernel_2d_index\" not implemented for '{dtype_name(args[1].dtype)}'"
        )
    return mode.run_functional(operator, args, kwargs)


def batch_norm_backward(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """Gradients like the input, the weight and the bias, those that are asked for."""
    place = mode.locate(operator, args, kwargs)
    if place is None:
        return operator.call(*args, **kwargs)
    named = dict(zip((argument.name for argument in operator.op._schema.arguments), args, strict=False)) | kwargs
    x, weight, mask = named["input"], named["weight"], named["output_mask"]
    fresh = mode.results.fresh
    channels = (x.shape[1],)
    made = (
        fresh(x.shape, dense_strides(x), x.dtype) if mask[0] else None,
        *(
            fresh(channels, (1,), (weight if weight is not None else x).dtype) if wanted else None
            for wanted in mask[1:]
        ),
    )
    mode.enter(made, place)
    return made


def weight_norm_backward(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """Gradients like the direction and the norms that were saved."""
    place = mode.locate(operator, args, kwargs)
    if place is None:
        return operator.call(*args, **kwargs)
    made = tuple(mode.results.fresh(t.shape, contiguous_strides(t.shape), t.dtype) for t in args[1:3])
    mode.enter(made, place)
    return made


def ctc_loss(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """`aten._ctc_loss`: a loss for each sequence, and the table of its forward pass."""
    place = mode.locate(operator, args, kwargs)
    if place is None:
        return operator.call(*args, **kwargs)
    log_probs, targets, _, lengths = args[:4]
    known = mode.values.of(lengths) if isinstance(lengths, torch.Tensor) else torch.tensor(lengths, device="cpu")
    longest = int(known.max()) if known is not None else targets.shape[-1]
    time, batch = log_probs.shape[:2]
    table = (batch, time, 2 * longest + 1)
    fresh = mode.results.fresh
    made = (fresh((batch,), (1,), log_probs.dtype), fresh(table, contiguous_strides(table), log_probs.dtype))
    mode.enter(made, place)
    return made


def like_second(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """A backward whose result is like its second argument."""
    place = mode.locate(operator, args, kwargs)
    if place is None:
        return operator.call(*args, **kwargs)
    made = mode.results.fresh(args[1].shape, contiguous_strides(args[1].shape), args[1].dtype)
    mode.enter(made, place)
    return made


def foreach(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
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


def foreach_norm(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
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
    aten._scaled_dot_product_efficient_attention.default: efficient_attention,
    aten.native_layer_norm.default: layer_norm,
    aten.nll_loss_forward.default: nll_loss,
    aten._fused_rms_norm.default: rms_norm,
    aten._fused_rms_norm_backward.default: rms_norm_backward,
    aten._grouped_mm.default: grouped_mm,
    **{getattr(aten._use_cudnn_ctc_loss, name): no for name in ("default", "Tensor")},
    aten.native_batch_norm_backward.default: batch_norm_backward,
    aten.mse_loss.default: reduced_loss,
    aten.smooth_l1_loss.default: reduced_loss,
    aten.soft_margin_loss.default: reduced_loss,
    aten.binary_cross_entropy.default: reduced_loss,
    aten._weight_norm_interface_backward.default: weight_norm_backward,
    aten.multi_margin_loss_backward.default: like_second,
    aten.multilabel_margin_loss_backward.default: like_second,
    aten._ctc_loss.default: ctc_loss,
    aten._ctc_loss.Tensor: ctc_loss,
    aten._ctc_loss_backward.default: like_second,
    aten._ctc_loss_backward.Tensor: like_second,
    **convolutions.SPECIALS,
    **dependent.SPECIALS,
    **recurrent.SPECIALS,
    **_foreach_specials(),
}
