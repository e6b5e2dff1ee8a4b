"""What the command line prints: no character that a stream lacks, and no line that a runner takes for a command."""

from __future__ import annotations

import codecs
import contextlib
import io
import sys
from typing import TextIO

from torchledger.render.names import inert

_PLAIN = str.maketrans({"·": "*", "×": "x", "−": "-", "–": "-", "’": "'", "…": "..."})
_HANDLER = "torchledger-plain"


def _replace_unknown(error: UnicodeError) -> tuple[str, int]:
    """In place of what an encoding lacks: a plain character that means the same, else an escape."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end].translate(_PLAIN)
    return lacking.encode("ascii", "backslashreplace").decode("ascii"), error.end


codecs.register_error(_HANDLER, _replace_unknown)


def make_forgiving(stream: TextIO | None) -> None:
    """Lets a stream of our own process write what its encoding lacks in other words, rather than fail."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors=_HANDLER)


def say(text: str, *, to_stderr: bool = False) -> None:
    """Prints beside a script, whose streams are left as they are: each may be closed by now, or lack characters.

    >>> say("a·b")
    a·b
    """
    streams = (sys.stderr, sys.__stderr__) if to_stderr else (sys.stdout, sys.__stdout__)
    for stream in streams:
        if stream is not None and not stream.closed:
            encoding = getattr(stream, "encoding", None) or "utf-8"
            with contextlib.suppress(OSError, ValueError, LookupError):
                words = inert(text).encode(encoding, _HANDLER).decode(encoding)
                print(words, file=stream, flush=True)
                return
