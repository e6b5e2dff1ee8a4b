"""Bytes that one parameter costs, by optimizer and precision: at rest, in the optimizer's step, and over many ranks.

Sources: Rajbhandari et al. 2020, "ZeRO", section 3.1 (16 bytes: fp16 weights and gradients, and K = 12 of fp32 master,
momentum and variance) and 5 (sharding); Dettmers et al. 2022, "8-bit optimizers via block-wise quantization"; the state
that torch's own optimizers allocate.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType

from torchledger.analytic.napkin import exact_ratio
from torchledger.analytic.optimizers import (
    OPTIMIZERS,
    SCALAR_BYTES,
    Shape,
    foreach_multiple,
    state_elements,
    transient_bytes,
)
from torchledger.errors import UsageError

ADAFACTOR_MOMENTS = 0.02
"""Bytes of fp32 Adafactor state for one parameter, roughly: (r + c) / (r · c) elements in a matrix, 1 in a vector."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Bytes for each parameter, by what holds them, on one device.

    Args:
        name: as in ``adamw-bf16-master``.
        weights: what the forward pass reads.
        gradients: what backward leaves.
        master: a copy of the weights in fp32 that the optimizer updates.
        moments: the optimizer's state, its scalars (4 bytes for each tensor) apart.
        optimizer: a name of ``torchledger.analytic.optimizers.OPTIMIZERS``, empty for weights that are frozen.
        copies: low-precision copies of matmul weights that autocast holds between forward and backward: in no sum.
        is_approximate: whether ``moments`` depend on the shapes, so that only `state_bytes` is exact.
        zero: the ZeRO stage of a sharded recipe, else 0.
        ranks: over how many devices it is sharded.
    """

    name: str
    weights: float
    gradients: float
    master: float
    moments: float
    optimizer: str = ""
    copies: float = 0
    is_approximate: bool = False
    zero: int = 0
    ranks: int = 1

    @property
    def bytes_per_param(self) -> float:
        """All four parts together: bytes for each parameter at rest, when gradients and state exist.

        >>> recipe("adamw-fp32").bytes_per_param, recipe("sgd-fp32").bytes_per_param
        (16, 8)
        """
        return _plain(sum(map(exact_ratio, (self.weights, self.gradients, self.master, self.moments)), Fraction(0)))

    def bytes_in_step(self, implementation: str = "foreach", *, weight_decay: bool = False) -> float:
        """Bytes for each parameter while the optimizer steps: at rest, and the step's temporaries.

        Args:
            implementation: ``foreach`` (CUDA's default) or ``fused``; a for-loop's need is that of its largest tensors
                and no multiple of the parameters: see `transient_bytes`.
            weight_decay: whether there is one that is added to the gradient (AdamW's and Muon's never is).

        Raises:
            UsageError: torch has no such implementation, or its need is no multiple of the parameters.

        >>> recipe("adamw-fp32").bytes_in_step(), recipe("adamw-fp32").bytes_in_step("fused")
        (20, 16)
        """
        multiple = foreach_multiple(self._stepping, implementation, weight_decay=weight_decay)
        if multiple is None:
            raise UsageError("a for-loop needs what its largest tensors need: transient_bytes() takes their shapes.")
        # From ZeRO-1 on, a rank updates its own shard only.
        return _plain(exact_ratio(self.bytes_per_param) + Fraction(multiple * self._element, self.ranks))

    def state_bytes(self, shapes: Iterable[Shape]) -> int:
        """Exact bytes of the optimizer's state on one device, for tensors of these shapes, with its scalars.

        Args:
            shapes: of all tensors that the optimizer has.

        Raises:
            UsageError: the weights are frozen, the recipe is sharded, or its state is no plain tensor.

        >>> recipe("adamw-fp32").state_bytes([(128, 64), (128,)])
        66568
        """
        listed = [tuple(shape) for shape in shapes]
        self._refuse_sharded()
        entry = OPTIMIZERS[self._stepping]
        return self._element * state_elements(self.optimizer, listed) + SCALAR_BYTES * entry.n_scalars * len(listed)

    def transient_bytes(
        self, shapes: Iterable[Shape], implementation: str = "foreach", *, weight_decay: bool = False
    ) -> int:
        """Bytes that a step needs at its highest beyond weights, gradients and state; scalars are not counted.

        Args:
            shapes: of the tensors, in the order in which the optimizer has them.
            implementation: ``foreach`` (CUDA's default), ``for-loop`` or ``fused``.
            weight_decay: whether there is one that is added to the gradient (AdamW's and Muon's never is).

        Raises:
            UsageError: torch has no such implementation, its need has no closed form, or the recipe is sharded.

        >>> recipe("adamw-fp32").transient_bytes([(4096,), (8192,)], "for-loop")
        81920
        """
        self._refuse_sharded()
        return transient_bytes(self._stepping, shapes, self._element, implementation, weight_decay=weight_decay)

    def sharded(self, *, zero: int, n: int) -> Recipe:
        """The same over ``n`` data-parallel ranks: bytes for each parameter of the whole model, on one rank.

        Args:
            zero: 1 spreads master and moments, 2 the gradients too, 3 (FSDP) also the weights.
            n: how many ranks.

        Raises:
            UsageError: there is no such stage, ``n`` is below 1, or the recipe is sharded already.

        Source: Rajbhandari et al. 2020, "ZeRO", section 5.

        >>> [recipe("adamw-bf16-master").sharded(zero=stage, n=64).bytes_per_param for stage in (1, 2, 3)]
        [4.1875, 2.21875, 0.25]
        """
        self._refuse_sharded()
        if zero not in (1, 2, 3):
            raise UsageError(f"there are the ZeRO stages 1, 2 and 3, not {zero!r}.")
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise UsageError(f"a recipe is spread over 1 rank or more, not {n!r}.")

        def share(nbytes: float, from_stage: int) -> float:
            return _plain(exact_ratio(nbytes) / n) if zero >= from_stage else nbytes

        return replace(
            self,
            weights=share(self.weights, 3),
            gradients=share(self.gradients, 2),
            master=share(self.master, 1),
            moments=share(self.moments, 1),
            zero=zero,
            ranks=n,
        )

    def total_bytes(self, n_params: int) -> int:
        """Bytes of ``n_params`` parameters on one device at rest, rounded up to a whole byte.

        >>> recipe("adamw-bf16-master").sharded(zero=1, n=64).total_bytes(7_500_000_000)
        31406250000
        """
        return math.ceil(exact_ratio(self.bytes_per_param) * n_params)

    @property
    def _stepping(self) -> str:
        if not self.optimizer:
            raise UsageError(f"no optimizer of torch steps {self.name!r}.")
        return self.optimizer

    @property
    def _element(self) -> int:
        """Bytes of an element that the optimizer updates."""
        return int(self.master and 4) or int(self.weights)

    def _refuse_sharded(self) -> None:
        if self.zero:
            raise UsageError("a sharded recipe knows bytes for each parameter only: ask the recipe it was made from.")


def _plain(value: Fraction) -> float:
    return int(value) if value.denominator == 1 else float(value)


def _grid() -> Iterable[Recipe]:
    """Every optimizer in every precision: bytes of weights, gradients, master, one moment, autocast's copies."""
    precisions = {"fp32": (4, 4, 0, 4, 0), "autocast": (4, 4, 0, 4, 2), "bf16": (2, 2, 0, 2, 0)}
    precisions["bf16-master"] = (2, 2, 4, 4, 0)
    for precision, (weights, gradients, master, moment, copies) in precisions.items():
        for optimizer, entry in OPTIMIZERS.items():
            n_moments = entry.n_moments
            moments = ADAFACTOR_MOMENTS * moment / 4 if n_moments is None else n_moments * moment
            name = f"{optimizer}-{precision}"
            yield Recipe(name, weights, gradients, master, moments, optimizer, copies, is_approximate=n_moments is None)


_OTHERS = (
    Recipe("adamw-bf16-master-fp32-gradients", 2, 4, 4, 8, "adamw"),
    Recipe("adamw-bf16-master-gradient-copy", 2, 6, 4, 8, "adamw"),
    Recipe("adamw-8bit-fp32", 4, 4, 0, 2),
    Recipe("adamw-8bit-bf16", 2, 2, 0, 2),
    Recipe("frozen-fp32", 4, 0, 0, 0),
    Recipe("frozen-bf16", 2, 0, 0, 0),
    Recipe("frozen-int8", 1, 0, 0, 0),
    Recipe("frozen-int4", 0.5, 0, 0, 0),
)

RECIPES: Mapping[str, Recipe] = MappingProxyType({entry.name: entry for entry in (*_grid(), *_OTHERS)})
"""All recipes, by name."""

recipes: tuple[str, ...] = tuple(RECIPES)
"""The names of all recipes: an optimizer and a precision, as in ``adamw-bf16-master``."""


def recipe(name: str) -> Recipe:
    """The bytes that one parameter costs under a recipe.

    Args:
        name: an optimizer (``sgd``, ``sgd-momentum``, ``rmsprop``, ``adagrad``, ``adam``, ``adamw``, ``amsgrad``,
            ``nadam``, ``radam``, ``adafactor``, ``lion``, ``muon``) and a precision: ``fp32``, ``autocast`` (fp32 under
            autocast), ``bf16`` (everything) or ``bf16-master`` (16-bit weights and gradients; fp32 master and moments).
            ``adamw-bf16-master-fp32-gradients``, ``adamw-bf16-master-gradient-copy`` (both kinds), ``adamw-8bit-fp32``,
            ``adamw-8bit-bf16`` and, for weights that are only read, ``frozen-fp32``, ``-bf16``, ``-int8``, ``-int4``.
            The bytes of fp16 are those of bf16.

    Raises:
        UsageError: there is none of that name; the message suggests names that come near.

    >>> recipe("adamw-bf16-master")
    Recipe(name='adamw-bf16-master', weights=2, gradients=2, master=4, moments=8, optimizer='adamw', copies=0,
           is_approximate=False, zero=0, ranks=1)
    """
    found = RECIPES.get(name)
    if found is None:
        near = difflib.get_close_matches(str(name).lower(), RECIPES, n=3, cutoff=0.6)
        hint = f"Did you mean {' or '.join(near)}?" if near else f"Known are: {', '.join(RECIPES)}."
        raise UsageError(f"there is no recipe named {name!r}. {hint}")
    return found
