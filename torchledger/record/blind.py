"""What ran and was not seen: how often, by kind, in words that say what it leaves out and what to do."""

from __future__ import annotations

from collections.abc import Mapping

INSIDE, LOW_PRECISION = "inside", "low precision"

KINDS: Mapping[str, str] = {
    INSIDE: "{calls} allocate inside themselves on the CPU, which no dispatch shows: Ledger(audit=True) measures it",
    LOW_PRECISION: (
        "{calls} in 16 bits a step may convert their operands inside themselves on the CPU, which no dispatch shows: "
        "Ledger(audit=True) measures it"
    ),
}
"""By kind, in the order of the lines: what is said of it. ``{calls}`` is what was noted, with how often."""

MEASURED = frozenset((INSIDE, LOW_PRECISION))
"""The kinds that an audit measures."""

MOST_NAMED = 6
"""How many things one line names; the others are counted."""


class BlindSpots:
    """The blind spots of one ledger, over all its steps.

    >>> blind = BlindSpots()
    >>> blind.note(INSIDE, "aten.convolution", 2)
    >>> blind.note(INSIDE, "aten.convolution")
    >>> blind.lines()[0][:27]
    '3 calls of aten.convolution'
    """

    def __init__(self) -> None:
        self.counts: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
        """By kind: how often each thing was noted."""

    def note(self, kind: str, what: str, calls: int = 1) -> None:
        """Note that something of a kind in `KINDS` ran, so often."""
        counts = self.counts[kind]
        counts[what] = counts.get(what, 0) + calls

    def lines(self, *, leave_out: frozenset[str] = frozenset()) -> tuple[str, ...]:
        """A line for each kind that was noted, but for those to be left out."""
        return tuple(
            KINDS[kind].format(calls=count_calls(counts))
            for kind, counts in self.counts.items()
            if counts and kind not in leave_out
        )


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
