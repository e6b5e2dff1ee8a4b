"""What all tests share. Helpers that several of them use live beside this file and are imported by their bare name."""

from __future__ import annotations

import os
import sys

import pytest

# Tests run in two workers: torch on one thread each keeps them out of each other's way. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nothing is ever fetched.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@pytest.fixture(autouse=True)
def same_seed() -> None:
    """Every test begins with the same random numbers, whatever ran before it in the same worker."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
