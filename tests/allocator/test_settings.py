"""The syntax of PYTORCH_CUDA_ALLOC_CONF, against torch's own parser, and the sizes that follow from it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from torchledger.allocator.settings import MIB, UNLIMITED, AllocatorSettings, parse_settings
from torchledger.errors import UsageError

DIVISIONS = [
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:1",
    "roundup_power2_divisions:[256:1,512:2,>:4]",
    "roundup_power2_divisions:[256:1,1024:4]",
    "roundup_power2_divisions:[1024:4,256:2]",
    "roundup_power2_divisions:[>:4]",
    "roundup_power2_divisions:[131072:4]",
    "roundup_power2_divisions:[64:0,128:8]",
    "roundup_power2_divisions:[1:2,>:8,4:16]",
    "roundup_power2_divisions:[]",
    " max_split_size_mb : 64 , roundup_power2_divisions : [ 64 : 8 , > : 2 ] ",
]
ACCEPTED = [
    "",
    "max_split_size_mb:20",
    "max_split_size_mb:20,",
    "max_split_size_mb:32,max_split_size_mb:64",
    "max_non_split_rounding_mb:20",
    "garbage_collection_threshold:0.8",
    "garbage_collection_threshold:.5",
    "expandable_segments:True,max_split_size_mb:64,garbage_collection_threshold:0.5",
    "pinned_use_background_threads:True",
    "backend:native",
    "large_segment_size_mb:11,max_split_size_mb:11",
    "max_split_size_mb:40,max_non_split_rounding_mb:64,large_segment_size_mb:40",
]
REFUSED = [
    "max_split_size_mb:19",
    "max_split_size_mb",
    "max_split_size_mb:",
    "max_split_size_mb:abc",
    "max_split_size_mb=20",
    "max_non_split_rounding_mb:19",
    "garbage_collection_threshold:0",
    "garbage_collection_threshold:1.0",
    "garbage_collection_threshold:x",
    "expandable_segments:true",
    "roundup_power2_divisions:0",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:[100:4]",
    "roundup_power2_divisions:[64:3]",
    "large_segment_size_mb:10",
    ",",
]

# Torch's settings are global, and one text's large_segment_size_mb lasts: those come last, in a process of their own.
ASK_TORCH = """
import ctypes, json, os, sys, torch
set_conf = torch._C._accelerator_setAllocatorSettings
library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
divisions = library._ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm
divisions.restype, divisions.argtypes = ctypes.c_size_t, [ctypes.c_size_t]
answers = {}
for conf in json.loads(sys.argv[1]):
    set_conf("")
    try:
        set_conf(conf)
        answers[conf] = [divisions(1 << (20 + interval)) for interval in range(16)]
    except (ValueError, RuntimeError):
        answers[conf] = None
