"""Three ways to count the FLOPs of one call: our formulas, torch's counter, and fvcore's trace."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchledger import internals
from torchledger.errors import UsageError
from torchledger.flops.borrowing import Borrowed, surroundings_put_back, tensors_in
from torchledger.flops.containers import CONTAINERS, run_container
from torchledger.flops.costs import as_cost
from torchledger.flops.declared import declared_entry
from torchledger.flops.registry import Rule, UnknownCostError, is_true_composite, lookup
from torchledger.flops.tensors import SPARSE

FORWARD, BACKWARD = "forward", "backward"
AUTOGRAD_FUNCTION = "prim::PythonOp"
"""The kind that a trace gives to a `torch.autograd.Function`."""


class Product(NamedTuple):
    """One op with a formula, run once. ``traits`` are what other counters are known to read wrongly of it.

    While the model is traced, ``inside`` is the kind of the op of the trace that it runs in (``aten::linear``), and
    ``run`` tells two of these apart.
    """

    op: str
    phase: str
    flops: int
    traits: tuple[str, ...]
    inside: str
    run: int


class OurCount(TorchDispatchMode):
    """What our formulas say of the ops that run while it is on: each product, in order.

    A product of integers is among them with 0 FLOP and its own trait; ``int_ops`` is the sum of these.
    """

    supports_higher_order_operators = True

    def __init__(self, graph: Any = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: list[Product] = []
        self.uncounted: Counter[str] = Counter()
        self.int_ops = 0
        self.branches = 0
        self.phase = FORWARD
        self._graph = graph
        self._node: Any = None
        self._inside = ""
        self._run = 0
        modes = internals.current_dispatch_modes()
        self._with_fake = any("FakeTensorMode" in type(mode).__name__ for mode in modes)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let a compiled function run as it does without the mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for kind in types:
            if kind.__name__ in ("FakeTensor", "FunctionalTensor"):
                if kind.__name__ == "FunctionalTensor" or not self._with_fake:
                    return func(*args, **kwargs)  # somebody works out shapes
            elif kind.__torch_dispatch__ is not internals.no_torch_dispatch:
                return NotImplemented
        if isinstance(func, HigherOrderOperator) and func.name() in CONTAINERS:
            self.branches += func.name() == "cond"
            with self:
                return run_container(func, args, kwargs)
        rule = lookup(func)
        if _is_taken_apart(func, rule, args):
            with self:
                return func.decompose(*args, **kwargs)
        result = self._run_traced(func, args, kwargs) if self._graph else func(*args, **kwargs)
        if rule.uncounted:
            self.uncounted[rule.name] += 1
        if rule.formula is not None:
            self._count(func, rule, result, args, kwargs)
        return result

    def _run_traced(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op and note the op of the trace that it is inside: the last one that the tracer wrote."""
        tracing = internals.get_tracing_state() is not None  # off while an op that it wrote runs
        before = self._graph.insertPoint().prev()
        with _tracer_let_in() if tracing else nullcontext():
            result = func(*args, **kwargs)
        node = self._graph.insertPoint().prev()
        if node is not self._node:
            self._node = node
            self._run += 1
        self._inside = "" if tracing and node is before else str(node.kind())
        return result

    def _count(self, func: Any, rule: Rule, result: Any, args: Any, kwargs: Any) -> None:
        assert rule.formula is not None
        try:
            counted = rule.formula(result, *args, **kwargs)
            cost = as_cost(counted) if isinstance(counted, tuple) else as_cost(int(counted))
        except UnknownCostError as unknown:
            self.uncounted[unknown.name or rule.name] += 1
            return
        except Exception:  # as a ledger does: a formula that fails counts nothing
            self.uncounted[rule.name] += 1
            return
        integer = cost.quality == "integer"
        self.int_ops += cost.flops if integer else 0
        traits = _traits_of(func, rule.name, args, integer)
        flops = 0 if integer else cost.flops
        inside = AUTOGRAD_FUNCTION if self._graph and _in_function_forward() else self._inside
        self.products.append(Product(cost.name or rule.name, self.phase, flops, traits, inside, self._run))


@contextmanager
def _tracer_let_in() -> Iterator[None]:
    """Let the tracer write what an op calls: a dispatch mode has it shut out, which it is not without one.

    That is how ``aten::_convolution`` gets into a trace, which ``aten::convolution`` does not.
    """
    shut_out = internals.is_key_excluded("Tracer")
    internals.set_key_excluded("Tracer", False)
    try:
        yield
    finally:
        internals.set_key_excluded("Tracer", shut_out)


class TorchCount(NamedTuple):
    """What ``torch.utils.flop_counter.FlopCounterMode`` says: FLOPs by phase and op; or why it says nothing."""

    by_phase: dict[str, Counter[str]]
    known: frozenset[str]
    failure: str


