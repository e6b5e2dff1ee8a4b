"""``torchledger run SCRIPT ARGS...``: a program as it is, with a report at its end."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torchledger.cli.options import read_count
from torchledger.cli.output import say
from torchledger.cli.scripts import Target, check_target, run_target
from torchledger.errors import ReportWriteError, UsageError
from torchledger.journal.files import check_writable

if TYPE_CHECKING:
    from torchledger.ledger import Ledger

USAGE_ERROR = 2


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    options = "[-h] [--json PATH] [--tokens-per-step N] [--audit]"
    parser.usage = f"%(prog)s {options} SCRIPT ARGS...\n       %(prog)s {options} -m MODULE ARGS..."
    parser.add_argument(
        "--json",
        metavar="PATH",
        default=None,
        help="also write the report as JSON; under torchrun {rank} in PATH becomes the rank, which is added otherwise",
    )
    parser.add_argument(
        "--tokens-per-step", metavar="N", help="tokens that a step trains on, as in 4096 or 4k, for FLOPs a token"
    )
    parser.add_argument(
        "--audit",
        action="store_true",
        help="run one step under the profiler too, and list what ops hold inside themselves on the CPU",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module by its name, as python -m does")
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS...", help="what to run, as for python"
    )


def execute(arguments: argparse.Namespace) -> int:
    """Runs the program, prints the report to stderr, and returns the program's own exit code."""
    target = read_target(arguments.program, is_module=arguments.is_module)
    check_target(target)
    given = arguments.tokens_per_step
    tokens = None if given is None else read_count("--tokens-per-step", given)
    rank = read_rank(os.environ)
    path = None if arguments.json is None else rank_path(arguments.json, rank).absolute()
    if path is not None:
        check_writable(path)  # before the program has run for hours
    from torchledger.ledger import Ledger, count_steps  # brings torch, which no refusal above needs

    ledger = count_steps(Ledger(tokens_per_step=tokens, audit=arguments.audit))
    process = os.getpid()

    def deliver(code: int) -> int:
        if os.getpid() != process:  # a fork that came out at the end of the program: the report is its parent's
            return code
        return _deliver(ledger, path, code, quiet=rank not in (None, 0))

    return run_target(target, ledger, deliver)


def read_target(words: list[str], *, is_module: bool) -> Target:
    """What the words after the options name.

    Raises:
        UsageError: they are none.

    >>> read_target(["train.py", "--lr", "0.1"], is_module=False)
    Target(name='train.py', arguments=('--lr', '0.1'), is_module=False)
    """
    words = words[1:] if words[:1] == ["--"] else words
    if not words:
        raise UsageError("nothing to run: give the path of a Python file, or -m and a module's name.")
    return Target(words[0], tuple(words[1:]), is_module)


def read_rank(environ: Mapping[str, str]) -> int | None:
    """This process's rank under torchrun; ``None`` without it.

    >>> read_rank({"RANK": "3", "WORLD_SIZE": "8"}), read_rank({})
    (3, None)
    """
    rank = environ.get("RANK", "")
    return int(rank) if rank.isdecimal() and rank.isascii() and "WORLD_SIZE" in environ else None


def rank_path(path: str, rank: int | None) -> Path:
    """The path of one rank's report: ``{rank}`` becomes the rank, or ``.rankN`` comes before the suffix.

    >>> rank_path("out/report.json", 3).as_posix(), rank_path("out/{rank}.json", 3).as_posix()
    ('out/report.rank3.json', 'out/3.json')
    >>> rank_path("report.json", None).as_posix(), rank_path("{rank}.json", None).as_posix()
    ('report.json', '0.json')
    """
    if "{rank}" in path:
        return Path(path.replace("{rank}", str(rank or 0)))
    whole = Path(path)
    return whole if rank is None else whole.with_name(f"{whole.stem}.rank{rank}{whole.suffix}")


def _deliver(ledger: Ledger, path: Path | None, code: int, *, quiet: bool) -> int:
    """Writes and prints the report; a failure here never hides how the program ended, nor one the other."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()  # the program's output comes first
    try:
        report = ledger.report
        unwritten: ReportWriteError | None = None
        try:
            if path is not None:
                report.save(path)  # first: the program may have closed the stream that the tables go to
        except ReportWriteError as error:
            unwritten = error
        if not quiet:
            say(f"\n{report}", to_stderr=True)
        if unwritten is not None:
            say(f"torchledger: error: {unwritten}", to_stderr=True)
            return code or USAGE_ERROR
    except Exception:  # a fault of ours must not look like the program's
        said = f"torchledger: fault: the report could not be made. Please report this:\n{traceback.format_exc()}"
        say(said, to_stderr=True)
        return code or USAGE_ERROR
    return code
