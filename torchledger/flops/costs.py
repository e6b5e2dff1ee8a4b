"""What a product's element type does to its cost (real, complex, integer), and how costs add up."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torchledger.flops.rules import Cost, Part

REAL: frozenset[torch.dtype] = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))
"""The types that need no further look; the others go through `scale`."""

_WORST_FIRST = ("integer", "upper_bound", "approximate")


def scale(flops: int, dtype: torch.dtype) -> int | Cost:
    """The cost in ``dtype`` of a product that takes ``flops`` on real numbers.

    A complex multiply-add is four real ones: (a + bi)(c + di) = (ac − bd) + (ad + bc)i, added to a complex sum.
    Integer (and quantized) products are counted apart.
    """
    if dtype.is_floating_point:
        return flops
    if dtype.is_complex:
        return 4 * flops
    return Cost(flops, quality="integer")


def as_cost(cost: int | Cost) -> Cost:
    """The same cost, as a `Cost`."""
    return cost if isinstance(cost, Cost) else Cost(cost)


def add_costs(costs: Iterable[int | Cost]) -> Cost:
    """The sum of several costs; its quality is the least certain among them."""
    flops, rescore, excess, qualities = 0, 0, 0, {"exact"}
    for cost in map(as_cost, costs):
        flops += cost.flops
        rescore += cost.rescore
        excess += cost.causal_excess
        qualities.add(cost.quality)
    quality = next((q for q in _WORST_FIRST if q in qualities), "exact")
    return Cost(flops, rescore, excess, quality=quality)


def masked_parts(cost: int | Cost, weight: torch.Tensor | None, input_grad: bool, weight_grad: bool) -> Cost:
    """The cost of a backward that runs one product of ``cost`` for each gradient that is asked for."""
    flops, quality = as_cost(cost).flops, as_cost(cost).quality
    kinds = [kind for kind, asked in (("input_grad", input_grad), ("weight_grad", weight_grad)) if asked]
    parts = tuple(Part(weight, kind, flops) for kind in kinds)
    return Cost(flops * len(parts), parts=parts, quality=quality)
