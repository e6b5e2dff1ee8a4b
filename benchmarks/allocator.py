"""How many calls a second the caching allocator's model takes: one thread, default settings, no trace.

Two kinds of load: a training step (blocks of many sizes, kept forward and freed backward, with transient ones between)
over and over, and random traffic over hundreds and thousands of live blocks. The calls are prepared beforehand; only
carrying them out is timed, in processor time, and the median over the rounds is printed.

    python benchmarks/allocator.py [--calls N] [--rounds N]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

from tabulate import tabulate

import torchledger as tl

Calls = list[tuple[int, int]]  # (bytes, slot): bytes of 0 free the slot


def make_steps(n_calls: int, n_layers: int = 48) -> Calls:
    """Steps of a transformer-like loop: per layer some kept and some transient blocks, all of them freed backwards."""
    kept = (4_194_304, 12_582_912, 4096, 16_777_216, 2_097_152)
    calls: Calls = []
    while len(calls) < n_calls:
        slots = [(size, layer * len(kept) + index) for layer in range(n_layers) for index, size in enumerate(kept)]
        for size, slot in slots:
            calls += [(size, slot), (size // 2, -1), (0, -1)]
        for size, slot in reversed(slots):
            calls += [(size, -1), (0, -1), (0, slot)]
    return calls[:n_calls]


def make_traffic(n_calls: int, n_live: int) -> Calls:
    """Random sizes, uniform in their logarithm from 1 B to 64 MiB, over so many slots."""
    draw = random.Random(0)
    calls: Calls = []
    full: set[int] = set()
    for _ in range(n_calls):
        slot = draw.randrange(2 * n_live)
        calls.append((0 if slot in full else int(2 ** draw.uniform(0, 26)), slot))
        full ^= {slot}
    return calls


def time_calls(calls: Calls) -> float:
    """Processor seconds a call on a fresh allocator."""
    allocator = tl.CachingAllocator()
    malloc, free = allocator.malloc, allocator.free
    addresses: dict[int, int] = {}
    begun = time.process_time()
    for nbytes, slot in calls:
        if nbytes:
            addresses[slot] = malloc(nbytes)
        else:
            free(addresses[slot])
    return (time.process_time() - begun) / len(calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    loads: dict[str, Callable[[], Calls]] = {
        "training steps": lambda: make_steps(chosen.calls),
        "random, 300 live blocks": lambda: make_traffic(chosen.calls, 300),
        "random, 5,000 live blocks": lambda: make_traffic(chosen.calls, 5_000),
    }
    rows = []
    for name, make in loads.items():
        calls = make()
        seconds = statistics.median(time_calls(calls) for _ in range(chosen.rounds))
        rows.append([name, len(calls), f"{1 / seconds:,.0f}"])
    print(tabulate(rows, ["load", "calls", "calls/s"], colalign=("left", "right", "right")))


if __name__ == "__main__":
    main()
