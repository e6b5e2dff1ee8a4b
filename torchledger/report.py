"""The report: what a ledger found, with print, save and load."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Self

from torchledger.errors import BudgetExceeded, ReportFileError
from torchledger.gate.budgets import Budget, find_doubts, judge_budget
from torchledger.gate.judging import Verdict
from torchledger.journal.entries import Journal
from torchledger.journal.files import read_document, shown_path, write_text
from torchledger.journal.schema import decode_run, dump_run, encode_run
from torchledger.journal.statements import RunStatement, StepReport
from torchledger.read.timeline import timeline
from torchledger.read.utilization import read_utilization
from torchledger.render.text import page_width, render_text
from torchledger.render.verdicts import accept_budget, broken_only, render_broken
from torchledger.units import format_number


@dataclass(frozen=True, repr=False)
class Report(RunStatement):
    """What a ledger found: the kept steps, the sums over all of them, and where the peak is.

    ``print(report)`` shows it as a page of tables; `save` and `load` keep it as JSON.

    >>> Report(n_steps=0).peak.total_bytes
    0
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        steps = tuple(_with_timeline(step, self.journals.get(step.index)) for step in self.steps)
        peak = self.peak_step
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "peak_step", next((s for s in steps if peak and s.index == peak.index), None))

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization, 1.0 being all of the accelerator's dense peak.

        ``None`` where the accelerator or the time of unrecorded steps is not known; the printed page gives the reason.

        >>> Report().mfu is None
        True
        """
        return read_utilization(self).mfu

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilization, as `mfu`, with recompute and what fused attention computes twice.

        >>> Report().hfu is None
        True
        """
        return read_utilization(self).hfu

    def check(self, budget: Budget) -> tuple[Verdict, ...]:
        """Holds the report against a budget; a verdict for each of its limits, if all are kept.

        A category's budget is held against its own highest bytes of all steps, ``peak`` against the highest total, and
        FLOPs against those of the step that has most. Warns where the numbers leave something out: ops whose cost is
        unknown, compiled regions, steps that were not kept.

        Raises:
            BudgetExceeded: a number lies above its budget and the tolerance; with the largest rows at the peak.
            UsageError: no step was recorded.
            FaultyReportError: the ledger failed while it recorded.

        >>> import torch, torchledger as tl
        >>> with tl.Ledger() as ledger:
        ...     ones = torch.ones(1024)
        >>> [verdict.outcome for verdict in ledger.report.check(tl.Budget(peak="4 KiB"))]
        ['PASS']
        """
        __tracebackhide__ = True
        verdicts = judge_budget(self, budget)
        broken = tuple(broken_only(verdicts))
        if broken:
            raise BudgetExceeded(render_broken(self, broken, accept=accept_budget(broken)), broken)
        for doubt in find_doubts(self, budget.limits):
            warnings.warn(f"a budget holds, but {doubt}", stacklevel=2)
        return verdicts

    def save(self, path: str | os.PathLike[str], journal: bool = False) -> None:
        """Writes the report as JSON, at once: the file is there whole, or as it was before.

        Args:
            path: where; its folder must exist, a file that is there is replaced.
            journal: also write the journals that were kept, so that ``timeline()`` works after `load`.

        Raises:
            ReportWriteError: the folder is missing, or the file cannot be written.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Report().save(f"{folder}/report.json")
        ...     Report.load(f"{folder}/report.json") == Report()
        True
        """
        write_text(path, dump_run(self, journal=journal))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The report in a file that `save` wrote, whatever torchledger's version was, if not newer than this one.

        Raises:
            ReportFileError: the file cannot be read, is broken, is no report, or is of a newer schema.

        >>> Report.load("no/such/report.json")
        Traceback (most recent call last):
        torchledger.errors.ReportFileError: cannot read no/such/report.json: ...
        """
        document = read_document(path)
        try:
            return cls.from_dict(document)
        except ReportFileError as error:
            raise ReportFileError(f"{shown_path(path)}: {error.message}") from None

    def to_dict(self, journal: bool = False) -> dict[str, Any]:
        """The report as a dict that JSON can hold: what `save` writes.

        >>> Report.from_dict(Report().to_dict()) == Report()
        True
        """
        return encode_run(self, journal=journal)

    @classmethod
    def from_dict(cls, document: object) -> Self:
        """The report in a dict that `to_dict` made, checked whole.

        Raises:
            ReportFileError: the dict is no report, is damaged, or is of a newer schema; with the path inside it.

        >>> Report.from_dict({})
        Traceback (most recent call last):
        torchledger.errors.ReportFileError: not a torchledger report...
        """
        run = decode_run(document)
        return cls(**{field.name: getattr(run, field.name) for field in fields(run)})

    def __str__(self) -> str:
        return render_text(self, width=page_width())

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} of {format_number(self.n_steps, 'step')}: {self.flops.total:,} FLOP, "
            f"peak of {self.peak.total_bytes:,} bytes on {self.main_device}>"
        )


def _with_timeline(step: StepReport, journal: Journal | None) -> StepReport:
    """The step with a timeline for each device, where its journal was kept and it has none yet."""
    if journal is None or all(statement.timeline_source for statement in step.memory.values()):
        return step
    memory = {
        device: replace(statement, timeline_source=statement.timeline_source or partial(timeline, journal, device))
        for device, statement in step.memory.items()
    }
    return replace(step, memory=memory)
