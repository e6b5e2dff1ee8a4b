"""The table of commands. A new one is a file and a line here."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import NamedTuple, Protocol, cast


class Command(Protocol):
    """What the file of a command holds."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""

    def execute(self, arguments: argparse.Namespace) -> int:
        """Does the work and returns the exit code: 0 fine, 1 a broken budget, 2 wrong usage, 3 nothing to compare."""


class CommandRow(NamedTuple):
    """A command's name, the module that is imported when it is called, and what it does.

    The output of a command that ``runs_script`` is the script's, and left alone.
    """

    name: str
    module: str
    summary: str
    runs_script: bool = False

    def load(self) -> Command:
        """The command itself."""
        return cast(Command, import_module(self.module))


COMMANDS = (
    CommandRow(
        "demo", "torchledger.cli.demo", "train a small GPT without and with checkpointing, ledgers side by side"
    ),
    CommandRow("run", "torchledger.cli.run", "measure a script that knows nothing of torchledger", runs_script=True),
    CommandRow("show", "torchledger.cli.show", "print a saved report"),
    CommandRow(
        "compare", "torchledger.cli.compare", "hold one saved report against another; exits 1 if something grew"
    ),
    CommandRow("napkin", "torchledger.cli.napkin", "what a training run costs: FLOPs, days, device-hours"),
    CommandRow("fit", "torchledger.cli.fit", "the largest model whose weights, gradients and optimizer state fit"),
    CommandRow("accelerators", "torchledger.cli.accelerators", "peaks, memory and bandwidths, with their sources"),
    CommandRow("dtypes", "torchledger.cli.dtypes", "what the bits of each number format can hold"),
)
