"""When a step ends: a policy is told what trains, and says where in the open journal the step ended.

A training forward is one that runs with grad mode on. An optimizer's closure runs its forwards and backwards inside the
optimizer's step. Only outermost optimizer steps count: what an optimizer steps inside its own step is a part of it.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from torch.optim import Optimizer

from torchledger.record.parameters import ParameterBooks
from torchledger.record.storages import Books, Cut

_MOST_SEARCHES = 3
"""A program that updates its parameters by hand is not searched for optimizers in each of its steps."""


class Stepping(Protocol):
    """What a recorder tells a policy. A `Cut` that comes back is where the step ended."""

    waiting: bool
    """Whether the next training forward may end the step."""
    next_step: Cut | None
    """Where the first thing was allocated that belongs to the next step, such as its batch."""
    stop_after: int | None
    """How many steps the program may make."""

    def attach(self, books: Books, parameters: ParameterBooks) -> None:
        """Follow the recorder that has these books."""

    def training_forward_begins(self, inside: Optimizer | None) -> Cut | None:
        """A training forward begins, ``inside`` an optimizer's step or outside of all."""

    def inference_begins(self) -> None:
        """A forward with grad mode off begins."""

    def backward_ends(self) -> None:
        """A backward that fills gradients has run, outside of any optimizer's step."""

    def optimizer_begins(self, optimizer: Optimizer) -> Cut | None:
        """An outermost optimizer step begins."""

    def optimizer_ends(self, optimizer: Optimizer) -> None:
        """It has run."""

    def finish(self) -> Cut | None:
        """The program ends: where its last whole step ended, None if nothing in the open journal is a whole step."""


class ByHand:
    """Steps end where the program says so; nothing else ends one."""

    waiting = False
    next_step: Cut | None = None
    stop_after: int | None = None

    def attach(self, books: Books, parameters: ParameterBooks) -> None:
        """Nothing."""

    def training_forward_begins(self, inside: Optimizer | None) -> Cut | None:
        """Nothing."""
        return None

    def inference_begins(self) -> None:
        """Nothing."""

    def backward_ends(self) -> None:
        """Nothing."""

    def optimizer_begins(self, optimizer: Optimizer) -> Cut | None:
        """Nothing."""
        return None

    def optimizer_ends(self, optimizer: Optimizer) -> None:
        """Nothing."""

    def finish(self) -> Cut | None:
        """Nothing."""
        return None


class AfterOptimizer:
    """A step ends at the first training forward after the last optimizer step of a cycle.

    All optimizers of the program make one cycle (a GAN's two). Where some of them do not step, the cycle is known to
    have ended by one of its optimizers stepping again, and the step is cut in retrospect: where the first training
    forward after the cycle's last optimizer step began. Without any optimizer, a step ends at the first training
    forward after a backward; where optimizers exist but none steps, only if the parameters were updated in between, so
    that accumulated gradients end none. A forward with grad mode off ends no step.

    Args:
        stop_after: How many steps the program may make; None: as many as it does.
    """

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.waiting = False
        self.next_step: Cut | None = None
        self._cycle: set[int] = set()
        """The optimizers that stepped since the last step ended, by id."""
        self._candidate: Cut | None = None
        """Where the step ended, if one of the cycle's optimizers is the next to step."""
        self._after: Cut | None = None
        """Where the last step ends if the program does."""
        self._known: dict[int, weakref.ref[Optimizer]] = {}
        self._n_searches = 0
        self._versions: dict[int, tuple[int, bool]] = {}

    def attach(self, books: Books, parameters: ParameterBooks) -> None:
        """Follow the recorder that has these books."""
        self._books, self._parameters = books, parameters

    def training_forward_begins(self, inside: Optimizer | None) -> Cut | None:
        """End the step if its cycle is whole; else note where it ended if the next optimizer step shows it."""
        at = self.next_step or self._books.here()
        if not self._cycle:
            if self._any_optimizer() and not self._updated_by_hand():
                self.waiting = False
                return None
            return self._end(at)
        if (inside is not None and id(inside) in self._cycle) or self._is_whole():
            return self._end(at)
        self._candidate = self._books.turn(at)
        self.waiting = False
        return None

    def inference_begins(self) -> None:
        """What was made outside so far was for the evaluation, which belongs to the step."""
        if self.waiting:
            self.next_step = None
            if self._after is None:
                self._after = self._books.here()

    def backward_ends(self) -> None:
        """Wait for the next training forward, as long as no optimizer has stepped."""
        if not self._cycle:
            self.waiting, self.next_step, self._after = True, None, None
            self._versions = self._parameters.versions() if self._any_optimizer() else {}

    def optimizer_begins(self, optimizer: Optimizer) -> Cut | None:
        """End the step in retrospect, if this optimizer has stepped in it."""
        if self._candidate is not None and id(optimizer) in self._cycle:
            return self._end(self._candidate)
        if self.waiting and self.next_step is None:
            self.next_step = self._books.here()  # a closure's forward would end the step here
        return None

    def optimizer_ends(self, optimizer: Optimizer) -> None:
        """Wait for the next training forward."""
        self._drop_candidate()
        self._cycle.add(id(optimizer))
        self.waiting, self.next_step, self._after = True, None, self._books.here()

    def finish(self) -> Cut | None:
        """The end of the last optimizer step, or without optimizers of the last backward and the update after it."""
        self._drop_candidate()
        if not self._cycle and not (self.waiting and (not self._any_optimizer() or self._updated_by_hand())):
            return None
        return self._books.after_frees(self._after or self._books.here())

    def _end(self, at: Cut) -> Cut:
        self._cycle.clear()
        self._candidate = self.next_step = self._after = None
        self.waiting = False
        return at

    def _drop_candidate(self) -> None:
        if self._candidate is not None:
            self._books.turn_back(self._candidate)
            self._candidate = None

    def _is_whole(self) -> bool:
        if not self._cycle <= self._known.keys():
            self._known = self._parameters.search_optimizers()
        return self._alive() <= self._cycle

    def _any_optimizer(self) -> bool:
        """Whether the program has made an optimizer, though none has stepped."""
        if not self._alive() and self._n_searches < _MOST_SEARCHES:
            self._n_searches += 1
            self._known = self._parameters.search_optimizers()
        return bool(self._alive())

    def _updated_by_hand(self) -> bool:
        """Whether a parameter was written into, or its gradient dropped, since the backward."""
        now = self._parameters.versions()
        return any(now.get(number, before) != before for number, before in self._versions.items())

    def _alive(self) -> set[int]:
        return {key for key, reference in self._known.items() if reference() is not None}
