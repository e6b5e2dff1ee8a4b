"""Random calls of an allocator, and what it does in answer, as lines that can be compared with those of torch's own.

``real_allocator.cpp`` reads the same calls and writes the same lines: torch's allocator over a driver made of counters.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable

import torchledger as tl
from torchledger.errors import DeviceOutOfMemoryError

MIB = 1 << 20
EDGES = (
    1,
    511,
    512,
    513,
    MIB - 1,
    MIB,
    MIB + 1,
    2 * MIB,
    10 * MIB - 512,
    10 * MIB,
    10 * MIB + 1,
    13 * MIB + 1,
    20 * MIB,
)

Call = tuple[str, int, int]


def make_calls(seed: int, n_calls: int, streams: tuple[int, ...] = (0,)) -> list[Call]:
    """malloc (m), free (f), record_stream (r), synchronize (s), empty_cache (e) and reset_peak_stats (p)."""
    draw = random.Random(seed)
    calls: list[Call] = []
    live: list[int] = []
    n_blocks = 0
    for _ in range(n_calls):
        chance = draw.random()
        if chance < 0.5 or not live:
            calls.append(("m", _draw_size(draw), draw.choice(streams)))
            live.append(n_blocks)
            n_blocks += 1
        elif chance < 0.9:
            n_freed = len(live) // 2 if draw.random() < 0.03 else 1
            calls += [("f", live.pop(draw.randrange(len(live))), 0) for _ in range(n_freed)]
        elif chance < 0.95:
            calls.append(("r", draw.choice(live), draw.choice(streams)))
        elif chance < 0.98:
            calls.append(("s", draw.choice(streams), 0))
        else:
            calls.append((draw.choice("eppp"), 0, 0))
    return calls


def _draw_size(draw: random.Random) -> int:
    kind = draw.random()
    if kind < 0.25:
        return draw.choice(EDGES)
    if kind < 0.5:
        return draw.randrange(1, 200) * MIB // 2
    return 0 if kind > 0.998 else 1 + draw.randrange(1 << draw.randrange(1, 28))


class CountingDriver:
    """Addresses that only go up, so that two allocators over two of them see the same ones; it holds the capacity."""

    def __init__(self, capacity: int) -> None:
        self.left = capacity
        self.end = 0x7000_0000_0000
        self.sizes: dict[int, int] = {}

    def reserve(self, size: int) -> int:
        address, self.end = self.end, self.end + -(-size // (2 * MIB)) * 2 * MIB
        return address

    def malloc(self, size: int) -> int | None:
        if size > self.left:
            return None
        self.left -= size
        address = self.reserve(size)
        self.sizes[address] = size
        return address

    def free(self, address: int) -> None:
        self.left += self.sizes.pop(address)

    def map(self, address: int, size: int) -> bool:
        if size > self.left:
            return False
        self.left -= size
        return True

    def unmap(self, address: int, size: int) -> None:
        self.left += size


def run_on_model(calls: Iterable[Call], conf: str, capacity: int, fraction: float | None) -> list[str]:
    """The events (T), addresses (M) and statistics (S) after each call."""
    allocator = tl.CachingAllocator(conf, capacity_bytes=capacity, driver=CountingDriver(capacity), trace=True)
    if fraction is not None:
        allocator.set_memory_fraction(fraction)
    lines: list[str] = []
    blocks: list[int] = []
    for action, first, second in calls:
        begun = len(allocator.trace)
        answer = []
        if action == "m":
            try:
                blocks.append(allocator.malloc(first, second))
                answer = [f"M {blocks[-1]}"]
            except DeviceOutOfMemoryError:
                blocks.append(0)
                answer = ["M oom"]
        elif action == "f":
            allocator.free(blocks[first])
        elif action == "r":
            allocator.record_stream(blocks[first], second)
        elif action == "s":
            allocator.synchronize(first)
        elif action == "e":
            allocator.empty_cache()
        else:
            allocator.reset_peak_stats()
        lines += [f"T {event} {address} {size} {stream}" for event, address, size, stream in allocator.trace[begun:]]
        lines += [*answer, "S " + " ".join(map(str, count_all(allocator)))]
    return lines


def count_all(allocator: tl.CachingAllocator) -> tuple[int, ...]:
    stats = allocator.stats
    return (
        stats.requested_bytes,
        stats.peak_requested_bytes,
        stats.allocated_bytes,
        stats.peak_allocated_bytes,
        stats.active_bytes,
        stats.peak_active_bytes,
        stats.reserved_bytes,
        stats.peak_reserved_bytes,
        stats.n_segments,
        stats.peak_n_segments,
        stats.num_alloc_retries,
        stats.num_ooms,
        stats.num_device_alloc,
        stats.num_device_free,
        stats.num_sync_all_streams,
    )


def in_one_order(lines: Iterable[str]) -> list[str]:
    """Completed frees that follow one another sorted: torch goes through streams in the order of a hash table."""
    ordered: list[str] = []
    completed: list[str] = []
    for line in lines:
        if line.startswith("T free_completed"):
            completed.append(line)
        else:
            ordered += [*sorted(completed), line]
            completed = []
    return ordered + sorted(completed)


def digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(in_one_order(lines)).encode()).hexdigest()[:16]


# (settings, capacity in MiB, memory fraction, streams, seed, what torch 2.14.1's own allocator gave): see `digest`.
Case = tuple[str, int, float | None, tuple[int, ...], int]
N_CALLS = 800
CONFS = (
    "",
    "max_split_size_mb:32",
    "max_split_size_mb:20,max_non_split_rounding_mb:30",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[1:2,4:8,16:0,>:4]",
    "garbage_collection_threshold:0.6",
    "max_split_size_mb:40,garbage_collection_threshold:0.5",
    "large_segment_size_mb:11",
    "large_segment_size_mb:64,max_split_size_mb:70",
    "per_process_memory_fraction:0.5",
    "expandable_segments:True",
    "expandable_segments:True,large_segment_size_mb:32",
    "expandable_segments:True,roundup_power2_divisions:8",
    "expandable_segments:True,garbage_collection_threshold:0.6",
    "expandable_segments:True,max_split_size_mb:32",
)
CASES: tuple[Case, ...] = tuple(
    (conf, capacity, fraction, streams, seed)
    for conf in CONFS
    for seed, (capacity, fraction, streams) in enumerate(
        [(81_920, None, (0,)), (1_024, None, (0, 16, 64)), (300, None, (0,)), (300, 0.8, (0, 16)), (1_024, 0.7, (0,))]
    )
)
