"""``torchledger dryrun SCRIPT ARGS...``: a program on a GPU that is not there, and whether it would fit."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from torchledger.accelerators import find_accelerator
from torchledger.allocator.caching import CachingAllocator
from torchledger.cli.batches import BatchRange, parse_batch, search_batch
from torchledger.cli.options import read_count
from torchledger.cli.output import say
from torchledger.cli.run import USAGE_ERROR, read_target
from torchledger.cli.scripts import check_target, run_target
from torchledger.errors import ReportWriteError, UsageError
from torchledger.journal.files import check_writable
from torchledger.read.fitting import judge_fit
from torchledger.render.fitting import fit_sections
from torchledger.render.names import clean
from torchledger.render.text import page_width, render_sections
from torchledger.units import parse_bytes

if TYPE_CHECKING:
    from torchledger.ledger import Ledger
    from torchledger.simulation.device import SimulatedDevice, Simulation

TOO_SMALL = 1


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    options = "--accelerator NAME [--capacity SIZE] [--alloc-conf CONF] [--steps N] [--batch NAME=LO:HI] [--json PATH]"
    parser.usage = f"%(prog)s {options} SCRIPT ARGS...\n       %(prog)s {options} -m MODULE ARGS..."
    add = parser.add_argument
    add("--accelerator", metavar="NAME", required=True, help="the GPU, as `torchledger accelerators` lists it")
    add(
        "--capacity", metavar="SIZE", help="what the allocator may take, as in 80GB; by default what the driver reports"
    )
    add("--alloc-conf", metavar="CONF", default="", help="settings as in PYTORCH_CUDA_ALLOC_CONF")
    add("--steps", metavar="N", default="2", help="end the program after so many training steps; default 2")
    add(
        "--batch",
        metavar="NAME=LO:HI",
        help="an argument of the script: find the largest value from LO to HI with which it fits",
    )
    add("--data-dependent", choices=("worst", "balanced"), default="worst", help="what ops keep that depend on values")
    add("--json", metavar="PATH", help="also write the report as JSON")
    add("-m", dest="is_module", action="store_true", help="run a module by its name, as python -m does")
    add("program", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS...", help="what to run, as for python")


def execute(arguments: argparse.Namespace) -> int:
    """Runs the program on a simulated device, prints its report and the verdict; 1 where the device is too small."""
    target = read_target(arguments.program, is_module=arguments.is_module)
    check_target(target)
    arguments.steps = read_count("--steps", arguments.steps)
    find_accelerator(arguments.accelerator)
    capacity = None if arguments.capacity is None else parse_bytes(arguments.capacity)
    CachingAllocator(arguments.alloc_conf, capacity_bytes=capacity)  # refuses what it cannot read
    path = None if arguments.json is None else Path(arguments.json).absolute()
    if path is not None:
        check_writable(path)
    if arguments.batch is not None:
        return search_batch(_batch_range(arguments), arguments, target)
    from torchledger.simulation.device import Simulation  # brings torch, which no refusal above needs

    simulation = Simulation(arguments.accelerator, arguments.alloc_conf, capacity, arguments.data_dependent, True)
    around = _DryRun(simulation, arguments.steps)
    return run_target(target, around, lambda code: _deliver(around, arguments.alloc_conf, path, code))


def _batch_range(arguments: argparse.Namespace) -> BatchRange:
    if arguments.json is not None:
        raise UsageError("--batch runs the program many times: leave --json out, and write it from a run of one value.")
    return parse_batch(arguments.batch)


class _DryRun:
    """The context in which the program runs: a simulated device, and a ledger that ends it after its steps."""

    def __init__(self, simulation: Simulation, steps: int) -> None:
        self._simulation = simulation
        self._steps = steps
        self.out_of_memory: BaseException | None = None
        self.failed = False
        self.device: SimulatedDevice
        self.ledger: Ledger

    def __enter__(self) -> None:
        from torchledger.ledger import Ledger, count_steps

        self.device = self._simulation.__enter__()
        try:
            self.ledger = count_steps(Ledger(), stop_after=self._steps)
            self.ledger.__enter__()
        except BaseException:
            self._simulation.__exit__(None, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        import torch

        from torchledger.ledger import EnoughSteps

        done = isinstance(error, EnoughSteps)
        try:
            self.ledger.__exit__(kind, error, traceback)
        finally:
            self._simulation.__exit__(kind, error, traceback)
        if isinstance(error, torch.OutOfMemoryError):
            self.out_of_memory = error
            return True
        self.failed = error is not None and not done and not isinstance(error, SystemExit)
        return done


def _deliver(around: _DryRun, conf: str, path: Path | None, code: int) -> int:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()  # the program's output comes first
    report = around.ledger.report
    device, stats = around.device, around.device.allocator.stats
    if path is not None:
        try:
            report.save(path)
        except ReportWriteError as error:
            say(f"torchledger: error: {error}", to_stderr=True)
            code = code or USAGE_ERROR
    say(f"\n{report}\n")
    if around.failed:
        say("The program failed before its steps were done: whether it fits is not known.")
        return code
    fit = judge_fit(
        report,
        "cuda:0",
        fits=around.out_of_memory is None,
        capacity_bytes=device.capacity_bytes,
        reserved_bytes=stats.peak_reserved_bytes,
        trace=device.allocator.trace,
        settings=conf,
    )
    say(render_sections(fit_sections(fit, device.accelerator.name), page_width()))
    if around.out_of_memory is not None:
        say("\n" + "\n".join(_said(around.out_of_memory)))
        return code or TOO_SMALL
    return code


def _said(error: BaseException) -> list[str]:
    """What the error says: torch's own words, and what the ledger notes about what holds the memory."""
    words = [str(error), *getattr(error, "__notes__", [])]
    return [clean(line) for word in words for line in str(word).splitlines()]
