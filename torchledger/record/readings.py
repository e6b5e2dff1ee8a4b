"""What allocators themselves count, read when a step begins and ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from torchledger.allocator.workspaces import count_workspace_bytes
from torchledger.journal.entries import DeviceReading

Statistics = Callable[[str], Mapping[str, int] | None]
"""From a device's name to the flat statistics of its allocator, or None where it has none."""


def cuda_statistics(device: str) -> Mapping[str, int] | None:
    """`torch.cuda.memory_stats` of a device that is in use."""
    if not device.startswith("cuda") or not torch.cuda.is_initialized():
        return None
    return torch.cuda.memory_stats(device)


def cublas_workspace_bytes(device: str) -> int:
    """What cuBLAS takes from the allocator of a device, for each handle and stream, in bytes."""
    on_cuda = device.startswith("cuda") and torch.cuda.is_available()
    major = torch.cuda.get_device_capability(device)[0] if on_cuda else None
    return count_workspace_bytes(major, os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))


@dataclass(slots=True)
class Readings:
    """The allocator statistics of one ledger's devices, from step to step."""

    statistics: Statistics = cuda_statistics
    workspace_bytes: Callable[[str], int] = cublas_workspace_bytes
    _before: dict[str, Mapping[str, int]] = field(default_factory=dict)

    def begin(self, devices: list[str]) -> None:
        """Read before a step."""
        for device in devices:
            if (found := self.statistics(device)) is not None:
                self._before[device] = dict(found)

    def end(self, dispatched: Mapping[str, tuple[int, int, int]]) -> dict[str, DeviceReading]:
        """Read after a step, given the dispatched bytes (start, peak, end) of each device.

        The allocator's peaks are those since its last reset, which is the program's own to make. Where a peak did not
        grow in this step it lies in an earlier one: then what the allocator held beyond the dispatched bytes at the
        step's ends stands for what it held at its peak.
        """
        readings = {}
        for device, (start, peak, end) in dispatched.items():
            after = self.statistics(device)
            if after is None:
                continue
            before = self._before.get(device, {})
            requested_start = before.get("requested_bytes.all.current", 0)
            requested_end = after["requested_bytes.all.current"]
            gap = max(requested_start - start if before else 0, requested_end - end)
            requested = _peak("requested_bytes.all", before, after) or max(peak + gap, requested_start, requested_end)
            workspace = self.workspace_bytes(device)
            n = min(2, max(requested - peak, 0) // workspace) if workspace else 0
            readings[device] = DeviceReading(
                requested_start=requested_start if before else start,
                requested_peak=requested,
                requested_end=requested_end,
                allocated_peak=_peak("allocated_bytes.all", before, after)
                or _highest("allocated_bytes.all", before, after),
                reserved_peak=_peak("reserved_bytes.all", before, after)
                or _highest("reserved_bytes.all", before, after),
                workspace=n * workspace,
            )
            self._before[device] = dict(after)
        return readings


def _peak(key: str, before: Mapping[str, int], after: Mapping[str, int]) -> int:
    """The allocator's peak if it was reached in this step, else 0."""
    peak = after[f"{key}.peak"]
    if not before or peak > before[f"{key}.peak"] or after[f"{key}.current"] == peak:
        return peak
    # A reset during the step leaves a peak that is this step's own, though not above the old one.
    return peak if peak < before[f"{key}.peak"] else 0


def _highest(key: str, before: Mapping[str, int], after: Mapping[str, int]) -> int:
    return max(before.get(f"{key}.current", 0), after[f"{key}.current"])
