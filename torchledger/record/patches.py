"""What is patched in torch while any ledger records, and put back when the last one stops.

Four things: `nn.Module.__call__` (which module runs), the function that starts a backward (which backward runs),
`UntypedStorage.resize_` (no op shows it), and the global optimizer hooks. Each acts only on threads that are watched.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.autograd
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from torchledger import internals
from torchledger.leaving import keep_flags


class Watcher(Protocol):
    """What a ledger is told about one thread."""

    def enter_module(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module is about to run."""

    def leave_module(self) -> None:
        """It has run, or raised."""

    def begin_backward(self, create_graph: bool) -> None:
        """A backward is about to run."""

    def end_backward(self) -> None:
        """It has run, or raised."""

    def begin_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer's step is about to run."""

    def end_optimizer(self, optimizer: Optimizer) -> None:
        """It has run."""

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has a new size."""

    def compiled_graph_runs(self, graph: Any) -> None:
        """Code that Inductor generated is about to run."""


autograd: Any = torch.autograd
storages: Any = torch.UntypedStorage
_watchers: dict[int, tuple[Watcher, ...]] = {}  # by thread
_lock = threading.RLock()
_undo: list[Callable[[], None]] = []


def watch(watcher: Watcher, thread: int) -> None:
    """Tell the watcher what modules, backwards and optimizers do on that thread."""
    with _lock:
        if not _watchers:
            _install()
        _watchers[thread] = (*_watchers.get(thread, ()), watcher)


def unwatch(watcher: Watcher, thread: int) -> None:
    """No longer tell it; when nobody watches, torch is as it was."""
    with _lock:
        rest = tuple(w for w in _watchers.get(thread, ()) if w is not watcher)
        if rest:
            _watchers[thread] = rest
        else:
            _watchers.pop(thread, None)
        if not _watchers:
            _uninstall()


def _install() -> None:
    _undo.append(keep_flags())
    _patch_modules()
    _patch_guards()
    _patch_inductor()
    _patch_backward()
    _patch_resize()
    pre = register_optimizer_step_pre_hook(_before_optimizer)
    post = register_optimizer_step_post_hook(_after_optimizer)
    _undo.extend((pre.remove, post.remove))


def _uninstall() -> None:
    while _undo:
        _undo.pop()()


def _replace(owner: Any, name: str, new: Any) -> None:
    """Put something of ours in a place of torch's until the last ledger stops, or somebody else replaces it."""
    own = owner.__dict__.get(name)  # None: inherited, and put back by deleting ours

    def restore() -> None:
        if owner.__dict__.get(name) is new:
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

    setattr(owner, name, new)
    _undo.append(restore)


def _patch_modules() -> None:
    original = nn.Module.__call__
    ident = threading.get_ident
    watchers_of = _watchers.get

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        watchers = watchers_of(ident())
        if watchers is None:
            return original(self, *args, **kwargs)
        for watcher in watchers:
            watcher.enter_module(self, args, kwargs)
        try:
            return original(self, *args, **kwargs)
        finally:
            for watcher in watchers:
                watcher.leave_module()

    compiling = _Compiling(original, call)

    def restore() -> None:
        compiling.close()
        if nn.Module.__call__ is call:
            nn.Module.__call__ = original  # type: ignore[method-assign]

    nn.Module.__call__ = call  # type: ignore[method-assign]
    compiling.attach()
    _compile_watch.append(compiling)
    _undo.append(restore)


_compile_watch: list[_Compiling] = []


class _Compiling:
    """Takes the module wrapper off while Dynamo compiles.

    Code compiled under the wrapper would be guarded on it, and compiled once more after the ledger is gone.
    """

    def __init__(self, original: Any, wrapper: Any) -> None:
        self._original = original
        self._wrapper = wrapper
        self._handler: Any = None
        self._depth = 0

    def attach(self) -> None:
        """Register with Dynamo, if somebody has imported it by now."""
        if self._handler is None and (handler := internals.dynamo_callbacks()) is not None:
            handler.register_start_callback(self._start)
            handler.register_end_callback(self._end)
            self._handler = handler

    def close(self) -> None:
        if self._handler is not None:
            self._handler.remove_start_callback(self._start)
            self._handler.remove_end_callback(self._end)
            self._handler = None
        _compile_watch.remove(self)

    def _start(self, _: Any) -> None:
        self._depth += 1
        if nn.Module.__call__ is self._wrapper:
            nn.Module.__call__ = self._original  # type: ignore[method-assign]

    def _end(self, _: Any) -> None:
        self._depth -= 1
        if self._depth <= 0 and nn.Module.__call__ is self._original:
            nn.Module.__call__ = self._wrapper  # type: ignore[method-assign]


class _PassThrough(TorchDispatchMode):
    """Calls each op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def _patch_guards() -> None:
    """Let torch 2.9 build its guards as they will be checked.

    There a guard on a tensor compares dispatch keys, those among them that any mode sets; but guards are built with the
    modes off, so that none would ever match, and each call would compile anew. Newer torch leaves those keys out.
    """
    guards = sys.modules.get("torch._dynamo.guards")
    if guards is None or internals.guards_ignore_modes() or _guards_patched():
        return
    manager: Any = guards.CheckFunctionManager
    original = manager.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() not in _watchers:
            return original(self, *args, **kwargs)
        with _PassThrough():  # type: ignore[no-untyped-call]
            return original(self, *args, **kwargs)

    init.torchledger = True  # type: ignore[attr-defined]
    _replace(manager, "__init__", init)


def _guards_patched() -> bool:
    manager = sys.modules["torch._dynamo.guards"].CheckFunctionManager
    return getattr(manager.__init__, "torchledger", False)


def _patch_inductor() -> None:
    """Tell of each run of generated code: its own kernels are never dispatched."""
    graphs = internals.inductor_graphs()
    if graphs is None or getattr(graphs.__call__, "torchledger", False):
        return
    original = graphs.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        for watcher in _watchers.get(threading.get_ident(), ()):
            watcher.compiled_graph_runs(self)
        return original(self, *args, **kwargs)

    call.torchledger = True  # type: ignore[attr-defined]
    _replace(graphs, "__call__", call)


def attach_to_dynamo() -> bool:
    """Watch for compilations from now on, if anything has imported Dynamo by now; says whether it has."""
    for compiling in _compile_watch:
        compiling.attach()
    if _compile_watch:
        _patch_guards()
        _patch_inductor()
    return internals.dynamo_callbacks() is not None


def _patch_backward() -> None:
    original = autograd._engine_run_backward

    def run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        watchers = _watchers.get(threading.get_ident())
        if watchers is None:
            return original(t_outputs, *args, **kwargs)
        create_graph = bool(args[2] if len(args) > 2 else kwargs.get("create_graph", False))
        for watcher in watchers:
            watcher.begin_backward(create_graph)
        try:
            return original(t_outputs, *args, **kwargs)
        finally:
            for watcher in watchers:
                watcher.end_backward()

    _replace(autograd, "_engine_run_backward", run_backward)


def _patch_resize() -> None:
    before = torch.UntypedStorage.__dict__.get("resize_")  # another tool's patch; torch's own is inherited

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        result = before(self, size) if before else super(torch.UntypedStorage, self).resize_(size)
        for watcher in _watchers.get(threading.get_ident(), ()):
            watcher.resized(self)
        return result

    _replace(storages, "resize_", resize_)


def _before_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for watcher in _watchers.get(threading.get_ident(), ()):
        watcher.begin_optimizer(optimizer)


def _after_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for watcher in _watchers.get(threading.get_ident(), ()):
        watcher.end_optimizer(optimizer)
