"""Generated code: the products that run in kernels of its own, which no dispatch shows."""

from __future__ import annotations

import re
from typing import Any

_KERNEL = re.compile(r"^(\w+) = async_compile\.(\w+)\(", re.MULTILINE)
_seen: dict[str, tuple[str, ...]] = {}


def products_inside(graph: Any) -> tuple[str, ...]:
    """Names of the kernels of a compiled graph that hold a product: templates of products and of attention.

    Products that Inductor leaves to a library (it calls ``aten.mm.out`` and the like) are dispatched, and not named.
    """
    source = getattr(graph, "source_code", None)
    if not isinstance(source, str):
        return ()
    found = _seen.get(source)
    if found is None:
        found = _seen[source] = tuple(_find(source))
        if len(_seen) > 1000:
            _seen.clear()
    return found


def _find(source: str) -> list[str]:
    starts = [*_KERNEL.finditer(source)]
    ends = [match.start() for match in starts[1:]] + [len(source)]
    names = []
    for match, end in zip(starts, ends, strict=True):
        body = source[match.end() : end]
        if match[1].startswith("triton_tem_") or "micro_gemm" in body or "flex_attention" in match[1]:
            names.append(f"inductor.{match[1]}")
    return names
