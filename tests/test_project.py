"""The project itself: lint, format, types, declared dependencies, and that README and CI name the same command."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import torchledger

ROOT = Path(__file__).parent.parent
PACKAGE = Path(torchledger.__file__).parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def run_tool(*command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


def test_lint() -> None:
    pytest.importorskip("ruff")
    run_tool("ruff", "check", ".")


def test_format() -> None:
    pytest.importorskip("ruff")
    run_tool("ruff", "format", "--check", ".")


def test_types() -> None:
    pytest.importorskip("mypy")
    run_tool("mypy", "--strict")


def declared(requirements: list[str]) -> set[str]:
    names = {re.split(r"[^A-Za-z0-9_.-]", requirement)[0] for requirement in requirements}
    return {name.lower().replace("-", "_") for name in names}


def test_third_party_imports_are_declared_and_the_other_way_round() -> None:
    imported = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                imported.add(node.module.split(".")[0])
    third_party = imported - set(sys.stdlib_module_names) - {"torchledger"}
    required = declared(SETTINGS["project"]["dependencies"])
    extras = SETTINGS["project"]["optional-dependencies"]
    optional = declared(extras["crosscheck"]) | declared(extras["pytest"])
    assert third_party - optional - required == set(), "imported, but not declared"
    assert required - third_party == set(), "declared, but imported nowhere"


def test_ci_runs_the_test_command_of_the_readme() -> None:
    commands = re.findall(r"^pip install .* && .*$", read("README.md"), re.MULTILINE)
    assert commands == ["pip install . && torchledger demo", "pip install -e '.[dev]' && python -m pytest"]
    assert commands[1] in read(".ci/run").splitlines()


def test_ci_script_is_sound_and_executable() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_version_is_in_the_changelog() -> None:
    version = torchledger.__version__
    heading = "Unreleased" if version.endswith(".dev0") else version
    assert f"## [{heading}]" in read("CHANGELOG.md")


def test_contributing_stays_short() -> None:
    assert len(read("CONTRIBUTING.md").splitlines()) <= 60


def test_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()


def test_links_of_the_readme_hold_where_it_is_shown_alone() -> None:
    """The package index shows the README without the repository around it."""
    links = re.findall(r"\]\(([^)#\s]+)", read("README.md"))
    repository = SETTINGS["project"]["urls"]["Repository"]
    assert links
    for link in links:
        assert link.startswith("https://"), link
        path = link.removeprefix(f"{repository}/blob/main/")
        assert path == link or (ROOT / path).exists(), link


def test_the_project_says_where_it_is() -> None:
    assert set(SETTINGS["project"]["urls"]) == {"Homepage", "Documentation", "Repository", "Changelog"}
    assert all(
        url.startswith("https://github.com/torchledger/torchledger") for url in SETTINGS["project"]["urls"].values()
    )


def test_output_in_the_documentation_fits_its_column() -> None:
    """Pages that we print are 100 characters wide at most, and the column of text has room for 736 - 28 pixels."""
    style = read("docs/_static/custom.css")
    (rem,) = re.findall(r"font-size: ([0-9.]+)rem", style)
    assert 100 * 0.6 * 16 * float(rem) <= 736 - 28  # a letter of a monospaced font is 0.6 of its size
    assert "custom.css" in read("docs/conf.py")
