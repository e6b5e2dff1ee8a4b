"""Threads that no ledger was entered on: what they run is counted by visitors of the ledgers that record.

A dispatch mode is one thread's. While a module's call or a backward runs on such a thread, each recorder has a visitor
there: a recorder with books of its own, so that threads share nothing but what is handed over when the call ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from torchledger import internals

MODULE_CALLS, BACKWARDS = "module calls", "backwards"
"""What a visitor counts."""
THREADS, COUNTED, NOT_COUNTED, UNFINISHED = "threads", "counted ", "not counted ", "unfinished calls"
OPTIMIZER_STEPS = "optimizer steps"
"""Kinds of what is noted in a recorder's ``unseen``; the first two of a call are followed by what it is."""


class Visitor(Protocol):
    """What counts for one recorder while a call runs on another thread."""

    place: Any

    def end_visit(self) -> None:
        """The call has ended."""


class Host(Protocol):
    """A recorder, as other threads see it."""

    def note_unseen(self, kind: str) -> None:
        """Something of that kind ran that is not all in the books."""

    def knows(self, module: Any) -> bool:
        """Whether its calls are any of this recorder's concern. Never raises."""

    def begin_visit(self, kind: str, subject: Any) -> Visitor | None:
        """A call begins on this thread; None if it is none of this recorder's. Never raises."""


_hosts: dict[int, Host] = {}
"""By id. Without a lock: an interrupt could leave one held, and each change is one call."""
_here = threading.local()


def add_host(host: Host) -> None:
    """Let it count what other threads run."""
    _hosts[id(host)] = host


def remove_host(host: Host) -> None:
    """No longer. May be called again."""
    _hosts.pop(id(host), None)


def forget_hosts() -> None:
    """In a forked child: nobody records there."""
    global _here
    for place in visitors_here():
        place.recorder.end_visit()
    _hosts.clear()
    _here = threading.local()


def note_unseen(kind: str) -> None:
    """Tell all recorders of something that ran out of their sight."""
    for host in tuple(_hosts.values()):
        host.note_unseen(kind)


def visitors_here() -> tuple[Any, ...]:
    """The places of the visitors that count on this thread."""
    return getattr(_here, "places", ())


def may_visit(module: Any = None) -> bool:
    """Whether a call that begins on this thread, which no ledger was entered on, is for visitors to count.

    Args:
        module: Whose call it is; None for a backward.
    """
    if not _hosts or getattr(_here, "visited", False):
        return False
    if (
        module is not None
        and getattr(_here, "passed", False)
        and not any(host.knows(module) for host in tuple(_hosts.values()))
    ):
        return False
    # The engine's threads, and TorchScript's, have the modes of the thread that they work for.
    return not any(hasattr(mode, "begin_visit") for mode in internals.current_dispatch_modes())


def run_elsewhere(kind: str, call: Callable[..., Any], original: Callable[..., Any], /, *args: Any, **kw: Any) -> Any:
    """Run a call on a thread that no ledger was entered on, with a visitor of each that it concerns, if `may_visit`.

    Args:
        kind: What it is, `MODULE_CALLS` or `BACKWARDS`.
        call: Does it, and tells `visitors_here` about it.
        original: Does it.
        *args: What it is called with: first the module, or what the backward begins at.
        **kw: Likewise.
    """
    visit = _Visit()
    try:
        visit.begin(kind, args[0])
        return (call if visit.visitors else original)(*args, **kw)
    finally:
        visit.end()


class _Visit:
    def __init__(self) -> None:
        self.visitors: list[Visitor] = []
        self.is_inner = getattr(_here, "passed", False)
        """Whether it runs inside a call that concerned nobody."""

    def begin(self, kind: str, subject: Any) -> None:
        for host in tuple(_hosts.values()):
            visitor = host.begin_visit(kind, subject)
            if visitor is not None:
                self.visitors.append(visitor)
            if visitor is not None or not self.is_inner:
                host.note_unseen(f"{NOT_COUNTED if visitor is None else COUNTED}{kind}")
        _here.places = tuple(visitor.place for visitor in self.visitors)
        _here.visited, _here.passed = bool(self.visitors), not self.visitors

    def end(self) -> None:
        _here.places, _here.visited, _here.passed = (), False, self.is_inner
        for visitor in reversed(self.visitors):
            visitor.end_visit()
