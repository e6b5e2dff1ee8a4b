"""``torchledger show FILE``: a saved report as text, Markdown or JSON. Starts without torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from torchledger.journal.schema import dump_run
from torchledger.render.markdown import render_markdown
from torchledger.report import Report

FORMATS: dict[str, Callable[[Report], str]] = {
    "text": str,
    "markdown": render_markdown,
    "json": lambda report: dump_run(report, journal=bool(report.journals)).rstrip("\n"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("file", metavar="FILE", help="a report that Report.save or torchledger run --json wrote")
    parser.add_argument("--format", choices=list(FORMATS), default="text", help="the default is text")


def execute(arguments: argparse.Namespace) -> int:
    """Prints the report."""
    sys.stdout.write(FORMATS[arguments.format](Report.load(arguments.file)) + "\n")
    return 0
