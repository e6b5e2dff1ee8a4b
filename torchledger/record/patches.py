"""What is patched in torch while any ledger records, and put back when the last one stops.

Four things of torch: `nn.Module.__call__` (which module runs), the function that starts a backward (which backward
runs), `UntypedStorage.resize_` (no op shows it), and the global optimizer hooks. Each acts only on threads that are
watched. Of Python, the recursion limit.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from typing import Any, Protocol

import torch
import torch.autograd
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from torchledger import internals
from torchledger.leaving import keep_flags
from torchledger.patching import Patches
from torchledger.record.children import watch_children
from torchledger.record.elsewhere import (
    BACKWARDS,
    MODULE_CALLS,
    OPTIMIZER_STEPS,
    may_visit,
    note_unseen,
    run_elsewhere,
    visitors_here,
)
from torchledger.record.packages import watch_packages
from torchledger.record.scripts import watch_scripts


class Watcher(Protocol):
    """What a ledger is told about one thread."""

    stack: list[int]
    """The modules that run on the thread, innermost last."""

    def enter_module(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module is about to run."""

    def leave_modules(self, depth: int) -> None:
        """The innermost have run, or raised: so many still do. May be told twice."""

    def count_runs(self) -> int:
        """How many backwards and optimizer steps run."""

    def begin_backward(self, roots: Any, create_graph: bool) -> None:
        """A backward is about to run."""

    def end_backward(self, n_running: int) -> None:
        """It has run, or raised: so many runs still do. May be told twice."""

    def begin_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer's step is about to run."""

    def end_optimizer(self, optimizer: Optimizer) -> None:
        """It has run."""

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has a new size."""

    def compiled_graph_begins(self, graph: Any, arguments: Any) -> None:
        """Code that Inductor generated is about to run."""

    def compiled_graph_ends(self, results: Any) -> None:
        """It has run, or raised."""

    def begin_script(self) -> None:
        """Scripted code is about to run."""

    def end_script(self) -> None:
        """It has run, or raised."""

    def script_ran(self, products: tuple[str, ...]) -> None:
        """It has run these products in fused kernels of its own."""

    def package_runs(self, name: str) -> None:
        """A package of AOTInductor is about to run."""

    def package_ran(self, name: str, results: list[torch.Tensor]) -> None:
        """It has run, and gives these."""


autograd: Any = torch.autograd
storages: Any = torch.UntypedStorage
_lock = threading.RLock()
_PATIENCE_S = 1.0
"""Longer than patches take to be put on or off."""
_ROOM = 200
"""How many calls deep our own code may go, on top of the program's."""


class _Turn:
    """One thread at a time installs and takes off; an interrupt between two lines can leave a plain lock held."""

    def __enter__(self) -> None:
        global _lock
        if not _lock.acquire(timeout=_PATIENCE_S):
            _lock = threading.RLock()  # whoever holds the old one was interrupted
            _lock.acquire()
        self._held = _lock

    def __exit__(self, *_: object) -> None:
        self._held.release()


class _Installation:
    """What is patched from when the first ledger begins to record until the last one stops.

    What is ours, and stays because another tool has wrapped it since, finds no watcher any more.
    """

    def __init__(self) -> None:
        self.watchers: dict[int, tuple[Watcher, ...]] = {}
        """By thread."""
        self.patches = Patches()
        self.complete = False
        self.compiling: _Compiling | None = None

    def install(self) -> None:
        self.patches.on_restore(keep_flags())
        _raise_recursion_limit(self.patches)
        _patch_modules(self)
        _patch_guards(self)
        _patch_inductor(self)
        _patch_backward(self)
        _patch_resize(self)
        watch_scripts(self.patches.replace, self.watchers_here)
        watch_packages(self.patches.replace, self.watchers_here)
        watch_children(self.patches.replace)
        _add_optimizer_hooks(self)
        self.complete = True

    def watchers_here(self) -> tuple[Watcher, ...]:
        """The watchers of this thread, or the visitors that count on it while a call runs."""
        found = self.watchers.get(threading.get_ident())
        return found if found is not None else visitors_here() if self.complete else ()


_now = _Installation()


def watch(watcher: Watcher, thread: int) -> None:
    """Tell the watcher what modules, backwards and optimizers do on that thread."""
    with _Turn():
        # First: a ledger that ends meanwhile, in a destructor, must not take the patches off.
        _now.watchers[thread] = (*_now.watchers.get(thread, ()), watcher)
        if not _now.complete:
            _now.patches.restore()  # of an installation that was interrupted
            _now.install()


