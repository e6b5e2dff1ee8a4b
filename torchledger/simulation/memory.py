"""What is said of a simulated device's memory: its highest counts, and the message when there is none left."""

from __future__ import annotations

from torchledger.simulation.contracts import Device


class Watch:
    """The highest counts of a simulated device's allocator since a moment."""

    __slots__ = ("allocated", "hidden", "requested", "reserved")

    def __init__(self, device: Device) -> None:
        self.requested = self.allocated = self.reserved = self.hidden = 0
        self.begin(device)

    def begin(self, device: Device) -> None:
        """Begin anew."""
        stats = device.allocator.stats
        self.requested, self.allocated = stats.requested_bytes, stats.allocated_bytes
        self.reserved, self.hidden = stats.reserved_bytes, device.hidden_bytes


def torch_size(nbytes: int) -> str:
    """A size as torch's allocator prints it.

    >>> torch_size(20 << 20), torch_size(100)
    ('20.00 MiB', '100 bytes')
    """
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} bytes"


def out_of_memory_message(device: Device, nbytes: int) -> str:
    """The message of torch 2.9 to 2.15 (`CUDACachingAllocator::malloc`)."""
    stats = device.allocator.stats
    used = device.total_bytes - device.capacity_bytes + stats.reserved_bytes
    idle = stats.reserved_bytes - stats.allocated_bytes
    return (
        f"CUDA out of memory. Tried to allocate {torch_size(nbytes)}. GPU 0 has a total capacity of "
        f"{torch_size(device.total_bytes)} of which {torch_size(device.total_bytes - used)} is free. Including "
        f"non-PyTorch memory, this process has {torch_size(used)} memory in use. Of the allocated memory "
        f"{torch_size(stats.allocated_bytes)} is allocated by PyTorch, and {torch_size(idle)} is reserved by "
        f"PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
        f"Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )
