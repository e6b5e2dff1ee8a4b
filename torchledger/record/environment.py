"""Where a report was made: versions and devices."""

from __future__ import annotations

import platform
from typing import Any

import torch

from torchledger._version import __version__
from torchledger.accelerators import match_device_name


def describe_environment(devices: list[str], created: str) -> dict[str, Any]:
    """Versions, platform and the devices in use; ``accelerator`` is a key of the accelerator table, or None."""
    found: dict[str, Any] = {}
    accelerator = None
    for device in sorted(devices):
        if device.startswith("cuda") and torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(device)
            found[device] = {"name": properties.name, "memory_bytes": properties.total_memory}
            accelerator = accelerator or match_device_name(properties.name)
        else:
            found[device] = {"name": platform.machine() if device == "cpu" else device}
    return {
        "torchledger": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "devices": found,
        "accelerator": accelerator,
        "created": created,
    }
