"""What GitHub's runner takes for a command, by its own rule: an oracle for everything that we print."""

from __future__ import annotations

import re

HOSTILE = (
    "::error::a",
    "  ::set-env name=A::b",
    "\n::error::c",
    "a\r::warning::d",
    "##[error]e",
    "a ##[group]f",
    "a\x1b[31mred\x1b[0m",
    "\u2028::notice::g",
    "\x85::notice::h",
    "a\x0b::error::i",
    "###[command]j",
    "##vso[task.setvariable]k",
    "\u202etxt.exe",
    "|`*_<b>@everyone",
)
"""Names that end a line, begin a command, colour a terminal or turn the direction of its text."""


def find_commands(output: str) -> list[str]:
    """The lines of an output that are commands: .NET ends one at ``\\n`` or ``\\r``, and trims it before it looks."""
    lines = re.split(r"\r\n|\n|\r", output)
    return [line for line in lines if line.strip().startswith("::") or re.search(r"##(vso)?\[", line)]


def find_controls(output: str) -> list[str]:
    """Characters that do something else than be shown, but for ends of lines."""
    return [character for character in output if not character.isprintable() and character != "\n"]
