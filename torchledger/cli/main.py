"""The command ``torchledger``: finds the command, imports only that one, and turns errors into one line."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence

from torchledger._version import __version__
from torchledger.cli.commands import COMMANDS
from torchledger.cli.output import make_forgiving, say
from torchledger.errors import TorchledgerError
from torchledger.render.names import clean

USAGE_ERROR = 2
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Carries out a command line and returns the exit code.

    Args:
        argv: the words after ``torchledger``; those of the process if left out.

    Raises:
        SystemExit: the words are no command, or ask for help or the version.

    >>> main(["show", "no/such/report.json"])
    2
    """
    words = list(sys.argv[1:] if argv is None else argv)
    row = next((row for row in COMMANDS if words and row.name == words[0]), None)
    if row is None:
        if not words:
            _top_parser().print_help(sys.stderr)
            return USAGE_ERROR
        _top_parser().parse_args(words)
        return USAGE_ERROR
    if sys.stdout is None:  # closed by whoever started us
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - it lives as long as the process
    if not row.runs_script:
        make_forgiving(sys.stdout)  # a name that the terminal's encoding lacks must not cost the report
    code = 0
    try:
        command = row.load()
        parser = argparse.ArgumentParser(prog=f"torchledger {row.name}", description=row.summary, allow_abbrev=False)
        command.configure(parser)
        code = command.execute(parser.parse_args(words[1:]))
        if not row.runs_script:
            sys.stdout.flush()
        return code
    except TorchledgerError as error:
        say(f"torchledger: error: {clean(str(error))}", to_stderr=True)
        return USAGE_ERROR
    except BrokenPipeError:
        # Whoever read our output has enough; what is still buffered must not raise once more at exit.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
    except KeyboardInterrupt:
        return _INTERRUPTED


def _top_parser() -> argparse.ArgumentParser:
    width = max(len(row.name) for row in COMMANDS)
    room = max(shutil.get_terminal_size().columns - 2, 40)
    wrapper = textwrap.TextWrapper(room, subsequent_indent=" " * (width + 4))
    listing = "\n".join(wrapper.fill(f"  {row.name.ljust(width)}  {row.summary}") for row in COMMANDS)
    parser = argparse.ArgumentParser(
        prog="torchledger",
        usage="torchledger [--version] COMMAND ...",
        description="Keeps the books of a PyTorch training loop: every FLOP and every byte.",
        epilog=f"commands:\n{listing}\n\n'torchledger COMMAND --help' says more of one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"torchledger {__version__}")
    parser.add_argument("command", choices=[row.name for row in COMMANDS], metavar="COMMAND", help=argparse.SUPPRESS)
    return parser