def unwatch(watcher: Watcher, thread: int) -> None:
    """No longer tell it; when nobody watches, torch is as it was. May be called again where it was interrupted."""
    with _Turn():
        watchers = _now.watchers
        rest = tuple(w for w in watchers.get(thread, ()) if w is not watcher)
        if rest:
            watchers[thread] = rest
        else:
            watchers.pop(thread, None)
        if not watchers:
            _uninstall()


def _uninstall() -> None:
    global _now
    try:
        _now.patches.restore()
    except Exception:
        _now = _Installation()  # what can be put back is; after an interrupt, this is called again
        raise
    _now = _Installation()


def unwatch_all() -> None:
    """In a forked child: torch is as it was, whoever held the lock in the parent."""
    global _lock
    _lock = threading.RLock()
    _now.watchers.clear()
    _uninstall()


def _raise_recursion_limit(patches: Patches) -> None:
    """Leave a deep program the calls that it has without us: ours come on top."""
    before = sys.getrecursionlimit()
    raised = before + before // 4 + _ROOM

    def put_back() -> None:
        if sys.getrecursionlimit() == raised:  # the program may have set its own since
            with contextlib.suppress(RecursionError):  # where more calls run than it allows
                sys.setrecursionlimit(before)

    patches.on_restore(put_back)
    sys.setrecursionlimit(raised)


def _patch_modules(installation: _Installation) -> None:
    original = nn.Module.__call__
    ident = threading.get_ident
    watchers_of = installation.watchers.get
    # What it does is known then, and done here without a call more: deep models need each.
    is_plain = internals.is_plain_module_call(original)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        watchers = watchers_of(ident()) or visitors_here()
        if not watchers:
            if installation.watchers and may_visit(self):
                return run_elsewhere(MODULE_CALLS, call, original, self, *args, **kwargs)
            return original(self, *args, **kwargs)
        depths = [len(watcher.stack) for watcher in watchers]
        try:
            for watcher in watchers:
                watcher.enter_module(self, args, kwargs)
            if is_plain:
                compiled = self._compiled_call_impl
                result = (self._call_impl if compiled is None else compiled)(*args, **kwargs)
            else:
                result = original(self, *args, **kwargs)
            for watcher, depth in zip(watchers, depths, strict=True):
                watcher.leave_modules(depth)
            return result
        except BaseException:
            for watcher, depth in zip(watchers, depths, strict=True):
                watcher.leave_modules(depth)
            raise

    compiling = installation.compiling = _Compiling(original, call, installation)
    installation.patches.replace(nn.Module, "__call__", call)
    installation.patches.on_restore(compiling.close)
    compiling.attach()


class _Compiling:
    """Takes the module wrapper off while Dynamo compiles.

    Code compiled under the wrapper would be guarded on it, and compiled once more after the ledger is gone.
    """

    def __init__(self, original: Any, wrapper: Any, installation: _Installation) -> None:
        self._installation = installation
        self._original = original
        self._wrapper = wrapper
        self._handler: Any = None
        self._depth = 0

    def attach(self) -> None:
        """Register with Dynamo, if somebody has imported it by now."""
        handler = internals.dynamo_callbacks()
        if handler is None or self._start in handler.start_callbacks:
            return
        is_first, self._handler = self._handler is None, handler
        handler.register_start_callback(self._start)
        handler.register_end_callback(self._end)
        if is_first:
            self._outlive_reset(handler)
            self._cover_capture()

    def _outlive_reset(self, handler: Any) -> None:
        """`torch._dynamo.reset`, as a strict `torch.export` calls it, takes all callbacks out."""
        clear = handler.clear

        def clear_and_attach() -> None:
            clear()
            if self._handler is not None:
                self.attach()

        self._installation.patches.replace(handler, "clear", clear_and_attach)

    def _cover_capture(self) -> None:
        """A strict `torch.export` compiles without calling back."""
        frames = internals.dynamo_frames()
        original = getattr(frames, "_fullgraph_capture_frame", None)
        if original is None:
            return

        def capture(*args: Any, **kwargs: Any) -> Any:
            self._start(None)
            try:
                return original(*args, **kwargs)
            finally:
                self._end(None)

        self._installation.patches.replace(frames, "_fullgraph_capture_frame", capture)

    def close(self) -> None:
        if self._handler is not None:
            for callbacks, ours in (
                (self._handler.start_callbacks, self._start),
                (self._handler.end_callbacks, self._end),
            ):
                while ours in callbacks:
                    callbacks.remove(ours)
            self._handler = None

    def _start(self, _: Any) -> None:
        self._depth += 1
        if nn.Module.__call__ is self._wrapper:
            nn.Module.__call__ = self._original  # type: ignore[method-assign]

    def _end(self, _: Any) -> None:
        self._depth -= 1
        if self._handler is not None:
            _patch_inductor(self._installation)  # which the first compilation imports
        if self._depth <= 0 and self._handler is not None and nn.Module.__call__ is self._original:
            nn.Module.__call__ = self._wrapper  # type: ignore[method-assign]


