"""How many (query, key) pairs an attention mask leaves: causal, windowed, packed, by blocks."""

from __future__ import annotations

from typing import NamedTuple


class Pairs(NamedTuple):
    """Pairs of one attention call, summed over its sequences: all of them, those the mask leaves, and how sure."""

    full: int
    real: int
    quality: str = "exact"


def visible_pairs(sq: int, sk: int, left: int | None = None, right: int | None = None, shift: int = 0) -> int:
    """The pairs (i, j) of 0 ≤ i < Sq and 0 ≤ j < Sk with i + shift − left ≤ j ≤ i + shift + right.

    None is no bound. Query i sees the keys below min(i + shift + right + 1, Sk) less those below i + shift − left, so
    the count is the difference of two sums of numbers that rise by one and are clipped to 0..Sk.

    >>> visible_pairs(64, 64, right=0), visible_pairs(64, 64, left=15, right=0)
    (2080, 904)
    """
    below = sq * sk if right is None else _clipped_sum(shift + right + 1, sq, sk)
    hidden = 0 if left is None else _clipped_sum(shift - left, sq, sk)
    return max(0, below - hidden)


def _clipped_sum(start: int, count: int, top: int) -> int:
    """Σ min(max(start + i, 0), top) over 0 ≤ i < count."""
    return _clipped_below(start + count, top) - _clipped_below(start, top)


def _clipped_below(end: int, top: int) -> int:
    """Σ min(t, top) over 0 ≤ t < end: a triangle, then a rectangle."""
    if end <= 0:
        return 0
    ramp = min(end, top)
    return ramp * (ramp - 1) // 2 + (end - ramp) * top


def causal_pairs(sq: int, sk: int) -> int:
    """Pairs under a causal mask aligned to the upper left, as scaled_dot_product_attention has it: j ≤ i.

    S(S+1)/2 for Sq = Sk = S.
    """
    return visible_pairs(sq, sk, right=0)
