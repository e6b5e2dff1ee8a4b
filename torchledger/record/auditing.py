"""Which step of a ledger is audited, and what came of it."""

from __future__ import annotations

from dataclasses import replace

from torchledger.journal.entries import Journal
from torchledger.journal.statements import StepReport
from torchledger.read.audit import read_audit
from torchledger.record.audit import Audit
from torchledger.record.mode import Recorder

LAST_AUDITED = 2
"""The second recorded step is audited, since a first one makes what later ones find; the first where it is the only."""


class Auditor:
    """Audits the first two recorded steps, and keeps the later audit.

    What it finds is told when a report is made: a step's report is not changed by the step that follows.
    """

    def __init__(self) -> None:
        self._n_begun = 0
        self._audited: StepReport | None = None
        self._problem = ""

    def begin(self, recorder: Recorder) -> None:
        """A recorded step begins."""
        if self._n_begun < LAST_AUDITED:
            self._n_begun += 1
            self._problem = recorder.begin_audit() or self._problem

    def read(self, audit: Audit, journal: Journal, step: StepReport, *, cut_early: bool) -> None:
        """It has ended, and this is its journal, which may leave its last calls to the next step."""
        if audit.problem:
            self._problem = audit.problem
            return
        n_events = len(journal.events)
        calls = [call for call in audit.calls if not cut_early or call.begin < n_events]
        rows, peak = read_audit(journal, calls)
        self._audited = replace(step, audit=rows, audited_peak=peak)

    def annotate(self, steps: tuple[StepReport, ...]) -> tuple[StepReport, ...]:
        """The steps with what the audit found, and with the audited one if it was not kept."""
        if self._audited is None:
            return steps
        found = {step.index: step for step in steps}
        step = found.get(self._audited.index, self._audited)
        found[step.index] = replace(step, audit=self._audited.audit, audited_peak=self._audited.audited_peak)
        return tuple(found[index] for index in sorted(found))

    @property
    def problem(self) -> str:
        """Why no step was audited, in words, or nothing."""
        return f"no step could be audited: {self._problem}" if self._problem and self._audited is None else ""
