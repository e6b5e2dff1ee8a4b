"""What grows step after step: storages that outlive their step, by where they were made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torchledger.journal.entries import EXTERNAL, LATE, Journal
from torchledger.journal.rows import Growth
from torchledger.journal.statements import CATEGORIES

FEWEST_INCREASES = 3
"""How often something has to have grown, and never shrunk between, to be called growing."""

GROWING_ROWS = 1000
"""How many rows of growth there are at most: those that grow most."""

JOINING = frozenset(("aten.cat", "aten.stack", "aten.resize_", "aten.resize_as_"))
"""Ops that make a cache longer by making it anew: their results need not outlive a step to grow."""

_INPUTS = CATEGORIES.index("inputs")

_Key: TypeAlias = tuple[int, int, str, str, int]
"""Category, module, op, dtype and site of storages that are of one kind."""


@dataclass(slots=True)
class _Track:
    """The bytes of one kind, at the end of one step after another."""

    nbytes: int = 0
    shape: tuple[int, ...] = ()
    since: int = 0
    last: int = 0
    """The steps in which they first and last grew."""
    nbytes_since: int = 0
    """Bytes at the end of the first of them."""
    increases: int = 0
    widest: int = 1
    """Most steps from one increase to the next."""

    def add(self, step: int, nbytes: int, shape: tuple[int, ...]) -> None:
        """The bytes at the end of a step."""
        if nbytes > self.nbytes:
            if self.increases == 0:
                self.nbytes_since, self.since = nbytes, step
            else:
                self.widest = max(self.widest, step - self.last)
            self.increases, self.last, self.shape = self.increases + 1, step, shape
        elif nbytes < self.nbytes:
            self.increases, self.widest = 0, 1
        self.nbytes = nbytes

    def grows(self, step: int) -> bool:
        """Whether it has grown often enough, and not stopped: what grows in every other step rests in between."""
        return self.increases >= FEWEST_INCREASES and step - self.last <= self.widest

    @property
    def bytes_per_step(self) -> int:
        """What it grows by, without what came with the first increase."""
        return (self.nbytes - self.nbytes_since) // max(self.last - self.since, 1)


class GrowthReader:
    """Reads what the steps of one ledger leave behind, in order; it keeps a number for each kind of storage.

    What a step leaves and the next one frees or replaces (its loss, its batch, its gradients) is no growth, nor is what
    was there before the ledger met it. So a kind is measured by its storages that have outlived a whole step;
    those of `JOINING` ops, which replace one another, by all of them, while the model's batches stay as they are.
    """

    def __init__(self) -> None:
        self._tracks: dict[_Key, _Track] = {}
        self._journal: Journal | None = None
        self._batch: list[tuple[int, ...]] = []

    def read(self, journal: Journal, settled: dict[int, int]) -> None:
        """Read a step; a step that repeats the last one need not be read."""
        self._journal = journal
        batch = [size for found in journal.batches for size in (found.integers, found.first)]
        same_batch, self._batch = not self._batch or batch == self._batch, batch
        held = _held(journal, settled)
        tracks = {}
        for key, (nbytes, shape) in held.items():
            track = self._tracks.get(key) or _Track()
            if key[2] in JOINING and not same_batch:
                track = _Track(nbytes)  # it may be longer because the batch is
            track.add(journal.index, nbytes, shape)
            tracks[key] = track
        self._tracks = tracks

    def rows(self, last_step: int) -> tuple[Growth, ...]:
        """What has grown up to that step, most bytes a step first."""
        journal = self._journal
        if journal is None:
            return ()
        rows = []
        for (category, module, op, dtype, site), track in self._tracks.items():
            if track.grows(last_step) and (per_step := track.bytes_per_step) > 0:
                rows.append(
                    Growth(
                        category=CATEGORIES[category],
                        module=journal.modules[module],
                        op=op,
                        bytes_per_step=per_step,
                        # What outlives a step is found a step later.
                        since_step=track.since if op in JOINING else max(track.since - 1, 0),
                        shape=tuple(track.shape),
                        dtype=dtype,
                        where=journal.sites[site] if site >= 0 else None,
                    )
                )
        return tuple(sorted(rows, key=lambda row: (-row.bytes_per_step, row.module, row.op, row.dtype))[:GROWING_ROWS])


def _held(journal: Journal, settled: dict[int, int]) -> dict[_Key, tuple[int, tuple[int, ...]]]:
    """Bytes of each kind that a step leaves behind, and the shape of its newest storage."""
    gone = {~event for event in journal.events if event < 0}
    roles = journal.roles
    held: dict[_Key, tuple[int, tuple[int, ...]]] = {}
    old = journal.carried.items()
    new = ((n, row) for n, row in enumerate(journal.blocks, journal.first) if row[4] in JOINING)
    for number, (nbytes, _, _, module, op, shape, dtype, site) in (*old, *new):
        if number in gone or roles.get(number, 0) & (LATE | EXTERNAL):
            continue
        category = settled[number]
        if op in JOINING and category == _INPUTS:
            continue
        key = (category, module, op, dtype, site)
        held[key] = (held.get(key, (0, ()))[0] + nbytes, shape)
    return held
