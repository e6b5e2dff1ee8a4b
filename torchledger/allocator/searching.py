"""The search for a free block where settings make it more than one bisection.

Source: torch 2.10, ``c10/cuda/CUDACachingAllocator.cpp``, ``get_free_block``.
"""

from __future__ import annotations

from bisect import bisect_left

from torchledger.allocator.blocks import ADDRESS_BITS, ADDRESS_MASK, UNMAPPED, Block, Shelf
from torchledger.allocator.state import AllocatorState


def find_block(state: AllocatorState, shelf: Shelf, size: int) -> Block | None:
    """The free block that ``size`` rounded bytes go into, taken from its list; None where there is none."""
    settings = state.settings
    if state.collects_garbage:
        shelf.pool.n_searches += 1
    keys, blocks = shelf.keys, state.blocks
    index = bisect_left(keys, size << ADDRESS_BITS)
    if index == len(keys):
        return None
    block = blocks[keys[index] & ADDRESS_MASK]
    if block.reservation is not None:
        if settings.expandable_segments:
            index = _least_expandable(shelf, state, index)
        else:
            # Expandable segments were turned off: what there is of them is not given out.
            while index < len(keys) and blocks[keys[index] & ADDRESS_MASK].reservation is not None:
                index += 1
            if index == len(keys):
                return None
        block = blocks[keys[index] & ADDRESS_MASK]
    oversize = settings.max_split_bytes
    if size < oversize <= block.size:
        return None
    if size >= oversize and block.size >= size + settings.max_non_split_rounding_bytes:
        return None
    del keys[index]
    return block


def _least_expandable(shelf: Shelf, state: AllocatorState, index: int) -> int:
    """From the best fit on, while the next could grow to less: a block counts with the addresses it can grow into."""
    keys, blocks = shelf.keys, state.blocks
    block = blocks[keys[index] & ADDRESS_MASK]
    while block.reservation is not None and index + 1 < len(keys):
        following = blocks[keys[index + 1] & ADDRESS_MASK]
        if _expandable_size(following) >= _expandable_size(block):
            break
        index, block = index + 1, following
    return index


def _expandable_size(block: Block) -> int:
    following = block.next
    return block.size + (following.size if following is not None and following.state == UNMAPPED else 0)
