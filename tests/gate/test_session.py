"""What becomes of baseline files at the end of a run, without pytest."""

from __future__ import annotations

import json
from pathlib import Path

from torchledger.gate.baselines import ANYWHERE
from torchledger.gate.properties import Check, encode_check
from torchledger.gate.session import Scope, SessionBook, find_folders, find_orphans
from torchledger.gate.spool import Spool

FILE = "__ledger__/test_a.json"
GROUP = "cpu, torch 2.13"


def write(root: Path, entries: dict[str, object], name: str = FILE, **more: object) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    document = {"schema": 1, "kind": "torchledger-baselines", "entries": entries} | more
    (root / name).write_text(json.dumps(document), "utf-8")


def names(root: Path) -> list[str]:
    return sorted(json.loads((root / FILE).read_text("utf-8"))["entries"])


def book(root: Path, *checks: Check) -> SessionBook:
    found = SessionBook(root)
    for check in checks:
        found.record_test(check.entry, encode_check(check))
    return found


def scope(*tests: str, **more: object) -> Scope:
    return Scope({FILE: {test: test for test in tests}}, frozenset(tests), **more)  # type: ignore[arg-type]


def entry(group: str = GROUP) -> dict[str, dict[str, int]]:
    return {group: {"peak": 1}, ANYWHERE: {"flops": 1}}


def test_names_with_a_hash_belong_to_the_test_they_begin_with(tmp_path: Path) -> None:
    write(tmp_path, {name: entry() for name in ("t", "t#2", "t#x", "t[#1]", "t[#1]#2", "u", "u#2")})
    checks = [Check(FILE, name, "PASS", GROUP) for name in ("t", "t[#1]")]
    made = SessionBook(tmp_path)
    for check in checks:
        made.record_test(check.entry, encode_check(check))
    outcome = made.settle(scope("t", "t[#1]"), prune=True)
    assert outcome.lines == ("baselines: 2 PASS", f"UNUSED {FILE}: removed t#2, t#x, t[#1]#2, u, u#2")
    assert names(tmp_path) == ["t", "t[#1]"]


def test_what_did_not_pass_keeps_its_entries(tmp_path: Path) -> None:
    write(tmp_path, {"t": entry(), "t#2": entry()})
    found = Scope({FILE: {"t": "t"}}, frozenset())
    assert book(tmp_path, Check(FILE, "t", "PASS", GROUP)).settle(found, prune=True).lines == ("baselines: 1 PASS",)
    assert names(tmp_path) == ["t", "t#2"]


def test_a_partial_or_failed_run_prunes_nothing(tmp_path: Path) -> None:
    for more in ({"partial": ("why",)}, {"failed": ("why",)}):
        write(tmp_path, {"t": entry(), "gone": entry()})
        outcome = book(tmp_path, Check(FILE, "t", "PASS", GROUP)).settle(scope("t", **more), prune=True)
        assert outcome.failed
        assert outcome.lines[-1].endswith("it takes a whole run that passed: why")
        assert names(tmp_path) == ["gone", "t"]


def test_the_last_entry_takes_the_file_with_it_but_nothing_unknown(tmp_path: Path) -> None:
    write(tmp_path, {"gone": entry()})
    SessionBook(tmp_path).settle(scope("t"), prune=True)
    assert not (tmp_path / "__ledger__").exists()
    write(tmp_path, {"gone": entry()}, comment="ours")
    SessionBook(tmp_path).settle(scope("t"), prune=True)
    assert json.loads((tmp_path / FILE).read_text("utf-8"))["comment"] == "ours"


def test_a_file_that_cannot_be_read_fails_and_others_are_settled(tmp_path: Path) -> None:
    write(tmp_path, {}, "__ledger__/test_b.json")
    write(tmp_path, {})
    (tmp_path / FILE).write_text("<<<<<<< HEAD", "utf-8")
    checks = [Check(f"__ledger__/test_{n}.json", n, "NEW", GROUP, {"peak": 3}) for n in "ab"]
    outcome = book(tmp_path, *checks).settle(Scope({}, frozenset("ab")), prune=False)
    assert outcome.failed
    assert outcome.lines[1].startswith("ERROR ")
    assert (tmp_path / FILE).read_text("utf-8") == "<<<<<<< HEAD"
    assert outcome.lines[2] == "NEW b: written to __ledger__/test_b.json"


def test_a_file_that_changed_meanwhile_keeps_what_others_wrote(tmp_path: Path) -> None:
    made = book(tmp_path, Check(FILE, "t", "NEW", GROUP, {"peak": 3}))
    write(tmp_path, {"theirs": entry()})
    made.settle(scope("t", partial=("x",)), prune=False)
    assert names(tmp_path) == ["t", "theirs"]


def test_orphans_and_folders(tmp_path: Path) -> None:
    for name in ("test_a.py", "use.md", "sub/test_b.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for name in (
        "__ledger__/test_a.json",
        "__ledger__/use.md.json",
        "__ledger__/old.json",
        "sub/__ledger__/test_c.json",
    ):
        write(tmp_path, {}, name)
    for name in (".venv/__ledger__/x.json", "node_modules/__ledger__/y.json"):
        write(tmp_path, {}, name)
    folders = list(find_folders([tmp_path], skip=["node_modules"]))
    assert sorted(folders) == [tmp_path / "__ledger__", tmp_path / "sub" / "__ledger__"]
    assert [path.name for path in find_orphans(folders)] == ["old.json", "test_c.json"]


def test_the_spool_survives_a_line_that_was_cut_off(tmp_path: Path) -> None:
    spool = Spool()
    spool.add("a", {"n": 1})
    spool.add("a", {"n": 2})
    (spool.folder / "99.jsonl").write_text('["b", "{\\"n\\": 3}"]\n["c", "{\\"n', "utf-8")
    assert spool.write(tmp_path / "out.json") == 2
    assert json.loads((tmp_path / "out.json").read_text("utf-8"))["reports"] == {"a": {"n": 2}, "b": {"n": 3}}
    spool.remove()
    assert not spool.folder.exists()
