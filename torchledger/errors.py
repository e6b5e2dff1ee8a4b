"""What can go wrong: each error has a slug, and an entry of that name in docs/errors.md."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar


class TorchledgerError(Exception):
    """Base of all errors of torchledger; ``slug`` names its entry in docs/errors.md."""

    slug: ClassVar[str] = "torchledger"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return f"{self.message} [{self.slug}]"


class UncountedOpError(TorchledgerError):
    """``strict=True`` met an op whose cost class is unknown."""

    slug = "uncounted-op"

    def __init__(self, op: str, module: str) -> None:
        self.op = op
        self.module = module
        super().__init__(
            f"no FLOP formula for {op} (in {module!r}): its cost is unknown, and strict=True refuses to go on. "
            f"Give it one with @torchledger.formula, or record with strict=False to have it listed as uncounted."
        )

    def __reduce__(self) -> tuple[type[UncountedOpError], tuple[str, str]]:
        return type(self), (self.op, self.module)


class UsageError(TorchledgerError, ValueError):
    """A call that cannot be carried out as it stands."""

    slug = "usage"


class QuantityError(TorchledgerError, ValueError):
    """A size or count that cannot be read."""

    slug = "quantity"


class JournalMissingError(TorchledgerError):
    """A timeline was asked of a step whose journal was not kept."""

    slug = "journal-missing"

    def __init__(self) -> None:
        super().__init__(
            "the journal of this step was not kept: a ledger keeps those of the last step and of the highest peak, "
            "and a saved report has them when it was written with save(path, journal=True)."
        )


class ReportFileError(TorchledgerError, ValueError):
    """A report file that cannot be read: broken, truncated, foreign, or of a newer schema."""

    slug = "report-file"


class TorchVersionError(TorchledgerError, ImportError):
    """The installed torch lacks a private name that torchledger stands on."""

    slug = "torch-version"


class UnknownAcceleratorError(TorchledgerError, KeyError):
    """No accelerator of that name is in the table."""

    slug = "unknown-accelerator"


class ReportWriteError(TorchledgerError, OSError):
    """A report that cannot be written where it was asked to be."""

    slug = "report-write"


class DeviceOutOfMemoryError(TorchledgerError, MemoryError):
    """A modelled device has no room for a request.

    Args:
        requested_bytes: what was asked for.
        segment_bytes: what was asked of the driver for it.
        stream: the stream of the request.
        capacity_bytes: what the device has for the allocator; None where no capacity was given.
        allowed_bytes: what a memory fraction allows of it; None where none was set.
        reserved_bytes: segments that the allocator holds, after it returned all it could.
        allocated_bytes: blocks in use.
        active_bytes: blocks in use, and blocks that wait for another stream.
    """

    slug = "out-of-memory"

    def __init__(
        self,
        requested_bytes: int,
        *,
        segment_bytes: int,
        stream: int,
        capacity_bytes: int | None,
        allowed_bytes: int | None,
        reserved_bytes: int,
        allocated_bytes: int,
        active_bytes: int,
    ) -> None:
        self.requested_bytes = requested_bytes
        self.segment_bytes = segment_bytes
        self.stream = stream
        self.capacity_bytes = capacity_bytes
        self.allowed_bytes = allowed_bytes
        self.reserved_bytes = reserved_bytes
        self.allocated_bytes = allocated_bytes
        self.active_bytes = active_bytes
        super().__init__(self._describe())

    def _describe(self) -> str:
        held = self.reserved_bytes - self.allocated_bytes
        limits = [
            f"{nbytes:,} B {what}"
            for nbytes, what in ((self.capacity_bytes, "on the device"), (self.allowed_bytes, "allowed"))
            if nbytes is not None
        ]
        return (
            f"out of memory: {self.requested_bytes:,} B were requested on stream {self.stream}, for which the driver "
            f"has no {self.segment_bytes:,} B. Of {' and '.join(limits) or 'a driver that refused'}, "
            f"{self.reserved_bytes:,} B are reserved: {self.allocated_bytes:,} B allocated, {held:,} B free in parts "
            f"of segments. Free blocks first, raise the capacity, or, where much is free in parts, try "
            f"expandable_segments:True."
        )

    def __reduce__(self) -> tuple[object, ...]:
        names = (
            "segment_bytes",
            "stream",
            "capacity_bytes",
            "allowed_bytes",
            "reserved_bytes",
            "allocated_bytes",
            "active_bytes",
        )
        build = partial(type(self), **{name: getattr(self, name) for name in names})
        return build, (self.requested_bytes,)


class SimulationError(TorchledgerError, RuntimeError):
    """Something that a simulated device cannot do."""

    slug = "simulation"


class SimulatedValueError(TorchledgerError, RuntimeError):
    """The program asked for values that a simulation does not have."""

    slug = "simulated-value"


class SimulationEndedError(TorchledgerError, RuntimeError):
    """A tensor of a simulated device was used after its simulation."""

    slug = "simulation-ended"


class BudgetExceeded(TorchledgerError, AssertionError):
    """A measured number lies above its budget; ``broken`` has a `torchledger.gate.judging.Verdict` for each.

    ``key``, ``measured``, ``budget``, ``device`` and ``step_index`` are those of the first.
    """

    slug = "budget-exceeded"

    def __init__(self, message: str, broken: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.broken = tuple(broken)
        first = self.broken[0] if self.broken else None
        self.key: str | None = getattr(first, "key", None)
        self.measured: int | None = getattr(first, "measured", None)
        self.budget: int | None = getattr(first, "budget", None)
        self.device: str | None = getattr(first, "device", None)
        self.step_index: int | None = getattr(first, "step_index", None)

    def __str__(self) -> str:
        # On a line of its own: the last line of a long message is a command to be copied.
        return f"{self.message}\n[{self.slug}]" if "\n" in self.message else super().__str__()

    def __reduce__(self) -> tuple[type[BudgetExceeded], tuple[str, tuple[Any, ...]]]:
        return type(self), (self.message, self.broken)


class BaselineMismatch(BudgetExceeded):
    """A measured number is not the committed one: higher, lower, or there is no committed one."""

    slug = "baseline-mismatch"


class FaultyReportError(TorchledgerError, AssertionError):
    """A budget cannot be held against a report whose ledger failed while it recorded."""

    slug = "faulty-report"


class BaselineFileError(TorchledgerError, ValueError):
    """A baseline file that cannot be read or written: broken, truncated, half merged, or of a newer schema."""

    slug = "baseline-file"
