"""What runs: the program's modules, backwards and optimizers, as the patches tell of them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_iter

from torchledger import internals
from torchledger.journal.entries import IN_GRAPH, Batch
from torchledger.record import elsewhere, patches
from torchledger.record.names import OUTSIDE, Names
from torchledger.record.parameters import ParameterBooks
from torchledger.record.places import (
    BACKWARD,
    FORWARD,
    INFERENCE,
    OPTIMIZER,
    OUTSIDE_PHASE,
    Place,
    Run,
    Undecided,
    is_running,
)
from torchledger.record.stepping import ByHand, Stepping
from torchledger.record.storages import Books, Cut, shape_of

_MOST_SEARCHES = 3
"""Steps in which all objects are searched for optimizers, to tell an evaluation from a frozen module's forward."""
_get_ident = threading.get_ident


class Watching:
    """Who runs now, on each thread of one ledger."""

    place: Place
    """The thread that the ledger was started on."""

    def __init__(self) -> None:
        super().__init__()
        self.names = Names()
        self.books = Books()
        self.parameters = ParameterBooks(self.names, self.books)
        self.places: dict[int, Place] = {}
        self.runs: list[Run] = []
        self.in_optimizer = False
        self.phase = ""
        self._n_searches = 0
        self._without_grad: dict[int, str] = {}
        """The phase of modules that ran with grad mode off in the open step, by number."""
        self.undecided: dict[Undecided, weakref.ref[nn.Module]] = {}
        self.node_number = -1
        self.dynamo_is_about = False
        """Whether there may be compiled code: no number depends on it, only where it is looked for."""
        self.record_fake = False
        self.has_subclasses = False
        """Whether the program has tensors whose class is told of calls, by `__torch_function__`."""
        self.stepping: Stepping = ByHand()
        self.end_step: Callable[[Cut], None] = lambda _: None
        """What ends a step at a moment that the policy names: the ledger's."""
        self.faults: list[str] = []
        self.unseen: dict[str, int] = {}
        """What ran that is not all in these books: how often, by kind."""
        self.unseen_lock = threading.RLock()
        self._steps_of: dict[int, int] = {}
        self.first_seed = -1
        """The first block that was made for a backward to begin with, -1 where none was."""
        self.n_backwards = 0
        """Backwards that ran outside of any optimizer's step."""
        self.n_runs = 0
        """Backwards and optimizer steps of the open step so far."""
        self.optimizer_steps = 0
        """How often the busiest optimizer has stepped."""

    def begin_watching(self) -> None:
        """Watch this thread from now on."""
        self.place = self.new_place(_get_ident())
        self.dynamo_is_about = patches.attach_to_dynamo()
        elsewhere.add_host(self)

    def end_watching(self) -> None:
        """Watch no thread, module or optimizer; nothing of ours is left in torch."""
        elsewhere.remove_host(self)
        self.end_visits()
        for thread, place in self.places.items():
            patches.unwatch(place, thread)
        self.places.clear()
        self.runs.clear()
        self.names.forget_all()
        self.parameters.forget_all()
        self.books.close()

    def note_unseen(self, kind: str) -> None:
        """Something of that kind ran that is not all in these books."""
        with self.unseen_lock:
            self.unseen[kind] = self.unseen.get(kind, 0) + 1

    def knows(self, module: Any) -> bool:
        """Likewise: whether a module's call there is counted."""
        return False

    def begin_visit(self, kind: str, subject: Any) -> elsewhere.Visitor | None:
        """Overridden by a recorder that counts what other threads run."""
        return None

    def end_visits(self) -> None:
        """Likewise."""

    def new_place(self, thread: int) -> Place:
        """Watch a thread: the one that began, or one of the engine's."""
        place = self.places[thread] = Place(self, thread)
        patches.watch(place, thread)
        return place

    def module_begins(self, module: nn.Module, place: Place) -> int:
        """A module that runs at the top, or that has no number yet."""
        number = self.names.module_numbers.get(id(module))
        if place.stack:
            if number is None and is_compiled_graph(module):
                return place.stack[-1]
            return number if number is not None else self.names.add_passing(module, place.stack[-1])
        self.dynamo_is_about = patches.attach_to_dynamo()
        self.drop_dead_runs()
        if number is None and is_compiled_graph(module):
            return OUTSIDE
        if number is None:
            self.add_model(module, given=False)
            number = self.names.module_numbers[id(module)]
        self.forward_begins()
        return number

    def note_batch(self, module: nn.Module, number: int, args: Any, kwargs: Any) -> None:
        """What a model is called with says how many tokens, or samples, a step has."""
        if self.runs or next(module.parameters(), None) is None:
            return
        integers: tuple[int, ...] = ()
        first: tuple[int, ...] | None = None
        for value in tree_iter((args, kwargs)):
            if isinstance(value, torch.Tensor):
                self.has_subclasses = self.has_subclasses or internals.has_torch_function(value)
                shape = (value.numel(),) if value.is_nested else shape_of(value)
                first = shape if first is None else first
                if not (value.is_floating_point() or value.is_complex() or value.dtype is torch.bool):
                    integers = shape
                    break
        if first is not None:
            self.books.batches.append(Batch(number, torch.is_grad_enabled(), integers, first))

    def forward_begins(self) -> None:
        """A model's forward begins, or without a model what makes a graph: a step may have ended before it."""
        if not self.stepping.waiting:
            return
        if not torch.is_grad_enabled():
            if not self.runs:
                self.stepping.inference_begins()
            return
        if any(run.is_backward for run in self.runs):
            return
        optimizer = self.runs[0].optimizer() if self.runs else None
        if (at := self.stepping.training_forward_begins(optimizer)) is not None:
            self.end_step(at)
        else:
            self.phase = ""  # a page was turned: the next op says in which phase

    def phase_without_grad(self, module: nn.Module, number: int) -> str:
        """The phase of a module that runs with grad mode off: `inference` if an optimizer trains a part of it."""
        found = self._without_grad.get(number)
        if found is None:
            found = self._without_grad[number] = self._decide_without_grad(module, number)
        return found

    def _decide_without_grad(self, module: nn.Module, number: int) -> str:
        if self.parameters.trains(module):
            return INFERENCE
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return FORWARD
        undecided = Undecided(f"undecided {number}")
        undecided.module, self.undecided[undecided] = number, weakref.ref(module)
        return undecided

    def decide_phases(self) -> dict[str, str]:
        """What the undecided phases of the open step turned out to be."""
        if self.undecided and self._n_searches < _MOST_SEARCHES:
            self._n_searches += 1
            self.parameters.search_optimizers()
        found = {}
        for phase, reference in self.undecided.items():
            module = reference()
            trained = module is not None and self.parameters.trains(module)
            found[str(phase)] = INFERENCE if trained else FORWARD
        return found

    def forget_phases(self) -> None:
        """A step begins: its first op says in which phase, and who is trained is looked up anew."""
        self.phase = ""
        self._without_grad.clear()
        if not self.books.blocks:  # else a step was cut in retrospect, and the open one has phases to decide
            running = [place.without_grad for place in self.places.values()]
            self.undecided = {phase: module for phase, module in self.undecided.items() if phase in running}

    def add_model(self, model: nn.Module, *, given: bool) -> None:
        """Name a model's modules and enter its parameters, buffers and gradients."""
        self.names.add_root(model, given=given)
        self.parameters.add_model(model)
        self.record_fake |= self.parameters.has_fake_tensors
        self.has_subclasses |= self.parameters.has_subclasses

    def begin_run(self, run: Run) -> None:
        """A backward or an optimizer's step begins."""
        self.drop_dead_runs()
        self.runs.append(run)
        self.n_runs += 1
        run.number = self.n_runs
        self.in_optimizer = not run.is_backward
        self.node_number = -1
        self.books.bury()
        position = len(self.books.events)
        if run.is_backward:
            self.books.marks.append((position, "backward", ""))
        phase = BACKWARD if run.is_backward else OPTIMIZER
        if run.is_backward and run.create_graph:
            if (place := self.places.get(_get_ident())) is not None:
                place.seen_number = internals.get_sequence_nr()
            if self.first_seed >= 0:  # the graph begins with what the backward is given
                for number in range(self.first_seed, self.books.first + len(self.books.blocks)):
                    self.books.roles[number] = self.books.roles.get(number, 0) | IN_GRAPH
        self.first_seed = -1
        if phase is not self.phase:
            self.phase = phase
            self.books.marks.append((position, "phase", phase))

    def count_runs(self) -> int:
        """How many backwards and optimizer steps run."""
        self.drop_dead_runs()
        return len(self.runs)

    def end_runs(self, n_running: int) -> None:
        """So many of them still run."""
        ended = self.runs[n_running:]
        del self.runs[n_running:]
        if ended and ended[0].is_backward and not self.runs and not ended[0].create_graph:
            self.n_backwards += 1
            self.stepping.backward_ends()
        self.in_optimizer = bool(self.runs) and not self.runs[-1].is_backward
        self.node_number = -1
        self.phase = ""
        place = self.places.get(_get_ident())
        if place is not None and not place.stack:
            place.seen_number = internals.get_sequence_nr()

    def end_optimizer_run(self) -> None:
        """An optimizer's step ends, if it is what runs innermost."""
        n_running = self.count_runs()
        self.end_runs(n_running - (n_running > 0 and not self.runs[-1].is_backward))

    def drop_dead_runs(self) -> None:
        """Forget optimizer steps that raised: nothing told us of their end."""
        while self.runs and not self.runs[-1].is_backward and not is_running(self.runs[-1].frame):
            self.runs.pop()
        self.in_optimizer = bool(self.runs) and not self.runs[-1].is_backward

    def optimizer_arrives(self, optimizer: Optimizer) -> None:
        """An optimizer's step is about to begin: if no other's runs, a step may have ended before it."""
        self.drop_dead_runs()
        if all(run.is_backward for run in self.runs) and (at := self.stepping.optimizer_begins(optimizer)):
            self.end_step(at)

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        """Enter what its parameters hold now."""
        self.parameters.before_step(optimizer)
        self.has_subclasses |= self.parameters.has_subclasses

    def optimizer_ends(self, optimizer: Optimizer) -> None:
        """Enter its state."""
        self.parameters.after_step(optimizer)
        if sum(not run.is_backward for run in self.runs) <= 1:
            self.stepping.optimizer_ends(optimizer)
        self._steps_of[id(optimizer)] = self._steps_of.get(id(optimizer), 0) + 1
        self.optimizer_steps = max(self._steps_of.values())

    def storage_resized(self, storage: torch.UntypedStorage, place: Place) -> None:
        """`UntypedStorage.resize_` was called, which no op shows."""
        stack = place.stack
        self.books.resized(storage, self.phase or OUTSIDE_PHASE, stack[-1] if stack else OUTSIDE)

    def meet_roots(self, roots: Any) -> None:
        """Overridden by the recorder: a backward begins at these tensors."""

    def compiled_graph_begins(self, graph: Any, arguments: Any, place: Place) -> None:
        """Overridden by the recorder: generated code is about to run."""

    def products_ran(self, products: Iterable[str], place: Place) -> None:
        """Overridden by the recorder: products ran where no dispatch shows them."""

    def results_came(self, name: str, results: list[torch.Tensor], place: Place) -> None:
        """Overridden by the recorder: code that no dispatch shows gave these tensors."""

    def compiled_graph_ends(self, results: Any, place: Place) -> None:
        """Overridden by the recorder: it has run, or raised."""

    def fault(self, what: str, error: BaseException) -> None:
        """The ledger itself failed: the program goes on, and the report says so."""
        text = f"{what}: {type(error).__name__}: {error}"
        if len(self.faults) < 20 and text not in self.faults:
            self.faults.append(text)


def is_compiled_graph(module: nn.Module) -> bool:
    """Whether a module is what a compiler made of a function, rather than a model of the program's own."""
    return isinstance(module, torch.fx.GraphModule) and next(module.parameters(), None) is None
