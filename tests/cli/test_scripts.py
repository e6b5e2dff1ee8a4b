"""Programs run as Python runs them. Oracle: Python itself, on the same program; torch is not needed here."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

OURS = textwrap.dedent(
    """
    import contextlib, sys
    from torchledger.cli.scripts import Target, run_target
    from torchledger.errors import UsageError
    is_module = sys.argv[1] == "-m"
    words = sys.argv[1 + is_module:]
    if not sys.flags.safe_path:
        sys.path[0] = "/somewhere/else"
    try:
        code = run_target(Target(words[0], tuple(words[1:]), is_module), contextlib.nullcontext())
    except UsageError as error:
        sys.exit(f"refused: {error}")
    sys.exit(code)
    """
)


def run(folder: Path, *words: str, ours: bool, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *flags, *(["-c", OURS] if ours else []), *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=60)


PROGRAMS = {
    "prints": "print('out'); import sys; print('err', file=sys.stderr)",
    "looks around": """
        import sys, __main__
        print(sys.argv, sys.path[0], __name__, __file__, __package__, __spec__ and __spec__.name)
        print(__main__.__dict__ is globals(), sys.modules["__main__"] is __main__)
        print("/somewhere/else" in sys.path, type(__loader__).__name__, __builtins__.__name__, __doc__)
        import beside
    """,
    "exits with nothing": "raise SystemExit",
    "exits with none": "import sys; sys.exit(None)",
    "exits with 0": "import sys; sys.exit(0)",
    "exits with 7": "import sys; sys.exit(7)",
    "exits with 300": "import sys; sys.exit(300)",
    "exits with -1": "import sys; sys.exit(-1)",
    "exits with true": "import sys; sys.exit(True)",
    "exits with a text": "import sys; sys.exit('what went wrong')",
    "exits with a list": "import sys; sys.exit([1, 2])",
    "exits at the end of a function": "def f():\n    exit(4)\nf()",
    "raises": "def f(x):\n    return 1 / x\nf(0)",
    "raises from": "try:\n    {}['a']\nexcept KeyError as e:\n    raise RuntimeError('more') from e",
    "raises in handling": "try:\n    {}['a']\nexcept KeyError:\n    int('x')",
    "raises a group": "raise ExceptionGroup('both', [ValueError(1), TypeError(2)])",
    "raises with a note": "e = ValueError('x'); e.add_note('held by blocks.0'); raise e",
    "does not parse": "print('never')\ndef f(:\n    pass\n",
    "has an odd encoding": "# coding: latin-1\nprint('é')",
    "imports what is not there": "import no_such_module_at_all",
    "has a hook of its own": "import sys; sys.excepthook = lambda *a: print('hook', a[0].__name__); 1 / 0",
    "leaves something for the exit": """
        import atexit, sys
        value = 5
        atexit.register(lambda: print("later", value, sys.modules["__main__"].value))
        sys.exit(3)
    """,
    "pickles its own class": """
        import pickle
        class Thing:
            pass
        print(type(pickle.loads(pickle.dumps(Thing()))) is Thing)
    """,
    "spawns": """
        import multiprocessing
        def work(x):
            return x * 2
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(work, [1, 2]))
    """,
    "goes elsewhere": "import os; os.chdir('/'); print(__file__); 1 / 0",
    "defines annotations": "x: int = 3\nprint(__annotations__)",
    "closes its output": "import sys; sys.stdout.close()",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_script_runs_as_python_runs_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("print('beside', __name__)")
    (tmp_path / "program.py").write_text(
        textwrap.dedent(PROGRAMS[name]), "latin-1" if "latin" in PROGRAMS[name] else "utf-8"
    )
    words = ("program.py", "a", "--json", "-m", "--", "-h")
    python, ours = run(tmp_path, *words, ours=False), run(tmp_path, *words, ours=True)
    assert ours.stdout == python.stdout
    assert ours.stderr == python.stderr
    assert ours.returncode == python.returncode


@pytest.mark.parametrize("name", ["looks around", "raises", "exits with 7", "does not parse", "spawns"])
def test_a_module_runs_as_python_runs_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("print('beside', __name__)")
    package = tmp_path / "package" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "package" / "__init__.py").write_text("print('package', __name__)")
    for path in (tmp_path / "single.py", package / "__init__.py", package / "__main__.py", package / "leaf.py"):
        path.write_text(textwrap.dedent(PROGRAMS[name]) if path.name != "__init__.py" else "")
    for module in ("single", "package.inner", "package.inner.leaf"):
        if name == "spawns" and module == "package.inner":
            continue  # Python's own children do not find the __main__ of a package, and hang
        words = ("-m", module, "-m", "--json", "x")
        python, ours = run(tmp_path, *words, ours=False), run(tmp_path, *words, ours=True)
        assert ours.returncode == python.returncode
        assert ours.stdout == python.stdout
        runpy = [line for line in python.stderr.splitlines() if "runpy" in line]
        assert ours.stderr.splitlines() == [line for line in python.stderr.splitlines() if line not in runpy]


def test_a_folder_and_an_archive_run_as_python_runs_them(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text(
        textwrap.dedent(PROGRAMS["looks around"]).replace("import beside", "import near")
    )
    (tmp_path / "app" / "near.py").write_text("print('near')")
    subprocess.run([sys.executable, "-m", "zipapp", "app"], cwd=tmp_path, check=True)
    for program in ("app", "app.pyz"):
        python, ours = run(tmp_path, program, "x", ours=False), run(tmp_path, program, "x", ours=True)
        assert (ours.stdout, ours.stderr, ours.returncode) == (python.stdout, python.stderr, python.returncode)


def test_links_and_compiled_files(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    source = tmp_path / "real" / "program.py"
    source.write_text("import sys; print(sys.path[0], sys.argv, __file__); import beside")
    (tmp_path / "real" / "beside.py").write_text("print('beside')")
    (tmp_path / "link.py").symlink_to(source)
    subprocess.run(
        [sys.executable, "-c", "import py_compile; py_compile.compile('real/program.py', 'real/c.pyc')"],
        cwd=tmp_path,
        check=True,
    )
    (tmp_path / "noext").write_text(source.read_text().replace("import beside", ""))
    for program in ("link.py", "real/c.pyc", "noext"):
        python, ours = run(tmp_path, program, ours=False), run(tmp_path, program, ours=True)
        assert (ours.stdout, ours.stderr, ours.returncode) == (python.stdout, python.stderr, python.returncode)


def test_the_safe_path_stays_safe(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys; print(sys.path)")
    python, ours = (run(tmp_path, "program.py", ours=ours, flags=("-P",)) for ours in (False, True))
    assert ours.stdout == python.stdout


@pytest.mark.parametrize("source", ["x = 1\0", "# coding: nonsense\nprint('x')"])
def test_what_is_no_python_fails_as_a_syntax_error(source: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(source)
    done = run(tmp_path, "program.py", ours=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("SyntaxError: ")
    assert "Traceback" not in done.stderr


def test_an_interrupt_is_130(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("def f():\n    raise KeyboardInterrupt\nf()")
    python, ours = run(tmp_path, "program.py", ours=False), run(tmp_path, "program.py", ours=True)
    assert ours.returncode == 130
    assert ours.stderr == python.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("none.py",), "there is no script none.py"),
        (("folder",), "folder is a folder without a __main__.py"),
        (("-m", "no_such_module"), "there is no module 'no_such_module'"),
        (("-m", "os.no_such_module"), "there is no module 'os.no_such_module'"),
        (("-m", "__main__"), "there is no module '__main__'"),
        (("-m", "..odd"), "there is no module '..odd'"),
        (("-m", "sys"), "'sys' holds no Python code"),
        (("-m", "folder"), "there is no module 'folder'"),
    ],
)
def test_what_is_not_there_is_refused(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    done = run(tmp_path, *words, ours=True)
    assert done.returncode == 1  # of `OURS`, which ends with a text
    assert f"refused: {said}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_package_that_fails_is_the_programs_failure(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text("import no_such_module_at_all")
    done = run(tmp_path, "-m", "broken.leaf", ours=True)
    assert done.returncode == 1
    assert "No module named 'no_such_module_at_all'" in done.stderr
    assert "refused" not in done.stderr
    assert "torchledger" not in done.stderr
