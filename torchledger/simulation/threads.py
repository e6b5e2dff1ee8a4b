"""Threads that the program starts inside a simulation: they see the simulated device too."""

from __future__ import annotations

import threading
from typing import Any

from torchledger.patching import Patches
from torchledger.simulation import active
from torchledger.simulation.contracts import Device
from torchledger.simulation.mode import SimulationMode


def install(device: Device, patches: Patches) -> None:
    """Let each thread run with a mode of its own, since a dispatch mode is one thread's."""
    original = threading.Thread.start

    def start(self: threading.Thread) -> Any:
        run = self.run

        def run_inside() -> None:
            if active.current() is not device:
                return run()
            with SimulationMode(device):
                return run()

        self.run = run_inside  # type: ignore[method-assign]
        return original(self)

    patches.replace(threading.Thread, "start", start)
