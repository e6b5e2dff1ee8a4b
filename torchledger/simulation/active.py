"""The simulation that runs now, if one does: what the ledger asks, without importing the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchledger.simulation.device import SimulatedDevice

_device: SimulatedDevice | None = None


def current() -> SimulatedDevice | None:
    """The device of the simulation that runs, or None."""
    return _device


def set_current(device: SimulatedDevice | None) -> None:
    """Say which device is simulated from now on."""
    global _device
    _device = device
