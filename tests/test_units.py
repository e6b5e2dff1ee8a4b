"""Bytes, FLOPs and counts as text, and back. Oracle: fractions, and the numbers that hypothesis makes."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchledger.errors import QuantityError
from torchledger.units import (
    format_apart,
    format_bytes,
    format_count,
    format_flops,
    format_seconds,
    format_share,
    parse_bytes,
    parse_count,
    parse_flops,
)

IEC = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50, "EiB": 2**60}
SI = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15, "EB": 10**18}
FLOPS = {"FLOP": 1, "kFLOP": 10**3, "MFLOP": 10**6, "GFLOP": 10**9, "TFLOP": 10**12, "PFLOP": 10**15, "EFLOP": 10**18}
naturals = st.integers(0, 10**21)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 * 2**29, "1.50 GiB"),
        (2**20 - 1, "1.00 MiB"),  # 1023.999 KiB is not printed as 1024.00 KiB
        (2**30 - 2**13, "1023.99 MiB"),
        (5000 * 2**60, "5000.00 EiB"),
        (-1536, "-1.50 KiB"),
    ],
)
def test_format_bytes(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("flops", "text"),
    [(0, "0 FLOP"), (999, "999 FLOP"), (1000, "1.00 kFLOP"), (999_994, "999.99 kFLOP"), (999_995, "1.00 MFLOP")],
)
def test_format_flops(flops: int, text: str) -> None:
    assert format_flops(flops) == text


def test_signs() -> None:
    assert [format_bytes(n, signed=True) for n in (1, 0, -1)] == ["+1 B", "0 B", "-1 B"]
    assert [format_count(n, signed=True) for n in (1000, 0, -1000)] == ["+1,000", "0", "-1,000"]


@given(naturals)
def test_printed_bytes_are_within_half_of_the_last_digit(n: int) -> None:
    text = format_bytes(n)
    unit = IEC[text.split()[1]]
    assert abs(parse_bytes(text) - n) <= Fraction(unit, 200) + Fraction(1, 2)
    assert unit == IEC["EiB"] or parse_bytes(text) < 1024 * unit


@given(naturals)
def test_printed_flops_are_within_half_of_the_last_digit(n: int) -> None:
    text = format_flops(n)
    assert abs(parse_flops(text) - n) <= Fraction({"ZFLOP": 10**21, **FLOPS}[text.split()[1]], 200)


@given(naturals, st.sampled_from(sorted(IEC | SI)), st.sampled_from(["", " "]))
def test_whole_bytes_are_read_exactly(n: int, unit: str, space: str) -> None:
    assert parse_bytes(f"{n}{space}{unit}") == n * (IEC | SI)[unit]


@given(st.integers(0, 10**6), st.integers(0, 1023), st.sampled_from(sorted(set(IEC) - {"B"})))
def test_fractions_of_a_prefix_are_rounded_to_the_nearest_byte(whole: int, part: int, unit: str) -> None:
    exact = Fraction(f"{whole}.{part:04}") * IEC[unit]
    got = parse_bytes(f"{whole}.{part:04} {unit}")
    assert isinstance(got, int)
    assert abs(got - exact) <= Fraction(1, 2)


@given(naturals, st.sampled_from(sorted(FLOPS)))
def test_whole_flops_are_read_exactly(n: int, unit: str) -> None:
    assert parse_flops(f"{n} {unit}") == n * FLOPS[unit]


@given(naturals)
def test_plain_integers_are_read_as_they_are(n: int) -> None:
    for parse in (parse_bytes, parse_flops, parse_count):
        assert parse(n) == parse(str(n)) == n


def test_exact_forms() -> None:
    assert parse_bytes("2GiB") == 2**31
    assert parse_bytes("1.5 GiB") == 1_610_612_736
    assert parse_bytes("2GB") == 2_000_000_000
    assert parse_bytes("80GB") == 80 * 10**9
    assert parse_bytes("0.1 KiB") == 102
    assert parse_bytes("0.00048828125 KiB") == 1  # half a byte goes up
    assert parse_flops("3 TFLOP") == parse_flops("3e12") == parse_flops(3e12) == 3 * 10**12
    assert parse_flops("3.1e+2") == 310
    assert parse_count("70B") == parse_count("70e9") == parse_count(70e9) == 70 * 10**9
    assert parse_count("15T") == 15 * 10**12
    assert parse_count("1.5B") == 1_500_000_000
    assert parse_count(" 12 ") == 12


BAD = [
    "2G", "2Gb", "10%", "24 MBananas", "-1", "nan", "inf", "2 GiB please", "", " ", "GiB", "2 gib", "2GIB", "1,000",
    "1_000", "0x10", "1.5", ".5 GiB", "5. GiB", "2  GiB", "2\tGiB", "2\nGiB", "2GiB\n", "٣ GiB", "1e400", "1e999999999",
    "9" * 50, "1/2 GiB", "+1", "2GiB/s", "1e3 GiB",
    True, False, None, -1, 1.5, float("nan"), float("inf"), [], b"1", 1j,
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=repr)
@pytest.mark.parametrize("parse", [parse_bytes, parse_flops, parse_count])
def test_anything_else_is_refused_with_the_good_forms(parse: Any, bad: Any) -> None:
    with pytest.raises(QuantityError, match=r"cannot read .* write '.*plain integer") as refused:
        parse(bad)
    assert len(str(refused.value)) < 260
    assert "\n" not in str(refused.value)


def test_forms_of_one_are_not_those_of_another() -> None:
    for parse, bad in ((parse_bytes, "3e12"), (parse_bytes, 2e9), (parse_bytes, "1 FLOP"), (parse_flops, "3 TFLOPS")):
        with pytest.raises(QuantityError):
            parse(bad)  # type: ignore[operator]
    for bad in ("3 TFLOP/s", "3 TFLOPs", "3T", "1.5 FLOP", "2 GiB"):
        with pytest.raises(QuantityError):
            parse_flops(bad)
    for bad in ("70 GB", "70b", "0.5", "1.5e0"):
        with pytest.raises(QuantityError):
            parse_count(bad)


@given(naturals, naturals, st.sampled_from(["bytes", "flops"]))
def test_numbers_that_differ_are_printed_apart(a: int, b: int, unit: Any) -> None:
    first, second = format_apart(a, b, unit)
    assert (first == second) == (a == b)
    assert first.split()[-1] == second.split()[-1]


def test_apart_at_the_edge() -> None:
    assert format_apart(2**31, 2**31 + 2**23) == ("2.00 GiB", "2.01 GiB")
    assert format_apart(10**12, 10**12 + 10**6, "flops") == ("1.000000 TFLOP", "1.000001 TFLOP")
    assert format_apart(-(2**30), 2**30) == ("-1.00 GiB", "1.00 GiB")
    assert format_apart(0, 0) == ("0 B", "0 B")
    assert format_apart(5, 5) == ("5 B", "5 B")


def test_shares_and_seconds() -> None:
    assert format_share(-1, 3) == "-33.3 %"
    assert format_share(-1, 10**6) == ">-0.1 %"
    assert format_share(2, 3) == "66.7 %"
    assert [format_seconds(s) for s in (1234.5, 1, 0.999, 0.0005, 1e-9)] == [
        "1,234 s",
        "1 s",
        "999 ms",
        "500 us",
        "0.001 us",
    ]
