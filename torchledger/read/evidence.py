"""From a journal to what it shows of why a step's FLOPs are not 6·N·D."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from math import prod

from torchledger.journal.entries import (
    AGAIN,
    GRAPH,
    HIDDEN,
    INPUT_GRAD,
    NO_SEGMENT,
    WEIGHT_GRAD,
    Journal,
    Link,
    ProductRow,
)
from torchledger.journal.evidence import READ_AS, ParameterEvidence, StepEvidence
from torchledger.read.attention import find_attention
from torchledger.read.categories import INDEX
from torchledger.read.readers import read_as

_NO_LINK = Link()
_OF_A_VECTOR = ("aten.mv", "aten.addmv", "aten.addmv_")
_OF_TWO_VECTORS = ("aten.dot", "aten.vdot")
_OF_THREE = "aten._trilinear"


class _Uses(Counter[str]):
    """Multiply-adds of one parameter, by the names of `ParameterEvidence`."""

    def made(self, uses: int, flags: int) -> None:
        """A forward product."""
        self["uses"] += uses
        if flags & HIDDEN:
            self["hidden"] += uses
        elif not flags & GRAPH:
            self["graphless"] += uses
        else:
            self["input_grad_due"] += uses if flags & INPUT_GRAD else 0
            self["weight_grad_due"] += uses if flags & WEIGHT_GRAD else 0

    def made_with_a_vector(self, op: str, uses: int, flags: int, *, is_vector: bool) -> None:
        """The same with a vector: the gradient of what it was multiplied with is an outer product."""
        two = op in _OF_TWO_VECTORS
        if flags & GRAPH and not flags & HIDDEN:
            self["outer"] += uses if flags & INPUT_GRAD and (two or is_vector) else 0
            self["outer"] += uses if flags & WEIGHT_GRAD and (two or not is_vector) else 0

    def ran(self, kind: str, uses: int, hidden: bool) -> None:
        """A product of its backward."""
        self[f"hidden_{kind}_run" if hidden else f"{kind}_run"] += uses


@dataclass(slots=True)
class _Sums:
    parameters: dict[int, _Uses] = field(default_factory=lambda: defaultdict(_Uses))
    vectors: frozenset[int] = frozenset()
    """Parameters of one dimension."""
    attention: int = 0
    other: int = 0
    double: int = 0
    recompute: int = 0
    segments: dict[int, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    """By segment, the FLOPs of its forward and of its recompute."""
    ran: dict[tuple[int, int, str], int] = field(default_factory=dict)
    """(forward product, parameter, kind) -> the backward that ran it."""


def gather_evidence(journal: Journal, settled: dict[int, int]) -> StepEvidence:
    """What a journal shows of its parameters, of products without parameters, and of the step's tokens.

    Args:
        journal: The step.
        settled: The category of each block, from `settle`.
    """
    sums = _Sums(vectors=frozenset(row.parameter for row in journal.parameter_rows if row.n_dims == 1))
    attention = find_attention(journal)
    for index, row in enumerate(journal.products):
        if row[8] == "integer":
            continue
        phase = row[2]
        if phase == "forward":
            _read_forward(sums, index, row, attention)
            if row[9] and row[9][2] >= 0:
                _add_to_segments(sums, journal.enclosing, row[9][2], row[4], again=False)
        elif phase == "recompute":
            sums.recompute += row[4]
            if row[9] and row[9][2] >= 0:
                _add_to_segments(sums, journal.enclosing, row[9][2], row[4], again=bool(row[9][1] & AGAIN))
        elif phase == "backward":
            _read_backward(sums, row, journal.products, attention)
        elif phase == "outside":
            sums.other += row[4]
    for index, times in enumerate(journal.segments):
        due, done = sums.segments.get(index, (0, 0))
        sums.recompute += due * times - done
    tokens, tokens_from, length = _count_tokens(journal, settled)
    return StepEvidence(
        parameters=_parameters(journal, sums.parameters),
        attention=sums.attention,
        other_products=sums.other,
        double_backward=sums.double,
        recompute_due=sums.recompute,
        tokens=tokens,
        tokens_from=tokens_from,
        sequence_length=length,
    )


def _add_to_segments(sums: _Sums, enclosing: list[int], segment: int, flops: int, *, again: bool) -> None:
    """A product of a segment's forward is one of all that it lies in, up to one that was being recomputed."""
    while not again and segment >= 0:
        sums.segments[segment][0] += flops
        segment = enclosing[segment] if segment < len(enclosing) else NO_SEGMENT
        if segment < NO_SEGMENT:
            segment, again = NO_SEGMENT - 1 - segment, True
    if again:
        sums.segments[segment][1] += flops


