"""From an op to its rule: the formula that counts it, nothing to count, or an unknown cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from torch._ops import HigherOrderOperator, OpOverload

from torchledger.errors import UsageError
from torchledger.flops import formulas
from torchledger.flops.containers import CONTAINERS
from torchledger.flops.declared import declare, declared_entry, name_of, torch_entry
from torchledger.flops.rules import ENTRIES, Cost, Formula, Part, Rule, UnknownCostError, counts
from torchledger.flops.zeros import BOOKKEEPING, PLAIN_HIGHER_ORDER, UNCOUNTED
from torchledger.internals import has_kernel_for_key

__all__ = [
    "Cost",
    "Formula",
    "FormulaRow",
    "Part",
    "Rule",
    "UnknownCostError",
    "counts",
    "formula",
    "formulas",
    "is_true_composite",
    "lookup",
    "registered_formulas",
    "version",
]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

version = 0
"""Grows at each declaration, so that whoever keeps rules knows when to look them up again."""


class FormulaRow(NamedTuple):
    """One line of the documentation's table of ops.

    ``text`` is the formula, ``quality`` as in `Cost`, ``ran`` whether a test runs the op itself.
    """

    name: str
    text: str
    quality: str
    source: str
    ran: bool


def lookup(op: OpOverload | HigherOrderOperator) -> Rule:
    """The rule for ``op``, the same for all its calls; to be kept by the caller while `version` stays."""
    name = name_of(op)
    entry = declared_entry(op) or ENTRIES.get(name) or torch_entry(op)
    if entry is not None:
        return Rule(name, entry.formula, False, entry.operands)
    if isinstance(op, HigherOrderOperator):
        return Rule(name, None, name not in CONTAINERS and name not in PLAIN_HIGHER_ORDER, ())
    namespace = name.partition(".")[0]
    known = namespace == "aten" or namespace in BOOKKEEPING
    return Rule(name, None, not known or name in UNCOUNTED, ())


def formula(op: Any, raw: bool = False) -> Callable[[FunctionT], FunctionT]:
    """A decorator that makes a function the FLOP formula of an op, for all ledgers from now on.

    The function is called as those of ``torch.utils.flop_counter.register_flop_formula`` are: with the op's arguments,
    shapes in place of tensors, and the result's shape as ``out_shape``; with ``raw=True``, with the tensors themselves
    and the result as ``out_val``. A Triton kernel's gets the arguments of the higher-order op that launches it, the
    kernel's own under ``kwargs``. It returns FLOPs, 2 for a multiply-add. A later formula for the same op replaces it.

    Args:
        op: An aten or custom op (all its overloads, or one), what ``torch.library.custom_op`` or ``triton_op``
            returned, a higher-order op, a Triton kernel, or a list of these.
        raw: Whether the function wants tensors.

    Raises:
        UsageError: ``op`` is none of these.

    Example:
        >>> import torch
        >>> @torch.library.custom_op("torchledger_example::project", mutates_args=())
        ... def project(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ...     return x @ w
        >>> @formula(project)
        ... def project_flops(x_shape, w_shape, *, out_shape):
        ...     return 2 * x_shape[0] * x_shape[1] * w_shape[1]
        >>> rule = lookup(torch.ops.torchledger_example.project.default)
        >>> rule.formula(torch.empty(8, 4), torch.empty(8, 16), torch.empty(16, 4))
        1024
    """

    def declare_all(function: FunctionT) -> FunctionT:
        global version
        if not callable(function):
            raise UsageError(f"formula() decorates a function that returns FLOPs, not {function!r}.")
        for target in op if isinstance(op, Sequence) and not isinstance(op, str) else [op]:
            declare(target, function, raw)
        version += 1
        return function

    return declare_all


def is_true_composite(op: OpOverload | HigherOrderOperator) -> bool:
    """Whether ``op`` is nothing but a composition of other ops, so that decomposing it changes no value.

    An op that also has a kernel of its own for a device (``silu_backward``) is none: its decomposition may differ.
    """
    if not isinstance(op, OpOverload):
        return False
    name = op.name()
    try:
        composite = has_kernel_for_key(name, "CompositeImplicitAutograd")
    except RuntimeError:  # TorchScript's ops are callable, but unknown to the dispatcher
        return False
    return composite and not any(has_kernel_for_key(name, key) for key in ("CPU", "CUDA", "CompositeExplicitAutograd"))


def registered_formulas() -> list[FormulaRow]:
    """The formulas of this package, one row an op packet, by name."""
    return [
        FormulaRow(name, _first_line(entry.formula), entry.quality, entry.source, entry.ran)
        for name, entry in sorted(ENTRIES.items())
    ]


def _first_line(function: Formula) -> str:
    return (function.__doc__ or "").partition("\n")[0].rstrip(".")
