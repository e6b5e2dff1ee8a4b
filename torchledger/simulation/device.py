"""`simulate`: inside it, "cuda" is an accelerator that is not there."""

from __future__ import annotations

import importlib
import os
import weakref
from collections import Counter
from types import TracebackType
from typing import Any, NoReturn

import torch

from torchledger import internals
from torchledger.accelerators import Accelerator
from torchledger.allocator.caching import CachingAllocator
from torchledger.errors import DeviceOutOfMemoryError, SimulationError, UsageError
from torchledger.leaving import leave_mode
from torchledger.patching import Patches
from torchledger.simulation import active, cuda, ending, kernels, refusals, saving, sparse, threads, words
from torchledger.simulation.blocks import HOST, Blocks
from torchledger.simulation.dependent import Shares
from torchledger.simulation.facts import CONTEXT_BYTES, Versions, assumed_versions, simulated_accelerator
from torchledger.simulation.keys import Backend
from torchledger.simulation.memory import Watch, out_of_memory_message
from torchledger.simulation.mode import SimulationMode
from torchledger.simulation.results import Results
from torchledger.simulation.specials import dense_strides
from torchledger.simulation.values import Values
from torchledger.units import format_bytes

NOT_MODELLED = (
    "workspaces of cuDNN",
    "buffers inside fused attention, but for the accumulators of flash attention's backward",
    "scratch of reductions, sorts, scans and embeddings' backward",
    "kernels of other libraries (Triton, NCCL)",
)


