"""Regions of generated code: nothing in them is dispatched but calls of libraries, so they are told of from outside."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from torchledger import internals
from torchledger.journal.entries import NO_GRAPH
from torchledger.record.arrivals import COMPILED
from torchledger.record.audit import Audit
from torchledger.record.compiled import products_inside
from torchledger.record.locating import Locating
from torchledger.record.names import OUTSIDE
from torchledger.record.packages import products_in_shims
from torchledger.record.places import BACKWARD, FORWARD, OUTSIDE_PHASE, Place, in_function_forward
from torchledger.record.storages import plain_parts

_storage_of = torch.Tensor.untyped_storage
_current_node = internals.current_autograd_node


class Regions(Locating):
    """Notes the regions that run, the products in their kernels, and the storages that come out of them."""

    audit: Audit | None = None

    def __init__(self) -> None:
        super().__init__()
        self.compiled_regions: set[tuple[str, int]] = set()

    def compiled_graph_begins(self, graph: Any, arguments: Any, place: Place) -> None:
        """Code that Inductor generated runs: products in kernels of its own are named, since no dispatch shows them."""
        self.books.bury()
        self._meet_all((arguments, getattr(graph, "constants", None) or ()))
        self.in_compiled_code += 1
        self.compiled_code_ran = True
        module = self.module_at(place)
        self.compiled_regions.add((str(getattr(graph, "cache_key", None) or id(graph)), module))
        if self.audit is not None:
            self.audit.compiled_graph_runs(module)
        self.products_ran((*products_inside(graph), *products_in_shims(graph)), place)

    def products_ran(self, products: Iterable[str], place: Place) -> None:
        """Products ran in kernels that no dispatch shows: they are named."""
        module = self.module_at(place)
        for name in products:
            self.uncounted(name, module)

    def results_came(self, name: str, results: list[torch.Tensor], place: Place) -> None:
        """A package has run: its buffers are unknown like a compiled region's, and its results are made now."""
        self.note_unseen(f"package {name}")
        module = self.module_at(place)
        self.compiled_regions.add((name, module))
        phase = self.phase or (FORWARD if place.stack else OUTSIDE_PHASE)
        self.enter_results(results, phase, module, name)

    def module_at(self, place: Place) -> int:
        """The module that runs on a thread, or whose backward does."""
        if self.runs and self.runs[-1].is_backward and (node := _current_node()) is not None:
            return self.runs[-1].log.module_of(node._sequence_nr())
        return place.stack[-1] if place.stack else OUTSIDE

    def compiled_graph_ends(self, results: Any, place: Place) -> None:
        """It has run, or raised: what it leaves behind was made now."""
        self.in_compiled_code = max(self.in_compiled_code - 1, 0)
        books = self.books
        first_new = books.first + len(books.blocks)
        graph = True
        if self.runs and not self.in_optimizer:
            phase, module, _ = self.locate_in_backward(place)
        elif place.stack:
            graph = torch.is_grad_enabled() or in_function_forward()
            phase, module = FORWARD if graph else place.without_grad, place.stack[-1]
        else:
            phase, module, graph = self.locate_outside(place)
        self.enter_results(results, phase, module, COMPILED)
        if not graph:
            books.roles.update((n, NO_GRAPH) for n in range(first_new, books.first + len(books.blocks)))

    def _meet_all(self, values: Any) -> None:
        """What a region is given was there when it began; whatever else it touches it makes itself."""
        for value in values.values() if isinstance(values, dict) else values:
            if isinstance(value, torch.Tensor):
                for part in plain_parts(value):
                    if id(_storage_of(part)) not in self.books.live:
                        self.meet(part, BACKWARD if self.runs else FORWARD)
            elif isinstance(value, list | tuple | dict):
                self._meet_all(value)

    def uncounted(self, name: str, module: int) -> None:
        """Overridden by the recorder: an op of unknown cost."""
