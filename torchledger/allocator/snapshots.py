"""The segments of an allocator as ``torch.cuda.memory_snapshot()`` gives them, and an allocator's state from them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torchledger.allocator.blocks import (
    ALLOCATED,
    FREE,
    PENDING,
    UNMAPPED,
    Block,
    Pool,
    Reservation,
    Shelf,
    insert_after,
    merge_neighbours,
    put_on_shelf,
    put_unmapped,
)
from torchledger.allocator.growing import reservation_bytes
from torchledger.allocator.state import AllocatorState
from torchledger.errors import UsageError

_STATES = {
    "active_allocated": ALLOCATED,
    "active_pending_free": PENDING,
    "active_awaiting_free": PENDING,  # its name in older snapshots
    "inactive": FREE,
}
_NAMES = {ALLOCATED: "active_allocated", PENDING: "active_pending_free", FREE: "inactive"}


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment of a snapshot; ``blocks`` are (size, requested, state)."""

    address: int
    size: int
    stream: int
    is_small: bool
    owner: tuple[int, int]
    is_expandable: bool
    blocks: tuple[tuple[int, int, int], ...]

    @property
    def end(self) -> int:
        """The address after its last byte."""
        return self.address + self.size


def take_snapshot(state: AllocatorState) -> list[dict[str, Any]]:
    """All segments by address; of an expandable one each mapped range."""
    segments = []
    for address in sorted(state.blocks):
        head = state.blocks[address]
        if head.state == UNMAPPED or (head.prev is not None and head.prev.state != UNMAPPED):
            continue
        blocks = list(_mapped_from(head))
        active = [block for block in blocks if block.state != FREE]
        segments.append(
            {
                "device": 0,
                "address": address,
                "total_size": sum(block.size for block in blocks),
                "allocated_size": sum(block.size for block in blocks if block.state == ALLOCATED),
                "active_size": sum(block.size for block in active),
                "requested_size": sum(block.requested for block in active),
                "stream": head.shelf.stream,
                "segment_type": "small" if head.shelf.pool.is_small else "large",
                "segment_pool_id": head.shelf.pool.owner,
                "is_expandable": head.reservation is not None,
                "frames": [],
                "blocks": [_describe(block) for block in blocks],
            }
        )
    return segments


def _mapped_from(block: Block | None) -> Iterator[Block]:
    while block is not None and block.state != UNMAPPED:
        yield block
        block = block.next


def _describe(block: Block) -> dict[str, Any]:
    return {
        "address": block.address,
        "size": block.size,
        "requested_size": block.requested if block.state != FREE else 0,
        "state": _NAMES[block.state],
        "frames": [],
    }


def read_segments(segments: Iterable[Mapping[str, Any]], device: int | None) -> list[Segment]:
    """The segments of one device by address, each checked.

    Raises:
        UsageError: what is given is no list of segments, several devices without a choice, or segments that overlap.
    """
    if isinstance(segments, Mapping):
        raise UsageError("from_snapshot takes the list of segments: of torch.cuda.memory._snapshot(), its 'segments'.")
    given = list(segments)
    devices = sorted({_field(segment, index, "device", 0) for index, segment in enumerate(given)})
    if device is None and len(devices) > 1:
        raise UsageError(f"the snapshot has segments of the devices {devices}: choose one with device=.")
    found = [
        _read_segment(segment, index)
        for index, segment in enumerate(given)
        if device is None or segment.get("device", 0) == device
    ]
    found.sort(key=lambda segment: segment.address)
    for before, after in pairwise(found):
        if after.address < before.end:
            raise UsageError(f"the segments at {before.address:#x} and {after.address:#x} of the snapshot overlap.")
    return found


def _field(segment: Mapping[str, Any], index: int, name: str, default: object = None) -> Any:
    if not isinstance(segment, Mapping):
        raise UsageError(f"segment {index} of the snapshot is no dict, but {type(segment).__name__}.")
    value = segment.get(name, default)
    if value is None:
        raise UsageError(f"segment {index} of the snapshot has no {name!r}.")
    return value


