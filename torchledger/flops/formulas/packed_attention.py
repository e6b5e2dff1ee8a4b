"""Attention kernels that take (B, S, H, D), or sequences packed end to end as (N, H, D). Letters as in attention.

Packed sequences are told apart by cumulative lengths; each attends to itself alone, so the pairs are Σ Sq·Sk over the
sequences. Where the lengths cannot be read, the longest stands for all, marked an upper bound. Windows and causal masks
give ``causal_excess``. Flash attention aligns them to the lower right: the last query sees the last key.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from torch import Tensor

from torchledger.flops.formulas.attention import CostOfPairs, backward_cost, forward_cost
from torchledger.flops.pairs import Pairs, visible_pairs
from torchledger.flops.rules import Cost, counts
from torchledger.flops.tensors import read_ints


class Packing(NamedTuple):
    """How sequences are packed: cumulative lengths, longest lengths, and the used key lengths where they differ."""

    ends_q: Tensor | None
    ends_k: Tensor | None
    max_q: Any
    max_k: Any
    used_k: Tensor | None = None


class Mask(NamedTuple):
    """A band of visible keys around the diagonal; ``lower_right`` shifts the diagonal by Sk − Sq. None: no bound."""

    left: int | None = None
    right: int | None = None
    lower_right: bool = True

    def visible(self, sq: int, sk: int) -> int:
        """The pairs that the band leaves."""
        return visible_pairs(sq, sk, self.left, self.right, sk - sq if self.lower_right else 0)


def flash_mask(causal: bool, kwargs: dict[str, Any]) -> Mask:
    """Flash attention's band; −1 or None is no bound."""
    left, right = kwargs.get("window_size_left"), kwargs.get("window_size_right")
    return Mask(_bound(left), 0 if causal else _bound(right))


def _bound(width: Any) -> int | None:
    return None if width is None or width < 0 else int(width)


def efficient_mask(custom_mask_type: int, window: int | None) -> Mask:
    """Memory-efficient attention's band: type 1 is causal to the upper left, 2 to the lower right."""
    return Mask(window - 1 if window else None, 0 if custom_mask_type else None, custom_mask_type == 2)


def lengths(ends: Tensor | None, longest: Any, count: int) -> tuple[list[int], bool]:
    """The lengths of ``count`` sequences, and whether they are known rather than bounded by the longest."""
    read = read_ints(ends)
    if read is None:
        return [int(longest)] * count, False
    return [end - begin for begin, end in itertools.pairwise(read)], True


def packed_pairs(packing: Packing, mask: Mask) -> Pairs:
    """Σ over the packed sequences of Sq·Sk, and of the pairs that the mask leaves."""
    ends_q = packing.ends_q if packing.ends_q is not None else packing.ends_k
    assert ends_q is not None
    count = ends_q.shape[0] - 1
    of_q, known_q = lengths(ends_q, packing.max_q, count)
    if packing.used_k is not None:
        used = read_ints(packing.used_k)
        of_k, known_k = (used, True) if used is not None else ([int(packing.max_k)] * count, False)
    else:
        ends_k = packing.ends_k if packing.ends_k is not None else ends_q
        of_k, known_k = lengths(ends_k, packing.max_k, count)
    squares = list(zip(of_q, of_k, strict=True))
    quality = "exact" if known_q and known_k else "upper_bound"
    return Pairs(sum(q * k for q, k in squares), sum(mask.visible(q, k) for q, k in squares), quality)


def attention_cost(cost: CostOfPairs, q: Tensor, k: Tensor, v: Tensor, packing: Packing, mask: Mask) -> Cost:
    """``cost`` over q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), or packed (N, H, D) or (1, N, H, D)."""
    heads, d = q.shape[-2:]
    dv = v.shape[-1]
    if packing.ends_q is not None or packing.ends_k is not None:
        return cost(heads, packed_pairs(packing, mask), d, dv)
    batch, sq = q.shape[:2]
    used = [k.shape[1]] * batch if packing.used_k is None else read_ints(packing.used_k)
    of_k = [k.shape[1]] * batch if used is None else used
    quality = "exact" if used is not None else "upper_bound"
    return cost(heads, Pairs(sq * sum(of_k), sum(mask.visible(sq, sk) for sk in of_k), quality), d, dv)


