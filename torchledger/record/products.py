"""Posting a product: its FLOPs, and the parameters that took part in it."""

from __future__ import annotations

import sys
from typing import Any, Protocol

import torch

from torchledger import internals
from torchledger.flops.rules import Cost, UnknownCostError
from torchledger.record.entries import Entry
from torchledger.record.places import BACKWARD, FORWARD, RECOMPUTE, Place, Run, compiled_region, in_function_forward
from torchledger.record.storages import Books

_storage_of = torch.Tensor.untyped_storage
_get_sequence_nr = internals.get_sequence_nr
_is_grad_enabled = torch.is_grad_enabled


class Poster(Protocol):
    """What posting a product needs of the recorder."""

    books: Books
    runs: list[Run]
    dynamo_is_about: bool
    compiled_regions: set[str]

    def uncounted(self, name: str, module: int) -> None:
        """An op of unknown cost."""

    def fault(self, what: str, error: BaseException) -> None:
        """The ledger itself failed."""


def post_product(
    recorder: Poster, entry: Entry, args: Any, kwargs: Any, out: Any, phase: str, module: int, place: Place, node: Any
) -> None:
    """Write the row of an op that has a formula; one whose formula fails is listed as uncounted."""
    books = recorder.books
    try:
        cost = entry.formula(out, *args, **kwargs) if kwargs else entry.formula(out, *args)  # type: ignore[misc]
    except UnknownCostError as unknown:
        recorder.uncounted(unknown.name, module)
        return
    except Exception as error:
        recorder.fault(f"the formula of {entry.name} failed", error)
        recorder.uncounted(entry.name, module)
        return
    if recorder.dynamo_is_about:
        region = compiled_region(sys._getframe(2))
        if region:
            recorder.compiled_regions.add(region)
    try:
        parts, dtype = _split(recorder, entry, args, cost, phase, place, node)
    except Exception as error:
        recorder.fault(f"the parameters of {entry.name} were not found", error)
        parts, dtype = (), "unknown"
    if type(cost) is int:
        books.products.append((entry.name, dtype, phase, module, cost, 0, 0, parts, "exact"))
    else:
        assert isinstance(cost, Cost)
        books.products.append(
            (
                cost.name or entry.name,
                dtype,
                phase,
                module,
                cost.flops,
                cost.rescore,
                cost.causal_excess,
                parts,
                cost.quality,
            )
        )


def _split(
    recorder: Poster, entry: Entry, args: Any, cost: int | Cost, phase: str, place: Place, node: Any
) -> tuple[tuple[tuple[int, str, int], ...], str]:
    """((parameter, kind, FLOPs), ...) and the dtype of the operands.

    In a forward an operand that holds a parameter's values is a forward product of the parameter. In a backward it is
    an input gradient, and a product without one is a weight gradient of the parameter that the node's forward used.
    """
    books = recorder.books
    live = books.live
    dtype = ""
    found: tuple[int, ...] = ()
    tracked = False
    for position in entry.operands:
        operand = args[position] if position < len(args) else None
        if isinstance(operand, torch.Tensor):
            dtype = dtype or books.dtype_names.get(operand.dtype) or books.dtype_name(operand.dtype)
            tracked = tracked or operand.requires_grad
            ref = live.get(id(_storage_of(operand))) if operand.layout is torch.strided else None
            if ref is not None and ref.parameter != -1:
                number = ref.parameter if ref.parameter >= 0 else books.parameter_of(operand)
                if number >= 0:
                    found = (*found, number)
    flops, given = (cost.flops, cost.parts) if isinstance(cost, Cost) else (cost, ())
    if phase is not BACKWARD:
        if given:
            parts = tuple((books.parameter_of(p.operand), "forward", p.flops) for p in given)
            found = tuple(n for n, _, _ in parts if n >= 0)
            parts = tuple(p for p in parts if p[0] >= 0)
            tracked = True
        else:
            parts = tuple((n, "forward", flops) for n in found[:1])
        # An op that makes no node must not write: the last number would be another node's.
        makes_node = (tracked and _is_grad_enabled()) or in_function_forward()
        if found and makes_node and (phase is FORWARD or phase is RECOMPUTE):
            _remember(place, found)
        return parts, dtype
    if node is None:
        return (), dtype
    known = recorder.runs[-1].log.parameters_of(node._sequence_nr())
    if given:
        numbers = [books.parameter_of(p.operand) for p in given]
        fallback = known[0] if len(known) == 1 else -1
        pairs = ((n if n >= 0 else fallback, p.kind, p.flops) for n, p in zip(numbers, given, strict=True))
        return tuple(pair for pair in pairs if pair[0] >= 0), dtype
    if found:
        # Under create_graph the product is itself part of a graph that a second backward walks.
        if recorder.runs[-1].create_graph:
            _remember(place, found)
        return ((found[0], "input_grad", flops),), dtype
    if recorder.runs[-1].create_graph and known:
        _remember(place, known)
    return tuple((n, "weight_grad", flops) for n in known[:1]), dtype


def _remember(place: Place, parameters: tuple[int, ...]) -> None:
    # Inside dispatch the counter is one past the op's own node.
    number = _get_sequence_nr() - 1
    products = place.log.products
    before = products.get(number)
    products[number] = parameters if before is None else (*before, *(p for p in parameters if p not in before))
