"""Files from elsewhere: whatever is in them, one clear error."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from synthetic import gpt_report
from torchledger.errors import ReportFileError
from torchledger.journal import files
from torchledger.journal.files import read_document, write_text
from torchledger.journal.schema import dump_run

GOOD = dump_run(gpt_report(n_steps=1))

BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it is empty"),
    "blank": (b"  \n ", "not JSON, or cut off"),
    "text": (b"hello", "does not begin with '{'"),
    "a list": (b"[1, 2]", "does not begin with '{'"),
    "binary": (b"\x7fELF\0\0", "does not begin with '{'"),
    "gzip": (b"\x1f\x8b\x08", "does not begin with '{'"),
    "a pickle": (b"\x80\x04\x95", "does not begin with '{'"),
    "utf-16": ("{}".encode("utf-16"), "does not begin with '{'"),
    "latin-1": ('{"a": "é"}'.encode("latin-1"), "byte 7 is not UTF-8 text"),
    "cut off": (GOOD[:-20].encode(), "not JSON, or cut off (line"),
    "cut in a string": (GOOD[:30].encode(), "not JSON, or cut off (line"),
    "more behind": (GOOD.encode() + b"{}", "not JSON, or cut off (line"),
    "NaN": (b'{"a": NaN}', "it holds NaN"),
    "infinity": (b'{"a": -Infinity}', "it holds -Infinity"),
    "a key twice": (b'{"a": {"b": 1, "b": 2}}', 'the key "b" stands twice in one object'),
    "deep nesting": (b'{"a":' + b"[" * 200_000, "nested too deeply"),
    "digits": (b'{"a": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files(tmp_path: Path, case: str) -> None:
    content, message = BROKEN[case]
    path = tmp_path / "report.json"
    path.write_bytes(content)
    with pytest.raises(ReportFileError) as refused:
        read_document(path)
    assert message in refused.value.message
    assert str(path) in refused.value.message
    assert "\n" not in refused.value.message


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("\ufeff\n" + GOOD, "utf-8")
    assert read_document(path) == json.loads(GOOD)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file"), ("a\0b", "null")):
        with pytest.raises(ReportFileError, match=reason) as refused:
            read_document(path)
        assert "\0" not in refused.value.message
    with pytest.raises(ReportFileError, match=r"'.*a\\nb': No such file"):
        read_document(tmp_path / "a\nb")


def test_devices_are_not_read_to_their_end() -> None:
    if Path("/dev/zero").exists():
        with pytest.raises(ReportFileError, match="does not begin"):
            read_document("/dev/zero")


def test_large_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGEST_FILE_BYTES", 5 << 20)
    path = tmp_path / "report.json"
    path.write_bytes(b'{"a": "' + b"x" * (6 << 20) + b'"}')
    with pytest.raises(ReportFileError, match="it is larger than 5 MiB"):
        read_document(path)


def test_a_pipe_is_read_and_written(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=write_text, args=(pipe, GOOD))
    writer.start()
    assert read_document(pipe) == json.loads(GOOD)
    writer.join()


def test_readers_never_see_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_text(path, "{}" * 10)
    before = path.stat().st_ino
    write_text(path, "{}" * 20)
    assert path.stat().st_ino != before  # another file took its name
    assert os.listdir(tmp_path) == ["report.json"]


class Counting(str):
    """A key that counts how often it is compared with another."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counting.compared += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


@pytest.mark.parametrize("again", [0, 5_000, 9_999])
def test_a_key_that_stands_twice_is_found_in_one_pass(again: int) -> None:
    pairs = [(Counting(n), n) for n in range(10_000)]
    Counting.compared = 0
    with pytest.raises(files._RefusedError, match=f'"{again}" stands twice'):
        files._unique([*pairs, (Counting(again), 0)])
    assert Counting.compared < 1000  # equal hashes alone are compared: a pair each would be 50,000,000


def test_each_of_many_keys_is_read(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    keys = {f"k{n}": n for n in range(100_000)}
    path.write_text(json.dumps(keys))
    assert read_document(path) == keys
    path.write_text(json.dumps(keys)[:-1] + ', "k7": 1}')
    with pytest.raises(ReportFileError, match='the key "k7" stands twice'):
        read_document(path)
