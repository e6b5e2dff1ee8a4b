"""Bytes, FLOPs and counts as text, and back.

Bytes are printed in IEC units (``GiB`` = 2**30) and FLOPs in SI units (``TFLOP`` = 10**12), from exact integers: no
number passes through a float. Reading is strict, since ``2G`` and ``2Gb`` mean different things to different people.
"""

from __future__ import annotations

import operator
import re
from fractions import Fraction
from typing import Literal, SupportsIndex

from torchledger.errors import QuantityError

_IEC = tuple((1024**power, name) for power, name in enumerate(("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")))
_SI_BYTES = tuple((1000**power, name) for power, name in enumerate(("kB", "MB", "GB", "TB", "PB", "EB"), start=1))
_SI_FLOPS = tuple(
    (1000**power, name)
    for power, name in enumerate(("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP", "YFLOP"))
)
_SCALES = {"bytes": _IEC, "flops": _SI_FLOPS}

_BYTE_UNITS = {name: factor for factor, name in _IEC + _SI_BYTES} | {"KB": 1000}
_FLOP_UNITS = {name: factor for factor, name in _SI_FLOPS}
_COUNT_UNITS = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

_BYTE_FORMS = "'2GiB', '1.5 GiB', '2GB' (2,000,000,000 bytes) or a plain integer of bytes"
_FLOP_FORMS = "'3 TFLOP', '250 GFLOP', '3e12' or a plain integer of FLOP"
_COUNT_FORMS = "'70B', '1.5T', '350M', '70e9' or a plain integer"

_QUANTITY = re.compile(r"([0-9]{1,40}(?:\.[0-9]{1,40})?)(?:e\+?([0-9]{1,2})| ?([A-Za-z]+))?")


def format_bytes(nbytes: int, *, signed: bool = False) -> str:
    """``nbytes`` in IEC units with two decimals; ``signed`` writes the plus of a difference.

    >>> format_bytes(1_610_612_736), format_bytes(512), format_bytes(-2048), format_bytes(2048, signed=True)
    ('1.50 GiB', '512 B', '-2.00 KiB', '+2.00 KiB')
    """
    return _format_in(nbytes, _IEC, signed=signed)


def format_flops(flops: int, *, signed: bool = False) -> str:
    """``flops`` (1 multiply-add = 2) in SI units with two decimals.

    >>> format_flops(3_120_000_000_000), format_flops(999), format_flops(999_999)
    ('3.12 TFLOP', '999 FLOP', '1.00 MFLOP')
    """
    return _format_in(flops, _SI_FLOPS, signed=signed)


def format_count(n: int, *, signed: bool = False) -> str:
    """``n``, exact, with thousands separators.

    >>> format_count(1234567), format_count(5, signed=True)
    ('1,234,567', '+5')
    """
    return _sign(n, signed) + f"{abs(n):,}"


def format_number(n: int, noun: str) -> str:
    """``n`` of something in words: one is one, and all else are several.

    >>> format_number(1, "step"), format_number(1200, "block"), format_number(0, "entry")
    ('1 step', '1,200 blocks', '0 entries')
    """
    several = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{format_count(n)} {noun if n == 1 else several}"


def format_share(part: int, whole: int) -> str:
    """``part`` of ``whole`` in percent with one decimal; empty where the whole is 0.

    >>> format_share(1, 3), format_share(0, 7), format_share(5, 0), format_share(1, 100_000)
    ('33.3 %', '0.0 %', '', '<0.1 %')
    """
    if whole == 0:
        return ""
    share = Fraction(part, whole)
    text = _fixed(abs(share) * 100, 1)
    if share and text == "0.0":
        return "<0.1 %" if share > 0 else ">-0.1 %"
    return f"{'-' if share < 0 else ''}{text} %"


