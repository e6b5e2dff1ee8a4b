"""Values of options, read the same way in every command."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torchledger.errors import QuantityError, UsageError
from torchledger.units import parse_count

T = TypeVar("T")


def read_count(option: str, text: str) -> int:
    """The count of at least 1 that an option was given.

    Raises:
        QuantityError: it cannot be read.
        UsageError: it is 0.

    >>> read_count("--params", "70B")
    70000000000
    """
    count = read_option(option, text, parse_count)
    if count < 1:
        raise UsageError(f"{option} must be at least 1, not {text}.")
    return count


def read_option(option: str, text: str, parse: Callable[[str], T]) -> T:
    """What an option was given, read by ``parse``; the option's name stands before what could not be read.

    Raises:
        QuantityError: it cannot be read.

    >>> read_option("--params", "1.5T", parse_count)
    1500000000000
    """
    try:
        return parse(text)
    except QuantityError as error:
        raise QuantityError(f"{option}: {error.message}") from None
