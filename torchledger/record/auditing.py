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
            self._problem = recorder.begin_audit()

    def read(self, audit: Audit, journal: Journal, step: StepReport) -> None:
        """It has ended, and this is what became of it."""
        self._problem = audit.problem
        if self._problem:
            return
        calls = [call for call in audit.calls if call.begin <= len(journal.events)]
        rows, peak = read_audit(journal, calls)
        self._audited = replace(step, audit=rows, audited_peak=peak)

    def annotate(self, steps: tuple[StepReport, ...]) -> tuple[StepReport, ...]:
        """The steps with what the audit found, and with the audited one if it was not kept."""
        if self._audited is None:
            return self._with_problem(steps)
        found = {step.index: step for step in steps}
        step = found.get(self._audited.index, self._audited)
        found[step.index] = replace(step, audit=self._audited.audit, audited_peak=self._audited.audited_peak)
        return tuple(found[index] for index in sorted(found))

    def _with_problem(self, steps: tuple[StepReport, ...]) -> tuple[StepReport, ...]:
        if not self._problem or not steps:
            return steps
        note = f"no step could be audited: {self._problem}"
        return (replace(steps[0], notes=(*steps[0].notes, note)), *steps[1:])
