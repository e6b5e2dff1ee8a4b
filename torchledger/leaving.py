"""Leaving: a dispatch mode off the stack of its thread, also where it is not the innermost one; a block at its end.

Nothing here is lost to an interrupt: what was begun can be begun anew.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch.utils import _python_dispatch

from torchledger import internals

_FLAGS = {
    "old_dispatch_mode_flags": "_is_in_torch_dispatch_mode",
    "old_non_infra_dispatch_mode_flags": "_is_in_non_infra_torch_dispatch_mode",
    "old_without_ignore_compile_internals_dispatch_mode_flags": "_is_in_any_mode_without_ignore_compile_internals",
}
"""What a mode remembers of torch's flags as they were before it was entered, and the flags."""


def keep_flags() -> Callable[[], None]:
    """What sets torch's flags back to what they are now, if no mode is on by then.

    The flags are one for all threads: modes that two threads enter and leave by turns would leave them wrong.
    """
    before = {flag: getattr(_python_dispatch, flag) for flag in _FLAGS.values() if hasattr(_python_dispatch, flag)}

    def put_back() -> None:
        if not internals.current_dispatch_modes():
            for flag, value in before.items():
                setattr(_python_dispatch, flag, value)

    return put_back


def restore_flags(mode: Any) -> None:
    """Set the flags, which are all threads', as they were before a mode that cannot be taken off its stack."""
    for remembered, flag in _FLAGS.items():
        if (before := getattr(mode, remembered, None)) and hasattr(_python_dispatch, flag):
            setattr(_python_dispatch, flag, before[0])


def own_modes() -> list[Any]:
    """The dispatch modes of this thread that torch keeps on its stack, outermost first (others have a slot each)."""
    return [mode for mode in internals.current_dispatch_modes() if getattr(mode, "_mode_key", None) is None]


def set_modes(wanted: list[Any]) -> None:
    """Let these be the dispatch modes on this thread's stack, as they are: none of them is told."""
    try:
        _set_modes(wanted)
    except BaseException:
        _set_modes(wanted)  # else an interrupt would lose modes of the program's own
        raise


def _set_modes(wanted: list[Any]) -> None:
    now = own_modes()
    same = 0
    while same < min(len(now), len(wanted)) and now[same] is wanted[same]:
        same += 1
    for _ in now[same:]:
        internals.pop_dispatch_mode(None)
    for mode in wanted[same:]:
        internals.push_dispatch_mode(mode)


def leave_mode(mode: Any) -> bool:
    """Take a mode off this thread's stack, however often it is there; says whether it was.

    Modes entered after it stay as they are (two ledgers of tasks that interleave). Of one that is gone already, because
    an engine put its thread's stack back or an interrupt came while it was entered, only the flags are put back.
    """
    modes = own_modes()
    places = [place for place, other in enumerate(modes) if other is mode]
    if not places:
        restore_flags(mode)
        return False
    above = next((other for other in modes[places[0] :] if other is not mode), None)
    if above is None:
        restore_flags(mode)
    else:
        _remember_for(above, mode, sum(other is above for other in modes[: places[0]]))
    set_modes([other for other in modes if other is not mode])
    return True


def _remember_for(above: Any, mode: Any, entered: int) -> None:
    """Let a mode that was entered after ours, and so often before, remember the flags as they were without ours."""
    for remembered in _FLAGS:
        ours, theirs = getattr(mode, remembered, None), getattr(above, remembered, None)
        if ours and theirs and entered < len(theirs):
            theirs[entered] = ours[0]


class Block(Protocol):
    """What a `with` statement enters and leaves."""

    _active: bool
    _held_exit: weakref.ref[Any] | None

    def _leave(self) -> object: ...


class GuardedExit:
    """An `__exit__` without which no `with` statement ends.

    Python may raise an interrupt when it enters `__exit__`, before the first line there. A `with` statement holds what
    it looks up here until it is over: if the block is still open when that goes, it is left then.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, block: Block | None, owner: type | None = None) -> Callable[..., Any]:
        if block is None:
            return self._function
        found = functools.partial(self._function, block)
        if not block._active:
            entered = weakref.ref(block)

            def gone(reference: object) -> None:
                left = entered()
                if left is not None and left._held_exit is reference and left._active:
                    left._leave()

            block._held_exit = weakref.ref(found, gone)
        return found
