"""The steps that a ledger keeps: the last ones and the one with the highest peak, with sums over all."""

from __future__ import annotations

from collections import deque

from torchledger.journal.entries import Journal
from torchledger.journal.statements import StepReport, is_accelerator
from torchledger.read.memory import with_peak_rows
from torchledger.read.totals import FlopTotals


class KeptSteps:
    """The steps of one ledger so far, in constant memory.

    Args:
        keep: How many of the last steps are kept, besides the one with the highest peak.
    """

    def __init__(self, keep: int) -> None:
        self.n_steps = 0
        self.peak_step: StepReport | None = None
        self.journals: dict[int, Journal] = {}
        """The journals of the last step and of the one with the highest peak, by step index."""
        self.devices: set[str] = set()
        self._flops = FlopTotals()
        self._last: deque[StepReport] = deque(maxlen=keep)
        self._with_rows: tuple[StepReport, StepReport] | None = None
        self.flops = self._flops.statement

    def add(self, step: StepReport, journal: Journal) -> None:
        """Keep one more step."""
        self._last.append(step)
        self.n_steps += 1
        self._flops.add(step.flops)
        if self.peak_step is None or is_higher(step, self.peak_step):
            self.peak_step = step
        kept = {step.index, self.peak_step.index}
        self.journals = {index: found for index, found in self.journals.items() if index in kept}
        self.journals[step.index] = journal
        self.devices.update(step.memory)

    def steps(self, *, rows: bool = True) -> tuple[StepReport, ...]:
        """The last steps, oldest first; with ``rows`` the one with the highest peak has all rows of that peak."""
        peak = self.with_rows() if rows else None
        return tuple(peak if peak is not None and step.index == peak.index else step for step in self._last)

    def with_rows(self) -> StepReport | None:
        """The step of the highest peak with all rows of that peak, read when they are first asked for."""
        step = self.peak_step
        if step is None:
            return None
        if self._with_rows is None or self._with_rows[0] is not step:
            self._with_rows = step, with_peak_rows(step, self.journals[step.index])
        return self._with_rows[1]


def is_higher(one: StepReport, other: StepReport) -> bool:
    """Whether one step's peak on its main device is the higher one, an accelerator before the CPU."""
    a, b = is_accelerator(one.main_device), is_accelerator(other.main_device)
    return (a, one.peak.total_bytes) > (b, other.peak.total_bytes)
