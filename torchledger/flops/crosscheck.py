"""torchledger beside torch's own counter and fvcore, op by op, with the reason for each difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchledger.flops.borrowing import borrow
from torchledger.flops.fvcore_posts import Posted, post_fvcore
from torchledger.flops.opinions import (
    BACKWARD,
    FORWARD,
    FvcoreCount,
    OurCount,
    Product,
    TorchCount,
    count_with_fvcore,
    count_with_ours,
    count_with_torch,
)
from torchledger.render.names import clean
from torchledger.render.tables import Column, Facts, Section, Table
from torchledger.render.text import page_width, render_sections
from torchledger.units import format_count


class CrossCheckRow(NamedTuple):
    """FLOPs of one op in one phase, as three counters have them.

    ``op`` is the packet (``aten.mm``); an op that only fvcore counts has the name that fvcore gives it. None: that
    counter says nothing here. ``why`` gives the reasons for what differs, and is empty where nothing does.
    """

    phase: str
    op: str
    ours: int
    torch: int | None
    fvcore: int | None
    why: str


@dataclass(frozen=True)
class CrossCheck:
    """What three counters say of one call of a model, in FLOP (1 multiply-add = 2); prints as a table.

    ``rows`` add up to the totals. ``torch_failure`` and ``fvcore_failure`` say why a counter says nothing; they are
    empty where it does. ``uncounted`` are the ops of unknown cost with their calls and ``int_ops`` the integer
    products, neither of them in any row of ours.
    """

    rows: tuple[CrossCheckRow, ...]
    torch_failure: str = ""
    fvcore_failure: str = ""
    uncounted: dict[str, int] = field(default_factory=dict)
    int_ops: int = 0

    @property
    def ours(self) -> int:
        """FLOPs that torchledger counts."""
        return sum(row.ours for row in self.rows)

    @property
    def torch(self) -> int | None:
        """FLOPs that ``torch.utils.flop_counter`` counts; None where it fails."""
        return None if self.torch_failure else sum(row.torch or 0 for row in self.rows)

    @property
    def fvcore(self) -> int | None:
        """Twice the multiply-adds that fvcore counts in the forward; None where it is missing or fails."""
        return None if self.fvcore_failure else sum(row.fvcore or 0 for row in self.rows)

    @property
    def differences(self) -> tuple[CrossCheckRow, ...]:
        """The rows in which not all counters agree."""
        return tuple(row for row in self.rows if row.why)

    def __str__(self) -> str:
        return render_sections(self._sections(), page_width())

    def _sections(self) -> Iterator[Section]:
        phases = list(dict.fromkeys(row.phase for row in self.rows)) or [FORWARD]
        lines = [_cells(row.phase, row.op, row.ours, row.torch, row.fvcore) for row in self.rows]
        for phase in phases:
            rows = [row for row in self.rows if row.phase == phase]
            torch = None if self.torch_failure else sum(row.torch or 0 for row in rows)
            fvcore = None if self.fvcore_failure or phase != FORWARD else sum(row.fvcore or 0 for row in rows)
            lines.append(_cells(phase, "total", sum(row.ours for row in rows), torch, fvcore))
        skip = 0 if len(phases) > 1 else 1
        columns = (Column("phase", "text"), Column("op", "name"), Column("ours"), Column("torch"), Column("fvcore"))
        title = "FLOPs of one call by three counters (1 multiply-add = 2 FLOP)"
        yield Table(title, columns[skip:], tuple(line[skip:] for line in lines), n_totals=len(phases))
        why = tuple((row.phase, clean(f"{row.op}: {row.why}")) for row in self.differences)
        if why:
            yield Facts("Why they differ", why)
        notes = [("note", failure) for failure in (self.torch_failure, self.fvcore_failure) if failure]
        if BACKWARD in phases and not self.fvcore_failure:
            notes.append(("note", "fvcore traces the forward only"))
        notes += [("uncounted", f"{op}, {_calls(n)}: no formula, and in no total") for op, n in self.uncounted.items()]
        if self.int_ops:
            notes.append(("int-ops", f"{format_count(self.int_ops)} of integer products, in no total of ours"))
        if notes:
            yield Facts("Notes", tuple((key, clean(text)) for key, text in notes))


def crosscheck(model: Callable[..., Any], *inputs: Any, backward: bool = False, **kwargs: Any) -> CrossCheck:
    """The FLOPs of one call of a model by torchledger, by torch's own counter and by fvcore, op by op.

    The model runs once under our formulas and once under ``torch.utils.flop_counter.FlopCounterMode``, and is traced
    for fvcore's ``FlopCountAnalysis``, whose multiply-adds are taken twice. It runs on copies of its parameters,
    buffers and inputs, from the same random numbers each time and without `torch.compile`; afterwards its attributes
    and the random generators are put back. So its values, mode, statistics and gradients are what they were.

    Args:
        model: A module, or a function of tensors.
        *inputs: What it is called with.
        backward: Run a backward too: from the output's ``loss``, if it has one, else from all outputs that require a
            gradient. fvcore knows the forward only.
        **kwargs: What it is called with, by name.

    Raises:
        UsageError: ``model`` is nothing to call, a TorchScript module or a lazy one without shapes; or ``backward``
            was asked for and no output requires a gradient.

    >>> import torch
    >>> check = crosscheck(torch.nn.Linear(16, 4), torch.ones(8, 16))
    >>> check.ours, check.torch  # 2 * rows * in * out
    (1024, 1024)
    """
    subject = borrow(model, inputs, kwargs)
    ours = count_with_ours(subject, backward)
    theirs = count_with_torch(subject, backward)
    fvcore = count_with_fvcore(subject)
    rows = _rows(FORWARD, ours, theirs, None if fvcore.failure else fvcore)
    if backward:
        rows += _rows(BACKWARD, ours, theirs, None)
    return CrossCheck(tuple(rows), theirs.failure, fvcore.failure, dict(ours.uncounted), ours.int_ops)


def _rows(phase: str, ours: OurCount, theirs: TorchCount, fvcore: FvcoreCount | None) -> list[CrossCheckRow]:
    products: dict[str, list[Product]] = {}
    for product in ours.products:
        if product.phase == phase:
            products.setdefault(product.op, []).append(product)
    torch_flops = theirs.by_phase.get(phase, Counter())
    posted = post_fvcore(fvcore) if fvcore else Posted(Counter(), {})
    traced = Counter[str]()
    for product in fvcore.products if fvcore else ():
        traced[product.op] += product.flops
    rows = []
    for op in {**products, **torch_flops, **posted.flops}:
        n = sum(product.flops for product in products.get(op, ()))
        why = []
        if not theirs.failure and torch_flops[op] != n:
            why += _why_torch(products.get(op, []), ours, theirs, torch_flops[op] > n)
        if fvcore and posted.flops[op] != n:
            why += _why_fvcore(n, traced[op], posted.reasons.get(op, Counter()))
        if n or torch_flops[op] or posted.flops[op]:
            of_torch = None if theirs.failure else torch_flops[op]
            of_fvcore = posted.flops[op] if fvcore else None
            rows.append(CrossCheckRow(phase, op, n, of_torch, of_fvcore, "; ".join(why)))
    return sorted(rows, key=lambda row: (-max(row.ours, row.torch or 0, row.fvcore or 0), row.op))


_TORCH_READS_WRONGLY = {
    "integer": "torch counts integer products, which are apart here, as int-ops",
    "declared": "its formula is one that was declared with torchledger.formula",
    "complex": "torch counts a complex product as a real one, a quarter of it",
    "sparse": "torch counts a sparse operand as if it were dense",
    "grouped": "torch counts the weight's gradient of a grouped convolution once for each group",
    "layout": "torch takes (B, S, H, D) for (B, H, S, D)",
}


def _why_torch(products: list[Product], ours: OurCount, theirs: TorchCount, more: bool) -> list[str]:
    """Why torch's counter has another number for the op that ran these products; ``more``: a higher one."""
    if products and products[0].op not in theirs.known:
        return [f"torch has no formula for it ({_calls(len(products))})"]
    calls = Counter(trait for product in products for trait in product.traits)
    reasons = [f"{text} ({_calls(calls[trait])})" for trait, text in _TORCH_READS_WRONGLY.items() if calls[trait]]
    if more and not reasons and ours.branches:
        reasons.append("torch runs both branches of torch.cond, whichever is taken")
    return reasons or ["torch's formula gives another number, for a reason that is not known"]


def _why_fvcore(ours: int, traced: int, calls: Counter[str]) -> list[str]:
    reasons = [f"{text} ({_calls(n)})" for text, n in calls.items()]
    if traced != ours:
        n = format_count(traced)
        reasons.append(f"while it is traced, the model runs {n} FLOP of this op: other code, or other random numbers")
    return reasons or ["fvcore's formula gives another number, for a reason that is not known"]


def _cells(phase: str, op: str, *numbers: int | None) -> tuple[str, ...]:
    return (phase, clean(op), *("N/A" if n is None else format_count(n) for n in numbers))


def _calls(n: int) -> str:
    return f"{format_count(n)} call{'' if n == 1 else 's'}"
