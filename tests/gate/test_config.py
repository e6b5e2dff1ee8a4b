"""Settings: which source wins, and what is no setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchledger.errors import UsageError
from torchledger.gate.config import OPTIONS, Settings, is_ci, read_table, resolve_settings

HERE, THERE = Path("here"), Path("there")


def resolve(
    flags: dict[str, object] | None = None,
    environment: dict[str, str] | None = None,
    table: dict[str, object] | None = None,
) -> Settings:
    return resolve_settings(flags or {}, environment or {}, table or {}, (HERE, THERE))


VALUES = {
    "report": ("a.json", "b.json", "c.json", None, [HERE / "a.json", HERE / "b.json", THERE / "c.json"]),
    "tolerance": ("1%", "2%", "3%", None, ["1%", "2%", "3%"]),
    "update": (True, "0", None, False, [True, False]),
    "prune": (True, "no", None, False, [True, False]),
    "budgets": (True, "off", True, False, [True, False, True]),
}


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.key)
def test_flag_over_environment_over_file_over_default(option: object) -> None:
    key, variable = option.key, option.variable  # type: ignore[attr-defined]
    flag, word, in_file, default, found = VALUES[key]
    table = {} if in_file is None else {key: in_file}
    assert getattr(resolve({key: flag}, {variable: str(word)}, table), key) == found[0]
    assert getattr(resolve({key: None}, {variable: str(word)}, table), key) == found[1]
    if in_file is not None:
        assert getattr(resolve({key: None}, {variable: ""}, table), key) == found[2]
    assert getattr(resolve({key: None}), key) == default


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"tolerence": "2%"}, "unknown key 'tolerence': did you mean 'tolerance'?"),
        ({"activation": "2 GiB"}, "unknown key 'activation': did you mean 'activations'?"),
        ({"zzz": 1}, "unknown key 'zzz': there are budgets, report, tolerance, peak"),
        ({"peak": "2G"}, "cannot read '2G' as a size"),
        ({"peak": {"a": 1}}, "peak is a table: give one value"),
        ({"tolerance": 2}, "cannot read 2 as a tolerance: write '2%'"),
        ({"report": 5}, "5 is no path"),
        ({"report": ""}, "'' is no path"),
        ({"update": True}, "update is not for the file"),
        ({"prune": False}, "give --ledger-prune when you mean it"),
    ],
)
def test_bad_tables(table: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(table=table)
    assert says in str(caught.value)
    assert "pyproject.toml" in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("TORCHLEDGER_UPDATE", "maybe"), ("TORCHLEDGER_TOLERANCE", "2")])
def test_bad_variables(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=name):
        resolve(environment={name: value})


@pytest.mark.parametrize("name", ["TORCHLEDGER_UPDAET", "TORCHLEDGER_TOLERENCE", "TORCHLEDGER_REPORTS"])
def test_a_misspelled_variable_is_an_error(name: str) -> None:
    with pytest.raises(UsageError, match=f"no variable {name}: did you mean TORCHLEDGER_"):
        resolve_settings({}, {name: "1"}, {}, (HERE, HERE))


def test_variables_of_others_are_left_alone() -> None:
    others = {"TORCHLEDGER_HOME": "x", "TORCHLEDGER_REPORT_DIR": "x", "PYTEST_UPDATE": "x"}
    assert resolve_settings({}, others, {}, (HERE, HERE)) == Settings()


def test_budgets_of_the_file_stay_as_they_were_written() -> None:
    assert resolve(table={"peak": "2 GiB", "tolerance": "1%"}).limits == {"peak": "2 GiB"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}),
        ('[project]\ndependencies = ["torchledger"]\n', {}),
        ('[tool.torchledger]\npeak = "1 GiB"\n', {"peak": "1 GiB"}),
        ("[tool]\ntorchledger = {flops = 3}\n", {"flops": 3}),
    ],
)
def test_tables(tmp_path: Path, text: str, found: dict[str, object]) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text(text)
    assert read_table(file) == found


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[tool.torchledger", "is not TOML"),
        (b"\xff torchledger", "is not TOML"),
        (b"[tool]\ntorchledger = 3", "make it a table"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=says):
        read_table(file)


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, False),
        ({"CI": ""}, False),
        ({"CI": "false"}, True),
        ({"BUILD_NUMBER": "7"}, True),
        ({"CI": "", "BUILD_NUMBER": ""}, False),
    ],
)
def test_ci(environment: dict[str, str], found: bool) -> None:
    assert is_ci(environment) is found


def suite_says(pytester: pytest.Pytester, table: str, says: str, *words: str) -> None:
    pytester.makepyprojecttoml(table)
    pytester.makepyfile(test_it="def test_it(): pass")
    result = pytester.runpytest_inprocess("-p", "no:hypothesispytest", *words)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: *{says}*"])


def test_a_run_stops_at_a_bad_setting(pytester: pytest.Pytester) -> None:
    suite_says(pytester, "[tool.torchledger]\npeek = 1\n", "unknown key 'peek': did you mean 'peak'")
    suite_says(pytester, "[tool.torchledger\n", "*")
    suite_says(pytester, "", "--ledger-tolerance: *cannot read '2' as a tolerance", "--ledger-tolerance=2")
