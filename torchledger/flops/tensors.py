"""Reading what a formula needs of a tensor: values (offsets), stored elements (sparse), components (nested)."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from torchledger.flops.costs import add_costs, scale
from torchledger.flops.rules import Cost, UnknownCostError
from torchledger.internals import is_functional_tensor

STRIDED = torch.strided
SPARSE: frozenset[torch.layout] = frozenset(
    (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def read_ints(t: Tensor | None) -> list[int] | None:
    """The values of a one-dimensional integer tensor, or None where they cannot be known.

    That is so for meta and fake tensors, and while a CUDA graph is captured. On CUDA reading waits for the device.
    """
    if t is None or t.is_meta or type(t) not in _PLAIN or is_functional_tensor(t):
        return None
    if t.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    return [int(value) for value in t.tolist()]


def stored_elements(t: Tensor) -> int:
    """How many elements a sparse tensor stores, repeated and explicit zeros included (in blocks: all of each block)."""
    return t._values().numel() if t.layout is torch.sparse_coo else t.values().numel()


def matching_pairs(a: Tensor, b: Tensor) -> int:
    """How many pairs of a stored a[i, k] and a stored b[k, j] there are: Σk nnz(a[:, k])·nnz(b[k, :]).  Both sparse."""
    columns = torch.bincount(a.to_sparse_coo()._indices()[1], minlength=a.shape[1])
    rows = torch.bincount(b.to_sparse_coo()._indices()[0], minlength=a.shape[1])
    return int((columns * rows).sum())


def components(t: Tensor) -> list[list[int]]:
    """The shape of each component of a nested tensor, strided or jagged.

    Raises:
        UnknownCostError: A jagged tensor's lengths cannot be read.
    """
    if t.layout is STRIDED:
        return [[int(n) for n in size] for size in t._nested_tensor_size().tolist()]
    jagged: Any = t
    lengths = read_ints(jagged._lengths)
    if lengths is None:
        offsets = read_ints(jagged._offsets)
        if offsets is None:
            raise UnknownCostError
        lengths = [end - begin for begin, end in itertools.pairwise(offsets)]
    ragged = jagged._ragged_idx - 1
    shape = list(jagged._values.shape)
    return [[*shape[:ragged], n, *shape[ragged + 1 :]] for n in lengths]


def elements(t: Tensor) -> int:
    """The number of elements of a tensor, nested ones included."""
    jagged: Any = t
    return int(jagged._values.numel()) if t.layout is torch.jagged else t.numel()


def product(a: Tensor, b: Tensor) -> int | Cost:
    """The cost of a @ b for any layout and type.  a (..., m, k), b (..., k, n) or (k).

    Dense: 2·m·n·k. One sparse: each of its nnz elements meets a row of b or a column of a: 2·nnz·n or 2·nnz·m.
    Both sparse: 2·Σk nnz(a[:, k])·nnz(b[k, :]). Nested: the sum over the components.
    """
    n = b.shape[-1] if b.dim() > 1 and not b.is_nested else 1
    if a.is_nested or b.is_nested:
        return nested_product(a, b, n)
    sparse_a, sparse_b = a.layout in SPARSE, b.layout in SPARSE
    if not sparse_a and not sparse_b:
        return scale(2 * a.numel() * n, a.dtype)
    if a.is_meta or b.is_meta:
        return Cost(2 * a.numel() * n, quality="upper_bound")
    if sparse_a and sparse_b:
        return scale(2 * matching_pairs(a, b), a.dtype)
    if sparse_a:
        return scale(2 * stored_elements(a) * n, a.dtype)
    return scale(2 * stored_elements(b) * a.shape[-2], a.dtype)


def nested_product(a: Tensor, b: Tensor, n: int) -> int | Cost:
    """Σ 2·m·n·k over the components, where a, b or both are nested and the other has the same batch or none."""
    if not b.is_nested:
        return scale(2 * elements(a) * n, a.dtype)
    if not a.is_nested:
        return scale(2 * a.shape[-2] * elements(b), a.dtype)
    pairs = zip(components(a), components(b), strict=True)
    return add_costs(scale(2 * _numel(x) * y[-1], a.dtype) for x, y in pairs)


def _numel(shape: list[int]) -> int:
    return int(torch.Size(shape).numel())
