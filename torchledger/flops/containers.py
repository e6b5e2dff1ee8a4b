"""Higher-order ops that run other ops: how to run what they hold, op by op, so that a dispatch mode sees each.

A container's own CPU and CUDA kernels refuse to run under a mode, or hide from it what they call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch._ops import HigherOrderOperator

from torchledger.internals import backend_select_key, composite_explicit_key

_Runner = Callable[[HigherOrderOperator, tuple[Any, ...], Mapping[str, Any]], Any]


def _run_kernel(op: HigherOrderOperator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The op's kernel for all devices, which calls its bodies as they are."""
    return op.py_kernels[composite_explicit_key](*args, **kwargs)


def _run_selected(op: HigherOrderOperator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The kernel for the device of its tensors, which keeps or sets a random state and calls the op that it holds."""
    return op.py_kernels[backend_select_key](*args, **kwargs)


def _run_branch(op: HigherOrderOperator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``cond(predicate, if_true, if_false, operands)``: the branch that is taken."""
    predicate, if_true, if_false, operands = args
    return (if_true if predicate else if_false)(*operands)


def _run_first(op: HigherOrderOperator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``op(body, operands)``."""
    return args[0](*args[1])


def _run_subgraph(op: HigherOrderOperator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``invoke_subgraph(body, identifier, *operands)``."""
    return args[0](*args[2:])


def _run_scan(op: HigherOrderOperator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``scan(body, init, xs, additional_inputs)``."""
    from torch._higher_order_ops.scan import generic_scan

    body, init, xs, *rest = args
    additional = kwargs.get("additional_inputs", rest[0] if rest else ())
    return generic_scan(body, init, xs, additional_inputs=additional)


_RUNNERS: dict[str, _Runner] = {
    "cond": _run_branch,
    "strict_mode": _run_first,
    "invoke_subgraph": _run_subgraph,
    "scan": _run_scan,
    "while_loop": _run_kernel,
    "while_loop_stack_output": _run_kernel,
    "map_impl": _run_kernel,
    "hints_wrapper": _run_kernel,
    "out_dtype": _run_kernel,
    "run_and_save_rng_state": _run_selected,
    "run_with_rng_state": _run_selected,
}

CONTAINERS: frozenset[str] = frozenset(_RUNNERS)
"""Names of the higher-order ops that `run_container` can run. They cost what their parts cost."""


def run_container(op: HigherOrderOperator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a container's bodies with the dispatch modes that are on, and return what the container returns."""
    return _RUNNERS[op.name()](op, args, kwargs)
