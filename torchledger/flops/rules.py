"""What a FLOP formula is, what it may return, and the table that the formulas enter themselves into.

A formula is called ``formula(result, *args, **kwargs)``: the op's result first, then the op's own arguments, which are
real tensors (on any device, meta and fake included), never shapes. ``out=`` of an ``.out`` overload arrives by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch


class Part(NamedTuple):
    """A share of a product's FLOPs that belongs to one operand.

    ``operand`` is the weight-like tensor that the share belongs to (None: unknown), ``kind`` one of ``forward``,
    ``input_grad`` and ``weight_grad``.
    """

    operand: torch.Tensor | None
    kind: str
    flops: int


class Cost(NamedTuple):
    """What a formula may return in place of a plain number of FLOPs.

    ``flops`` is all that was executed. ``rescore`` is the part of it that computes attention scores again, as fused
    backwards do. ``causal_excess`` is what ``flops - rescore`` counts beyond the pairs that a causal, windowed or block
    mask leaves. ``parts`` say how ``flops`` splits over weights where the argument positions alone do not tell; what
    they leave out belongs to no weight. ``quality`` is ``exact``, ``approximate``, ``upper_bound`` or ``integer``
    (integer operations, in no FLOP total). ``name`` replaces the rule's name in the books (a Triton kernel's own).
    ``dense`` is what the product would take if its format skipped no zeros (0: it skips none). ``apart`` is the part of
    ``flops`` that the third of three operands alone takes part in. ``values_only`` is what a decomposition would take
    without its vectors (0: it has none, or was asked for none).
    """

    flops: int
    rescore: int = 0
    causal_excess: int = 0
    parts: tuple[Part, ...] = ()
    quality: str = "exact"
    name: str = ""
    dense: int = 0
    apart: int = 0
    values_only: int = 0


class UnknownCostError(Exception):
    """Raised by a formula that learns only at the call that the cost is unknown.

    ``name`` is what to call it in the list of the uncounted; empty: the rule's own name.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        super().__init__(name or "unknown cost")


Formula = Callable[..., int | Cost]
FormulaT = TypeVar("FormulaT", bound=Formula)


class Rule(NamedTuple):
    """What the recorder does with one op.

    ``name`` is the op's packet (``aten.mm``). Without a ``formula`` the op costs nothing that is counted, or, where
    ``uncounted`` is set, an unknown amount. ``operands`` are the positions of the arguments that are multiplied.
    """

    name: str
    formula: Formula | None
    uncounted: bool
    operands: tuple[int, ...]


class Entry(NamedTuple):
    """A formula in the table, with what the documentation says about it."""

    formula: Formula
    operands: tuple[int, ...]
    quality: str
    source: str
    ran: bool


ENTRIES: dict[str, Entry] = {}
"""The formulas of this package by op packet (``aten.mm``). A name that the installed torch lacks is never looked up."""


def counts(
    *names: str,
    operands: tuple[int, ...] = (),
    quality: str = "exact",
    source: str = "hand count",
    ran: bool = True,
) -> Callable[[FormulaT], FormulaT]:
    """A decorator that enters a formula into the table for the op packets ``names``, all their overloads included.

    Args:
        names: Packets as ``namespace.op``; a name that the installed torch does not have does no harm.
        operands: Positions of the arguments that are multiplied.
        quality: ``exact``, ``approximate``, ``upper_bound`` or ``integer``, for the documentation.
        source: Where the formula comes from.
        ran: Whether a test runs the op itself, rather than its formula alone.
    """

    def enter(formula: FormulaT) -> FormulaT:
        for name in names:
            if name in ENTRIES:
                raise ValueError(f"{name} has a formula already: {ENTRIES[name].formula}")
            ENTRIES[name] = Entry(formula, operands, quality, source, ran)
        return formula

    return enter
