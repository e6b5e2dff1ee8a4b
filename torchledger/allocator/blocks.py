"""Blocks, and the pools that hold the free ones.

A free block is found through a sorted list of ``size << 64 | address``, one for each stream of a pool: best fit, lowest
address first, is then one bisection. All blocks, free or not, are in one dict by address.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Final

ADDRESS_BITS: Final = 64
ADDRESS_MASK: Final = (1 << ADDRESS_BITS) - 1

FREE: Final = 0
ALLOCATED: Final = 1
PENDING: Final = 2
"""Freed by its owner, but another stream may still read it."""
UNMAPPED: Final = 3
"""Addresses of an expandable segment without memory behind them."""


@dataclass(slots=True, eq=False)
class Reservation:
    """The address range of one expandable segment."""

    address: int
    size: int
    page: int


class Shelf:
    """The free blocks that one stream has in one pool."""

    __slots__ = ("keys", "pool", "stream", "unmapped")

    def __init__(self, pool: Pool, stream: int) -> None:
        self.pool = pool
        self.stream = stream
        self.keys: list[int] = []
        self.unmapped: list[int] = []
        """The addresses of its unmapped blocks, sorted."""


class Pool:
    """The small or the large blocks, by stream; ``owner`` is (0, 0), or the private pool (of a CUDA graph)."""

    __slots__ = ("is_small", "n_searches", "owner", "shelves")

    def __init__(self, is_small: bool, owner: tuple[int, int] = (0, 0)) -> None:
        self.is_small = is_small
        self.owner = owner
        self.shelves: dict[int, Shelf] = {}
        self.n_searches = 0
        """The clock by which garbage collection tells ages."""

    def shelf(self, stream: int) -> Shelf:
        """The shelf of a stream, made where there is none."""
        found = self.shelves.get(stream)
        if found is None:
            found = self.shelves[stream] = Shelf(self, stream)
        return found


class Block:
    """A range of one segment; neighbours in the segment are linked."""

    __slots__ = (
        "address",
        "born",
        "n_events",
        "next",
        "prev",
        "requested",
        "reservation",
        "shelf",
        "size",
        "state",
        "streams",
    )

    def __init__(self, address: int, size: int, shelf: Shelf, prev: Block | None, next: Block | None) -> None:  # noqa: A002
        self.address = address
        self.size = size
        self.shelf = shelf
        self.prev = prev
        self.next = next
        self.state: int = FREE
        self.requested = 0
        self.reservation: Reservation | None = None
        self.streams: dict[int, None] | None = None
        """Other streams that use it, in the order in which they were recorded."""
        self.n_events = 0
        self.born = 0
        """`Pool.n_searches` when it came to the free list."""

    @property
    def is_split(self) -> bool:
        """Whether it shares its segment with another block."""
        return self.prev is not None or self.next is not None


Blocks = dict[int, Block]
"""All blocks by address."""


def put_on_shelf(block: Block) -> None:
    """Make a block findable again, as a free one."""
    block.born = block.shelf.pool.n_searches
    insort(block.shelf.keys, block.size << ADDRESS_BITS | block.address)


def take_from_shelf(block: Block) -> None:
    """Make a free block unfindable."""
    keys = block.shelf.keys
    del keys[bisect_left(keys, block.size << ADDRESS_BITS | block.address)]


def put_unmapped(block: Block) -> None:
    """Note a range without memory behind it."""
    insort(block.shelf.unmapped, block.address)


def take_unmapped(block: Block) -> None:
    """Forget a range without memory behind it."""
    addresses = block.shelf.unmapped
    del addresses[bisect_left(addresses, block.address)]


def insert_after(block: Block, new: Block) -> None:
    """Link ``new``, which begins where ``block`` ends, into the segment."""
    new.prev, new.next = block, block.next
    if block.next is not None:
        block.next.prev = new
    block.next = new


def merge_neighbours(block: Block, blocks: Blocks) -> Block:
    """Join a block that is on no list with its neighbours of the same state; what comes back is on no list either."""
    take = take_from_shelf if block.state == FREE else take_unmapped
    prev = block.prev
    if prev is not None and prev.state == block.state:
        take(prev)
        _absorb_next(prev, blocks)
        block = prev
    following = block.next
    if following is not None and following.state == block.state:
        take(following)
        _absorb_next(block, blocks)
    return block


def _absorb_next(block: Block, blocks: Blocks) -> None:
    gone = block.next
    assert gone is not None
    del blocks[gone.address]
    block.size += gone.size
    block.next = gone.next
    if gone.next is not None:
        gone.next.prev = block


def split_block(block: Block, size: int, blocks: Blocks) -> Block:
    """Cut a block after ``size`` bytes; the rest comes back, free or unmapped like it and on no list."""
    rest = Block(block.address + size, block.size - size, block.shelf, None, None)
    rest.reservation, rest.state = block.reservation, block.state
    insert_after(block, rest)
    blocks[rest.address] = rest
    block.size = size
    return rest
