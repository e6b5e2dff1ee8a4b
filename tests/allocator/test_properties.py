"""What holds after any calls: no gap, no overlap, free neighbours are one, and the counts are sums of the snapshot."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import hypothesis
from hypothesis import strategies as st

import torchledger as tl
from torchledger.errors import DeviceOutOfMemoryError

MIB = 1 << 20

confs = st.sampled_from(
    [
        "",
        "max_split_size_mb:24",
        "roundup_power2_divisions:[1:4,>:2]",
        "garbage_collection_threshold:0.5",
        "expandable_segments:True",
        "expandable_segments:True,large_segment_size_mb:12",
    ]
)
sizes = st.one_of(
    st.integers(0, 4096),
    st.integers(0, 4 * MIB),
    st.integers(0, 60).map(lambda n: n * MIB),
    st.integers(0, 60 * MIB),
)
calls = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), sizes, st.integers(0, 2)),
        st.tuples(st.just("free"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("record"), st.integers(0, 30), st.integers(0, 2)),
        st.tuples(st.sampled_from(["synchronize", "empty"]), st.integers(0, 2), st.just(0)),
    ),
    max_size=80,
)


def check_segments(allocator: tl.CachingAllocator) -> None:
    segments = allocator.snapshot()
    for before, after in pairwise(segments):
        assert before["address"] + before["total_size"] <= after["address"]
    for segment in segments:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            assert block["size"] > 0
            assert block["size"] % 512 == 0
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]
        states = [block["state"] for block in segment["blocks"]]
        assert ("inactive", "inactive") not in pairwise(states)


def check_counts(allocator: tl.CachingAllocator, live: dict[int, int]) -> None:
    segments = allocator.snapshot()

    def add(name: str, blocks: list[dict[str, Any]]) -> int:
        return sum(block[name] for block in blocks)

    blocks = [block for segment in segments for block in segment["blocks"]]
    allocated = [block for block in blocks if block["state"] == "active_allocated"]
    active = [block for block in blocks if block["state"] != "inactive"]
    stats = allocator.stats
    assert stats.allocated_bytes == add("size", allocated)
    assert stats.active_bytes == add("size", active)
    assert stats.requested_bytes == add("requested_size", active)
    assert stats.reserved_bytes == add("total_size", segments)
    assert stats.n_segments == sum(not segment["is_expandable"] for segment in segments)
    assert {block["address"]: block["requested_size"] for block in allocated} == live
    assert stats.requested_bytes <= stats.active_bytes <= stats.reserved_bytes
    for name in ("requested_bytes", "allocated_bytes", "active_bytes", "reserved_bytes"):
        assert getattr(stats, name) <= getattr(stats, f"peak_{name}")


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(
    conf=confs, capacity=st.sampled_from([120 * MIB, 1 << 40]), fraction=st.sampled_from([None, 0.8]), calls=calls
)
def test_books_agree_with_the_snapshot(
    conf: str, capacity: int, fraction: float | None, calls: list[tuple[str, int, int]]
) -> None:
    allocator = tl.CachingAllocator(conf, capacity_bytes=capacity, trace=True)
    if fraction is not None:
        allocator.set_memory_fraction(fraction)
    live: dict[int, int] = {}
    for action, first, second in calls:
        chosen = list(live)[first % len(live)] if live else 0
        if action == "malloc":
            try:
                address = allocator.malloc(first, second)
            except DeviceOutOfMemoryError:
                continue
            assert address not in live
            if first:
                live[address] = first
        elif action == "free":
            allocator.free(chosen)
            live.pop(chosen, None)
        elif action == "record":
            allocator.record_stream(chosen, second)
        elif action == "synchronize":
            allocator.synchronize(first)
        else:
            allocator.empty_cache()
        check_segments(allocator)
        check_counts(allocator, live)
        assert allocator.stats.reserved_bytes <= capacity
    check_trace(allocator)
    check_emptying(allocator, live)


def check_trace(allocator: tl.CachingAllocator) -> None:
    """The events alone give the same totals."""
    signs = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    assert sum(signs.get(action, 0) * size for action, _, size, _ in allocator.trace) == allocator.stats.reserved_bytes
    signs = {"alloc": 1, "free_completed": -1}
    assert sum(signs.get(action, 0) * size for action, _, size, _ in allocator.trace) == allocator.stats.requested_bytes


def check_emptying(allocator: tl.CachingAllocator, live: dict[int, int]) -> None:
    """When all is freed and returned, nothing is left."""
    for address in live:
        allocator.free(address)
    allocator.empty_cache()
    stats = allocator.stats
    assert (stats.requested_bytes, stats.allocated_bytes, stats.active_bytes, stats.reserved_bytes) == (0, 0, 0, 0)
    assert allocator.snapshot() == []
