"""MFU and HFU against divisions by hand."""

from __future__ import annotations

import math

import pytest

from torchledger.accelerators import find_accelerator
from torchledger.analytic.utilization import hfu, mfu
from torchledger.errors import UnknownAcceleratorError, UsageError


def test_mfu_is_a_division() -> None:
    assert mfu(989.5e12, 1.0, accelerator="h100-sxm", dtype="bf16") == 1.0
    assert mfu(989.5e12, 4.0, accelerator="h100-sxm", dtype="bf16") == 0.25
    assert mfu(989.5e12, 1.0, accelerator="h100-sxm", dtype="bf16", devices=8) == 0.125


def test_days_at_a_given_mfu_give_that_mfu() -> None:
    # 70e9 parameters, 15e12 tokens, 1,024 H100 at 0.5: 143.92659381842682 days.
    seconds = 143.92659381842682 * 86_400
    assert mfu(6.3e24, seconds, accelerator="h100-sxm", dtype="bf16", devices=1024) == pytest.approx(0.5, rel=1e-12)


def test_hfu_takes_the_executed_flops() -> None:
    model, recompute = 300, 100
    assert hfu(model + recompute, 1.0, accelerator="l4", dtype="bf16") / mfu(
        model, 1.0, accelerator="l4", dtype="bf16"
    ) == pytest.approx(4 / 3)


@pytest.mark.parametrize("names", [("bf16", "bfloat16", "torch.bfloat16"), ("fp32", "float32"), ("fp8", "fp8_e4m3")])
def test_both_kinds_of_dtype_names(names: tuple[str, ...]) -> None:
    assert len({mfu(1e12, 1.0, accelerator="h100-sxm", dtype=name) for name in names}) == 1


def test_tf32_only_when_asked() -> None:
    fp32 = mfu(1e12, 1.0, accelerator="a100-sxm", dtype="float32")
    tf32 = mfu(1e12, 1.0, accelerator="a100-sxm", dtype="tf32")
    assert fp32 / tf32 == 8.0


def test_an_entry_of_the_table_will_do() -> None:
    entry = find_accelerator("l4")
    assert mfu(121e12, 1.0, accelerator=entry, dtype="fp16") == 1.0


@pytest.mark.parametrize("function", [mfu, hfu])
@pytest.mark.parametrize(
    ("flops", "seconds", "devices", "says"),
    [
        (-1, 1.0, 1, "flops must be"),
        (math.nan, 1.0, 1, "flops must be"),
        (math.inf, 1.0, 1, "flops must be"),
        (1e12, 0, 1, "seconds must be"),
        (1e12, -1.0, 1, "seconds must be"),
        (1e12, math.nan, 1, "seconds must be"),
        (1e12, 1.0, 0, "devices must be"),
    ],
)
def test_nonsense_is_refused(function, flops: float, seconds: float, devices: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        function(flops, seconds, accelerator="h100-sxm", dtype="bf16", devices=devices)


def test_a_missing_rate_lists_those_on_record() -> None:
    with pytest.raises(UsageError, match="there is one for: fp32, fp16, int8, int4"):
        mfu(1e12, 1.0, accelerator="t4", dtype="bfloat16")
    with pytest.raises(UsageError, match="no dense peak for 'fp3'"):
        mfu(1e12, 1.0, accelerator="t4", dtype="fp3")


def test_unknown_accelerator() -> None:
    with pytest.raises(UnknownAcceleratorError, match="h100-sxm"):
        mfu(1e12, 1.0, accelerator="h100", dtype="bf16")
