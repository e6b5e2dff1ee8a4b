"""The visitor of a recorder: counts the FLOPs of a call on another thread, and hands them over when it ends."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from torchledger import internals
from torchledger.journal.entries import Journal, ProductRow, Reader
from torchledger.record.deciding import Deciding
from torchledger.record.decompositions import Decompositions
from torchledger.record.elsewhere import MODULE_CALLS, THREADS, UNFINISHED
from torchledger.record.mode import Recorder
from torchledger.record.names import OUTSIDE
from torchledger.record.parameters import ParameterBooks
from torchledger.record.places import FORWARD, INFERENCE, NodeOwners, Place, Run, Used
from torchledger.record.sharing import Sharing
from torchledger.record.storages import Books
from torchledger.record.sums import Sums

_VIEWS = ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "ToCopy", "Clone", "Expand", "Unsqueeze")
"""Names of nodes between a product and the parameter that it takes, less ``Backward0``."""


class Handed(NamedTuple):
    """What one call on another thread ran: rows whose origins are numbered as the visitor's products are."""

    visitor: int
    first: int
    """The number of the first row among the visitor's products."""
    rows: list[ProductRow]
    uncounted: dict[str, int]
    compiled: set[tuple[str, int]]
    readers: list[Reader]


class _FlopBooks(Books):
    """Books that know parameters, and keep no account of bytes."""

    def resized(self, storage: torch.UntypedStorage, phase: str, module: int) -> None:
        """No block is kept."""

    def _house(self, number: int, module: int) -> None:
        pass

    def forget_blocks(self) -> None:
        """Keep what storages are known, and nothing of what happened."""
        self.bury()
        self.first += len(self.blocks)
        for events in (self.blocks, self.events, self.marks, self.copies, self.inplace_adds, self.batches):
            events.clear()
        self.roles.clear()
        self.readers.clear()
        self.segments, self.segment_numbers, self.enclosing = [], {}, []


class VisitingRecorder(Recorder):
    """A recorder on a thread that its parent was not started on."""

    def __init__(self, parent: HostingRecorder, number: int) -> None:
        super().__init__(strict=parent.strict)
        self.parent = parent
        self.number = number
        self.visited = weakref.ref(threading.current_thread())
        self.names = parent.names
        self.books = self._flop_books = _FlopBooks()
        self.parameters = ParameterBooks(self.names, self.books)
        self.sums = Sums(self.books, Recorder.__torch_dispatch__.__code__)
        self.sums.references_in_linear = -1
        self.deciding, self.decompositions = Deciding(self.books), Decompositions(self.books)
        self.sharing = Sharing(self.books, self.fault)
        self.record_fake = parent.record_fake
        self.place = self.new_place(threading.get_ident())
        self.step = -1
        self.n_roots = 0
        self.first_row = 0
        self.busy = False

    def new_place(self, thread: int) -> Place:
        """This thread, or one of the engine's."""
        place = self.places[thread] = Place(self, thread)
        return place

    def begin_visit(self, kind: str, subject: Any) -> Any:
        """Its own thread is never one that it visits."""
        return None

    def begin(self) -> None:
        """A call begins."""
        self.busy = True
        books, parent = self.books, self.parent
        if self.step != parent.n_cuts:
            self.step = parent.n_cuts
            books.n_products_before += len(books.products)
            books.products = []
            self.place.log.cut()
            self.parameters.enter_all()
        self.n_roots = _meet_models(self, self.n_roots)
        self.first_row = len(books.products)
        internals.push_dispatch_mode(self)

    def module_begins(self, module: nn.Module, place: Place) -> int:
        """Another thread may have met the module just now."""
        number = super().module_begins(module, place)
        self.n_roots = _meet_models(self, self.n_roots)
        return number

    def end_visit(self) -> None:
        """The call has ended: its rows are the parent's now."""
        remove_mode(self)
        try:
            self._hand_over()
        except Exception as error:
            self.fault("what ran on another thread could not be handed over", error)
        self.busy = False

    def _hand_over(self) -> None:
        books = self.books
        before = books.n_products_before
        rows = [
            (*row[:9], (row[9][0] + before if row[9][0] >= 0 else -1, row[9][1], -1, *row[9][3:]) if row[9] else ())
            for row in books.products[self.first_row :]
        ]
        readers = [Reader(parameter, op, how, module, 0) for (parameter, op), (how, module, _) in books.readers.items()]
        if rows or readers or books.uncounted or self.compiled_regions:
            first = before + self.first_row
            self.parent.handed.append(Handed(self.number, first, rows, books.uncounted, self.compiled_regions, readers))
        books.uncounted, self.compiled_regions = {}, set()
        self.runs.clear()
        self._flop_books.forget_blocks()
        if self.parent.closed:
            books.close()

    # What is the parent's to do, or nobody's

    def phase_without_grad(self, module: nn.Module, number: int) -> str:
        """It is decided at once: `inference` if an optimizer that the parent knows trains a part of it."""
        return INFERENCE if self.parent.parameters.trains(module) else FORWARD

    def note_batch(self, module: nn.Module, number: int, args: Any, kwargs: Any) -> None:
        """What other threads are given says nothing of a step's tokens."""

    def describe_new(self, *args: Any) -> None:
        """No block is kept."""

    def begin_run(self, run: Run) -> None:
        """The graph may be one that the parent's thread made."""
        own = self.place.log
        run.log = GraphLog(self, own if own.has_nodes() else self.parent.place.log)
        super().begin_run(run)

    def fault(self, what: str, error: BaseException) -> None:
        """The parent's report says so."""
        self.parent.fault(what, error)


