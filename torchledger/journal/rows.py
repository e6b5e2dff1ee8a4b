"""Rows of a report that stand beside its statements: what ops hold inside themselves, and what grows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AuditRow:
    """What one op held inside itself, beyond what was dispatched: ``nbytes`` at most in one of its ``calls``."""

    op: str
    module: str
    phase: str
    nbytes: int
    calls: int


@dataclass(frozen=True, slots=True)
class AuditedPeak:
    """The highest instant of an audited step on the CPU, with what ops hold inside themselves.

    ``op`` ran then, in ``phase`` and ``module``. ``inside_bytes`` of ``total_bytes`` no dispatch showed; the rest is
    what the ledger counted when the op had returned.
    """

    total_bytes: int
    inside_bytes: int
    phase: str
    module: str
    op: str


@dataclass(frozen=True, slots=True)
class Growth:
    """Live storages of one kind that grow by ``bytes_per_step`` in every step since ``since_step``.

    ``op`` made them in ``module``; ``shape`` and ``dtype`` are those of the tensor that was made with the storage.
    ``where`` is the user's file and line, with ``stacks=True``.
    """

    category: str
    module: str
    op: str
    bytes_per_step: int
    since_step: int
    shape: tuple[int, ...]
    dtype: str
    where: str | None = None
