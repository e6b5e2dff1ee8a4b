"""``torchledger dtypes``: what the bits of each number format can hold. Starts without torch."""

from __future__ import annotations

import argparse

from torchledger.analytic.dtypes import FORMATS
from torchledger.render.devices import format_table
from torchledger.render.text import page_width, render_sections


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments: there are none."""


def execute(arguments: argparse.Namespace) -> int:
    """Prints the table."""
    print(render_sections([format_table(FORMATS.values())], page_width()))
    return 0