@counts("aten._flash_attention_forward", operands=(0, 1, 2), ran=False)
def flash_forward(
    y: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends_q: Tensor | None,
    ends_k: Tensor | None,
    max_q: Any,
    max_k: Any,
    dropout: float,
    causal: bool,
    /,
    *_: Any,
    **kwargs: Any,
) -> Cost:
    """2·H·Σ Sq·Sk·(D + Dv).

    The sum goes over the batch, or over the packed sequences.  q (B, Sq, H, D) or (N, H, D).
    """
    packing = Packing(ends_q, ends_k, max_q, max_k, kwargs.get("seqused_k"))
    return attention_cost(forward_cost, q, k, v, packing, flash_mask(causal, kwargs))


@counts("aten._flash_attention_forward_no_dropout_inplace", operands=(1, 2, 3), ran=False)
def flash_forward_inplace(lse: Any, y: Tensor, /, *args: Any, **kwargs: Any) -> Cost:
    """2·H·Σ Sq·Sk·(D + Dv).

    As `_flash_attention_forward`, with the output given first.
    """
    return flash_forward(lse, *args, **kwargs)


@counts("aten._flash_attention_backward", operands=(1, 2, 3), ran=False)
def flash_backward(
    grads: Any,
    gy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Any,
    lse: Any,
    ends_q: Tensor | None,
    ends_k: Tensor | None,
    max_q: Any,
    max_k: Any,
    dropout: float,
    causal: bool,
    /,
    *_: Any,
    **kwargs: Any,
) -> Cost:
    """2·H·Σ Sq·Sk·(3·D + 2·Dv).

    2·H·Σ Sq·Sk·D of it is the score product, run again.  Shapes as forward.
    """
    packing = Packing(ends_q, ends_k, max_q, max_k)
    return attention_cost(backward_cost, q, k, v, packing, flash_mask(causal, kwargs))


@counts("aten._efficient_attention_forward", operands=(0, 1, 2), ran=False)
def efficient_forward(
    y: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Any,
    ends_q: Tensor | None,
    ends_k: Tensor | None,
    max_q: Any,
    max_k: Any,
    dropout: float,
    mask_type: int,
    /,
    *_: Any,
    **kwargs: Any,
) -> Cost:
    """2·H·Σ Sq·Sk·(D + Dv).

    The sum goes over the batch, or over the packed sequences.  q (B, Sq, H, D), packed (1, N, H, D).
    """
    packing = Packing(ends_q, ends_k, max_q, max_k, kwargs.get("seqlen_k"))
    return attention_cost(forward_cost, q, k, v, packing, efficient_mask(mask_type, kwargs.get("window_size")))


@counts("aten._efficient_attention_backward", operands=(1, 2, 3), ran=False)
def efficient_backward(
    grads: Any,
    gy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Any,
    y: Any,
    ends_q: Tensor | None,
    ends_k: Tensor | None,
    max_q: Any,
    max_k: Any,
    lse: Any,
    dropout: float,
    seed: Any,
    offset: Any,
    mask_type: int,
    /,
    *_: Any,
    **kwargs: Any,
) -> Cost:
    """2·H·Σ Sq·Sk·(3·D + 2·Dv).

    2·H·Σ Sq·Sk·D of it is the score product, run again.  Shapes as forward.
    """
    packing = Packing(ends_q, ends_k, max_q, max_k)
    return attention_cost(backward_cost, q, k, v, packing, efficient_mask(mask_type, kwargs.get("window_size")))
