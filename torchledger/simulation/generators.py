"""Random states of the simulated device: no number is drawn there, but programs save, set and compare its states."""

from __future__ import annotations

import os
import struct
from typing import Any

import torch

from torchledger.simulation.contracts import Device

_Generator = torch.Generator
_DEFAULT_SEED = 67280421310721


class DeviceState:
    """The state of the device's default generator: a seed and an offset, as on a CUDA device."""

    def __init__(self) -> None:
        self.seed = _DEFAULT_SEED
        self.offset = 0

    def get(self) -> torch.Tensor:
        """The state, uint8 [16]."""
        return torch.frombuffer(bytearray(struct.pack("<qq", self.seed, self.offset)), dtype=torch.uint8).clone()

    def set(self, state: torch.Tensor) -> None:
        """Take a state that `get` gave.

        Raises:
            RuntimeError: it is none.
        """
        if state.dtype is not torch.uint8 or state.numel() not in (8, 16):
            raise RuntimeError("RNG state is wrong size")
        raw = bytes(state.cpu().tolist()).ljust(16, b"\0")
        self.seed, self.offset = struct.unpack("<qq", raw)


class SimulatedGenerator(_Generator):
    """`torch.Generator("cuda")`: a generator of the host that says it is of the device."""

    def __new__(cls, device: Any = "cpu") -> Any:
        """A generator of the host too, since only one of those can be made without a device."""
        return _Generator.__new__(cls, device="cpu")  # type: ignore[call-arg]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The simulated device."""
        return torch.device("cuda", 0)


def make_functions(device: Device) -> dict[str, Any]:
    """What `torch.cuda.random` offers, by name."""
    state = DeviceState()

    def manual_seed(seed: int) -> None:
        state.seed, state.offset = int(seed), 0

    def seed() -> int:
        manual_seed(int.from_bytes(os.urandom(6), "little"))
        return state.seed

    def get_rng_state(of: Any = "cuda") -> torch.Tensor:
        return state.get()

    def set_rng_state(new_state: torch.Tensor, of: Any = "cuda") -> None:
        state.set(new_state)

    def set_rng_state_all(new_states: Any) -> None:
        for new_state in new_states:
            state.set(new_state)

    return {
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "seed": seed,
        "seed_all": seed,
        "initial_seed": lambda: state.seed,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_rng_state_all": lambda: [state.get()],
        "set_rng_state_all": set_rng_state_all,
    }


def make_generator(original: Any) -> Any:
    """What stands in the place of `torch.Generator`."""

    class GeneratorType(type):
        def __call__(cls, device: Any = "cpu") -> Any:
            if torch.device(device).type == "cuda":
                return SimulatedGenerator()
            return original(device=device)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

    return GeneratorType("Generator", (), {"__doc__": original.__doc__})
