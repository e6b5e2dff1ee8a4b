"""The settings of the gate: one table of options, read from flags, the environment and ``[tool.torchledger]``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torchledger.errors import TorchledgerError, UsageError

_PREFIX = "TORCHLEDGER_"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class Option:
    """One setting: a flag of pytest, a variable of the environment and, where that makes sense, a key of the file.

    The flag wins over the environment, the environment over the file, and the file over the default.
    """

    key: str
    kind: Literal["switch", "path", "tolerance"]
    flag: str
    variable: str
    in_file: bool
    default: str
    help: str

    @property
    def metavar(self) -> str:
        """What stands for the value in ``--help``."""
        return {"path": "PATH", "tolerance": "PERCENT"}.get(self.kind, "")


OPTIONS = (
    Option(
        *("update", "switch", "--ledger-update", "TORCHLEDGER_UPDATE"),
        in_file=False,
        default="off",
        help="write the numbers that moved into the baselines, instead of failing",
    ),
    Option(
        *("prune", "switch", "--ledger-prune", "TORCHLEDGER_PRUNE"),
        in_file=False,
        default="off",
        help="remove baseline entries that no test uses, after a whole run that passed",
    ),
    Option(
        *("budgets", "switch", "--ledger-budgets", "TORCHLEDGER_BUDGETS"),
        in_file=True,
        default="off",
        help="list all budgets at the end, with how much of each was used, not only those nearly used up",
    ),
    Option(
        *("report", "path", "--ledger-report", "TORCHLEDGER_REPORT"),
        in_file=True,
        default="none",
        help="write the reports of all measured tests into one JSON file",
    ),
    Option(
        *("tolerance", "tolerance", "--ledger-tolerance", "TORCHLEDGER_TOLERANCE"),
        in_file=True,
        default="exact; on accelerators 1 % or 1 MiB",
        help="a percentage by which numbers may differ from budgets and baselines, where a test does not say",
    ),
)
"""All options; the table in the documentation is made of it."""

FILE = "pyproject.toml"
TABLE = "[tool.torchledger]"


@dataclass(frozen=True, slots=True)
class Settings:
    """What flags, environment and file say together; ``limits`` are the budgets of every test, as they were written."""

    update: bool = False
    prune: bool = False
    budgets: bool = False
    report: Path | None = None
    tolerance: str | None = None
    limits: dict[str, object] = field(default_factory=dict)


def read_table(path: Path) -> dict[str, object]:
    """The table ``[tool.torchledger]`` of a ``pyproject.toml``; empty where there is none.

    Raises:
        UsageError: the file cannot be read, or has something other than a table there.

    >>> read_table(Path("no/such/pyproject.toml"))
    {}
    """
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}.") from None
    if b"torchledger" not in content:
        return {}  # saves most projects the parsing
    import tomllib

    try:
        tool = tomllib.loads(content.decode("utf-8")).get("tool", {})
    except ValueError as error:
        raise UsageError(f"{path} is not TOML: {error}.") from None
    table = tool.get("torchledger", {}) if isinstance(tool, dict) else {}
    if not isinstance(table, dict):
        raise UsageError(f"{path}: tool.torchledger is {table!r}: make it a table, {TABLE}.")
    return table


def resolve_settings(
    flags: Mapping[str, object], environment: Mapping[str, str], table: Mapping[str, object], folders: tuple[Path, Path]
) -> Settings:
    """The settings in force: flag over environment over file over default.

    Args:
        flags: by option key; None for a flag that was not given.
        environment: variables by name; an empty one counts as not set.
        table: what `read_table` gave.
        folders: what relative paths start from, for flags and variables and for the file.

    Raises:
        UsageError: a key is unknown, with a suggestion, or a value cannot be read.
        QuantityError: a budget cannot be read, with the forms that can.

    >>> here = Path("here")
    >>> variables = {"TORCHLEDGER_TOLERANCE": "1%"}
    >>> resolve_settings({"tolerance": None}, variables, {"tolerance": "2%"}, (here, here)).tolerance
    '1%'
    """
    limits = _check_table(table)
    _check_variables(environment)
    found: dict[str, object] = {}
    for option in OPTIONS:
        for value, name, folder in _sources(option, flags, environment, table, folders):
            found[option.key] = _read_value(option, value, name, folder)
            break
    return Settings(**found, limits=limits)  # type: ignore[arg-type]


def _sources(
    option: Option,
    flags: Mapping[str, object],
    environment: Mapping[str, str],
    table: Mapping[str, object],
    folders: tuple[Path, Path],
) -> Iterator[tuple[object, str, Path]]:
    """The values that are given for an option, the one that wins first, each with the name of its source."""
    if flags.get(option.key) is not None:
        yield flags[option.key], option.flag, folders[0]
    if environment.get(option.variable):
        yield environment[option.variable], option.variable, folders[0]
    if option.key in table:
        yield table[option.key], f"{FILE}, {TABLE}, {option.key}", folders[1]


def _read_value(option: Option, value: object, source: str, folder: Path) -> object:
    if option.kind == "switch":
        if isinstance(value, bool):
            return value
        word = str(value).strip().lower()
        if word not in _TRUE + _FALSE:
            raise UsageError(f"{source}={value!r}: write one of {', '.join(_TRUE + _FALSE)}.")
        return word in _TRUE
    if option.kind == "path":
        if not isinstance(value, str) or not value.strip() or "\0" in value:
            raise UsageError(f"{source}: {value!r} is no path: give the path of a file, such as 'ledger.json'.")
        return folder / Path(value).expanduser()
    from torchledger.gate.budgets import parse_share

    try:
        parse_share(value, "tolerance")
    except TorchledgerError as error:
        raise UsageError(f"{source}: {error.message}") from None
    return value


def _check_variables(environment: Mapping[str, str]) -> None:
    """Refuses a variable that is one of ours misspelled; any other with our prefix may be somebody else's."""
    known = [option.variable for option in OPTIONS]
    for name in environment:
        if name.startswith(_PREFIX) and name not in known:
            import difflib

            near = difflib.get_close_matches(name[:60], known, n=1, cutoff=0.93)
            if near:
                raise UsageError(f"there is no variable {name}: did you mean {near[0]}?")


