"""Posting a product: its FLOPs, and the parameters that took part in it."""

from __future__ import annotations

import sys
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map

from torchledger import internals
from torchledger.flops.rules import Cost, UnknownCostError
from torchledger.flops.uses import count_uses
from torchledger.journal.entries import GRAPH, HIDDEN, INPUT_GRAD, WEIGHT_GRAD
from torchledger.record.entries import Entry
from torchledger.record.matching import match_product
from torchledger.record.parameters import ParameterBooks
from torchledger.record.places import (
    BACKWARD,
    FORWARD,
    INFERENCE,
    RECOMPUTE,
    Place,
    Run,
    SubclassOp,
    Undecided,
    Used,
    compiled_region,
    in_function_forward,
)
from torchledger.record.storages import NO_PARAMETER, Books

_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_storage_of = torch.Tensor.untyped_storage
_get_sequence_nr = internals.get_sequence_nr
_is_grad_enabled = torch.is_grad_enabled


class Poster(Protocol):
    """What posting a product needs of the recorder."""

    books: Books
    parameters: ParameterBooks
    runs: list[Run]
    dynamo_is_about: bool
    compiled_regions: set[tuple[str, int]]
    subclass_op: SubclassOp | None
    distributed_product: tuple[str, int] | None

    def segment(self) -> tuple[int, int]:
        """The checkpointed segment that runs, and a flag if it is its recompute."""

    def uncounted(self, name: str, module: int) -> None:
        """An op of unknown cost."""

    def fault(self, what: str, error: BaseException) -> None:
        """The ledger itself failed."""


