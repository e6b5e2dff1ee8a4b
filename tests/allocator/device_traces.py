"""Public traces of real devices: reading them, going back to where they began, and replaying them on a model.

The traces are no part of the project. A trace ends with the state of the device; the state before its first event
follows from undoing it from the end.
"""

from __future__ import annotations

import gzip
import json
import os
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torchledger as tl

FOLDER = Path(os.environ.get("TORCHLEDGER_TRACES", Path(__file__).resolve().parents[2].parent / "shared" / "traces"))
FILES = sorted(FOLDER.glob("*.json.gz"))
MIB = 1 << 20


@dataclass
class DeviceTrace:
    segments: list[dict[str, Any]]
    """At the end, in torch's shape."""
    events: list[tuple[str, int, int, int]]


def load_trace(path: Path) -> DeviceTrace:
    content = json.loads(gzip.decompress(path.read_bytes()))
    (events,) = (trace for trace in content["traces"] if trace)
    segments = []
    for device, address, size, stream, kind, blocks in content["segments"]:
        assert device == 0
        segments.append(describe_segment(address, size, stream, kind, blocks))
    return DeviceTrace(segments, [tuple(event) for event in events])


def describe_segment(address: int, size: int, stream: int, kind: str, blocks: list[Any]) -> dict[str, Any]:
    rows = [{"size": size, "requested_size": requested, "state": state} for size, requested, state in blocks]
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "stream": stream,
        "segment_type": kind,
        "is_expandable": False,
        "blocks": rows,
    }


def round_up(nbytes: int) -> int:
    return -(-nbytes // 512) * 512


def unwind(trace: DeviceTrace) -> list[dict[str, Any]]:
    """The segments before the first event."""
    segments = {s["address"]: (s["total_size"], s["stream"], s["segment_type"]) for s in trace.segments}
    live: dict[int, tuple[int, int | None]] = {}  # address -> (requested, size where the end of the trace tells)
    for segment in trace.segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                live[address] = (block["requested_size"], block["size"])
            address += block["size"]
    for action, address, size, stream in reversed(trace.events):
        if action == "alloc":
            assert live.pop(address)[0] == size
        elif action == "free_completed":
            assert address not in live
            live[address] = (size, None)
        elif action == "segment_alloc":
            del segments[address]
        elif action == "segment_free":
            segments[address] = (size, stream, "small" if size == 2 * MIB else "large")
        else:
            assert action == "free_requested", action
    return [
        describe_segment(address, size, stream, kind, lay_out(address, size, kind, live, trace.events))
        for address, (size, stream, kind) in sorted(segments.items())
    ]


def lay_out(
    start: int, size: int, kind: str, live: dict[int, tuple[int, int | None]], events: list[tuple[str, int, int, int]]
) -> list[tuple[int, int, str]]:
    """The blocks of one segment; what lies between allocated ones is free."""
    addresses = sorted(address for address in live if start <= address < start + size)
    blocks, at = [], start
    for address, after in zip(addresses, [*addresses, start + size][1:], strict=True):
        if address > at:
            blocks.append((address - at, 0, "inactive"))
        requested, known = live[address]
        room = after - address
        block = known if known is not None else block_size(address, requested, room, kind, events)
        blocks.append((block, requested, "active_allocated"))
        at = address + block
    if at < start + size:
        blocks.append((start + size - at, 0, "inactive"))
    return blocks


def block_size(address: int, requested: int, room: int, kind: str, events: list[tuple[str, int, int, int]]) -> int:
    """The size of a block that is freed within the trace, which only its surroundings tell."""
    size = round_up(requested)
    if kind == "small":
        return size
    if room - size <= MIB:
        return room  # no block of the large pool is so small: the rest belongs to this one
    for action, other, _, _ in events:
        if action == "free_requested" and other == address:
            break
        if action == "alloc" and address < other <= address + size + MIB:
            return other - address  # a free block began there, and the low part of it was given out
    return size


@dataclass
class ReplayDriver:
    """Hands out the segments that the device was given, in that order."""

    expected: deque[tuple[str, int, int, int]]
    faults: list[str] = field(default_factory=list)

    def malloc(self, size: int) -> int:
        if not self.expected:
            raise AssertionError(f"the device asked for no segment here, the model for {size}")
        _, address, real, _ = self.expected.popleft()
        if real != size:
            self.faults.append(f"segment of {size}, on the device {real}")
        return address

    def free(self, address: int) -> None:
        """Compared through the trace."""


def replay(trace: DeviceTrace, start: list[dict[str, Any]]) -> tuple[tl.CachingAllocator, list[str]]:
    """The model after all requests of the trace, and where it went another way than the device."""
    driver = ReplayDriver(deque(event for event in trace.events if event[0] == "segment_alloc"))
    allocator = tl.CachingAllocator.from_snapshot(start, driver=driver, trace=True)
    index = 0
    while index < len(trace.events):
        action, address, size, stream = trace.events[index]
        begun = len(allocator.trace)
        if action in ("free_requested", "free_completed"):
            if action == "free_requested":
                allocator.free(address)
        elif action == "alloc":
            allocator.malloc(size, stream)
        elif action == "segment_free":
            # Segments go at an empty_cache(), or because the driver refused the request that comes after.
            allocator.empty_cache()
        else:  # the request that needs the segment
            request = next(event for event in trace.events[index:] if event[0] == "alloc")
            allocator.malloc(request[2], request[3])
        done = allocator.trace[begun:]
        if action == "free_completed":
            done = [trace.events[index]] if trace.events[index] == allocator.trace[-1] else []
        real = trace.events[index : index + max(len(done), 1)]
        if done != real:
            driver.faults.append(f"event {index}: device {real}, model {done}")
            break
        if action == "free_requested":
            done = done[:1]
        index += max(len(done), 1)
    return allocator, driver.faults


def live_blocks(segments: list[dict[str, Any]]) -> list[tuple[int, int, int, int]]:
    """(segment, offset, requested, size) of each allocated block."""
    found = []
    for segment in segments:
        at = 0
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                found.append((segment["address"], at, block["requested_size"], block["size"]))
            at += block["size"]
    return sorted(found)
