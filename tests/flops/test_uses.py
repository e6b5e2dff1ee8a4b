"""Multiply-adds of a weight from the shapes of operands, by hand and against a count of them one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchledger.flops.uses import USES, count_uses

NO_FORMULA = -1_000_000
"""What half the FLOPs would be, were they asked for."""


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(shape).to(dtype)


def convolution(x: torch.Tensor, w: torch.Tensor, *, transposed: bool = False, groups: int = 1, stride: int = 1) -> Any:
    n = x.dim() - 2
    return (x, w, None, [stride] * n, [0] * n, [1] * n, transposed, [0] * n, groups)


ROWS: list[tuple[str, tuple[Any, ...], int, int]] = [
    # op, arguments, position of the weight, multiply-adds: elements of the weight times the rows that each meets
    ("mm", (rand(5, 4), rand(4, 3)), 1, 12 * 5),
    ("mm", (rand(5, 4), rand(4, 3)), 0, 20 * 3),
    ("addmm", (rand(3), rand(5, 4), rand(4, 3)), 2, 12 * 5),
    ("addmm", (rand(3), rand(5, 4), rand(4, 3)), 1, 20 * 3),
    ("bmm", (rand(2, 5, 4), rand(2, 4, 3)), 1, 24 * 5),
    ("bmm", (rand(2, 5, 4), rand(2, 4, 3)), 0, 40 * 3),
    ("baddbmm", (rand(2, 5, 3), rand(2, 5, 4), rand(2, 4, 3)), 2, 24 * 5),
    ("mv", (rand(5, 4), rand(4)), 0, 20),
    ("mv", (rand(5, 4), rand(4)), 1, 20),
    ("addmv", (rand(5), rand(5, 4), rand(4)), 2, 20),
    ("linear", (rand(2, 5, 4), rand(3, 4)), 1, 12 * 10),
    ("convolution", convolution(rand(2, 3, 6, 6), rand(8, 3, 3, 3)), 1, 216 * 2 * 16),
    ("convolution", convolution(rand(2, 4, 6, 6), rand(8, 2, 3, 3), groups=2), 1, 144 * 2 * 16),
    ("convolution", convolution(rand(2, 4, 6, 6), rand(4, 1, 3, 3), groups=4, stride=2), 1, 36 * 2 * 4),
    ("convolution", convolution(rand(2, 4, 5, 5), rand(4, 6, 2, 2), transposed=True), 1, 96 * 2 * 25),
    ("convolution", convolution(rand(2, 4, 9), rand(8, 4, 3)), 1, 96 * 2 * 7),
    ("mm", (rand(5, 4, dtype=torch.complex64), rand(4, 3, dtype=torch.complex64)), 1, 4 * 12 * 5),
    ("_trilinear", (rand(5, 4), rand(2, 4, 3), rand(5, 3), [1, 3], [0], [1, 2], [2, 3]), 1, 24 * 5),
    ("mm", (rand(0, 4), rand(4, 3)), 1, 0),
    ("mm", (rand(5, 0), rand(0, 3)), 1, 0),
    ("mv", (rand(0, 4), rand(4)), 1, 0),
]


@pytest.mark.parametrize(("op", "args", "position", "uses"), ROWS, ids=[f"{r[0]}_{i}" for i, r in enumerate(ROWS)])
def test_uses(op: str, args: tuple[Any, ...], position: int, uses: int) -> None:
    out = getattr(torch.ops.aten, op)(*args)
    assert count_uses(f"aten.{op}", args, out, position, NO_FORMULA) == uses


SAME = {"addmm_": "addmm", "baddbmm_": "baddbmm", "addmv_": "addmv", "_addmm_activation": "addmm"}


@pytest.mark.parametrize("op", SAME)
def test_ops_of_the_same_kind(op: str) -> None:
    args, position, uses = next(row[1:] for row in ROWS if row[0] == SAME[op])
    assert count_uses(f"aten.{op}", args, args[0], position, NO_FORMULA) == uses


def test_every_op_has_a_row() -> None:
    assert {f"aten.{op}" for op in (*SAME, *(row[0] for row in ROWS))} == set(USES)


def multiplications(call: Callable[..., torch.Tensor], weight: torch.Tensor, *others: torch.Tensor) -> int:
    """How many products of an element of the weight a linear function sums: with all factors 1, their sum."""
    return int(call(*(torch.ones_like(other) for other in others), torch.ones_like(weight)).sum())


@pytest.mark.parametrize("row", [row for row in ROWS if row[0] in ("mm", "bmm", "convolution") and row[2] == 1])
def test_one_by_one(row: tuple[str, tuple[Any, ...], int, int]) -> None:
    op, args, _, uses = row
    if args[1].is_complex():
        return
    assert multiplications(lambda x, w: getattr(torch.ops.aten, op)(x, w, *args[2:]), args[1], args[0]) == uses


def test_half_the_flops_where_shapes_do_not_tell() -> None:
    x, w = rand(5, 4), rand(4, 3)
    assert count_uses("mylib.project", (x, w), x @ w, 1, 246) == 123
    scalar = torch.tensor(2.0)
    assert count_uses("aten.mm", (x, scalar), x, 1, 10) == 5
    packed = torch.nested.nested_tensor([rand(2, 4), rand(3, 4)], layout=torch.jagged)
    assert count_uses("aten.linear", (packed, rand(3, 4)), packed, 1, 120) == 60