def _read_forward(sums: _Sums, index: int, row: ProductRow, attention: set[int]) -> None:
    flops, parts = row[4], row[7]
    link = Link(*row[9])
    rest = flops
    for (parameter, kind, share), uses in zip(parts, link.uses or [part[2] // 2 for part in parts], strict=True):
        rest -= share
        account = sums.parameters[parameter]
        if kind == "forward":
            account.made(uses, link.flags)
            account["matrices"] = max([account["matrices"], *link.sizes[:1]])
            if row[0] in _OF_A_VECTOR or row[0] in _OF_TWO_VECTORS:
                account.made_with_a_vector(row[0], uses, link.flags, is_vector=parameter in sums.vectors)
        else:
            account.ran(kind, uses, bool(link.flags & HIDDEN))
    _add_rest(sums, rest, index in attention)


def _read_backward(sums: _Sums, row: ProductRow, products: list[ProductRow], attention: set[int]) -> None:
    link = Link(*row[9])
    origin = products[link.origin] if link.origin >= 0 else None
    rest = row[4] - row[5]
    if origin is not None and origin[2] == "backward":
        sums.double += rest
        return
    made = Link(*origin[9]) if origin else _NO_LINK
    hidden = bool(made.flags & HIDDEN) or (origin is not None and origin[2] == "recompute")
    again = False
    for parameter, kind, share in row[7]:
        third = row[0] == _OF_THREE and sums.ran.get((link.origin, parameter, kind)) == link.run
        again = _ran_before(sums, link, parameter, kind)
        if again or third:  # of three operands, the gradient of the third
            continue
        if kind == "forward":
            sums.recompute += share
        else:
            sums.parameters[parameter].ran(kind, _uses_in(origin, made, parameter, share), hidden)
        rest -= share
    if (again and rest > 0) if row[7] else _ran_before(sums, link, -1, ""):
        sums.double += rest
    else:
        _add_rest(sums, rest, link.origin in attention or "attention" in row[0])


def _ran_before(sums: _Sums, link: Link, parameter: int, kind: str) -> bool:
    """Whether an earlier backward ran this product of the same graph."""
    if link.origin < 0:
        return False
    return sums.ran.setdefault((link.origin, parameter, kind), link.run) != link.run


def _uses_in(origin: ProductRow | None, made: Link, parameter: int, flops: int) -> int:
    """Multiply-adds of the parameter in the product whose backward this is."""
    if origin is not None:
        for (number, _, _), uses in zip(origin[7], made.uses, strict=False):
            if number == parameter:
                return uses
    return flops // 2


def _add_rest(sums: _Sums, flops: int, is_attention: bool) -> None:
    if is_attention:
        sums.attention += flops
    else:
        sums.other += flops


def _parameters(journal: Journal, accounts: dict[int, _Uses]) -> dict[str, ParameterEvidence]:
    shown = read_as(journal, {number for number, account in accounts.items() if account["uses"]})
    found = {}
    for row in journal.parameter_rows:
        account = accounts.get(row.parameter) or _Uses()
        how, op = shown.get(row.parameter, (READ_AS[-1], ""))
        found[journal.parameters[row.parameter]] = ParameterEvidence(
            row.n_elements,
            row.n_dims,
            row.nbytes,
            row.dtype,
            row.device,
            row.trainable,
            how,
            op,
            **account,
        )
    return found


def _count_tokens(journal: Journal, settled: dict[int, int]) -> tuple[int | None, str, int]:
    """(tokens, how they were found, sequence length)."""
    calls = [batch for batch in journal.batches if batch.graph] or journal.batches
    chosen = next((batch for batch in calls if batch.integers), None)
    if chosen is not None:
        shapes = [batch.integers for batch in calls if batch.module == chosen.module and batch.integers]
        return sum(map(prod, shapes)), "elements of the first integer input", shapes[0][-1]
    chosen = next((batch for batch in calls if batch.first), None)
    if chosen is not None:
        return sum(batch.first[0] for batch in calls if batch.module == chosen.module and batch.first), "batch size", 0
    inputs = [journal.block(n) for n in journal.numbers() if settled.get(n) == INDEX["inputs"]]
    for block in inputs:
        if block.dtype.startswith(("int", "uint")) and block.shape:
            return prod(block.shape), "elements of the first integer input", block.shape[-1]
    for block in inputs:
        if block.shape:
            return block.shape[0], "batch size", 0
    return None, "", 0
