"""Sparse products. nnz: stored elements; m, n, k as in matmul. Only what is stored is multiplied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchledger.flops.costs import masked_parts, scale
from torchledger.flops.rules import Cost, counts
from torchledger.flops.tensors import product, stored_elements


@counts("aten._sparse_addmm", operands=(1, 2))
def sparse_addmm(result: Tensor, bias: Tensor, a: Tensor, b: Tensor, /, **_: Any) -> int | Cost:
    """2·nnz·n.

    Each stored a[i, k] meets the n elements of b[k, :].  a (m, k) sparse, b (k, n). mm and addmm do the same where
    an operand is sparse; where b is, 2·m·nnz.
    """
    return product(a, b)


@counts("aten.hspmm", operands=(0, 1))
def hspmm(result: Tensor, a: Tensor, b: Tensor, /, *_: Any, **__: Any) -> int | Cost:
    """2·nnz·n.

    Each stored a[i, k] meets the n elements of b[k, :].  a (m, k) sparse, b (k, n).
    """
    return product(a, b)


@counts("aten.sspaddmm", operands=(1, 2))
def sspaddmm(result: Tensor, bias: Tensor, a: Tensor, b: Tensor, /, **_: Any) -> int | Cost:
    """2·nnz·n.

    Each stored a[i, k] meets the n elements of b[k, :].  a (m, k) sparse, b (k, n).
    """
    return product(a, b)


@counts("aten._sparse_sparse_matmul", operands=(0, 1))
def sparse_sparse_matmul(result: Tensor, a: Tensor, b: Tensor, /, **_: Any) -> int | Cost:
    """2·Σk nnz(a[:, k])·nnz(b[k, :]).

    Each stored a[i, k] meets each stored b[k, j].  a (m, k), b (k, n), both sparse.
    """
    return product(a, b)


@counts("aten.sparse_sampled_addmm", operands=(1, 2))
def sparse_sampled_addmm(result: Tensor, mask: Tensor, a: Tensor, b: Tensor, /, **_: Any) -> int | Cost:
    """2·nnz·k.

    A sum of k products for each stored element of the mask.  mask (m, n) sparse, a (m, k), b (k, n).
    """
    return scale(2 * stored_elements(mask) * a.shape[-1], a.dtype)


@counts("aten._sparse_mm_reduce_impl", operands=(0, 1))
def sparse_mm_reduce(result: Any, a: Tensor, b: Tensor, /, *_: Any, **__: Any) -> int | Cost:
    """2·nnz·n.

    Each stored a[i, k] meets the n elements of b[k, :], and a sum, mean or extremum gathers them.
    """
    return product(a, b)


@counts("aten._sparse_mm_reduce_impl_backward", operands=(0, 2))
def sparse_mm_reduce_backward(
    grads: Any, a: Tensor, gy: Tensor, b: Tensor, reduce: str, arg: Any, mask: Sequence[bool], /, **_: Any
) -> Cost:
    """2·nnz·n for each of a's and b's gradient that is asked for.

    ga[i, k] = gy[i, :]·b[k, :] for the stored elements, gb = aᵀ @ gy.  a (m, k) sparse, gy (m, n), b (k, n).
    """
    return masked_parts(product(a, b), None, mask[0], mask[1])


def half_product(m: int, n: int, k: int, like: Tensor) -> Cost:
    """m·n·k executed for a dense 2·m·n·k: of each four elements along k, two are zero and skipped."""
    return Cost(m * n * k, quality="exact" if like.is_floating_point() else "integer", dense=2 * m * n * k)


@counts("aten._sparse_semi_structured_linear", operands=(0, 1), ran=False)
def semi_structured_linear(y: Tensor, x: Tensor, w: Tensor, meta: Tensor, /, **_: Any) -> Cost:
    """m·n·k executed, 2·m·n·k dense-equivalent.

    x (..., k), w (n, k/2) the kept half of a (n, k) weight.
    """
    return half_product(x.numel() // x.shape[-1], w.shape[0], x.shape[-1], x)


@counts("aten._sparse_semi_structured_mm", operands=(0, 2), ran=False)
def semi_structured_mm(y: Tensor, a: Tensor, meta: Tensor, b: Tensor, /, **_: Any) -> Cost:
    """m·n·k executed, 2·m·n·k dense-equivalent.

    a (m, k/2) the kept half of a (m, k) matrix, b (k, n).
    """
    return half_product(a.shape[0], b.shape[1], b.shape[0], a)


@counts("aten._sparse_semi_structured_addmm", operands=(1, 3), ran=False)
def semi_structured_addmm(y: Tensor, bias: Tensor, a: Tensor, meta: Tensor, b: Tensor, /, **_: Any) -> Cost:
    """m·n·k executed, 2·m·n·k dense-equivalent.

    a (m, k/2) the kept half of a (m, k) matrix, b (k, n).
    """
    return half_product(a.shape[0], b.shape[1], b.shape[0], a)


@counts("aten._cslt_sparse_mm", operands=(0, 1), ran=False)
def cslt_sparse_mm(y: Tensor, a: Tensor, b: Tensor, /, *_: Any, **__: Any) -> Cost:
    """m·n·k executed, 2·m·n·k dense-equivalent.

    a holds a (m, k) matrix, compressed; b (k, n); m comes from the result (m, n) or (n, m).
    """
    k, n = b.shape
    return half_product(y.numel() // n if n else 0, n, k, b)


@counts("semi_structured.cutlass_mm", "semi_structured.cusparselt_mm", operands=(0, 1), ran=False)
def semi_structured_custom_mm(y: Tensor, x: Tensor, w: Tensor, *args: Any, **_: Any) -> Cost:
    """m·n·k executed, 2·m·n·k dense-equivalent.

    x (k, n) or (n, k), w the kept half of a (m, k) weight, packed; m is an argument.
    """
    m = next(value for value in args if type(value) is int)
    return half_product(m, x.numel(), 1, x)
