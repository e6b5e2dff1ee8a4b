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


# MiB as `torch.cuda.get_device_properties` and the messages of out-of-memory errors print them, in public reports.
_DRIVER: Mapping[str, DriverFacts] = MappingProxyType(
    {
        name: DriverFacts(mib * MIB, n)
        for name, (mib, n) in {
            "a100-sxm": (81_050, 108),
            "a100-sxm-40gb": (40_339, 108),
            "a100-pcie": (81_049, 108),
            "a100-pcie-40gb": (40_338, 108),
            "h100-sxm": (81_008, 132),
            "h100-pcie": (81_008, 114),
        }.items()
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
    if facts is None:
        assert found.memory_bytes is not None
        facts = DriverFacts(found.memory_bytes, 1)
    return found, facts
