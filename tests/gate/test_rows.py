"""The rows that a baseline keeps: those of many layers in few, and none of their bytes lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from synthetic import make_snapshot
from torchledger.gate.differences import diff_snapshots
from torchledger.gate.rows import LIMIT, decode_rows, encode_rows, fold_layers, trim_rows
from torchledger.journal.statements import Allocation, MemorySnapshot


def layers(n_layers: int, width: int = 8, *, odd: int | None = None) -> MemorySnapshot:
    rows = [
        Allocation(4 * width * i, "activations", "forward", f"blocks.{n}.{name}", "aten.mm", (i, width), "float32")
        for n in range(n_layers)
        for i, name in enumerate(("attn", "fc", "proj"), start=1)
    ]
    if odd is not None:
        rows = [
            replace(row, nbytes=2 * row.nbytes, dtype="float64") if f".{odd}.fc" in row.module else row for row in rows
        ]
    return replace(make_snapshot(activations=sum(row.nbytes for row in rows)), largest=tuple(rows))


def moved(base: MemorySnapshot, head: MemorySnapshot) -> list[tuple[str, int, str]]:
    found = diff_snapshots(decode_rows(encode_rows(base)), trim_rows(head))
    assert sum(entry.change for entry in found) == head.total_bytes - base.total_bytes
    return [(entry.module, entry.change, entry.words) for entry in found]


def test_a_hundred_layers_have_their_rows_in_three() -> None:
    rows = encode_rows(layers(100))
    assert list(rows) == [
        "activations | blocks.*.proj | aten.mm | forward | float32 | 3x8 | 100",
        "activations | blocks.*.fc | aten.mm | forward | float32 | 2x8 | 100",
        "activations | blocks.*.attn | aten.mm | forward | float32 | 1x8 | 100",
    ]
    assert sum(rows.values()) == layers(100).total_bytes


def test_what_moved_is_said_for_layers_as_for_one() -> None:
    assert moved(layers(100), layers(101)) == [
        ("blocks.*.proj", 96, "float32 3x8: now 101 blocks, was 100"),
        ("blocks.*.fc", 64, "float32 2x8: now 101 blocks, was 100"),
        ("blocks.*.attn", 32, "float32 1x8: now 101 blocks, was 100"),
    ]
    assert moved(layers(100), layers(100, odd=37)) == [
        ("blocks.37.fc", 128, "float64 2x8: new"),
        ("blocks.*.fc", -64, "float32 2x8: now 99 blocks, was 100"),
    ]
    assert moved(layers(3), layers(3, 16))[0] == ("blocks.*.proj", 288, "float32: now 3x16, was 3x8")


NAMES = st.sampled_from(["", "a", "a.0", "a.1", "a.0.b", "a.1.b", "0", "1", "a1"])
ROWS = st.builds(
    Allocation,
    st.integers(1, 50),
    st.sampled_from(["inputs", "activations"]),
    st.just("forward"),
    NAMES,
    st.sampled_from(["aten.mm", ""]),
    st.sampled_from([(), (2,)]),
    st.just("float32"),
)


@given(st.lists(ROWS, max_size=60))
def test_nothing_is_lost(rows: list[Allocation]) -> None:
    sums = Counter(dict.fromkeys(("inputs", "activations"), 0))
    for row in rows:
        sums[row.category] += row.nbytes
    peak = replace(make_snapshot(**sums), largest=tuple(rows))
    encoded = encode_rows(peak)
    assert sum(encoded.values()) == peak.total_bytes
    assert decode_rows(encoded).by_category == peak.by_category
    assert trim_rows(trim_rows(peak)) == trim_rows(peak)
    assert sum(row.n_blocks for row in fold_layers(rows)) == len(rows)
    assert len(encoded) <= LIMIT + 2
