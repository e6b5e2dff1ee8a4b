"""Peak rates, memory and bandwidths of accelerators, each with its source.

Rates are dense FLOP/s (operations/s for integer types) of the product instructions, accumulating in fp32 (int32 for
integers) unless the entry says otherwise. A number that is not on record is absent or None: it is never guessed, and
never another chip's.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from torchledger.errors import UnknownAcceleratorError, UsageError

RATE_NAMES = (
    "fp64",
    "fp64_tensor",
    "fp32",
    "tf32",
    "bf16",
    "fp16",
    "fp16_fp16",
    "fp8",
    "fp8_fp16",
    "fp4",
    "int8",
    "int4",
)
"""The names of rates. ``fp16_fp16`` and ``fp8_fp16`` accumulate in fp16, which GeForce cards do twice as fast."""

_ALIASES = {
    "float64": "fp64",
    "double": "fp64",
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e4m3fnuz": "fp8",
    "float8_e5m2": "fp8",
    "float8_e5m2fnuz": "fp8",
    "float4_e2m1fn_x2": "fp4",
}

_NOISE = frozenset({"nvidia", "tesla", "geforce", "amd", "instinct", "google"})


@dataclass(frozen=True, slots=True)
class Accelerator:
    """What one device of a kind can do at best.

    Args:
        name: the lower-case key, as in ``h100-sxm``.
        title: the name that people use.
        per: what the numbers are for: a ``card``, or one ``die`` of a card that shows itself as several devices.
        dense: peak rates in FLOP/s (operations/s for integers), without sparsity; keys are among `RATE_NAMES`.
        sparse: the same with 2:4 sparsity, where that exists: what many data sheets print first.
        memory_bytes: the memory of the data sheet (80e9 for "80 GB"); a driver reports another number.
        memory_bytes_per_s: peak bandwidth of that memory.
        interconnect_bytes_per_s: the fast links to other devices, both directions added, as data sheets give it.
        compute_capability: NVIDIA's (major, minor).
        device_names: the names that drivers report.
        source: where the numbers are from.
        date: the month in which they were entered.
    """

    name: str
    title: str
    per: str
    dense: Mapping[str, float] = field(hash=False)
    sparse: Mapping[str, float] = field(hash=False)
    memory_bytes: int | None
    memory_bytes_per_s: float | None
    interconnect_bytes_per_s: float | None
    compute_capability: tuple[int, int] | None
    device_names: tuple[str, ...]
    source: str
    date: str

    def peak_flops_per_s(self, dtype: str) -> float:
        """Dense peak FLOP/s of products in ``dtype`` (operations/s for integers).

        ``float32`` is the rate of true fp32 products; TF32 is taken only when it is asked for.

        Args:
            dtype: a name of this table (``bf16``, ``tf32``) or torch's (``bfloat16``, ``torch.bfloat16``).

        Raises:
            UsageError: no such rate is on record; the message lists those that are.

        >>> find_accelerator("h100-sxm").peak_flops_per_s("bfloat16")
        989500000000000.0
        """
        name = rate_name(dtype)
        rate = self.dense.get(name)
        if rate is None:
            known = ", ".join(self.dense)
            raise UsageError(f"no dense peak for {dtype!r} on record for {self.name}; there is one for: {known}.")
        return rate


def rate_name(dtype: str) -> str:
    """The name of a dtype's rate in these tables: ``fp32`` for ``float32`` and ``torch.float32``.

    A name that is not known comes back in lower case.

    >>> [rate_name(name) for name in ("torch.bfloat16", "float32", "tf32", "float8_e4m3fn")]
    ['bf16', 'fp32', 'tf32', 'fp8']
    """
    name = str(dtype).removeprefix("torch.").lower()
    return _ALIASES.get(name, name)


def _tera(rates: Mapping[str, float]) -> Mapping[str, float]:
    return MappingProxyType({name: rates[name] * 1e12 for name in RATE_NAMES if name in rates})


def _entry(
    name: str,
    title: str,
    device_names: tuple[str, ...],
    *,
    dense: Mapping[str, float],
    source: str,
    sparse: Mapping[str, float] | None = None,
    per: str = "card",
    gigabytes: int | None = None,
    gb_per_s: float | None = None,
    link_gb_per_s: float | None = None,
    capability: tuple[int, int] | None = None,
    date: str = "2026-11",
) -> Accelerator:
    """One row; rates in TFLOP/s, memory in GB (1e9), bandwidths in GB/s."""
    return Accelerator(
        name=name,
        title=title,
        per=per,
        dense=_tera(dense),
        sparse=_tera(sparse or {}),
        memory_bytes=None if gigabytes is None else gigabytes * 10**9,
        memory_bytes_per_s=None if gb_per_s is None else gb_per_s * 1e9,
        interconnect_bytes_per_s=None if link_gb_per_s is None else link_gb_per_s * 1e9,
        compute_capability=capability,
        device_names=device_names,
        source=source,
        date=date,
    )


_A100 = {
    "fp64": 9.7,
    "fp64_tensor": 19.5,
    "fp32": 19.5,
    "tf32": 156,
    "bf16": 312,
    "fp16": 312,
    "int8": 624,
    "int4": 1248,
}
_A100_SPARSE = {"tf32": 312, "bf16": 624, "fp16": 624, "int8": 1248, "int4": 2496}
# The data sheet prints 1,979 for bf16, with 2:4 sparsity: dense is half of it.
_H100 = {
    "fp64": 34,
    "fp64_tensor": 67,
    "fp32": 67,
    "tf32": 494.7,
    "bf16": 989.5,
    "fp16": 989.5,
    "fp8": 1979,
    "int8": 1979,
}
_H100_SPARSE = {"tf32": 989.4, "bf16": 1979, "fp16": 1979, "fp8": 3958, "int8": 3958}
_H_NVL = {"fp64": 30, "fp64_tensor": 60, "fp32": 60, "bf16": 835, "fp16": 835, "fp8": 1671, "int8": 1671}
_H_NVL_SPARSE = {"tf32": 835, "bf16": 1671, "fp16": 1671, "fp8": 3341, "int8": 3341}
_MI300X = {
    "fp64": 81.7,
    "fp64_tensor": 163.4,
    "fp32": 163.4,
    "tf32": 653.7,
    "bf16": 1307.4,
    "fp16": 1307.4,
    "fp8": 2614.9,
    "int8": 2614.9,
}
_MI300X_SPARSE = {"bf16": 2614.9, "fp16": 2614.9, "fp8": 5229.8, "int8": 5229.8}

_ROWS = (
    _entry(
        "a100-sxm",
        "NVIDIA A100 SXM4 80 GB",
        ("NVIDIA A100-SXM4-80GB",),
        dense=_A100,
        sparse=_A100_SPARSE,
        gigabytes=80,
        gb_per_s=2039,
        link_gb_per_s=600,
        capability=(8, 0),
        source="NVIDIA A100 data sheet",
    ),
    _entry(
        "a100-sxm-40gb",
        "NVIDIA A100 SXM4 40 GB",
        ("NVIDIA A100-SXM4-40GB",),
        dense=_A100,
        sparse=_A100_SPARSE,
        gigabytes=40,
        gb_per_s=1555,
        link_gb_per_s=600,
        capability=(8, 0),
        source="NVIDIA A100 data sheet",
    ),
    _entry(
        "a100-pcie",
        "NVIDIA A100 PCIe 80 GB",
        ("NVIDIA A100 80GB PCIe",),
        dense=_A100,
        sparse=_A100_SPARSE,
        gigabytes=80,
        gb_per_s=1935,
        link_gb_per_s=600,
        capability=(8, 0),
        source="NVIDIA A100 data sheet",
    ),
    _entry(
        "a100-pcie-40gb",
        "NVIDIA A100 PCIe 40 GB",
        ("NVIDIA A100-PCIE-40GB",),
        dense=_A100,
        sparse=_A100_SPARSE,
        gigabytes=40,
        gb_per_s=1555,
        link_gb_per_s=600,
        capability=(8, 0),
        source="NVIDIA A100 data sheet",
    ),
    _entry(
        "h100-sxm",
        "NVIDIA H100 SXM5 80 GB",
        ("NVIDIA H100 80GB HBM3",),
        dense=_H100,
        sparse=_H100_SPARSE,
        gigabytes=80,
        gb_per_s=3350,
        link_gb_per_s=900,
        capability=(9, 0),
        source="NVIDIA H100 data sheet (sparse figures, halved)",
    ),
    _entry(
        "h100-pcie",
        "NVIDIA H100 PCIe 80 GB",
        ("NVIDIA H100 PCIe",),
        dense={"fp32": 51, "tf32": 378, "bf16": 756, "fp16": 756, "fp8": 1513, "int8": 1513},
        sparse={"tf32": 756, "bf16": 1513, "fp16": 1513, "fp8": 3026, "int8": 3026},
        gigabytes=80,
        gb_per_s=2000,
        link_gb_per_s=600,
        capability=(9, 0),
        source="NVIDIA H100 data sheet (sparse figures, halved)",
    ),
    _entry(
        "h100-nvl",
        "NVIDIA H100 NVL 94 GB",
        ("NVIDIA H100 NVL",),
        dense=_H_NVL,
        sparse=_H_NVL_SPARSE,
        gigabytes=94,
        gb_per_s=3900,
        link_gb_per_s=600,
        capability=(9, 0),
        source="NVIDIA H100 data sheet (sparse figures, halved)",
    ),
    _entry(
        "h200-sxm",
        "NVIDIA H200 SXM 141 GB",
        ("NVIDIA H200",),
        dense=_H100,
        sparse=_H100_SPARSE,
        gigabytes=141,
        gb_per_s=4800,
        link_gb_per_s=900,
        capability=(9, 0),
        source="NVIDIA H200 data sheet (sparse figures, halved)",
    ),
    _entry(
        "h200-nvl",
        "NVIDIA H200 NVL 141 GB",
        ("NVIDIA H200 NVL",),
        dense=_H_NVL,
        sparse=_H_NVL_SPARSE,
        gigabytes=141,
        gb_per_s=4800,
        link_gb_per_s=900,
        capability=(9, 0),
        source="NVIDIA H200 data sheet (sparse figures, halved)",
    ),
    _entry(
        "h20",
        "NVIDIA H20",
        ("NVIDIA H20",),
        dense={"bf16": 148, "fp16": 148},
        gigabytes=96,
        gb_per_s=4000,
        link_gb_per_s=900,
        capability=(9, 0),
        source="public projects' tables; NVIDIA publishes no data sheet",
    ),
    _entry(
        "b200",
        "NVIDIA B200",
        ("NVIDIA B200",),
        # NVIDIA's own pages give 1,100 and 1,125 for TF32: none is taken.
        dense={"bf16": 2250, "fp16": 2250, "fp8": 4500, "fp4": 9000, "int8": 4500},
        sparse={"bf16": 4500, "fp16": 4500, "fp8": 9000, "fp4": 18000, "int8": 9000},
        gigabytes=180,
        gb_per_s=8000,
        link_gb_per_s=1800,
        capability=(10, 0),
        source="NVIDIA HGX B200 and DGX B200 data sheets (a system's figures over 8; sparse, halved)",
    ),
    _entry(
        "gb200",
        "NVIDIA GB200 (one GPU)",
        ("NVIDIA GB200",),
        dense={"tf32": 1250, "bf16": 2500, "fp16": 2500, "fp8": 5000, "fp4": 10000, "int8": 5000},
        sparse={"tf32": 2500, "bf16": 5000, "fp16": 5000, "fp8": 10000, "fp4": 20000, "int8": 10000},
        gigabytes=186,
        gb_per_s=8000,
        link_gb_per_s=1800,
        capability=(10, 0),
        source="NVIDIA GB200 NVL72 data sheet (a system's figures over 72; sparse, halved)",
    ),
    _entry(
        "b100",
        "NVIDIA B100",
        ("NVIDIA B100",),
        dense={"bf16": 1750, "fp16": 1750, "fp8": 3500, "fp4": 7000},
        sparse={"bf16": 3500, "fp16": 3500, "fp8": 7000, "fp4": 14000},
        link_gb_per_s=1800,
        capability=(10, 0),
        source="NVIDIA Blackwell architecture brief, HGX B100 (a system's figures over 8; sparse, halved)",
    ),
    _entry(
        "l40s",
        "NVIDIA L40S",
        ("NVIDIA L40S",),
        dense={"fp32": 91.6, "tf32": 183, "bf16": 362, "fp16": 362, "fp8": 733, "int8": 733, "int4": 733},
        sparse={"tf32": 366, "bf16": 733, "fp16": 733, "fp8": 1466, "int8": 1466, "int4": 1466},
        gigabytes=48,
        gb_per_s=864,
        capability=(8, 9),
        source="NVIDIA L40S data sheet",
    ),
    _entry(
        "l40",
        "NVIDIA L40",
        ("NVIDIA L40",),
        dense={"fp32": 90.5, "tf32": 90.5, "bf16": 181, "fp16": 181, "fp8": 362, "int8": 362, "int4": 724},
        sparse={"tf32": 181, "bf16": 362, "fp16": 362, "fp8": 724, "int8": 724, "int4": 1448},
        gigabytes=48,
        gb_per_s=864,
        capability=(8, 9),
        source="NVIDIA L40 data sheet",
    ),
    _entry(
        "l4",
        "NVIDIA L4",
        ("NVIDIA L4",),
        dense={"fp32": 30.3, "tf32": 60, "bf16": 121, "fp16": 121, "fp8": 242, "int8": 242},
        sparse={"tf32": 120, "bf16": 242, "fp16": 242, "fp8": 485, "int8": 485},
        gigabytes=24,
        gb_per_s=300,
        capability=(8, 9),
        source="NVIDIA L4 data sheet (sparse figures, halved)",
    ),
    _entry(
        "a10",
        "NVIDIA A10",
        ("NVIDIA A10",),
        dense={"fp32": 31.2, "tf32": 62.5, "bf16": 125, "fp16": 125, "int8": 250, "int4": 500},
        sparse={"tf32": 125, "bf16": 250, "fp16": 250, "int8": 500, "int4": 1000},
        gigabytes=24,
        gb_per_s=600,
        capability=(8, 6),
        source="NVIDIA A10 data sheet",
    ),
    _entry(
        "a30",
        "NVIDIA A30",
        ("NVIDIA A30",),
        dense={
            "fp64": 5.2,
            "fp64_tensor": 10.3,
            "fp32": 10.3,
            "tf32": 82,
            "bf16": 165,
            "fp16": 165,
            "int8": 330,
            "int4": 661,
        },
        sparse={"tf32": 165, "bf16": 330, "fp16": 330, "int8": 661, "int4": 1321},
        gigabytes=24,
        gb_per_s=933,
        link_gb_per_s=200,
        capability=(8, 0),
        source="NVIDIA A30 data sheet",
    ),
    _entry(
        "a40",
        "NVIDIA A40",
        ("NVIDIA A40",),
        dense={"fp32": 37.4, "tf32": 74.8, "bf16": 149.7, "fp16": 149.7, "int8": 299.3, "int4": 598.7},
        sparse={"tf32": 149.6, "bf16": 299.4, "fp16": 299.4, "int8": 598.6, "int4": 1197.4},
        gigabytes=48,
        gb_per_s=696,
        link_gb_per_s=112.5,
        capability=(8, 6),
        source="NVIDIA A40 data sheet",
    ),
    _entry(
        "rtx-a6000",
        "NVIDIA RTX A6000",
        ("NVIDIA RTX A6000",),
        dense={"fp32": 38.7, "tf32": 77.4, "bf16": 154.8, "fp16": 154.8, "int8": 309.7},
        sparse={"tf32": 154.8, "bf16": 309.7, "fp16": 309.7, "int8": 619.4},
        gigabytes=48,
        gb_per_s=768,
        link_gb_per_s=112.5,
        capability=(8, 6),
        source="NVIDIA GA102 whitepaper",
    ),
    _entry(
        "v100-sxm",
        "NVIDIA V100 SXM2 32 GB",
        ("Tesla V100-SXM2-32GB",),
        dense={"fp64": 7.8, "fp32": 15.7, "fp16": 125},
        gigabytes=32,
        gb_per_s=900,
        link_gb_per_s=300,
        capability=(7, 0),
        source="NVIDIA V100 data sheet",
    ),
    _entry(
        "v100-sxm-16gb",
        "NVIDIA V100 SXM2 16 GB",
        ("Tesla V100-SXM2-16GB",),
        dense={"fp64": 7.8, "fp32": 15.7, "fp16": 125},
        gigabytes=16,
        gb_per_s=900,
        link_gb_per_s=300,
        capability=(7, 0),
        source="NVIDIA V100 data sheet",
    ),
    _entry(
        "v100-pcie",
        "NVIDIA V100 PCIe 32 GB",
        ("Tesla V100-PCIE-32GB",),
        dense={"fp64": 7, "fp32": 14, "fp16": 112},
        gigabytes=32,
        gb_per_s=900,
        capability=(7, 0),
        source="NVIDIA V100 data sheet",
    ),
    _entry(
        "v100-pcie-16gb",
        "NVIDIA V100 PCIe 16 GB",
        ("Tesla V100-PCIE-16GB",),
        dense={"fp64": 7, "fp32": 14, "fp16": 112},
        gigabytes=16,
        gb_per_s=900,
        capability=(7, 0),
        source="NVIDIA V100 data sheet",
    ),
    _entry(
        "v100s-pcie",
        "NVIDIA V100S PCIe 32 GB",
        ("Tesla V100S-PCIE-32GB",),
        dense={"fp64": 8.2, "fp32": 16.4, "fp16": 130},
        gigabytes=32,
        gb_per_s=1134,
        capability=(7, 0),
        source="NVIDIA V100 data sheet",
    ),
    _entry(
        "t4",
        "NVIDIA T4",
        ("Tesla T4",),
        dense={"fp32": 8.1, "fp16": 65, "int8": 130, "int4": 260},
        gigabytes=16,
        gb_per_s=320,
        capability=(7, 5),
        source="NVIDIA T4 product page",
    ),
    _entry(
        "rtx-3090",
        "NVIDIA GeForce RTX 3090",
        ("NVIDIA GeForce RTX 3090",),
        dense={"fp32": 35.6, "tf32": 35.6, "bf16": 71, "fp16": 71, "fp16_fp16": 142, "int8": 284, "int4": 568},
        sparse={"tf32": 71, "bf16": 142, "fp16": 142, "fp16_fp16": 284, "int8": 568, "int4": 1136},
        gigabytes=24,
        gb_per_s=936,
        link_gb_per_s=112.5,
        capability=(8, 6),
        source="NVIDIA GA102 whitepaper",
    ),
    _entry(
        "rtx-4090",
        "NVIDIA GeForce RTX 4090",
        ("NVIDIA GeForce RTX 4090",),
        dense={
            "fp32": 82.6,
            "tf32": 82.6,
            "bf16": 165.2,
            "fp16": 165.2,
            "fp16_fp16": 330.3,
            "fp8": 330.3,
            "fp8_fp16": 660.6,
            "int8": 660.6,
            "int4": 1321.2,
        },
        sparse={
            "tf32": 165.2,
            "bf16": 330.4,
            "fp16": 330.4,
            "fp16_fp16": 660.6,
            "fp8": 660.6,
            "fp8_fp16": 1321.2,
            "int8": 1321.2,
            "int4": 2642.4,
        },
        gigabytes=24,
        gb_per_s=1008,
        capability=(8, 9),
        source="NVIDIA Ada GPU architecture whitepaper",
    ),
    _entry(
        "rtx-5090",
        "NVIDIA GeForce RTX 5090",
        ("NVIDIA GeForce RTX 5090",),
        dense={
            "fp32": 104.8,
            "tf32": 104.8,
            "bf16": 209.5,
            "fp16": 209.5,
            "fp16_fp16": 419,
            "fp8": 419,
            "fp8_fp16": 838,
            "fp4": 1676,
            "int8": 838,
        },
        sparse={
            "tf32": 209.5,
            "bf16": 419,
            "fp16": 419,
            "fp16_fp16": 838,
            "fp8": 838,
            "fp8_fp16": 1676,
            "fp4": 3352,
            "int8": 1676,
        },
        gigabytes=32,
        gb_per_s=1792,
        capability=(12, 0),
        source="NVIDIA RTX Blackwell GPU architecture whitepaper",
    ),
    _entry(
        "mi250x",
        "AMD Instinct MI250X (one die)",
        ("AMD Instinct MI250X",),
        dense={"bf16": 191.5, "fp16": 191.5, "int8": 191.5},
        per="die",
        gigabytes=64,
        gb_per_s=1638.4,
        source="AMD Instinct MI250X data sheet (a card's figures over two dies)",
    ),
    _entry(
        "mi300a",
        "AMD Instinct MI300A",
        ("AMD Instinct MI300A",),
        dense={"bf16": 980.6, "fp16": 980.6},
        gigabytes=128,
        gb_per_s=5300,
        source="AMD Instinct MI300A data sheet",
    ),
    _entry(
        "mi300x",
        "AMD Instinct MI300X",
        ("AMD Instinct MI300X", "AMD Instinct MI300X OAM"),
        dense=_MI300X,
        sparse=_MI300X_SPARSE,
        gigabytes=192,
        gb_per_s=5300,
        link_gb_per_s=896,
        source="AMD Instinct MI300X data sheet",
    ),
    _entry(
        "mi325x",
        "AMD Instinct MI325X",
        ("AMD Instinct MI325X",),
        dense=_MI300X,
        sparse=_MI300X_SPARSE,
        gigabytes=256,
        gb_per_s=6000,
        link_gb_per_s=896,
        source="AMD Instinct MI325X data sheet",
    ),
    _entry(
        "mi350x",
        "AMD Instinct MI350X",
        ("AMD Instinct MI350X",),
        dense={"bf16": 2309.6, "fp16": 2309.6},
        gigabytes=288,
        gb_per_s=8000,
        source="AMD Instinct MI350X data sheet",
    ),
    _entry(
        "mi355x",
        "AMD Instinct MI355X",
        ("AMD Instinct MI355X",),
        dense={"bf16": 2500, "fp16": 2500},
        sparse={"bf16": 5000, "fp16": 5000},
        gigabytes=288,
        gb_per_s=8000,
        source="AMD Instinct MI355X data sheet",
    ),
    _entry("tpu-v2", "Google TPU v2", (), dense={"bf16": 45}, per="chip", source="Google Cloud TPU documentation"),
    _entry("tpu-v3", "Google TPU v3", (), dense={"bf16": 123}, per="chip", source="Google Cloud TPU documentation"),
    _entry("tpu-v4", "Google TPU v4", (), dense={"bf16": 275}, per="chip", source="Google Cloud TPU documentation"),
    _entry("tpu-v5e", "Google TPU v5e", (), dense={"bf16": 197}, per="chip", source="Google Cloud TPU documentation"),
    _entry("tpu-v5p", "Google TPU v5p", (), dense={"bf16": 459}, per="chip", source="Google Cloud TPU documentation"),
    _entry("tpu-v6e", "Google TPU v6e", (), dense={"bf16": 918}, per="chip", source="Google Cloud TPU documentation"),
)

ACCELERATORS: Mapping[str, Accelerator] = MappingProxyType({row.name: row for row in _ROWS})
"""All accelerators on record, by name."""


def _words(device_name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", device_name.lower())) - _NOISE


_BY_WORDS = {_words(device_name): row.name for row in _ROWS for device_name in row.device_names}


def find_accelerator(name: str) -> Accelerator:
    """The accelerator of that name.

    Args:
        name: the key, as in ``h100-sxm``; capitals do not matter.

    Raises:
        UnknownAcceleratorError: there is none; the message suggests names that come near.

    >>> find_accelerator("h100-sxm").memory_bytes
    80000000000
    >>> find_accelerator("H100-SXM").name
    'h100-sxm'
    """
    found = ACCELERATORS.get(str(name).lower())
    if found is None:
        near = list(_near(name))
        hint = f"Did you mean {' or '.join(near)}?" if near else f"Known are: {', '.join(sorted(ACCELERATORS))}."
        raise UnknownAcceleratorError(f"no accelerator named {name!r} is on record. {hint}")
    return found


def _near(name: str) -> Iterator[str]:
    """Names on record that come near, the nearest first: same chip in another form, then similar spelling."""
    wanted = re.sub(r"[^a-z0-9]+", "-", str(name).lower()).strip("-")
    matched = match_device_name(str(name))
    same = [key for key in ACCELERATORS if wanted and (key == wanted or key.startswith(f"{wanted}-"))]
    if not same:
        # The number of a chip says which it is, whatever stands around it: "4090", "nvidia-h100-80gb".
        numbers = {part for part in wanted.split("-") if any(c.isdigit() for c in part) and not part.endswith("gb")}
        same = [key for key in ACCELERATORS if numbers & set(key.split("-"))][:4]
    spelled = difflib.get_close_matches(wanted, ACCELERATORS, n=3, cutoff=0.7)
    yield from dict.fromkeys(([matched] if matched else []) + same + (spelled if not same else []))


def match_device_name(device_name: str) -> str | None:
    """The name on record of a device that a driver reports, or None for one that is not on record.

    All words of the report must match, whatever their order: a variant that is not on record (a laptop's chip, a
    partition, an export version) is None rather than its nearest relative.

    >>> match_device_name("NVIDIA H100 80GB HBM3")
    'h100-sxm'
    >>> match_device_name("NVIDIA GeForce RTX 4090 Laptop GPU") is None
    True
    """
    return _BY_WORDS.get(_words(device_name))