def format_seconds(seconds: float) -> str:
    """``seconds`` with three significant digits, in the unit that suits them.

    >>> format_seconds(0.01234), format_seconds(12.3456), format_seconds(2e-6), format_seconds(0)
    ('12.3 ms', '12.3 s', '2 us', '0 s')
    """
    if seconds == 0:
        return "0 s"
    factor, unit = next(((f, u) for f, u in ((1, "s"), (1e3, "ms")) if seconds * f >= 1), (1e6, "us"))
    scaled = seconds * factor
    return f"{scaled:,.0f} {unit}" if scaled >= 1000 else f"{scaled:.3g} {unit}"


def format_apart(first: int, second: int, unit: Literal["bytes", "flops"] = "bytes") -> tuple[str, str]:
    """Two numbers in one unit, with as many digits as it takes for different numbers to look different.

    Numbers that differ only beyond the sixth decimal are printed as exact integers.

    >>> format_apart(2**31, 2**31 + 2**30)
    ('2.00 GiB', '3.00 GiB')
    >>> format_apart(2**31, 2**31 + 2**20)
    ('2.000 GiB', '2.001 GiB')
    >>> format_apart(2**31, 2**31 + 1)
    ('2,147,483,648 B', '2,147,483,649 B')
    """
    scale = _SCALES[unit]
    largest = max(abs(first), abs(second))
    factor, name = next(((f, n) for f, n in reversed(scale) if largest >= f), scale[0])
    for decimals in range(2, 7) if factor > 1 else ():
        texts = [_sign(n, False) + _fixed(Fraction(abs(n), factor), decimals) for n in (first, second)]
        if first == second or texts[0] != texts[1]:
            return f"{texts[0]} {name}", f"{texts[1]} {name}"
    return f"{first:,} {scale[0][1]}", f"{second:,} {scale[0][1]}"


def format_against(first: int, second: int, unit: Literal["bytes", "flops"] = "bytes") -> tuple[str, str]:
    """Two numbers as `format_apart` gives them; one more than ten times the other is in a unit of its own.

    In that unit the other would lose its digits, or be 0.00.

    >>> format_against(2**31, 2**31 + 2**30), format_against(6 * 2**30, 2**10)
    (('2.00 GiB', '3.00 GiB'), ('6.00 GiB', '1.00 KiB'))
    """
    smallest, largest = sorted((abs(first), abs(second)))
    if 0 < 10 * smallest < largest:
        return _format_in(first, _SCALES[unit]), _format_in(second, _SCALES[unit])
    return format_apart(first, second, unit)


def format_gap(measured: int, other: int, unit: Literal["bytes", "flops"] = "bytes") -> tuple[str, str, str]:
    """Two numbers as `format_against` gives them, and in the same unit, if it is one, how much the first has more.

    >>> format_gap(2_480_343_613, 2**31)
    ('2.31 GiB', '2.00 GiB', '+0.31 GiB')
    >>> format_gap(5, 8, "flops")
    ('5 FLOP', '8 FLOP', '-3 FLOP')
    """
    first, second = format_against(measured, other, unit)
    digits, _, name = first.partition(" ")
    if name != second.partition(" ")[2]:
        return first, second, _format_in(measured - other, _SCALES[unit], signed=True)
    decimals = len(digits.partition(".")[2])
    factor = next(f for f, n in _SCALES[unit] if n == name)
    gap = Fraction(abs(measured - other), factor)
    text = _fixed(gap, decimals) if decimals else f"{measured - other:,}".lstrip("-")
    return first, second, f"{_sign(measured - other, True)}{text} {name}"


def parse_bytes(size: str | SupportsIndex) -> int:
    """The bytes that ``size`` names: IEC units are powers of 1024, SI units powers of 1000.

    The arithmetic is exact. With a prefix a fraction of a byte is rounded to the nearest byte, halves up
    (``"0.3 KiB"`` is 307); without one it is refused.

    Raises:
        QuantityError: anything else, with the forms that can be read.

    >>> parse_bytes("1.5 GiB"), parse_bytes("2GB"), parse_bytes("4096"), parse_bytes(4096)
    (1610612736, 2000000000, 4096, 4096)
    """
    return _parse(size, "a size", _BYTE_UNITS, _BYTE_FORMS, exponents=False)


