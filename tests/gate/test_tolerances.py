"""Tolerances: what can be read, what is refused, and how much room each leaves."""

from __future__ import annotations

from fractions import Fraction

import pytest

from torchledger.errors import QuantityError, UsageError
from torchledger.gate.quantities import find_quantity
from torchledger.gate.tolerances import EXACT, Tolerance, default_tolerance, parse_keyed_tolerance, parse_tolerance


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("peak=2%", ("peak", Tolerance(Fraction(1, 50)))),
        ("peak= 0.5 %", ("peak", Tolerance(Fraction(1, 200)))),
        ("activations=10MiB", ("activations", Tolerance(absolute=10 * 2**20))),
        ("activations=512 B", ("activations", Tolerance(absolute=512))),
        ("flops=3 GFLOP", ("flops", Tolerance(absolute=3 * 10**9))),
        ("uncounted_ops=3", ("uncounted_ops", Tolerance(absolute=3))),
        ("peak=0", ("peak", EXACT)),
        ("flops=0%", ("flops", EXACT)),
    ],
)
def test_good_forms(text: str, expected: tuple[str, Tolerance]) -> None:
    assert parse_keyed_tolerance(text) == expected


@pytest.mark.parametrize(
    "value",
    [
        "2",
        "2G",
        "2Gb",
        "10",
        "-1",
        "-2%",
        "%",
        "",
        "abc",
        "24 MBananas",
        "2%%",
        "1e3",
        "nan%",
        "inf",
        "10MiB extra",
        "２%",  # noqa: RUF001 - a digit, but not one that we read
    ],
)
def test_bad_values_list_the_good_forms(value: str) -> None:
    with pytest.raises(QuantityError, match=r"write '2%', '10MiB' or '0'"):
        parse_tolerance(find_quantity("peak"), value)


@pytest.mark.parametrize("value", ["3MiB", "1.5", "2 TFLOPS"])
def test_units_are_those_of_the_key(value: str) -> None:
    with pytest.raises(QuantityError, match="3 GFLOP"):
        parse_tolerance(find_quantity("flops"), value)


def test_a_key_is_needed_and_known() -> None:
    with pytest.raises(UsageError, match="KEY=2%"):
        parse_keyed_tolerance("2%")
    with pytest.raises(UsageError, match="did you mean 'peak'"):
        parse_keyed_tolerance("peek=2%")
    with pytest.raises(UsageError, match="there is no quantity ''"):
        parse_keyed_tolerance("=2%")


def test_room_is_the_larger_of_both_and_never_a_float() -> None:
    assert Tolerance(Fraction(1, 100), 5).room(100) == 5
    assert Tolerance(Fraction(1, 100), 5).room(1000) == 10
    assert Tolerance(Fraction(1, 10)).room(-95) == 9
    huge = 10**25 + 1
    assert Tolerance(Fraction(1)).room(huge) == huge


def test_defaults_are_exact_where_numbers_are_deterministic() -> None:
    for key, exact, found in (
        ("peak", True, True),
        ("reserved", True, True),
        ("reserved", False, False),
        ("activations", False, False),
        ("parameters", False, True),
        ("inputs", False, True),
        ("flops", False, True),
    ):
        assert (default_tolerance(find_quantity(key), exact=exact) == EXACT) is found, key
