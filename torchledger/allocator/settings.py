"""What ``PYTORCH_CUDA_ALLOC_CONF`` says, and the sizes that follow from it.

Source of the sizes, the limits and the syntax: torch 2.13, ``c10/core/AllocatorConfig.h`` and its parser.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from torchledger.errors import UsageError

MIB = 1 << 20
MIN_BLOCK_BYTES = 512
SMALL_BYTES = MIB
"""The largest size that the small pool serves."""
SMALL_SEGMENT_BYTES = 2 * MIB
MIN_LARGE_ALLOC_BYTES = 10 * MIB
"""From here on a request gets a segment of its own, rounded up to `ROUND_LARGE_BYTES`."""
ROUND_LARGE_BYTES = 2 * MIB
UNLIMITED = 1 << 64

_N_INTERVALS = 16
_NO_DIVISIONS = (0,) * _N_INTERVALS


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """The settings of a caching allocator that have a bearing on bytes; `parse_settings` reads them from a text.

    Args:
        conf: the text they were read from.
        max_split_bytes: blocks of this size and more are never split; `UNLIMITED` by default.
        max_non_split_rounding_bytes: a request of ``max_split_bytes`` and more takes a block that is larger by less
            than this.
        power2_divisions: into how many steps each power of two is cut when sizes are rounded; 16 numbers, for sizes
            from 1 MiB (and all below) to 32 GiB (and all above); 0 and 1 mean multiples of 512.
        garbage_collection_threshold: the share of the allowed bytes above which old free segments go back; 0 is off.
        expandable_segments: segments grow by pages, in place of one segment a request.
        large_segment_bytes: the segment that requests over 1 MiB and under 10 MiB share, and the page of large
            expandable segments.
        memory_fraction: the share of the device's bytes that may be reserved.
        without_effect: the keys of ``conf`` that change no byte on the device.
    """

    conf: str = ""
    max_split_bytes: int = UNLIMITED
    max_non_split_rounding_bytes: int = 20 * MIB
    power2_divisions: tuple[int, ...] = _NO_DIVISIONS
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    large_segment_bytes: int = 20 * MIB
    memory_fraction: float = 1.0
    without_effect: tuple[str, ...] = ()

    def round_size(self, nbytes: int) -> int:
        """The bytes of the block that a request of ``nbytes`` > 0 needs.

        >>> AllocatorSettings().round_size(513), parse_settings("roundup_power2_divisions:4").round_size(1_048_577)
        (1024, 1310720)
        """
        if nbytes < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        top = nbytes.bit_length() - 1
        divisions = self.power2_divisions[min(max(top - 20, 0), _N_INTERVALS - 1)]
        if divisions <= 1 or nbytes <= MIN_BLOCK_BYTES * divisions:
            return -(-nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        step = (1 << top) >> (divisions.bit_length() - 1)
        return -(-nbytes // step) * step

    def segment_size(self, size: int) -> int:
        """The bytes that are asked of the driver when no free block holds ``size`` rounded bytes.

        >>> AllocatorSettings().segment_size(512), AllocatorSettings().segment_size(10_486_272)
        (2097152, 12582912)
        """
        if size <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if size < MIN_LARGE_ALLOC_BYTES:
            return self.large_segment_bytes
        return -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES

    def page_bytes(self, is_small: bool) -> int:
        """The bytes by which an expandable segment of that pool grows."""
        return SMALL_SEGMENT_BYTES if is_small else self.large_segment_bytes


def parse_settings(conf: str) -> AllocatorSettings:
    """The settings that a text in the syntax of ``PYTORCH_CUDA_ALLOC_CONF`` names; the last of equal keys counts.

    Args:
        conf: ``key:value`` pairs with commas between them; spaces are ignored.

    Raises:
        UsageError: an unknown key, a value out of range, or a backend that is not modelled; the message has the form
            that is understood.

    >>> settings = parse_settings("max_split_size_mb:128,expandable_segments:True,backend:native")
    >>> settings.max_split_bytes, settings.expandable_segments, settings.without_effect
    (134217728, True, ('backend',))
    """
    if not isinstance(conf, str):
        raise UsageError(f"allocator settings are a text such as 'max_split_size_mb:128', not {conf!r}.")
    settings, unused = AllocatorSettings(conf=conf), []
    pairs = _split_pairs(conf)
    # Read first, wherever it stands: the limits of two other keys, and the default of one, follow it.
    pairs.sort(key=lambda pair: pair[0] != "large_segment_size_mb")
    for key, value in pairs:
        if key in _READERS:
            settings = _READERS[key](settings, value)
        elif key in _WITHOUT_EFFECT:
            _check(key, value, _WITHOUT_EFFECT[key])
            unused.append(key)
        else:
            raise _unknown_key(key)
    return replace(settings, without_effect=tuple(dict.fromkeys(unused)))


def _split_pairs(conf: str) -> list[tuple[str, str]]:
    """Keys and values; a comma inside brackets does not end a pair."""
    text = re.sub(r"\s", "", conf)
    if not text:
        return []
    pairs = []
    for item in re.split(r",(?![^\[]*\])", text.removesuffix(",")):
        key, colon, value = item.partition(":")
        if not (key and colon and value):
            raise UsageError(
                f"cannot read {item!r} in the allocator settings {conf!r}: write key:value pairs with commas between "
                f"them, as in 'max_split_size_mb:128,expandable_segments:True'."
            )
        pairs.append((key, value))
    return pairs


def _unknown_key(key: str) -> UsageError:
    known = sorted((*_READERS, *_WITHOUT_EFFECT))
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UsageError(
        f"unknown allocator setting {key!r}: {hint}The settings that change bytes: {', '.join(_READERS)}."
    )


def _integer(key: str, value: str, at_least: int, form: str) -> int:
    if not re.fullmatch(r"[0-9]{1,20}", value) or int(value) < at_least:
        raise UsageError(f"cannot take {key}:{value}: write an integer of at least {at_least}, as in {form!r}.")
    return int(value)


def _mebibytes(key: str, value: str, at_least: int) -> int:
    return _integer(key, value, at_least, f"{key}:{max(128, at_least)}") * MIB


def _truth(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise UsageError(f"cannot take {key}:{value}: write {key}:True or {key}:False, with a capital.")
    return value == "True"


def _share(key: str, value: str, *, ends: bool) -> float:
    number = float(value) if re.fullmatch(r"[0-9]*\.?[0-9]+(e-?[0-9]+)?", value) else -1.0
    if not (0.0 < number < 1.0 or (ends and number in (0.0, 1.0))):
        between = "from 0 to 1" if ends else "between 0 and 1, both excluded"
        raise UsageError(f"cannot take {key}:{value}: write a number {between}, as in '{key}:0.8'.")
    return number


def _power_of_two(key: str, value: str, *, zero: bool) -> int:
    number = int(value) if re.fullmatch(r"[0-9]{1,20}", value) else -1
    if number < 0 or number & (number - 1) or (number == 0 and not zero):
        raise UsageError(
            f"cannot take {value} in {key}: write a power of two, as in '{key}:4', or a list by sizes in MiB, as in "
            f"'{key}:[256:1,512:2,>:4]' (there 0 turns the rounding off)."
        )
    return number


def _read_large_segment(settings: AllocatorSettings, value: str) -> AllocatorSettings:
    size = _mebibytes("large_segment_size_mb", value, 11)
    return replace(settings, large_segment_bytes=size, max_non_split_rounding_bytes=size)


def _read_max_split(settings: AllocatorSettings, value: str) -> AllocatorSettings:
    size = _mebibytes("max_split_size_mb", value, settings.large_segment_bytes // MIB)
    return replace(settings, max_split_bytes=min(size, UNLIMITED))


def _read_non_split_rounding(settings: AllocatorSettings, value: str) -> AllocatorSettings:
    size = _mebibytes("max_non_split_rounding_mb", value, settings.large_segment_bytes // MIB)
    return replace(settings, max_non_split_rounding_bytes=size)


def _read_divisions(settings: AllocatorSettings, value: str) -> AllocatorSettings:
    key = "roundup_power2_divisions"
    if not (value.startswith("[") and value.endswith("]")):
        return replace(settings, power2_divisions=(_power_of_two(key, value, zero=False),) * _N_INTERVALS)
    divisions, last, is_first = list(_NO_DIVISIONS), 0, True
    for item in filter(None, value[1:-1].split(",")):
        where, _, steps = item.partition(":")
        n_steps = _power_of_two(key, steps, zero=True)
        if where == ">":
            # After the interval named before it; with none before, torch begins at the second.
            divisions[last + 1 :] = [n_steps] * (_N_INTERVALS - last - 1)
            continue
        last = min(_power_of_two(key, where, zero=False).bit_length() - 1, _N_INTERVALS - 1)
        if is_first:
            divisions[:last] = [n_steps] * last
            is_first = False
        divisions[last] = n_steps
    return replace(settings, power2_divisions=tuple(divisions))


def _read_collection(settings: AllocatorSettings, value: str) -> AllocatorSettings:
    share = _share("garbage_collection_threshold", value, ends=False)
    return replace(settings, garbage_collection_threshold=share)


def _read_expandable(settings: AllocatorSettings, value: str) -> AllocatorSettings:
    return replace(settings, expandable_segments=_truth("expandable_segments", value))


def _read_fraction(settings: AllocatorSettings, value: str) -> AllocatorSettings:
    return replace(settings, memory_fraction=_share("per_process_memory_fraction", value, ends=True))


_READERS: Mapping[str, Callable[[AllocatorSettings, str], AllocatorSettings]] = MappingProxyType(
    {
        "max_split_size_mb": _read_max_split,
        "max_non_split_rounding_mb": _read_non_split_rounding,
        "roundup_power2_divisions": _read_divisions,
        "garbage_collection_threshold": _read_collection,
        "expandable_segments": _read_expandable,
        "large_segment_size_mb": _read_large_segment,
        "per_process_memory_fraction": _read_fraction,
    }
)

# Keys that torch knows and that change no byte on the device, with the kind of their value.
_WITHOUT_EFFECT: Mapping[str, str] = MappingProxyType(
    {
        "backend": "backend",
        "release_lock_on_cudamalloc": "truth",
        "release_lock_on_hipmalloc": "truth",
        "pinned_use_cuda_host_register": "truth",
        "pinned_use_hip_host_register": "truth",
        "pinned_num_register_threads": "count",
        "pinned_use_background_threads": "truth",
        "pinned_reserve_segment_size_mb": "count",
        "pinned_max_round_threshold_mb": "count",
        "pinned_max_cached_size_mb": "count",
        "pinned_free_catch_all": "truth",
        "graph_capture_record_stream_reuse": "truth",
        "throw_on_cudamalloc_oom": "off",
    }
)


def _check(key: str, value: str, kind: str) -> None:
    if kind == "truth":
        _truth(key, value)
    elif kind == "count":
        _integer(key, value, 0, f"{key}:1")
    elif kind == "off" and _truth(key, value):
        raise UsageError(f"{key}:True is not modelled: it gives up before free segments are returned. Leave it out.")
    elif kind == "backend" and value != "native":
        raise UsageError(
            f"backend:{value} is not modelled: under cudaMallocAsync the driver pools the memory, by rules of its own. "
            f"Leave the key out, or write backend:native."
        )
