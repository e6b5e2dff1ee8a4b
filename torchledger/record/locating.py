"""Where an op runs: its phase, its module, and the node whose backward it is part of."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from torchledger import internals
from torchledger.journal.entries import AGAIN, FORMULA, NO_SEGMENT
from torchledger.read.formulas import NODES as FORMULA_NODES
from torchledger.record.arrivals import Arrivals
from torchledger.record.entries import Entry
from torchledger.record.names import OUTSIDE
from torchledger.record.places import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    OUTSIDE_PHASE,
    RECOMPUTE,
    Place,
    SubclassOp,
    in_checkpoint_hook,
    in_function_forward,
    is_compilers_node,
)
from torchledger.record.products import whole_product

_ACCUMULATE_NUMBER = 2**64 - 1
_Tensor = torch.Tensor
_current_node = internals.current_autograd_node
_make_grads_code = getattr(internals.make_grads, "__code__", None)
_CheckpointNode = internals.CheckpointFunctionNode
_is_fwd_grad_enabled = internals.is_fwd_grad_enabled
_is_grad_enabled = torch.is_grad_enabled


class Locating(Arrivals):
    """Finds the phase and the module of an op."""

    def __init__(self) -> None:
        super().__init__()
        self.node_module = OUTSIDE
        self.node_first_block = 0
        self.in_formula = False
        self.checkpoints_seen = False
        self.subclass_op: SubclassOp | None = None
        self.distributed_product: tuple[str, int] | None = None

    def locate_in_optimizer(self, place: Place, args: Any) -> tuple[str, int]:
        """(phase, module) of an op in an optimizer's step: its closure's forward is a forward."""
        stack = place.stack
        if len(stack) > self.runs[-1].depth:
            return (FORWARD if _is_grad_enabled() else place.without_grad), stack[-1]
        if _is_grad_enabled() and any(isinstance(arg, _Tensor) and arg.requires_grad for arg in args):
            if self.stepping.waiting:
                self.forward_begins()
            return FORWARD, OUTSIDE
        return OPTIMIZER, OUTSIDE

    def locate_in_backward(self, place: Place) -> tuple[str, int, Any]:
        """(phase, module, current node) of an op while a backward runs."""
        run = self.runs[-1]
        stack = place.stack
        depth = run.depth if place.thread == run.thread else 0
        node = _current_node()
        if node is None:
            return BACKWARD, stack[-1] if stack else OUTSIDE, None
        number = node._sequence_nr()
        if number != self.node_number:
            self.node_number = number
            self.node_first_block = self.books.first + len(self.books.blocks)
            self.node_module = (
                self.accumulating_module(node) if number == _ACCUMULATE_NUMBER else run.log.module_of(number)
            )
            if self.in_formula or type(node).__name__ in FORMULA_NODES:
                self.note_formula(type(node).__name__)
        elif number == _ACCUMULATE_NUMBER:
            self.node_module = self.accumulating_module(node)
        if len(stack) > depth and not is_compilers_node(node):
            self.checkpoints_seen = True
            return RECOMPUTE, stack[-1], node
        if run.create_graph:
            if (self.checkpoints_seen and in_checkpoint_hook()) or type(node) is _CheckpointNode:
                return RECOMPUTE, self.node_module, node
            place.log.note(place.seen_number, self.node_module)
            place.seen_number = internals.get_sequence_nr()
        elif (
            (_is_grad_enabled() and not is_compilers_node(node))
            or type(node) is _CheckpointNode
            or (not _is_fwd_grad_enabled() and in_function_forward())
            or (self.checkpoints_seen and in_checkpoint_hook())
        ):
            self.checkpoints_seen = True
            return RECOMPUTE, self.node_module, node
        return BACKWARD, self.node_module, node

    def note_formula(self, name: str) -> None:
        """A node's formula begins after, or is, one that a dispatch mode sends another way."""
        known = name in FORMULA_NODES and not _is_grad_enabled()
        if known or self.in_formula:
            self.books.marks.append((len(self.books.events), FORMULA, name if known else ""))
        self.in_formula = known

    def locate_outside(self, place: Place) -> tuple[str, int, bool]:
        """(phase, module, whether a graph is recorded) of an op that no module and no backward runs."""
        if internals.current_graph_task_id() != -1:
            return BACKWARD, OUTSIDE, True
        number = internals.get_sequence_nr()
        grew, place.seen_number = number != place.seen_number, number
        if sys._getframe(2).f_code is _make_grads_code:
            return BACKWARD, OUTSIDE, True
        if not _is_grad_enabled():
            return (FORWARD, OUTSIDE, True) if in_function_forward() else (OUTSIDE_PHASE, OUTSIDE, False)
        around = self.subclass_op
        grew = grew or (around is not None and around.number == number and around.phase is FORWARD)
        if grew and self.stepping.waiting:
            self.forward_begins()
        return (FORWARD if grew else OUTSIDE_PHASE), OUTSIDE, True

    def accumulating_module(self, node: Any) -> int:
        """The module of the parameter whose gradient is being stored."""
        number = self.books.parameter_of(node.variable)
        return self.names.parameter_modules[number] if number >= 0 else OUTSIDE

    def segment(self) -> tuple[int, int]:
        """The segment of a non-reentrant checkpoint that runs here, -1 for none; and `AGAIN` if it is its recompute."""
        hooks = internals.top_saved_tensors_hooks(False)
        if not hooks:
            return -1, 0
        name = getattr(hooks[0], "__qualname__", "")
        again = name.startswith("_recomputation_hook")
        if not again and not name.startswith("_checkpoint_hook"):
            return -1, 0
        done = internals.recomputations_of(hooks[0], recomputing=again)
        if done is None:
            return -1, 0
        index = self.books.segment_numbers.get(id(done), -1)
        if index < 0 and not again and not internals.is_selective_checkpoint(hooks[0]):
            index = self._open_segment(done, internals.enclosing_segments(sys._getframe(2)))
        return index, AGAIN if again else 0

    def _open_segment(self, done: dict[int, bool], around: Iterator[tuple[Any, bool]]) -> int:
        """Number a segment, and those around it that have no number yet."""
        books = self.books
        index = books.segment_numbers[id(done)] = len(books.segments)
        books.segments.append(done)
        books.enclosing.append(NO_SEGMENT)
        for segment, again in around:
            note = getattr(segment, "is_recomputed", None)
            if note is done or note is None:
                continue
            number = books.segment_numbers.get(id(note), -1)
            if number < 0 and not again and not internals.is_selective_segment(segment):
                number = self._open_segment(note, around)
            if number >= 0:
                books.enclosing[index] = NO_SEGMENT - 1 - number if again else number
            break
        return index

    def note_subclass_op(self, entry: Entry, args: Any, kwargs: dict[str, Any]) -> None:
        """An op on a subclass, which runs ops of its own inside: those are what is posted, but they make no nodes."""
        if entry.formula is not None and any(type(arg).__name__ == "DTensor" for arg in args):
            self.distributed_product = whole_product(entry, args, kwargs)
        if self.runs:
            return
        place = self.place
        number = internals.get_sequence_nr()
        grew, place.seen_number = number != place.seen_number, number
        tracked = _is_grad_enabled() and any(isinstance(arg, _Tensor) and arg.requires_grad for arg in args)
        before = self.subclass_op
        if before is None or before.number != number or not before.tracked:
            self.subclass_op = SubclassOp(number, tracked, FORWARD if grew and tracked else OUTSIDE_PHASE)
