"""``torchledger compare BASE HEAD``: two saved reports held against each other. Starts without torch."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterable

from torchledger.cli.output import say
from torchledger.errors import UsageError
from torchledger.gate.comparison import Comparisons, compare_reports
from torchledger.gate.quantities import QUANTITIES
from torchledger.gate.report_files import read_runs
from torchledger.gate.tolerances import Tolerance, parse_keyed_tolerance
from torchledger.journal.files import shown_path
from torchledger.render.comparison import comparison_sections
from torchledger.render.github import annotation_lines, render_comparison_markdown, render_github
from torchledger.render.step_summary import append_summary, is_github
from torchledger.render.text import page_width, render_sections

Names = tuple[str, str]

FORMATS: dict[str, Callable[[Comparisons, Names], str]] = {
    "text": lambda found, names: render_sections(comparison_sections(found, names), page_width()),
    "markdown": render_comparison_markdown,
    "github": render_github,
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add = parser.add_argument
    add("base", metavar="BASE", help="the report that is held against, as run --json or Report.save wrote it")
    add("head", metavar="HEAD", help="the report that is judged; both may hold those of many tests")
    add("--format", choices=list(FORMATS), default=None, help="the default is text")
    add(
        "--tolerance",
        metavar="KEY=2%",
        action="append",
        default=None,
        help="how much a number may grow: KEY=2%%, KEY=10MiB or KEY=0, once for each key; without it nothing may on "
        "CPU and simulated devices, and 1%% or 1 MiB on others",
    )
    parser.epilog = (
        f"Keys: {', '.join(QUANTITIES)}. Exit codes: 0 nothing grew beyond its tolerance, 1 something did, 2 wrong "
        "usage or unreadable input, 3 nothing to compare."
    )


def execute(arguments: argparse.Namespace) -> int:
    """Prints the comparison, annotates it under GitHub Actions, and returns the verdict's exit code."""
    tolerances = read_tolerances(arguments.tolerance or ())
    found = compare_reports(read_runs(arguments.base), read_runs(arguments.head), tolerances=tolerances)
    names = shown_path(arguments.base), shown_path(arguments.head)
    page = FORMATS[arguments.format or "text"](found, names)
    # Whoever reads no further (`compare ... | head -1`) still gets the verdict.
    with contextlib.suppress(BrokenPipeError):
        if not is_github(os.environ):
            sys.stdout.write(page + "\n")
            return found.exit_code
        problem = append_summary(render_github(found, names), os.environ)
        if problem:
            say(f"torchledger: {problem}", to_stderr=True)
        sys.stdout.write(page + "\n")
        # The runner reads both streams; a page of Markdown is meant for a file, which no annotation belongs into.
        stream = sys.stderr if arguments.format == "markdown" else sys.stdout
        stream.writelines(f"{line}\n" for line in annotation_lines(found))
    return found.exit_code


def read_tolerances(words: Iterable[str]) -> dict[str, Tolerance]:
    """Tolerances by key, from words like ``peak=2%``.

    Raises:
        UsageError: a word is of no such form, its key is unknown, or a key is given twice.
        QuantityError: a tolerance cannot be read.

    >>> list(read_tolerances(["peak=2%", "flops=0"]))
    ['peak', 'flops']
    """
    tolerances: dict[str, Tolerance] = {}
    for word in words:
        key, tolerance = parse_keyed_tolerance(word)
        if key in tolerances:
            raise UsageError(f"--tolerance gives {key} twice: give each key once.")
        tolerances[key] = tolerance
    return tolerances
