"""The recorder: one dispatch mode that sees every op and writes the journal.

`__torch_dispatch__` is the hot path. It decides nothing that can be decided when the step ends.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchledger import internals
from torchledger.errors import UncountedOpError
from torchledger.flops import registry
from torchledger.flops.containers import CONTAINERS, run_container
from torchledger.journal.calls import Call
from torchledger.leaving import leave_mode, own_modes, restore_flags, set_modes
from torchledger.read.formulas import DATA_DEPENDENT
from torchledger.record import forks, patches
from torchledger.record.arrivals import COMPILED
from torchledger.record.audit import Audit
from torchledger.record.copies import note_copy
from torchledger.record.deciding import Deciding
from torchledger.record.decompositions import Decompositions
from torchledger.record.entries import Entry, Kind
from torchledger.record.graphs import references_of_graphs
from torchledger.record.inside import count_allocating
from torchledger.record.names import OUTSIDE
from torchledger.record.places import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    OUTSIDE_PHASE,
    Place,
    Undecided,
    in_function_forward,
    in_generated_code,
)
from torchledger.record.products import post_product
from torchledger.record.regions import Regions
from torchledger.record.sharing import Sharing
from torchledger.record.storages import Ref
from torchledger.record.sums import Sums

_GENERAL = int(Kind.GENERAL)
_DETACH, _INPLACE, _RESIZING, _COPYING = int(Kind.DETACH), int(Kind.INPLACE), int(Kind.RESIZING), int(Kind.COPYING)
_ADDING, _SCATTERING, _DECIDING = int(Kind.ADDING), int(Kind.SCATTERING), int(Kind.DECIDING)
_COMPOSITE, _HIGHER_ORDER = int(Kind.COMPOSITE), int(Kind.HIGHER_ORDER)
_COMPOSITE_KEY = internals.composite_implicit_key
_Tensor, _Parameter = torch.Tensor, nn.Parameter
_storage_of = torch.Tensor.untyped_storage
_get_ident = threading.get_ident
_current_node = internals.current_autograd_node
_push_mode, _pop_mode = internals.push_dispatch_mode, internals.pop_dispatch_mode
_function_modes_on, _functions_on = internals.function_modes_on, internals.functions_on
_without_torch_function = internals.without_torch_function
_AccumulateGrad = internals.AccumulateGrad
_engine_code = internals.engine_run_backward.__code__
_is_grad_enabled = torch.is_grad_enabled
_OutOfMemoryError = torch.OutOfMemoryError


class Recorder(Regions, TorchDispatchMode):
    """Writes what happens on the thread that it was started on (and on the engine's threads) into its books."""

    supports_higher_order_operators = True

    def __init__(self, *, strict: bool = False, stacks: bool = False) -> None:
        super().__init__()
        internals.require()
        self.strict = strict
        self.stacks = stacks
        self.thread = _get_ident()
        self.in_inference_mode = False
        self.n_forks = 0
        """How often this process was forked while it recorded: children record nothing."""
        self.when_forked: Callable[[], None] = lambda: None
        """Called in a child."""
        self.entries: dict[int, Entry] = {}
        self.registry_version = registry.version
        self.sums = Sums(self.books, Recorder.__torch_dispatch__.__code__)
        self.deciding = Deciding(self.books)
        self.sharing = Sharing(self.books, self.fault)
        self.decompositions = Decompositions(self.books)
        self.allocating: dict[str, int] = {}
        """Calls of the ops that allocate inside themselves."""
        self.audit: Audit | None = None
        self.plain_entries = self.entries

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else Dynamo's disable wraps each call of the hot path

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let `torch.compile` compile, and see what its code calls."""
        return True  # else a compiled function runs eagerly, now and ever after

    # Beginning and ending

    def start(self) -> None:
        """Begin to record on this thread; where that fails, or an interrupt comes, all is as it was."""
        modes = own_modes()
        try:
            self.thread, self.in_inference_mode = _get_ident(), torch.is_inference_mode_enabled()
            self.sums.references_in_linear = _references_in_linear()
            references_of_graphs()
            self.record_fake |= any("FakeTensorMode" in type(mode).__name__ for mode in modes)
            self.begin_watching()
            forks.note(self)
            self.__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            self.stop()
            set_modes(modes)
            raise

    def stop(self) -> bool:
        """Record no more; everything in torch is as it was. May be called again.

        Returns:
            False on another thread than it was started on: that one still calls the recorder, at its next op, which
            then takes it off.
        """
        try:
            return self._stop()
        except BaseException:
            self._stop()  # an interrupt came between: do what is left
            raise

    def _stop(self) -> bool:
        here = self.thread == _get_ident()
        try:
            if not here:
                restore_flags(self)
            elif _can_leave(self):
                leave_mode(self)
        finally:
            forks.forget(self)
            self.end_watching()
            self.__class__ = _Stopped  # of no use to those that may still call it
        return here

    def forked(self) -> None:
        """This process is a child of the one that records: nothing is recorded here, and nothing left."""
        self.thread = _get_ident()
        try:
            self.stop()
        finally:
            self.when_forked()

    def begin_audit(self, earlier: Iterable[Call] = ()) -> str:
        """Note what the allocator does in each call of an op, until `end_audit`; or say why that cannot be."""
        audit = Audit(self, earlier)
        if not audit.begin():
            return audit.problem
        self.audit, self.entries, self.plain_entries = audit, {}, self.entries  # each op is learnt anew, and marked
        return ""

    def end_audit(self) -> Audit | None:
        """End it, if it is on."""
        audit = self.audit
        if audit is not None:
            self.audit, self.entries = None, self.plain_entries
            audit.end()
        return audit

    def has_run(self) -> bool:
        """Whether an op ran since the step began that made something or cost something (`.item()` does neither)."""
        books = self.books
        return bool(books.products) or any(event >= 0 for event in books.events)

    # The hot path

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _function_modes_on() or (self.has_subclasses and _functions_on()):
            # Torch itself tells nobody of the ops of a scripted function, or of most in a backward: nor do we.
            with _without_torch_function():
                return self.__torch_dispatch__(func, types, args, kwargs)
        entry = self.entries.get(id(func))
        if entry is None:
            entry = self.learn(func)
        if types and (foreign := self.foreign(types)) is not None:
            if foreign:
                self.note_subclass_op(entry, args, kwargs or {})
                return NotImplemented
            return func(*args, **(kwargs or {}))
        kind = entry.kind
        if not kind or (kind == _INPLACE and self.in_optimizer):
            return entry.call(*args, **kwargs) if kwargs else entry.call(*args)
        books = self.books
        if books.dead:
            books.bury()
        try:
            if kind < _GENERAL:
                return self.quick(entry, args, kwargs)
            node: Any = None
            graph = True
            phase, module = OUTSIDE_PHASE, OUTSIDE
            live = books.live
            place = self.place
            # Where are we?
            try:
                if not self.runs:
                    stack = place.stack
                    if stack:
                        phase, module = FORWARD, stack[-1]
                        graph = _is_grad_enabled() or in_function_forward()
                        if not graph:
                            phase = place.without_grad
                    else:
                        phase, module, graph = self.locate_outside(place)
                elif self.in_optimizer:
                    phase, module = self.locate_in_optimizer(place, args)
                else:
                    place = self.places.get(_get_ident()) or self.new_place(_get_ident())
                    phase, module, node = self.locate_in_backward(place)
                if phase is not self.phase:
                    self.phase = phase
                    books.marks.append((len(books.events), "phase", phase))
                # Has the program brought storages that we have not met?
                if phase is not OPTIMIZER and entry.reads:
                    for arg in args:
                        t = type(arg)
                        if t is _Tensor or t is _Parameter:
                            ref = live.get(id(_storage_of(arg)))
                            if ref is None:
                                self.meet(arg, phase)
                            elif ref.parameter != -1 and (phase is FORWARD or type(phase) is Undecided):
                                self.note_reader(ref.parameter, arg, entry, args, module)
                        elif t is list or t is tuple:
                            for item in arg:
                                if isinstance(item, _Tensor):
                                    ref = live.get(id(_storage_of(item)))
                                    if ref is None:
                                        self.meet(item, phase)
                                    elif ref.parameter != -1 and (phase is FORWARD or type(phase) is Undecided):
                                        self.note_reader(ref.parameter, item, entry, args, module)
            except Exception as error:
                self.meet_odd(args, phase, error)
            if entry.uncounted:
                self.uncounted(entry.name, module)
            if kind == _GENERAL or (_COPYING <= kind < _COMPOSITE):
                out = entry.call(*args, **kwargs) if kwargs else entry.call(*args)
            elif kind == _COMPOSITE:
                if entry.formula is None or not any(isinstance(arg, _Tensor) and arg.is_nested for arg in args):
                    try:  # the kernel that would run; `decompose` may prefer another, written in Python
                        _push_mode(self)
                        return func._op_dk(_COMPOSITE_KEY, *args, **(kwargs or {}))
                    finally:
                        _pop_mode(None)
                out = entry.call(*args, **kwargs) if kwargs else entry.call(*args)
            elif kind == _RESIZING:
                out = self.run_resizing(entry, args, kwargs or {}, phase, module)
            else:
                out = self.run_higher_order(entry, args, kwargs or {})
        except _OutOfMemoryError as error:
            self.out_of_memory(error, entry.name)
            raise
        try:
            # What did it cost?
            if entry.formula is not None:
                post_product(self, entry, args, kwargs, out, phase, module, place, node)
            # Which storages came?
            if books.dead:
                books.bury()
            first_new = len(books.blocks)
            if type(out) is _Tensor:
                storage = _storage_of(out)
                key = id(storage)
                if key not in live and key not in books.unread:
                    ref = Ref(storage, books.died)
                    ref.key = key
                    ref.number = number = books.first + first_new
                    dtype = out.dtype
                    books.blocks.append(
                        (
                            storage.nbytes(),
                            "cpu" if out.is_cpu else books.device_name(out.device),
                            phase,
                            module,
                            entry.name,
                            out.shape,
                            books.dtype_names.get(dtype) or books.dtype_name(dtype),
                            -1,
                        )
                    )
                    live[key] = ref
                    books.events.append(number)
                    if not graph or node is not None or phase is OUTSIDE_PHASE or self.stacks:
                        self.describe_new(first_new, phase, node, graph, entry, args)
            elif out is not None:
                self.enter_results(out, phase, module, entry.name)
                if len(books.blocks) > first_new and (
                    not graph or node is not None or phase is OUTSIDE_PHASE or self.stacks
                ):
                    self.describe_new(first_new, phase, node, graph, entry, args)
            # What is special about them?
            if entry.lifts:
                self.note_external(out, first_new, entry.name)
            if kind == _COPYING:
                note_copy(books, entry.name, args, kwargs, out, module)
            elif kind >= _ADDING and len(books.blocks) > first_new and kind < _COMPOSITE:
                self.note_written(kind, args, out, node, sys._getframe().f_back)
        except UncountedOpError:
            raise
        except Exception as error:
            self.enter_odd_results(out, phase, module, entry.name, error)
            if kind == _COPYING and type(node) is _AccumulateGrad:
                self.sharing.watch(args[0], out)
            elif kind == _DECIDING and node is not None:
                self.note_written(kind, args, out, node, None)
        return out

    def quick(self, entry: Entry, args: Any, kwargs: Any) -> Any:
        """`detach` and ops that only write into their first argument."""
        if entry.kind == _INPLACE:
            runs = self.runs
            if entry.uncounted:
                self.uncounted(entry.name, OUTSIDE)
            self.meet_written(args)
            if not runs and len(args) > 1 and isinstance(args[1], _Tensor) and self.place.stack:
                self.note_added(args[1], entry, args)
            if runs and type(_current_node()) is _AccumulateGrad:
                return self.accumulate(entry, args, kwargs or {})
            return entry.call(*args, **kwargs) if kwargs else entry.call(*args)
        out = entry.call(*args, **kwargs) if kwargs else entry.call(*args)
        if self.runs and type(_current_node()) is _AccumulateGrad and (out.is_floating_point() or out.is_complex()):
            # A compiled region on a thread of the engine's is not told of.
            made = (BACKWARD, OUTSIDE, COMPILED) if self.compiled_code_ran else None
            self.enter_gradient(out, made)  # not the indices of a sparse one, which are cloned next
        return out

    # Less often

    def accumulate(self, entry: Entry, args: Any, kwargs: dict[str, Any]) -> Any:
        """Autograd adds to a gradient; a sparse one then has other storages."""
        if args[0].layout is torch.strided:
            out = entry.call(*args, **kwargs)
            self.enter_gradient(args[0], None)
            return out
        events = self.books.events
        before = len(events)
        out = entry.call(*args, **kwargs)
        self.enter_gradient(args[0], (BACKWARD, OUTSIDE, entry.name))
        events[before:] = sorted(events[before:], key=lambda event: event < 0)  # they came before the old ones went
        return out

    def note_written(self, kind: int, args: Any, out: Any, node: Any, caller: FrameType | None) -> None:
        """An op that made something only because a mode is on, or that tells which way a formula goes."""
        if kind == _ADDING:
            self.sums.note(args, out, node, self.node_first_block, caller)
        elif node is None:
            return
        elif kind == _SCATTERING:
            self.sums.note_scattered(args[0], out, node, self.node_first_block, caller)
        elif type(node).__name__ in DATA_DEPENDENT:
            self.deciding.note(node, self.node_first_block, args, out)
        elif type(node).__name__ == "EmbeddingBagBackward0":
            self.deciding.note_bags(args)

    def learn(self, func: Any) -> Entry:
        """Work out an operator's entry at its first call."""
        if self.registry_version != registry.version:
            self.registry_version = registry.version
            self.entries.clear()
            self.plain_entries.clear()
        entry = self.entries[id(func)] = Entry(func)
        self.dynamo_is_about = self.dynamo_is_about or patches.attach_to_dynamo()
        self.watch_inside(self.keep_trace_out(entry) if func is torch.ops.aten.convolution.default else entry)
        return entry

    def watch_inside(self, entry: Entry) -> None:
        """Let the calls of an operator that allocates inside itself be counted, and all calls be audited."""
        count_allocating(entry, self.allocating)
        if self.audit is not None:
            self.audit.wrap(entry)

    def keep_trace_out(self, entry: Entry) -> Entry:
        """Of all ops `aten.convolution` alone arrives with `torch.jit.trace` on, which would note the sizes we read.

        The entry calls this handler again, without it; what comes back is the entry that is found then.
        """
        inner, key = Entry(entry.op), object()
        self.entries[id(key)] = inner

        def call(*args: Any, **kwargs: Any) -> Any:
            with internals.no_tracing():
                return self.__torch_dispatch__(key, (), args, kwargs)

        entry.kind, entry.call = Kind.VIEW, call
        return inner

    def foreign(self, types: Any) -> bool | None:
        """None: an ordinary op. True: a subclass must handle it first. False: not the program's own work."""
        for t in types:
            if t is _Tensor or t is _Parameter:
                continue
            if t.__name__ in ("FakeTensor", "FunctionalTensor"):
                return None if self.record_fake and t.__name__ == "FakeTensor" else False
            if t.__torch_dispatch__ is not internals.no_torch_dispatch:
                return True
        return None

    def run_resizing(self, entry: Entry, args: Any, kwargs: dict[str, Any], phase: str, module: int) -> Any:
        """Ops that may change the size of a storage that is there."""
        # What a compiled region writes into is a buffer of its own, made there.
        is_compiled = self.compiled_code_ran and (self.in_compiled_code or in_generated_code(sys._getframe(1).f_back))
        made = (phase, module, COMPILED) if is_compiled else None
        self.meet_outputs(kwargs, phase, made)
        out = entry.call(*args, **kwargs)
        self.note_sizes((*args, *kwargs.values()), phase, module)
        return out

    def run_higher_order(self, entry: Entry, args: Any, kwargs: dict[str, Any]) -> Any:
        """Higher-order ops: what they hold runs here, under the mode (of `cond` the branch that is taken)."""
        if entry.name in CONTAINERS:
            try:
                _push_mode(self)
                return run_container(entry.op, args, kwargs)
            finally:
                _pop_mode(None)
        return entry.op(*args, **kwargs)

    def uncounted(self, name: str, module: int) -> None:
        """An op of unknown cost."""
        counts = self.books.uncounted
        counts[name] = counts.get(name, 0) + 1
        if self.strict:
            raise UncountedOpError(name, self.names.module_paths()[module])

    def out_of_memory(self, error: BaseException, op: str) -> None:
        """Overridden by the ledger: say what holds the memory."""


class _Stopped(Recorder):
    """A recorder that was stopped where it could not be taken off its thread's stack: there it passes one op on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        finally:
            if kwargs is not None and _can_leave(self):
                kwargs["_torchledger"] = _Leaves(self)


class _Leaves:
    """Takes a recorder off its thread's stack when it goes: with the arguments of an op, once torch is done with them.

    While an op is being handled its mode is not on the stack, and torch puts it back after.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __del__(self) -> None:
        leave_mode(self._recorder)


def _can_leave(recorder: Recorder) -> bool:
    """Whether the recorder can be taken off its thread's stack here, and is not put back.

    Torch holds it off the stack while it handles an op, further up. The end of an inference mode puts back how the
    thread dispatched at its beginning, to no mode at all if ours is gone by then.
    """
    if torch.is_inference_mode_enabled() and not recorder.in_inference_mode:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _handler_code and frame.f_locals.get("self") is recorder:
            return False
        frame = frame.f_back
    return True


_handler_code = Recorder.__torch_dispatch__.__code__


@functools.cache
def _references_in_linear() -> int:
    """What `Sums.references_in_linear` is for this Python and torch, from a product of no consequence."""
    probe = Recorder()
    probe.place = probe.places[_get_ident()] = Place(probe, _get_ident())
    with internals.no_dispatch_modes(), torch.no_grad(), probe:
        x, weight = torch.zeros(2, 3, 2, device="cpu").transpose(0, 1), torch.zeros(2, 2, device="cpu")
        nn.functional.linear(x, weight, torch.zeros(2, device="cpu"))
    found = probe.sums.references_in_linear
    probe.books.close()
    return -1 if found is None else found
