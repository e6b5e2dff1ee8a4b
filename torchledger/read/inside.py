"""What is said of ops that allocate inside themselves where no audit measured them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torchledger.journal.entries import Journal

PRODUCTS = frozenset(("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"))
"""They convert operands of 16 bits inside themselves, where the processor has no products of that precision."""

MOST_NAMED = 6
"""How many ops one line names; the others are counted."""


def unaudited_lines(allocating: Mapping[str, int], journals: Iterable[Journal]) -> tuple[str, ...]:
    """A line for the ops that allocate inside themselves, and one for the products in 16 bits of the kept steps.

    Args:
        allocating: How often each op that does so was called on the CPU.
        journals: Those of the kept steps; the one with most products in 16 bits speaks for all.

    >>> unaudited_lines({"aten.convolution": 3}, [])[0][:54]
    '3 calls of aten.convolution allocate inside themselves'
    """
    where = "inside themselves on the CPU, which no dispatch shows: Ledger(audit=True) measures it"
    lines = [f"{count_calls(allocating)} allocate {where}"] if allocating else []
    most = max((_low_precision(journal) for journal in journals), key=lambda counts: sum(counts.values()), default={})
    if most:
        lines.append(f"{count_calls(most)} in 16 bits a step may convert their operands {where}")
    return tuple(lines)


def count_calls(counts: Mapping[str, int]) -> str:
    """Calls by name in words, most first.

    >>> count_calls({"aten.mm": 1, "aten.bmm": 1200})
    '1,200 calls of aten.bmm, 1 of aten.mm'
    """
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    named = [f"{n:,} of {name}" for name, n in ordered[:MOST_NAMED]]
    first, n = ordered[0]
    named[0] = f"{n:,} {'call' if n == 1 else 'calls'} of {first}"
    rest = sum(n for _, n in ordered[MOST_NAMED:])
    return ", ".join(named) + (f" and {rest:,} of {len(ordered) - MOST_NAMED} other ops" if rest else "")


def _low_precision(journal: Journal) -> dict[str, int]:
    counts: dict[str, int] = {}
    for _, device, _, _, op, _, dtype, _ in journal.blocks:
        if op in PRODUCTS and device == "cpu" and dtype in ("bfloat16", "float16"):
            counts[op] = counts.get(op, 0) + 1
    return counts