def _read_segment(segment: Mapping[str, Any], index: int) -> Segment:
    try:
        blocks = tuple(
            (int(block["size"]), int(block.get("requested_size", block["size"])), _STATES[block["state"]])
            for block in _field(segment, index, "blocks")
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"segment {index} of the snapshot has a block without a size or with an unknown state ({error}); a state "
            f"is one of {', '.join(_STATES)}."
        ) from None
    kind = _field(segment, index, "segment_type")
    size = _field(segment, index, "total_size")
    if kind not in ("small", "large"):
        raise UsageError(f"segment {index} of the snapshot has the type {kind!r}, which is neither small nor large.")
    if sum(block[0] for block in blocks) != size or min(block[0] for block in blocks or [(0,)]) <= 0:
        raise UsageError(f"the blocks of segment {index} of the snapshot do not fill its {size} bytes.")
    first, second = segment.get("segment_pool_id", (0, 0))
    return Segment(
        address=_field(segment, index, "address"),
        size=size,
        stream=_field(segment, index, "stream", 0),
        is_small=kind == "small",
        owner=(first, second),
        is_expandable=bool(segment.get("is_expandable", False)),
        blocks=blocks,
    )


def restore(state: AllocatorState, segments: list[Segment]) -> list[tuple[int, int]]:
    """Put segments into an empty state; (address, size) of the ranges that they take from the driver come back."""
    pools = {(True, (0, 0)): state.small, (False, (0, 0)): state.large}
    taken, grouped = [], _group_expandable(state, segments)
    for group, size in grouped:
        first = group[0]
        key = (first.is_small, first.owner)
        if key not in pools:
            pools[key] = Pool(first.is_small, first.owner)
        shelf = pools[key].shelf(first.stream)
        reservation = _reservation_of(state, group, size) if first.is_expandable else None
        _lay_out(state, shelf, group, reservation)
        taken.append((first.address, reservation.size if reservation else size))
    state.stats.reset_peaks()
    return taken


def _group_expandable(state: AllocatorState, segments: list[Segment]) -> list[tuple[list[Segment], int]]:
    """Segments with the bytes of their range; ranges of one expandable segment together.

    A snapshot does not say where an expandable segment began: its first mapped range is taken for that.
    """
    groups: list[tuple[list[Segment], int]] = []
    open_groups: dict[tuple[int, bool, tuple[int, int]], int] = {}
    for index, segment in enumerate(segments):
        if not segment.is_expandable:
            groups.append(([segment], segment.size))
            open_groups.clear()  # no reservation reaches past a segment of another kind
            continue
        key = (segment.stream, segment.is_small, segment.owner)
        at = open_groups.get(key)
        if at is not None and segment.end <= groups[at][0][0].address + groups[at][1]:
            groups[at][0].append(segment)
            continue
        wanted = reservation_bytes(state, segment.is_small, segment.size)
        others = (
            s.address for s in segments[index + 1 :] if not s.is_expandable or (s.stream, s.is_small, s.owner) != key
        )
        room = next(others, segment.address + wanted) - segment.address
        open_groups[key] = len(groups)
        groups.append(([segment], min(wanted, room)))
    return groups


def _reservation_of(state: AllocatorState, group: list[Segment], size: int) -> Reservation:
    base = group[0].address
    edges = [n for segment in group for n in (segment.address - base, segment.size)]
    page = math.gcd(state.settings.page_bytes(group[0].is_small), *edges)
    return Reservation(base, size // page * page, page)


def _lay_out(state: AllocatorState, shelf: Shelf, group: list[Segment], reservation: Reservation | None) -> None:
    """The blocks of one segment, linked; between mapped ranges and after the last one an unmapped block."""
    last: Block | None = None

    def add(address: int, size: int, kind: int, requested: int = 0) -> None:
        nonlocal last
        block = state.blocks[address] = Block(address, size, shelf, None, None)
        block.state, block.requested, block.reservation = kind, requested, reservation
        if last is not None:
            insert_after(last, block)
        last = block
        if kind == UNMAPPED:
            put_unmapped(block)
        else:
            last = _count(state, block)

    address = group[0].address
    for segment in group:
        if segment.address > address:
            add(address, segment.address - address, UNMAPPED)
        address = segment.address
        for size, requested, kind in segment.blocks:
            add(address, size, kind, requested)
            address += size
        state.stats.reserved_bytes += segment.size
        state.stats.n_segments += not segment.is_expandable
    end = address if reservation is None else reservation.address + reservation.size
    if end > address:
        add(address, end - address, UNMAPPED)


def _count(state: AllocatorState, block: Block) -> Block:
    if block.state == FREE:
        block.requested = 0
        block = merge_neighbours(block, state.blocks)
        put_on_shelf(block)
        return block
    state.stats.requested_bytes += block.requested
    if block.state == ALLOCATED:
        state.stats.allocated_bytes += block.size
    else:
        # Nothing tells which stream it waits for.
        block.n_events = 1
        state.stats.pending_bytes += block.size
        state.events.setdefault(None, deque()).append(block)
    return block