@dataclass
class FvcoreCount:
    """What fvcore's ``FlopCountAnalysis`` says, in FLOP: twice its own numbers, which are multiply-adds.

    ``ops`` are the ops that it counts, in order; ``failed`` the kinds of those whose formula raises, with the error.
    ``products`` are ours while the model is traced. ``failure`` says why there is nothing.
    """

    ops: list[tuple[str, int | None]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    products: list[Product] = field(default_factory=list)
    failure: str = ""


def count_with_ours(subject: Borrowed, backward: bool) -> OurCount:
    """Run the model once under our formulas."""
    ours = OurCount()
    with surroundings_put_back(subject.tensors), subject.running_on(subject.copies()) as call, ours:
        output = call()
        if backward:
            ours.phase = BACKWARD
            _run_backward(output)
    return ours


def count_with_torch(subject: Borrowed, backward: bool) -> TorchCount:
    """Run the model once under ``FlopCounterMode``."""
    from torch.utils.flop_counter import FlopCounterMode, flop_registry

    counter = FlopCounterMode(display=False)

    def counted() -> Counter[str]:
        found = counter.get_flop_counts().get("Global", {})
        return Counter({_packet_name(op): int(flops) for op, flops in found.items()})

    by_phase: dict[str, Counter[str]] = {}
    try:
        with surroundings_put_back(subject.tensors), subject.running_on(subject.copies()) as call, counter:
            output = call()
            by_phase[FORWARD] = counted()
            if backward:
                _run_backward(output)
                by_phase[BACKWARD] = counted() - by_phase[FORWARD]
    except Exception as error:
        return TorchCount({}, frozenset(), f"FlopCounterMode fails on this model: {_in_words(error)}")
    return TorchCount(by_phase, frozenset(map(_packet_name, flop_registry)), "")


def count_with_fvcore(subject: Borrowed) -> FvcoreCount:
    """Trace the model's forward for fvcore, and once more to see which ops of the trace our products run in."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing it warns, and tracing does
        try:
            from fvcore.nn import FlopCountAnalysis
        except Exception as error:
            if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "fvcore":
                return FvcoreCount(failure="fvcore is not installed: pip install 'torchledger[crosscheck]'")
            return FvcoreCount(failure=f"fvcore cannot be imported: {_in_words(error)}")
        count = FvcoreCount()
        try:
            _trace(FlopCountAnalysis, subject, None, count)
        except Exception as error:
            return FvcoreCount(failure=f"fvcore cannot trace this model: {_in_words(error)}")
        try:
            _trace(FlopCountAnalysis, subject, count.products, FvcoreCount())
        except Exception as error:
            return FvcoreCount(failure=f"fvcore's numbers cannot be posted to ops: {_in_words(error)}")
    return count


def _trace(analysis_type: Any, subject: Borrowed, products: list[Product] | None, count: FvcoreCount) -> None:
    copies = subject.copies()
    with surroundings_put_back(subject.tensors):
        analysis = analysis_type(_Traced(subject, products), tuple(copies))
        analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).tracer_warnings("none")
        for kind, handle in list(analysis._op_handles.items()):
            analysis.set_op_handle(kind, _noted(kind, handle, count))
        analysis.total()


class _Traced(nn.Module):
    """What fvcore traces: a module of its own, on which it can leave hooks, that takes all tensors as inputs."""

    def __init__(self, subject: Borrowed, products: list[Product] | None) -> None:
        super().__init__()
        self._hidden = (subject,)  # in a tuple, none of its modules is a child
        self._products = products

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        with self._hidden[0].running_on(tensors) as call:
            if self._products is None:
                output = call()
            else:
                ours = OurCount(internals.get_tracing_state().graph())
                with ours:
                    output = call()
                self._products += ours.products
        found = tuple(tensors_in(output))
        if not found:
            raise UsageError("its output holds no tensor")
        return found


def _noted(kind: str, handle: Callable[..., Any], count: FvcoreCount) -> Callable[..., Any]:
    """Fvcore's formula for one kind of op, with each of its numbers noted."""

    def noted(inputs: list[Any], outputs: list[Any]) -> Any:
        try:
            counted = handle(inputs, outputs)
        except Exception as error:
            count.failed[kind] = _in_words(error)
            count.ops.append((kind, None))
            return 0
        multiply_adds = sum(counted.values()) if isinstance(counted, Mapping) else counted
        count.ops.append((kind, 2 * int(multiply_adds)))
        return counted

    return noted


def _run_backward(output: Any) -> None:
    """From the loss, if the output has one that requires a gradient; else from all that do, with gradients of ones."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    roots = [t for t in tensors_in(output if loss is None else loss) if t.requires_grad]
    if not roots:
        raise UsageError("crosscheck(backward=True): nothing that the model returns requires a gradient.")
    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def _in_function_forward() -> bool:
    """Whether the forward of a `torch.autograd.Function` runs."""
    return not internals.is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()


def _is_taken_apart(func: Any, rule: Rule, args: Any) -> bool:
    """Whether a ledger sees the parts of this op rather than the op."""
    if not is_true_composite(func):
        return False
    if rule.formula is None:
        return True
    nested = any(isinstance(arg, Tensor) and arg.is_nested for arg in args)
    return rule.name in ("aten.linear", "aten.matmul") and not nested


_LAYOUT_READ_WRONGLY = ("aten._flash_attention_forward", "aten._efficient_attention_forward")


def _traits_of(func: Any, name: str, args: Any, integer: bool) -> tuple[str, ...]:
    """What of an op's arguments other counters do not look at."""
    tensors: Iterable[Tensor] = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    found = {
        "integer": integer,
        "declared": declared_entry(func) is not None,
        "complex": any(t.is_complex() for t in tensors),
        "sparse": any(t.layout in SPARSE for t in tensors),
        "grouped": name == "aten.convolution_backward" and len(args) > 10 and args[9] > 1 and args[10][1],
        "layout": name in _LAYOUT_READ_WRONGLY,
    }
    return tuple(trait for trait, there in found.items() if there)


def _packet_name(op: Any) -> str:
    """``aten.mm`` for a packet; a kernel's or a higher-order op's own name."""
    return str(getattr(op, "_qualified_op_name", None) or getattr(op, "__name__", op)).replace("::", ".")


def _in_words(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
