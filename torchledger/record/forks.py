"""Forked children: what records in this process records nothing in them.

A child (a data loader's worker, `multiprocessing` by fork) has the modes and patches of its parent, and would pay for
books that nobody reads.
"""

from __future__ import annotations

import contextlib
import os
from typing import Protocol

from torchledger.record import elsewhere, patches


class Recording(Protocol):
    """What records."""

    n_forks: int

    def forked(self) -> None:
        """This process is a child of the one that records."""


_recording: list[Recording] = []


def note(recorder: Recording) -> None:
    """It begins to record."""
    _recording.append(recorder)


def forget(recorder: Recording) -> None:
    """It ends."""
    _recording[:] = [other for other in _recording if other is not recorder]


def _in_parent() -> None:
    for recorder in _recording:
        recorder.n_forks += 1


def _in_child() -> None:
    elsewhere.forget_hosts()
    if not _recording:
        return
    patches.unwatch_all()
    while _recording:
        recorder = _recording.pop()
        with contextlib.suppress(Exception):  # a fault of ours is not the child's
            recorder.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_parent=_in_parent, after_in_child=_in_child)
