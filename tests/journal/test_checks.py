"""What holds inside statements, on input that was made to cost time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synthetic import gpt_report
from torchledger.errors import ReportFileError
from torchledger.journal.checks import parents_of
from torchledger.journal.schema import decode_run, encode_run
from torchledger.journal.statements import OUTSIDE_MODULE, MemorySnapshot, MemoryStatement, RunStatement

PATHS = st.lists(st.sampled_from(["", "a", "b", "a1", "(outside)"]), max_size=5).map(".".join)


def nearest_above(module: str, modules: set[str]) -> str | None:
    """By the definition: the longest other path that it begins with at a dot."""
    if module in ("", OUTSIDE_MODULE):
        return None
    above = [other for other in modules if other != module and (other == "" or module.startswith(f"{other}."))]
    return max(above, key=len, default=None)


@given(st.sets(PATHS, max_size=20))
def test_parents(modules: set[str]) -> None:
    assert parents_of(modules) == {module: nearest_above(module, modules) for module in modules}


class Path(str):
    """A path that counts how many characters are cut out of it."""

    cut = 0

    def __getitem__(self, key: object) -> str:
        found = super().__getitem__(key)  # type: ignore[index]
        Path.cut += len(found)
        return found

    def rpartition(self, sep: str) -> tuple[str, str, str]:  # type: ignore[override]
        Path.cut += len(self)
        head, dot, tail = super().rpartition(sep)
        return Path(head), dot, tail


def test_a_path_of_many_dots_is_not_cut_at_each() -> None:
    deep = Path("a." * 50_000 + "a")
    assert parents_of(["b", deep])[deep] is None
    assert Path.cut <= 10 * len(deep)


class Bytes(int):
    """A number that counts how often it is compared with another."""

    compared = 0

    def __gt__(self, other: int) -> bool:
        Bytes.compared += 1
        return super().__gt__(other)

    def __eq__(self, other: object) -> bool:
        Bytes.compared += 1
        return super().__eq__(other)

    __hash__ = int.__hash__


def test_the_highest_of_many_steps_is_found_in_one_pass() -> None:
    step = gpt_report(n_steps=1).steps[0]
    peaks = [MemoryStatement(peak=MemorySnapshot(total_bytes=Bytes(i % 7), other=i % 7)) for i in range(1000)]
    run = RunStatement(tuple(replace(step, index=i, memory={"cpu": peak}) for i, peak in enumerate(peaks)), 1000)
    assert run.peak_step is not None
    assert run.peak_step.index == 6
    assert Bytes.compared < 10_000  # for each pair of steps it would be 1,000,000


def test_journals_of_no_step_are_refused() -> None:
    document = encode_run(gpt_report())
    document["journals"] = {"77": {}}
    with pytest.raises(ReportFileError, match="belongs to no step"):
        decode_run(document)
