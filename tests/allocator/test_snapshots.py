"""Segments out and in again: an allocator that begins in the middle goes on as the one that made the snapshot."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import torchledger as tl
from allocator.random_calls import CountingDriver, make_calls
from torchledger.errors import DeviceOutOfMemoryError, UsageError

MIB = 1 << 20


def play(
    allocator: tl.CachingAllocator, calls: list[tuple[str, int, int]], blocks: dict[int, int], first_id: int = 0
) -> list[object]:
    """Carry calls out; what they gave."""
    given: list[object] = []
    for action, first, second in calls:
        if action == "m":
            try:
                blocks[first_id] = allocator.malloc(first, second)
                given.append(blocks[first_id])
            except DeviceOutOfMemoryError as error:
                given.append((error.reserved_bytes, error.allocated_bytes))
            first_id += 1
        elif action == "f" and first in blocks:  # of those that were not refused
            allocator.free(blocks.pop(first))
        elif action == "e":
            allocator.empty_cache()
    given.append(allocator.snapshot())
    return given


@pytest.mark.parametrize(
    "conf",
    [
        "",
        "max_split_size_mb:32",
        "roundup_power2_divisions:4",
        "expandable_segments:True",
        "expandable_segments:True,large_segment_size_mb:32",
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_goes_on_as_the_original(conf: str, seed: int) -> None:
    # A snapshot does not tell where an expandable segment began: there nothing is returned before it is taken.
    is_expandable = "expandable" in conf
    capacity = (80 << 30) if is_expandable else 400 * MIB
    calls = [call for call in make_calls(seed, 600, (0, 1)) if call[0] in ("mf" if is_expandable else "mfe")]
    before, after = calls[:300], [*calls[300:], ("e", 0, 0), *make_calls(seed + 10, 100, (0, 1))]
    n_before = sum(action == "m" for action, _, _ in before)
    driver = CountingDriver(capacity)
    original = tl.CachingAllocator(conf, capacity_bytes=capacity, driver=driver)
    blocks: dict[int, int] = {}
    play(original, before, blocks)
    # What the driver holds is copied with it: both go on from the same addresses.
    copied = pickle.loads(pickle.dumps(driver))
    restored = tl.CachingAllocator.from_snapshot(original.snapshot(), conf, capacity_bytes=capacity, driver=copied)

    assert restored.snapshot() == original.snapshot()
    for name in ("requested_bytes", "allocated_bytes", "active_bytes", "reserved_bytes", "n_segments"):
        assert getattr(restored.stats, name) == getattr(original.stats, name)
        assert getattr(restored.stats, f"peak_{name}") == getattr(original.stats, name)
    assert play(restored, after, dict(blocks), n_before) == play(original, after, dict(blocks), n_before)


def test_the_shape_is_torchs() -> None:
    allocator = tl.CachingAllocator()
    first, second = allocator.malloc(100, stream=3), allocator.malloc(600, stream=3)
    allocator.record_stream(second, 4)
    allocator.free(second)
    assert allocator.snapshot() == [
        {
            "device": 0,
            "address": first,
            "total_size": 2 * MIB,
            "allocated_size": 512,
            "active_size": 1536,
            "requested_size": 700,
            "stream": 3,
            "segment_type": "small",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": [
                {"address": first, "size": 512, "requested_size": 100, "state": "active_allocated", "frames": []},
                {"address": second, "size": 1024, "requested_size": 600, "state": "active_pending_free", "frames": []},
                {
                    "address": first + 1536,
                    "size": 2 * MIB - 1536,
                    "requested_size": 0,
                    "state": "inactive",
                    "frames": [],
                },
            ],
        }
    ]


def test_torchs_own_tools_read_it() -> None:
    """The page that torch draws from a snapshot lists our segments."""
    viz = pytest.importorskip("torch.cuda._memory_viz")
    allocator = tl.CachingAllocator()
    allocator.malloc(30 * MIB)
    allocator.malloc(MIB)
    text = viz.segsum({"segments": allocator.snapshot()})
    assert "30.0MiB" in text


def make_segment(**changes: Any) -> dict[str, Any]:
    """A segment as older snapshots have it: blocks without addresses, no pool, nothing expandable."""
    segment = {
        "device": 0,
        "address": 0x200000,
        "total_size": 2 * MIB,
        "stream": 0,
        "segment_type": "small",
        "blocks": [
            {"size": 1024, "requested_size": 1000, "state": "active_allocated"},
            {"size": 2 * MIB - 1024, "requested_size": 5, "state": "inactive"},
        ],
    }
    return segment | changes


def test_begins_in_the_middle() -> None:
    allocator = tl.CachingAllocator.from_snapshot([make_segment()], trace=True)
    stats = allocator.stats
    assert (stats.requested_bytes, stats.allocated_bytes, stats.reserved_bytes) == (1000, 1024, 2 * MIB)
    assert allocator.malloc(512) == 0x200000 + 1024
    allocator.free(0x200000)
    allocator.free(0x200000 + 1024)
    allocator.empty_cache()
    assert allocator.trace[-1] == ("segment_free", 0x200000, 2 * MIB, 0)
    # New segments keep clear of those that were there.
    assert allocator.malloc(1) >= 0x200000


def test_blocks_that_wait_do_so_until_everything_is_done() -> None:
    blocks = [{"size": 2 * MIB, "requested_size": 2 * MIB, "state": "active_pending_free"}]
    allocator = tl.CachingAllocator.from_snapshot([make_segment(blocks=blocks)])
    assert (allocator.stats.active_bytes, allocator.stats.allocated_bytes) == (2 * MIB, 0)
    allocator.synchronize(0)
    allocator.malloc(512)
    assert allocator.stats.active_bytes == 2 * MIB + 512
    allocator.synchronize()
    allocator.malloc(512)
    assert allocator.stats.active_bytes == 1024


def test_private_pools_stay_apart() -> None:
    private = make_segment(address=0x600000, segment_pool_id=(1, 0))
    allocator = tl.CachingAllocator.from_snapshot([make_segment(), private])
    allocator.free(0x600000)
    allocator.malloc(2 * MIB - 1024 - 512)
    allocator.empty_cache()
    pools = [(segment["address"], segment["segment_pool_id"]) for segment in allocator.snapshot()]
    assert (0x600000, (1, 0)) in pools
    assert allocator.snapshot()[1]["allocated_size"] == 0


def test_one_device_of_several() -> None:
    segments = [make_segment(), make_segment(device=1, total_size=4096, blocks=[{"size": 4096, "state": "inactive"}])]
    assert tl.CachingAllocator.from_snapshot(segments, device=1).stats.reserved_bytes == 4096
    with pytest.raises(UsageError, match=r"of the devices \[0, 1\]: choose one with device="):
        tl.CachingAllocator.from_snapshot(segments)


@pytest.mark.parametrize(
    ("segments", "says"),
    [
        ({"segments": [], "device_traces": []}, "takes the list of segments"),
        ([7], "segment 0 of the snapshot is no dict, but int"),
        ([{k: v for k, v in make_segment().items() if k != "address"}], "has no 'address'"),
        ([make_segment(blocks=[{"size": 1, "state": "odd"}])], "unknown state"),
        ([make_segment(blocks=[{"state": "inactive"}])], "block without a size"),
        ([make_segment(blocks=[])], "do not fill its 2097152 bytes"),
        ([make_segment(total_size=4096)], "do not fill its 4096 bytes"),
        ([make_segment(segment_type="medium")], "neither small nor large"),
        ([make_segment(), make_segment(address=0x200000 + 512)], "overlap"),
    ],
)
def test_what_cannot_be_read_is_told(segments: Any, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        tl.CachingAllocator.from_snapshot(segments)
    assert says in str(caught.value)
