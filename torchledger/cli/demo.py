"""``torchledger demo``: train a small GPT without and with activation checkpointing, and compare the two ledgers."""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torchledger.cli.options import read_count
from torchledger.errors import UsageError
from torchledger.reconciliation import reconcile
from torchledger.render.beside import side_by_side
from torchledger.render.bridges import bridges_beside
from torchledger.render.tables import Table
from torchledger.render.text import page_width, render_sections
from torchledger.report import Report
from torchledger.units import format_number

if TYPE_CHECKING:
    from torchledger.demo.training import Training

KINDS = ("non-reentrant", "reentrant")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add = parser.add_argument
    add("--steps", default="4", metavar="N", help="optimizer steps of each run; the default is 4")
    add("--device", help="cpu, cuda or cuda:N; the default is a GPU where there is one")
    add("--checkpoint", choices=KINDS, default=KINDS[0], help=f"the kind of checkpointing; the default is {KINDS[0]}")
    add("--bf16", action="store_true", help="bfloat16 autocast on the CPU too; a GPU that knows bfloat16 always has it")
    add("--data", type=Path, metavar="PATH", help="the text, one byte a token; written and kept where it is missing")
    add("--json", type=Path, metavar="PATH", help="write both reports, each to PATH with its run's name added")


def execute(arguments: argparse.Namespace) -> int:
    """Trains twice and prints both ledgers."""
    arguments.steps = read_count("--steps", arguments.steps)
    if arguments.data:
        trainings = train_both(arguments.data, arguments)
    else:
        with tempfile.TemporaryDirectory(prefix="torchledger-") as folder:
            trainings = train_both(Path(folder) / "topics.bin", arguments)
    plain = trainings["none"]
    print(f"A byte-level GPT of {plain.n_params:,} parameters, AdamW, {plain.precision} on {plain.device},")
    ran = f"{format_number(arguments.steps, 'step')} of {format_number(plain.tokens, 'token')}"
    print(f"{ran}, without and with {arguments.checkpoint} checkpointing.")
    print()
    print(side_by_side({name: training.report for name, training in trainings.items()}, page_width()))
    print()
    print(render_sections(reconciled({name: t.report for name, t in trainings.items()}), page_width()))
    print()
    print(describe_losses(plain.losses, trainings[arguments.checkpoint].losses))
    if arguments.json:
        for name, training in trainings.items():
            path = arguments.json.with_name(f"{arguments.json.stem}-{name}{arguments.json.suffix or '.json'}")
            training.report.save(path)
            print(f"{name}: report written to {path}")
    return 0


def reconciled(reports: Mapping[str, Report]) -> tuple[Table, Table]:
    """What leads from 6·N·D to the FLOPs of each run's last step, and from 16·N to its peak."""
    steps = {name: reconcile(report.steps[-1]) for name, report in reports.items()}
    return (
        bridges_beside({name: found.flops for name, found in steps.items()}, "FLOPs of the last step: from 6·N·D"),
        bridges_beside({name: found.memory for name, found in steps.items()}, "Its peak: from 16·N bytes"),
    )


def train_both(data: Path, arguments: argparse.Namespace) -> dict[str, Training]:
    """The two runs, by the name of their kind of checkpointing; writes the text to ``data`` where it is missing.

    Raises:
        UsageError: there is no such device, or the text cannot be written or is too short.
    """
    with warnings.catch_warnings():
        # torch does without numpy, as the demo does, but says so at its import.
        warnings.filterwarnings("ignore", "Failed to initialize NumPy")
        # Imported here, since torch is: a call for help starts in a fraction of a second.
        from torchledger.demo.model import GPTConfig
        from torchledger.demo.text import write_tokens
        from torchledger.demo.training import choose_device, train

    device = choose_device(arguments.device)
    try:
        if not data.exists():
            write_tokens(data)
        return {
            kind: train(data, GPTConfig(checkpoint=kind), steps=arguments.steps, device=device, bf16=arguments.bf16)
            for kind in ("none", arguments.checkpoint)
        }
    except OSError as error:
        raise UsageError(f"--data {data}: {error.strerror or error}.") from error


def describe_losses(plain: tuple[float, ...], checkpointed: tuple[float, ...]) -> str:
    """First and last loss, and whether both runs have the same.

    >>> describe_losses((5.0, 4.0), (5.0, 4.0))
    'loss 5.0000 -> 4.0000, bit by bit the same in both runs'
    >>> describe_losses((5.0, 4.0), (5.0, 4.1))
    'loss 5.0000 -> 4.0000, with checkpointing 5.0000 -> 4.1000'
    """
    first, second = (f"{losses[0]:.4f} -> {losses[-1]:.4f}" for losses in (plain, checkpointed))
    if plain == checkpointed:
        return f"loss {first}, bit by bit the same in both runs"
    return f"loss {first}, with checkpointing {second}"
