"""The sizes of published models, by the names that people use.

Sources: Radford et al. 2019, "Language models are unsupervised multitask learners", table 2, named by the parameters of
the released weights; Touvron et al. 2023, "Llama 2"; Grattafiori et al. 2024, "The Llama 3 herd of models", table 3,
and the released configurations of Llama 3.2; Jiang et al. 2024, "Mixtral of experts", table 1.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from torchledger.errors import UsageError


def _gpt2(n_layers: int, width: int, n_heads: int) -> dict[str, Any]:
    return {
        "vocabulary": 50_257,
        "width": width,
        "n_layers": n_layers,
        "n_heads": n_heads,
        "max_seq": 1024,
    }


def _llama(vocabulary: int, n_layers: int, width: int, n_heads: int, n_kv_heads: int, ff_width: int) -> dict[str, Any]:
    return {
        "vocabulary": vocabulary,
        "width": width,
        "n_layers": n_layers,
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "ff_width": ff_width,
        "gated": True,
        "activation": "silu",
        "norm": "rms",
        "positions": "rotary",
        "tied": False,
        "biases": (),
    }


GPT2: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "124M": _gpt2(12, 768, 12),
        "355M": _gpt2(24, 1024, 16),
        "774M": _gpt2(36, 1280, 20),
        "1.5B": _gpt2(48, 1600, 25),
    }
)
LLAMA: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "2-7B": _llama(32_000, 32, 4096, 32, 32, 11_008),
        "2-13B": _llama(32_000, 40, 5120, 40, 40, 13_824),
        "2-70B": _llama(32_000, 80, 8192, 64, 8, 28_672),
        "3-8B": _llama(128_256, 32, 4096, 32, 8, 14_336),
        "3-70B": _llama(128_256, 80, 8192, 64, 8, 28_672),
        "3.1-405B": _llama(128_256, 126, 16_384, 128, 8, 53_248),
        "3.2-1B": {**_llama(128_256, 16, 2048, 32, 8, 8192), "tied": True},
        "3.2-3B": {**_llama(128_256, 28, 3072, 24, 8, 8192), "tied": True},
    }
)
MIXTRAL: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "8x7B": {**_llama(32_000, 32, 4096, 32, 8, 14_336), "n_experts": 8, "n_active_experts": 2},
        "8x22B": {**_llama(32_768, 56, 6144, 48, 8, 16_384), "n_experts": 8, "n_active_experts": 2},
    }
)
FAMILIES: Mapping[str, Mapping[str, dict[str, Any]]] = MappingProxyType(
    {"gpt2": GPT2, "llama": LLAMA, "mixtral": MIXTRAL}
)
"""Models by family; a model's full name is both, as in ``gpt2-124M``."""


def find_sizes(family: str, name: str) -> dict[str, Any]:
    """The sizes of a model, as arguments of ``TransformerSpec``; capitals do not matter.

    Raises:
        UsageError: there is no such family or model; the message lists those on record, and what comes near.

    >>> find_sizes("gpt2", "124M")["n_layers"], find_sizes("llama", "3-8b")["width"]
    (12, 4096)
    """
    models = FAMILIES.get(str(family).lower())
    if models is None:
        raise UsageError(f"there is no family {family!r} on record; there are: {', '.join(FAMILIES)}.")
    found = next((known for known in models if known.lower() == str(name).lower()), None)
    if found is None:
        said = f"there is no {family} {name!r} on record; there are: {', '.join(models)}."
        raise UsageError(f"{said}{_hint(name, models)}")
    return models[found]


def find_model(name: str) -> dict[str, Any]:
    """The sizes of a model by its full name, family and all; capitals do not matter.

    Raises:
        UsageError: there is none; the message lists those on record, and what comes near.

    >>> find_model("Llama-3-8b") == find_sizes("llama", "3-8B")
    True
    """
    family, _, rest = name.partition("-")
    if family.lower() in FAMILIES:
        return find_sizes(family.lower(), rest)
    names = [f"{family}-{name}" for family, models in FAMILIES.items() for name in models]
    raise UsageError(f"there is no model {name!r} on record; there are: {', '.join(names)}.{_hint(name, names)}")


def _hint(name: str, names: Iterable[str]) -> str:
    lower = {known.lower(): known for known in names}
    near = difflib.get_close_matches(str(name)[:60].lower(), lower, n=2, cutoff=0.6)
    return f" Did you mean {' or '.join(lower[found] for found in near)}?" if near else ""
