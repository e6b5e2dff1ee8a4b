"""The table of accelerators. The oracles are the figures that data sheets print, and the names that drivers report."""

from __future__ import annotations

import dataclasses

import pytest

from torchledger.accelerators import ACCELERATORS, RATE_NAMES, find_accelerator, match_device_name, rate_name
from torchledger.errors import UnknownAcceleratorError, UsageError

# Dense TFLOP/s of bf16 (fp16 where a chip has no bf16).
DENSE = {
    "a100-sxm": 312,
    "a100-sxm-40gb": 312,
    "a100-pcie": 312,
    "h100-sxm": 989.5,
    "h100-pcie": 756,
    "h100-nvl": 835,
    "h200-sxm": 989.5,
    "h20": 148,
    "b200": 2250,
    "gb200": 2500,
    "b100": 1750,
    "l40s": 362,
    "l40": 181,
    "l4": 121,
    "a10": 125,
    "a40": 149.7,
    "a30": 165,
    "rtx-a6000": 154.8,
    "v100-sxm": 125,
    "v100-pcie": 112,
    "v100s-pcie": 130,
    "t4": 65,
    "rtx-4090": 165.2,
    "rtx-3090": 71,
    "rtx-5090": 209.5,
    "mi250x": 191.5,
    "mi300x": 1307.4,
    "mi325x": 1307.4,
    "mi300a": 980.6,
    "mi350x": 2309.6,
    "mi355x": 2500,
    "tpu-v2": 45,
    "tpu-v3": 123,
    "tpu-v4": 275,
    "tpu-v5e": 197,
    "tpu-v5p": 459,
    "tpu-v6e": 918,
}


@pytest.mark.parametrize(("name", "tera"), DENSE.items())
def test_dense_half_precision_peak(name: str, tera: float) -> None:
    dense = find_accelerator(name).dense
    assert dense.get("bf16", dense.get("fp16")) == tera * 1e12
    assert dense.get("fp16", tera * 1e12) == tera * 1e12


def test_the_h100_peak_is_half_of_the_sparse_figure_exactly() -> None:
    h100 = find_accelerator("h100-sxm")
    assert h100.peak_flops_per_s("bf16") == 1979e12 / 2
    assert h100.sparse["bf16"] == 1979e12
    assert h100.memory_bytes == 80 * 10**9
    # Below this intensity the H100 waits for its memory.
    assert round(h100.peak_flops_per_s("bf16") / (h100.memory_bytes_per_s or 0)) == 295


@pytest.mark.parametrize("name", ["v100-sxm", "v100-pcie", "v100s-pcie", "t4"])
def test_no_bf16_before_ampere(name: str) -> None:
    with pytest.raises(UsageError, match=r"no dense peak for 'bf16' on record for .*fp16"):
        find_accelerator(name).peak_flops_per_s("bf16")


@pytest.mark.parametrize("entry", ACCELERATORS.values(), ids=lambda entry: entry.name)
def test_entries_are_sound(entry) -> None:
    assert ACCELERATORS[entry.name] is entry
    assert entry.name == entry.name.lower()
    assert entry.dense
    assert entry.source
    assert entry.date
    assert entry.per in ("card", "die", "chip")
    for rates in (entry.dense, entry.sparse):
        assert set(rates) <= set(RATE_NAMES)
        assert all(1e12 <= rate <= 1e17 for rate in rates.values())
    for name, rate in entry.sparse.items():  # 2:4 sparsity doubles; data sheets round to three digits
        assert name not in entry.dense or rate / entry.dense[name] == pytest.approx(2, rel=0.015)
    if "fp8" in entry.dense:
        assert entry.dense["fp8"] / entry.dense["bf16"] == pytest.approx(2, rel=0.015)
    if "fp4" in entry.dense:
        assert entry.dense["fp4"] >= 2 * entry.dense["fp8"]
    with pytest.raises(TypeError):
        entry.dense["bf16"] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        entry.name = "other"
    hash(entry)


