"""Names as tables show them: on one line, whatever is in them."""

from __future__ import annotations

import re

_AT_BEGINNING = re.compile(r"^([^\S\n]*)::", re.MULTILINE)
_ANYWHERE = re.compile(r"##(?=\w*\[)")


def clean(text: str) -> str:
    r"""``text`` with every character that does not print as itself escaped: controls, direction marks, line ends.

    >>> clean("blocks.0"), clean("a\x1b[31m\n"), clean("模型")
    ('blocks.0', 'a\\x1b[31m\\n', '模型')
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def inert(text: str) -> str:
    r"""``text`` with no line that GitHub's runner takes for a command, as it does ``::error::`` and ``##[error]``.

    For the runner it is one if two colons begin the line, be they indented, or if ``##[`` stands anywhere in it,
    whatever program printed it.

    >>> print(inert("  ::error::a\na::b ##[group]c"))
      \x3a:error::a
    a::b \x23#[group]c
    """
    return _ANYWHERE.sub(r"\\x23#", _AT_BEGINNING.sub(r"\1\\x3a:", text))


def module_label(module: str) -> str:
    """A module's path; ``(model)`` for the root.

    >>> module_label(""), module_label("blocks.0")
    ('(model)', 'blocks.0')
    """
    return clean(module) if module else "(model)"


def shorten(text: str, width: int) -> str:
    """``text`` in at most ``width`` characters, its middle left out; an indent stays.

    >>> shorten("  transformer.blocks.0.attention", 20)
    '  transfo..attention'
    """
    if len(text) <= width:
        return text
    kept = max(width - 2, 2)
    tail = kept // 2
    return f"{text[: kept - tail]}..{text[len(text) - tail :]}"


def shape_label(shape: tuple[int, ...]) -> str:
    """A shape as its sizes.

    >>> shape_label((2, 3)), shape_label(())
    ('2x3', 'scalar')
    """
    return "x".join(map(str, shape)) if shape else "scalar"
