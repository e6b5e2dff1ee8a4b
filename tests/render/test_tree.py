"""Trees of modules: whatever is folded, the rows add up. Oracle: the numbers that went in."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from synthetic import gpt_flops
from torchledger.render.tree import MAX_CHILDREN, MAX_ROWS, ModuleRow, module_rows

names = st.sampled_from(["0", "1", "2", "7", "10", "a", "layer1", "layer2", "x9y", "(outside)"])
paths = st.lists(names, max_size=4).map(".".join)
trees = st.dictionaries(paths, st.integers(-3, 3), max_size=60)


def check_sums(rows: Sequence[ModuleRow], own: dict[str, int]) -> None:
    """Children and own are the parent's total; the tops are the whole."""
    assert sum(row.own for row in rows) == sum(own.values())
    assert sum(row.total for row in rows if row.depth == 0) == sum(own.values())
    for place, row in enumerate(rows):
        below = 0
        for other in rows[place + 1 :]:
            if other.depth <= row.depth:
                break
            below += other.total if other.depth == row.depth + 1 else 0
        assert row.total == row.own + below


@settings(deadline=None)
@given(trees, st.integers(1, 50))
def test_rows_add_up_whatever_is_folded(own: dict[str, int], max_rows: int) -> None:
    rows = module_rows(own, max_rows=max_rows)
    check_sums(rows, own)
    assert len(rows) <= max(max_rows, MAX_CHILDREN)


def test_equal_blocks_are_one_row() -> None:
    own = {path: split.self_total for path, split in gpt_flops(n_blocks=12).by_module.items()}
    rows = module_rows(own)
    check_sums(rows, own)
    labels = [(row.depth, row.label) for row in rows]
    assert labels == [
        (0, "(model)"),
        (1, "blocks.[0-11] x12"),
        (2, "attn"),
        (3, "qkv"),
        (3, "proj"),
        (2, "mlp"),
        (3, "fc"),
        (3, "proj"),
        (1, "head"),
        (0, "(outside)"),
    ]
    assert rows[3].total == 12 * 4 * 3_000_001


def test_blocks_that_differ_stay_apart() -> None:
    rows = module_rows({"": 0, "blocks.0.fc": 4, "blocks.1.fc": 4, "blocks.2.fc": 5, "blocks.3.fc": 4, "blocks.3.x": 1})
    assert [(row.label, row.total) for row in rows] == [
        ("(model)", 18),
        ("blocks", 18),
        ("[0-1].fc x2", 8),
        ("2.fc", 5),
        ("3", 5),
        ("fc", 4),
        ("x", 1),
    ]


def test_alternating_blocks_are_listed() -> None:
    own = {f"h.{i}": 1 + i % 2 for i in range(6)}
    assert [row.label for row in module_rows(own)] == ["h", "[0,2,4] x3", "[1,3,5] x3"]
    own = {f"h.{i}": 1 + i % 2 for i in range(40)}
    assert [row.label for row in module_rows(own)] == ["h", "[0,2,4,6,..,38] x20", "[1,3,5,7,..,39] x20"]
    own = {f"stage{i}.conv": 3 for i in (1, 2, 3)}
    assert [row.label for row in module_rows(own)] == ["stage[1-3].conv x3"]
    own = {f"a.{i}.b.{j}": 1 for i in range(2) for j in range(3)}
    assert [row.label for row in module_rows(own)] == ["a.[0-1].b.[0-2] x6"]


def test_thousands_of_modules_fit_the_page() -> None:
    own = {f"net.{i}.{j}": i * 10 + j for i in range(300) for j in range(10)}
    rows = module_rows(own)
    check_sums(rows, own)
    assert len(rows) <= MAX_ROWS
    assert any(row.label == f"({300 - MAX_CHILDREN + 1} more)" for row in rows)
    assert "net" in rows[0].label


def test_paths_of_any_depth() -> None:
    own = {".".join("a" * depth): 1 for depth in range(1, 3000, 100)}
    check_sums(module_rows(own), own)


def test_several_roots_and_no_root() -> None:
    rows = module_rows({"Generator": 0, "Generator.fc": 3, "Critic.fc": 2, "(outside)": 1})
    assert [(row.depth, row.label) for row in rows] == [(0, "Generator.fc"), (0, "Critic.fc"), (0, "(outside)")]
    assert module_rows({}) == ()
    assert module_rows({"": 0, "a": 0}) == ()