class _PassThrough(TorchDispatchMode):
    """Calls each op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def _patch_guards(installation: _Installation) -> None:
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
        if threading.get_ident() not in installation.watchers:
            return original(self, *args, **kwargs)
        with _PassThrough():  # type: ignore[no-untyped-call]
            return original(self, *args, **kwargs)

    init.torchledger = True  # type: ignore[attr-defined]
    installation.patches.replace(manager, "__init__", init)


def _guards_patched() -> bool:
    manager = sys.modules["torch._dynamo.guards"].CheckFunctionManager
    return getattr(manager.__init__, "torchledger", False)


def _patch_inductor(installation: _Installation) -> None:
    """Tell of each run of generated code: its own kernels are never dispatched."""
    graphs = internals.inductor_graphs()
    if graphs is None or getattr(graphs.__call__, "torchledger", False):
        return
    original = graphs.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        watchers = installation.watchers_here()
        results: Any = None
        begun = 0
        try:
            for watcher in watchers:
                begun += 1
                watcher.compiled_graph_begins(self, args)
            results = original(self, *args, **kwargs)
            return results
        finally:
            for watcher in watchers[:begun]:
                watcher.compiled_graph_ends(results)

    call.torchledger = True  # type: ignore[attr-defined]
    installation.patches.replace(graphs, "__call__", call)


def attach_to_dynamo() -> bool:
    """Watch for compilations from now on, if anything has imported Dynamo by now; says whether it has."""
    if _now.compiling is not None:
        _now.compiling.attach()
        _patch_guards(_now)
        _patch_inductor(_now)
    return internals.dynamo_callbacks() is not None


def _patch_backward(installation: _Installation) -> None:
    original = autograd._engine_run_backward

    def run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        watchers = installation.watchers_here()
        if not watchers:
            if installation.watchers and may_visit():
                return run_elsewhere(BACKWARDS, run_backward, original, t_outputs, *args, **kwargs)
            return original(t_outputs, *args, **kwargs)
        create_graph = bool(args[2] if len(args) > 2 else kwargs.get("create_graph", False))
        running = [watcher.count_runs() for watcher in watchers]
        try:
            for watcher in watchers:
                watcher.begin_backward(t_outputs, create_graph)
            result = original(t_outputs, *args, **kwargs)
            for watcher, n in zip(watchers, running, strict=True):
                watcher.end_backward(n)
            return result
        except BaseException:
            for watcher, n in zip(watchers, running, strict=True):
                watcher.end_backward(n)
            raise

    installation.patches.replace(autograd, "_engine_run_backward", run_backward)


def _patch_resize(installation: _Installation) -> None:
    before = torch.UntypedStorage.__dict__.get("resize_")  # another tool's patch; torch's own is inherited

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        result = before(self, size) if before else super(torch.UntypedStorage, self).resize_(size)
        for watcher in installation.watchers_here():
            watcher.resized(self)
        return result

    installation.patches.replace(storages, "resize_", resize_)


def _add_optimizer_hooks(installation: _Installation) -> None:
    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        watchers = installation.watchers_here()
        if not watchers and installation.watchers:
            note_unseen(OPTIMIZER_STEPS)
        for watcher in watchers:
            watcher.begin_optimizer(optimizer)

    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for watcher in installation.watchers_here():
            watcher.end_optimizer(optimizer)

    for hooks, register, ours in (
        (internals.optimizer_pre_hooks, register_optimizer_step_pre_hook, before_step),
        (internals.optimizer_post_hooks, register_optimizer_step_post_hook, after_step),
    ):
        installation.patches.on_restore(functools.partial(_remove_hook, hooks, ours))
        register(ours)


def _remove_hook(hooks: dict[int, Any], ours: Any) -> None:
    for key in [key for key, hook in hooks.items() if hook is ours]:
        hooks.pop(key, None)
