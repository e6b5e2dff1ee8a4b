"""Who gave a storage its memory: an allocator of torch's, a mapped file, or another library.

`UntypedStorage.resizable` does not tell: it is false for what `torch.load` read and after `Tensor.numpy`, too. What
tells is the function that will give the memory back. Python cannot ask for it, so it is read out of the storage's C++
object, at a place found by looking at storages of known origin; through ``/proc/self/mem``, where a wrong address is an
error and no crash. Where that cannot be done (no Linux, another layout), the address decides: torch's CPU allocator
hands out multiples of 64.
"""

from __future__ import annotations

import functools
import struct
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.utils.dlpack

from torchledger import internals
from torchledger.journal.entries import EXTERNAL, MAPPED, UNSURE

ALIGNMENT = 64
"""Bytes to which torch's CPU allocator aligns what it gives."""
SHARED_BY_TORCH = ("/dev/shm/torch_", "/memfd:torch", "/tmp/torch_")
"""How the files begin behind memory that torch shares between processes."""
_N_WORDS = 8
_WORD_BYTES = struct.calcsize("P")

Words: TypeAlias = tuple[int, ...]


class Origin(NamedTuple):
    """The role of a storage (`EXTERNAL`, `MAPPED`, `UNSURE` or none), and whether it lies in another one's memory."""

    role: int
    borrowed: bool = False


OWN = Origin(0)
BORROWED = Origin(0, borrowed=True)


class Layout(NamedTuple):
    """Which words of a storage's C++ object matter, and what they are for memory of known origin."""

    data: int
    """Index of the word that holds the address of the memory."""
    freeing: int
    """Index of the word that holds the function which gives the memory back."""
    context: int
    """Index of the word that holds what this function is given."""
    by_allocator: int
    """The function for memory of torch's own CPU allocator."""
    by_whole: int
    """The function for a part of another storage."""
    by_owner: int
    """The function for memory that belongs to something else, which is told to let go of it."""
    by_exporter: frozenset[int]
    """The functions that let go of a tensor of torch's which was exported by DLPack."""


class Origins:
    """Where memory comes from; what was read of the process's mappings is kept as long as no op ran."""

    def __init__(self) -> None:
        self._moment = -1
        self._mappings: _Mappings | None = None

    def origin_of(self, storage: torch.UntypedStorage, moment: int) -> Origin:
        """Where a storage's memory comes from.

        Args:
            storage: Any storage.
            moment: How many events there have been: the process's mappings are read again once there are more.
        """
        if storage.resizable() or storage.device.type == "meta" or not storage.nbytes():
            return OWN
        if storage.device.type != "cpu":
            return OWN if _is_of_device(storage) else Origin(EXTERNAL)
        layout = cpu_layout()
        address = storage.data_ptr()
        if layout is not None and (found := _by_layout(layout, storage._cdata)) is not None:
            return found
        is_shared = storage.is_shared()
        file = self._file_at(address, -1 if is_shared else moment)
        if file:
            return OWN if file.startswith(SHARED_BY_TORCH) else Origin(EXTERNAL | MAPPED)
        if is_shared:
            return Origin(EXTERNAL | MAPPED) if storage.filename else OWN
        return Origin(EXTERNAL if address % ALIGNMENT else UNSURE)

    def is_mapped(self, storage: torch.UntypedStorage, moment: int) -> bool:
        """Whether a storage that no allocator gave lies in the mapping of a file."""
        return storage.device.type == "cpu" and bool(self._file_at(storage.data_ptr(), moment))

    def _file_at(self, address: int, moment: int) -> str:
        mappings = self._mappings
        file = mappings.file_at(address) if mappings is not None else ""
        if not file and (moment < 0 or moment != self._moment or mappings is None):
            self._moment = moment
            self._mappings = mappings = _Mappings()
            file = mappings.file_at(address)
        return file


def _by_layout(layout: Layout, place: int) -> Origin | None:
    """What the function that gives a storage's memory back tells; None where it is none of those that are known."""
    words = read_words(place)
    is_part = False
    while words and words[layout.freeing] == layout.by_whole:
        is_part = True
        words = read_words(words[layout.context])
    if not words:
        return None
    if words[layout.freeing] == layout.by_allocator:
        return BORROWED if is_part else OWN
    if words[layout.freeing] == layout.by_owner:
        targets = _targets(words[layout.context], words[layout.data])
        return BORROWED if any(layout.by_exporter & {*target} for target in targets) else Origin(EXTERNAL)
    return None


