"""Storages of one block: what autograd hands over whole without a dispatch mode, and copies with one on.

A sparse gradient that nothing else refers to becomes a parameter's `.grad` as it is: its values and its indices, which
may be the batch's own. With a mode on autograd cannot tell, and copies both.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from torchledger.journal.entries import GRADIENT
from torchledger.record.storages import Books, Ref, storage_of

_PHASE = 2
_MADE_IN = ("backward", "recompute")


class Sharing:
    """Takes back the copies of sparse gradients that a program without a ledger does not make."""

    def __init__(self, books: Books, fault: Callable[[str, BaseException], None]) -> None:
        self._books = books
        self._fault = fault
        self._members: dict[int, int] = {}
        """How many living storages a block has, by its number, for those that are or were shared."""
        self._n_watched = 0
        self._watched: dict[int, weakref.ref[torch.Tensor]] = {}

    def watch(self, gradient: torch.Tensor, copy: torch.Tensor) -> None:
        """Autograd has stored a copy of a sparse gradient, and made nothing since.

        Without a mode it would have stored the gradient itself, if that was the last reference to it: so, if the
        gradient goes before anything else comes.
        """
        try:
            self._books.enter(copy, GRADIENT)
            if gradient.layout is torch.sparse_coo:
                self._watch(gradient, copy)
        except Exception as error:
            self._fault("a sparse gradient could not be followed", error)

    def _watch(self, gradient: torch.Tensor, copy: torch.Tensor) -> None:
        if torch.is_grad_enabled() or not (gradient._indices().is_contiguous() and gradient._values().is_contiguous()):
            return  # copied in any case
        books = self._books
        sources = [self._watch_storage(part) for part in (gradient._indices(), gradient._values())]
        copies = [books.live.get(id(storage_of(part))) for part in (copy._indices(), copy._values())]
        came = len(books.events) - len(copies)
        if None in (*sources, *copies) or books.events[came:] != [ref.number for ref in copies if ref is not None]:
            return
        last = books.first + len(books.blocks)
        self._n_watched = turn = self._n_watched + 1

        def gone(ref: weakref.ref[torch.Tensor]) -> None:
            self._watched.pop(id(ref), None)
            books.bury()
            try:
                later = books.events[came + len(copies) :]
                is_last = turn == self._n_watched and last == books.first + len(books.blocks)
                if is_last and all(event < 0 for event in later):
                    self._take_back(sources, copies, came, later)
            except Exception as error:
                self._fault("a sparse gradient could not be followed", error)

        watching = weakref.ref(gradient, gone)
        self._watched[id(watching)] = watching

    def _watch_storage(self, tensor: torch.Tensor) -> Ref | None:
        """The reference to a live storage, from now on one that allows for others of the same block."""
        storage = storage_of(tensor)
        key = id(storage)
        for table in (self._books.live, self._books.unread):
            known = table.get(key)
            if type(known) is Ref:
                table[key] = shared = self._refer(storage, known.number)
                self._members.setdefault(known.number, 1)
                return shared
        return None

    def _refer(self, storage: torch.UntypedStorage, number: int) -> Ref:
        ref = Ref(storage, self._left)
        ref.key, ref.number = id(storage), number
        return ref

    def _take_back(self, sources: list[Any], copies: list[Any], came: int, later: list[int]) -> None:
        """Let the copies be further storages of their sources' blocks."""
        books = self._books
        storages = [ref() for ref in copies]
        if [books.live.get(id(storage)) for storage in storages] != copies:
            return
        numbers = [ref.number for ref in sources]
        books.events[came:] = [event for event in later if ~event not in numbers]
        books.marks[:] = [(min(p, max(p - len(copies), came)), kind, value) for p, kind, value in books.marks]
        del books.blocks[-len(copies) :]
        for storage, source, copy in zip(storages, numbers, copies, strict=True):
            books.roles.pop(copy.number, None)
            books.live[copy.key] = self._refer(storage, source)
            self._members[source] = self._members.get(source, 0) + 1
        self._note_roles(*numbers)

    def _note_roles(self, indices: int, values: int) -> None:
        """The values are a gradient, and so are indices that the backward made."""
        books = self._books
        books.roles[values] = books.roles.get(values, 0) | GRADIENT
        if indices >= books.first and books.blocks[indices - books.first][_PHASE] in _MADE_IN:
            books.roles[indices] = books.roles.get(indices, 0) | GRADIENT
        else:
            books.lent.add(indices)

    def _left(self, ref: Ref) -> None:
        """A storage is gone; its block goes with the last of those that share it."""
        books = self._books
        books.bury()  # those that went before
        if books.live.pop(ref.key, None) is None:
            books.unread.pop(ref.key, None)
        left = self._members.pop(ref.number, 1) - 1
        if left:
            self._members[ref.number] = left
        else:
            books.lent.discard(ref.number)
            books.events.append(~ref.number)
