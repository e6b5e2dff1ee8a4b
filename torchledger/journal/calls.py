"""The calls of ops in an audited step, with what the allocator gave and took back in each. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

BETWEEN_OPS = "(between ops)"
"""The op of what no op's call holds: the engine's, the random generators', a library's that no dispatch shows."""


@dataclass(slots=True)
class Call:
    """One call of an op: ``op`` in ``phase`` and ``module`` (an index into ``Journal.modules``).

    ``begin`` and ``end`` are the numbers of events that the step had when the op was called and when it returned, its
    results not yet there. ``inside`` are the bytes that the CPU's allocator gave (above 0) and took back (below 0)
    between the two, in order; ``after`` those until the next call, and ``then`` names what ran there.
    """

    op: str
    phase: str
    module: int
    begin: int
    end: int = 0
    inside: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    then: str = BETWEEN_OPS
    then_module: int = 0
