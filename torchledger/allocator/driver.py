"""What stands for the CUDA driver: it hands out addresses, and may refuse."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from typing import Protocol

_GRANULE = 2 << 20
_BASE = 0x7000_0000_0000


class Driver(Protocol):
    """The calls that a `CachingAllocator` makes; one that is given decides the addresses.

    ``malloc`` refuses by raising `MemoryError` or returning None, ``map`` by raising `MemoryError` or returning False.
    ``reserve``, ``map`` and ``unmap`` are asked for only with ``expandable_segments:True``. A reserved range is handed
    back through ``release(address, size)`` where the driver has it.
    """

    def malloc(self, size: int, /) -> int | None:
        """The address of ``size`` bytes of device memory (``cudaMalloc``)."""

    def free(self, address: int, /) -> object:
        """Take back what ``malloc`` gave (``cudaFree``)."""

    def reserve(self, size: int, /) -> int:
        """The address of ``size`` bytes without memory behind them (``cuMemAddressReserve``)."""

    def map(self, address: int, size: int, /) -> object:
        """Put memory behind a part of a reserved range (``cuMemCreate``, ``cuMemMap``)."""

    def unmap(self, address: int, size: int, /) -> object:
        """Take the memory from a part of a reserved range."""


class VirtualDriver:
    """Addresses as a device might give them: multiples of 2 MiB, the lowest free range that is large enough.

    It never refuses: the allocator holds the capacity.

    Args:
        taken: (address, size) of ranges that are in use already.

    >>> driver = VirtualDriver()
    >>> first, second = driver.malloc(1), driver.malloc(1)
    >>> second - first
    2097152
    >>> driver.free(first)
    >>> driver.malloc(2 << 20) == first
    True
    """

    def __init__(self, taken: Iterable[tuple[int, int]] = ()) -> None:
        self._sizes = {address: _whole(address % _GRANULE + size) for address, size in taken}
        self._end = max((_whole(address + size) for address, size in self._sizes.items()), default=_BASE)
        self._holes: list[tuple[int, int]] = []

    def malloc(self, size: int, /) -> int:
        """The address of ``size`` bytes."""
        size = _whole(size)
        for index, (address, room) in enumerate(self._holes):
            if room >= size:
                self._holes[index : index + 1] = [(address + size, room - size)] if room > size else []
                break
        else:
            address, self._end = self._end, self._end + size
        self._sizes[address] = size
        return address

    def free(self, address: int, /) -> None:
        """Take a range back."""
        insort(self._holes, (address, self._sizes.pop(address)))
        joined: list[tuple[int, int]] = []
        for start, size in self._holes:
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((start, size))
        self._holes = joined

    def reserve(self, size: int, /) -> int:
        """The address of ``size`` bytes without memory behind them."""
        return self.malloc(size)

    def release(self, address: int, size: int, /) -> None:
        """Take a reserved range back."""
        self.free(address)

    def map(self, address: int, size: int, /) -> None:
        """Nothing to do: the allocator holds the capacity."""

    def unmap(self, address: int, size: int, /) -> None:
        """Nothing to do: the allocator holds the capacity."""


def _whole(size: int) -> int:
    return -(-size // _GRANULE) * _GRANULE
