"""Which step of a ledger is audited, and what came of it."""

from __future__ import annotations

from dataclasses import replace

from torchledger.journal.calls import Call
from torchledger.journal.entries import Journal
from torchledger.journal.statements import StepReport
from torchledger.read.audit import read_audit
from torchledger.record.audit import Audit
from torchledger.record.mode import Recorder
from torchledger.record.storages import Cut

LAST_AUDITED = 2
"""The second recorded step is audited, since a first one makes what later ones find; the first where it is the only."""


class Auditor:
    """Audits the first two recorded steps, and keeps the later audit.

    What it finds is told when a report is made: a step's report is not changed by the step that follows.
    """

    def __init__(self) -> None:
        self._n_begun = 0
        self._audited: StepReport | None = None
        self._later: list[Call] = []
        self._problem = ""

    def begin(self, recorder: Recorder) -> None:
        """A recorded step begins."""
        later, self._later = self._later, []
        if self._n_begun < LAST_AUDITED:
            self._n_begun += 1
            self._problem = recorder.begin_audit(later) or self._problem

    def read(self, audit: Audit, journal: Journal, step: StepReport, at: Cut | None) -> None:
        """It has ended, now or at an earlier moment: what ran since belongs to the next one."""
        if audit.problem:
            self._problem = audit.problem
            return
        calls = audit.calls
        if at is not None:
            calls = [call for call in audit.calls if call.begin < at.events]
            self._later = audit.calls[len(calls) :]
            for call in self._later:
                call.begin, call.end = call.begin - at.events, call.end - at.events
        try:
            rows, peak = read_audit(journal, calls)
        except Exception as fault:  # the step itself has been read
            self._problem = f"{type(fault).__name__}: {fault}"
            return
        self._audited = replace(step, audit=rows, audited_peak=peak)

    def annotate(
        self, steps: tuple[StepReport, ...], peak_step: StepReport | None
    ) -> tuple[tuple[StepReport, ...], StepReport | None]:
        """The steps and the one of the highest peak, with what the audit found; the audited one joins them."""
        if self._audited is None:
            return steps, peak_step
        audited, found = self._audited, {step.index: step for step in steps}
        if peak_step is not None:
            found[peak_step.index] = peak_step
        step = found.get(audited.index, audited)
        found[step.index] = replace(step, audit=audited.audit, audited_peak=audited.audited_peak)
        return tuple(found[i] for i in sorted(found)), found[peak_step.index] if peak_step is not None else None

    @property
    def problem(self) -> str:
        """Why no step was audited, in words, or nothing."""
        return f"no step could be audited: {self._problem}" if self._problem and self._audited is None else ""
