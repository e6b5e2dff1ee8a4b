"""A program that ran on a real device, against the public trace of its allocator."""

from __future__ import annotations

import gzip
import json
import math
import os
from pathlib import Path

import pytest
import torch

from torchledger.allocator.caching import CachingAllocator
from torchledger.simulation.device import Simulation

FOLDER = Path(os.environ.get("TORCHLEDGER_TRACES", Path(__file__).resolve().parents[2].parent / "shared" / "traces"))
TRACE = FOLDER / "lm-small-from-empty.json.gz"


def softmax(x: torch.Tensor) -> torch.Tensor:
    highest = x.max(-1, keepdim=True).values
    exponentials = torch.exp(x - highest)
    return exponentials / exponentials.sum(-1, keepdim=True)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("bqd,bkd->bqk", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("bqk,bkd->bqd", softmax(scores), v)


def run_attention() -> tuple[CachingAllocator, list[tuple[str, int]]]:
    with Simulation("a100-sxm", "", None, "worst", True) as device:
        q, k, v = (torch.rand(8, 4096, 16, device="cuda", requires_grad=True) for _ in range(3))
        out = attend(q, k, v)
        out.sum().backward()
        del out
        return device.allocator, [(action, size) for action, _, size, _ in device.allocator.trace]


def test_peaks_of_attention_are_those_of_the_device() -> None:
    # Attention by hand, batch 8, 4,096 positions, width 16, float32, on an A100 (silmont2000/assignment2-systems).
    allocator, _ = run_attention()
    assert allocator.stats.peak_requested_bytes == 3_249_143_816
    assert allocator.stats.peak_allocated_bytes == 3_249_144_832
    assert allocator.stats.peak_reserved_bytes == 3_781_165_056


@pytest.mark.skipif(not TRACE.exists(), reason="the traces are no part of the project")
def test_every_event_of_attention_is_the_devices() -> None:
    _, mine = run_attention()
    (events,) = (trace for trace in json.loads(gzip.decompress(TRACE.read_bytes()))["traces"] if trace)
    real = [(action, size) for action, _, size, _ in events]
    # The sum of the output reduces in two stages, with a buffer and semaphores that no dispatch shows.
    first = next(i for i in range(len(real)) if real[i : i + 2] == [("alloc", 256), ("alloc", 4)])
    hidden = real[first : first + 6]
    assert hidden[2:] == [
        ("free_requested", 4),
        ("free_completed", 4),
        ("free_requested", 256),
        ("free_completed", 256),
    ]
    del real[first : first + 6]
    assert mine[: len(real)] == real