class HostingRecorder(Recorder):
    """A recorder that counts what other threads run, too."""

    def __init__(self, *, strict: bool = False, stacks: bool = False) -> None:
        super().__init__(strict=strict, stacks=stacks)
        self.handed: deque[Handed] = deque()
        self.n_roots = 0
        self.n_cuts = 0
        """Steps that have ended."""
        self.closed = False
        self.has_models = False
        self._visitors: list[VisitingRecorder] = []
        self._n_visitors = 0
        self._local = threading.local()
        self._indices: dict[tuple[int, int], int] = {}

    def add_model(self, model: nn.Module, *, given: bool) -> None:
        """With models given, calls of others on other threads are no concern of this ledger."""
        self.has_models |= given
        super().add_model(model, given=given)

    def knows(self, module: Any) -> bool:
        """Whether a module's call on another thread is counted."""
        if not self.has_models:
            return True
        known = self.names.module_numbers
        # What wraps a model (`torch.compile`, `DataParallel`) is no module of it.
        return id(module) in known or any(id(child) in known for child in module._modules.values())

    def concerns(self, kind: str, subject: Any) -> bool:
        """Whether a call on another thread is of a module, or sends gradients to a parameter, that is known here."""
        if kind == MODULE_CALLS or not self.has_models:
            return self.knows(subject)
        roots = [subject] if isinstance(subject, torch.Tensor) else subject
        nodes = [root.grad_fn if isinstance(root, torch.Tensor) else getattr(root, "node", None) for root in roots]
        return any(self.parameters.number_of(leaf) >= 0 for leaf in _leaves(nodes))

    def begin_visit(self, kind: str, subject: Any) -> VisitingRecorder | None:
        """A call begins on this thread, which is another one."""
        try:
            if not self.concerns(kind, subject):
                return None
            reference = getattr(self._local, "visitor", None)
            visitor = reference() if reference is not None else None
            if visitor is None:
                with self.unseen_lock:
                    self._visitors = [v for v in self._visitors if (thread := v.visited()) and thread.is_alive()]
                    self._n_visitors += 1
                    visitor = VisitingRecorder(self, self._n_visitors)
                    self._visitors.append(visitor)
                self._local.visitor = weakref.ref(visitor)
                self.note_unseen(THREADS)
            visitor.begin()
            return visitor
        except Exception as error:
            self.fault("a call on another thread could not be counted", error)
            return None

    def module_begins(self, module: nn.Module, place: Place) -> int:
        """Another thread may have met the module."""
        number = super().module_begins(module, place)
        if self._n_visitors and not place.stack:
            self.n_roots = _meet_models(self, self.n_roots)
        return number

    def begin_run(self, run: Run) -> None:
        """The graph may be one that another thread made."""
        if self._n_visitors:
            run.log = GraphLog(self, run.log)
            self.n_roots = _meet_models(self, self.n_roots)
        super().begin_run(run)

    def has_run(self) -> bool:
        """Also on another thread."""
        return bool(self.handed) or super().has_run()

    def rows_handed(self) -> list[ProductRow]:
        """What other threads handed over in the open step."""
        return [row for handed in self.handed.copy() for row in handed.rows]

    def with_handed(self, journal: Journal, *, cut: bool) -> Journal:
        """A step's journal with what other threads handed over; ``cut``: the step ends."""
        indices = self._indices if cut else {}
        for handed in self._take() if cut else self.handed.copy():
            for number, row in enumerate(handed.rows, handed.first):
                indices[handed.visitor, number] = len(journal.products)
                link = row[9]
                if link and link[0] >= 0:
                    link = (indices.get((handed.visitor, link[0]), -1), *link[1:])
                journal.products.append((*row[:9], link))
            journal.readers += [reader for reader in handed.readers if reader not in journal.readers]
            for name, n in handed.uncounted.items():
                journal.uncounted[name] = journal.uncounted.get(name, 0) + n
            journal.compiled += [module for _, module in sorted(handed.compiled)]
        if cut:
            indices.clear()
            self.n_cuts += 1
        return journal

    def _take(self) -> Any:
        while self.handed:
            yield self.handed.popleft()

    def end_visits(self) -> None:
        """Nothing that runs from now on is counted; what still runs is told."""
        self.closed = True
        for visitor in self._visitors:
            if visitor.busy:
                self.note_unseen(UNFINISHED)
            else:
                visitor.books.close()
        self._visitors = []
        for _ in self._take():
            self.note_unseen(UNFINISHED)


