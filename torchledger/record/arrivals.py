"""What comes: storages that ops make, bring or write into, and what sets them apart."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import torch
import torch.multiprocessing.reductions

from torchledger import internals
from torchledger.journal.entries import (
    FROM_DATA,
    FROM_INPUTS,
    GRADIENT,
    IN_GRAPH,
    LATE,
    NO_GRAPH,
    NOT_INPUTS,
    READ_BY_FORWARD,
)
from torchledger.record.entries import Entry
from torchledger.record.graphs import is_grown, is_younger, saved_below
from torchledger.record.names import OUTSIDE
from torchledger.record.places import BACKWARD, OPTIMIZER, OUTSIDE_PHASE, in_generated_code
from torchledger.record.storages import NO_PARAMETER, Made, plain_parts
from torchledger.record.watching import Watching

COMPILED = "(compiled)"
"""The op of storages that a compiled region made."""
UNSEEN = "(unseen)"
"""The op of storages that something made since the ledger began, and no op that it saw."""
_NOT_READING = (BACKWARD, OPTIMIZER, OUTSIDE_PHASE)
"""Phases in which what is met is no batch."""
_AccumulateGrad = internals.AccumulateGrad
_Tensor = torch.Tensor
_get_ident = threading.get_ident
_storage_of = torch.Tensor.untyped_storage
_reductions_file = torch.multiprocessing.reductions.__file__


class Arrivals(Watching):
    """Enters storages into the books, with what is known of them."""

    stacks = False

    def __init__(self) -> None:
        super().__init__()
        self.compiled_code_ran = False
        self.in_compiled_code = 0
        """How many regions of generated code run, one in another."""
        self.seen_nodes: set[int] = set()
        """The numbers of the nodes whose saved tensors were entered."""

    def meet(self, tensor: torch.Tensor, phase: str) -> None:
        """An argument whose storage is not among the live ones."""
        module = self.place.stack[-1] if self.place.stack else OUTSIDE
        made: Made | None = None
        grown = False
        if self.compiled_code_ran and (self.in_compiled_code or in_generated_code(sys._getframe(2))):
            # The buffers of a compiled region are never dispatched, and what it is given was met when it began.
            made = (phase, module, COMPILED)
        elif is_grown(tensor) and id(_storage_of(tensor)) not in self.books.unread:
            grown = True
            if _get_ident() == self.place.thread:  # each thread numbers its nodes by itself
                if is_younger(tensor, self.place.first_number):
                    made = (phase, module, UNSEEN)
                else:
                    self.enter_graph(tensor)
        self.books.meet(tensor, read_by_forward=phase not in _NOT_READING, in_graph=grown, made=made)

    def enter_graph(self, root: torch.Tensor) -> None:
        """Enter what a graph holds that was made before the ledger began."""
        try:
            for tensor, is_own in saved_below(root.grad_fn, self.place.first_number, self.seen_nodes):
                for part in plain_parts(tensor):
                    self.books.meet(part, read_by_forward=not is_own, in_graph=is_own)
        except Exception as error:
            self.fault("what an older graph holds could not be entered", error)

    def meet_roots(self, roots: Any) -> None:
        """A backward begins at these tensors, which a forward may have made before the ledger began."""
        if _get_ident() != self.place.thread:
            return
        for root in roots if isinstance(roots, tuple | list) else (roots,):
            node = getattr(root, "grad_fn", None)
            if node is not None and node._sequence_nr() < self.place.first_number:
                self.enter_graph(root)
                self.books.meet(root, in_graph=is_grown(root))

    def meet_odd(self, args: Any, phase: str, error: Exception) -> None:
        """The same for arguments of all kinds (sparse, nested, wrapped), after plain ones failed with that error."""
        if not any(_is_odd(t) for arg in args for t in (arg if isinstance(arg, list | tuple) else (arg,))):
            self.fault("an op could not be placed", error)
        try:
            for arg in args:
                for tensor in arg if isinstance(arg, list | tuple) else (arg,):
                    for part in plain_parts(tensor):
                        if id(_storage_of(part)) not in self.books.live:
                            self.meet(part, phase)
        except Exception as error:
            self.fault("an argument could not be entered", error)

    def meet_written(self, args: Any) -> None:
        """What an op is about to write into."""
        if not args:
            return
        books = self.books
        target = args[0]
        for tensor in target if isinstance(target, list | tuple) else (target,):
            key = 0
            try:
                key = id(_storage_of(tensor))
                if key in books.live:
                    continue
            except (RuntimeError, NotImplementedError, TypeError):
                pass
            inside = bool(self.place.stack)
            try:
                if (ref := books.unread.get(key)) is not None:
                    self._note_filled(ref.number, args[1:])
                books.meet(tensor, read_by_forward=inside, written=not inside and not self.runs)
            except Exception as error:
                self.fault("what an op writes into could not be entered", error)

    def _note_filled(self, number: int, args: Any) -> None:
        """What was made outside is filled from these arguments: if the model made one of them, it is no batch."""
        books = self.books
        found, sources = self.provenance(args)
        if not found & FROM_DATA:
            books.roles[number] = books.roles.get(number, 0) & ~(FROM_DATA | FROM_INPUTS)
        elif sources:
            books.sources[number] = tuple({*books.sources.get(number, ()), *sources})

    def meet_outputs(self, kwargs: dict[str, Any], phase: str, made: Made | None) -> None:
        """What an op is handed to put its results in: ``made`` now, unseen, or there before."""
        try:
            for value in kwargs.values():
                if isinstance(value, _Tensor):
                    self.books.meet(value, read_by_forward=phase not in _NOT_READING, made=made)
        except Exception as error:
            self.fault("an output could not be entered", error)

    def note_sizes(self, tensors: Any, phase: str, module: int) -> None:
        """Storages may have other sizes now."""
        try:
            for tensor in tensors:
                for part in plain_parts(tensor):
                    self.books.resized(_storage_of(part), phase, module)
        except Exception as error:
            self.fault("a new size could not be noted", error)

    def note_reader(self, parameter: int, tensor: torch.Tensor, entry: Entry, args: Any, module: int) -> None:
        """An op of a forward pass reads a parameter, or a copy of one."""
        books = self.books
        key = (parameter if parameter >= 0 else books.parameter_of(tensor), entry.name)
        if key in books.readers or entry.name in ("aten.clone", "aten._to_copy"):
            return
        how = "uncounted" if entry.uncounted else "plain"
        if entry.formula is not None:
            positions = [i for i, arg in enumerate(args) if arg is tensor]
            how = "product" if not positions or positions[0] in entry.operands else "addend"
        books.readers[key] = (how, module, len(books.blocks))

    def note_added(self, tensor: torch.Tensor, entry: Entry, args: Any) -> None:
        """An op of a forward pass writes into its first argument, from a second that may be a parameter."""
        try:
            ref = self.books.live.get(id(_storage_of(tensor)))
        except (RuntimeError, NotImplementedError):
            return
        if ref is not None and ref.parameter != NO_PARAMETER:
            self.note_reader(ref.parameter, tensor, entry, args, self.place.stack[-1])

    def enter_gradient(self, gradient: Any, made: Made | None) -> None:
        """Autograd stores this tensor in a ``.grad``."""
        try:
            if not gradient._is_zerotensor():  # zeros without memory
                self.books.enter(gradient, GRADIENT, made=made)
        except Exception as error:
            self.fault("a gradient could not be entered", error)

    def enter_results(self, out: Any, phase: str, module: int, op: str) -> None:
        """Open blocks for the new storages of results of all kinds."""
        books = self.books
        books.bury()
        live, unread = books.live, books.unread
        for tensor in out if isinstance(out, list | tuple) else (out,):
            if isinstance(tensor, list | tuple):
                self.enter_results(tensor, phase, module, op)
                continue
            for part in plain_parts(tensor):
                storage = _storage_of(part)
                key = id(storage)
                if key not in live and key not in unread:
                    books.add(part, storage, books.row(part, storage, phase, module, op), came=True)

    def enter_odd_results(self, out: Any, phase: str, module: int, op: str, error: Exception) -> None:
        """Enter results that have no plain storage or shape; anything else that went wrong is a fault."""
        try:
            if not any(_is_odd(t) for t in (out if isinstance(out, list | tuple) else (out,))):
                raise error
            self.enter_results(out, phase, module, op)
        except Exception as fault:
            self.fault(f"{op} could not be posted", fault)

    def describe_new(self, first_new: int, phase: str, node: Any, graph: bool, entry: Entry, args: Any) -> None:
        """Note what sets new blocks apart: a gradient, made without a graph, made outside, at which line."""
        books = self.books
        role = 0
        if node is not None and type(node) is _AccumulateGrad:
            role |= GRADIENT
        if not graph:
            role |= NO_GRAPH
        elif phase is BACKWARD and self.runs and self.runs[-1].create_graph and torch.is_grad_enabled():
            role |= IN_GRAPH
        sources: tuple[int, ...] = ()
        if phase is OUTSIDE_PHASE and entry.name == "aten.set_":
            role |= FROM_INPUTS if is_from_another_process(sys._getframe(2)) else 0
        elif phase is OUTSIDE_PHASE:
            found, sources = self.provenance(args if entry.reads else ())
            role |= found
        if role:
            for number in range(books.first + first_new, books.first + len(books.blocks)):
                books.roles[number] = books.roles.get(number, 0) | role
                if sources:
                    books.sources[number] = sources
        if phase is OUTSIDE_PHASE:
            if self.stepping.waiting and self.stepping.next_step is None:
                n_new = len(books.blocks) - first_new
                self.stepping.next_step = books.here(n_new, n_products=entry.formula is not None)
            fresh = {books.first + i for i in range(first_new, len(books.blocks))}
            for key in [key for key, ref in reversed(books.live.items()) if ref.number in fresh][: len(fresh)]:
                books.unread[key] = books.live.pop(key)
        if self.stacks:
            site = self.site()
            for i in range(first_new, len(books.blocks)):
                books.blocks[i] = (*books.blocks[i][:-1], site)

    def note_external(self, out: Any, first_new: int, op: str) -> None:
        """Note results whose memory no allocator of torch's gave: mapped files, arrays of other libraries.

        What a data loader's worker shares comes by way of `set_`, and is torch's own.
        """
        books = self.books
        if op == "aten.set_" and is_from_another_process(sys._getframe(2)):
            return
        for part in plain_parts(out):
            storage = _storage_of(part)
            ref = books.live.get(id(storage)) or books.unread.get(id(storage))
            if ref is not None and ref.number >= books.first + first_new and not storage.resizable():
                origin = books.origins.origin_of(storage, books.moment())
                if origin.borrowed and (lender := books.lender_of(storage)) is not None:
                    books.withdraw(storage, ref.number, lender.number)
                elif origin.role:
                    books.roles[ref.number] = books.roles.get(ref.number, 0) | origin.role

    def provenance(self, args: Any) -> tuple[int, tuple[int, ...]]:
        """What is made outside of these arguments, and the blocks among them that no forward has read.

        `FROM_DATA` if the model made and holds none of them, with `FROM_INPUTS` if there are some and all are inputs.
        """
        books = self.books
        roles = books.roles
        sources: list[int] = []
        known = FROM_INPUTS | FROM_DATA
        found = False
        for arg in args:
            for tensor in arg if isinstance(arg, list | tuple) else (arg,):
                for part in plain_parts(tensor):
                    found = True
                    key = id(_storage_of(part))
                    ref = books.live.get(key)
                    if ref is None and (ref := books.unread.get(key)) is not None:
                        sources.append(ref.number)
                    role = 0 if ref is None else roles.get(ref.number, 0)
                    is_input = role & (LATE | FROM_INPUTS | READ_BY_FORWARD) and not role & IN_GRAPH
                    if role & NOT_INPUTS or not (is_input or role & FROM_DATA):
                        return 0, ()
                    if not is_input:
                        known = FROM_DATA
        return known if found else FROM_DATA, tuple(sources)

    def site(self) -> int:
        """The user's file and line that led to this op."""
        frame: Any = sys._getframe(2)
        while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("torch", "torchledger"):
            frame = frame.f_back
        text = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
        sites = self.books.sites
        if text not in sites:
            sites.append(text)
        return sites.index(text)


def is_from_another_process(frame: FrameType | None) -> bool:
    """Whether what another process shares, such as a data loader's worker, is made into a tensor some frames up."""
    for _ in range(6):
        if frame is None:
            return False
        if frame.f_code.co_filename == _reductions_file:
            return True
        frame = frame.f_back
    return False


def _is_odd(value: Any) -> bool:
    """Whether a tensor has no plain storage or shape of its own."""
    return isinstance(value, _Tensor) and (
        value.layout is not torch.strided or value.is_nested or hasattr(type(value), "__tensor_flatten__")
    )
