"""What the tests of a run found, as far as it is told at the run's end: budgets and how much was used, and failures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from torchledger.gate.properties import PREFIX, Property
from torchledger.gate.quantities import QUANTITIES

BROKEN = f"{PREFIX}broken"
"""The property of a failed test that has what it says."""
NEARLY = Fraction(95, 100)
"""A budget of which so much is used is told without being asked for."""

_LONGEST_TEXT = 20_000
_BUDGET = re.compile(r"torchledger\.(?:([0-9]+)\.)?budget\.([a-z_]+)")


@dataclass(frozen=True, slots=True)
class Use:
    """A budget of one test, and what was measured; of several ledgers the one that used most."""

    test_id: str
    key: str
    measured: int
    limit: int

    @property
    def share(self) -> Fraction:
        """How much of the budget was used; of one of 0, all of it or nothing.

        >>> Use("test_a", "peak", 3, 4).share, Use("test_a", "recompute_flops", 0, 0).share
        (Fraction(3, 4), Fraction(0, 1))
        """
        return Fraction(self.measured, self.limit) if self.limit else Fraction(int(self.measured > 0))


@dataclass(frozen=True, slots=True)
class Failure:
    """A test that failed by a budget or a baseline, where it is, and what it says."""

    test_id: str
    file: str
    line: int
    text: str

    @property
    def summary(self) -> str:
        r"""The first line, and how many numbers more there are.

        >>> Failure("test_a", "t.py", 1, "peak 2 B > budget 1 B\nflops 3 > 2\n\nAt the peak").summary
        'peak 2 B > budget 1 B, and 1 more'
        """
        lines = self.text.partition("\n\n")[0].splitlines() or [""]
        return lines[0] + (f", and {len(lines) - 1} more" if len(lines) > 1 else "")

    @property
    def is_of_baseline(self) -> bool:
        """Whether a number is not the committed one, rather than above a limit."""
        return self.text.startswith(("REGRESSION", "WIN", "NEW", "NO-MATCH"))


def encode_budget(limits: Mapping[str, int], number: int = 1) -> Iterator[Property]:
    """The budget that a test's ``number``-th ledger was held against, as properties.

    >>> list(encode_budget({"peak": 8}, 2))
    [('torchledger.2.budget.peak', 8)]
    """
    for key, limit in limits.items():
        yield f"{PREFIX}budget.{key}" if number == 1 else f"{PREFIX}{number}.budget.{key}", limit


def encode_broken(text: str) -> Property:
    """What a failed test says, as a property.

    >>> encode_broken("peak 2 B > budget 1 B")
    ('torchledger.broken', 'peak 2 B > budget 1 B')
    """
    return BROKEN, text[:_LONGEST_TEXT]


def decode_uses(test_id: str, properties: Iterable[Property]) -> list[Use]:
    """The budgets among the properties of a test.

    >>> decode_uses("test_a", [("torchledger.peak_bytes", 6), *encode_budget({"peak": 8, "flops": 0})])
    [Use(test_id='test_a', key='peak', measured=6, limit=8), Use(test_id='test_a', key='flops', measured=0, limit=0)]
    """
    values = {name: value for name, value in properties if isinstance(value, int)}
    uses: dict[str, Use] = {}
    for name, limit in values.items():
        found = _BUDGET.fullmatch(name)
        if found is None or found[2] not in QUANTITIES:
            continue
        key, prefix = found[2], name[: found.start(2)].removesuffix("budget.")
        unit = "_bytes" if QUANTITIES[key].unit == "bytes" else ""
        use = Use(test_id, key, values.get(f"{prefix}{key}{unit}", 0), limit)
        uses[key] = max(uses.get(key, use), use, key=lambda use: use.share)
    return list(uses.values())
