"""Which steps of a loop are recorded."""

from __future__ import annotations

from dataclasses import dataclass

from torchledger.errors import UsageError


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which steps are recorded; made by `schedule`."""

    wait: int
    warmup: int
    active: int
    repeat: int = 0
    skip_first: int = 0

    def records(self, step: int) -> bool:
        """Whether step number ``step`` (from 0) is recorded."""
        step -= self.skip_first
        length = self.wait + self.warmup + self.active
        if step < 0 or (self.repeat and step >= self.repeat * length):
            return False
        return step % length >= self.wait + self.warmup


def schedule(*, wait: int = 0, warmup: int = 0, active: int, repeat: int = 0, skip_first: int = 0) -> Schedule:
    """A schedule with the meaning of `torch.profiler.schedule`: skip, then cycles of wait, warm up and record.

    Outside the active steps the ledger costs nothing; their wall time is what MFU is computed from.

    Args:
        wait: Steps of each cycle that are left alone.
        warmup: Steps after them that are left alone too.
        active: Steps of each cycle that are recorded.
        repeat: Number of cycles; 0 goes on for ever.
        skip_first: Steps before the first cycle.

    Raises:
        UsageError: a number is negative or not an int, or ``active`` is 0.

    >>> [schedule(wait=1, warmup=1, active=2).records(step) for step in range(6)]
    [False, False, True, True, False, False]
    """
    for name, value in (("wait", wait), ("warmup", warmup), ("repeat", repeat), ("skip_first", skip_first)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise UsageError(f"schedule({name}={value!r}): give a number of steps, 0 or more.")
    if not isinstance(active, int) or isinstance(active, bool) or active < 1:
        raise UsageError(f"schedule(active={active!r}): give the number of steps to record, 1 or more.")
    return Schedule(wait, warmup, active, repeat, skip_first)
