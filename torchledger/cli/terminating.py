"""SIGTERM: what a cluster or a container sends before it kills. A program that leaves it alone has its report yet."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

TERMINATED = 128 + signal.SIGTERM
"""The exit code of a program that SIGTERM ended, as a shell gives it."""


class Terminated(BaseException):
    """Ends the program where SIGTERM found it: no error, so that no ``except Exception`` keeps it going."""


@contextlib.contextmanager
def until_terminated() -> Iterator[None]:
    """Raise `Terminated` inside when SIGTERM comes.

    A handler of the program's own wins, also one that calls ours in its turn, and SIGTERM ends forked children at once,
    as it would without us. Once it has come it is ignored: who sends it twice would lose the report. Only the main
    thread can do this: elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        if signal.getsignal(signal.SIGTERM) is terminate:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise Terminated

    def let_go() -> None:
        if signal.getsignal(signal.SIGTERM) is terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=let_go)
    try:
        signal.signal(signal.SIGTERM, terminate)
        yield
    finally:
        let_go()
