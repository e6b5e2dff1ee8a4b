"""A trace once more, under other settings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torchledger.allocator.caching import CachingAllocator
from torchledger.errors import DeviceOutOfMemoryError


@dataclass(frozen=True, slots=True)
class Replayed:
    """The peaks of a replay, in bytes; ``fits`` says whether the device had room for all of it."""

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    fits: bool


def replay_trace(
    trace: Iterable[tuple[str, int, int, int]], conf: str = "", *, capacity_bytes: int | None = None
) -> Replayed:
    """What the allocator would have taken for the same requests under other settings.

    Args:
        trace: ``(action, address, size, stream)`` of an allocator, from its beginning; what is neither ``alloc`` nor
            ``free_requested`` is left out, since it follows from the settings.
        conf: ``PYTORCH_CUDA_ALLOC_CONF``.
        capacity_bytes: What the device has; no limit, if left out.

    Raises:
        UsageError: ``conf`` cannot be read.

    >>> replay_trace([("alloc", 0, 1000, 0), ("free_requested", 0, 1000, 0)]).reserved_bytes
    2097152
    """
    allocator = CachingAllocator(conf, capacity_bytes=capacity_bytes)
    addresses: dict[int, int] = {}
    fits = True
    for action, address, nbytes, stream in trace:
        if action == "alloc":
            try:
                addresses[address] = allocator.malloc(nbytes, stream)
            except DeviceOutOfMemoryError:
                fits = False
                break
        elif action == "free_requested" and address in addresses:
            allocator.free(addresses.pop(address))
    stats = allocator.stats
    return Replayed(stats.peak_requested_bytes, stats.peak_allocated_bytes, stats.peak_reserved_bytes, fits)
