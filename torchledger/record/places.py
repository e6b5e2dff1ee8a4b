"""Where an op runs: the modules on a thread's stack, the backwards and optimizers that run, and their phases."""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from torchledger import internals
from torchledger.errors import UncountedOpError
from torchledger.record.names import OUTSIDE, Names

FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER = "forward", "backward", "recompute", "optimizer"
OUTSIDE_PHASE, INFERENCE = "outside", "inference"


class Undecided(str):
    """The phase of a forward with grad mode off of a module that no known optimizer trains.

    It is ``inference`` if one is found by the end of the step, else ``forward``.
    """

    __slots__ = ("module",)
    module: int


_get_sequence_nr = internals.get_sequence_nr
_without_torch_function = internals.without_torch_function
_is_grad_enabled = torch.is_grad_enabled


Used: TypeAlias = tuple[tuple[int, ...], int]
"""A product's parameters, and its number among all products of the recorder."""
Signature: TypeAlias = tuple[Any, ...]
"""See `record.reruns`."""


class NodeOwners(Protocol):
    """Which module and which products the nodes of a graph belong to, by the numbers that their thread gave them."""

    def module_of(self, node_number: int) -> int:
        """The module that made a node."""

    def products_of(self, node_number: int) -> tuple[Used, ...]:
        """The products that a node's forward ran."""

    @property
    def signatures(self) -> dict[int, Signature]:
        """Of products in custom functions, by product: what a second run of the same would look like."""

    @property
    def signatures_before(self) -> dict[int, Signature]:
        """The same of the step before."""


class NodeLog:
    """Which module made which autograd nodes of one thread.

    Nodes are numbered in the order of their making, so it is enough to note the next number whenever the running module
    changes: the node's module is that of the last note at or below its number.
    """

    __slots__ = ("modules", "numbers", "previous", "products", "products_before", "signatures", "signatures_before")

    def __init__(self) -> None:
        self.numbers: list[int] = [0]
        self.modules: list[int] = [OUTSIDE]
        self.products: dict[int, tuple[Used, ...]] = {}
        """The products of a node, by node number."""
        self.products_before: dict[int, tuple[Used, ...]] = {}
        self.signatures: dict[int, Signature] = {}
        """Of products in custom functions, by product: what a second run of the same would look like."""
        self.signatures_before: dict[int, Signature] = {}
        self.previous = 0

    def note(self, number: int, module: int) -> None:
        """Nodes from that number on belong to the module."""
        if self.numbers[-1] == number:
            self.modules[-1] = module
        else:
            self.numbers.append(number)
            self.modules.append(module)

    def module_of(self, node_number: int) -> int:
        """The module that made a node."""
        return self.modules[bisect_right(self.numbers, node_number) - 1]

    def has_nodes(self) -> bool:
        """Whether any module or product has run on the thread."""
        return len(self.numbers) > 2 or bool(self.products) or bool(self.products_before)

    def products_of(self, node_number: int) -> tuple[Used, ...]:
        """The products that a node's forward ran."""
        return self.products.get(node_number) or self.products_before.get(node_number, ())

    def cut(self) -> None:
        """Forget what is older than the step before the one that ends: a graph may outlive its step by one."""
        del self.numbers[1 : self.previous], self.modules[1 : self.previous]
        self.previous = len(self.numbers) - 1
        self.products_before, self.products = self.products, {}
        self.signatures_before, self.signatures = self.signatures, {}


class SubclassOp(NamedTuple):
    """The last op on a tensor subclass, which runs ops of its own inside while the next node's ``number`` stays.

    ``tracked`` says whether a graph is recorded around it, ``phase`` is its phase where no module runs.
    """

    number: int
    tracked: bool
    phase: str


def _nothing() -> None:
    return None


class Run:
    """A backward or an optimizer step that is running."""

    __slots__ = (
        "create_graph", "depth", "frame", "is_backward", "log", "matched", "number", "optimizer", "reruns", "thread",
    )  # fmt: skip

    def __init__(
        self, is_backward: bool, create_graph: bool, place: Place, optimizer: Optimizer | None = None, frame: Any = None
    ) -> None:
        self.is_backward = is_backward
        self.create_graph = create_graph
        self.optimizer: Callable[[], Optimizer | None] = _nothing if optimizer is None else weakref.ref(optimizer)
        self.thread = place.thread
        self.depth = len(place.stack)
        self.log: NodeOwners = place.log
        # Not the frame itself, which would keep its arguments alive.
        self.frame = id(frame) if frame is not None else 0
        self.number = 0
        self.matched: dict[tuple[int, bool], int] = {}
        self.reruns: dict[Any, int] = {}
        """What `record.reruns` has seen in this backward."""


