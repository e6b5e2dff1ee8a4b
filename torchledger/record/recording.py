"""The recorder of one ledger: the journal of a step with its names, and the note where memory ran out."""

from __future__ import annotations

from dataclasses import replace

from torchledger.journal.entries import Journal, ProductRow, Row
from torchledger.record.mode import Recorder
from torchledger.record.out_of_memory import holdings_note
from torchledger.record.places import BACKWARD, FORWARD, INFERENCE, OPTIMIZER, RECOMPUTE, Undecided
from torchledger.record.storages import Cut

_TRAINING = (FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER)


class StepRecorder(Recorder):
    """A recorder that gives the journal of each step."""

    def journal(self, index: int) -> Journal:
        """The journal of the open step so far, with names."""
        return self._named(self.books.peek(index))

    def cut(self, index: int, at: Cut | None = None) -> Journal:
        """End the step, now or at an earlier moment, and give its journal with names.

        `Books.settle` must follow.
        """
        books = self.books
        journal = self._named(books.cut(index, at))
        if self.undecided:
            phases = self.decide_phases()
            books.carried = {n: _decided(row, phases) for n, row in books.carried.items()}
        self.n_runs = self.n_backwards = 0
        self.optimizer_steps = 0
        self._steps_of.clear()
        self.compiled_regions = set()
        self.forget_phases()
        for place in self.places.values():
            place.log.cut()
        return journal

    def trains(self) -> bool:
        """Whether a training forward, a backward or an optimizer has run since the open step began."""
        phases = self.decide_phases()
        return any(
            kind == "backward" or phases.get(value, value) in _TRAINING for _, kind, value in self.books.marks
        ) or any(phases.get(row[2], row[2]) in _TRAINING for row in self.books.products)

    def _named(self, journal: Journal) -> Journal:
        journal.modules = self.names.module_paths()
        journal.parameters = self.names.parameter_paths()
        journal.compiled = [module for _, module in sorted(self.compiled_regions)]
        journal.parameter_rows = self.parameters.rows()
        return _with_phases(journal, self.decide_phases()) if self.undecided else journal

    def out_of_memory(self, error: BaseException, op: str) -> None:
        """Say in a note of the error what holds the memory."""
        try:
            if not getattr(error, "_torchledger_noted", False):
                error._torchledger_noted = True  # type: ignore[attr-defined]
                journal = self.journal(0)
                stack = self.place.stack
                module = journal.modules[stack[-1] if stack else self.node_module if self.runs else 0]
                error.add_note(holdings_note(journal, op, module, self.phase or "outside"))
        except Exception as fault:
            self.fault("the note about what holds the memory failed", fault)


def _with_phases(journal: Journal, phases: dict[str, str]) -> Journal:
    """The journal with what undecided phases turned out to be; what was no training is no evidence of it."""
    return replace(
        journal,
        blocks=[_decided(row, phases) for row in journal.blocks],
        marks=[(position, kind, phases.get(value, value)) for position, kind, value in journal.marks],
        products=[_decided_product(row, phases) for row in journal.products],
    )


def _decided_product(row: ProductRow, phases: dict[str, str]) -> ProductRow:
    if type(row[2]) is not Undecided:
        return row
    if phases.get(row[2], FORWARD) is FORWARD:
        return (*row[:2], FORWARD, *row[3:])
    return (*row[:2], INFERENCE, *row[3:7], (), row[8], ())


def _decided(row: Row, phases: dict[str, str]) -> Row:
    return (*row[:2], phases.get(row[2], FORWARD), *row[3:]) if type(row[2]) is Undecided else row
