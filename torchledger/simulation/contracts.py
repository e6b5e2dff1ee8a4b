"""What the parts of a simulation expect of its device and of its dispatch mode, which know all of them."""

from __future__ import annotations

from collections import Counter
from typing import Any, NoReturn, Protocol

import torch

from torchledger.accelerators import Accelerator
from torchledger.allocator.caching import CachingAllocator
from torchledger.simulation.blocks import Block, Blocks
from torchledger.simulation.facts import DriverFacts, Versions
from torchledger.simulation.keys import Backend
from torchledger.simulation.operators import Operator
from torchledger.simulation.results import Results


class Device(Protocol):
    """The simulated device."""

    accelerator: Accelerator
    facts: DriverFacts
    allocator: CachingAllocator
    capacity_bytes: int
    total_bytes: int
    data_dependent: str
    versions: Versions
    backend: Backend
    blocks: Blocks
    results: Results
    values: Any
    shares: Any
    words: Any
    autocast: Any
    watches: list[Any]
    stream: int
    hidden_bytes: int
    cublas_bytes: int

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability."""

    @property
    def name(self) -> str:
        """What the driver calls it."""

    @property
    def assumptions(self) -> Counter[str]:
        """How often values were read that are not known, by kind."""

    def note(self, text: str) -> None:
        """Note, once, what was done otherwise than the program asked."""

    def index_of(self, device: torch.device) -> int:
        """The index that a ``cuda`` device means."""

    def has_tensors(self) -> bool:
        """Whether anything lies on the device."""

    def place_of_odd(self, tensor: torch.Tensor) -> int | None:
        """The place of a tensor without a storage of its own."""

    def copy_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor without data but for the values that are known."""

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that counts as pinned."""

    def note_pinned(self, tensor: torch.Tensor) -> None:
        """Let a host tensor count as pinned."""

    def note_assumed(self, tensor: torch.Tensor) -> None:
        """Note that a host tensor holds values that nobody computed."""

    def is_assumed(self, tensor: torch.Tensor) -> bool:
        """Whether it does."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether it is such a copy."""

    def malloc(self, nbytes: int, stream: int = 0) -> int:
        """The address of so many bytes."""

    def free(self, address: int) -> None:
        """Take an address back."""

    def take_hidden(self, nbytes: int) -> int:
        """Memory that an op takes inside itself."""

    def give_hidden(self, address: int, nbytes: int) -> None:
        """Give it back."""

    def take_workspace(self, handle: int) -> None:
        """Give a cuBLAS handle its workspace."""

    def clear_workspaces(self) -> None:
        """Give all workspaces back."""

    def watch(self) -> Any:
        """Keep the highest counts from now on."""

    def refuse_layout(self, tensor: torch.Tensor, what: str) -> NoReturn:
        """Refuse what is not simulated for a layout."""

    def describe(self) -> dict[str, Any]:
        """What a report's environment says of the simulation."""

    def describe_properties(self) -> dict[str, Any]:
        """The device as a report's environment names those that are there."""


class Mode(Protocol):
    """The dispatch mode of one thread."""

    device: Any
    blocks: Blocks
    results: Results
    values: Any
    composites: dict[Any, Any]
    in_linear: bool

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The block of a simulated tensor, None for a real one."""

    def locate(self, operator: Operator, args: Any, kwargs: dict[str, Any]) -> int | None:
        """The place of an op's simulated arguments."""

    def target(self, device: torch.device | None, place: int | None) -> int | torch.device | None:
        """Where results are to lie."""

    def keyed(self, out: Any) -> Any:
        """Views made by a meta kernel, with the keys."""

    def enter(self, out: Any, place: int) -> None:
        """Give results a place and memory."""

    def run_functional(self, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
        """An op that makes new tensors."""
