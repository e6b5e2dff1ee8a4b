"""Streams, events, devices and random states of the simulated device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchledger.simulation.patching import Patches

if TYPE_CHECKING:
    from torchledger.simulation.device import SimulatedDevice


def install(device: SimulatedDevice, patches: Patches) -> None:
    """Put them in the places of torch's."""
