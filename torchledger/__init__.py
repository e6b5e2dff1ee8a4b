"""torchledger keeps the books of a PyTorch training loop: every FLOP and every byte, posted to its account."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchledger._version import __version__

if TYPE_CHECKING:
    from torchledger.accelerators import find_accelerator as find_accelerator
    from torchledger.allocator.caching import CachingAllocator as CachingAllocator
    from torchledger.analytic import napkin as napkin
    from torchledger.analytic.recipes import Recipe as Recipe
    from torchledger.analytic.recipes import recipe as recipe
    from torchledger.analytic.recipes import recipes as recipes
    from torchledger.analytic.transformer import TransformerSpec as TransformerSpec
    from torchledger.analytic.utilization import hfu as hfu
    from torchledger.analytic.utilization import mfu as mfu
    from torchledger.errors import BudgetExceeded as BudgetExceeded
    from torchledger.errors import TorchledgerError as TorchledgerError
    from torchledger.errors import UncountedOpError as UncountedOpError
    from torchledger.flops.crosscheck import crosscheck as crosscheck
    from torchledger.flops.registry import formula as formula
    from torchledger.gate.budgets import Budget as Budget
    from torchledger.journal.statements import Allocation as Allocation
    from torchledger.journal.statements import Copies as Copies
    from torchledger.journal.statements import FlopSplit as FlopSplit
    from torchledger.journal.statements import FlopStatement as FlopStatement
    from torchledger.journal.statements import MemorySnapshot as MemorySnapshot
    from torchledger.journal.statements import MemoryStatement as MemoryStatement
    from torchledger.journal.statements import ParameterFlops as ParameterFlops
    from torchledger.journal.statements import StepReport as StepReport
    from torchledger.ledger import Ledger as Ledger
    from torchledger.read.reconcile.bridge import Bridge as Bridge
    from torchledger.read.reconcile.bridge import Term as Term
    from torchledger.reconciliation import Reconciliation as Reconciliation
    from torchledger.reconciliation import reconcile as reconcile
    from torchledger.record.schedules import schedule as schedule
    from torchledger.report import Report as Report

_HOMES = {
    "Allocation": "journal.statements",
    "Bridge": "read.reconcile.bridge",
    "CachingAllocator": "allocator.caching",
    "Budget": "gate.budgets",
    "BudgetExceeded": "errors",
    "Copies": "journal.statements",
    "FlopSplit": "journal.statements",
    "FlopStatement": "journal.statements",
    "Ledger": "ledger",
    "MemorySnapshot": "journal.statements",
    "MemoryStatement": "journal.statements",
    "ParameterFlops": "journal.statements",
    "Recipe": "analytic.recipes",
    "Reconciliation": "reconciliation",
    "Report": "report",
    "StepReport": "journal.statements",
    "Term": "read.reconcile.bridge",
    "TorchledgerError": "errors",
    "TransformerSpec": "analytic.transformer",
    "UncountedOpError": "errors",
    "crosscheck": "flops.crosscheck",
    "find_accelerator": "accelerators",
    "formula": "flops.registry",
    "hfu": "analytic.utilization",
    "mfu": "analytic.utilization",
    "napkin": "analytic",
    "recipe": "analytic.recipes",
    "recipes": "analytic.recipes",
    "reconcile": "reconciliation",
    "schedule": "record.schedules",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    # Imported on first use: `import torch` takes over a second, and half of torchledger does without it.
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'torchledger' has no attribute {name!r}")
    value = getattr(import_module(f"torchledger.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
