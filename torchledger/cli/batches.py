"""The largest value of a script's argument with which it fits: a dry run for each value that is tried."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from torchledger.cli.output import say
from torchledger.cli.scripts import Target
from torchledger.errors import UsageError
from torchledger.read.fitting import BatchTrial
from torchledger.render.fitting import batch_table
from torchledger.render.text import page_width, render_sections

_RANGE = re.compile(r"(?P<name>[^=\s]+)=(?P<low>[0-9]{1,12}):(?P<high>[0-9]{1,12})")


class BatchRange(NamedTuple):
    """An argument of a script, and the values to look among."""

    name: str
    low: int
    high: int


def parse_batch(text: str) -> BatchRange:
    """What ``--batch`` was given.

    Raises:
        UsageError: it is no ``NAME=LO:HI`` with 1 <= LO <= HI.

    >>> parse_batch("--batch-size=1:64")
    BatchRange(name='--batch-size', low=1, high=64)
    """
    match = _RANGE.fullmatch(text)
    if match is None or not 1 <= int(match["low"]) <= int(match["high"]):
        raise UsageError(f"--batch {text!r}: give NAME=LO:HI, as in --batch batch-size=1:64.")
    return BatchRange(match["name"], int(match["low"]), int(match["high"]))


def with_value(arguments: Sequence[str], name: str, value: int) -> list[str]:
    """A script's arguments with one of them set: where it stands already, or at the end as an option.

    >>> with_value(["--lr", "1", "--batch-size=4"], "batch-size", 8)
    ['--lr', '1', '--batch-size=8']
    >>> with_value(["train.batch=4"], "train.batch", 8), with_value([], "batch", 8)
    (['train.batch=8'], ['--batch', '8'])
    """
    given = list(arguments)
    spellings = [name] if name.startswith("-") else [name, f"--{name}", f"--{_turned(name)}", f"-{name}"]
    for index, word in enumerate(given):
        for spelling in spellings:
            if word.startswith(f"{spelling}="):
                return [*given[:index], f"{spelling}={value}", *given[index + 1 :]]
            if word == spelling and spelling.startswith("-"):
                return [*given[: index + 1], str(value), *given[index + 2 :]]
    return [*given, name if name.startswith("-") else f"--{name}", str(value)]


def _turned(name: str) -> str:
    return name.replace("-", "_") if "-" in name else name.replace("_", "-")


def search_batch(wanted: BatchRange, arguments: argparse.Namespace, target: Target) -> int:
    """Tries values by bisection, prints what came of each and the largest that fits; 1 where none does."""
    trials: dict[int, BatchTrial] = {}

    def fits(value: int) -> bool:
        trials[value] = trial = _try(wanted.name, value, arguments, target)
        say(f"{wanted.name} {value:,}: {'fits' if trial.fits else 'out of memory'}")
        return trial.fits

    best = find_largest(wanted.low, wanted.high, fits)
    say(f"\n{render_sections([batch_table(wanted.name, trials.values())], page_width())}\n")
    if best is None:
        say(f"Not even {wanted.name} {wanted.low:,} fits on {arguments.accelerator}.")
        return 1
    end = ", the highest value asked for" if best == wanted.high else ""
    say(f"The largest {wanted.name} that fits on {arguments.accelerator} is {best:,}{end}.")
    return 0


def find_largest(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The largest value that fits, if every smaller one does too; None where not even the lowest fits.

    >>> find_largest(1, 100, lambda value: value <= 37), find_largest(2, 9, lambda value: False)
    (37, None)
    """
    if not fits(low):
        return None
    step = 1
    good, bad = low, high + 1
    while good < high and good + step < bad:  # by doubling at first: small runs are quick
        value = min(good + step, high)
        if not fits(value):
            bad = value
            break
        good, step = value, step * 2
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


def _try(name: str, value: int, arguments: argparse.Namespace, target: Target) -> BatchTrial:
    with tempfile.TemporaryDirectory(prefix="torchledger-") as folder:
        path = Path(folder) / "report.json"
        command = [sys.executable, "-m", "torchledger", "dryrun", "--json", str(path)]
        command += ["--accelerator", arguments.accelerator, "--steps", str(arguments.steps)]
        command += ["--data-dependent", arguments.data_dependent]
        command += [] if arguments.capacity is None else ["--capacity", arguments.capacity]
        command += [f"--alloc-conf={arguments.alloc_conf}"] if arguments.alloc_conf else []
        command += ["-m"] if target.is_module else []
        command += [target.name, *with_value(target.arguments, name, value)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        verdict = done.stdout.rfind("\nFits on "), done.stdout.rfind("\nDoes not fit on ")
        if max(verdict) < 0:
            raise UsageError(
                f"the program failed with {name} {value}, before it could be said whether it fits:\n"
                f"{(done.stderr or done.stdout).strip()[-2000:]}"
            )
        return BatchTrial(value, verdict[0] > verdict[1], _reserved(path))


def _reserved(path: Path) -> int | None:
    """The highest reserved peak in a report, None where it has none."""
    try:
        steps = json.loads(path.read_text(encoding="utf-8"))["steps"]
        return max(int(step["memory"]["cuda:0"]["reserved_peak_bytes"]) for step in steps)
    except (OSError, ValueError, KeyError):
        return None
