"""The CPU allocator's own events, from the profiler that torch brings, between marks of ours."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch.autograd.profiler
import torch.autograd.profiler_legacy

from torchledger import internals

_MARK = "torchledger "
_STARTS = ((torch.autograd.profiler, "_enable_profiler"), (torch.autograd.profiler_legacy, "_enable_profiler_legacy"))
"""Through which names a program's own profilers begin."""

_open: list[MemoryEvents] = []


class MemoryEvents:
    """What the CPU's allocator gives and takes back on this thread, from `start` to `stop`.

    Torch has room for one profiler a thread. A program's own goes first: where one is on, `start` says so, and where
    one begins, this one ends, with ``problem`` set.
    """

    def __init__(self) -> None:
        self.problem = ""
        self._thread = 0
        self._on = False
        self._undo: list[Callable[[], None]] = []

    def start(self) -> bool:
        """Begin; False, with ``problem`` set, where that cannot be."""
        if internals.enable_profiler is None or internals.RecordFunctionFast is None:
            self.problem = "this torch has no profiler that tells of memory without writing a log"
            return False
        state = internals.ProfilerState.CPU
        options = internals.ProfilerOptions()
        try:
            internals.enable_profiler(
                internals.ProfilerConfig(state, False, True, False, False, False, options)  # the True: memory
            )
        except (RuntimeError, TypeError) as error:
            self.problem = f"another profiler is on ({str(error).splitlines()[0]})"
            return False
        self._on, self._thread = True, threading.get_ident()
        _open.append(self)
        for owner, name in _STARTS:
            self._watch(owner, name)
        return True

    def stop(self) -> Iterator[tuple[int, list[int], list[int]]]:
        """End, and give for each mark in turn its number, the bytes inside it, and those until the next one.

        What came before the first mark has the number 0, and marks begin at 1. Bytes are above 0 where they were given,
        below where they were taken back.
        """
        return _read(self._end())

    @staticmethod
    def mark(number: int) -> Any:
        """A context: what the allocator does in it belongs to that number."""
        return internals.RecordFunctionFast(f"{_MARK}{number}")

    def _end(self) -> list[Any]:
        while self._undo:
            self._undo.pop()()
        if not self._on:
            return []
        self._on = False
        _open.remove(self)
        if threading.get_ident() != self._thread:
            self.problem = "the step ended on another thread"
            return []
        return list(internals.disable_profiler())

    def _give_way(self) -> None:
        """A profiler of the program's begins."""
        if self._on and threading.get_ident() == self._thread:
            self._end()
            self.problem = "the program began a profiler of its own"

    def _watch(self, owner: Any, name: str) -> None:
        original = getattr(owner, name, None)
        if original is None:
            return

        def begin(*args: Any, **kwargs: Any) -> Any:
            self._give_way()
            return original(*args, **kwargs)

        def restore() -> None:
            if getattr(owner, name) is begin:
                setattr(owner, name, original)

        self._undo.append(restore)
        setattr(owner, name, begin)


def _end_in_child() -> None:
    """A forked process would go on noting, for nobody."""
    for events in _open:
        events._end()
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_in_child)


def _read(threads: list[Any]) -> Iterator[tuple[int, list[int], list[int]]]:
    for events in threads:
        number, handle = 0, None
        inside: list[int] = []
        after: list[int] = []
        for event in events:
            kind = event.kind()
            if kind == "memory_alloc":
                if nbytes := event.cpu_memory_usage():
                    (after if handle is None else inside).append(nbytes)
            elif kind == "push" and handle is None and event.name().startswith(_MARK):
                yield number, inside, after
                number, handle, inside, after = int(event.name()[len(_MARK) :]), event.handle(), [], []
            elif kind == "pop" and handle is not None and event.handle() == handle:
                handle = None
        yield number, inside, after
