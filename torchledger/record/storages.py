"""Live storages and the journal that is being written: births, deaths, late meetings and roles.

A storage is known by identity. Its weak reference carries the number of its block, and says when it is gone.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from torchledger.journal.entries import (
    EXTERNAL,
    FROM_INPUTS,
    HELD,
    IN_GRAPH,
    LATE,
    MAPPED,
    NO_SEGMENT,
    PARAMETER,
    READ_BY_FORWARD,
    SETTLED_SHIFT,
    WRITTEN,
    Batch,
    Journal,
    ProductRow,
    Reader,
    Row,
)
from torchledger.record.origins import OWN, Origins

BEFORE = "(before)"
"""The op of storages that were there before an op read them, and are nothing else that is known."""
NO_PARAMETER = -1
SEVERAL_PARAMETERS = -2
storage_of = torch.Tensor.untyped_storage


class Ref(weakref.ref[torch.UntypedStorage]):
    """A live storage: the number of its block, and its id while it lives."""

    __slots__ = ("key", "number")
    key: int
    number: int
    parameter = NO_PARAMETER
    """The parameter whose values the storage holds, in its own or in another layout or dtype."""


class ParameterRef(Ref):
    """The storage of a parameter, or of a copy of one. ``offsets`` tell several parameters of one storage apart."""

    __slots__ = ("offsets", "parameter")
    parameter: int
    offsets: dict[int, int]


Made = tuple[str, int, str]
"""Phase, module and op of a storage that was made now."""


class Cut(NamedTuple):
    """A moment of the open step: how long each list of the journal was, and what was counted."""

    events: int
    blocks: int
    marks: int
    products: int
    copies: int
    batches: int
    segments: int
    global_excess: int
    uncounted: dict[str, int]
    readers: dict[tuple[int, str], tuple[str, int, int]] | None = None
    """Who had read which parameter by then, after `Books.turn`."""


class Books:
    """The open journal of one ledger."""

    def __init__(self) -> None:
        self.live: dict[int, Ref] = {}
        """Storages that a forward pass may read without more ado, by id."""
        self.unread: dict[int, Ref] = {}
        """Those made outside any module and read by no forward pass yet."""
        self.first = 0
        self.carried: dict[int, Row] = {}
        self.blocks: list[Row] = []
        self.events: list[int] = []
        self.marks: list[tuple[int, str, str]] = []
        self.roles: dict[int, int] = {}
        self.products: list[ProductRow] = []
        self.copies: list[tuple[str, str, int, int]] = []
        self.uncounted: dict[str, int] = {}
        self.inplace_adds: list[tuple[int, int]] = []
        self.global_excess = 0
        self.n_products_before = 0
        """Products of earlier steps."""
        self.readers: dict[tuple[int, str], tuple[str, int, int]] = {}
        self.batches: list[Batch] = []
        self.segments: list[dict[int, bool]] = []
        """Of each checkpointed segment, torch's own note of the backwards that recomputed it."""
        self.segment_numbers: dict[int, int] = {}
        self.enclosing: list[int] = []
        """See `Journal.enclosing`."""
        self.device_names: dict[torch.device, str] = {}
        self.dtype_names: dict[torch.dtype, str] = {}
        self.sites: list[str] = []
        self.sources: dict[int, tuple[int, ...]] = {}
        """What blocks that were made outside were made from, as far as no forward pass has read them."""
        self.origins = Origins()
        self._n_events_before = 0
        self.lent: set[int] = set()
        """Blocks that a gradient has the use of, and that are what they were: the batch's ids."""
        self.dead: deque[Ref] = deque()
        """Storages that have gone, and are to be buried before anything else is looked up or noted."""
        self.died = self.dead.append
        """What the weak references call. No function of Python: an interrupt that came in it would be lost."""

    def bury(self) -> None:
        """Note the deaths since the last call."""
        dead, live, unread, event = self.dead, self.live, self.unread, self.events.append
        while dead:
            ref = dead.popleft()
            event(~ref.number)
            key = ref.key
            if live.get(key) is ref:
                del live[key]
            elif unread.get(key) is ref:
                del unread[key]

    def close(self) -> None:
        """Forget all storages; nothing that lives on is watched any more."""
        self.live.clear()
        self.unread.clear()
        self.dead.clear()

    # Meeting storages

    def add(self, tensor: torch.Tensor, storage: torch.UntypedStorage, row: Row, *, came: bool) -> Ref:
        """Open a block for a storage: ``came`` now, or there before, then perhaps in the memory of a known one."""
        origin = OWN if came or storage.resizable() else self.origins.origin_of(storage, self.moment())
        if origin.borrowed and (lender := self.lender_of(storage)) is not None:
            return self._borrow(storage, lender.number)
        ref = Ref(storage, self.died)
        ref.key = id(storage)
        ref.number = number = self.first + len(self.blocks)
        self.blocks.append(row)
        self.live[ref.key] = ref
        if came:
            self.events.append(number)
        else:
            self.roles[number] = LATE | origin.role
        return ref

    def moment(self) -> int:
        """How many events there have been, over all steps."""
        return self._n_events_before + len(self.events)

    def lender_of(self, storage: torch.UntypedStorage) -> Ref | None:
        """The known storage in whose memory another one lies (a part of it, or what DLPack handed back)."""
        address = storage.data_ptr()
        for ref in [*self.live.values(), *self.unread.values()]:
            other = ref()
            if other is None or other is storage or other.device.type != "cpu":
                continue
            try:
                start = other.data_ptr()
            except RuntimeError:  # it has no data
                continue
            if start <= address < start + other.nbytes():
                return ref
        return None

    def withdraw(self, storage: torch.UntypedStorage, number: int, lender: int) -> None:
        """The block that came last is none: its storage lies in the memory of another."""
        if self.events and self.events[-1] == number == self.first + len(self.blocks) - 1:
            self.unread.pop(id(storage), None)
            self.live.pop(id(storage), None)
            self.events.pop()
            self.blocks.pop()
            self.roles.pop(number, None)
            self.sources.pop(number, None)
            self._borrow(storage, lender)

    def _borrow(self, storage: torch.UntypedStorage, number: int) -> Ref:
        """Know a storage by the block whose memory it lies in; what it lies in lives as long as it does."""
        pop = self.live.pop
        ref = Ref(storage, lambda gone: pop(gone.key, None))
        ref.key, ref.number = id(storage), number
        self.live[ref.key] = ref
        return ref

    def row(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, phase: str, module: int, op: str, site: int = -1
    ) -> Row:
        """The row of a storage that came with that tensor."""
        return (
            storage.nbytes(),
            self.device_name(tensor.device),
            phase,
            module,
            op,
            shape_of(tensor),
            self.dtype_name(tensor.dtype),
            site,
        )

    def row_before(self, tensor: torch.Tensor, storage: torch.UntypedStorage, module: int = 0, op: str = "") -> Row:
        """The row of a storage that was there before: its own shape, where the tensor is a view of a part."""
        row = self.row(tensor, storage, "", module, op)
        base = tensor._base if tensor._is_view() else None
        if base is not None and tensor.numel() * tensor.itemsize != row[0]:
            shape = shape_of(base)
            if base.numel() * base.itemsize != row[0]:
                shape = (row[0] // tensor.itemsize,)
            return (*row[:5], shape, self.dtype_name(base.dtype), row[7])
        return row

    def meet(
        self,
        tensor: torch.Tensor,
        *,
        read_by_forward: bool = False,
        written: bool = False,
        in_graph: bool = False,
        made: Made | None = None,
    ) -> None:
        """Enter the storages of an argument that is not among the live ones: ``made`` now, unseen, or there before.

        Args:
            tensor: The argument.
            read_by_forward: Whether a forward pass reads it.
            written: Whether an op outside of any forward pass writes into it.
            in_graph: Whether the graph of a forward that nothing saw holds it.
            made: Phase, module and op, if it was made now.
        """
        self.bury()
        for part in plain_parts(tensor):
            storage = storage_of(part)
            key = id(storage)
            ref = self.live.get(key)
            if ref is None and (ref := self.unread.get(key)) is not None and read_by_forward:
                self.live[key] = self.unread.pop(key)
                self._note_read(ref.number)
            if ref is None and made is not None:
                self.add(part, storage, self.row(part, storage, *made), came=True)
            elif ref is None:
                ref = self.add(part, storage, self.row_before(part, storage, op=BEFORE), came=False)
                known = self.roles.get(ref.number, 0)
                known |= (READ_BY_FORWARD if read_by_forward else 0) | (WRITTEN if written else 0)
                self.roles[ref.number] = known | (IN_GRAPH if in_graph else 0)

    def _note_read(self, number: int) -> None:
        """A forward reads what was made outside: an input, and so is all that it was made from."""
        roles = self.roles
        roles[number] = roles.get(number, 0) | READ_BY_FORWARD
        pending = [*self.sources.pop(number, ())]
        while pending:
            source = pending.pop()
            roles[source] = roles.get(source, 0) | FROM_INPUTS
            pending += self.sources.pop(source, ())

    def enter(self, tensor: torch.Tensor, role: int, module: int = 0, made: Made | None = None) -> None:
        """Give the storages of a tensor a role, and a module if none made them.

        Those not met yet were ``made`` now, unseen, or there before.
        """
        self.bury()
        live, roles = self.live, self.roles
        for part in plain_parts(tensor):
            storage = storage_of(part)
            key = id(storage)
            ref = live.get(key) or self.unread.get(key)
            if ref is None:
                row = self.row_before(part, storage, module) if made is None else self.row(part, storage, *made)
                ref = self.add(part, storage, row, came=made is not None)
            elif module:
                self._house(ref.number, module)
            number = ref.number
            known = roles.get(number, 0)
            if not known & role and number not in self.lent:
                if known & EXTERNAL and role & HELD and self.origins.is_mapped(storage, self.moment()):
                    known |= MAPPED
                roles[number] = known | role
            if key not in live:
                live[key] = self.unread.pop(key)

    def _house(self, number: int, module: int) -> None:
        rows: Any = self.carried if number < self.first else self.blocks
        index = number if number < self.first else number - self.first
        row = rows[index]
        if not row[3]:
            rows[index] = (*row[:3], module, *row[4:])

    def enter_parameter(self, tensor: torch.Tensor, number: int, module: int) -> None:
        """Enter a parameter's storages, so that products that use them are known to use the parameter."""
        self.enter(tensor, PARAMETER, module)
        for part in plain_parts(tensor):
            self.tag_parameter(storage_of(part), number, part.storage_offset())

    def tag_parameter(self, storage: torch.UntypedStorage, number: int, offset: Any = 0) -> None:
        """Say that a live storage holds the values of a parameter, from that offset on."""
        key = id(storage)
        old = self.live.get(key) or self.unread.get(key)
        if old is None:
            return
        if isinstance(old, ParameterRef):
            old.offsets.setdefault(offset, number)
            if len(set(old.offsets.values())) > 1:
                old.parameter = SEVERAL_PARAMETERS
            return
        ref = ParameterRef(storage, old.__callback__)
        ref.key, ref.number, ref.parameter, ref.offsets = key, old.number, number, {offset: number}
        (self.live if key in self.live else self.unread)[key] = ref

    def parameter_of(self, tensor: Any) -> int:
        """The parameter whose values a tensor holds, or `NO_PARAMETER`."""
        try:
            ref = self.live.get(id(storage_of(tensor)))
        except (RuntimeError, NotImplementedError, TypeError):
            return NO_PARAMETER
        if ref is None or ref.parameter != SEVERAL_PARAMETERS:
            return NO_PARAMETER if ref is None else ref.parameter
        assert isinstance(ref, ParameterRef)
        offset = tensor.storage_offset()
        below = [start for start in ref.offsets if start <= offset]
        return ref.offsets[max(below)] if below else NO_PARAMETER

    def resized(self, storage: torch.UntypedStorage, phase: str, module: int) -> None:
        """A storage has another size: another block came, with the same roles, and took over before its own went."""
        self.bury()
        key = id(storage)
        ref = self.live.get(key) or self.unread.get(key)
        if ref is None:
            return
        old = ref.number
        row = self.blocks[old - self.first] if old >= self.first else self.carried[old]
        nbytes = storage.nbytes()
        if nbytes == row[0]:
            return
        number = self.first + len(self.blocks)
        self.blocks.append((nbytes, row[1], phase, module, "aten.resize_", row[5], row[6], row[7]))
        self.roles[number] = self.roles.get(old, 0) & ~LATE
        ref.number = number
        self.events += (number, ~old)

    # The journal

    def peek(self, index: int) -> Journal:
        """The journal of the step so far, as if it ended here; the books stay open."""
        self.bury()
        return Journal(
            index=index,
            first=self.first,
            carried=dict(self.carried),
            blocks=list(self.blocks),
            events=list(self.events),
            marks=list(self.marks),
            roles=dict(self.roles),
            products=list(self.products),
            copies=list(self.copies),
            uncounted=dict(self.uncounted),
            inplace_adds=list(self.inplace_adds),
            sites=self.sites,
            global_excess=self.global_excess,
            **self._evidence(),
        )

    def _evidence(self) -> dict[str, Any]:
        return {
            "segments": [sum(done.values()) for done in self.segments],
            "enclosing": list(self.enclosing),
            "readers": [Reader(number, op, *rest) for (number, op), rest in self.readers.items()],
            "batches": list(self.batches),
        }

    def cut(self, index: int, at: Cut | None = None) -> Journal:
        """Close the journal of a step and open the next; with ``at``, as of that earlier moment.

        `settle` must follow: the roles of what lives on still need the categories that the step gave them.
        """
        self.bury()
        at = at or self.here()
        later = self.events[at.events :]
        self._n_events_before += at.events
        first, carried, blocks = self.first, self.carried, self.blocks
        boundary = first + at.blocks
        readers, readers_since = self._split_readers(at)
        journal = Journal(
            index=index,
            first=first,
            carried=carried,
            blocks=blocks[: at.blocks],
            events=self.events[: at.events],
            marks=self.marks[: at.marks],
            roles={n: role for n, role in self.roles.items() if n < boundary} if later else self.roles,
            products=self.products[: at.products],
            copies=self.copies[: at.copies],
            uncounted=at.uncounted,
            inplace_adds=[pair for pair in self.inplace_adds if pair[0] < at.events],
            sites=self.sites,
            global_excess=at.global_excess,
            segments=[sum(done.values()) for done in self.segments[: at.segments]],
            enclosing=self.enclosing[: at.segments],
            readers=[Reader(number, op, *rest) for (number, op), rest in readers.items()],
            batches=self.batches[: at.batches],
        )
        alive = {ref.number for ref in (*self.live.values(), *self.unread.values()) if ref.number < boundary}
        alive.update(~event for event in later if event < 0 and ~event < boundary)
        self.carried = {n: blocks[n - first] if n >= first else carried[n] for n in sorted(alive)}
        self.first = boundary
        self.sources = {
            n: tuple(source for source in found if source in self.carried or source >= boundary)
            for n, found in self.sources.items()
            if n in self.carried or n >= boundary
        }
        self.blocks = blocks[at.blocks :]
        del self.events[: at.events]  # the same list: weak references' callbacks append to it
        self.marks = [(max(position - at.events, 0), kind, value) for position, kind, value in self.marks[at.marks :]]
        self.n_products_before += at.products
        self.products = [_moved(row, at) for row in self.products[at.products :]]
        self.copies, self.batches = self.copies[at.copies :], self.batches[at.batches :]
        self.segments = self.segments[at.segments :]
        self.segment_numbers = {key: n - at.segments for key, n in self.segment_numbers.items() if n >= at.segments}
        self.enclosing = [_moved_segment(around, at.segments) for around in self.enclosing[at.segments :]]
        self.readers = readers_since
        self.uncounted = {op: n for op, calls in self.uncounted.items() if (n := calls - at.uncounted.get(op, 0))}
        self.inplace_adds = [(place - at.events, old) for place, old in self.inplace_adds if place >= at.events]
        self.global_excess -= at.global_excess
        return journal

    def _split_readers(self, at: Cut) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Who read which parameter before and after a moment; positions count from the step that they are in."""
        before = at.readers
        since = self.readers
        if before is None:
            before = {key: found for key, found in since.items() if found[2] <= at.blocks}
            since = {key: found for key, found in since.items() if found[2] > at.blocks}
        return before, {key: (how, module, max(n - at.blocks, 0)) for key, (how, module, n) in since.items()}

    def here(self, n_new: int = 0, n_products: int = 0) -> Cut:
        """This moment, or the one before the last so many blocks were allocated and products ran, to cut at later."""
        self.bury()
        return Cut(
            len(self.events) - n_new,
            len(self.blocks) - n_new,
            len(self.marks),
            len(self.products) - n_products,
            len(self.copies),
            len(self.batches),
            len(self.segments),
            self.global_excess,
            dict(self.uncounted),
        )

    def turn(self, at: Cut) -> Cut:
        """Begin a new page at that moment: a step may have ended there, which only what follows can tell."""
        found, self.readers = at._replace(readers=self.readers), {}
        return found

    def turn_back(self, at: Cut) -> None:
        """No step ended where a page was turned."""
        self.readers = {**self.readers, **(at.readers or {})}

    def after_frees(self, at: Cut) -> Cut:
        """The moment after what was freed before anything else was allocated: gradients set to None, say."""
        end = at.events
        while end < len(self.events) and self.events[end] < 0:
            end += 1
        return at._replace(events=end)

    def settle(self, categories: dict[int, int]) -> None:
        """After `cut`: keep the roles of the blocks that live on, with the category that the step gave each."""
        mask = (1 << SETTLED_SHIFT) - 1
        roles = self.roles
        kept = {n: (roles.get(n, 0) & mask) | (categories[n] + 1) << SETTLED_SHIFT for n in self.carried}
        first = self.first
        kept.update((n, role) for n, role in roles.items() if n >= first)
        self.roles = kept

    def device_name(self, device: torch.device) -> str:
        """``"cpu"``, ``"cuda:0"``."""
        name = self.device_names.get(device)
        if name is None:
            name = self.device_names[device] = str(device)
        return name

    def dtype_name(self, dtype: torch.dtype) -> str:
        """``"float32"``."""
        name = self.dtype_names.get(dtype)
        if name is None:
            name = self.dtype_names[dtype] = str(dtype).removeprefix("torch.")
        return name


def _moved(row: ProductRow, at: Cut) -> ProductRow:
    """A product's row in the step that begins at that moment: links to what ran before it are gone."""
    if not row[9]:
        return row
    origin, flags, segment, *rest = row[9]
    origin = origin - at.products if origin >= at.products else -1
    segment = segment - at.segments if segment >= at.segments else NO_SEGMENT
    return (*row[:9], (origin, flags, segment, *rest))


def _moved_segment(around: int, n: int) -> int:
    """The segment around another (see `Journal.enclosing`) after the first ``n`` are gone."""
    if around >= 0:
        return around - n if around >= n else NO_SEGMENT
    index = NO_SEGMENT - 1 - around
    return NO_SEGMENT - 1 - (index - n) if index >= n else NO_SEGMENT


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """A tensor's sizes; of a nested one, the number of its elements."""
    try:
        return tuple(tensor.shape)
    except RuntimeError:  # a nested tensor has none
        return (tensor.numel(),)


def plain_parts(tensor: Any) -> Iterable[torch.Tensor]:
    """The tensors whose storages hold a tensor's values: itself, the parts of a sparse one, or of a wrapper."""
    if not isinstance(tensor, torch.Tensor):
        return ()
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.strided and not hasattr(type(tensor), "__tensor_flatten__"):
        return (tensor,)
    return tuple(_inner_parts(tensor))


def _inner_parts(tensor: Any) -> Iterator[torch.Tensor]:
    if hasattr(type(tensor), "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from plain_parts(getattr(tensor, name))
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
