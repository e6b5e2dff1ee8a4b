"""Differences of two instants: they add up exactly, and say what changed."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import torchledger as tl
from synthetic import MIB, gpt_flops, gpt_report
from torchledger.gate.differences import Differences, Instant, diff_counts, diff_snapshots, diff_statements
from torchledger.journal.statements import CATEGORIES, Allocation, MemorySnapshot, StepReport
from torchledger.read.snapshots import LARGEST_ROWS


def row(
    nbytes: int = 1024,
    category: str = "activations",
    module: str = "blocks.3.mlp",
    op: str = "aten.addmm",
    shape: tuple[int, ...] = (8, 64),
    dtype: str = "bfloat16",
    **more: object,
) -> Allocation:
    return Allocation(nbytes, category, "forward", module, op, shape, dtype, **more)  # type: ignore[arg-type]


def snapshot(*rows: Allocation, rest: dict[str, int] | None = None) -> MemorySnapshot:
    categories: Counter[str] = Counter(rest or {})
    modules: Counter[str] = Counter({"(outside)": sum((rest or {}).values())})
    for item in rows:
        categories[item.category] += item.nbytes
        modules[item.module] += item.nbytes
    total = sum(categories.values())
    return MemorySnapshot(total_bytes=total, by_module=dict(modules), largest=rows, **categories)  # type: ignore[arg-type]


def lines(base: MemorySnapshot, head: MemorySnapshot) -> list[tuple[int, str, str]]:
    found = diff_snapshots(base, head)
    assert sum(entry.change for entry in found) == head.total_bytes - base.total_bytes
    return [(entry.change, entry.kind, entry.words) for entry in found]


CHANGES = {
    "dtype": ([row()], [row(2048, dtype="float32")], [(1024, "changed", "8x64: now float32, was bfloat16")]),
    "shape": (
        [row()],
        [row(2048, shape=(16, 64))],
        [(1024, "changed", "bfloat16: now 16x64, was 8x64")],
    ),
    "both": (
        [row()],
        [row(4096, shape=(16, 64), dtype="float32")],
        [(3072, "changed", "now float32 16x64, was bfloat16 8x64")],
    ),
    "more blocks": (
        [row()],
        [row(3072, n_blocks=3)],
        [(2048, "changed", "bfloat16 8x64: now 3 blocks, was 1")],
    ),
    "fewer blocks": ([row(2048, n_blocks=2)], [row()], [(-1024, "changed", "bfloat16 8x64: now 1 block, was 2")]),
    "larger storages": ([row()], [row(1536)], [(512, "changed", "bfloat16 8x64: now 1.50 KiB, was 1.00 KiB")]),
    "another op": (
        [row()],
        [row(2048, op="aten._to_copy", dtype="float32")],
        [(1024, "changed", "8x64: now float32, was bfloat16 by aten.addmm")],
    ),
    "another phase": (
        [row()],
        [replace(row(2048, dtype="float32"), phase="recompute")],
        [(1024, "changed", "8x64: now float32 in recompute, was bfloat16 in forward")],
    ),
    "a cast around it": (
        [row(module="blocks.3.mlp.fc", shape=(2, 4, 64))],
        [row(2048, op="aten._to_copy", dtype="float32")],
        [(1024, "changed", "now float32 8x64, was bfloat16 2x4x64 by aten.addmm made in blocks.3.mlp.fc")],
    ),
    "new": ([], [row(2048, n_blocks=2)], [(2048, "new", "bfloat16 8x64 x2: new")]),
    "gone": ([row(shape=())], [], [(-1024, "gone", "bfloat16 scalar: gone")]),
    "kept now": (
        [row(category="temporaries")],
        [row()],
        [(1024, "new", "bfloat16 8x64: new, was temporaries"), (-1024, "gone", "bfloat16 8x64: gone, now activations")],
    ),
    "another place": (
        [row(module="a")],
        [row(2048, module="b")],
        [(2048, "new", "bfloat16 8x64: new"), (-1024, "gone", "bfloat16 8x64: gone")],
    ),
    "renamed": ([row(module="layers.0")], [row(module="blocks.0")], []),
    "renamed and grown": (
        [row(module="layers.0"), row(4096, module="layers.0", op="aten.gelu")],
        [row(module="blocks.0"), row(8192, module="blocks.0", op="aten.gelu", n_blocks=2)],
        [(8192, "new", "bfloat16 8x64 x2: new"), (-4096, "gone", "bfloat16 8x64: gone")],
    ),
    "renamed, but for its bytes the old name is there": (
        [row(module="layers.0")],
        [row(module="blocks.0")],
        [(1024, "new", "bfloat16 8x64: new"), (-1024, "gone", "bfloat16 8x64: gone")],
    ),
    "the same": ([row(), row(op="aten.gelu")], [row(op="aten.gelu"), row()], []),
    "block sizes apart": ([row(), row(2048)], [row(3072, n_blocks=2)], []),
}


@pytest.mark.parametrize("case", CHANGES)
def test_words(case: str) -> None:
    base, head, expected = CHANGES[case]
    after = snapshot(*head)
    if "old name is there" in case:  # with bytes of which no row is listed
        after = replace(after, by_module={**after.by_module, "layers.0": 8, "(outside)": -8})
    assert lines(snapshot(*base), after) == expected


def test_the_likeliest_rows_are_paired() -> None:
    """A linear whose width grew: its weight goes with its weight, its bias with its bias."""

    def linear(width: int, dtype: str = "float32") -> list[Allocation]:
        size = {"float32": 4, "bfloat16": 2}[dtype]
        weight, bias = (width, 64), (width,)
        return [
            row(width * 64 * size, "parameters", "fc", "", weight, dtype),
            row(width * size, "parameters", "fc", "", bias, dtype),
        ]

    assert lines(snapshot(*linear(32)), snapshot(*reversed(linear(48)))) == [
        (4096, "changed", "float32: now 48x64, was 32x64"),
        (64, "changed", "float32: now 48, was 32"),
    ]
    assert [words for *_, words in lines(snapshot(*linear(32)), snapshot(*linear(32, "bfloat16")))] == [
        "32x64: now bfloat16, was float32",
        "32: now bfloat16, was float32",
    ]


def test_an_unrelated_tensor_is_not_the_same_one_changed() -> None:
    found = lines(snapshot(row(shape=(8, 64), dtype="float32")), snapshot(row(8, shape=(), dtype="int64")))
    assert [kind for _, kind, _ in found] == ["gone", "new"]


def test_bytes_of_no_row_are_a_row() -> None:
    found = lines(snapshot(row(), rest={"activations": 10, "workspace": 5}), snapshot(row(), rest={"activations": 4}))
    assert found == [
        (-6, "rest", "bytes in no row of the reports"),
        (-5, "rest", "bytes in no row of the reports"),
    ]


def test_a_row_that_the_other_side_may_not_list_is_not_called_new() -> None:
    """The base lists rows down to 500 bytes and holds 400 more: a row of 300 in the head may be among those."""
    base = snapshot(row(500), rest={"activations": 400})
    small, large = row(300, op="aten.gelu"), row(450, op="aten.gelu")
    assert lines(base, snapshot(row(500), small, rest={"activations": 100})) == []
    assert lines(base, snapshot(row(500), large, rest={"activations": 400})) == [(450, "new", "bfloat16 8x64: new")]


ROWS = st.builds(
    row,
    nbytes=st.integers(1, 50),
    category=st.sampled_from(CATEGORIES[:8]),
    module=st.sampled_from(["", "a", "a.b", "a.b.c", "d", "(outside)"]),
    op=st.sampled_from(["", "aten.mm", "aten.gelu"]),
    shape=st.sampled_from([(), (2,), (4,), (2, 2), (2, 2, 1)]),
    dtype=st.sampled_from(["float32", "int8"]),
)
RESTS = st.dictionaries(st.sampled_from(CATEGORIES), st.integers(0, 99), max_size=3)
SNAPSHOTS = st.builds(lambda rows, rest: snapshot(*rows, rest=rest), st.lists(ROWS, max_size=30), RESTS)


@given(SNAPSHOTS, SNAPSHOTS)
def test_entries_add_up_by_category_and_in_all(base: MemorySnapshot, head: MemorySnapshot) -> None:
    found = diff_snapshots(base, head)
    for category in CATEGORIES:
        change = sum(entry.change for entry in found if entry.category == category)
        assert change == getattr(head, category) - getattr(base, category)
    assert sum(entry.change for entry in found) == head.total_bytes - base.total_bytes
    assert [abs(entry.change) for entry in found] == sorted((abs(entry.change) for entry in found), reverse=True)
    back = diff_snapshots(head, base)
    assert sorted(entry.change for entry in back) == sorted(-entry.change for entry in found)


@given(SNAPSHOTS, st.randoms(use_true_random=False))
def test_order_of_rows_says_nothing(base: MemorySnapshot, generator: random.Random) -> None:
    rows = list(base.largest)
    generator.shuffle(rows)
    assert diff_snapshots(base, replace(base, largest=tuple(rows))) == ()


def test_thousands_of_rows_of_one_place_take_no_time() -> None:
    base = snapshot(*(row(n + 1, shape=(n + 1,)) for n in range(2000)))
    head = snapshot(*(row(2 * n + 2, shape=(n + 1,), dtype="float32") for n in range(2000)))
    assert sum(entry.change for entry in diff_snapshots(base, head)) == base.total_bytes


def test_flops_add_up() -> None:
    base, head = gpt_report(), gpt_report(recompute=False)
    assert base.peak_step is not None
    assert head.peak_step is not None
    found = diff_statements(base.peak_step, head.peak_step)
    change = head.peak_step.flops.total - base.peak_step.flops.total
    assert change == -12 * (3_000_001 + 1_000_003 + 2 * 4_000_007)  # each block's recompute
    for rows in (found.flop_phases, found.flop_ops, found.flop_modules):
        assert sum(item.change for item in rows) == change == found.head_flops - found.base_flops
    assert [item.name for item in found.flop_phases] == ["recompute"]
    assert found.flop_modules[0].words == "recompute -4.00 MFLOP"
    assert sum(item.change for item in found.categories) == found.head_bytes - found.base_bytes


def test_own_flops_are_those_without_children() -> None:
    base, head = gpt_flops(n_blocks=2), gpt_flops(n_blocks=3)
    found = diff_statements(StepReport(0, 1, 0.1, base, {}), StepReport(0, 1, 0.1, head, {})).flop_modules
    assert {item.name for item in found} == {
        f"blocks.2.{name}" for name in ("attn", "attn.qkv", "attn.proj", "mlp.fc", "mlp.proj")
    }
    attn = next(item for item in found if item.name == "blocks.2.attn")
    assert attn.words == "forward +500.00 kFLOP, backward +1.25 MFLOP"


def test_counts_and_nothing() -> None:
    assert diff_counts({}, {}) == ()
    step = gpt_report().steps[0]
    none = diff_statements(step, step)
    assert none.base_bytes == none.head_bytes == step.peak.total_bytes
    assert none.base_instant == none.head_instant == Instant("backward", "blocks.11.mlp", "aten.mm")
    same = {name: getattr(none, name) for name in ("base_bytes", "head_bytes", "base_flops", "head_flops")}
    assert none == Differences(**same, base_instant=none.base_instant, head_instant=none.head_instant)


class Mlp(nn.Module):
    def __init__(self, in_float32: bool) -> None:
        super().__init__()
        self.fc, self.proj, self.in_float32 = nn.Linear(32, 128), nn.Linear(128, 32), in_float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.fc(x)
        return self.proj(functional.gelu(hidden.float()).to(x.dtype) if self.in_float32 else functional.gelu(hidden))


class Block(nn.Module):
    def __init__(self, in_float32: bool) -> None:
        super().__init__()
        self.mlp = Mlp(in_float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


def train(n_blocks: int, in_float32: set[int]) -> tl.Report:
    model = nn.Sequential(*(Block(i in in_float32) for i in range(n_blocks))).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    with tl.Ledger(model, optimizer) as ledger:
        for _ in range(4):
            model(torch.randn(16, 8, 32, dtype=torch.bfloat16)).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            ledger.step()
    return ledger.report


def test_a_gelu_input_saved_in_float32_is_named() -> None:
    base, head = train(8, set()), train(8, {3})
    assert base.peak_step is not None
    assert head.peak_step is not None
    found = diff_statements(base.peak_step, head.peak_step)
    (entry,) = found.entries
    elements = 16 * 8 * 128
    assert (entry.module, entry.category, entry.kind) == ("3.mlp", "activations", "changed")
    assert (entry.base_bytes, entry.head_bytes) == (2 * elements, 4 * elements)
    assert "float32" in entry.words
    assert "was bfloat16" in entry.words
    assert found.head_bytes - found.base_bytes == 2 * elements == head.peak.total_bytes - base.peak.total_bytes


def test_a_peak_has_all_its_rows_and_other_steps_few() -> None:
    report = train(16, set())
    assert report.peak_step is not None
    assert len(report.peak.largest) > 5 * LARGEST_ROWS
    assert sum(item.nbytes for item in report.peak.largest) == report.peak.total_bytes
    by_module: Counter[str] = Counter()
    for item in report.peak.largest:
        by_module[item.module] += item.nbytes
    assert by_module == Counter(report.peak.by_module)
    whole = [step.index for step in report.steps if len(step.peak.largest) > LARGEST_ROWS]
    assert whole == [report.peak_step.index]
    assert report.peak.largest[:LARGEST_ROWS] == report.peak_step.memory["cpu"].peak_by_phase[report.peak.phase].largest
    assert tl.Report.from_dict(report.to_dict()) == report


def test_a_model_one_block_deeper_differs_by_that_block() -> None:
    base, head = train(3, set()), train(4, set())
    assert base.peak_step is not None
    assert head.peak_step is not None
    found = diff_statements(base.peak_step, head.peak_step)
    parameters = sum(entry.change for entry in found.entries if entry.category == "parameters")
    assert parameters == 2 * (32 * 128 + 128 + 128 * 32 + 32)
    assert {entry.module.split(".")[0] for entry in found.entries if entry.category == "parameters"} == {"3"}
    assert sum(entry.change for entry in found.entries) == head.peak.total_bytes - base.peak.total_bytes
    assert all(abs(entry.change) < MIB for entry in found.entries)
