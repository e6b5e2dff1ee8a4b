"""What optimizers keep between steps, and what they need beyond it while they step.

The implementations of torch.optim, read off what they allocate (torch 2.13). P is the bytes of the tensors that an
optimizer updates, p_i those of its i-th tensor:

- ``foreach`` (CUDA's default) works on lists of all tensors at once, so its temporaries are multiples of P;
- ``for-loop`` works on one tensor after the other, and the last temporary of one lives into the next: the largest
  a·p_i + b·p_(i-1);
- ``fused`` needs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torchledger.errors import UsageError

Shape = Sequence[int]
IMPLEMENTATIONS = ("foreach", "for-loop", "fused")
SCALAR_BYTES = 4
"""Bytes of a scalar that an optimizer keeps for each tensor: fp32, on the CPU unless it is fused or capturable."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What one optimizer keeps and needs, in multiples of what it updates.

    Args:
        title: the name that people use.
        n_moments: state elements for each element; None where it depends on the shapes.
        n_scalars: scalars kept for each tensor (the step, a product of momenta).
        foreach: multiple of P, None where there is no such implementation.
        loop: (a, b) of the for-loop; None where it has no such form.
        foreach_decay: the same as ``foreach``, with a weight decay that is added to the gradient.
        loop_decay: likewise.
        has_fused: whether torch has a fused implementation.
    """

    title: str
    n_moments: int | None
    n_scalars: int = 0
    foreach: int | None = None
    loop: tuple[int, int] | None = None
    foreach_decay: int | None = None
    loop_decay: tuple[int, int] | None = None
    has_fused: bool = False


OPTIMIZERS: Mapping[str, Optimizer] = MappingProxyType(
    {
        "sgd": Optimizer("SGD", 0, 0, 0, (0, 0), 1, (1, 0), has_fused=True),
        "sgd-momentum": Optimizer("SGD with momentum", 1, 0, 0, (0, 0), 1, (1, 0), has_fused=True),
        "rmsprop": Optimizer("RMSProp", 1, 1, 1, (1, 1), 2, (2, 1)),
        "adagrad": Optimizer("AdaGrad", 1, 1, 2, (1, 1), 2, (2, 1), has_fused=True),
        "adam": Optimizer("Adam", 2, 1, 1, (2, 1), 1, (3, 1), has_fused=True),
        "adamw": Optimizer("AdamW", 2, 1, 1, (2, 1), 1, (2, 1), has_fused=True),
        "amsgrad": Optimizer("Adam with AMSGrad", 3, 1, 1, (2, 1), 1, (3, 1), has_fused=True),
        "nadam": Optimizer("NAdam", 2, 2, 1, (2, 1), 2, (3, 1)),
        "radam": Optimizer("RAdam", 2, 1, 1, (5, 0), 1, (6, 0)),
        "adafactor": Optimizer("Adafactor", None, 1, 1, None, 1, None),
        "lion": Optimizer("Lion", 1),
        "muon": Optimizer("Muon", 1),
    }
)
"""The optimizers on record, by name. Torch has no Lion: its state is known, its temporaries are not."""


def state_elements(optimizer: str, shapes: Iterable[Shape]) -> int:
    """Elements of state that an optimizer keeps for tensors of these shapes, its scalars apart.

    Adafactor keeps, for a tensor of two axes or more, one element a row and one a column; for any other, one for each
    element (Shazeer & Stern 2018, section 3).

    >>> state_elements("adamw", [(4, 8), (4,)]), state_elements("adafactor", [(4, 8), (4,)])
    (72, 16)
    """
    n_moments = OPTIMIZERS[optimizer].n_moments
    if n_moments is not None:
        return n_moments * sum(math.prod(shape) for shape in shapes)
    return sum(_factored_elements(shape) for shape in shapes)


def _factored_elements(shape: Shape) -> int:
    if len(shape) < 2:
        return math.prod(shape)
    return math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1]


def transient_bytes(
    optimizer: str, shapes: Iterable[Shape], element: int, implementation: str, *, weight_decay: bool = False
) -> int:
    """Bytes that a step needs at its highest beyond weights, gradients and state; scalars are not counted.

    Args:
        optimizer: a name of `OPTIMIZERS`.
        shapes: of the tensors, in the order in which the optimizer has them.
        element: bytes of an element that the optimizer updates.
        implementation: ``foreach``, ``for-loop`` or ``fused``.
        weight_decay: whether there is one that is added to the gradient (AdamW's and Muon's never is).

    Raises:
        UsageError: torch has no such implementation, or its need has no closed form.

    >>> [transient_bytes("adamw", [(4096,), (8192,)], 4, name) for name in IMPLEMENTATIONS]
    [49152, 81920, 0]
    """
    if optimizer == "muon" and implementation == "for-loop":
        return _muon_bytes([tuple(shape) for shape in shapes], element)
    sizes = [math.prod(shape) * element for shape in shapes]
    multiple = foreach_multiple(optimizer, implementation, weight_decay=weight_decay)
    if multiple is not None:
        return multiple * sum(sizes)
    entry = OPTIMIZERS[optimizer]
    loop = entry.loop_decay if weight_decay else entry.loop
    if loop is None:
        raise UsageError(f"what {entry.title} needs in a for-loop has no closed form: record a step with a Ledger.")
    a, b = loop
    return max((a * size + b * before for before, size in zip([0, *sizes], sizes, strict=False)), default=0)


def foreach_multiple(optimizer: str, implementation: str, *, weight_decay: bool = False) -> int | None:
    """The need of an implementation as a multiple of P; None for a for-loop, whose need is not one.

    Raises:
        UsageError: torch has no such implementation.

    >>> foreach_multiple("adagrad", "foreach"), foreach_multiple("adamw", "fused"), foreach_multiple("adam", "for-loop")
    (2, 0, None)
    """
    entry = OPTIMIZERS[optimizer]
    has = {"foreach": entry.foreach is not None, "for-loop": optimizer != "lion", "fused": entry.has_fused}
    if not has.get(implementation, False):
        known = [name for name in IMPLEMENTATIONS if has[name]]
        there_are = f"there are: {', '.join(known)}" if known else "there is none"
        raise UsageError(f"torch has no {implementation!r} implementation of {entry.title}; {there_are}.")
    if implementation == "for-loop":
        return None
    if implementation == "fused":
        return 0
    return entry.foreach_decay if weight_decay else entry.foreach


def _muon_bytes(shapes: Sequence[Shape], element: int) -> int:
    """Muon's need, one matrix after the other, m rows and n columns with m <= n.

    At its highest, in the second Newton-Schulz iteration, there are the update that Nesterov's momentum made (m·n), the
    matrix before and after the iteration in bf16 (2·m·n each) and two products of m·m in bf16. In bf16 the update
    is the very first of those matrices. The update of the matrix before lives until the next one is made.
    """
    highest = before = 0
    for shape in shapes:
        if len(shape) != 2:
            raise UsageError(f"Muon updates matrices, not a tensor of shape {tuple(shape)!r}.")
        m, n = sorted(shape)
        update = element * m * n
        iterating = update + 2 * m * n * 2 + 2 * m * m * 2
        highest = max(highest, update + before, iterating)
        before = 2 * m * n
    return highest
