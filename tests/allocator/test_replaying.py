"""The same requests under other settings, against an allocator that was run so."""

from __future__ import annotations

import pytest

from torchledger.allocator.caching import CachingAllocator
from torchledger.allocator.replaying import replay_trace

MIB = 2**20


def work(allocator: CachingAllocator) -> None:
    held = [allocator.malloc(n * MIB + 1) for n in (1, 3, 7, 12, 30, 2)]
    for address in held[1::2]:
        allocator.free(address)
    held = [allocator.malloc(n * MIB) for n in (5, 13, 1)]
    allocator.free(held[1])


@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "max_split_size_mb:20", "roundup_power2_divisions:4"])
def test_a_replay_is_what_the_run_would_have_been(conf: str) -> None:
    traced, direct = CachingAllocator(trace=True), CachingAllocator(conf)
    work(traced)
    work(direct)
    replayed = replay_trace(traced.trace, conf)
    stats = direct.stats
    assert replayed.reserved_bytes == stats.peak_reserved_bytes
    assert replayed.allocated_bytes == stats.peak_allocated_bytes
    assert replayed.requested_bytes == stats.peak_requested_bytes == traced.stats.peak_requested_bytes
    assert replayed.fits


def test_a_device_that_is_too_small() -> None:
    traced = CachingAllocator(trace=True)
    work(traced)
    assert not replay_trace(traced.trace, capacity_bytes=40 * MIB).fits
    assert replay_trace(traced.trace, capacity_bytes=traced.stats.peak_reserved_bytes).fits
