"""Number formats against torch.finfo and torch's own casts."""

from __future__ import annotations

import math
import random

import pytest
import torch

from torchledger.analytic.dtypes import FORMATS, element_bits, element_bytes, tensor_bytes
from torchledger.errors import UsageError

FLOATS = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@pytest.mark.parametrize("name", FLOATS)
def test_limits_are_those_of_torch(name: str) -> None:
    entry, info = FORMATS[name], torch.finfo(FLOATS[name])
    assert (entry.bits, entry.stored_bits) == (info.bits, info.bits)
    assert entry.largest == info.max
    assert entry.smallest_normal == info.smallest_normal
    assert entry.relative_step == info.eps


@pytest.mark.parametrize("name", [name for name in FLOATS if name != "fp64"])
def test_rounding_is_that_of_torch(name: str) -> None:
    entry, rng = FORMATS[name], random.Random(0)
    values = [0.0, -0.0, 1e-8, 448.0, 464.0, 57344.0, 65504.0, 65519.0, 65520.0, 2.0**-9, 2.0**-10, -(2.0**-16) * 1.5]
    values += [rng.uniform(-2, 2) * 2.0 ** rng.randint(-40, 15) for _ in range(3000)]
    values += [1 + k * 2.0**-9 for k in range(16)]  # ties
    for value in torch.tensor(values, dtype=torch.float32).tolist():  # read once, so that torch does not round twice
        if name == "fp8_e4m3" and abs(value) > 448:  # torch changed its mind here
            assert abs(entry.round(value)) == 448
            continue
        expected = torch.tensor(value, dtype=torch.float32).to(FLOATS[name]).double().item()
        assert entry.round(value) == expected, value
        assert math.copysign(1, entry.round(value)) == math.copysign(1, expected)


def test_what_becomes_of_1e_8() -> None:
    assert {name: entry.round(1e-8) for name, entry in FORMATS.items()} == {
        "fp64": 1e-8,
        "fp32": 9.99999993922529e-09,
        "tf32": pytest.approx(1e-8, rel=2**-11),
        "bf16": 1.0011717677116394e-08,
        "fp16": 0,
        "fp8_e4m3": 0,
        "fp8_e5m2": 0,
        "fp4_e2m1": 0,
        "int8": 0,
        "int4": 0,
    }
    assert FORMATS["bf16"].significand_bits == 8


def test_tf32_has_the_range_of_fp32_and_the_steps_of_fp16() -> None:
    tf32, fp32, fp16 = FORMATS["tf32"], FORMATS["fp32"], FORMATS["fp16"]
    assert (tf32.bits, tf32.stored_bits) == (19, 32)
    assert tf32.relative_step == fp16.relative_step
    assert tf32.smallest_normal == fp32.smallest_normal
    assert (torch.tensor(tf32.largest, dtype=torch.float32).view(torch.int32).item() & 0x1FFF) == 0


def test_fp4_by_hand() -> None:
    fp4 = FORMATS["fp4_e2m1"]
    values = sorted({fp4.round(k / 16) for k in range(200)})
    assert values == [0, 0.5, 1, 1.5, 2, 3, 4, 6]  # OCP Microscaling Formats 1.0, table 5
    assert (fp4.largest, fp4.smallest_normal, fp4.round(-100)) == (6, 1, -6)


def test_integers() -> None:
    assert (FORMATS["int8"].largest, FORMATS["int4"].largest) == (127, 7)
    assert [FORMATS["int4"].round(x) for x in (0.5, 1.5, -2.5, 9.0, -9.0)] == [0, 2, -2, 7, -7]
    assert FORMATS["int8"].relative_step is None
    assert (FORMATS["int8"].bits, FORMATS["int4"].bits) == (8, 4)


@pytest.mark.parametrize("name", FORMATS)
def test_infinities_and_nans_pass(name: str) -> None:
    assert FORMATS[name].round(math.inf) == math.inf
    assert math.isnan(FORMATS[name].round(math.nan))


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int64", "int8", "bool"]
)
def test_elements_take_what_they_take_in_torch(dtype: str) -> None:
    real = getattr(torch, dtype)
    for name in (dtype, f"torch.{dtype}", real, dtype.upper()):
        assert element_bytes(name) == real.itemsize
        assert tensor_bytes((3, 5, 7), name) == torch.empty(3, 5, 7, dtype=real).untyped_storage().nbytes()


def test_tensor_bytes() -> None:
    assert tensor_bytes((12_288, 49_152), "fp32") == 2_415_919_104 == 2304 * 2**20
    assert [tensor_bytes((10,), name) for name in ("fp32", "tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2")] == [
        40, 40, 20, 20, 10, 10,
    ]  # fmt: skip
    assert [tensor_bytes((n,), "int4") for n in (0, 1, 2, 3)] == [0, 1, 1, 2]
    assert tensor_bytes((), "fp32") == 4
    assert tensor_bytes(torch.Size([2, 3]), "int8") == 6


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: element_bits("fp33"), "'fp33' is known. Did you mean"),
        (lambda: element_bits("zzz"), "Known are: fp64, fp32"),
        (lambda: element_bytes("int4"), "4 bits, less than a byte"),
        (lambda: tensor_bytes((2, -1), "fp32"), "at least 0"),
        (lambda: tensor_bytes((2.0,), "fp32"), "integers"),
        (lambda: tensor_bytes((True,), "fp32"), "integers"),
    ],
)
def test_what_is_refused(call, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        call()
