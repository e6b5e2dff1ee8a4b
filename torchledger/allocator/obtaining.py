"""The steps from a full cache to a new segment, in torch's order, or to the end of memory.

Source: torch 2.10, ``c10/cuda/CUDACachingAllocator.cpp``, ``malloc``.
"""

from __future__ import annotations

import operator
from typing import SupportsIndex

from torchledger.allocator.blocks import PENDING, Block, Shelf
from torchledger.allocator.growing import grow
from torchledger.allocator.releasing import collect_garbage, release_available, release_cached
from torchledger.allocator.state import AllocatorState
from torchledger.errors import DeviceOutOfMemoryError, UsageError

_TOO_LARGE = 1 << 60
"""An exbibyte is refused before anything is tried."""


def obtain(state: AllocatorState, shelf: Shelf, size: int, nbytes: int) -> Block:
    """A free block, on no list, from the driver: at once, or after free segments were returned to it.

    Args:
        state: the allocator's.
        shelf: where the block belongs.
        size: its rounded bytes.
        nbytes: what was asked for.

    Raises:
        DeviceOutOfMemoryError: the driver refuses still.
    """
    if nbytes < _TOO_LARGE:
        if state.collects_garbage:
            collect_garbage(state)
        block = grow(state, shelf, size)
        if block is None and release_available(state, shelf, size):
            block = grow(state, shelf, size)
        if block is None:
            release_cached(state)
            state.stats.num_alloc_retries += 1
            block = grow(state, shelf, size)
        if block is not None:
            return block
        state.record("oom", state.free_bytes or 0, size, shelf.stream)
        state.stats.num_ooms += 1
    raise DeviceOutOfMemoryError(
        nbytes,
        segment_bytes=state.settings.segment_size(size),
        stream=shelf.stream,
        capacity_bytes=state.capacity_bytes,
        allowed_bytes=state.allowed_bytes,
        reserved_bytes=state.stats.reserved_bytes,
        allocated_bytes=state.stats.allocated_bytes,
        active_bytes=state.stats.active_bytes,
    )


def not_allocated(state: AllocatorState, what: str, address: int) -> UsageError:
    """Why nothing can be done with a block at that address."""
    block = state.blocks.get(address)
    if block is None:
        why = "no block begins there"
    elif block.state == PENDING:
        why = f"its {block.size} B were freed, and wait for another stream"
    else:
        why = f"its {block.size} B are free already"
    shown = f"{address:#x}" if isinstance(address, int) else repr(address)
    return UsageError(f"cannot {what} {shown}: {why}. Pass an address that malloc gave and that was not freed since.")


def read_size(nbytes: SupportsIndex) -> int:
    """A number of bytes that is no plain positive integer, as one that may be 0."""
    try:
        size = operator.index(nbytes)
    except TypeError:
        raise UsageError(f"malloc takes an integer number of bytes, not {nbytes!r}.") from None
    if size < 0:
        raise UsageError(f"malloc takes no negative number of bytes: {size}.")
    return size
