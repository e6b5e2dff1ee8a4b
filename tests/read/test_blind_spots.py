"""What ran out of sight, in words."""

from __future__ import annotations

from torchledger.read.blind_spots import blind_spots


def test_nothing_is_no_line() -> None:
    assert blind_spots({}) == ()
    assert blind_spots({"threads": 1, "counted module calls": 0}) == ()


def test_each_kind_has_a_line_of_its_own() -> None:
    counts = {
        "threads": 1,
        "counted backwards": 1,
        "not counted module calls": 1_200,
        "unfinished calls": 1,
        "optimizer steps": 3,
        "child multiprocessing spawn": 2,
        "child fork": 1,
        "package aoti.mlp": 4,
    }
    assert blind_spots(counts) == (
        "1 backward ran on 1 other thread: their FLOPs are counted, what they allocated is not",
        "1,200 module calls of other models ran on other threads: they are not in these books",
        "1 call on other threads still ran when the recording ended: not in these books",
        "3 optimizer steps ran on other threads: what they did is not in these books",
        "2 child processes ran (multiprocessing spawn): what they did is not in these books",
        "1 child process ran (fork): what they did is not in these books",
        "aoti.mlp ran 4 times: what a package of AOTInductor computes and allocates inside is not in these books",
    )
