"""The documentation builds without a warning, what it shows is what runs print, and every error has its entry."""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import torchledger.errors
from torchledger.errors import TorchledgerError

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)]
FENCE = re.compile(
    r"^```(?P<language>python|pycon|console)\n(?P<code>.*?)^```\n(?:\s*^```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


class Block(NamedTuple):
    """One fenced block of a page; ``output`` is the ``text`` block that follows a ``python`` block at once."""

    language: str
    code: str
    line: int
    output: str | None


def blocks_of(text: str) -> Iterator[Block]:
    for found in FENCE.finditer(text):
        yield Block(found["language"], found["code"], text.count("\n", 0, found.start("code")) + 1, found["output"])


def check_output(name: str, line: int, expected: str, printed: str) -> None:
    """Compare as doctest does: any white space is like any other, and ``...`` stands for anything."""
    same = doctest.OutputChecker().check_output(expected, printed, FLAGS)
    if not same:
        raise AssertionError(f"{name}, line {line}\nThe page says:\n{expected}\nThe run printed:\n{printed}")


def run_python(block: Block, name: str, namespace: dict[str, object]) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\n" * (block.line - 1) + block.code, name, "exec"), namespace)
    if block.output is not None:
        check_output(name, block.line, block.output, printed.getvalue())


def run_pycon(block: Block, name: str, namespace: dict[str, object]) -> None:
    test = doctest.DocTestParser().get_doctest(block.code, namespace, name, name, block.line - 1)
    runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    report: list[str] = []
    runner.run(test, out=report.append, clear_globs=False)
    if runner.failures:
        raise AssertionError("".join(report))
    namespace.update(test.globs)


def run_console(block: Block, name: str) -> None:
    """Run each ``$ torchledger ...`` of a block, and compare with what follows it up to the next command."""
    for command, expected in re.findall(r"^\$ torchledger (.*)\n((?:(?!\$ ).*\n)*)", block.code, re.MULTILINE):
        arguments = shlex.split(command, comments=True)
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # the pages show what a CPU gives
        done = subprocess.run(
            [sys.executable, "-m", "torchledger", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if expected.strip():
            check_output(name, block.line, expected, done.stdout + done.stderr)
        else:
            assert done.returncode == 0, done.stderr


def run_blocks(text: str, name: str) -> None:
    """Run all blocks of a page in order, in one namespace and in the current folder."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks_of(text):
        if block.language == "python":
            run_python(block, name, namespace)
        elif block.language == "pycon":
            run_pycon(block, name, namespace)
        else:
            run_console(block, name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_of_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    run_blocks(page.read_text("utf-8"), str(page))


@pytest.mark.parametrize(
    ("page", "says"),
    [
        ("```python\nx = 1\n```\n\n```pycon\n>>> x + 1\n3\n```\n", "Expected:\n    3\nGot:\n    2"),
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", "line 2\nThe page says:\n2\n\nThe run printed:\n1"),
        ("```console\n$ torchledger --version\ntorchledger 0.0.0\n```\n", "The page says:\ntorchledger 0.0.0"),
    ],
    ids=["pycon", "python", "console"],
)
def test_a_wrong_output_is_found(page: str, says: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(says)):
        run_blocks(page, "page.md")


def test_docs_build_without_warnings(tmp_path: Path) -> None:
    for needed in ("sphinx", "furo", "myst_parser"):
        pytest.importorskip(needed, reason=f"{needed} is not installed; it is part of the extra 'dev'")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", str(tmp_path / "trees")]
    done = subprocess.run([*command, str(DOCS), str(tmp_path / "html")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "html" / "index.html").exists()


def error_classes(base: type[TorchledgerError] = TorchledgerError) -> Iterator[type[TorchledgerError]]:
    yield base
    for child in base.__subclasses__():
        yield from error_classes(child)


def test_every_error_has_its_entry() -> None:
    defined = [kind for kind in error_classes() if kind.__module__ == torchledger.errors.__name__]
    slugs = {kind.slug for kind in defined}
    assert len(slugs) == len(defined), "two errors share a slug"
    entries = re.findall(r"^## (\S+)$", (DOCS / "errors.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(entries) == sorted(slugs)
