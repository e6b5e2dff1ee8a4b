"""What comes: storages that ops make, bring or write into, and what sets them apart."""

from __future__ import annotations

import sys
from typing import Any

import torch

from torchledger import internals
from torchledger.journal.entries import (
    EXTERNAL,
    FROM_INPUTS,
    GRADIENT,
    LATE,
    NO_GRAPH,
    NOT_INPUTS,
    READ_BY_FORWARD,
)
from torchledger.record.entries import Entry
from torchledger.record.names import OUTSIDE
from torchledger.record.places import BACKWARD, OPTIMIZER, OUTSIDE_PHASE, compiled_region
from torchledger.record.storages import NO_PARAMETER, Made, plain_parts
from torchledger.record.watching import Watching

COMPILED = "(compiled)"
"""The op of storages that come out of a compiled region."""
_NOT_READING = (BACKWARD, OPTIMIZER, OUTSIDE_PHASE)
"""Phases in which what is met is no batch."""
_AccumulateGrad = internals.AccumulateGrad
_Tensor = torch.Tensor
_storage_of = torch.Tensor.untyped_storage


class Arrivals(Watching):
    """Enters storages into the books, with what is known of them."""

    stacks = False

    def meet(self, tensor: torch.Tensor, phase: str) -> None:
        """An argument whose storage is not among the live ones."""
        made = None
        if self.dynamo_is_about and (not tensor.is_leaf or (phase is BACKWARD and compiled_region(sys._getframe(2)))):
            # The buffers of a compiled region are never dispatched: its results are made now.
            made = (phase, self.place.stack[-1] if self.place.stack else OUTSIDE, COMPILED)
        self.books.meet(tensor, read_by_forward=phase not in _NOT_READING, made=made)

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
            try:
                if id(_storage_of(tensor)) in books.live:
                    continue
            except (RuntimeError, NotImplementedError, TypeError):
                pass
            inside = bool(self.place.stack)
            try:
                books.meet(tensor, read_by_forward=inside, written=not inside and not self.runs)
            except Exception as error:
                self.fault("what an op writes into could not be entered", error)

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
            position = next((i for i, arg in enumerate(args) if arg is tensor), -1)
            how = "product" if position in entry.operands or position < 0 else "addend"
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
        if phase is OUTSIDE_PHASE and (entry.name == "aten.set_" or self.are_inputs(args)):
            role |= FROM_INPUTS
        if role:
            for number in range(books.first + first_new, books.first + len(books.blocks)):
                books.roles[number] = books.roles.get(number, 0) | role
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
        if op == "aten.set_" and isinstance(out, _Tensor) and _storage_of(out).is_shared():
            return
        for part in plain_parts(out):
            storage = _storage_of(part)
            ref = books.live.get(id(storage)) or books.unread.get(id(storage))
            if ref is not None and ref.number >= books.first + first_new and not storage.resizable():
                books.roles[ref.number] = books.roles.get(ref.number, 0) | EXTERNAL

    def are_inputs(self, args: Any) -> bool:
        """Whether there are tensors among the arguments, and all of them are inputs."""
        books = self.books
        found = False
        for arg in args:
            for tensor in arg if isinstance(arg, list | tuple) else (arg,):
                for part in plain_parts(tensor):
                    found = True
                    key = id(_storage_of(part))
                    ref = books.live.get(key) or books.unread.get(key)
                    role = 0 if ref is None else books.roles.get(ref.number, 0)
                    if role & NOT_INPUTS or not role & (LATE | FROM_INPUTS | READ_BY_FORWARD):
                        return False
        return found

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


def _is_odd(value: Any) -> bool:
    """Whether a tensor has no plain storage or shape of its own."""
    return isinstance(value, _Tensor) and (
        value.layout is not torch.strided or value.is_nested or hasattr(type(value), "__tensor_flatten__")
    )
