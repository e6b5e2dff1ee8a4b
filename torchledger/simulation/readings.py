"""What the simulated device's allocator counts, as a ledger reads it: each step's own peaks, what ops held inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchledger.journal.entries import DeviceReading
from torchledger.simulation.contracts import Device


class SimulatedReadings:
    """The readings of one ledger, from step to step."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._watch: Any = None
        self._start = self._start_hidden = 0

    def begin(self, devices: list[str]) -> None:
        """A step begins."""
        self._device.blocks.settle()
        if self._watch is None:
            self._watch = self._device.watch()
        self._watch.begin(self._device)
        self._start, self._start_hidden = self._watch.requested, self._watch.hidden

    def end(self, dispatched: Mapping[str, tuple[int, int, int]]) -> dict[str, DeviceReading]:
        """A step ends, and the next begins."""
        if self._watch is None or "cuda:0" not in dispatched:
            return {}
        self._device.blocks.settle()
        watch, stats = self._watch, self._device.allocator.stats
        reading = DeviceReading(
            requested_start=self._start,
            requested_peak=watch.requested,
            requested_end=stats.requested_bytes,
            allocated_peak=watch.allocated,
            reserved_peak=watch.reserved,
            workspace=watch.hidden,
            workspace_start=self._start_hidden,
            workspace_end=self._device.hidden_bytes,
            in_place=True,
            cublas=watch.cublas,
        )
        self.begin([])
        return {"cuda:0": reading}

    def close(self) -> None:
        """Count no more."""
        if self._watch is not None:
            self._device.watches.remove(self._watch)
            self._watch = None
