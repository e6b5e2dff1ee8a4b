"""Markers: what merges, and what is said of many that are wrong."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from torchledger.gate.marks import Mark, MarkedTest, find_mark_errors, merge_marks


def marked(name: str, *marks: dict[str, Any], param: str | None = None, own: bool = True) -> MarkedTest:
    return MarkedTest(f"t.py::{name}", name, param, tuple(((), mark, own) for mark in marks))


def test_the_nearest_wins_key_by_key() -> None:
    near, far = Mark({"peak": 1}, None), Mark({"peak": 2, "flops": 3}, Fraction(1, 4))
    budget = merge_marks([near, far, Mark({"other": 0}, Fraction(1, 2))], None)
    assert budget is not None
    assert budget.limits == {"peak": 1, "other": 0, "flops": 3}
    assert budget.tolerance == Fraction(1, 4)


def test_a_tolerance_alone_is_no_budget() -> None:
    assert merge_marks([Mark({}, Fraction(1, 4))], None) is None


def test_an_exact_tolerance_that_is_near_wins() -> None:
    budget = merge_marks([Mark({"peak": 1}, Fraction(0)), Mark({}, Fraction(1, 2))], None)
    assert budget is not None
    assert budget.tolerance == 0


def test_a_dict_that_is_overruled_needs_no_id() -> None:
    assert merge_marks([Mark({"peak": 1}), Mark({"peak": {"a": 2}})], None) is not None


def test_one_line_for_each_test_and_no_end_of_lines() -> None:
    shared = {"peek": 1}
    lines = find_mark_errors([marked(f"test_{n}", shared) for n in range(5000)], whole=True)
    assert len(lines) == 11
    assert lines[0].startswith("t.py::test_0: @pytest.mark.ledger(peek=1)")
    assert lines[-1] == "and 4990 more"


def test_ids_that_nobody_has_are_only_wrong_where_all_are_known() -> None:
    limits = {"peak": {"a": 1, "b": 1}}
    one = [marked("test_it", limits, param="a")]
    assert find_mark_errors(one, whole=False) == []
    assert "no parameter has the id 'b'" in find_mark_errors(one, whole=True)[0]
    both = [*one, marked("test_it", limits, param="b")]
    assert find_mark_errors(both, whole=True) == []
    # A marker of a class may be for the ids of several tests together.
    assert find_mark_errors([marked("test_it", limits, param="a", own=False)], whole=True) == []
