"""The audit of a step: each op's call, with what the CPU's allocator gave and took back in it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from torchledger.journal.calls import Call
from torchledger.record.arrivals import COMPILED
from torchledger.record.entries import Entry, Kind
from torchledger.record.locating import Locating
from torchledger.record.memory_events import MemoryEvents
from torchledger.record.names import OUTSIDE
from torchledger.record.places import FORWARD, OPTIMIZER, OUTSIDE_PHASE, RECOMPUTE, Undecided, compiled_region


class Audit:
    """Watches one step of a recorder; in all other steps its hot path is as it always is.

    Args:
        recorder: The recorder.
        earlier: Calls of the step that another audit has seen.
    """

    def __init__(self, recorder: Locating, earlier: Iterable[Call] = ()) -> None:
        self.calls = [Call("", OUTSIDE_PHASE, OUTSIDE, 0), *earlier]
        self._recorder = recorder
        self._events = MemoryEvents()
        self._before = self.calls[-1]

    @property
    def problem(self) -> str:
        """Why there is no audit, or nothing."""
        return self._events.problem

    def begin(self) -> bool:
        """Begin with a step; False, with ``problem`` set, where that cannot be."""
        return self._events.start()

    def end(self) -> None:
        """End with it: ``calls`` then hold what the allocator did."""
        for number, inside, after in self._events.stop():
            call = self.calls[number] if number > 0 else self._before
            call.inside += inside
            call.after += after
        phases = self._recorder.decide_phases()
        for call in self.calls:
            if type(call.phase) is Undecided:
                call.phase = phases.get(call.phase, FORWARD)

    def wrap(self, entry: Entry) -> None:
        """Mark each call of an operator."""
        entry.call = self._marked(entry.call, entry.name, entry.kind)

    def compiled_graph_runs(self, module: int) -> None:
        """Generated code runs until the next op: what it takes is its own."""
        self.calls[-1].then, self.calls[-1].then_module = COMPILED, module

    def _marked(self, original: Callable[..., Any], name: str, kind: int) -> Callable[..., Any]:
        recorder, calls, mark = self._recorder, self.calls, self._events.mark
        events = recorder.books.events

        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                phase, module = self._where(kind)
            except Exception as error:
                recorder.fault(f"{name} could not be placed in the audit", error)
                phase, module = OUTSIDE_PHASE, OUTSIDE
            recorder.books.bury()
            position = len(events)
            call = Call(name, phase, module, position, position)
            number = len(calls)
            if recorder.dynamo_is_about and compiled_region(sys._getframe(1)):
                call.then, call.then_module = COMPILED, calls[-1].then_module
            calls.append(call)
            try:
                with mark(number):
                    return original(*args, **kwargs)
            finally:
                recorder.books.bury()
                call.end = len(events)

        return run

    def _where(self, kind: int) -> tuple[str, int]:
        """Phase and module of the op that runs; those that make nothing are not located by the recorder."""
        recorder = self._recorder
        stack = recorder.place.stack
        module = stack[-1] if stack else OUTSIDE
        if not recorder.runs:
            return recorder.phase or (FORWARD if stack else OUTSIDE_PHASE), module
        if recorder.in_optimizer:
            phase = recorder.phase if kind >= Kind.GENERAL else OPTIMIZER
            return phase, OUTSIDE if phase is OPTIMIZER else module
        if kind < Kind.GENERAL:
            phase, module, _ = recorder.locate_in_backward(recorder.place)
            return phase, module
        if recorder.phase == RECOMPUTE and len(stack) > recorder.runs[-1].depth:
            return recorder.phase, module
        return recorder.phase, recorder.node_module
