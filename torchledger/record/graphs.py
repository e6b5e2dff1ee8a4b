"""What autograd graphs hold that were made before the ledger began."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch

from torchledger import internals

_CheckpointNode = internals.CheckpointFunctionNode
_AccumulateGrad = internals.AccumulateGrad
_DEPTH = 3
_names: dict[type, tuple[str, ...]] = {}

References: TypeAlias = tuple[int, int]
"""How many references a tensor has, and what it is a view of (0: it is none)."""


def saved_below(root: Any, limit: int, seen: set[int]) -> Iterator[tuple[torch.Tensor, bool]]:
    """The tensors that a node and all below it keep for their backward, each with whether the graph made it.

    Nothing is unpacked: no hook runs, no graph counts as used, and what was released is left out. A tensor that needs
    no gradient and that nothing else refers to is the graph's own (a mask, say); what the program refers to as well is
    what it gave the forward.

    Args:
        root: The node.
        limit: The first number of a node that was made since the ledger began; from there on all is known.
        seen: The numbers of nodes that were looked at before; those looked at now are added.
    """
    pending = [root]
    kept = {root}  # a node's Python object is one only as long as something refers to it
    while pending:
        node = pending.pop()
        number = node._sequence_nr()
        if type(node) is not _AccumulateGrad and (number >= limit or number in seen):
            continue
        seen.add(number)
        for tensor, references in _saved_by(node):
            is_own = is_grown(tensor) or not (_needs_gradient(tensor) or _is_referred_to(references))
            yield tensor, is_own
            del tensor
        for below, _ in node.next_functions:
            if below is not None and below not in kept:
                kept.add(below)
                pending.append(below)


def is_grown(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a result of a graph, and no mere view of a leaf."""
    if tensor.is_leaf:
        return False
    base = tensor._base if tensor._is_view() else None
    return base is None or not base.is_leaf


def is_younger(tensor: torch.Tensor, limit: int) -> bool:
    """Whether the node that made a tensor, or what it is a view of, has that number or a later one."""
    base = tensor._base if tensor._is_view() else None
    node = (tensor if base is None else base).grad_fn
    return node is not None and type(node) is not _AccumulateGrad and node._sequence_nr() >= limit


def _saved_by(node: Any) -> list[tuple[torch.Tensor, References]]:
    found: list[tuple[torch.Tensor, References]] = []
    for name in _raw_names(type(node)):
        try:
            raw = getattr(node, name)
        except RuntimeError:  # released
            continue
        for saved in raw if isinstance(raw, list | tuple) else (raw,):
            _collect(getattr(saved, "data", None), found)
    if type(node) is not _CheckpointNode:  # whose other attributes are states of random generators
        _collect(getattr(node, "__dict__", None), found)
    return found


def _raw_names(kind: type) -> tuple[str, ...]:
    found = _names.get(kind)
    if found is None:
        found = tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
        if kind.__module__ == "builtins":  # those of custom functions may go
            _names[kind] = found
    return found


def _collect(value: Any, found: list[tuple[torch.Tensor, References]], depth: int = 0) -> None:
    """The tensors among what a hook packed, or what a custom function keeps: no objects are looked into."""
    if isinstance(value, torch.Tensor):
        of_base = sys.getrefcount(value._base) if value._is_view() else 0
        found.append((value, (sys.getrefcount(value) - depth, of_base)))
    elif depth < _DEPTH and isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            _collect(item, found, depth + 1)


def _needs_gradient(tensor: torch.Tensor) -> bool:
    base = tensor._base if tensor._is_view() else None
    return tensor.requires_grad or (base is not None and base.requires_grad)


def _is_referred_to(references: References) -> bool:
    """Whether the program holds a tensor that a graph saved, or what it is a view of."""
    alone, viewed = references_of_graphs()
    return references[0] > alone or references[1] > viewed


@functools.cache
def references_of_graphs() -> References:
    """How many references a saved tensor has that only a graph holds, and what a saved view is a view of.

    Finding out makes nodes: to be called first where no numbers of nodes are noted yet.
    """
    with internals.no_dispatch_modes(), internals.without_torch_function(), torch.enable_grad():
        leaf = torch.ones(2, device="cpu", requires_grad=True)
        nodes: list[Any] = [
            (leaf * torch.ones(2, device="cpu")).grad_fn,
            (leaf * torch.ones(2, 1, device="cpu").view(2)).grad_fn,
        ]
        alone, viewed = (max((found[i] for _, found in _saved_by(node)), default=0) for i, node in enumerate(nodes))
    return alone, viewed
