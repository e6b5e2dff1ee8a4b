"""Taking a dispatch mode off the stack of its thread, also where it is not the innermost one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
            setattr(_python_dispatch, flag, before.pop())


def leave_mode(mode: Any) -> None:
    """Take a mode off this thread's stack.

    Modes entered after it stay as they are (two ledgers of tasks that interleave). One that is gone already, because an
    engine put its thread's stack back, needs nothing.
    """
    modes = [m for m in internals.current_dispatch_modes() if getattr(m, "_mode_key", None) is None]
    if mode not in modes:
        return
    if modes[-1] is mode:
        mode.__exit__(None, None, None)
        return
    above = modes[modes.index(mode) + 1 :]
    for _ in (mode, *above):
        internals.pop_dispatch_mode(None)
    for other in above:
        internals.push_dispatch_mode(other)
    for name in _FLAGS:  # the next mode remembers how it was with this one
        ours, theirs = getattr(mode, name, None), getattr(above[0], name, None)
        if ours and theirs:
            theirs[-1] = ours.pop()
