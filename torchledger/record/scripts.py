"""TorchScript: when scripted code runs, and which products its fused kernels hold, that no dispatch shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchledger import internals
from torchledger.flops.registry import lookup

Replace = Callable[[Any, str, Any], None]
"""Puts something in a place of torch's while any ledger records: the owner, the name, and what comes there."""
Watched = Callable[[], Any]
"""The watchers of this thread."""

_KERNELS = ("Fusion", "TensorExpr", "StaticSubgraph")
"""Parts of the names of nodes that run their subgraph in kernels of their own."""
_fused: dict[Any, tuple[str, ...]] = {}
"""The products of a graph's kernels. The graph itself is held: torch gives the same object as long as it lives."""


def watch_scripts(replace: Replace, watched: Watched) -> None:
    """Tell watchers when scripted code runs on their thread, and let graphs be printed there."""
    for kind in internals.script_callables:
        replace(kind, "__call__", _watched_call(kind.__call__, watched))
    for kind, name in internals.script_texts:
        replace(kind, name, _without_modes(getattr(kind, name), watched))


def _watched_call(original: Any, watched: Watched) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        watchers = watched()
        if not watchers:
            return original(self, *args, **kwargs)
        for watcher in watchers:
            watcher.begin_script()
        try:
            result = original(self, *args, **kwargs)
        finally:
            for watcher in watchers:
                watcher.end_script()
        if names := fused_products():
            for watcher in watchers:
                watcher.script_ran(names)
        return result

    return call


def _without_modes(original: Any, watched: Watched) -> Any:
    """Any dispatch mode is handed a graph's constants as plain numbers, which cannot be printed as tensors."""

    def text(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not watched():
            return original(self, *args, **kwargs)
        with internals.no_dispatch_modes():
            found = original(self, *args, **kwargs)
            # A copy is a tensor to a mode too.
            return found.clone() if isinstance(found, torch.Tensor) and not found.dim() else found

    return text


def fused_products() -> tuple[str, ...]:
    """Names of the products in the fused kernels of the graph that this thread ran last: ``jit.linear``."""
    graph = internals.last_script_graph()
    if graph is None:
        return ()
    found = _fused.get(graph)
    if found is None:
        if len(_fused) > 200:
            _fused.clear()
        found = _fused[graph] = tuple(_products(graph, inside=False))
    return found


def _products(block: Any, *, inside: bool) -> Iterator[str]:
    for node in block.nodes():
        kind = node.kind()
        name = kind.rpartition("::")[2]
        if name == "mkldnn_convolution" if kind.startswith("prim::") else inside and is_product(name):
            yield f"jit.{name}"
        for inner in node.blocks():
            yield from _products(inner, inside=inside)
        if node.hasAttribute("Subgraph"):
            yield from _products(node.g("Subgraph"), inside=inside or any(word in kind for word in _KERNELS))


def is_product(name: str) -> bool:
    """Whether an op of that name, of torch's or of one of its libraries, is a product."""
    for space in (torch.ops.aten, torch.ops.mkldnn):
        packet = getattr(space, name, None)
        overloads = packet.overloads() if packet is not None else ()
        rules = [lookup(getattr(packet, overload)) for overload in overloads]
        if any(rule.formula is not None or rule.uncounted for rule in rules):
            return True
    return False


def constants_of(module: Any) -> Iterator[torch.Tensor]:
    """The tensors that `torch.jit.freeze` made constants of a scripted module's graph."""
    try:
        graph = module.inlined_graph
    except (AttributeError, RuntimeError):  # it has no forward
        return
    for node in graph.findAllNodes("prim::Constant"):
        value = node.output().toIValue()
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.dim():
            yield value
