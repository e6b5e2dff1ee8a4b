"""What an allocator holds, and the small changes that all its parts make to it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from torchledger.allocator.blocks import FREE, PENDING, Block, Blocks, Pool, merge_neighbours, put_on_shelf
from torchledger.allocator.driver import Driver
from torchledger.allocator.settings import AllocatorSettings
from torchledger.allocator.statistics import AllocatorStats

TraceEntry = tuple[str, int, int, int]
"""(action, address, size, stream), with torch's names of actions."""


@dataclass(slots=True, eq=False)
class AllocatorState:
    """The pools, the blocks and the books of one device.

    Args:
        settings: what the configuration says.
        driver: where segments come from.
        capacity_bytes: what the device has for this allocator; None is without end.
        allowed_bytes: the part of it that a memory fraction allows; None where none was set.
        trace: where events go; None while none are kept.
    """

    settings: AllocatorSettings
    driver: Driver
    capacity_bytes: int | None
    trace: list[TraceEntry] | None
    allowed_bytes: int | None = None
    stats: AllocatorStats = field(default_factory=AllocatorStats)
    blocks: Blocks = field(default_factory=dict)
    small: Pool = field(default_factory=lambda: Pool(is_small=True))
    large: Pool = field(default_factory=lambda: Pool(is_small=False))
    private: list[Pool] = field(default_factory=list)
    events: dict[int | None, deque[Block]] = field(default_factory=dict)
    """By stream, in order: freed blocks that the stream may still read; None is a stream that nobody knows."""
    n_ready: dict[int | None, int] = field(default_factory=dict)
    """By stream: how many of its events the device has reached."""

    @property
    def collects_garbage(self) -> bool:
        """Whether ages are counted, and old segments returned."""
        return self.allowed_bytes is not None and self.settings.garbage_collection_threshold > 0

    @property
    def free_bytes(self) -> int | None:
        """What the device has left for this allocator."""
        return None if self.capacity_bytes is None else max(self.capacity_bytes - self.stats.reserved_bytes, 0)

    def record(self, action: str, address: int, size: int, stream: int) -> None:
        """Add an event to the trace, where one is kept."""
        if self.trace is not None:
            self.trace.append((action, address, size, stream))

    def has_room_for(self, size: int) -> bool:
        """Whether the device still has ``size`` bytes; the driver may know better."""
        return self.capacity_bytes is None or self.stats.reserved_bytes + size <= self.capacity_bytes


def defer_free(state: AllocatorState, block: Block) -> None:
    """Let a freed block wait for the streams that were recorded: one event each."""
    streams, block.streams = block.streams or {}, None
    block.state = PENDING
    block.n_events = len(streams)
    state.stats.pending_bytes += block.size
    for stream in streams:
        state.events.setdefault(stream, deque()).append(block)


def mark_reached(state: AllocatorState, streams: list[int | None]) -> None:
    """The device has reached all events that these streams have now; blocks come back at the next look."""
    for stream in streams:
        if stream in state.events:
            state.n_ready[stream] = len(state.events[stream])


def finish_events(state: AllocatorState) -> None:
    """Give back the blocks whose last event was reached, stream by stream in order."""
    for stream, n_ready in state.n_ready.items():
        waiting = state.events[stream]
        for _ in range(n_ready):
            block = waiting.popleft()
            block.n_events -= 1
            if block.n_events == 0:
                _complete_free(state, block)
        if not waiting:
            del state.events[stream]
    state.n_ready.clear()


def wait_for_events(state: AllocatorState) -> None:
    """Wait for all streams, and give back all blocks that waited."""
    state.stats.num_sync_all_streams += 1
    mark_reached(state, list(state.events))
    finish_events(state)


def _complete_free(state: AllocatorState, block: Block) -> None:
    state.record("free_completed", block.address, block.requested, block.shelf.stream)
    state.stats.pending_bytes -= block.size
    state.stats.requested_bytes -= block.requested
    block.state = FREE
    put_on_shelf(merge_neighbours(block, state.blocks))
