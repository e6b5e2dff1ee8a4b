"""Parts of the documentation that are written by the code they describe."""

from __future__ import annotations

import os
import subprocess
import sys

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

DASH = "–"
RATES = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8")


class MarkdownTable(SphinxDirective):
    """A table whose rows come from the package."""

    header: tuple[str, ...]

    def rows(self) -> list[list[str]]:
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        table = [self.header, ["---"] * len(self.header), *self.rows()]
        lines = ["| " + " | ".join(row) + " |" for row in table]
        holder = nodes.container()
        self.state.nested_parse(StringList(lines, source=__file__), 0, holder)
        return holder.children


class AcceleratorTable(MarkdownTable):
    """All accelerators on record."""

    header = ("name", *RATES, "GB", "TB/s", "source")

    def rows(self) -> list[list[str]]:
        from torchledger.accelerators import ACCELERATORS

        table = []
        for entry in ACCELERATORS.values():
            rates = [f"{entry.dense[name] / 1e12:,.6g}" if name in entry.dense else DASH for name in RATES]
            memory = f"{entry.memory_bytes / 1e9:g}" if entry.memory_bytes else DASH
            bandwidth = f"{entry.memory_bytes_per_s / 1e12:g}" if entry.memory_bytes_per_s else DASH
            table.append([f"`{entry.name}`", *rates, memory, bandwidth, entry.source])
        return table


class FormulaTable(MarkdownTable):
    """All ops that have a FLOP formula."""

    header = ("op", "FLOPs", "quality")

    def rows(self) -> list[list[str]]:
        import torchledger.flops.registry
        from torchledger.flops.rules import ENTRIES

        assert torchledger.flops.registry.version >= 0  # importing the registry fills the table
        return [
            [f"`{name}`", (entry.formula.__doc__ or DASH).strip().splitlines()[0].replace("|", "\\|"), entry.quality]
            for name, entry in sorted(ENTRIES.items())
        ]


class QuantityTable(MarkdownTable):
    """All numbers that budgets, baselines and tolerances name."""

    header = ("key", "what it is", "unit")

    def rows(self) -> list[list[str]]:
        from torchledger.gate.quantities import QUANTITIES

        return [[f"`{quantity.key}`", quantity.title, quantity.unit] for quantity in QUANTITIES.values()]


class OptionTable(MarkdownTable):
    """All settings of the gate."""

    header = ("flag", "variable", "key of the file", "default", "what it does")

    def rows(self) -> list[list[str]]:
        from torchledger.gate.config import OPTIONS

        return [
            [
                f"`{option.flag}{'=' if option.metavar else ''}{option.metavar}`",
                f"`{option.variable}`",
                f"`{option.key}`" if option.in_file else DASH,
                option.default,
                option.help,
            ]
            for option in OPTIONS
        ]


class CommandHelp(SphinxDirective):
    """What ``torchledger [COMMAND] --help`` prints."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        command = [sys.executable, "-m", "torchledger", *self.arguments, "--help"]
        text = subprocess.run(
            command, env={**os.environ, "COLUMNS": "100"}, capture_output=True, text=True, check=True
        ).stdout
        return [nodes.literal_block(text, text, language="text")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Make the directives known."""
    app.add_directive("accelerator-table", AcceleratorTable)
    app.add_directive("formula-table", FormulaTable)
    app.add_directive("quantity-table", QuantityTable)
    app.add_directive("option-table", OptionTable)
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True}
