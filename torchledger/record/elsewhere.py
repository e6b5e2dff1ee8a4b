"""Threads that no ledger was entered on: what they run is counted by visitors of the ledgers that record.

A dispatch mode is one thread's. While a module's call or a backward runs on such a thread, each recorder has a visitor
there: a recorder of its own, with books of its own, so that nothing is shared with another thread but what is handed over
when the call ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from torchledger import internals

THREADS, MODULE_CALLS, BACKWARDS, OPTIMIZER_STEPS, UNFINISHED = (
    "threads",
    "thread module calls",
    "thread backwards",
    "thread optimizer steps",
    "thread calls unfinished",
)
"""Kinds of what a recorder counts as seen from afar, in its ``blind``."""


class Visitor(Protocol):
    """What counts for one recorder while a call runs on another thread."""

    place: Any

    def end_visit(self) -> None:
        """The call has ended."""


class Host(Protocol):
    """A recorder, as other threads see it."""

    def note_blind(self, kind: str) -> None:
        """Something of that kind ran that is not all in the books."""

    def begin_visit(self) -> Visitor | None:
        """A call begins on this thread; None if it cannot be counted. Never raises."""


_hosts: tuple[Host, ...] = ()
_lock = threading.Lock()
_here = threading.local()


def add_host(host: Host) -> None:
    """Let it count what other threads run."""
    global _hosts
    with _lock:
        _hosts = (*_hosts, host)


def remove_host(host: Host) -> None:
    """No longer."""
    global _hosts
    with _lock:
        _hosts = tuple(other for other in _hosts if other is not host)


def forget_hosts() -> None:
    """In a forked child, whoever held the lock in the parent: nobody records there."""
    global _hosts, _lock, _here
    for place in visitors_here():
        place.recorder.end_visit()
    _hosts, _lock, _here = (), threading.Lock(), threading.local()


def note_blind(kind: str) -> None:
    """Tell all recorders of something that ran out of their sight."""
    for host in _hosts:
        host.note_blind(kind)


def visitors_here() -> tuple[Any, ...]:
    """The places of the visitors that count on this thread."""
    return getattr(_here, "places", ())


def may_visit() -> bool:
    """Whether a call that begins on this thread, which no ledger was entered on, can be counted by visitors."""
    if not _hosts or getattr(_here, "visited", False):
        return False
    # The engine's threads, and TorchScript's, have the modes of the thread that they work for.
    return not any(hasattr(mode, "begin_visit") for mode in internals.current_dispatch_modes())


def run_elsewhere(kind: str, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run a call on a thread that no ledger was entered on, with a visitor of each that records, if `may_visit`.

    Args:
        kind: What it is, `MODULE_CALLS` or `BACKWARDS`.
        call: Does it, given ``args`` and ``kwargs``, and tells `visitors_here` about it.
    """
    with _Visit(kind):
        return call(*args, **kwargs)


class _Visit:
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.visitors: list[Visitor] = []

    def __enter__(self) -> None:
        _here.visited = True
        try:
            for host in _hosts:
                host.note_blind(self.kind)
                if (visitor := host.begin_visit()) is not None:
                    self.visitors.append(visitor)
            _here.places = tuple(visitor.place for visitor in self.visitors)
        except BaseException:  # an interrupt
            self.__exit__(None, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _here.places = ()
        _here.visited = False
        for visitor in reversed(self.visitors):
            visitor.end_visit()
