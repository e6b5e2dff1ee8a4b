"""How far a number may lie from the one that it is held against."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from torchledger.errors import QuantityError, UsageError
from torchledger.gate.quantities import Quantity, find_quantity

_PERCENT = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,12})?) ?%")
_ZERO = re.compile(r"0(?:\.0+)?")
_ABSOLUTE_FORMS = {"bytes": "'10MiB'", "flops": "'3 GFLOP'", "count": "'3'"}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The larger of a share of the number that is held against (``relative``) and of a floor (``absolute``)."""

    relative: Fraction = Fraction(0)
    absolute: int = 0

    def room(self, base: int) -> int:
        """How far from ``base`` a number may lie, rounded down.

        >>> Tolerance(Fraction(2, 100), 10).room(1000), Tolerance(Fraction(2, 100), 10).room(5)
        (20, 10)
        """
        return max(int(abs(base) * self.relative), self.absolute)


EXACT = Tolerance()

# Allocators round, and libraries choose kernels as they find the machine.
_ON_ACCELERATORS = Tolerance(Fraction(1, 100), 2**20)


def default_tolerance(quantity: Quantity, *, exact: bool) -> Tolerance:
    """None on machines that are ``exact``, and for what the program decides; for all else 1 % or 1 MiB.

    >>> [default_tolerance(find_quantity(key), exact=False).absolute for key in ("flops", "optimizer_state", "peak")]
    [0, 0, 1048576]
    >>> default_tolerance(find_quantity("peak"), exact=True) == EXACT
    True
    """
    return EXACT if exact or quantity.depends_on in ("program", "placement") else _ON_ACCELERATORS


def parse_tolerance(quantity: Quantity, text: str) -> Tolerance:
    """The tolerance that ``text`` names: a percentage, or an amount in the quantity's unit.

    Raises:
        QuantityError: it is neither, with the forms that can be read.

    >>> parse_tolerance(find_quantity("peak"), "2%") == Tolerance(relative=Fraction(2, 100))
    True
    >>> parse_tolerance(find_quantity("peak"), "10MiB").absolute
    10485760
    """
    words = text.strip(" ")
    percent = _PERCENT.fullmatch(words)
    if percent:
        return Tolerance(relative=Fraction(percent[1]) / 100)
    if _ZERO.fullmatch(words):
        return EXACT
    # A bare number might be meant as a percentage.
    if quantity.unit == "count" or any(c.isalpha() for c in words):
        try:
            return Tolerance(absolute=quantity.parse(words))
        except QuantityError:
            pass
    shown = repr(text if len(text) <= 60 else text[:57] + "...")
    raise QuantityError(
        f"cannot read {shown} as a tolerance of {quantity.key}: write '2%', {_ABSOLUTE_FORMS[quantity.unit]} or '0'."
    )


def parse_keyed_tolerance(text: str) -> tuple[str, Tolerance]:
    """The key and the tolerance of ``KEY=2%``, ``KEY=10MiB`` or ``KEY=0``.

    Raises:
        UsageError: it is not of that form, or there is no such quantity.
        QuantityError: the tolerance cannot be read.

    >>> parse_keyed_tolerance("activations=0")
    ('activations', Tolerance(relative=Fraction(0, 1), absolute=0))
    >>> parse_keyed_tolerance("2%")
    Traceback (most recent call last):
    torchledger.errors.UsageError: cannot read '2%' as a tolerance: write KEY=2%, as in 'peak=2%' or 'peak=10MiB'...
    """
    key, separator, value = text.partition("=")
    if not separator:
        shown = repr(text if len(text) <= 60 else text[:57] + "...")
        raise UsageError(f"cannot read {shown} as a tolerance: write KEY=2%, as in 'peak=2%' or 'peak=10MiB'.")
    quantity = find_quantity(key.strip(" "))
    return quantity.key, parse_tolerance(quantity, value)