class _Mappings:
    """The parts of this process's memory that files are mapped to, as ``/proc/self/maps`` lists them."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._files: list[str] = []
        try:
            with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    fields = line.rstrip("\n").split(maxsplit=5)
                    if len(fields) == 6 and fields[5].startswith("/"):
                        start, _, end = fields[0].partition("-")
                        self._starts.append(int(start, 16))
                        self._ends.append(int(end, 16))
                        self._files.append(fields[5])
        except OSError:  # no Linux
            pass

    def file_at(self, address: int) -> str:
        """The file that is mapped at an address, or an empty string."""
        index = bisect_right(self._starts, address) - 1
        return self._files[index] if index >= 0 and address < self._ends[index] else ""


def read_words(address: int) -> Words:
    """The words of this process's memory from an address on; none where they cannot be read."""
    size = _N_WORDS * _WORD_BYTES
    if not 0 < address < 1 << 63:
        return ()
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            found = memory.read(size)
    except (OSError, ValueError):
        return ()
    return struct.unpack(f"{_N_WORDS}P", found) if len(found) == size else ()


@functools.cache
def cpu_layout() -> Layout | None:
    """How storages on the CPU are laid out here, found by looking at some; None where that did not tell."""
    with internals.no_dispatch_modes(), internals.without_torch_function():
        return _find_layout()


def _find_layout() -> Layout | None:
    own = [torch.empty(n, dtype=torch.uint8, device="cpu").untyped_storage() for n in (64, 4096)]
    buffers = [bytearray(64), bytearray(4096)]
    owned = [torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage() for buffer in buffers]
    exported = [torch.empty(64, dtype=torch.uint8, device="cpu"), torch.empty(8, 8, device="cpu")]
    dlpack: Any = torch.utils.dlpack
    imported = [dlpack.from_dlpack(t).untyped_storage() for t in exported]
    imported += [dlpack.from_dlpack(dlpack.to_dlpack(t)).untyped_storage() for t in exported]
    part = own[1][8:16]
    seen = [read_words(storage._cdata) for storage in (*own, *owned, part, *imported)]
    if not all(seen):
        return None
    first, second, one, other, partial, *shared = seen
    places = [i for i, word in enumerate(first) if word == own[0].data_ptr()]  # the data, and what its deleter is given
    if len(places) != 2 or any(second[i] != own[1].data_ptr() for i in places):
        return None
    data, context = places
    freeing = [
        i
        for i in range(data + 1, min(context + 2, _N_WORDS))
        if first[i] == second[i] and one[i] == other[i] and len({0, first[i], one[i], partial[i]}) == 4
    ]
    if len(freeing) != 1 or partial[context] != own[1]._cdata:
        return None
    (at,) = freeing
    exporters: set[int] = set()
    for a, b in (shared[:2], shared[2:]):
        if not a[at] == b[at] == one[at]:
            return None
        both = [
            {word for target in _targets(words[context], t.data_ptr()) for word in target}
            for words, t in zip((a, b), exported, strict=True)
        ]
        exporters |= {word for word in both[0] & both[1] if read_words(word)}  # no sizes and flags: functions
    return Layout(data, at, context, first[at], partial[at], one[at], frozenset(exporters)) if exporters else None


def _targets(context: int, data: int) -> Iterator[Words]:
    """What the words of an owner point to, as far as it holds that address: the tensor that DLPack handed over."""
    for word in read_words(context)[:5]:
        target = read_words(word) if word != data else ()
        if data in target:
            yield target


def _is_of_device(storage: torch.UntypedStorage) -> bool:
    """Whether an accelerator's memory was given by the same function's counterpart as torch's own is."""
    layout = cpu_layout()
    if layout is None:
        return False
    with internals.no_dispatch_modes(), internals.without_torch_function():
        empty = torch.empty(0, dtype=torch.uint8, device=storage.device).untyped_storage()
    one, other = read_words(storage._cdata), read_words(empty._cdata)
    return bool(one and other) and one[layout.freeing] == other[layout.freeing] != 0
