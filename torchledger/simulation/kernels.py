"""Kernels that a CUDA device chooses otherwise than a meta tensor's: registered while a simulation runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchledger.simulation.patching import Patches

if TYPE_CHECKING:
    from torchledger.simulation.device import SimulatedDevice
    from torchledger.simulation.mode import SimulationMode


def register(device: SimulatedDevice, mode: SimulationMode, patches: Patches) -> None:
    """Register them, until the patches are restored."""
