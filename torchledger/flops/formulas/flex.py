"""Flex attention, a higher-order op. B: batch; H: query heads; D, Dv: key and value widths; Sq, Sk: lengths.

``flops`` is the full square. ``causal_excess`` goes by the block mask: the pairs of its full blocks, and those of its
partial blocks for which the mask function, called on their indices, says so. Where that would be more than
`MAX_MASK_CALLS` indices, or they cannot be read, whole blocks stand for the pairs, and the excess is a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchledger.flops.formulas.attention import CostOfPairs, backward_cost, forward_cost
from torchledger.flops.pairs import Pairs
from torchledger.flops.rules import Cost, counts
from torchledger.flops.tensors import read_ints

MAX_MASK_CALLS = 1 << 22
"""The largest number of pairs for which a mask function is called."""
NO_MASK_BLOCK = 1 << 30
"""The block size that stands for "no block mask"."""


class FlexPairs(NamedTuple):
    """Pairs of all (batch, head) squares: all, those in blocks that are computed, and those the mask leaves."""

    full: int
    blocks: int
    real: int


class BlockList(NamedTuple):
    """For each (batch, head, block row) the columns of its blocks.  counts (b, h, rows), columns (b, h, rows, all)."""

    counts: Tensor
    columns: Tensor

    def cells(self) -> Tensor | None:
        """The blocks as rows (batch, head, row, column) of a tensor, or None where they cannot be read."""
        if read_ints(self.counts.flatten()) is None:
            return None
        used = torch.arange(self.columns.shape[-1], device=self.counts.device) < self.counts[..., None]
        where = used.nonzero()
        return torch.cat([where[:, :3], self.columns[used][:, None].long()], dim=1)


def flex_pairs(
    sq: int, sk: int, batch: int, heads: int, block_mask: Sequence[Any], buffers: Sequence[Any]
) -> FlexPairs:
    """The pairs of a block mask as the op receives it, over ``batch``·``heads`` squares of Sq·Sk.

    Args:
        sq: Number of queries.
        sk: Number of keys.
        batch: Batch size.
        heads: Query heads.
        block_mask: (Sq, Sk, partial counts, partial columns, full counts, full columns, ..., block of queries, block of
            keys, mask function). Its batch and head dimensions are 1 where the mask is the same for all.
        buffers: Further arguments of the mask function.
    """
    full = batch * heads * sq * sk
    block_q, block_k, mask = block_mask[-3:]
    if block_q >= NO_MASK_BLOCK and block_k >= NO_MASK_BLOCK:
        return FlexPairs(full, full, full)
    partial = BlockList(*block_mask[2:4])
    repeats = batch * heads // max(1, prod(partial.counts.shape[:2]))
    cells = partial.cells()
    whole = BlockList(*block_mask[4:6]).cells() if block_mask[4] is not None else None
    if cells is None:
        return FlexPairs(full, full, full)
    in_whole = 0 if whole is None else _pairs_in(whole, sq, sk, block_q, block_k)
    in_partial = _pairs_in(cells, sq, sk, block_q, block_k)
    real = in_partial
    if cells.shape[0] * block_q * block_k <= MAX_MASK_CALLS:
        real = _masked_pairs(cells, sq, sk, (block_q, block_k), mask, buffers)
    return FlexPairs(full, repeats * (in_whole + in_partial), repeats * (in_whole + real))


def _pairs_in(cells: Tensor, sq: int, sk: int, block_q: int, block_k: int) -> int:
    """The pairs of whole blocks, cut off at the end of the square."""
    rows = (sq - cells[:, 2] * block_q).clamp(0, block_q)
    columns = (sk - cells[:, 3] * block_k).clamp(0, block_k)
    return int((rows * columns).sum())


def _masked_pairs(cells: Tensor, sq: int, sk: int, block: tuple[int, int], mask: Any, buffers: Sequence[Any]) -> int:
    """The pairs of partial blocks for which the mask function is true."""
    count, device = cells.shape[0], cells.device
    q = cells[:, 2, None, None] * block[0] + torch.arange(block[0], device=device)[None, :, None]
    k = cells[:, 3, None, None] * block[1] + torch.arange(block[1], device=device)[None, None, :]
    shape = (count, *block)
    inside = ((q < sq) & (k < sk)).expand(shape)
    b, h = (cells[:, i, None, None].expand(shape)[inside] for i in (0, 1))
    call = getattr(mask, "forward", mask)
    indices = (0, 0, 0, 0) + (None,) * len(buffers)
    with torch.no_grad():
        verdict = torch.vmap(call, in_dims=indices)(b, h, q.expand(shape)[inside], k.expand(shape)[inside], *buffers)
    return int(verdict.sum())


def flex_cost(cost: CostOfPairs, q: Tensor, k: Tensor, v: Tensor, block_mask: Any, buffers: Sequence[Any]) -> Cost:
    """``cost`` over q (B, H, Sq, D), k (B or 1, Hk, Sk, D), v (B or 1, Hk, Sk, Dv)."""
    b, h, sq, d = q.shape
    sk, dv = v.shape[2:]
    pairs = flex_pairs(sq, sk, b, h, block_mask, buffers)
    return cost(1, Pairs(pairs.full, pairs.real), d, dv)


@counts("flex_attention", operands=(0, 1, 2))
def flex_attention(
    y: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Any,
    block_mask: Any,
    scale: Any = None,
    kernel_options: Any = None,
    score_buffers: Any = (),
    mask_buffers: Any = (),
    **_: Any,
) -> Cost:
    """2·B·H·Sq·Sk·(D + Dv).

    What a score function adds is element-wise.
    """
    return flex_cost(forward_cost, q, k, v, block_mask, mask_buffers)


@counts("flex_attention_backward", operands=(0, 1, 2), ran=False)
def flex_attention_backward(
    grads: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Any,
    lse: Any,
    gy: Any,
    glse: Any,
    forward_graph: Any,
    joint_graph: Any,
    block_mask: Any,
    scale: Any = None,
    kernel_options: Any = None,
    score_buffers: Any = (),
    mask_buffers: Any = (),
    **_: Any,
) -> Cost:
    """2·B·H·Sq·Sk·(3·D + 2·Dv).

    2·B·H·Sq·Sk·D of it is the score product, run again.
    """
    return flex_cost(backward_cost, q, k, v, block_mask, mask_buffers)
