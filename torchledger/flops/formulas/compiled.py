"""Products that only a compiler or a distributed program calls: Inductor's extern kernels, fused collectives.

N: tokens; m, n, k as in matmul. They compute what the aten op computes, with packed weights or something else fused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from torchledger.flops.costs import add_costs, scale
from torchledger.flops.formulas.conv import laid_out
from torchledger.flops.formulas.grouped import grouped_mm, packed
from torchledger.flops.rules import Cost, UnknownCostError, counts
from torchledger.flops.tensors import product


@counts("mkl._mkl_linear", operands=(0, 2))
def mkl_linear(y: Tensor, x: Tensor, packed_w: Tensor, w: Tensor, /, *_: Any, **__: Any) -> int | Cost:
    """2·N·in·out.

    The original weight is argument 2; the packed one's shape does not tell.  x (..., in), w (out, in).
    """
    return scale(2 * x.numel() * w.shape[0], x.dtype)


@counts("mkldnn._linear_pointwise", operands=(0, 1))
def linear_pointwise(y: Tensor, x: Tensor, /, *_: Any, **__: Any) -> int | Cost:
    """2·N·in·out.

    The packed weight's shape does not tell, so out comes from y.  x (..., in), y (..., out).
    """
    return scale(2 * y.numel() * x.shape[-1], x.dtype)


@counts("mkldnn._convolution_pointwise", operands=(0, 1))
def convolution_pointwise(y: Tensor, x: Tensor, second: Tensor, third: Any, /, *rest: Any, **_: Any) -> int | Cost:
    """2·B·P·Cout·(Cin/g)·K.

    P counts output positions. With a second input to add, the weight is the third argument.
    """
    binary = isinstance(rest[0], Tensor) or rest[0] is None
    w = third if binary else second
    return scale(laid_out(y, w), x.dtype)


@counts("mkldnn._convolution_pointwise_", operands=(1, 2))
def convolution_pointwise_inplace(y: Tensor, other: Tensor, x: Tensor, w: Tensor, /, *_: Any, **__: Any) -> int | Cost:
    """2·B·P·Cout·(Cin/g)·K.

    P counts output positions; the result is added to the first argument.
    """
    return scale(laid_out(y, w), x.dtype)


@counts("mkldnn._convolution_transpose_pointwise", operands=(0, 1))
def convolution_transpose_pointwise(y: Tensor, x: Tensor, w: Tensor, /, *_: Any, **__: Any) -> int | Cost:
    """2·B·P·Cout·(Cin/g)·K.

    P counts input positions.
    """
    return scale(laid_out(x, w), x.dtype)


@counts("inductor._mm_plus_mm", operands=(0, 1, 2, 3))
def mm_plus_mm(y: Any, a: Tensor, b: Tensor, c: Tensor, d: Tensor, /, *_: Any, **__: Any) -> int | Cost:
    """2·m·n·(k₁ + k₂).

    Two products into one result: 4·m·n·k where they are equally deep.  a (m, k₁), b (k₁, n), c (m, k₂), d (k₂, n).
    """
    return scale(2 * a.numel() * b.shape[1] + 2 * c.numel() * d.shape[1], a.dtype)


@counts("flex_gemm", operands=(), ran=False)
def flex_gemm(
    y: Any, gemm: Any, body: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *_: Any, **__: Any
) -> int | Cost:
    """2·b·m·n·k.

    The cost of the product that it wraps; what is fused to its end is element-wise.
    """
    name = gemm._schema.name
    if name == "aten::_grouped_mm":
        return grouped_mm(None, *args, **(kwargs or {}))
    if name.startswith("aten::_scaled_mm"):
        a, b = args[:2]
        return int(2 * a.numel() * packed(a) * b.shape[-1])
    first = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}.get(name)
    if first is None:
        raise UnknownCostError(f"flex_gemm({name.replace('::', '.')})")
    return product(args[first], args[first + 1])


@counts("symm_mem.fused_all_gather_matmul", operands=(0, 1), ran=False)
def fused_all_gather_matmul(y: Any, a: Tensor, b: Sequence[Tensor], /, *_: Any, **__: Any) -> Cost:
    """Σ 2·m·n·k.

    m are the gathered rows, of all ranks, which the outputs have.  a (..., k) of this rank, b[i] (k, n).
    """
    return add_costs(scale(2 * out.numel() * a.shape[-1], a.dtype) for out in y[1])


@counts("symm_mem.fused_all_gather_scaled_matmul", operands=(0, 1), ran=False)
def fused_all_gather_scaled_matmul(y: Any, a: Tensor, b: Sequence[Tensor], /, *_: Any, **__: Any) -> int:
    """Σ 2·m·n·k.

    m are the gathered rows, of all ranks, which the outputs have.  a (..., k) of this rank, b[i] (k, n).
    """
    return sum(2 * out.numel() * a.shape[-1] for out in y[1])


@counts(
    "symm_mem.fused_matmul_reduce_scatter",
    "symm_mem.fused_scaled_matmul_reduce_scatter",
    operands=(0, 1),
    ran=False,
)
def fused_matmul_reduce_scatter(y: Any, a: Tensor, b: Tensor, /, *_: Any, **__: Any) -> int | Cost:
    """2·m·n·k.

    The product of this rank, before it is scattered.  a (..., k), b (k, n).
    """
    return scale(2 * a.numel() * b.shape[-1], a.dtype)


@counts("symm_mem._async_input_mm", operands=(0, 1), ran=False)
def async_input_mm(y: Any, a: Tensor, b: Tensor, /, *_: Any, **__: Any) -> int | Cost:
    """2·m·n·k.

    a (m, k), b (k, n).
    """
    return product(a, b)