print(json.dumps(answers), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def torch_answers() -> dict[str, list[int] | None]:
    """For each text the 16 divisions that torch reads from it, or None where it refuses."""
    confs = sorted([*DIVISIONS, *ACCEPTED, *REFUSED], key=lambda conf: ("large_segment" in conf, conf))
    done = subprocess.run(
        [sys.executable, "-c", ASK_TORCH, json.dumps(confs)], capture_output=True, text=True, check=False
    )
    if done.returncode or not done.stdout:
        pytest.skip(f"this torch has no settings to ask: {done.stderr.strip()[-200:]}")
    return json.loads(done.stdout)


@pytest.mark.parametrize("conf", [*DIVISIONS, *ACCEPTED])
def test_accepts_and_reads_what_torch_does(conf: str, torch_answers: dict[str, list[int] | None]) -> None:
    assert list(parse_settings(conf).power2_divisions) == torch_answers[conf]


@pytest.mark.parametrize("conf", REFUSED)
def test_refuses_what_torch_refuses(conf: str, torch_answers: dict[str, list[int] | None]) -> None:
    with pytest.raises(UsageError) if conf != "," else pytest.raises(UsageError, match="key:value"):
        parse_settings(conf)
    assert torch_answers[conf] is None


def test_reads_each_key() -> None:
    settings = parse_settings(
        "max_split_size_mb:128,max_non_split_rounding_mb:64,garbage_collection_threshold:0.25,"
        "expandable_segments:True,large_segment_size_mb:32,per_process_memory_fraction:0.5,roundup_power2_divisions:2"
    )
    assert (settings.max_split_bytes, settings.max_non_split_rounding_bytes) == (128 * MIB, 64 * MIB)
    assert (settings.garbage_collection_threshold, settings.memory_fraction) == (0.25, 0.5)
    assert (settings.expandable_segments, settings.large_segment_bytes) == (True, 32 * MIB)
    assert settings.power2_divisions == (2,) * 16
    assert settings.without_effect == ()


def test_defaults() -> None:
    settings = parse_settings("")
    assert settings == AllocatorSettings()
    assert (settings.max_split_bytes, settings.max_non_split_rounding_bytes) == (UNLIMITED, 20_971_520)
    assert (settings.large_segment_bytes, settings.expandable_segments) == (20_971_520, False)


def test_the_rounding_of_oversize_blocks_follows_the_large_segment() -> None:
    # Read out of torch 2.13: with large_segment_size_mb:40 alone its limit is 40 MiB too.
    assert parse_settings("large_segment_size_mb:40").max_non_split_rounding_bytes == 40 * MIB
    both = parse_settings("max_non_split_rounding_mb:50,large_segment_size_mb:40")
    assert both.max_non_split_rounding_bytes == 50 * MIB


def test_names_what_has_no_effect() -> None:
    conf = "backend:native,pinned_num_register_threads:8,release_lock_on_cudamalloc:True,throw_on_cudamalloc_oom:False"
    assert parse_settings(conf).without_effect == tuple(pair.split(":")[0] for pair in conf.split(","))


@pytest.mark.parametrize(
    ("conf", "says"),
    [
        ("max_split_size:128", "did you mean 'max_split_size_mb'"),
        ("expandable_segment:True", "did you mean 'expandable_segments'"),
        ("zzz:1", "The settings that change bytes: max_split_size_mb, "),
        ("backend:cudaMallocAsync", "backend:cudaMallocAsync is not modelled"),
        ("throw_on_cudamalloc_oom:True", "is not modelled"),
        ("expandable_segments:true", "write expandable_segments:True or expandable_segments:False"),
        ("max_split_size_mb:1", "an integer of at least 20, as in 'max_split_size_mb:128'"),
        ("max_split_size_mb:20,large_segment_size_mb:64", "at least 64"),
        ("roundup_power2_divisions:[256:3]", "'roundup_power2_divisions:[256:1,512:2,>:4]'"),
        ("roundup_power2_divisions:[4]", "a power of two"),
        ("garbage_collection_threshold:80", "as in 'garbage_collection_threshold:0.8'"),
        ("per_process_memory_fraction:1.5", "from 0 to 1"),
        ("pinned_use_background_threads:1", "pinned_use_background_threads:True"),
        ("max_split_size_mb:128;expandable_segments:True", "max_split_size_mb:128;expandable_segments:True"),
        ("128", "max_split_size_mb:128,expandable_segments:True"),
    ],
)
def test_errors_say_what_to_write(conf: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_settings(conf)
    assert says in str(caught.value)
    assert "[usage]" in str(caught.value)


def test_takes_only_text() -> None:
    with pytest.raises(UsageError, match="are a text"):
        parse_settings({"max_split_size_mb": 128})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nbytes", "rounded", "segment"),
    [
        (1, 512, 2 * MIB),
        (511, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1_024, 2 * MIB),
        (MIB, 1_048_576, 2 * MIB),
        (MIB + 1, 1_049_088, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10_486_272, 12_582_912),
        (11 * MIB + 1, 11_534_848, 12_582_912),
        (13 * MIB + 1, 13_632_000, 14_680_064),
        (100 * MIB + 1, 104_858_112, 106_954_752),
    ],
)
def test_sizes(nbytes: int, rounded: int, segment: int) -> None:
    settings = AllocatorSettings()
    assert settings.round_size(nbytes) == rounded
    assert settings.segment_size(rounded) == segment


@pytest.mark.parametrize(
    ("conf", "nbytes", "rounded"),
    [
        ("roundup_power2_divisions:4", 614_400, 655_360),
        ("roundup_power2_divisions:4", 1_048_577, 1_310_720),
        ("roundup_power2_divisions:4", 1_200 * 1024, 1_280 * 1024),
        ("roundup_power2_divisions:4", 2_048, 2_048),
        ("roundup_power2_divisions:4", 2_049, 2_560),
        ("roundup_power2_divisions:4", 1_025, 1_536),  # too small for steps: a multiple of 512
        ("roundup_power2_divisions:4", MIB, MIB),
        ("roundup_power2_divisions:1", MIB + 1, MIB + 512),
        ("roundup_power2_divisions:[1:4,2:8,4:0,>:2]", MIB + 1, MIB + MIB // 4),
        ("roundup_power2_divisions:[1:4,2:8,4:0,>:2]", 2 * MIB + 1, 2 * MIB + MIB // 4),
        ("roundup_power2_divisions:[1:4,2:8,4:0,>:2]", 4 * MIB + 1, 4 * MIB + 512),
        ("roundup_power2_divisions:[1:4,2:8,4:0,>:2]", 8 * MIB + 1, 12 * MIB),
        ("roundup_power2_divisions:2", (64 << 30) + 1, 96 << 30),
    ],
)
def test_power_of_two_steps(conf: str, nbytes: int, rounded: int) -> None:
    assert parse_settings(conf).round_size(nbytes) == rounded
