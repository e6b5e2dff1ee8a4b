"""What ran and is not, or not all, in a ledger's books, in words."""

from __future__ import annotations

from collections.abc import Mapping


def blind_spots(counts: Mapping[str, int]) -> tuple[str, ...]:
    """A line for each kind of thing that a recorder knows of and could not see.

    Args:
        counts: How often each kind came: ``counted module calls``, ``child multiprocessing spawn``, ``package aoti.x``.

    >>> blind_spots({"threads": 2, "counted module calls": 12, "counted backwards": 6})
    ('12 module calls and 6 backwards ran on 2 other threads: their FLOPs are counted, what they allocated is not',)
    >>> blind_spots({"child fork": 2})
    ('2 child processes ran (fork): what they did is not in these books',)
    """
    return (*_threads(counts), *_children(counts), *_packages(counts))


def _threads(counts: Mapping[str, int]) -> list[str]:
    lines = []
    if calls := _calls(counts, "counted"):
        threads = _count(counts.get("threads", 0), "other thread")
        lines.append(f"{calls} ran on {threads}: their FLOPs are counted, what they allocated is not")
    if calls := _calls(counts, "not counted"):
        lines.append(f"{calls} of other models ran on other threads: they are not in these books")
    if n := counts.get("unfinished calls", 0):
        lines.append(f"{_count(n, 'call')} on other threads still ran when the recording ended: not in these books")
    if n := counts.get("optimizer steps", 0):
        lines.append(f"{_count(n, 'optimizer step')} ran on other threads: what they did is not in these books")
    return lines


def _calls(counts: Mapping[str, int], how: str) -> str:
    numbers = {word: counts.get(f"{how} {word}s", 0) for word in ("module call", "backward")}
    return " and ".join(_count(n, word) for word, n in numbers.items() if n)


def _children(counts: Mapping[str, int]) -> list[str]:
    return [
        f"{_count(n, 'child process')} ran ({kind.removeprefix('child ')}): what they did is not in these books"
        for kind, n in counts.items()
        if kind.startswith("child ") and n
    ]


def _packages(counts: Mapping[str, int]) -> list[str]:
    return [
        f"{kind.removeprefix('package ')} ran {_count(n, 'time')}: what a package of AOTInductor computes and "
        f"allocates inside is not in these books"
        for kind, n in counts.items()
        if kind.startswith("package ") and n
    ]


def _count(n: int, word: str) -> str:
    return f"{n:,} {word}" if n == 1 else f"{n:,} {word}{'es' if word.endswith('s') else 's'}"
