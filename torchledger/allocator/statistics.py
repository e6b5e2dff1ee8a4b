"""The running counts of an allocator."""

from __future__ import annotations


class AllocatorStats:
    """A live view of what an allocator counts, in bytes and in calls; each ``peak_`` is since the last reset.

    ``requested_bytes`` is what callers asked for and ``allocated_bytes`` the blocks they got; ``active_bytes`` has the
    blocks besides that were freed while another stream might still read them; ``reserved_bytes`` is what the driver
    gave. A request leaves ``requested_bytes`` where it leaves ``allocated_bytes``: when it is freed.
    """

    __slots__ = (
        "_peak_with_pending",
        "allocated_bytes",
        "n_allocations",
        "n_segments",
        "num_alloc_retries",
        "num_device_alloc",
        "num_device_free",
        "num_ooms",
        "num_sync_all_streams",
        "peak_allocated_bytes",
        "peak_n_segments",
        "peak_requested_bytes",
        "peak_reserved_bytes",
        "pending_bytes",
        "requested_bytes",
        "reserved_bytes",
    )

    def __init__(self) -> None:
        self.requested_bytes = self.peak_requested_bytes = 0
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.pending_bytes = 0
        """Freed, but waiting for another stream."""
        self._peak_with_pending = 0
        self.n_allocations = 0
        """Calls of ``malloc`` that gave a block, so far."""
        self.n_segments = self.peak_n_segments = 0
        """Segments of ``cudaMalloc``; expandable ones are not counted, as in torch."""
        self.num_alloc_retries = 0
        """How often all free segments were returned to the driver, because it had refused a new one."""
        self.num_ooms = 0
        self.num_device_alloc = 0
        """Segments that the driver gave, and ranges that it mapped."""
        self.num_device_free = 0
        self.num_sync_all_streams = 0
        """How often all streams were waited for, to return free segments."""

    @property
    def active_bytes(self) -> int:
        """Blocks that cannot be given to anyone: allocated, or waiting for another stream."""
        return self.allocated_bytes + self.pending_bytes

    @property
    def peak_active_bytes(self) -> int:
        """The highest of `active_bytes`."""
        # Without pending blocks it is the allocated peak, which the hot path keeps anyway.
        return max(self.peak_allocated_bytes, self._peak_with_pending)

    def note_active(self) -> None:
        """Keep the active peak while blocks wait."""
        self._peak_with_pending = max(self._peak_with_pending, self.allocated_bytes + self.pending_bytes)

    def note_reserved(self, change: int) -> None:
        """The driver gave or took back bytes."""
        self.reserved_bytes += change
        if change > 0:
            self.num_device_alloc += 1
            self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        else:
            self.num_device_free += 1

    def note_segments(self, change: int) -> None:
        """Whole segments came or went."""
        self.n_segments += change
        self.peak_n_segments = max(self.peak_n_segments, self.n_segments)

    def reset_peaks(self) -> None:
        """Let every peak begin again at what there is now."""
        self.peak_requested_bytes = self.requested_bytes
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes
        self.peak_n_segments = self.n_segments
        self._peak_with_pending = self.active_bytes

    def as_dict(self) -> dict[str, int]:
        """All counts by name.

        >>> AllocatorStats().as_dict()["peak_active_bytes"]
        0
        """
        names = ("requested_bytes", "allocated_bytes", "active_bytes", "reserved_bytes", "n_segments")
        counts = {name: getattr(self, name) for base in names for name in (base, f"peak_{base}")}
        others = [name for name in self.__slots__ if name.startswith("num_") or name == "n_allocations"]
        return counts | {name: getattr(self, name) for name in others}

    def __repr__(self) -> str:
        return f"AllocatorStats({', '.join(f'{name}={value}' for name, value in self.as_dict().items())})"
