"""The rules of the allocator, one by one: small calls and the numbers that follow from the specification."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest

import torchledger as tl
from allocator.random_calls import CountingDriver
from torchledger.allocator.driver import VirtualDriver
from torchledger.errors import DeviceOutOfMemoryError, QuantityError, UsageError

MIB = 1 << 20


def blocks_of(allocator: tl.CachingAllocator) -> list[list[tuple[int, str]]]:
    """(size, state) of the blocks of each segment."""
    return [[(block["size"], block["state"]) for block in segment["blocks"]] for segment in allocator.snapshot()]


def actions_of(allocator: tl.CachingAllocator, begun: int = 0) -> list[tuple[str, int]]:
    return [(action, size) for action, _, size, _ in allocator.trace[begun:]]


# ---- one request on a fresh allocator: the table of the specification


@pytest.mark.parametrize(
    ("nbytes", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1_024, 2 * MIB),
        (MIB, 1_048_576, 2 * MIB),
        (MIB + 1, 1_049_088, 20 * MIB),
        (10 * MIB + 1, 10_486_272, 12_582_912),
        (11 * MIB + 1, 12_582_912, 12_582_912),
        (13 * MIB + 1, 14_680_064, 14_680_064),
        (100 * MIB + 1, 104_858_112, 106_954_752),
    ],
)
def test_first_request(nbytes: int, block: int, segment: int) -> None:
    allocator = tl.CachingAllocator()
    allocator.malloc(nbytes)
    stats = allocator.stats
    assert (stats.requested_bytes, stats.allocated_bytes, stats.reserved_bytes) == (nbytes, block, segment)
    assert (stats.peak_requested_bytes, stats.peak_allocated_bytes, stats.peak_reserved_bytes) == (
        nbytes,
        block,
        segment,
    )
    assert (stats.active_bytes, stats.peak_active_bytes, stats.n_segments) == (block, block, 1)


def test_three_in_one_segment() -> None:
    allocator = tl.CachingAllocator()
    first, second, third = (allocator.malloc(13 * MIB // 2) for _ in range(3))
    assert (second - first, third - second) == (6_815_744, 6_815_744)
    assert blocks_of(allocator) == [[(size, "active_allocated") for size in (6_815_744, 6_815_744, 7_340_032)]]
    assert allocator.stats.reserved_bytes == 20 * MIB


@pytest.mark.parametrize(("nbytes", "block"), [(614_400, 655_360), (1_048_577, 1_310_720)])
def test_power_of_two_divisions(nbytes: int, block: int) -> None:
    allocator = tl.CachingAllocator("roundup_power2_divisions:4")
    allocator.malloc(nbytes)
    assert allocator.stats.allocated_bytes == block


def test_nothing_for_nothing() -> None:
    allocator = tl.CachingAllocator(trace=True)
    assert allocator.malloc(0) == 0
    allocator.free(0)
    allocator.record_stream(0, 1)
    assert (allocator.trace, allocator.snapshot(), allocator.stats.n_allocations) == ([], [], 0)


# ---- splitting, best fit, merging


@pytest.mark.parametrize(
    ("rest", "is_split"), [(MIB, False), (MIB + 512, True)], ids=["of a MiB stays", "over a MiB is split off"]
)
def test_large_blocks_are_split_over_a_mebibyte(rest: int, is_split: bool) -> None:
    allocator = tl.CachingAllocator()
    allocator.free(allocator.malloc(20 * MIB))
    allocator.malloc(20 * MIB - rest)
    assert len(blocks_of(allocator)[0]) == 1 + is_split
    assert allocator.stats.allocated_bytes == 20 * MIB - (rest if is_split else 0)


def test_small_blocks_are_split_to_the_last_512_bytes() -> None:
    allocator = tl.CachingAllocator()
    allocator.malloc(MIB)
    allocator.malloc(MIB - 512)
    assert blocks_of(allocator)[0][-1] == (512, "inactive")
    allocator.malloc(1)
    assert allocator.stats.reserved_bytes == 2 * MIB


def test_the_smallest_block_that_fits_then_the_lowest_address() -> None:
    allocator = tl.CachingAllocator()
    sizes = (4096, 512, 2048, 512, 2048, 512)
    addresses = [allocator.malloc(size) for size in sizes]
    for index in (0, 2, 4):
        allocator.free(addresses[index])
    assert allocator.malloc(1800) == addresses[2]
    assert allocator.malloc(2048) == addresses[4]
    assert allocator.malloc(2048) == addresses[0]
    assert allocator.malloc(2048) == addresses[0] + 2048


def test_pools_are_apart() -> None:
    allocator = tl.CachingAllocator()
    allocator.free(allocator.malloc(20 * MIB))
    allocator.malloc(512)
    assert [segment["segment_type"] for segment in allocator.snapshot()] == ["large", "small"]


def test_free_neighbours_merge() -> None:
    allocator = tl.CachingAllocator()
    first, second, third = (allocator.malloc(512) for _ in range(3))
    allocator.free(first)
    allocator.free(third)
    assert blocks_of(allocator) == [[(512, "inactive"), (512, "active_allocated"), (2 * MIB - 1024, "inactive")]]
    allocator.free(second)
    assert blocks_of(allocator) == [[(2 * MIB, "inactive")]]


# ---- streams


def test_free_blocks_stay_with_their_stream() -> None:
    allocator = tl.CachingAllocator()
    first = allocator.malloc(512, stream=1)
    allocator.free(first)
    assert allocator.malloc(512, stream=2) != first
    assert allocator.malloc(512, stream=1) == first
    assert allocator.stats.n_segments == 2


def test_a_recorded_block_waits_for_the_stream() -> None:
    allocator = tl.CachingAllocator(trace=True)
    address = allocator.malloc(600)
    allocator.record_stream(address, 7)
    allocator.free(address)
    stats = allocator.stats
    # As torch counts: requested bytes go when the block comes back, allocated ones when it is freed.
    assert (stats.requested_bytes, stats.allocated_bytes, stats.active_bytes) == (600, 0, 1024)
    assert blocks_of(allocator)[0][0] == (1024, "active_pending_free")
    other = allocator.malloc(600)
    assert other == address + 1024
    assert stats.peak_active_bytes == 2048
    assert stats.peak_allocated_bytes == 1024

    allocator.synchronize(6)
    allocator.malloc(512)
    assert stats.active_bytes == 1024 + 1024 + 512
    allocator.synchronize(7)
    assert actions_of(allocator)[-1] == ("alloc", 512)
    assert allocator.malloc(600) == address
    assert actions_of(allocator)[-2:] == [("free_completed", 600), ("alloc", 600)]


def test_all_recorded_streams_must_catch_up() -> None:
    allocator = tl.CachingAllocator()
    address = allocator.malloc(512)
    for stream in (1, 2, 2):
        allocator.record_stream(address, stream)
    allocator.free(address)
    allocator.synchronize(1)
    assert allocator.malloc(512) != address
    allocator.synchronize()
    assert allocator.malloc(512) == address


def test_events_recorded_after_a_synchronize_wait_for_the_next() -> None:
    allocator = tl.CachingAllocator()
    first, second = allocator.malloc(512), allocator.malloc(512)
    for address in (first, second):
        allocator.record_stream(address, 3)
    allocator.free(first)
    allocator.synchronize(3)
    allocator.free(second)
    assert allocator.malloc(512) == first
    assert allocator.malloc(512) not in (first, second)


def test_the_own_stream_is_ignored() -> None:
    allocator = tl.CachingAllocator()
    address = allocator.malloc(512, stream=5)
    allocator.record_stream(address, 5)
    allocator.free(address)
    assert allocator.stats.active_bytes == 0


# ---- returning memory


def test_empty_cache_returns_large_then_small_whole_segments() -> None:
    allocator = tl.CachingAllocator(trace=True)
    sizes = (512, 30 * MIB, 11 * MIB, 5 * MIB)
    addresses = [allocator.malloc(size) for size in sizes]
    allocator.malloc(MIB + 1)  # shares the segment of the 5 MiB
    for address in addresses:
        allocator.free(address)
    begun = len(allocator.trace)
    allocator.empty_cache()
    assert actions_of(allocator, begun) == [("segment_free", size) for size in (12 * MIB, 30 * MIB, 2 * MIB)]
    assert (allocator.stats.reserved_bytes, allocator.stats.n_segments) == (20 * MIB, 1)
    assert allocator.stats.peak_reserved_bytes == 64 * MIB
    assert (allocator.stats.num_device_alloc, allocator.stats.num_device_free) == (4, 3)


def test_empty_cache_waits_for_streams() -> None:
    allocator = tl.CachingAllocator(trace=True)
    address = allocator.malloc(20 * MIB)
    allocator.record_stream(address, 1)
    allocator.free(address)
    allocator.empty_cache()
    assert actions_of(allocator)[-2:] == [("free_completed", 20 * MIB), ("segment_free", 20 * MIB)]
    assert allocator.stats.num_sync_all_streams == 1


def test_a_refused_segment_is_retried_after_the_cache_was_returned() -> None:
    allocator = tl.CachingAllocator(capacity_bytes=64 * MIB, trace=True)
    allocator.free(allocator.malloc(40 * MIB))
    begun = len(allocator.trace)
    allocator.malloc(50 * MIB)
    assert [action for action, _ in actions_of(allocator, begun)] == ["segment_free", "segment_alloc", "alloc"]
    assert (allocator.stats.num_alloc_retries, allocator.stats.num_ooms) == (1, 0)


def test_out_of_memory() -> None:
    allocator = tl.CachingAllocator(capacity_bytes="64 MiB", trace=True)
    kept = allocator.malloc(30 * MIB)
    with pytest.raises(DeviceOutOfMemoryError) as caught:
        allocator.malloc(40 * MIB + 1, stream=3)
    error = caught.value
    assert (error.requested_bytes, error.segment_bytes, error.stream) == (40 * MIB + 1, 42 * MIB, 3)
    assert (error.capacity_bytes, error.allowed_bytes) == (64 * MIB, None)
    assert (error.reserved_bytes, error.allocated_bytes, error.active_bytes) == (30 * MIB, 30 * MIB, 30 * MIB)
    assert str(error).startswith("out of memory: 41,943,041 B were requested on stream 3")
    assert str(error).endswith("[out-of-memory]")
    assert isinstance(error, MemoryError)
    assert allocator.trace[-1] == ("oom", 34 * MIB, 40 * MIB + 512, 3)
    assert (allocator.stats.num_alloc_retries, allocator.stats.num_ooms) == (1, 1)
    # It goes on afterwards.
    allocator.free(kept)
    allocator.malloc(40 * MIB)


def test_out_of_memory_survives_pickle_and_copy() -> None:
    with pytest.raises(DeviceOutOfMemoryError) as caught:
        tl.CachingAllocator(capacity_bytes=0).malloc(1)
    for again in (pickle.loads(pickle.dumps(caught.value)), copy.copy(caught.value)):
        assert type(again) is DeviceOutOfMemoryError
        assert str(again) == str(caught.value)


def test_an_exbibyte_is_refused_before_anything_is_tried() -> None:
    allocator = tl.CachingAllocator(trace=True)
    with pytest.raises(DeviceOutOfMemoryError):
        allocator.malloc(1 << 60)
    assert (allocator.trace, allocator.stats.num_ooms, allocator.stats.num_alloc_retries) == ([], 0, 0)


# ---- max_split_size


def test_oversize_blocks_are_not_split_and_not_given_to_small_requests() -> None:
    allocator = tl.CachingAllocator("max_split_size_mb:32")
    oversize = allocator.malloc(60 * MIB)
    allocator.free(oversize)
    assert allocator.malloc(31 * MIB) != oversize
    assert allocator.malloc(40 * MIB + 512) == oversize  # 60 MiB is less than 20 MiB more
    assert allocator.stats.allocated_bytes == 92 * MIB  # segments are multiples of 2 MiB, and a MiB is not split off


def test_oversize_requests_take_nothing_that_is_too_large() -> None:
    allocator = tl.CachingAllocator("max_split_size_mb:32,max_non_split_rounding_mb:24")
    oversize = allocator.malloc(60 * MIB)
    allocator.free(oversize)
    assert allocator.malloc(36 * MIB) != oversize
    assert allocator.malloc(36 * MIB + 512) == oversize


def test_one_oversize_block_is_returned_before_the_whole_cache() -> None:
    allocator = tl.CachingAllocator("max_split_size_mb:32", capacity_bytes=220 * MIB, trace=True)
    for address in [allocator.malloc(size * MIB) for size in (24, 70, 100)]:
        allocator.free(address)
    begun = len(allocator.trace)
    allocator.malloc(48 * MIB)  # for 20 MiB more the 70 would serve: what is returned is the first that is large enough
    assert actions_of(allocator, begun)[0] == ("segment_free", 70 * MIB)
    assert allocator.stats.num_alloc_retries == 0
    assert allocator.stats.num_sync_all_streams == 0


def test_several_oversize_blocks_are_returned_from_the_largest_down() -> None:
    allocator = tl.CachingAllocator("max_split_size_mb:32", capacity_bytes=200 * MIB, trace=True)
    for address in [allocator.malloc(size * MIB) for size in (24, 40, 50, 60)]:
        allocator.free(address)
    begun = len(allocator.trace)
    allocator.malloc(100 * MIB)
    freed = [size // MIB for action, size in actions_of(allocator, begun) if action == "segment_free"]
    assert freed == [60, 50]
    assert allocator.stats.num_alloc_retries == 0


# ---- garbage collection


def test_old_segments_are_returned_above_the_threshold() -> None:
    allocator = tl.CachingAllocator("garbage_collection_threshold:0.5", capacity_bytes=200 * MIB, trace=True)
    allocator.set_memory_fraction(1.0)
    old = allocator.malloc(60 * MIB)
    allocator.free(old)
    recent = allocator.malloc(70 * MIB)
    for _ in range(10):
        allocator.free(recent)
        assert allocator.malloc(70 * MIB) == recent
    allocator.free(recent)
    begun = len(allocator.trace)
    allocator.malloc(75 * MIB)  # 130 MiB are reserved, 100 allowed without collecting
    assert actions_of(allocator, begun)[0] == ("segment_free", 60 * MIB)
    assert [size for action, size in actions_of(allocator, begun) if action == "segment_free"] == [60 * MIB]


def test_a_segment_of_average_age_is_old() -> None:
    allocator = tl.CachingAllocator("garbage_collection_threshold:0.5", capacity_bytes=200 * MIB, trace=True)
    allocator.set_memory_fraction(1.0)
    allocator.free(allocator.malloc(110 * MIB))
    begun = len(allocator.trace)
    allocator.malloc(20 * MIB, stream=1)  # the only free segment is as old as the average
    assert actions_of(allocator, begun)[0] == ("segment_free", 110 * MIB)


def test_no_collection_without_a_fraction_or_below_the_threshold() -> None:
    for fraction, conf in (
        (None, "garbage_collection_threshold:0.5"),
        (1.0, ""),
        (1.0, "garbage_collection_threshold:0.9"),
    ):
        allocator = tl.CachingAllocator(conf, capacity_bytes=200 * MIB, trace=True)
        if fraction is not None:
            allocator.set_memory_fraction(fraction)
        allocator.free(allocator.malloc(110 * MIB))
        allocator.malloc(20 * MIB, stream=1)
        assert "segment_free" not in [action for action, _ in actions_of(allocator)]


def test_a_fraction_limits_what_is_reserved() -> None:
    by_call = tl.CachingAllocator(capacity_bytes=200 * MIB)
    by_call.set_memory_fraction(0.25)
    by_setting = tl.CachingAllocator("per_process_memory_fraction:0.25", capacity_bytes=200 * MIB)
    for allocator in (by_call, by_setting):
        allocator.malloc(30 * MIB)
        with pytest.raises(DeviceOutOfMemoryError) as caught:
            allocator.malloc(22 * MIB)
        assert caught.value.allowed_bytes == 50 * MIB
        assert "52,428,800 B allowed" in str(caught.value)


# ---- expandable segments


def test_an_expandable_segment_grows_by_pages() -> None:
    allocator = tl.CachingAllocator("expandable_segments:True", capacity_bytes=1 << 30, trace=True)
    first = allocator.malloc(30 * MIB)
    second = allocator.malloc(30 * MIB)
    assert second == first + 30 * MIB
    assert allocator.trace[0] == ("segment_map", first, 40 * MIB, 0)
    assert allocator.trace[2] == ("segment_map", first + 40 * MIB, 20 * MIB, 0)
    assert allocator.stats.reserved_bytes == 60 * MIB
    assert allocator.stats.n_segments == 0
    assert [segment["is_expandable"] for segment in allocator.snapshot()] == [True]


def test_pages_in_the_middle_are_returned_and_mapped_again() -> None:
    allocator = tl.CachingAllocator("expandable_segments:True", capacity_bytes=1 << 30, trace=True)
    first, middle, last = (allocator.malloc(50 * MIB) for _ in range(3))
    allocator.free(middle)
    begun = len(allocator.trace)
    allocator.empty_cache()
    # 50..100 MiB are free: whole pages of 20 MiB are 60..100, and the last page, 140..160 MiB, is in use.
    assert allocator.trace[begun:] == [("segment_unmap", first + 60 * MIB, 40 * MIB, 0)]
    assert [segment["total_size"] for segment in allocator.snapshot()] == [60 * MIB, 60 * MIB]
    assert allocator.malloc(45 * MIB) == middle
    assert allocator.trace[-2] == ("segment_map", first + 60 * MIB, 40 * MIB, 0)
    assert last == first + 100 * MIB


def test_small_pages_and_small_remainders() -> None:
    allocator = tl.CachingAllocator("expandable_segments:True", trace=True)
    allocator.malloc(512)
    assert allocator.trace[0][0::2] == ("segment_map", 2 * MIB)
    large = allocator.malloc(20 * MIB - 512)
    assert allocator.malloc(MIB + 512) == large + 20 * MIB - 512  # the 512 B left are split off, and grown


def test_each_stream_has_its_own_expandable_segment() -> None:
    driver = CountingDriver(1 << 30)
    allocator = tl.CachingAllocator("expandable_segments:True", capacity_bytes=1 << 30, driver=driver)
    first, second = allocator.malloc(2 * MIB, stream=1), allocator.malloc(2 * MIB, stream=2)
    # An eighth more addresses than memory, in whole pages of 20 MiB.
    assert second - first == 1160 * MIB


def test_expandable_segments_meet_the_capacity() -> None:
    allocator = tl.CachingAllocator("expandable_segments:True", capacity_bytes=100 * MIB, trace=True)
    kept = allocator.malloc(50 * MIB)
    with pytest.raises(DeviceOutOfMemoryError):
        allocator.malloc(60 * MIB)
    assert allocator.stats.reserved_bytes <= 100 * MIB
    allocator.free(kept)
    allocator.malloc(95 * MIB)
    assert allocator.stats.reserved_bytes == 100 * MIB


def test_expandable_blocks_are_left_alone_once_turned_off() -> None:
    allocator = tl.CachingAllocator("expandable_segments:True")
    address = allocator.malloc(2 * MIB)
    allocator.free(address)
    allocator.change_settings("")
    other = allocator.malloc(2 * MIB)
    assert other != address
    assert [segment["is_expandable"] for segment in allocator.snapshot()] == [True, False] or other < address
    allocator.change_settings("expandable_segments:True")
    assert allocator.malloc(2 * MIB) in (address, other + 2 * MIB)


# ---- the driver


def test_a_driver_decides_the_addresses() -> None:
    class Fixed:
        def __init__(self) -> None:
            self.addresses = [0x9000000, 0x1000000]
            self.freed: list[int] = []

        def malloc(self, size: int) -> int:
            return self.addresses.pop()

        def free(self, address: int) -> None:
            self.freed.append(address)

    driver = Fixed()
    allocator = tl.CachingAllocator(driver=driver)  # type: ignore[arg-type]
    assert [allocator.malloc(20 * MIB), allocator.malloc(20 * MIB)] == [0x1000000, 0x9000000]
    allocator.free(0x9000000)
    allocator.empty_cache()
    assert driver.freed == [0x9000000]


@pytest.mark.parametrize(
    "refuse", [lambda: None, lambda: (_ for _ in ()).throw(MemoryError)], ids=["None", "MemoryError"]
)
def test_a_driver_may_refuse(refuse: Callable[[], None]) -> None:
    class Refusing(VirtualDriver):
        def malloc(self, size: int) -> int:
            refuse()
            return None  # type: ignore[return-value]

    with pytest.raises(DeviceOutOfMemoryError, match="a driver that refused"):
        tl.CachingAllocator(driver=Refusing()).malloc(1)


def test_a_capacity_holds_for_a_given_driver_too() -> None:
    allocator = tl.CachingAllocator(capacity_bytes=10 * MIB, driver=VirtualDriver())
    with pytest.raises(DeviceOutOfMemoryError):
        allocator.malloc(11 * MIB)


def test_a_driver_that_gives_an_address_twice_is_found() -> None:
    class Twice(VirtualDriver):
        def malloc(self, size: int) -> int:
            return 0x200000

    allocator = tl.CachingAllocator(driver=Twice())
    allocator.malloc(20 * MIB)
    with pytest.raises(UsageError, match="0x200000"):
        allocator.malloc(20 * MIB)


def test_expandable_segments_need_a_driver_that_maps() -> None:
    class Plain:
        def malloc(self, size: int) -> int:
            return 0

        def free(self, address: int) -> None:
            pass

    with pytest.raises(UsageError, match="reserve, map, unmap"):
        tl.CachingAllocator("expandable_segments:True", driver=Plain())  # type: ignore[arg-type]


def test_virtual_addresses_are_aligned_used_again_and_never_overlap() -> None:
    driver = VirtualDriver()
    first, second, third = driver.malloc(3 * MIB), driver.malloc(1), driver.malloc(2 * MIB)
    assert [address % (2 * MIB) for address in (first, second, third)] == [0, 0, 0]
    assert (second - first, third - second) == (4 * MIB, 2 * MIB)
    driver.free(first)
    driver.free(second)
    assert driver.malloc(6 * MIB) == first
    assert driver.malloc(1) == third + 2 * MIB


# ---- statistics and wrong use


def test_peaks_begin_again() -> None:
    allocator = tl.CachingAllocator()
    allocator.free(allocator.malloc(30 * MIB))
    address = allocator.malloc(600)
    stats = allocator.stats
    allocator.reset_peak_stats()
    assert (stats.peak_requested_bytes, stats.peak_allocated_bytes, stats.peak_active_bytes) == (600, 1024, 1024)
    assert stats.peak_reserved_bytes == 32 * MIB
    allocator.record_stream(address, 1)
    allocator.free(address)
    allocator.reset_peak_stats()
    assert (stats.peak_allocated_bytes, stats.peak_active_bytes) == (0, 1024)


def test_the_trace_is_empty_unless_asked_for() -> None:
    allocator = tl.CachingAllocator()
    allocator.free(allocator.malloc(1))
    assert allocator.trace == []


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda a: a.free(12345), "cannot free 0x3039: no block begins there"),
        (lambda a: a.free(a.malloc(1) + 512), "are free already"),
        (lambda a: a.free("x"), "cannot free 'x': no block begins there"),
        (lambda a: [a.free(address) for address in [a.malloc(1)] * 2], "are free already"),
        (lambda a: a.record_stream(1, 1), "cannot record a stream on 0x1"),
        (lambda a: a.malloc(-1), "no negative number of bytes: -1"),
        (lambda a: a.malloc(1.5), "an integer number of bytes, not 1.5"),
        (lambda a: a.set_memory_fraction(0.5), "give the allocator capacity_bytes="),
        (lambda a: tl.CachingAllocator(capacity_bytes=1).set_memory_fraction(1.5), "from 0 to 1, not 1.5"),
        (lambda a: tl.CachingAllocator("per_process_memory_fraction:0.5"), "give the allocator capacity_bytes="),
        (lambda a: a.change_settings("x:1"), "unknown allocator setting 'x'"),
    ],
)
def test_wrong_use_is_told(wrong: Callable[[tl.CachingAllocator], object], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        wrong(tl.CachingAllocator())
    assert says in str(caught.value)


def test_a_block_that_waits_is_not_freed_again() -> None:
    allocator = tl.CachingAllocator()
    address = allocator.malloc(512)
    allocator.record_stream(address, 1)
    allocator.free(address)
    with pytest.raises(UsageError, match="wait for another stream"):
        allocator.free(address)


def test_a_capacity_is_a_size() -> None:
    assert tl.CachingAllocator(capacity_bytes="80 GiB").capacity_bytes == 80 << 30
    with pytest.raises(QuantityError):
        tl.CachingAllocator(capacity_bytes="80G")
