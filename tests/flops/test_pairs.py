"""Pairs under masks, against drawing the mask."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from torchledger.flops.formulas.flex import flex_pairs
from torchledger.flops.pairs import causal_pairs, visible_pairs

pytest.importorskip("torch.nn.attention.flex_attention")
from torch.nn.attention.flex_attention import create_block_mask


def drawn(sq: int, sk: int, left: int | None, right: int | None, shift: int) -> int:
    return sum(
        (left is None or j >= i + shift - left) and (right is None or j <= i + shift + right)
        for i, j in product(range(sq), range(sk))
    )


@pytest.mark.parametrize("left", [None, 0, 1, 3, 20])
@pytest.mark.parametrize("right", [None, 0, 2, 20])
@pytest.mark.parametrize(("sq", "sk"), [(1, 1), (5, 5), (3, 8), (8, 3), (0, 4), (4, 0), (1, 9)])
def test_bands(sq: int, sk: int, left: int | None, right: int | None) -> None:
    for shift in (sk - sq, 0, 2, -2):
        assert visible_pairs(sq, sk, left, right, shift) == drawn(sq, sk, left, right, shift)


def test_causal_is_aligned_to_the_upper_left_as_the_documentation_draws_it() -> None:
    for sq, sk in [(4, 4), (4, 6), (6, 4)]:
        assert causal_pairs(sq, sk) == int(torch.ones(sq, sk).tril().sum())


def test_a_window_and_a_causal_mask() -> None:
    assert visible_pairs(64, 64, left=15, right=0) == 904
    assert causal_pairs(64, 64) == 2080
    assert visible_pairs(64, 64) == 4096


LENGTHS = [(256, 256), (300, 300), (200, 330)]


@pytest.mark.parametrize(("sq", "sk"), LENGTHS)
@pytest.mark.parametrize("batch", [1, 3])
def test_block_masks(sq: int, sk: int, batch: int) -> None:
    def window(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (i >= j) & (i - j < 70)

    mask = create_block_mask(window, None, None, sq, sk, device="cpu", BLOCK_SIZE=64)
    pairs = flex_pairs(sq, sk, batch, 2, mask.as_tuple(), ())
    i, j = torch.arange(sq)[:, None], torch.arange(sk)[None, :]
    seen = (i >= j) & (i - j < 70)
    blocks = [
        min(64, sq - row) * min(64, sk - column)
        for row, column in product(range(0, sq, 64), range(0, sk, 64))
        if seen[row : row + 64, column : column + 64].any()
    ]
    assert pairs == (2 * batch * sq * sk, 2 * batch * sum(blocks), 2 * batch * int(seen.sum()))


def test_a_block_mask_that_differs_by_batch_and_head() -> None:
    def ragged(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return j < 32 * (1 + b + 2 * h)

    mask = create_block_mask(ragged, 2, 2, 128, 128, device="cpu", BLOCK_SIZE=64)
    pairs = flex_pairs(128, 128, 2, 2, mask.as_tuple(), ())
    assert pairs.real == 128 * (32 + 64 + 96 + 128)
    assert pairs.blocks == 128 * (64 + 64 + 128 + 128)


def test_a_causal_block_mask_in_numbers() -> None:
    mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 256, 256, device="cpu")
    pairs = flex_pairs(256, 256, 1, 2, mask.as_tuple(), ())
    assert [2 * 32 * n for n in pairs] == [8_388_608, 6_291_456, 4_210_688]