REPORTED = {
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H200": "h200-sxm",
    "NVIDIA H200 NVL": "h200-nvl",
    "NVIDIA H20": "h20",
    "NVIDIA A100-SXM4-80GB": "a100-sxm",
    "A100-SXM4-80GB": "a100-sxm",
    "NVIDIA A100-SXM4-40GB": "a100-sxm-40gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "NVIDIA L4": "l4",
    "NVIDIA L40": "l40",
    "NVIDIA L40S": "l40s",
    "NVIDIA A10": "a10",
    "NVIDIA A30": "a30",
    "NVIDIA A40": "a40",
    "NVIDIA RTX A6000": "rtx-a6000",
    "Tesla V100-SXM2-16GB": "v100-sxm-16gb",
    "Tesla V100-SXM2-32GB": "v100-sxm",
    "Tesla V100-PCIE-16GB": "v100-pcie-16gb",
    "Tesla V100-PCIE-32GB": "v100-pcie",
    "Tesla V100S-PCIE-32GB": "v100s-pcie",
    "Tesla T4": "t4",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "GeForce RTX 4090": "rtx-4090",
    "NVIDIA GeForce RTX 5090": "rtx-5090",
    "AMD Instinct MI250X": "mi250x",
    "AMD Instinct MI300A": "mi300a",
    "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI325X": "mi325x",
    "AMD Instinct MI355X": "mi355x",
}
UNKNOWN = [
    "",
    "NVIDIA",
    "NVIDIA H100",
    "NVIDIA H100 64GB HBM2",
    "NVIDIA H800",
    "NVIDIA H20-3e",
    "NVIDIA A800-SXM4-80GB",
    "NVIDIA A100-SXM-64GB",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "NVIDIA A10G",
    "GRID A100D-10C MIG 1-10C",
    "GRID T4-16Q",
    "Tesla T40 24GB",
    "NVIDIA T400",
    "NVIDIA L20",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 5090 Laptop GPU",
    "NVIDIA GH200 480GB",
    "Tesla V100-DGXS-32GB",
    "Tesla V100-FHHL-16GB",
    "AMD Instinct MI300X VF",
    "AMD Instinct MI250X / MI250",
    "Apple M3 Max",
    "Intel(R) Xeon(R) CPU",
]


@pytest.mark.parametrize(("reported", "name"), REPORTED.items())
def test_match_device_name(reported: str, name: str) -> None:
    assert match_device_name(reported) == name
    assert match_device_name(reported.upper()) == name


@pytest.mark.parametrize("reported", UNKNOWN)
def test_an_unknown_device_has_no_name(reported: str) -> None:
    assert match_device_name(reported) is None


@pytest.mark.parametrize(
    ("asked", "suggests"),
    [
        ("h100", ["h100-sxm", "h100-pcie", "h100-nvl"]),
        ("4090", ["Did you mean rtx-4090?"]),
        ("RTX 4090", ["Did you mean rtx-4090?"]),
        ("GeForce 3090", ["Did you mean rtx-3090?"]),
        ("a6000", ["Did you mean rtx-a6000?"]),
        ("nvidia-h100-64gb", ["h100-sxm", "h100-pcie"]),
        ("A100-80GB", ["a100-sxm"]),
        ("mi300", ["mi300x"]),
        ("NVIDIA H100 80GB HBM3", ["h100-sxm"]),
        ("rtx4090", ["rtx-4090"]),
        ("a100_sxm_40gb", ["a100-sxm-40gb"]),
        ("l40x", ["l40", "l40s"]),
        ("abacus", ["Known are", "h100-sxm"]),
        ("", ["Known are"]),
    ],
)
def test_unknown_names_come_with_suggestions(asked: str, suggests: list[str]) -> None:
    with pytest.raises(UnknownAcceleratorError) as caught:
        find_accelerator(asked)
    message = str(caught.value)
    assert message.startswith(f"no accelerator named {asked!r} is on record.")
    assert all(word in message for word in suggests)
    assert message.endswith("[unknown-accelerator]")
    assert isinstance(caught.value, KeyError)


@pytest.mark.parametrize("name", ["H100-SXM", "H200-SXM", "RTX-4090", "Mi300X", "TPU-v5e"])
def test_capitals_do_not_matter(name: str) -> None:
    assert find_accelerator(name) is find_accelerator(name.lower())


def test_rate_names() -> None:
    torch = pytest.importorskip("torch")
    assert rate_name("tf32") == "tf32"
    assert rate_name("BF16") == "bf16"
    named = {
        name: rate_name(str(getattr(torch, name))) for name in ("float64", "float32", "bfloat16", "float16", "int8")
    }
    assert named == {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int8": "int8"}
    eights = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
    assert {rate_name(str(getattr(torch, name))) for name in eights} == {"fp8"}


def test_fp32_is_never_tf32() -> None:
    a100 = find_accelerator("a100-sxm")
    assert a100.peak_flops_per_s("float32") == 19.5e12
    assert a100.peak_flops_per_s("tf32") == 156e12
