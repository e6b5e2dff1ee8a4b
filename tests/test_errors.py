"""Errors: a slug each, in the message and in the documentation."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path

import pytest

from torchledger import errors
from torchledger.errors import TorchledgerError

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, TorchledgerError)]
DOCUMENTED = Path(__file__).parent.parent / "docs" / "errors.md"


def test_each_kind_has_a_slug_of_its_own() -> None:
    slugs = [kind.slug for kind in KINDS]
    assert len(set(slugs)) == len(slugs)


@pytest.mark.parametrize("kind", KINDS)
def test_each_slug_is_documented(kind: type[TorchledgerError]) -> None:
    assert f"\n## {kind.slug}\n" in DOCUMENTED.read_text("utf-8")


def test_the_message_ends_with_the_slug() -> None:
    error = errors.UncountedOpError("mylib.op", "blocks.0")
    assert str(error).endswith("[uncounted-op]")
    assert "mylib.op" in error.message
    assert "blocks.0" in error.message
    assert "torchledger.formula" in error.message
    assert str(errors.UnknownAcceleratorError("no such chip")) == "no such chip [unknown-accelerator]"


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (errors.UsageError, ValueError),
        (errors.QuantityError, ValueError),
        (errors.ReportFileError, ValueError),
        (errors.ReportWriteError, OSError),
        (errors.TorchVersionError, ImportError),
        (errors.UnknownAcceleratorError, KeyError),
    ],
)
def test_errors_are_what_python_calls_them(kind: type[TorchledgerError], base: type[Exception]) -> None:
    error = kind("what happened")
    assert isinstance(error, base)
    assert str(error) == f"what happened [{kind.slug}]"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
