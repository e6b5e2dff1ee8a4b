"""Storages of simulated tensors, and what they hold of the simulated device's memory.

A simulated tensor is a meta tensor that carries the dispatch keys of a backend that nobody has. Where it lies is a
property of its storage: on the device, with a block of its allocator, or on the host, without any data.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from torchledger import internals

HOST = -1
"""The place of host tensors without data."""
storage_of = torch.Tensor.untyped_storage
_graph_task, _current_node = internals.current_graph_task_id, internals.current_autograd_node


def _node_number() -> int:
    if _graph_task() == -1 or (node := _current_node()) is None:
        return -1
    return int(node._sequence_nr())


class Block(weakref.ref[torch.UntypedStorage]):
    """The storage of simulated tensors: where it lies, and the address and stream of its memory."""

    __slots__ = ("address", "key", "nbytes", "node", "place", "stream")
    key: int
    place: int
    address: int
    nbytes: int
    stream: int
    node: int
    """The number of the autograd node whose backward made it, else -1."""


class Blocks:
    """All storages of simulated tensors that are alive, by id.

    Args:
        malloc: Gives the address of so many bytes on a stream.
        free: Takes an address back.
    """

    def __init__(self, malloc: Callable[[int, int], int], free: Callable[[int], object]) -> None:
        self.live: dict[int, Block] = {}
        self.malloc = malloc
        self.free = free
        self.pending: tuple[Block, Block] | None = None
        """A sum that is being made, and what it would be added into: in place, if that one goes at once."""
        self.on_death: Callable[[int], object] | None = None
        """Called with the id of each storage that goes."""

    def enter(self, tensor: torch.Tensor, place: int, stream: int = 0) -> Block:
        """Give a new tensor's storage a place, and memory if that is on the device.

        Raises:
            DeviceOutOfMemoryError: the device has no room for it.
        """
        storage = storage_of(tensor)
        if self.pending is not None:
            self.settle()
        block = Block(storage, self._died)
        block.key, block.place, block.stream = id(storage), place, stream
        block.nbytes = nbytes = storage.nbytes()
        block.node = _node_number()
        block.address = self.malloc(nbytes, stream) if place >= 0 else 0
        self.live[block.key] = block
        return block

    def enter_sum(self, tensor: torch.Tensor, old: Block) -> Block:
        """The same for a sum that autograd makes in place if nothing else holds the first operand.

        Which of both it is shows at once: its storage goes before anything else is asked of the device.
        """
        if self.pending is not None:
            self.settle()
        storage = storage_of(tensor)
        block = Block(storage, self._died)
        block.key, block.place, block.stream = id(storage), old.place, old.stream
        block.nbytes, block.address, block.node = storage.nbytes(), 0, _node_number()
        self.live[block.key] = block
        self.pending = (block, old)
        return block

    def settle(self) -> None:
        """Nothing freed what the last sum was added to: it needs memory of its own."""
        if self.pending is None:
            return
        new, _ = self.pending
        self.pending = None
        if new.key in self.live:
            new.address = self.malloc(new.nbytes, new.stream)

    def resize(self, storage: torch.UntypedStorage) -> None:
        """A storage has another size: its old memory is freed after the new one came."""
        block = self.live.get(id(storage))
        nbytes = storage.nbytes()
        if block is None or block.nbytes == nbytes:
            return
        self.settle()
        if block.place >= 0:
            old, block.address = block.address, self.malloc(nbytes, block.stream)
            self.free(old)
        block.nbytes = nbytes

    def _died(self, block: Block) -> None:
        if self.live.pop(block.key, None) is None:
            return
        if self.pending is not None and self.pending[1] is block:
            self.pending[0].address, self.pending = block.address, None
        elif block.address:
            if self.pending is not None and self.pending[0] is block:
                self.pending = None
            self.free(block.address)
        if self.on_death is not None:
            self.on_death(block.key)
