"""Reports as files: read with suspicion, written whole or not at all."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from torchledger.errors import ReportFileError, ReportWriteError

LARGEST_FILE_BYTES = 2**28
"""A report of a hundred steps of a large model has some 10 MiB, journals included."""


def read_document(path: str | os.PathLike[str]) -> object:
    """The JSON value in a file, without duplicate keys, NaN or infinities.

    Raises:
        ReportFileError: the file cannot be read, is larger than `LARGEST_FILE_BYTES`, or is not JSON.

    >>> read_document("no/such/report.json")
    Traceback (most recent call last):
    torchledger.errors.ReportFileError: cannot read no/such/report.json: No such file or directory...
    """
    name = shown_path(path)
    try:
        return read_json(path)
    except UnreadableError as error:
        raise ReportFileError(
            f"{name} is not a report: {error}. Give a file that Report.save or torchledger run --json wrote."
        ) from None
    except OSError as error:
        raise ReportFileError(f"cannot read {name}: {error.strerror or error}. Give the path of a report.") from error


class UnreadableError(Exception):
    """The reason why a file is no JSON that we read."""


def read_json(path: str | os.PathLike[str]) -> object:
    """The JSON object in a file, without duplicate keys, NaN or infinities.

    Raises:
        OSError: the file cannot be read.
        UnreadableError: it is larger than `LARGEST_FILE_BYTES`, or is not such JSON; with the reason.

    >>> read_json(os.devnull)
    Traceback (most recent call last):
    torchledger.journal.files.UnreadableError: it is empty
    """
    try:
        with open(path, "rb") as file:
            content = _read_limited(file)
        return json.loads(content.decode("utf-8-sig"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except _RefusedError as error:
        reason = str(error)
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not UTF-8 text"
    except json.JSONDecodeError as error:
        reason = f"not JSON, or cut off (line {error.lineno}, column {error.colno}: {error.msg})"
    except RecursionError:
        reason = "nested too deeply"
    except ValueError as error:  # a path with a null character, an integer of more digits than Python reads
        reason = str(error).partition(";")[0]
    raise UnreadableError(reason)


class _RefusedError(Exception):
    """What a file holds that no report does."""


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text file at once: whoever looks sees the old file or the new one, never half of it.

    What is no regular file (a pipe, ``/dev/stdout``) is written to as it is.

    Raises:
        ReportWriteError: the folder is missing, or the file cannot be written.

    >>> write_text(os.devnull, "a report")
    """
    with _write_errors(path):
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            with open(target, "w", encoding="utf-8") as file:
                file.write(text)
            return
        descriptor, temporary = _open_beside(target)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if target.exists():
                temporary.chmod(stat.S_IMODE(target.stat().st_mode))
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(target.parent)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Makes sure that `write_text` can write there, and leaves nothing behind.

    Raises:
        ReportWriteError: the folder is missing, the path is a folder, or no file can be made there.

    >>> check_writable("no/such/folder/report.json")
    Traceback (most recent call last):
    torchledger.errors.ReportWriteError: cannot write no/such/folder/report.json: its folder does not exist...
    """
    with _write_errors(path):
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            with open(target, "a", encoding="utf-8"):
                return
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(0, "the file is read-only")
        descriptor, temporary = _open_beside(target)
        os.close(descriptor)
        temporary.unlink()


def shown_path(path: str | os.PathLike[str]) -> str:
    r"""The path as a message shows it: on one line, whatever is in it.

    >>> shown_path("a b.json"), shown_path("a\nb")
    ('a b.json', "'a\\nb'")
    """
    name = os.fsdecode(path)
    return name if name.isprintable() and name else repr(name)


def _read_limited(file: BinaryIO) -> bytes:
    # The first bytes tell binary files and devices apart before all of one is read.
    start = file.read(4096)
    first = start.removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    if not start:
        raise _RefusedError("it is empty")
    if first and first != b"{":
        raise _RefusedError("it does not begin with '{'")
    content = start + file.read(LARGEST_FILE_BYTES)
    if len(content) > LARGEST_FILE_BYTES:
        raise _RefusedError(f"it is larger than {LARGEST_FILE_BYTES >> 20} MiB")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _RefusedError(f"the key {json.dumps(key[:60])} stands twice in one object")
            seen.add(key)
    return entries


def _refuse_constant(word: str) -> None:
    raise _RefusedError(f"it holds {word}, which is no JSON number")


@contextlib.contextmanager
def _write_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    name = shown_path(path)
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        with contextlib.suppress(OSError, ValueError):
            if Path(path).is_dir():
                reason = "it is a folder"
            elif not Path(path).absolute().parent.is_dir():
                reason = "its folder does not exist"
        raise ReportWriteError(
            f"cannot write {name}: {reason}. Give a path in a folder that can be written."
        ) from error


def _open_beside(target: Path) -> tuple[int, Path]:
    """A new file in the same folder, so that it can be renamed to the target; with the rights that a new file gets."""
    if target.is_dir():
        raise IsADirectoryError(0, "it is a folder")
    temporary = target.with_name(f".{target.name[:100]}.{os.urandom(6).hex()}.tmp")
    return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), temporary


def _sync_folder(folder: Path) -> None:
    """Makes a rename last through a power cut, where the system can do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
