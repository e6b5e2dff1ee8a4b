"""Child processes: what they do is in no books of this one, so that they are named."""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from torchledger.record import elsewhere
from torchledger.record.scripts import Replace

_LAUNCHERS = ("python", "pypy", "torchrun", "accelerate", "deepspeed")
_BETWEEN = ("subprocess", "torchledger", "contextlib")
_starting = threading.local()
_registered = False


def watch_children(replace: Replace) -> None:
    """Tell recorders of each child process from now on, but for those that only make batches or compile."""
    global _registered
    if not _registered and hasattr(os, "register_at_fork"):
        _registered = True  # for good: it cannot be taken back, and does nothing while nobody records
        os.register_at_fork(after_in_parent=_forked)
    kind: Any = multiprocessing.process.BaseProcess
    replace(kind, "start", _watched_start(kind.start))
    popen: Any = subprocess.Popen
    replace(popen, "__init__", _watched_init(popen.__init__))


def _forked() -> None:
    if not getattr(_starting, "known", False):
        elsewhere.note_unseen("child fork")


def _watched_start(original: Any) -> Any:
    def start(self: Any) -> None:
        makes_batches = _makes_batches(self)  # it forgets its target as it starts
        _known(original, self)
        if not makes_batches:
            method = getattr(self, "_start_method", None) or multiprocessing.get_start_method(allow_none=True)
            elsewhere.note_unseen(f"child multiprocessing {method or 'fork'}")

    return start


def _watched_init(original: Any) -> Any:
    def init(self: Any, args: Any, *rest: Any, **kwargs: Any) -> None:
        _known(original, self, args, *rest, **kwargs)
        if _runs_python(args) and not _compiles(sys._getframe(1)):
            elsewhere.note_unseen("child python")

    return init


def _known(original: Any, *args: Any, **kwargs: Any) -> None:
    """Start a child that is told of by what it is, and not as a fork."""
    before = getattr(_starting, "known", False)
    _starting.known = True
    try:
        original(*args, **kwargs)
    finally:
        _starting.known = before


def _makes_batches(process: Any) -> bool:
    """Whether it is a worker of torch's own data loader."""
    target = getattr(process, "_target", None)
    return getattr(target, "__module__", "") == "torch.utils.data._utils.worker"


def _runs_python(args: Any) -> bool:
    """Whether a command line runs Python."""
    words = args.split() if isinstance(args, str) else [args] if isinstance(args, bytes | os.PathLike) else list(args)
    texts = [os.fsdecode(word) for word in words if isinstance(word, str | bytes | os.PathLike)]
    return bool(texts) and (texts[0] == sys.executable or Path(texts[0]).name.startswith(_LAUNCHERS))


def _compiles(frame: FrameType | None) -> bool:
    """Whether a compiler starts a child: to compile, or to try what the processor can."""
    while frame is not None and (name := frame.f_globals.get("__name__", "")).split(".")[0] in _BETWEEN:
        frame = frame.f_back
    return frame is not None and name.startswith(("torch._inductor.", "torch.utils.cpp", "triton."))
