"""Whether a run fits on a device, with how much to spare, and what would change it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torchledger.allocator.replaying import Replayed, replay_trace
from torchledger.journal.statements import RunStatement
from torchledger.read.checkpointed import CheckpointEstimate, estimate_checkpointed

SETTINGS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:128",
    "roundup_power2_divisions:8",
    "garbage_collection_threshold:0.8",
)
"""Allocator settings that a run is replayed under."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """The same requests under other settings of the allocator."""

    settings: str
    replayed: Replayed


@dataclass(frozen=True, slots=True)
class Fit:
    """What a dry run says of a device of ``capacity_bytes``.

    ``reserved_bytes`` is the highest that the allocator took from the driver; ``fits`` says that it was never refused.
    ``phase``, ``module`` and ``op`` are where the highest peak lies, or where the device had no more room.
    """

    fits: bool
    capacity_bytes: int
    reserved_bytes: int
    requested_bytes: int
    step: int | None
    phase: str
    module: str
    op: str
    alternatives: tuple[Alternative, ...] = ()
    checkpointed: CheckpointEstimate | None = None

    @property
    def spare_bytes(self) -> int:
        """What is left of the device at the peak."""
        return self.capacity_bytes - self.reserved_bytes


class BatchTrial(NamedTuple):
    """One value of a script's argument: whether the run fits, and what it reserved (None: not known)."""

    value: int
    fits: bool
    reserved_bytes: int | None


def judge_fit(
    run: RunStatement,
    device: str,
    *,
    fits: bool,
    capacity_bytes: int,
    reserved_bytes: int,
    trace: Iterable[tuple[str, int, int, int]],
    settings: str = "",
) -> Fit:
    """The verdict on a run, and what would change it.

    Args:
        run: What the ledger saw.
        device: Its name there.
        fits: Whether the allocator was never refused memory.
        capacity_bytes: What the allocator may take.
        reserved_bytes: The most that it took.
        trace: Its trace, from the beginning.
        settings: What it was run under.
    """
    step = run.peak_step
    peak = step.memory[device].peak if step and device in step.memory else None
    events = list(trace)
    others = [conf for conf in SETTINGS if conf != settings]
    journal = run.journals.get(step.index) if step else None
    return Fit(
        fits=fits,
        capacity_bytes=capacity_bytes,
        reserved_bytes=reserved_bytes,
        requested_bytes=step.memory[device].requested_peak_bytes if step and peak else 0,
        step=step.index if step else None,
        phase=peak.phase if peak else "",
        module=peak.module if peak else "",
        op=peak.op if peak else "",
        alternatives=tuple(
            Alternative(conf, replay_trace(events, conf, capacity_bytes=capacity_bytes)) for conf in others
        ),
        checkpointed=estimate_checkpointed(journal, device) if journal is not None else None,
    )
