"""``torchledger accelerators``: peaks, memory and bandwidths with their sources. Starts without torch."""

from __future__ import annotations

import argparse

from torchledger.accelerators import ACCELERATORS, find_accelerator
from torchledger.render.devices import accelerator_facts, accelerator_sections
from torchledger.render.text import page_width, render_sections


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    help_ = "all that is on record of these; without a name, the table of all (a wide page shows more rates)"
    parser.add_argument("names", metavar="NAME", nargs="*", help=help_)


def execute(arguments: argparse.Namespace) -> int:
    """Prints the tables, or what is known of some."""
    entries = [find_accelerator(name) for name in arguments.names]
    sections = [accelerator_facts(entry) for entry in entries] or accelerator_sections(ACCELERATORS.values())
    print(render_sections(sections, page_width()))
    return 0
