"""The simulation that runs now, if one does: what the ledger asks, without importing the rest."""

from __future__ import annotations

from torchledger.simulation.contracts import Device

_device: Device | None = None


def current() -> Device | None:
    """The device of the simulation that runs, or None."""
    return _device


def set_current(device: Device | None) -> None:
    """Say which device is simulated from now on."""
    global _device
    _device = device