def _without_data(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def whole_product(entry: Entry, args: Any, kwargs: Any) -> tuple[str, int] | None:
    """(op, FLOPs) of a product over whole distributed tensors, by way of tensors of their sizes without data."""
    assert entry.formula is not None
    try:
        args, kwargs = tree_map(_without_data, (args, kwargs))
        cost = entry.formula(entry.op(*args, **kwargs), *args, **kwargs)
    except Exception:  # an op that does not run without data has no whole number: this rank's stands for it
        return None
    return entry.name, cost.flops if isinstance(cost, Cost) else int(cost)


def post_product(
    recorder: Poster, entry: Entry, args: Any, kwargs: Any, out: Any, phase: str, module: int, place: Place, node: Any
) -> None:
    """Write the row of an op that has a formula; one whose formula fails is listed as uncounted."""
    books = recorder.books
    try:
        cost: Any = entry.formula(out, *args, **kwargs) if kwargs else entry.formula(out, *args)  # type: ignore[misc]
        if type(cost) is not int and not isinstance(cost, Cost):
            cost = int(cost)  # a symbolic size
    except UnknownCostError as unknown:
        recorder.uncounted(unknown.name or entry.name, module)
        return
    except Exception as error:
        recorder.fault(f"the formula of {entry.name} failed", error)
        recorder.uncounted(entry.name, module)
        return
    flags = _compiled(recorder, module) if recorder.dynamo_is_about else 0
    dtype = ""
    found: tuple[int, ...] = ()
    first = -1
    live = books.live
    for position in entry.operands:
        operand = args[position] if position < len(args) else None
        if type(operand) is not _Tensor and type(operand) is not _Parameter:
            continue
        if not dtype:
            dtype = books.dtype_name(operand.dtype)
        flag = INPUT_GRAD
        try:
            ref = live.get(id(_storage_of(operand)))
        except (RuntimeError, NotImplementedError):  # sparse
            ref = None
        if ref is not None and ref.parameter != NO_PARAMETER:
            number = ref.parameter if ref.parameter >= 0 else books.parameter_of(operand)
            if number >= 0:
                if not found:
                    first, flag = position, WEIGHT_GRAD
                found = (*found, number)
        if operand.requires_grad:
            flags |= flag
    dtype = dtype or _first_dtype(books, args)
    link: tuple[Any, ...] = ()
    parts: _Parts
    if phase is INFERENCE:
        parts = ()  # no evidence of what trains
    elif phase is not BACKWARD:
        parts, found = _forward_parts(books, cost, found)
        if phase is FORWARD or phase is RECOMPUTE or type(phase) is Undecided:
            flags = _remember_forward(recorder, place, cost, found, flags)
            segment, again = recorder.segment()
            flags |= again
            if not parts:
                link = (-1, flags, segment, 0, (), _sizes(entry, args, out))
            elif first >= 0 and len(parts) == 1:
                link = (-1, flags, segment, 0, (count_uses(entry.name, args, out, first, parts[0][2]),), ())
            else:
                link = (-1, flags, segment, 0, tuple([part[2] // 2 for part in parts]), ())
    elif node is None:
        parts = ()
    else:
        parts, origin = _backward_parts(recorder, cost, found, place, node, (entry, args, out))
        link = (origin, 0, -1, recorder.runs[-1].number, (), ())
    if recorder.distributed_product is not None:
        name, whole = recorder.distributed_product
        if name == entry.name:
            books.global_excess += max(whole - (cost if type(cost) is int else cost.flops), 0)
        recorder.distributed_product = None
    if type(cost) is int:
        books.products.append((entry.name, dtype, phase, module, cost, 0, 0, parts, "exact", link))
    else:
        name, flops, rescore, excess = cost.name or entry.name, cost.flops, cost.rescore, cost.causal_excess
        books.products.append((name, dtype, phase, module, flops, rescore, excess, parts, cost.quality, link))


def _compiled(recorder: Poster, module: int) -> int:
    """`HIDDEN` if compiled code called the product, 0 if not; notes the region."""
    region = compiled_region(sys._getframe(3))
    if region and "torchinductor" not in region:  # Inductor's tell of themselves
        recorder.compiled_regions.add((region, module))
    return HIDDEN if region else 0


def _remember_forward(recorder: Poster, place: Place, cost: int | Cost, found: tuple[int, ...], flags: int) -> int:
    """Note a forward's product for its node's backward, if it makes a node; gives back all its flags."""
    in_function = in_function_forward()
    if _is_grad_enabled():
        flags |= GRAPH
    around = recorder.subclass_op
    in_subclass = around is not None and around.tracked and around.number == _get_sequence_nr()
    if in_function or in_subclass:
        flags |= HIDDEN
    if isinstance(cost, Cost) and cost.parts:
        flags |= INPUT_GRAD | WEIGHT_GRAD  # a fused layer's backward gives all gradients
    # An op that makes no node must not write: the last number would be another node's.
    if (
        (flags & GRAPH and (flags & (INPUT_GRAD | WEIGHT_GRAD) or (found and type(cost) is not int)))
        or in_function
        or in_subclass
    ):
        _remember(place, (found, recorder.books.n_products_before + len(recorder.books.products)))
    return flags


_Parts = tuple[tuple[int, str, int], ...]
"""(parameter, kind, FLOPs)."""


def _forward_parts(books: Books, cost: int | Cost, found: tuple[int, ...]) -> tuple[_Parts, tuple[int, ...]]:
    """In a forward, an operand that holds a parameter's values is a product of the parameter; also the parameters."""
    if isinstance(cost, Cost):
        if cost.parts:
            numbers = [books.parameter_of(part.operand) for part in cost.parts]
            parts = tuple((n, p.kind, p.flops) for n, p in zip(numbers, cost.parts, strict=True) if n >= 0)
            return parts, tuple(dict.fromkeys(n for n in numbers if n >= 0))
        return tuple((n, "forward", cost.flops) for n in found[:1]), found
    return ((found[0], "forward", cost),) if found else (), found


def _backward_parts(
    recorder: Poster, cost: int | Cost, found: tuple[int, ...], place: Place, node: Any, call: tuple[Entry, Any, Any]
) -> tuple[_Parts, int]:
    """In a backward, a product with the parameter is an input gradient; also the index of the forward's product.

    One without it is the weight gradient of the parameter that the node's forward used.
    """
    run, books = recorder.runs[-1], recorder.books
    products = run.log.products_of(node._sequence_nr())
    if len(products) > 1:
        known, row = match_product(run.matched, products, found, _sizes(*call), books, recorder.parameters)
    else:
        known, row = products[0] if products else ((), -1)
    origin = max(row - books.n_products_before, -1)
    if run.create_graph and (found or products):
        # A second backward walks through this product.
        _remember(place, (found or known, books.n_products_before + len(books.products)))
    flops, given = (cost.flops, cost.parts) if isinstance(cost, Cost) else (cost, ())
    if given:
        numbers = [books.parameter_of(part.operand) for part in given]
        fallback = known[0] if len(known) == 1 else NO_PARAMETER
        pairs = ((n if n >= 0 else fallback, p.kind, p.flops) for n, p in zip(numbers, given, strict=True))
        return tuple(pair for pair in pairs if pair[0] >= 0), origin
    if found:
        if known and found[0] != known[0] and found[0] in known:
            # A product of two parameters is the first one's, and the second one its input.
            return ((known[0], "weight_grad", flops),), origin
        return ((found[0], "input_grad", flops),), origin
    return (((known[0], "weight_grad", flops),) if known else ()), origin


def _sizes(entry: Entry, args: Any, out: Any) -> tuple[int, ...]:
    """Elements of the result and of the operands of a product without parameters."""
    return tuple(
        [
            value.numel() if isinstance(value, torch.Tensor) else 0
            for value in (out, *[args[position] for position in entry.operands[:2] if position < len(args)])
        ]
    )


def _first_dtype(books: Books, args: Any) -> str:
    """The element type of the first tensor among the arguments."""
    for arg in args:
        for item in arg if isinstance(arg, list | tuple) else (arg,):
            if isinstance(item, torch.Tensor):
                return books.dtype_name(item.dtype)
    return "unknown"


def _remember(place: Place, used: Used) -> None:
    # Inside dispatch the counter is one past the op's own node.
    number = _get_sequence_nr() - 1
    products = place.log.products
    before = products.get(number)
    products[number] = (used,) if before is None else (*before, used)