class SimulatedDevice:
    """The accelerator that `simulate` puts in the place of "cuda".

    ``allocator`` is its caching allocator; ``accelerator`` the row of the table; ``capacity_bytes`` what the allocator
    may take; ``versions`` the libraries that are assumed; ``assumptions`` counts values that the program read and that
    no simulation knows; ``not_modelled`` names what it leaves out; ``notes`` what was done otherwise than asked.
    """

    not_modelled = NOT_MODELLED

    def __init__(
        self,
        accelerator: str,
        allocator_conf: str,
        capacity_bytes: int | str | None,
        data_dependent: str,
        trace: bool = False,
    ) -> None:
        if data_dependent not in ("worst", "balanced"):
            raise UsageError(f"simulate(data_dependent={data_dependent!r}): give 'worst' or 'balanced'.")
        self.accelerator: Accelerator
        self.accelerator, self.facts = simulated_accelerator(accelerator)
        capacity = self.facts.memory_bytes - CONTEXT_BYTES if capacity_bytes is None else capacity_bytes
        conf = allocator_conf or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""
        self.allocator = CachingAllocator(conf, capacity_bytes=capacity, trace=trace)
        assert self.allocator.capacity_bytes is not None
        self.capacity_bytes: int = self.allocator.capacity_bytes
        self.total_bytes = self.facts.memory_bytes if capacity_bytes is None else self.capacity_bytes
        """What the driver says the device has: the CUDA context takes its part."""
        self.data_dependent = data_dependent
        self.versions: Versions = assumed_versions()
        self.backend = Backend()
        self.blocks = Blocks(self.malloc, self.allocator.free)
        self.values = Values(self.blocks)
        self.shares = Shares()
        self.blocks.on_death = self._storage_died
        self.results = Results(self.backend)
        self.stream = 0
        self.words: Any = None
        self.autocast: Any = None
        self.notes: list[str] = []
        if not self.facts.is_reported and capacity_bytes is None:
            self.note(f"what the driver of {accelerator} reports is not on record: its capacity is the data sheet's")
        self.cublas_bytes = 0
        """Workspaces of cuBLAS that are held now."""
        self.hidden_bytes = 0
        """Workspaces and copies inside ops that are held now."""
        self.watches: list[Watch] = []
        self._pinned: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._assumed: list[weakref.ref[torch.UntypedStorage]] = []
        self._workspaces: dict[tuple[int, int], int] = {}
        self.workspace_bytes = cuda.cublas_workspace_bytes(self.capability)

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability."""
        assert self.accelerator.compute_capability is not None
        return self.accelerator.compute_capability

    @property
    def name(self) -> str:
        """What the driver calls it."""
        names = self.accelerator.device_names
        return names[0] if names else self.accelerator.title

    @property
    def assumptions(self) -> Counter[str]:
        """How often values were read that are not known, by kind."""
        return self.values.assumptions

    def note(self, text: str) -> None:
        """Note, once, what was done otherwise than the program asked."""
        if text not in self.notes:
            self.notes.append(text)

    def has_tensors(self) -> bool:
        """Whether anything lies on the device."""
        return any(block.place >= 0 for block in self.blocks.live.values())

    def index_of(self, device: torch.device) -> int:
        """The index that a ``cuda`` device means.

        Raises:
            RuntimeError: there is no such device, in torch's words.
        """
        index = device.index or 0
        if index:
            raise RuntimeError("CUDA error: invalid device ordinal (one device is simulated: cuda:0)")
        return index

    def place_of_odd(self, tensor: torch.Tensor) -> int | None:
        """The place of a tensor without a storage of its own (a sparse one); None for a real one."""
        if internals.is_functorch_wrapped(tensor):
            place: int | None = self.words.place_of(internals.functorch_unwrapped(tensor))
            return place
        if not sparse.is_sparse(tensor):
            return None
        block = self.blocks.live.get(id(sparse.parts_of(tensor)[1].untyped_storage()))
        return None if block is None else block.place

    def copy_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor without data but for the values that are known; of a real one a real copy."""
        if self.words.place_of(tensor) is None:
            return tensor.detach().clone()
        with internals.no_dispatch_modes():
            kept = self.results.fresh(tensor.shape, dense_strides(tensor), tensor.dtype)
            self.blocks.enter(kept, HOST)
            self.values.copy(tensor, kept)
        return kept

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that counts as pinned."""
        copy = tensor.clone()
        self.note_pinned(copy)
        return copy

    def note_pinned(self, tensor: torch.Tensor) -> None:
        """Let a host tensor count as pinned."""
        storage = tensor.untyped_storage()
        self._pinned[id(storage)] = weakref.ref(storage)

    def note_assumed(self, tensor: torch.Tensor) -> None:
        """Note that a host tensor holds values that nobody computed: a copy from the device."""
        self._assumed.append(weakref.ref(tensor.untyped_storage(), self._assumed.remove))

    def is_assumed(self, tensor: torch.Tensor) -> bool:
        """Whether a host tensor is such a copy."""
        storage = tensor.untyped_storage()
        return any(found() is storage for found in self._assumed)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether it is such a copy."""
        found = self._pinned.get(id(tensor.untyped_storage()))
        return found is not None and found() is tensor.untyped_storage()

    def _storage_died(self, key: int) -> None:
        self.values.forget_storage(key)
        self.shares.forget(key)

    # Memory

    def take_hidden(self, nbytes: int) -> int:
        """Memory that an op takes inside itself."""
        self.hidden_bytes += nbytes
        try:
            return self.malloc(nbytes, self.stream)
        except torch.OutOfMemoryError:
            self.hidden_bytes -= nbytes
            raise

    def give_hidden(self, address: int, nbytes: int) -> None:
        """Give it back."""
        self.hidden_bytes -= nbytes
        self.free(address)

    def malloc(self, nbytes: int, stream: int = 0) -> int:
        """The address of so many bytes.

        Raises:
            torch.OutOfMemoryError: the device has no room for them.
        """
        try:
            address = self.allocator.malloc(nbytes, stream)
        except DeviceOutOfMemoryError as error:
            raise torch.OutOfMemoryError(out_of_memory_message(self, nbytes)) from error
        if self.watches:
            stats = self.allocator.stats
            for watch in self.watches:
                if stats.requested_bytes > watch.requested:
                    watch.requested = stats.requested_bytes
                    watch.hidden, watch.cublas = self.hidden_bytes, self.cublas_bytes
                if stats.allocated_bytes > watch.allocated:
                    watch.allocated = stats.allocated_bytes
                if stats.reserved_bytes > watch.reserved:
                    watch.reserved = stats.reserved_bytes
        return address

    def free(self, address: int) -> None:
        """Take an address back."""
        self.allocator.free(address)

    def take_workspace(self, handle: int) -> None:
        """Give a cuBLAS handle its workspace on the current stream, which it keeps."""
        key = (handle, self.stream)
        if key not in self._workspaces and self.workspace_bytes:
            self.cublas_bytes += self.workspace_bytes
            try:
                self._workspaces[key] = self.take_hidden(self.workspace_bytes)
            except torch.OutOfMemoryError:
                self.cublas_bytes -= self.workspace_bytes
                raise

    def clear_workspaces(self) -> None:
        """Give all workspaces back, as `torch._C._cuda_clearCublasWorkspaces` does."""
        for address in self._workspaces.values():
            self.give_hidden(address, self.workspace_bytes)
            self.cublas_bytes -= self.workspace_bytes
        self._workspaces.clear()

    def watch(self) -> Watch:
        """Keep the highest counts from now on."""
        watch = Watch(self)
        self.watches.append(watch)
        return watch

    def refuse_layout(self, tensor: torch.Tensor, what: str) -> NoReturn:
        """Refuse what is not simulated for a layout.

        Raises:
            SimulationError: always.
        """
        raise SimulationError(f"{what} of a {tensor.layout} tensor is not simulated.")

    def describe(self) -> dict[str, Any]:
        """What a report's environment says of the simulation."""
        return {
            "accelerator": self.accelerator.name,
            "simulated": True,
            "assumed_versions": {name: getattr(self.versions, name) for name in ("cuda", "cudnn", "cublas")},
            "allocator_capacity_bytes": self.capacity_bytes,
            "data_dependent": self.data_dependent,
            "assumed_values": dict(self.assumptions),
            "not_modelled": list(self.not_modelled),
            "simulation_notes": list(self.notes),
        }

    def describe_properties(self) -> dict[str, Any]:
        """The device as a report's environment names those that are there."""
        return {"name": self.name, "memory_bytes": self.facts.memory_bytes}

    def __repr__(self) -> str:
        held = format_bytes(self.allocator.stats.allocated_bytes)
        return f"<simulated {self.accelerator.name}: {held} of {format_bytes(self.capacity_bytes)} allocated>"


