"""Number formats: how many bits an element takes, and what those bits can hold.

A float of E exponent bits and p significand bits (the leading one is not stored) has the bias 2**(E-1) - 1, the
smallest normal number 2**(1 - bias), the relative step 2**(1 - p) and, unless the top exponent is kept for infinities,
a largest number with that exponent. Sources: IEEE 754-2019 (fp64, fp32, fp16); Micikevicius et al. 2022, "FP8 formats
for deep learning" (e4m3, e5m2); OCP Microscaling Formats 1.0 (fp4 e2m1).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

from torchledger.errors import UsageError


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """One format of numbers.

    Args:
        name: the short name, as in ``bf16``.
        stored_bits: bits of an element in memory: 32 for tf32, of which products read 19.
        exponent_bits: 0 for integers.
        significand_bits: with the leading one that is not stored; for integers all bits but the sign.
        top_exponent: what the largest exponent holds: ``infinities`` (and NaNs), ``one NaN`` or ``numbers``.
    """

    name: str
    stored_bits: int
    exponent_bits: int
    significand_bits: int
    top_exponent: str = "infinities"

    @property
    def is_integer(self) -> bool:
        """Whether it holds whole numbers only."""
        return self.exponent_bits == 0

    @property
    def bits(self) -> int:
        """Bits that the value has: sign, exponent and stored significand.

        >>> FORMATS["tf32"].bits, FORMATS["fp32"].bits, FORMATS["int4"].bits
        (19, 32, 4)
        """
        return self.exponent_bits + self.significand_bits + self.is_integer

    @property
    def _lowest_exponent(self) -> int:
        """The exponent of the smallest normal number."""
        bias: int = 2 ** (self.exponent_bits - 1) - 1
        return 1 - bias

    @property
    def largest(self) -> float:
        """The largest finite number.

        >>> FORMATS["fp8_e4m3"].largest, FORMATS["fp16"].largest, FORMATS["int4"].largest
        (448.0, 65504.0, 7.0)
        """
        if self.is_integer:
            return float(2**self.significand_bits - 1)
        exponent = 2 ** (self.exponent_bits - 1) - (self.top_exponent == "infinities")
        steps = 2**self.significand_bits - 1 - (self.top_exponent == "one NaN")
        return float(Fraction(steps, 2 ** (self.significand_bits - 1)) * Fraction(2) ** exponent)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number that has the full significand; 1 for integers.

        >>> FORMATS["fp8_e4m3"].smallest_normal, FORMATS["fp16"].smallest_normal
        (0.015625, 6.103515625e-05)
        """
        return 1.0 if self.is_integer else 2.0**self._lowest_exponent

    @property
    def relative_step(self) -> float | None:
        """The gap between 1 and the next larger number; None for integers, whose step is 1 everywhere.

        >>> FORMATS["bf16"].relative_step, FORMATS["int8"].relative_step
        (0.0078125, None)
        """
        return None if self.is_integer else 2.0 ** (1 - self.significand_bits)

    def round(self, value: float) -> float:
        """The number of this format nearest to ``value``, ties to even; subnormal numbers are kept.

        Beyond the largest number it is an infinity where the format has one, else the largest number. (Casts to
        fp8_e4m3 do the same in torch 2.13, and gave NaN in 2.9.)

        >>> FORMATS["fp16"].round(1e-8), FORMATS["bf16"].round(1e-8), FORMATS["fp8_e4m3"].round(0.3)
        (0.0, 1.0011717677116394e-08, 0.3125)
        """
        if not math.isfinite(value) or value == 0:
            return value
        exact = Fraction(abs(value))
        exponent = 0 if self.is_integer else max(math.frexp(value)[1] - 1, self._lowest_exponent)
        quantum = Fraction(2) ** (exponent if self.is_integer else exponent + 1 - self.significand_bits)
        rounded = float(round(exact / quantum) * quantum)  # Fraction rounds ties to even
        if rounded > self.largest:
            has_infinity = not self.is_integer and self.top_exponent == "infinities"
            rounded = math.inf if has_infinity else self.largest
        return math.copysign(rounded, value)


FORMATS: Mapping[str, NumberFormat] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            NumberFormat("fp64", 64, 11, 53),
            NumberFormat("fp32", 32, 8, 24),
            NumberFormat("tf32", 32, 8, 11),
            NumberFormat("bf16", 16, 8, 8),
            NumberFormat("fp16", 16, 5, 11),
            NumberFormat("fp8_e4m3", 8, 4, 4, "one NaN"),
            NumberFormat("fp8_e5m2", 8, 5, 3),
            NumberFormat("fp4_e2m1", 4, 2, 2, "numbers"),
            NumberFormat("int8", 8, 0, 7),
            NumberFormat("int4", 4, 0, 3),
        )
    }
)
"""All formats whose numbers are described, by name."""

_ALIASES = {
    "float64": "fp64",
    "double": "fp64",
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}
_OTHER_BITS = {"bool": 8, "uint8": 8, "int16": 16, "int32": 32, "int64": 64}


def element_bits(dtype: object) -> int:
    """Bits that one element of ``dtype`` takes in memory.

    Args:
        dtype: a name of `FORMATS`, one of torch's (``bfloat16``, ``torch.bfloat16``), or a torch dtype itself.

    Raises:
        UsageError: the name is not known; the message lists those that are.

    >>> element_bits("bf16"), element_bits("torch.float32"), element_bits("int4"), element_bits("tf32")
    (16, 32, 4, 32)
    """
    asked = str(dtype).removeprefix("torch.").lower()
    name = _ALIASES.get(asked, asked)
    if name in FORMATS:
        return FORMATS[name].stored_bits
    if name in _OTHER_BITS:
        return _OTHER_BITS[name]
    known = [*FORMATS, *_OTHER_BITS]
    near = difflib.get_close_matches(name, [*known, *_ALIASES], n=2, cutoff=0.6)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"Known are: {', '.join(known)}."
    raise UsageError(f"no dtype named {asked!r} is known. {hint}")


def element_bytes(dtype: object) -> int:
    """Bytes that one element of ``dtype`` takes in memory.

    Raises:
        UsageError: the name is not known, or an element takes less than a byte.

    >>> element_bytes("bf16"), element_bytes("float32")
    (2, 4)
    """
    bits = element_bits(dtype)
    if bits % 8:
        raise UsageError(f"an element of {dtype} takes {bits} bits, less than a byte: give a dtype of whole bytes.")
    return bits // 8


def tensor_bytes(shape: Iterable[int], dtype: object) -> int:
    """Bytes of a contiguous tensor: its elements times their bits, rounded up to a whole byte.

    Args:
        shape: sizes along each axis; ``()`` is one element.
        dtype: ``fp32``, ``bf16``, ``fp16``, ``fp8_e4m3``, ``fp8_e5m2``, ``int8``, ``int4``, ..., or torch's names.

    Raises:
        UsageError: a size is negative or no integer, or the dtype is not known.

    >>> tensor_bytes((12_288, 49_152), "fp32"), tensor_bytes((3, 5), "int4")
    (2415919104, 8)
    """
    sizes = tuple(shape)
    if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in sizes):
        raise UsageError(f"a shape is made of integers of at least 0, not {sizes!r}.")
    return -(-math.prod(sizes) * element_bits(dtype) // 8)