class Listener(Protocol):
    """What a place tells its ledger's recorder."""

    names: Names

    def module_begins(self, module: nn.Module, place: Place) -> int:
        """A module that runs at the top, or that has no number yet."""

    def note_batch(self, module: nn.Module, number: int, args: Any, kwargs: Any) -> None:
        """What a module that runs at the top is given."""

    def phase_without_grad(self, module: nn.Module, number: int) -> str:
        """The phase of a module that runs with grad mode off."""

    def begin_run(self, run: Run) -> None:
        """A backward or an optimizer's step begins."""

    def count_runs(self) -> int:
        """How many of them run."""

    def end_runs(self, n_running: int) -> None:
        """So many of them still run."""

    def end_optimizer_run(self) -> None:
        """An optimizer's step ends, if it is what runs innermost."""

    def meet_roots(self, roots: Any) -> None:
        """The tensors that a backward begins at."""

    def optimizer_arrives(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step, before its run has begun."""

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""

    def optimizer_ends(self, optimizer: Optimizer) -> None:
        """It has stepped."""

    def storage_resized(self, storage: torch.UntypedStorage, place: Place) -> None:
        """A storage has a new size."""

    def compiled_graph_begins(self, graph: Any, arguments: Any, place: Place) -> None:
        """Generated code is about to run."""

    def products_ran(self, products: Iterable[str], place: Place) -> None:
        """Products of unknown cost ran where no dispatch shows them."""

    def results_came(self, name: str, results: list[torch.Tensor], place: Place) -> None:
        """They gave these tensors."""

    def compiled_graph_ends(self, results: Any, place: Place) -> None:
        """It has run, or raised."""

    def fault(self, what: str, error: BaseException) -> None:
        """The ledger itself failed: the program goes on, and the report says so."""


class Place:
    """One thread, as one ledger sees it."""

    __slots__ = (
        "first_number",
        "log",
        "numbers",
        "recorder",
        "scripts",
        "seen_number",
        "stack",
        "thread",
        "without_grad",
        "without_grad_depth",
    )

    def __init__(self, recorder: Listener, thread: int) -> None:
        self.recorder = recorder
        self.thread = thread
        self.stack: list[int] = []
        self.scripts = 0
        """How many calls of scripted code run."""
        self.without_grad = FORWARD
        """The phase of what modules do while grad mode is off."""
        self.without_grad_depth = 0
        """How deep the stack was, with the outermost module that runs so; 0 if none does."""
        self.log = NodeLog()
        self.first_number = _get_sequence_nr()
        """Nodes with a lower number were made before."""
        self.log.note(self.first_number, OUTSIDE)
        self.numbers = recorder.names.module_numbers
        self.seen_number = _get_sequence_nr()

    def enter_module(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module is about to run."""
        stack = self.stack
        number = self.numbers.get(id(module))
        if number is None or not stack:
            number = self._begin_module(module, args, kwargs)
        stack.append(number)
        if not _is_grad_enabled() and not self.without_grad_depth:
            self.begin_without_grad(module, number)
        self.log.note(_get_sequence_nr(), number)

    def _begin_module(self, module: nn.Module, args: Any, kwargs: Any) -> int:
        """The number of a module that runs at the top, or that has none yet."""
        recorder = self.recorder
        try:
            with (
                internals.without_torch_function(),
                internals.no_tracing(),
            ):  # which would write the sizes that we read into the program's graph
                number = recorder.module_begins(module, self)
                if not self.stack:
                    recorder.note_batch(module, number, args, kwargs)
                return number
        except Exception as error:
            recorder.fault(f"{type(module).__name__} could not be entered", error)
            return self.numbers.get(id(module), OUTSIDE)

    def begin_without_grad(self, module: nn.Module, number: int) -> None:
        """A module runs with grad mode off: an evaluation, a frozen part, or a custom function's forward."""
        self.without_grad_depth = len(self.stack)
        try:
            with _without_torch_function():
                self.without_grad = self.recorder.phase_without_grad(module, number)
        except Exception as error:
            self.recorder.fault(f"the phase of {type(module).__name__} could not be told", error)

    def leave_modules(self, depth: int) -> None:
        """The innermost have run, or raised: so many still do. May be told twice."""
        stack = self.stack
        if depth < self.without_grad_depth:
            self.without_grad_depth, self.without_grad = 0, FORWARD
        del stack[depth:]
        number = _get_sequence_nr()
        self.log.note(number, stack[-1] if stack else OUTSIDE)
        if not stack:
            self.seen_number = number

    def count_runs(self) -> int:
        """How many backwards and optimizer steps run."""
        return self.recorder.count_runs()

    def begin_backward(self, roots: Any, create_graph: bool) -> None:
        """A backward is about to run."""
        self.recorder.begin_run(Run(True, create_graph, self))
        try:
            self.recorder.meet_roots(roots)
        except Exception as error:
            self.recorder.fault("what a backward begins at could not be entered", error)

    def end_backward(self, n_running: int) -> None:
        """It has run, or raised: so many runs still do. May be told twice."""
        self.recorder.end_runs(n_running)
        self.log.note(_get_sequence_nr(), self.stack[-1] if self.stack else OUTSIDE)

    def begin_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer's step is about to run."""
        try:
            with _without_torch_function():
                self.recorder.optimizer_arrives(optimizer)
        except Exception as error:
            self.recorder.fault(f"{type(optimizer).__name__} could not be placed", error)
        # The frame of the wrapper around `step` tells whether it still runs: no post-hook is called if it raises.
        self.recorder.begin_run(Run(False, False, self, optimizer, sys._getframe(2)))
        try:
            with _without_torch_function():
                self.recorder.optimizer_begins(optimizer)
        except Exception as error:
            self.recorder.fault(f"{type(optimizer).__name__} could not be entered", error)

    def end_optimizer(self, optimizer: Optimizer) -> None:
        """It has run."""
        try:
            with _without_torch_function():
                self.recorder.optimizer_ends(optimizer)
        except Exception as error:
            self.recorder.fault(f"the state of {type(optimizer).__name__} could not be entered", error)
        self.recorder.end_optimizer_run()

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has a new size."""
        try:
            with _without_torch_function():
                self.recorder.storage_resized(storage, self)
        except Exception as error:
            self.recorder.fault("a new size could not be noted", error)

    def begin_script(self) -> None:
        """Scripted code is about to run."""
        self.scripts += 1

    def end_script(self) -> None:
        """It has run, or raised."""
        self.scripts -= 1

    def script_ran(self, products: tuple[str, ...]) -> None:
        """It has run these products in fused kernels of its own."""
        self.recorder.products_ran(products, self)

    def package_runs(self, name: str) -> None:
        """A package of AOTInductor is about to run: what is in it is not known."""
        self.recorder.products_ran((name,), self)

    def package_ran(self, name: str, results: list[torch.Tensor]) -> None:
        """It has run, and gives these."""
        try:
            self.recorder.results_came(name, results, self)
        except Exception as error:
            self.recorder.fault("the results of a package could not be entered", error)

    def compiled_graph_begins(self, graph: Any, arguments: Any) -> None:
        """Code that Inductor generated is about to run."""
        try:
            self.recorder.compiled_graph_begins(graph, arguments, self)
        except UncountedOpError:
            raise
        except Exception as error:
            self.recorder.fault("compiled code could not be looked at", error)

    def compiled_graph_ends(self, results: Any) -> None:
        """It has run, or raised (then there are no results)."""
        try:
            self.recorder.compiled_graph_ends(results, self)
        except Exception as error:
            self.recorder.fault("what compiled code made could not be entered", error)


def in_function_forward() -> bool:
    """Whether a custom autograd function's forward runs (its ops see grad mode off, but it makes a node)."""
    return not internals.is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()


def in_checkpoint_hook() -> bool:
    """Whether a non-reentrant checkpoint recomputes now: its hook is the innermost one."""
    hooks = internals.top_saved_tensors_hooks(False)
    return bool(hooks) and getattr(hooks[0], "__qualname__", "").startswith("_recomputation_hook")


def is_compilers_node(node: Any) -> bool:
    """Whether a node's backward is compiled code or a higher-order op's, which run with grad mode on."""
    function = getattr(type(node), "_forward_cls", None)
    return function is not None and function.__module__.startswith(("torch._higher_order_ops", "torch._functorch"))


def compiled_region(frame: FrameType | None) -> str:
    """The file of the compiled code that called an op, some frames up; empty if none did."""
    for _ in range(8):
        if frame is None:
            return ""
        file = frame.f_code.co_filename
        if "torchinductor" in file or (file.startswith("<eval_with_key>") and _is_compilers(frame)):
            return file
        frame = frame.f_back
    return ""


def _is_compilers(frame: FrameType) -> bool:
    """Whether a compiler runs a graph, and not the program, which traced it itself."""
    above = frame.f_back
    for _ in range(12):
        if above is None:
            return False
        if above.f_globals.get("__name__", "").startswith(("torch._dynamo.", "torch._functorch.")):
            return True
        above = above.f_back
    return False


def in_generated_code(frame: FrameType | None) -> bool:
    """Whether code that Inductor generated called an op, some frames up."""
    return "torchinductor" in compiled_region(frame)


def is_running(frame: int) -> bool:
    """Whether the frame of that id is still on this thread's stack."""
    current: FrameType | None = sys._getframe(1)
    while current is not None:
        if id(current) == frame:
            return True
        current = current.f_back
    return False