def _check_table(table: Mapping[str, object]) -> dict[str, object]:
    """The budgets of the table, once all its keys and values are known to be good."""
    if not table:
        return {}
    from torchledger.gate.budgets import parse_limits
    from torchledger.gate.quantities import QUANTITIES

    where = f"{FILE}, {TABLE}"
    options = {option.key: option for option in OPTIONS}
    for key, value in table.items():
        if key in options and not options[key].in_file:
            raise UsageError(
                f"{where}: {key} is not for the file, where it would accept or remove everything, always: "
                f"give {options[key].flag} when you mean it."
            )
        if key not in options and key not in QUANTITIES:
            known = [name for name, option in options.items() if option.in_file] + list(QUANTITIES)
            import difflib

            near = difflib.get_close_matches(key[:60], known, n=2, cutoff=0.7)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(known)}."
            raise UsageError(f"{where}: unknown key {key!r}: {hint}")
        if isinstance(value, Mapping):
            raise UsageError(f"{where}: {key} is a table: give one value; budgets by parameter id are for the marker.")
    limits = {key: value for key, value in table.items() if key in QUANTITIES}
    try:
        parse_limits(limits, TABLE)
    except TorchledgerError as error:
        raise UsageError(f"{FILE}: {error.message}") from None
    return limits


def is_ci(environment: Mapping[str, str]) -> bool:
    """Whether tests run in continuous integration, as pytest decides it: ``CI`` or ``BUILD_NUMBER`` is not empty.

    >>> is_ci({"CI": "true"}), is_ci({"CI": "", "HOME": "/"})
    (True, False)
    """
    return bool(environment.get("CI") or environment.get("BUILD_NUMBER"))
