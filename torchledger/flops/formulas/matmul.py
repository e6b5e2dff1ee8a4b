"""Matrix products and linear layers. m, n, k: result rows, result columns, summed dimension; b: batch; N: tokens."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor

from torchledger.flops.costs import REAL, add_costs, masked_parts, scale
from torchledger.flops.rules import Cost, counts
from torchledger.flops.tensors import STRIDED, elements, product


@counts("aten.mm", operands=(0, 1))
def mm(result: Tensor, a: Tensor, b: Tensor, /, out_dtype: Any = None, *, out: Any = None) -> int | Cost:
    """2·m·n·k.

    Each of the m·n results is a sum of k products.  a (m, k), b (k, n). Where a or b is sparse, as in `_sparse_addmm`.
    """
    if a.dtype in REAL and a.layout is STRIDED and b.layout is STRIDED:
        return 2 * result.numel() * a.shape[1]
    return product(a, b)


@counts("aten.addmm", "aten.addmm_", "aten._addmm_activation", operands=(1, 2))
def addmm(result: Tensor, bias: Tensor, a: Tensor, b: Tensor, /, out_dtype: Any = None, **_: Any) -> int | Cost:
    """2·m·n·k.

    As mm; adding the bias, scaling and the activation are element-wise.  a (m, k), b (k, n).
    """
    if a.dtype in REAL and a.layout is STRIDED and b.layout is STRIDED:
        return 2 * result.numel() * a.shape[1]
    return product(a, b)


@counts("aten.bmm", operands=(0, 1))
def bmm(result: Tensor, a: Tensor, b: Tensor, /, out_dtype: Any = None, *, out: Any = None) -> int | Cost:
    """2·b·m·n·k.

    A product of matrices for each of b.  a (b, m, k), b (b, k, n).
    """
    if a.dtype in REAL and a.layout is STRIDED and not a.is_nested:
        return 2 * result.numel() * a.shape[2]
    return product(a, b)


@counts("aten.baddbmm", "aten.baddbmm_", operands=(1, 2))
def baddbmm(result: Tensor, bias: Tensor, a: Tensor, b: Tensor, /, out_dtype: Any = None, **_: Any) -> int | Cost:
    """2·b·m·n·k.

    As bmm; adding the bias and scaling are element-wise.  a (b, m, k), b (b, k, n).
    """
    if a.dtype in REAL and a.layout is STRIDED and not a.is_nested:
        return 2 * result.numel() * a.shape[2]
    return product(a, b)


@counts("aten.addbmm", "aten.addbmm_", operands=(1, 2))
def addbmm(result: Tensor, bias: Tensor, a: Tensor, b: Tensor, /, **_: Any) -> int | Cost:
    """2·b·m·n·k.

    As bmm; summing the b results is element-wise, or part of the sums.  a (b, m, k), b (b, k, n).
    """
    return product(a, b)


@counts("aten.mv", operands=(0, 1))
def mv(result: Tensor, a: Tensor, x: Tensor, /, **_: Any) -> int | Cost:
    """2·m·n.

    Each of m results is a sum of n products.  a (m, n), x (n).
    """
    return product(a, x)


@counts("aten.addmv", "aten.addmv_", operands=(1, 2))
def addmv(result: Tensor, bias: Tensor, a: Tensor, x: Tensor, /, **_: Any) -> int | Cost:
    """2·m·n.

    As mv; adding the bias is element-wise.  a (m, n), x (n).
    """
    return product(a, x)


@counts("aten.dot", "aten.vdot", operands=(0, 1))
def dot(result: Tensor, x: Tensor, y: Tensor, /, **_: Any) -> int | Cost:
    """2·n.

    A sum of n products.  x (n), y (n).
    """
    return scale(2 * x.numel(), x.dtype)


@counts("aten.addr", "aten.addr_", operands=(1, 2))
def addr(result: Tensor, bias: Tensor, x: Tensor, y: Tensor, /, **_: Any) -> int | Cost:
    """2·m·n.

    One multiply-add for each element of the outer product.  x (m), y (n). Without a sum (outer, ger, kron) it
    is an element-wise product, which is not counted.
    """
    return scale(2 * x.numel() * y.numel(), x.dtype)


@counts("aten._foreach_mm", operands=(0, 1))
def foreach_mm(result: Any, a: Sequence[Tensor], b: Sequence[Tensor], /, **_: Any) -> int | Cost:
    """Σ 2·m·n·k.

    One mm for each pair of the lists.  a[i] (m, k), b[i] (k, n).
    """
    return add_costs(product(x, y) for x, y in zip(a, b, strict=True))


@counts("aten.matmul", operands=(0, 1))
def matmul(result: Tensor, a: Tensor, b: Tensor, /, **_: Any) -> int | Cost:
    """2·b·m·n·k.

    The batch b is that of the result, broadcast. Seen whole for nested tensors, and in inference mode.
    a (..., m, k) or (k), b (..., k, n) or (k).
    """
    if a.is_nested or b.is_nested:
        return product(a, b)
    return scale(2 * result.numel() * a.shape[-1], a.dtype)


@counts("aten.matmul_backward", operands=(0, 1, 2), ran=False)
def matmul_backward(grads: Any, gy: Tensor, a: Tensor, b: Tensor, mask: Sequence[bool], /, **_: Any) -> Cost:
    """2·b·m·n·k for each gradient asked for.

    ga = gy @ bᵀ and gb = aᵀ @ gy pair the same numbers as a @ b. Nested tensors only.  Shapes as matmul.
    """
    return add_costs([product(a, b)] * sum(map(bool, mask)))


@counts("aten.linear", "aten.mkldnn_linear", operands=(0, 1))
def linear(result: Tensor, x: Tensor, w: Tensor, bias: Tensor | None = None, /, **_: Any) -> int | Cost:
    """2·N·in·out.

    Each of N tokens costs a product with the weight. Seen whole in inference mode, for nested tensors and
    other subclasses.  x (..., in), w (out, in) or (in), nested x: N summed over the components.
    """
    return scale(2 * elements(x) * (w.numel() // w.shape[-1]), x.dtype)


@counts("aten.linear_backward", operands=(0, 2))
@counts("aten.mkldnn_linear_backward", operands=(0, 2), ran=False)
def linear_backward(grads: Any, x: Tensor, gy: Tensor, w: Tensor, mask: Sequence[bool], /, **_: Any) -> Cost:
    """2·N·in·out for each of the input's and the weight's gradient that is asked for.

    gx = gy @ w and gw = gyᵀ @ x pair the same numbers as the forward product.  x (..., in), gy (..., out), w (out, in).
    """
    return masked_parts(scale(2 * elements(gy) * w.shape[-1], x.dtype), w, mask[0], mask[1])


@counts("aten.mkldnn_linear_backward_input", operands=(1, 2), ran=False)
def linear_backward_input(gx: Tensor, shape: Sequence[int], gy: Tensor, w: Tensor, /, **_: Any) -> Cost:
    """2·N·in·out.

    gx = gy @ w.  gy (N, out), w (out, in).
    """
    return masked_parts(scale(2 * gy.numel() * w.shape[-1], gy.dtype), w, True, False)


@counts("aten.mkldnn_linear_backward_weights", operands=(0, 1), ran=False)
def linear_backward_weights(gw: Any, gy: Tensor, x: Tensor, w: Tensor, bias_defined: bool, /, **_: Any) -> Cost:
    """2·N·in·out.

    gw = gyᵀ @ x.  gy (N, out), x (N, in), w (out, in).
    """
    return masked_parts(scale(2 * gy.numel() * w.shape[-1], gy.dtype), w, False, True)


@counts("aten._trilinear", operands=(0, 1, 2))
def trilinear(
    result: Tensor,
    i1: Tensor,
    i2: Tensor,
    i3: Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
    /,
    **_: Any,
) -> int | Cost:
    """2·N·O·I1·I2 + 2·N·O·I2 for a bilinear layer.

    The op puts three tensors into common dimensions (``expandX``: those that tensor X lacks). It multiplies i1 by i2,
    summing the dimensions of ``sumdim`` that i3 lacks, and what is left by i3, summing the others; slice by slice along
    ``unroll_dim``, whose own sum is element-wise. A dimension that only one factor has is summed before, and a product
    that sums nothing is element-wise.
    A bilinear layer has i1 (N, I1), i2 (O, I1, I2), i3 (N, I2): (N, I1)·(O, I1, I2) over I1, then that by i3 over I2.
    """
    sizes = [1] * (i1.dim() + len(expand1))
    have = [set(range(len(sizes))) - set(expand) for expand in (expand1, expand2, expand3)]
    for t, dims in zip((i1, i2, i3), have, strict=True):
        for d, size in zip(sorted(dims), t.shape, strict=True):
            sizes[d] = max(sizes[d], size)
    slices, sizes[unroll_dim] = sizes[unroll_dim], 1
    first_sums = set(sumdim) & set(expand3) - {unroll_dim}
    second_sums = set(sumdim) - set(expand3) - {unroll_dim}
    first = _paired(sizes, have[0], have[1], first_sums)
    second = _paired(sizes, (have[0] | have[1]) - first_sums, have[2], second_sums)
    cost = scale(2 * slices * (first + second), i1.dtype)
    apart = scale(2 * slices * second, i1.dtype)
    return Cost(cost, apart=apart) if isinstance(cost, int) and isinstance(apart, int) and apart else cost


def _paired(sizes: list[int], left: set[int], right: set[int], summed: set[int]) -> int:
    """Multiply-adds of left · right with ``summed`` dimensions summed, 0 where nothing is."""
    return prod(sizes[d] for d in (left | right) - (summed - (left & right))) if summed else 0


@counts("aten.affine_grid_generator", operands=(0,))
def affine_grid_generator(grid: Tensor, theta: Tensor, /, *_: Any, **__: Any) -> int | Cost:
    """2·N·P·(d+1)·d.

    A batched product of P base points (d+1) with an affine map of d dimensions.  theta (N, d, d+1), grid (N, *P, d).
    """
    return scale(2 * grid.numel() * theta.shape[-1], theta.dtype)


@counts("aten.cudnn_affine_grid_generator", operands=(0,), ran=False)
def cudnn_affine_grid_generator(grid: Tensor, theta: Tensor, /, *_: Any, **__: Any) -> int | Cost:
    """2·N·P·(d+1)·d.

    As affine_grid_generator.
    """
    return affine_grid_generator(grid, theta)


@counts("aten.cudnn_affine_grid_generator_backward", ran=False)
def cudnn_affine_grid_generator_backward(gtheta: Tensor, ggrid: Tensor, /, *_: Any, **__: Any) -> int | Cost:
    """2·N·P·(d+1)·d.

    gtheta = ggridᵀ @ points.  ggrid (N, *P, d), gtheta (N, d, d+1).
    """
    return affine_grid_generator(ggrid, gtheta)


@counts("aten._compute_linear_combination", operands=(0, 1))
def linear_combination(result: Tensor, x: Tensor, coefficients: Tensor, /, **_: Any) -> int | Cost:
    """2·m·n·S.

    m sums over n tensors of S elements.  coefficients (m, n), x (n, *S).
    """
    return scale(2 * coefficients.shape[0] * x.numel(), x.dtype)


@counts("aten._euclidean_dist", operands=(0, 1))
def euclidean_dist(result: Tensor, x: Tensor, y: Tensor, /, **_: Any) -> int | Cost:
    """2·P·R·(M+2).

    |x − y|² = [−2x, |x|², 1] · [y, 1, |y|²]: one product of operands that are two columns wider.  x (..., P, M),
    y (..., R, M). It is how cdist runs for p = 2 and more than 25 rows.
    """
    return scale(2 * result.numel() * (x.shape[-1] + 2), x.dtype)


@counts("aten._cdist_forward", operands=(0, 1))
def cdist_forward(result: Tensor, x: Tensor, y: Tensor, p: float, mode: int | None = None, /, **_: Any) -> int | Cost:
    """2·P·R·(M+2) where it goes through a product, else 0.

    As _euclidean_dist for p = 2 and mode 1 (always), or mode 0 or none with more than 25 rows; other distances are
    taken pair by pair, element-wise.  x (..., P, M), y (..., R, M).
    """
    many = x.shape[-2] > 25 or y.shape[-2] > 25
    through_product = p == 2 and (mode == 1 or (not mode and many))
    return euclidean_dist(result, x, y) if through_product else 0
