"""The napkin against figures worked out by hand (CS336, lecture 2, and others)."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

import torchledger as tl
from torchledger.accelerators import find_accelerator
from torchledger.analytic.napkin import device_hours, exact_ratio, max_params, training_days, training_flops
from torchledger.errors import QuantityError, UnknownAcceleratorError, UsageError


def test_the_public_name_has_all_of_them() -> None:
    assert tl.napkin.training_flops is training_flops
    assert set(tl.napkin.__all__) == {"training_flops", "training_days", "device_hours", "max_params", "tensor_bytes"}
    assert all(callable(getattr(tl.napkin, name)) for name in tl.napkin.__all__)


def test_training_flops() -> None:
    assert training_flops(70e9, 15e12) == 6.3e24
    exact = 63 * 10**23
    for n_params, n_tokens in ((70_000_000_000, 15_000_000_000_000), ("70B", "15T"), ("70e9", 15 * 10**12)):
        flops = training_flops(n_params, n_tokens)
        assert flops == exact
        assert isinstance(flops, int)
    assert training_flops(124_439_808, 1024) == 764_558_180_352


def test_training_days() -> None:
    for n_params, n_tokens, devices in ((70e9, 15e12, 1024), ("70B", "15T", "1024"), (70 * 10**9, "15e12", 1024)):
        days = training_days(n_params, n_tokens, devices=devices, accelerator="h100-sxm", dtype="bf16", mfu=0.5)
        assert days == 143.92659381842682
    # The rounded peak of some tables, for comparison: 989e12.
    assert pytest.approx(143.99936, abs=5e-6) == 6.3e24 / (1024 * 989e12 * 0.5) / 86_400


def test_days_scale_as_they_must() -> None:
    def days(**how) -> float:
        how = {"devices": 8, "accelerator": "a100-sxm", "dtype": "bf16", "mfu": 0.4, **how}
        return training_days(1e9, 1e10, **how)

    assert days() / days(devices=16) == pytest.approx(2)
    assert days() / days(mfu=0.8) == pytest.approx(2)
    assert days(dtype="tf32") / days() == pytest.approx(2)
    assert days(accelerator=find_accelerator("a100-sxm")) == days()
    assert device_hours(1e9, 1e10, accelerator="a100-sxm", mfu=0.4) == pytest.approx(days() * 24 * 8)


def test_mfu_of_that_many_days_is_the_mfu_that_was_asked() -> None:
    days = training_days("8B", "2T", devices=512, accelerator="h100-sxm", mfu=0.41)
    reached = tl.mfu(training_flops("8B", "2T"), days * 86_400, accelerator="h100-sxm", dtype="bf16", devices=512)
    assert reached == pytest.approx(0.41, rel=1e-12)


def test_max_params() -> None:
    assert max_params(8 * 80e9) == 4e10
    assert max_params(8 * 80 * 10**9, 16) == 40_000_000_000
    assert max_params("80GB") == 5_000_000_000
    assert max_params(15) == 0
    assert max_params("1 GiB", 0.5) == 2**31
    assert max_params(10**18, 16 / 3) == 3 * 10**18 // 16  # a third of 16 bytes is meant, not its nearest float


def test_exact_ratio() -> None:
    for numerator in range(1, 40):
        for denominator in (1, 3, 7, 64, 1000, 12_288):
            assert exact_ratio(numerator / denominator) == Fraction(numerator, denominator)
    assert exact_ratio(math.pi) == Fraction(math.pi)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: training_flops("70X", 1), QuantityError, "write '70B'"),
        (lambda: training_flops(-1, 1), UsageError, "n_params must be a finite number of at least 0"),
        (lambda: training_flops(1, math.nan), UsageError, "n_tokens must be"),
        (lambda: training_flops(1, True), UsageError, "n_tokens must be"),
        (lambda: training_flops(1, None), UsageError, "n_tokens must be"),
        (lambda: training_days(1, 1, devices=0, accelerator="l4"), UsageError, "devices must be at least 1"),
        (lambda: training_days(1, 1, devices=1.5, accelerator="l4"), QuantityError, "cannot read 1.5"),
        (lambda: training_days(1, 1, devices=1, accelerator="h100"), UnknownAcceleratorError, "h100-sxm"),
        (lambda: training_days(1, 1, devices=1, accelerator="t4"), UsageError, "no dense peak for 'bf16'"),
        (lambda: training_days(1, 1, devices=1, accelerator="l4", mfu=0), UsageError, "mfu must be"),
        (lambda: training_days(1, 1, devices=1, accelerator="l4", mfu=50), UsageError, "mfu must be"),
        (lambda: max_params("80G"), QuantityError, "write '2GiB'"),
        (lambda: max_params(1, 0), UsageError, "bytes_per_param must be above 0"),
        (lambda: max_params(1, math.inf), UsageError, "bytes_per_param must be a finite number"),
        (lambda: max_params(-1), UsageError, "n_bytes must be"),
    ],
)
def test_what_is_refused(call, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()


def test_numbers_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    assert training_flops(numpy.int64(3), numpy.int32(5)) == 90
    assert max_params(numpy.float64(160.0)) == 10
