"""What a driver says of a device, and which libraries are assumed to be there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from torchledger.accelerators import Accelerator, find_accelerator
from torchledger.errors import SimulationError

MIB = 1 << 20
CONTEXT_BYTES = 500 * MIB
"""What the CUDA context takes of a device's memory outside the allocator: 300 to 560 MB, by device and driver."""


@dataclass(frozen=True, slots=True)
class DriverFacts:
    """What the driver of a device reports: its memory, and its multiprocessors."""

    memory_bytes: int
    n_multiprocessors: int
    """0 where that is not on record."""
    is_reported: bool = True
    """False: no report is on record, and the memory is the data sheet's, which drivers miss by some percent."""


# MiB (total_memory) and multiprocessors as public reports print them, from `torch.cuda.get_device_properties` or from
# the message of an out-of-memory error ("a total capacity of 79.11 GiB"). Drivers differ by some tens of MiB.
_DRIVER: Mapping[str, DriverFacts] = MappingProxyType(
    {
        name: DriverFacts(mib * MIB, n)
        for name, mib, n in (
            ("a100-sxm", 81_049, 108),  # 79.15 GiB in many reports
            ("a100-sxm-40gb", 40_339, 108),  # bottlerocket-os/bottlerocket#3873: 42,298,834,944 bytes
            ("a100-pcie", 81_049, 108),  # ekondis/mixbench#47
            ("h100-sxm", 81_008, 132),  # vllm-project/vllm#27508: 79.11 GiB; 81,082 to 81,090 with older drivers
            ("h100-pcie", 81_008, 114),
            ("h100-nvl", 95_232, 132),  # ali-vilab/VACE#56: 93.00 GiB
            ("h200-sxm", 143_156, 132),  # 139.80 GiB in many reports
            ("h20", 97_285, 78),
            ("b200", 182_631, 148),  # 178.35 GiB in many reports
            ("l40s", 45_589, 142),
            ("l40", 45_466, 142),  # QwenLM/Qwen3-VL#2097: 44.40 GiB
            ("a10", 22_518, 72),  # zai-org/CogVLM#236: 21.99 GiB
            ("a40", 45_416, 84),
            ("rtx-a6000", 48_676, 84),
            ("v100-sxm-16gb", 16_160, 80),
            ("t4", 15_102, 40),
            ("rtx-3090", 24_259, 82),
            ("rtx-4090", 24_248, 128),  # zai-org/CogVideo#36: 23.68 GiB
            ("rtx-5090", 32_123, 170),  # Wan-Video/Wan2.1#465: 31.37 GiB
        )
    }
)


@dataclass(frozen=True, slots=True)
class Versions:
    """The libraries that a simulated device is assumed to run with; choices of kernels depend on them."""

    cuda: str
    cudnn: str
    cublas: str

    @property
    def cudnn_number(self) -> int:
        """As `torch.backends.cudnn.version` has it: 91002 for 9.10.2."""
        major, minor, patch = (int(part) for part in self.cudnn.split(".")[:3])
        return major * 10_000 + minor * 100 + patch


# What the wheels of torch ask for (their metadata); versions between take the next lower row.
_VERSIONS = (
    ((2, 9), Versions("12.8", "9.10.2", "12.8.4")),
    ((2, 14), Versions("13.0", "9.24.0", "13.1.0")),
    ((2, 15), Versions("13.2", "9.26.0", "13.2.0")),
)


def torch_version() -> tuple[int, int]:
    """The major and minor number of the installed torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()))


def assumed_versions() -> Versions:
    """The libraries that the installed torch would bring."""
    mine = torch_version()
    return [versions for since, versions in _VERSIONS if since <= mine or since == (2, 9)][-1]


def simulated_accelerator(name: str) -> tuple[Accelerator, DriverFacts]:
    """An accelerator of the table that can be simulated, and what its driver reports.

    Raises:
        UnknownAcceleratorError: no accelerator of that name is in the table.
        SimulationError: it is none that CUDA drives.
    """
    found = find_accelerator(name)
    if found.compute_capability is None:
        raise SimulationError(
            f"{name} cannot be simulated: only NVIDIA devices can, whose allocator and kernels are modelled. "
            f"`torchledger accelerators` lists them; those with a compute capability will do."
        )
    facts = _DRIVER.get(found.name)
    if facts is None and found.memory_bytes is None:
        raise SimulationError(
            f"the memory of {name} is not on record, so it cannot be simulated: take another of its kind."
        )
    return found, facts or DriverFacts(found.memory_bytes or 0, 0, is_reported=False)