def parse_flops(flops: str | float | SupportsIndex) -> int:
    """The FLOPs (1 multiply-add = 2) that ``flops`` names; a float must be a whole number.

    Raises:
        QuantityError: anything else, with the forms that can be read.

    >>> parse_flops("3 TFLOP"), parse_flops("3e12"), parse_flops(5)
    (3000000000000, 3000000000000, 5)
    """
    return _parse(flops, "a number of FLOPs", _FLOP_UNITS, _FLOP_FORMS)


def parse_count(count: str | float | SupportsIndex) -> int:
    """The number of parameters or tokens that ``count`` names; a float must be a whole number.

    Raises:
        QuantityError: anything else, with the forms that can be read.

    >>> parse_count("70B"), parse_count("1.5T"), parse_count("70e9"), parse_count(12)
    (70000000000, 1500000000000, 70000000000, 12)
    """
    return _parse(count, "a count", _COUNT_UNITS, _COUNT_FORMS)


def _parse(value: object, what: str, units: dict[str, int], forms: str, *, exponents: bool = True) -> int:
    error = QuantityError(f"cannot read {show_value(value)} as {what}: write {forms}.")
    if isinstance(value, bool):
        raise error
    if not isinstance(value, str):
        if exponents and isinstance(value, float) and value.is_integer():
            value = int(value)
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except Exception:  # whatever somebody's own class raises, it is no number
            raise error from None
        if number < 0:
            raise error
        return number
    match = _QUANTITY.fullmatch(value.strip(" "))
    if match is None:
        raise error
    digits, exponent, unit = match.groups()
    if exponent is not None and not exponents:
        raise error
    factor = 10 ** int(exponent) if exponent is not None else units.get(unit or "", 0 if unit else 1)
    exact = Fraction(digits) * factor
    if factor == 0 or (exact.denominator != 1 and (exponent is not None or factor == 1)):
        raise error
    return _round_half_up(exact)


def show_value(value: object) -> str:
    """A value as a message shows it: short, on one line, and never an error of its own.

    >>> show_value("2G"), show_value(10**5000)
    ("'2G'", 'int')
    """
    try:
        text = repr(value)
    except Exception:  # an integer of more digits than Python prints, or somebody's own class
        return type(value).__name__
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 60 else text[:57] + "..."


def _sign(n: int, signed: bool) -> str:
    return "-" if n < 0 else "+" if signed and n > 0 else ""


def _format_in(n: int, scale: tuple[tuple[int, str], ...], *, signed: bool = False) -> str:
    return _sign(n, signed) + _format_scaled(abs(n), scale)


def _format_scaled(n: int, scale: tuple[tuple[int, str], ...]) -> str:
    """``n >= 0`` in the largest unit of ``scale`` in which it is at least 1, also after rounding."""
    if n < scale[1][0]:
        return f"{n} {scale[0][1]}"
    base = scale[1][0]
    power = next(i for i in reversed(range(len(scale))) if n >= scale[i][0])
    if power + 1 < len(scale) and _round_half_up(Fraction(n * 100, scale[power][0])) >= base * 100:
        power += 1
    return f"{_fixed(Fraction(n, scale[power][0]), 2)} {scale[power][1]}"


def _fixed(value: Fraction, decimals: int) -> str:
    """``value >= 0`` with so many decimals, halves rounded up."""
    whole, part = divmod(_round_half_up(value * 10**decimals), 10**decimals)
    return f"{whole}.{part:0{decimals}d}"


def _round_half_up(value: Fraction) -> int:
    return (2 * value.numerator + value.denominator) // (2 * value.denominator)
