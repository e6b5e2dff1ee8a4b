"""Sparse products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flops.counting import Row, meta

aten = torch.ops.aten
BOTH = [True, True]


def seven() -> Tensor:
    """A (3, 4) matrix with 7 elements: 3, 0, 2 and 2 in its columns, 2, 3 and 2 in its rows."""
    return torch.tensor([[1.0, 0, 1, 0], [1, 0, 1, 1], [1, 0, 0, 1]])


def t(*shape: int) -> Tensor:
    return torch.ones(*shape)


def coo() -> Tensor:
    return seven().to_sparse()


def csr() -> Tensor:
    return seven().to_sparse_csr()


def backward() -> Any:
    b = t(4, 5).requires_grad_()
    torch.sparse.mm(csr().requires_grad_(), b, "sum").sum().backward()


ROWS = [
    # 7 elements meet 5 columns each: 2·7·5
    Row("aten._sparse_addmm", 70, lambda: torch.sparse.addmm(t(3, 5), coo(), t(4, 5))),
    Row("aten._sparse_addmm", 70, lambda: torch.sparse.mm(coo(), t(4, 5))),
    Row("aten.addmm", 70, lambda: torch.addmm(t(3, 5), coo(), t(4, 5))),
    Row("aten.mm", 70, lambda: csr() @ t(4, 5)),
    Row("aten.mm", 70, lambda: coo() @ t(4, 5)),
    Row("aten.mm", 70, lambda: t(5, 3) @ csr()),
    Row("aten.mv", 14, lambda: csr() @ t(4)),
    # two blocks of 2·2 stored for (4, 4): 2·8·5
    Row("aten.mm", 80, lambda: torch.eye(4).to_sparse_bsr((2, 2)) @ t(4, 5)),
    # 2 matrices of 7
    Row("aten.bmm", 140, lambda: torch.bmm(torch.stack([coo(), coo()]), t(2, 4, 5))),
    Row("aten.sspaddmm", 70, lambda: torch.smm(coo(), t(4, 5))),
    Row("aten.sspaddmm", 70, lambda: torch.sspaddmm(t(3, 5).to_sparse(), coo(), t(4, 5))),
    Row("aten.hspmm", 70, lambda: torch.hspmm(coo(), t(4, 5))),
    # column k of one meets row k of its transpose: 2·(9 + 0 + 4 + 4)
    Row("aten._sparse_sparse_matmul", 34, lambda: torch.sparse.mm(coo(), seven().t().to_sparse())),
    Row("aten.mm", 34, lambda: csr() @ seven().t().to_sparse_csr()),
    Row("aten._sparse_addmm", 280, lambda: torch.sparse.mm(coo().to(torch.complex64), t(4, 5).to(torch.complex64))),
    # sums of 6 products for 7 elements
    Row("aten.sparse_sampled_addmm", 84, lambda: torch.sparse.sampled_addmm(csr(), t(3, 6), t(6, 4))),
    Row("aten._sparse_mm_reduce_impl", 70, lambda: torch.sparse.mm(csr(), t(4, 5), "mean")),
    Row("aten._sparse_mm_reduce_impl_backward", 140, backward),
    # unknown elements: the dense product bounds it, 2·3·4·5
    Row(
        "aten._sparse_addmm",
        120,
        lambda: (None, meta(3, 5), torch.empty(3, 4, layout=torch.sparse_coo, device="meta"), meta(4, 5)),
        quality="upper_bound",
        run=False,
    ),
    # (8, 32) @ (32, 16) with two of four kept: 8·16·32
    Row("aten._sparse_semi_structured_linear", 4096, lambda: (None, meta(8, 32), meta(16, 16), None), run=False),
    Row("aten._sparse_semi_structured_mm", 4096, lambda: (None, meta(8, 16), None, meta(32, 16)), run=False),
    Row("aten._sparse_semi_structured_addmm", 4096, lambda: (None, None, meta(8, 16), None, meta(32, 16)), run=False),
    *(
        Row(f"semi_structured.{name}", 4096, call, run=False)
        for name, call in (
            ("cutlass_mm", lambda: (None, meta(32, 8), meta(16, 16), meta(16, 2), None, 16, 8, 8, False)),
            ("cusparselt_mm", lambda: (None, meta(32, 8), meta(144), None, 16, 8, 8, False, 0)),
        )
    ),
    Row("aten._cslt_sparse_mm", 4096, lambda: (meta(16, 8), meta(144), meta(32, 16)), run=False),
    Row(
        "aten._cslt_sparse_mm",
        4096,
        lambda: (meta(8, 16), meta(144, dtype=torch.int8), meta(32, 16, dtype=torch.int8)),
        quality="integer",
        run=False,
    ),
]
