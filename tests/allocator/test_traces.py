"""Traces of real devices replay exactly: each address, each segment, each statistic that is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from allocator.device_traces import FILES, FOLDER, live_blocks, load_trace, replay, unwind

# (requested, allocated, reserved), published with the traces or read from their devices.
KNOWN_PEAKS = {
    "lm-small-from-empty": (3_249_143_816, 3_249_144_832, 3_781_165_056),
    "zeroth-order-from-empty": (1_783_664_516, 1_790_894_592, 1_897_922_560),
}

needs_traces = pytest.mark.skipif(not FILES, reason=f"no traces in {FOLDER}; TORCHLEDGER_TRACES names another folder")


@needs_traces
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.split(".")[0])
def test_replays(path: Path) -> None:
    trace = load_trace(path)
    start = unwind(trace)
    assert (start == []) == ("from-empty" in path.name)
    allocator, faults = replay(trace, start)
    assert faults == []
    assert allocator.trace == trace.events
    end = allocator.snapshot()
    assert live_blocks(end) == live_blocks(trace.segments)
    ranges = [(segment["address"], segment["total_size"]) for segment in end]
    assert ranges == sorted((segment["address"], segment["total_size"]) for segment in trace.segments)


@needs_traces
@pytest.mark.parametrize("name", KNOWN_PEAKS)
def test_known_peaks(name: str) -> None:
    trace = load_trace(FOLDER / f"{name}.json.gz")
    stats = replay(trace, [])[0].stats
    peaks = (stats.peak_requested_bytes, stats.peak_allocated_bytes, stats.peak_reserved_bytes)
    assert peaks == KNOWN_PEAKS[name]


@needs_traces
def test_the_comparison_finds_a_difference() -> None:
    trace = load_trace(FOLDER / "lm-small-from-empty.json.gz")
    index = next(i for i, event in enumerate(trace.events) if event[0] == "alloc" and i > 20)
    action, address, size, stream = trace.events[index]
    trace.events[index] = (action, address + 512, size, stream)
    assert replay(trace, [])[1] != []
