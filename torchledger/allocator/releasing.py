"""Memory back to the driver: for one request, for all of the cache, or by age.

Source: torch 2.10, ``c10/cuda/CUDACachingAllocator.cpp``: ``release_available_cached_blocks``,
``release_cached_blocks``, ``garbage_collect_cached_blocks``, ``unmap_block``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from torchledger.allocator.blocks import (
    ADDRESS_BITS,
    ADDRESS_MASK,
    UNMAPPED,
    Block,
    Pool,
    Shelf,
    merge_neighbours,
    put_on_shelf,
    put_unmapped,
    split_block,
    take_from_shelf,
    take_unmapped,
)
from torchledger.allocator.settings import UNLIMITED
from torchledger.allocator.state import AllocatorState, wait_for_events


def release_cached(state: AllocatorState) -> None:
    """Wait for all streams, and return every segment that is free from end to end, large ones first."""
    wait_for_events(state)
    for pool in (state.large, state.small):
        free = list(_free_blocks(state, pool))
        for block in free:
            if block.reservation is None and not block.is_split:
                _release_segment(state, block)
        for block in free:
            if block.reservation is not None:
                _unmap_block(state, block)


def release_available(state: AllocatorState, shelf: Shelf, size: int) -> bool:
    """Return one oversize block that would hold ``size`` bytes, else the largest ones until their sum would.

    Only under ``max_split_size_mb``; whether it was enough comes back.
    """
    oversize = state.settings.max_split_bytes
    if oversize >= UNLIMITED:
        return False
    wanted = max(size, oversize)
    index = bisect_left(shelf.keys, wanted << ADDRESS_BITS)
    for block in _whole_segments(state, shelf.keys[index:]):
        _release_segment(state, block)
        return True
    released = 0
    for block in _whole_segments(state, shelf.keys[:index][::-1]):
        if released >= wanted or block.size < oversize:
            break
        released += block.size
        _release_segment(state, block)
    return released >= wanted


def collect_garbage(state: AllocatorState) -> None:
    """Return large free segments that were not used for long, once more than the threshold is reserved."""
    allowed = state.allowed_bytes or 0
    target = state.stats.reserved_bytes - int(state.settings.garbage_collection_threshold * allowed)
    now = state.large.n_searches
    old = [block for block in _free_blocks(state, state.large) if block.reservation is None and not block.is_split]
    reclaimed, total_age, found = 0, sum(now - block.born for block in old), True
    while target > reclaimed and found and old:
        threshold = total_age / len(old)
        # Those that reach the average age of what there was when the round began; it does not stop at the target.
        going = [block for block in old if now - block.born >= threshold]
        old = [block for block in old if now - block.born < threshold]
        found = bool(going)
        for block in going:
            reclaimed += block.size
            total_age -= now - block.born
            _release_segment(state, block)


def _free_blocks(state: AllocatorState, pool: Pool) -> Iterator[Block]:
    """The free blocks of a pool by (stream, size, address)."""
    for stream in sorted(pool.shelves):
        for key in pool.shelves[stream].keys:
            yield state.blocks[key & ADDRESS_MASK]


def _whole_segments(state: AllocatorState, keys: list[int]) -> Iterator[Block]:
    for key in keys:
        block = state.blocks[key & ADDRESS_MASK]
        if block.reservation is None and not block.is_split:
            yield block


def _release_segment(state: AllocatorState, block: Block) -> None:
    state.record("segment_free", block.address, block.size, block.shelf.stream)
    state.driver.free(block.address)
    take_from_shelf(block)
    del state.blocks[block.address]
    state.stats.note_reserved(-block.size)
    state.stats.note_segments(-1)


def _unmap_block(state: AllocatorState, block: Block) -> None:
    """Take the memory from the pages that a free block of an expandable segment covers whole."""
    reservation = block.reservation
    assert reservation is not None
    base, page = reservation.address, reservation.page
    begin = base + -(-(block.address - base) // page) * page
    end = base + (block.address + block.size - base) // page * page
    if begin >= end:
        return
    take_from_shelf(block)
    if begin > block.address:
        whole = split_block(block, begin - block.address, state.blocks)
        put_on_shelf(block)
        block = whole
    if end < block.address + block.size:
        put_on_shelf(split_block(block, end - block.address, state.blocks))
    state.driver.unmap(begin, end - begin)
    block.state = UNMAPPED
    block = merge_neighbours(block, state.blocks)
    put_unmapped(block)
    state.stats.note_reserved(begin - end)
    state.record("segment_unmap", begin, end - begin, block.shelf.stream)
    if not block.is_split:
        take_unmapped(block)
        del state.blocks[block.address]
        release = getattr(state.driver, "release", None)
        if release is not None:
            release(reservation.address, reservation.size)