def _meet_models(recorder: Recorder, n_met: int) -> int:
    """Enter the parameters of models that other threads have met since there were so many; how many there are."""
    names = recorder.names
    if n_met != names.n_roots:
        n_met, models = names.roots()
        for model in models:
            recorder.parameters.add_model(model)
    return n_met


class GraphLog:
    """Which module and which parameter a node of a graph belongs to, where several threads make graphs.

    Each thread numbers its nodes from 0, so a number alone does not tell: the parameter behind the node does. A node
    without one is looked up by its number, unless the graph has shown to be another thread's.
    """

    signatures: ClassVar[dict[int, Any]] = {}
    signatures_before: ClassVar[dict[int, Any]] = {}
    """No products of custom functions are known: see `NodeOwners`."""

    def __init__(self, recorder: Recorder, log: NodeOwners) -> None:
        self._recorder = recorder
        self._log = log
        self._foreign = False

    def module_of(self, node_number: int) -> int:
        """The module that made a node."""
        parameter = self._parameter()
        if parameter >= 0:
            return self._recorder.names.parameter_modules[parameter]
        try:
            return OUTSIDE if self._foreign else self._log.module_of(node_number)
        except IndexError:  # its thread is writing
            return OUTSIDE

    def products_of(self, node_number: int) -> tuple[Used, ...]:
        """The products that a node's forward ran."""
        parameter = self._parameter()
        known = self._log.products_of(node_number)
        if parameter < 0:
            return () if self._foreign else known
        if any(parameter in numbers for numbers, _ in known):
            return known
        self._foreign = True
        return (((parameter,), -1),)

    def _parameter(self) -> int:
        """The parameter that the running node sends a gradient to, of several the largest; -1 if there is none."""
        node = internals.current_autograd_node()
        best, size = -1, (False, -1)
        for found in _accumulated(node):
            number = self._recorder.books.parameter_of(found)
            if number >= 0 and (found.dim() > 1, found.numel()) > size:
                best, size = number, (found.dim() > 1, found.numel())
        return best


def _accumulated(node: Any, depth: int = 3) -> list[Any]:
    found = []
    for following, _ in node.next_functions if node is not None else ():
        if isinstance(following, internals.AccumulateGrad):
            found.append(following.variable)  # type: ignore[attr-defined]
        elif following is not None and depth and type(following).__name__.removesuffix("Backward0") in _VIEWS:
            found += _accumulated(following, depth - 1)
    return found


def _leaves(nodes: list[Any]) -> Iterator[torch.Tensor]:
    """The tensors that a backward from these nodes stores gradients in."""
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, internals.AccumulateGrad):
            yield node.variable  # type: ignore[attr-defined]
        nodes += [following for following, _ in node.next_functions]


def remove_mode(mode: Any) -> None:
    """Take a mode off this thread's stack, wherever in it; torch's flags, which are all threads', stay as they are."""
    modes = [m for m in internals.current_dispatch_modes() if getattr(m, "_mode_key", None) is None]
    if mode in modes:
        above = modes[modes.index(mode) + 1 :]
        for _ in (mode, *above):
            internals.pop_dispatch_mode(None)
        for other in above:
            internals.push_dispatch_mode(other)