class Simulation:
    """The context that `simulate` gives."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments
        self._device: SimulatedDevice | None = None
        self._patches = Patches()
        self._mode: SimulationMode | None = None

    def __enter__(self) -> SimulatedDevice:
        if active.current() is not None:
            raise UsageError("a simulation runs already: simulations cannot be nested. Leave the first one before.")
        if any(type(mode).__module__.startswith("torchledger.") for mode in internals.current_dispatch_modes()):
            raise UsageError("a Ledger records already: enter the simulation first, and the Ledger inside it.")
        internals.require_simulation()
        # The first step of an optimizer imports it anyway; here it cannot take our functions into its tables.
        importlib.import_module("torch._dynamo")
        device = SimulatedDevice(*self._arguments)
        self._device = device
        mode = self._mode = SimulationMode(device)
        try:
            self._patches.on_restore(lambda: active.set_current(None))
            active.set_current(device)
            kernels.register(device, mode, self._patches)
            words.install(device, mode, self._patches)
            cuda.install(device, mode, self._patches)
            refusals.install(device, self._patches)
            threads.install(device, self._patches)
            saving.install(device, self._patches)
            self._patches.replace_imported()
            mode.__enter__()  # type: ignore[no-untyped-call]
            return device
        except BaseException:
            leave_mode(mode)
            self._patches.restore()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._leave()
        except BaseException:
            self._leave()  # an interrupt came between: it does what is left
            raise

    def _leave(self) -> None:
        assert self._mode is not None and self._device is not None
        try:
            leave_mode(self._mode)
            ending.mark_survivors(self._device)
        finally:
            self._patches.restore()


def simulate(
    accelerator: str,
    *,
    allocator_conf: str = "",
    capacity_bytes: int | str | None = None,
    data_dependent: str = "worst",
) -> Simulation:
    """A context in which "cuda" is an accelerator that is not there, and takes the memory that it would take.

    Ops on it run without values, so a step takes milliseconds and no memory; what its caching allocator would hold is
    counted to the byte. A `Ledger` inside reads it as it would read a real device.

    Args:
        accelerator: a name of the table, as in ``h100-sxm``.
        allocator_conf: settings of the allocator in the syntax of ``PYTORCH_CUDA_ALLOC_CONF``, which is read where this
            is empty.
        capacity_bytes: what the allocator may take, in bytes or as ``"80 GB"``; left out, what the driver of the
            accelerator reports, less 500 MiB for the CUDA context.
        data_dependent: how many elements ops keep whose results depend on values that are not known: ``"worst"``
            (all) or ``"balanced"`` (routers give each expert its share; masks keep half).

    Returns:
        A context manager that yields the `SimulatedDevice`.

    Raises:
        UnknownAcceleratorError: no accelerator of that name is in the table.
        SimulationError: it cannot be simulated.
        TorchVersionError: the installed torch lacks a name that simulations stand on.
        UsageError: simulations are nested, or an argument cannot be read.
        torch.OutOfMemoryError: inside, where the device would raise it.

    >>> with simulate("h100-sxm") as device:
    ...     x = torch.zeros(1000, device="cuda")
    ...     print(x.device, torch.cuda.memory_allocated())
    cuda:0 4096
    """
    return Simulation(accelerator, allocator_conf, capacity_bytes, data_dependent)
