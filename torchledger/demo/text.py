"""Real text that every Python has, as a token file: the help topics of ``pydoc``, one byte a token."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

from torchledger.errors import UsageError


def write_tokens(path: Path) -> int:
    """Write the text to ``path``, whole or not at all; returns its number of bytes, which are its tokens."""
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return len(text)


def map_tokens(path: Path) -> Tensor:
    """The bytes of a file, uint8 [n_tokens], read from disk as they are looked at.

    Raises:
        OSError: it cannot be read.
        UsageError: it is no file, or empty.
    """
    n_tokens = path.stat().st_size
    if not path.is_file() or not n_tokens:
        raise UsageError(f"{path} is no file, or empty: the demo needs text to train on.")
    path.open("rb").close()  # a file that cannot be read says so here, in better words than the mapping's
    return torch.from_file(str(path), shared=False, size=n_tokens, dtype=torch.uint8)


def draw_batch(tokens: Tensor, batch: int, seq: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """``batch`` random windows of the text and, for each token, the one that follows.

    Args:
        tokens: uint8 [n_tokens].
        batch: B, the number of windows.
        seq: T, the length of each.
        generator: where the windows come from.

    Returns:
        Two int64 tensors [B, T].

    Raises:
        UsageError: the text is shorter than one window.
    """
    if len(tokens) < seq + 1:
        raise UsageError(f"the text has {len(tokens)} tokens; one window takes {seq + 1}.")
    starts = torch.randint(len(tokens) - seq, (batch,), generator=generator).tolist()
    windows = torch.stack([tokens[start : start + seq + 1] for start in starts]).long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
