"""Streams and events of the simulated device: memory is theirs as on a device, time is not simulated."""

from __future__ import annotations

import itertools
from types import TracebackType
from typing import Any

import torch

from torchledger.simulation.contracts import Device

ELAPSED_MS = 1.0
"""What every two events are apart: no time is simulated."""


def make_classes(device: Device) -> dict[str, Any]:
    """`Stream`, `Event` and what goes with them, under their names in `torch.cuda`."""
    numbers = itertools.count(1)

    class Stream:
        """A stream: blocks of the allocator belong to the one that they were asked on."""

        def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
            self.number = kwargs["number"] if "number" in kwargs else next(numbers)
            self.priority = priority

        @property
        def device(self) -> torch.device:
            return torch.device("cuda", 0)

        device_index = 0
        device_type = 1

        @property
        def stream_id(self) -> int:
            return int(self.number)

        @property
        def cuda_stream(self) -> int:
            return int(self.number)

        def query(self) -> bool:
            return True

        def is_capturing(self) -> bool:
            return False

        def synchronize(self) -> None:
            device.allocator.synchronize(self.number)

        def wait_stream(self, stream: Stream) -> None:
            pass

        def wait_event(self, event: Event) -> None:
            pass

        def record_event(self, event: Event | None = None) -> Event:
            event = event or Event()
            event.record(self)
            return event

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and other.number == self.number

        def __hash__(self) -> int:
            return hash(self.number)

        def __repr__(self) -> str:
            return f"<torch.cuda.Stream device=cuda:0 cuda_stream={self.number:#x}>"

        def __enter__(self) -> Stream:
            self._before = device.stream
            device.stream = self.number
            return self

        def __exit__(self, *_: object) -> None:
            device.stream = self._before

    class Event:
        """An event, which is always over."""

        def __init__(self, enable_timing: bool = False, blocking: bool = False, **kwargs: Any) -> None:
            self.enable_timing = enable_timing

        def record(self, stream: Stream | None = None) -> None:
            pass

        def wait(self, stream: Stream | None = None) -> None:
            pass

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            device.allocator.synchronize()

        def elapsed_time(self, end_event: Event) -> float:
            if not self.enable_timing:
                raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
            device.values.assumptions["time between two events taken for 1 ms"] += 1
            return ELAPSED_MS

    class StreamContext:
        """`with torch.cuda.stream(s)`."""

        def __init__(self, stream: Stream | None) -> None:
            self.stream = stream
            self._before = 0

        def __enter__(self) -> None:
            self._before = device.stream
            if self.stream is not None:
                device.stream = self.stream.number

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
        ) -> None:
            device.stream = self._before

    class DeviceContext:
        """`with torch.cuda.device(0)`: there is one device."""

        def __init__(self, index: Any) -> None:
            self.idx = 0 if index is None or index == -1 else _index(device, index)
            self.prev_idx = 0

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

    def current_stream(of: Any = None) -> Stream:
        return Stream(number=device.stream)

    def default_stream(of: Any = None) -> Stream:
        return Stream(number=0)

    def set_stream(stream: Stream) -> None:
        device.stream = stream.number

    return {
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "device": DeviceContext,
        "device_of": lambda tensor: DeviceContext(tensor.get_device() if tensor.is_cuda else -1),
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
    }


def _index(device: Device, wanted: Any) -> int:
    if isinstance(wanted, int):
        return device.index_of(torch.device("cuda", wanted))
    return device.index_of(torch.device(wanted))
