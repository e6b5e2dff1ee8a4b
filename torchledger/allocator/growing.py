"""More memory from the driver: new segments, and more pages of expandable ones.

Source: torch 2.10, ``c10/cuda/CUDACachingAllocator.cpp``: ``alloc_block``, ``find_expandable_block``, ``map_block``.
"""

from __future__ import annotations

from torchledger.allocator.blocks import (
    FREE,
    UNMAPPED,
    Block,
    Reservation,
    Shelf,
    merge_neighbours,
    put_on_shelf,
    put_unmapped,
    split_block,
    take_from_shelf,
    take_unmapped,
)
from torchledger.allocator.state import AllocatorState
from torchledger.errors import UsageError

_ENDLESS_BYTES = 1 << 40
"""The memory of a device whose capacity nobody gave, as far as address ranges go."""


def grow(state: AllocatorState, shelf: Shelf, size: int) -> Block | None:
    """A free block, on no list, of at least ``size`` rounded bytes from the driver; None where it refuses."""
    segment = state.settings.segment_size(size)
    if state.allowed_bytes is not None and state.stats.reserved_bytes + segment > state.allowed_bytes:
        return None
    if state.settings.expandable_segments:
        return _grow_expandable(state, shelf, size)
    return _new_segment(state, shelf, segment)


def _new_segment(state: AllocatorState, shelf: Shelf, size: int) -> Block | None:
    if not state.has_room_for(size):
        return None
    try:
        address = state.driver.malloc(size)
    except MemoryError:
        return None
    if address is None:
        return None
    if address in state.blocks:
        raise UsageError(f"the driver gave {address:#x} for a new segment, where a block still lies.")
    block = state.blocks[address] = Block(address, size, shelf, None, None)
    state.stats.note_reserved(size)
    state.stats.note_segments(1)
    state.record("segment_alloc", address, size, shelf.stream)
    return block


def _grow_expandable(state: AllocatorState, shelf: Shelf, size: int) -> Block | None:
    block = _find_room(state, shelf, size)
    if block.state == UNMAPPED:
        mapped = _map_block(state, block, min(block.size, size))
        if mapped is None:
            return None
        block = mapped
    while block.size < size:
        following = block.next
        if following is None:
            return None
        mapped = _map_block(state, following, min(following.size, size - block.size))
        if mapped is None:
            return None
        block = mapped
    take_from_shelf(block)
    return block


def _find_room(state: AllocatorState, shelf: Shelf, size: int) -> Block:
    """The lowest unmapped block, or the free one before it, from which ``size`` bytes of addresses are to be had."""
    for address in shelf.unmapped:
        block = state.blocks[address]
        if block.prev is not None and block.prev.state == FREE:
            block = block.prev
        if _has_room(block, size):
            return block
    return _reserve(state, shelf, size)


def _has_room(block: Block | None, size: int) -> bool:
    room = 0
    while room < size and block is not None and block.state in (FREE, UNMAPPED):
        room += block.size
        block = block.next
    return room >= size


def _reserve(state: AllocatorState, shelf: Shelf, size: int) -> Block:
    """A new expandable segment: addresses for the memory of the whole device and an eighth more, none of it mapped."""
    n_bytes = reservation_bytes(state, shelf.pool.is_small, size)
    page = state.settings.page_bytes(shelf.pool.is_small)
    address = state.driver.reserve(n_bytes)
    if address in state.blocks:
        raise UsageError(f"the driver reserved a range at {address:#x}, where a block still lies.")
    block = state.blocks[address] = Block(address, n_bytes, shelf, None, None)
    block.state = UNMAPPED
    block.reservation = Reservation(address, n_bytes, page)
    put_unmapped(block)
    return block


def reservation_bytes(state: AllocatorState, is_small: bool, size: int) -> int:
    """The addresses that an expandable segment takes: at least ``size``, in whole pages."""
    page = state.settings.page_bytes(is_small)
    total = state.capacity_bytes if state.capacity_bytes is not None else max(_ENDLESS_BYTES, size)
    return -(-(total + total // 8) // page) * page


def _map_block(state: AllocatorState, block: Block, size: int) -> Block | None:
    """Put whole pages behind the first ``size`` bytes of an unmapped block; the free block they are now part of."""
    reservation = block.reservation
    assert reservation is not None
    n_bytes = -(-size // reservation.page) * reservation.page
    if not state.has_room_for(n_bytes):
        return None
    try:
        if state.driver.map(block.address, n_bytes) is False:
            return None
    except MemoryError:
        return None
    take_unmapped(block)
    if n_bytes < block.size:
        put_unmapped(split_block(block, n_bytes, state.blocks))
    address, block.state = block.address, FREE
    block = merge_neighbours(block, state.blocks)
    put_on_shelf(block)
    state.stats.note_reserved(n_bytes)
    state.record("segment_map", address, n_bytes, block.shelf.stream)
    return block
