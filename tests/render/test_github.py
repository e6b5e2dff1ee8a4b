"""GitHub's limits: nine annotations a type, a summary of 1,024 kB cut in whole rows, and no command in a name."""

from __future__ import annotations

import re
from fractions import Fraction
from urllib.parse import unquote

import pytest

from synthetic import gpt_report, with_peak
from torchledger.gate.comparison import Comparisons, compare_reports
from torchledger.render.github import SUMMARY_LIMIT_BYTES, annotation_lines, cut_page, render_github

COMMAND = re.compile(r"::(error|warning|notice) title=([^:,\r\n]*)::([^\r\n]*)")


def regressions(*names: str) -> Comparisons:
    report = gpt_report()
    lower = with_peak(report, Fraction(95, 100))
    return compare_reports(dict.fromkeys(names, lower), dict.fromkeys(names, report))


def read(lines: list[str]) -> list[tuple[str, str, str]]:
    """Kind, title and message, as the runner reads them."""
    found = []
    for line in lines:
        match = COMMAND.fullmatch(line)
        assert match, line
        kind, title, message = match.groups()
        found.append((kind, unquote(title), unquote(message)))
    return found


def test_a_regression_is_an_error_with_its_numbers() -> None:
    found = read(annotation_lines(regressions("")))
    assert [(kind, title) for kind, title, _ in found] == [
        ("error", "torchledger: peak grew"),
        ("error", "torchledger: activations grew"),
    ]
    assert found[0][2].startswith(
        "peak 465.51 MiB -> 490.01 MiB (+24.50 MiB, +5.3 %) on cpu, torch 2.13.0; most of it: "
    )


def test_nine_of_a_type_and_how_many_more() -> None:
    lines = annotation_lines(regressions(*(f"test_{i}" for i in range(40))))
    assert len(lines) == 10
    assert lines[-1] == "::error title=torchledger::and 71 more"
    assert all(line.startswith("::error title=torchledger%3A ") for line in lines[:9])
    assert len(annotation_lines(regressions(*(f"test_{i}" for i in range(4))))) == 8


def test_wins_are_notices_and_what_does_not_match_a_warning() -> None:
    report = gpt_report()
    (first, _) = read(annotation_lines(compare_reports({"": with_peak(report, Fraction(105, 100))}, {"": report})))
    assert first[:2] == ("notice", "torchledger: peak fell")
    base, head = (
        gpt_report(device="cuda:0", environment={"devices": {"cuda:0": {"name": n}}}) for n in ("A100", "H100")
    )
    assert read(annotation_lines(compare_reports({"": base}, {"": head}))) == [
        ("warning", "torchledger: not compared", "allocated, reserved, workspace, unexplained: A100 against H100")
    ]
    found = read(annotation_lines(compare_reports({"a": base, "old": base}, {"a": base, "new": base})))
    assert [line[1:] for line in found] == [("torchledger: only in base", "old"), ("torchledger: only in head", "new")]


def test_equal_reports_say_nothing() -> None:
    assert annotation_lines(compare_reports({"": gpt_report()}, {"": gpt_report()})) == []


@pytest.mark.parametrize(
    "name", ["a::error title=x::y", "100%", "%0A::error::", "a\r\n::error::b", "a,b:c", "模型", "\ud800"]
)
def test_a_name_cannot_leave_its_annotation(name: str) -> None:
    lines = annotation_lines(regressions(name, name + "2"))
    assert len(lines) == 4
    found = read(lines)
    assert {kind for kind, *_ in found} == {"error"}
    shown = name if name.isprintable() else name.encode("unicode_escape").decode()
    assert found[0][2].startswith(f"{shown}: peak ")


def test_a_page_that_fits_is_left_alone() -> None:
    page = render_github(regressions("a", "b"))
    assert cut_page(page, len(page.encode())) == page
    assert cut_page(page, len(page.encode()) - 1) != page


def test_a_page_is_cut_between_rows_and_closed() -> None:
    page = render_github(regressions("模型 a", "b", "c"))
    lines = page.split("\n")
    whole = len(page.encode())
    assert whole > 2000
    for limit in range(0, whole, 7):
        cut = cut_page(page, limit)
        assert len(cut.encode()) <= limit
        if not cut:
            assert limit < 300
            continue
        kept, note = cut.rsplit("\n\n**Cut off here: ", 1)
        n_missing = int(note.split()[0].replace(",", ""))
        kept_lines = kept.removesuffix("\n\n</details>").split("\n") if kept else []
        assert kept_lines == lines[: len(kept_lines)]
        if len(kept_lines) > 1:
            assert len(kept_lines) + n_missing in (len(lines), len(lines) + 2)
        assert kept.count("<details>") == kept.count("</details>")
        # No table without a row, no title with nothing below it.
        assert not kept_lines or re.match(r"\| [^:-]|- |### ", kept_lines[-1]) or "</details>" in kept_lines[-1]


def test_thousands_of_tests_fit_into_a_summary() -> None:
    names = [f"tests/test_{'long' * 20}.py::test_{i}[模型]" for i in range(1200)]
    page = render_github(regressions(*names))
    assert len(page.encode()) > SUMMARY_LIMIT_BYTES
    cut = cut_page(page, SUMMARY_LIMIT_BYTES)
    assert SUMMARY_LIMIT_BYTES - 5000 < len(cut.encode()) <= SUMMARY_LIMIT_BYTES
    assert cut.startswith("### torchledger: REGRESSION")
    assert cut.count("<details>") == cut.count("</details>")
