"""What the ledger's numbers are held against; nothing here shares code with it."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

BOXED_BYTES = 8
"""A Python number that an op keeps as a tensor."""


def profiler_bytes(run: Callable[[], Any], *, between_ops: bool = False) -> tuple[int, int]:
    """(highest running sum, last running sum) of the CPU allocator's events during a call, from `torch.profiler`.

    ``between_ops`` leaves out what an op takes and gives back inside itself, which no dispatch shows.
    """
    events = _memory_events(run)
    return _highest_and_last(events, _inside_ops(events) if between_ops else set())


def profiler_peaks(run: Callable[[], Any]) -> tuple[int, int]:
    """The highest running sum without and with what ops take and give back inside themselves; boxed numbers in none."""
    events = _without_boxed(_memory_events(run))
    return _highest_and_last(events, _inside_ops(events))[0], _highest_and_last(events, set())[0]


def _without_boxed(events: list[Any]) -> list[Any]:
    boxed: set[int] = set()
    found = []
    for event in events:
        _, nbytes, pointer, ops = event
        if 0 < nbytes <= BOXED_BYTES and not ops:
            boxed.add(pointer)
        elif nbytes < 0 and pointer in boxed:
            boxed.remove(pointer)
        else:
            found.append(event)
    return found


def _highest_and_last(events: list[Any], without: set[int]) -> tuple[int, int]:
    held = highest = 0
    for index, (_, nbytes, _, _) in enumerate(events):
        if index not in without:
            held += nbytes
            highest = max(highest, held)
    return highest, held


def _memory_events(run: Callable[[], Any]) -> list[tuple[int, int, int, list[Any]]]:
    """(time, bytes, pointer, ops around it) of each event of the CPU allocator during a call."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events: list[tuple[int, int, int, list[Any]]] = []

    def walk(nodes: Iterable[Any], ops: list[Any]) -> None:
        for node in nodes:
            if node.tag.name == "Allocation":
                events.append((node.start_time_ns, node.extra_fields.alloc_size, node.extra_fields.ptr, ops))
            walk(node.children, [*ops, node] if node.name.startswith("aten::") and _is_leaf_op(node.name) else ops)

    walk(profiler.profiler.kineto_results.experimental_event_tree(), [])
    events.sort(key=lambda event: event[0])
    return events


def bytes_inside_ops(run: Callable[[], Any]) -> dict[str, int]:
    """Of each op that dispatch ends at, without a ledger: the most that one call held beyond what outlived it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    most: dict[str, int] = {}

    def walk(nodes: Iterable[Any]) -> None:
        for node in nodes:
            # An upsampling has a composite overload of the same name around it.
            if "upsample_" in node.name or (node.name.startswith("aten::") and _is_leaf_op(node.name)):
                events = sorted(_allocations([node]), key=lambda event: event[0])
                sums = [0, *itertools.accumulate(nbytes for _, nbytes, _ in events)]
                name = "aten." + node.name.removeprefix("aten::")
                most[name] = max(most.get(name, 0), max(sums) - sums[-1])
            else:
                walk(node.children)

    walk(profiler.profiler.kineto_results.experimental_event_tree())
    return {name: nbytes for name, nbytes in most.items() if nbytes}


def _allocations(nodes: Iterable[Any]) -> Iterable[tuple[int, int, int]]:
    for node in nodes:
        if node.tag.name == "Allocation":
            yield node.start_time_ns, node.extra_fields.alloc_size, node.extra_fields.ptr
        yield from _allocations(node.children)


def _inside_ops(events: list[tuple[int, int, int, list[Any]]]) -> set[int]:
    open_at: dict[int, int] = {}
    inside: set[int] = set()
    for index, (_, nbytes, pointer, ops) in enumerate(events):
        if nbytes > 0:
            open_at[pointer] = index
        elif (came := open_at.pop(pointer, None)) is not None and ops and events[came][3][:1] == ops[:1]:
            inside |= {came, index}
    return inside


@functools.cache
def _is_leaf_op(name: str) -> bool:
    """Whether dispatch ends at this op: it is not a mere composition of others."""
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    if packet is None:
        return False
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for overload in packet.overloads():
        full = name if overload == "default" else f"{name}.{overload}"
        try:
            if has(full, "CompositeImplicitAutograd") and not has(full, "CPU"):
                return False
        except RuntimeError:  # an overload of TorchScript alone
            continue
    return True


def live_bytes(roots: Iterable[Any] = ()) -> int:
    """Bytes of the storages of all tensors that Python can reach now, each storage once."""
    gc.collect()
    sizes: dict[int, int] = {}
    for thing in (*gc.get_objects(), *roots):
        # What outlived a simulation has no data, and refuses to be asked for it.
        if isinstance(thing, torch.Tensor) and not type(thing).__module__.startswith("torchledger."):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of some tensors, each storage once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all gradients by parameter name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
