"""`CachingAllocator`: what torch's CUDA allocator does with each request, as a model.

Source: torch 2.10, ``c10/cuda/CUDACachingAllocator.cpp``, and the headers of 2.13. Public traces of devices replay on
it event by event, and it was held against the allocator of torch 2.14.1 itself, over a driver of counters.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from typing import Any, Self

from torchledger.allocator.blocks import ADDRESS_BITS, ADDRESS_MASK, ALLOCATED, FREE, Block
from torchledger.allocator.driver import Driver, VirtualDriver
from torchledger.allocator.obtaining import not_allocated, obtain, read_size
from torchledger.allocator.releasing import release_cached
from torchledger.allocator.searching import find_block
from torchledger.allocator.settings import (
    MIN_BLOCK_BYTES,
    SMALL_BYTES,
    UNLIMITED,
    AllocatorSettings,
    parse_settings,
)
from torchledger.allocator.snapshots import read_segments, restore, take_snapshot
from torchledger.allocator.state import AllocatorState, TraceEntry, defer_free, finish_events, mark_reached
from torchledger.allocator.statistics import AllocatorStats
from torchledger.errors import UsageError
from torchledger.units import parse_bytes


class CachingAllocator:
    """The CUDA caching allocator of one device, without the device: the same blocks, segments and statistics.

    Streams are integers; 0 is the default stream. A block that was recorded on other streams and freed waits until
    `synchronize` says that they caught up (or until the allocator itself waits for them, to return memory): no device
    runs here that could tell.

    Args:
        conf: settings in the syntax of ``PYTORCH_CUDA_ALLOC_CONF``, as in ``"expandable_segments:True"``.
        capacity_bytes: what the device has for this allocator, in bytes or as ``"80 GiB"``; None is without end.
        driver: decides the addresses, and may refuse; see `torchledger.allocator.driver.Driver`.
        trace: whether `trace` lists what happens.

    Raises:
        UsageError: settings that cannot be read, or a driver without the calls that they need.
        QuantityError: a capacity that cannot be read.

    >>> allocator = CachingAllocator(trace=True)
    >>> address = allocator.malloc(1_000_000)
    >>> allocator.stats.allocated_bytes, allocator.stats.reserved_bytes
    (1000448, 2097152)
    >>> allocator.free(address)
    >>> [(action, size) for action, _, size, _ in allocator.trace]
    [('segment_alloc', 2097152), ('alloc', 1000000), ('free_requested', 1000000), ('free_completed', 1000000)]
    """

    def __init__(
        self,
        conf: str = "",
        *,
        capacity_bytes: int | str | None = None,
        driver: Driver | None = None,
        trace: bool = False,
    ) -> None:
        capacity = None if capacity_bytes is None else parse_bytes(capacity_bytes)
        self.trace: list[TraceEntry] = []
        """(action, address, size, stream) of each event, in torch's words; empty unless asked for.

        Sizes of ``alloc`` and ``free_...`` are requested bytes; an ``oom`` has the device's free bytes as its address.
        """
        self._state = AllocatorState(
            settings=AllocatorSettings(),
            driver=driver if driver is not None else VirtualDriver(),
            capacity_bytes=capacity,
            trace=self.trace if trace else None,
        )
        self.stats: AllocatorStats = self._state.stats
        """A live view of requested, allocated, active and reserved bytes, with their peaks, and of calls."""
        self._blocks = self._state.blocks
        self._trace = self._state.trace
        self._n_ready = self._state.n_ready
        self._spare: list[Block] = []  # merged away, to be used again: to make one costs as much as the rest of a split
        self._small, self._large = self._state.small.shelves, self._state.large.shelves
        self.change_settings(conf)

    @classmethod
    def from_snapshot(
        cls,
        segments: Iterable[Mapping[str, Any]],
        conf: str = "",
        *,
        capacity_bytes: int | str | None = None,
        driver: Driver | None = None,
        trace: bool = False,
        device: int | None = None,
    ) -> Self:
        """An allocator that begins where a device was.

        What a snapshot does not tell is assumed: expandable segments begin with their first mapped range, blocks that
        wait for other streams wait for `synchronize` without a stream, and no free segment has an age. Blocks of
        private pools can be freed; nothing else is allocated there, and nothing is returned from there.

        Args:
            segments: of ``torch.cuda.memory_snapshot()``, of `snapshot`, or under ``"segments"`` of
                ``torch.cuda.memory._snapshot()``.
            conf: as for the class.
            capacity_bytes: as for the class.
            driver: as for the class; its ``free`` is called with addresses of the snapshot too.
            trace: as for the class.
            device: the device whose segments are taken, where there are several.

        Raises:
            UsageError: what is given is no list of segments, or it contradicts itself.

        >>> first = CachingAllocator()
        >>> address = first.malloc(100)
        >>> second = CachingAllocator.from_snapshot(first.snapshot())
        >>> second.stats.requested_bytes, second.malloc(1) - address
        (100, 512)
        """
        read = read_segments(segments, device)
        self = cls(conf, capacity_bytes=capacity_bytes, driver=driver, trace=trace)
        taken = restore(self._state, read)
        if driver is None:
            self._state.driver = VirtualDriver(taken)
        self._choose_paths()
        return self

    @property
    def settings(self) -> AllocatorSettings:
        """What the configuration says."""
        return self._state.settings

    @property
    def capacity_bytes(self) -> int | None:
        """What the device has for this allocator; None is without end."""
        return self._state.capacity_bytes

    @property
    def free_bytes(self) -> int | None:
        """What the device has left for new segments; None where no capacity was given."""
        return self._state.free_bytes

    @property
    def driver(self) -> Driver:
        """Where segments come from."""
        return self._state.driver

    def malloc(self, nbytes: int, stream: int = 0) -> int:
        """The address of a block of at least ``nbytes``; 0, the null pointer, for no bytes.

        Args:
            nbytes: what is asked for.
            stream: on which the block is used, and whose freed blocks it may take.

        Raises:
            DeviceOutOfMemoryError: neither the cache nor the driver has so much, after all that is free was returned.
            UsageError: a size that is no integer, or negative.
        """
        if type(nbytes) is not int or nbytes <= 0:
            nbytes = read_size(nbytes)
            if nbytes == 0:
                return 0
        if self._n_ready:
            finish_events(self._state)
        size = (nbytes + 511) & -512 if self._rounds_plainly else self._round_size(nbytes)
        if size <= SMALL_BYTES:
            shelf = self._small.get(stream) or self._state.small.shelf(stream)
            least_rest = MIN_BLOCK_BYTES
        else:
            shelf = self._large.get(stream) or self._state.large.shelf(stream)
            least_rest = self._least_large_rest if size < self._max_split else UNLIMITED
        if self._searches_plainly:
            keys = shelf.keys
            index = bisect_left(keys, size << ADDRESS_BITS)
            block = (
                self._blocks[keys.pop(index) & ADDRESS_MASK]
                if index < len(keys)
                else obtain(self._state, shelf, size, nbytes)
            )
        else:
            block = find_block(self._state, shelf, size) or obtain(self._state, shelf, size, nbytes)

        rest = block.size - size
        address = block.address
        if rest >= least_rest:
            following = block.next
            rest_address = address + size
            if self._spare:
                remainder = self._spare.pop()
                remainder.address, remainder.size, remainder.shelf = rest_address, rest, shelf
                remainder.prev, remainder.next = block, following
            else:
                remainder = Block(rest_address, rest, shelf, block, following)
            remainder.reservation = block.reservation
            block.next = remainder
            if following is not None:
                following.prev = remainder
            block.size = size
            self._blocks[rest_address] = remainder
            insort(shelf.keys, rest << ADDRESS_BITS | rest_address)
            if self._counts_ages:
                remainder.born = shelf.pool.n_searches
        else:
            size = block.size
        block.state = ALLOCATED
        block.requested = nbytes

        stats = self.stats
        stats.n_allocations += 1
        requested = stats.requested_bytes = stats.requested_bytes + nbytes
        if requested > stats.peak_requested_bytes:
            stats.peak_requested_bytes = requested
        allocated = stats.allocated_bytes = stats.allocated_bytes + size
        if allocated > stats.peak_allocated_bytes:
            stats.peak_allocated_bytes = allocated
        if stats.pending_bytes:
            stats.note_active()
        if self._trace is not None:
            self._trace.append(("alloc", address, nbytes, stream))
        return address

    def free(self, address: int) -> None:
        """Give a block back; the null pointer is ignored.

        A block that was recorded on other streams stays active, and counts as requested, until they caught up.

        Raises:
            UsageError: no block is allocated there.
        """
        blocks = self._blocks
        block = blocks.get(address)
        if block is None or block.state != ALLOCATED:
            if address == 0:
                return
            raise not_allocated(self._state, "free", address)
        stats, size, nbytes = self.stats, block.size, block.requested
        stats.allocated_bytes -= size
        shelf = block.shelf
        if self._trace is not None:
            self._trace.append(("free_requested", address, nbytes, shelf.stream))
        if block.streams is not None:
            defer_free(self._state, block)
            return
        # From here on as when a block that waited comes back, without the calls: this is half of all the work.
        stats.requested_bytes -= nbytes
        if self._trace is not None:
            self._trace.append(("free_completed", address, nbytes, shelf.stream))
        keys, spare = shelf.keys, self._spare
        block.state = FREE
        other = block.prev
        if other is not None and other.state == FREE:
            del keys[bisect_left(keys, other.size << ADDRESS_BITS | other.address)]
            del blocks[address]
            following = other.next = block.next
            if following is not None:
                following.prev = other
            size += other.size
            address = other.address
            spare.append(block)
            block = other
        other = block.next
        if other is not None and other.state == FREE:
            del keys[bisect_left(keys, other.size << ADDRESS_BITS | other.address)]
            del blocks[other.address]
            following = block.next = other.next
            if following is not None:
                following.prev = block
            size += other.size
            spare.append(other)
        block.size = size
        insort(keys, size << ADDRESS_BITS | address)
        if self._counts_ages:
            block.born = shelf.pool.n_searches

    def record_stream(self, address: int, stream: int) -> None:
        """Note that another stream uses a block: once freed, it waits for that stream; its own stream is ignored.

        Raises:
            UsageError: no block is allocated there.
        """
        block = self._blocks.get(address)
        if block is None or block.state != ALLOCATED:
            if address == 0:
                return
            raise not_allocated(self._state, "record a stream on", address)
        if stream != block.shelf.stream:
            if block.streams is None:
                block.streams = {}
            block.streams[stream] = None

    def synchronize(self, stream: int | None = None) -> None:
        """Say that the device has done all that a stream had to do; without a stream, all that there was to do.

        Blocks that waited for it come back at the next `malloc`, in the order in which they were freed, as in torch.
        """
        state = self._state
        mark_reached(state, list(state.events) if stream is None else [stream])

    def empty_cache(self) -> None:
        """Wait for all streams, and return to the driver every segment and every page that is free from end to end."""
        release_cached(self._state)

    def set_memory_fraction(self, fraction: float) -> None:
        """Allow no more than this share of the capacity; with a threshold, garbage collection begins to work.

        Raises:
            UsageError: a share outside 0 to 1, or an allocator without a capacity.
        """
        capacity = self._state.capacity_bytes
        if capacity is None:
            raise UsageError("a memory fraction is a share of the capacity: give the allocator capacity_bytes=.")
        if not 0.0 <= fraction <= 1.0:
            raise UsageError(f"a memory fraction is a number from 0 to 1, not {fraction!r}.")
        self._state.allowed_bytes = int(fraction * capacity)
        self._choose_paths()

    def change_settings(self, conf: str) -> None:
        """Take other settings from now on; what ``conf`` does not name gets its default.

        Raises:
            UsageError: settings that cannot be read, or a driver without the calls that they need.
        """
        settings = parse_settings(conf)
        if settings.expandable_segments:
            lacking = [name for name in ("reserve", "map", "unmap") if not hasattr(self._state.driver, name)]
            if lacking:
                raise UsageError(
                    f"expandable_segments:True needs a driver with {', '.join(lacking)}; this one has none."
                )
        self._state.settings = settings
        if settings.memory_fraction < 1.0:
            self.set_memory_fraction(settings.memory_fraction)
        self._choose_paths()

    def reset_peak_stats(self) -> None:
        """Let every peak begin again at what there is now."""
        self.stats.reset_peaks()

    def snapshot(self) -> list[dict[str, Any]]:
        """All segments by address, in the shape of ``torch.cuda.memory_snapshot()``.

        >>> allocator = CachingAllocator()
        >>> _ = allocator.malloc(100)
        >>> [(block["size"], block["requested_size"], block["state"]) for block in allocator.snapshot()[0]["blocks"]]
        [(512, 100, 'active_allocated'), (2096640, 0, 'inactive')]
        """
        return take_snapshot(self._state)

    def _choose_paths(self) -> None:
        """Settle once what each call would otherwise ask anew."""
        state, settings = self._state, self._state.settings
        self._round_size = settings.round_size
        self._rounds_plainly = max(settings.power2_divisions) <= 1
        self._max_split = UNLIMITED if settings.expandable_segments else settings.max_split_bytes
        self._least_large_rest = MIN_BLOCK_BYTES if settings.expandable_segments else SMALL_BYTES + 1
        has_expandable = any(block.reservation is not None for block in state.blocks.values())
        self._searches_plainly = (
            not (settings.expandable_segments or has_expandable or state.collects_garbage)
            and settings.max_split_bytes >= UNLIMITED
        )
        # Once counted, always counted: an age must not begin before its block was free.
        self._counts_ages = state.collects_garbage or getattr(self, "_counts_ages", False)
