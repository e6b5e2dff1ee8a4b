"""``torchledger show FILE``: a saved report as text, Markdown or JSON. Starts without torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from torchledger.cli.options import read_count
from torchledger.errors import UsageError
from torchledger.journal.schema import dump_run
from torchledger.reconciliation import reconcile
from torchledger.render.bridges import reconciliation_sections
from torchledger.render.markdown import render_markdown, render_sections
from torchledger.report import Report

FORMATS: dict[str, Callable[[Report], str]] = {
    "text": str,
    "markdown": render_markdown,
    "json": lambda report: _inert_json(dump_run(report, journal=bool(report.journals)).rstrip("\n")),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("file", metavar="FILE", help="a report that Report.save or torchledger run --json wrote")
    parser.add_argument("--format", choices=list(FORMATS), default="text", help="the default is text")
    parser.add_argument(
        "--reconcile",
        action="store_true",
        help="in place of the report, why its FLOPs are not 6ND and its peak not 16N",
    )
    parser.add_argument("--tokens", metavar="D", help="tokens of a step, as in 4096 or 4k, for --reconcile")


def execute(arguments: argparse.Namespace) -> int:
    """Prints the report."""
    tokens = None if arguments.tokens is None else read_count("--tokens", arguments.tokens)
    report = Report.load(arguments.file)
    if arguments.reconcile:
        sys.stdout.write(_reconciled(report, arguments.format, tokens) + "\n")
    else:
        sys.stdout.write(FORMATS[arguments.format](report) + "\n")
    return 0


def _inert_json(text: str) -> str:
    """The same JSON without ``##[``, which a runner takes for a command wherever in a line it stands."""
    return text.replace("##", "#\\u0023")


def _reconciled(report: Report, style: str, tokens: int | None) -> str:
    """The bridges of the step with the highest peak."""
    if report.peak_step is None:
        raise UsageError("the report has no step to reconcile.")
    if style == "json":
        raise UsageError("show --reconcile prints text or markdown: torchledger.reconcile gives the numbers to code.")
    found = reconcile(report.peak_step, tokens=tokens)
    if style == "text":
        return str(found)
    return render_sections(reconciliation_sections(found.flops, found.memory, found.phase_peaks))
