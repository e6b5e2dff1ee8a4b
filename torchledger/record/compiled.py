"""Generated code: the products that run in kernels of its own, which no dispatch shows."""

from __future__ import annotations

import re
from typing import Any

_KERNEL = re.compile(r"^(\w+) = async_compile\.(\w+)\(", re.MULTILINE)
_OUTPUT = re.compile(r"out=(\w+)")
_RESULT = re.compile(r"^\s*(\w+) = (?:extern_kernels|torch\.ops)\.")
_ALIAS = re.compile(r"\s*(\w+) = (?:reinterpret_tensor\()?(\w+)")
_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot"))
_LONG_NAMES = re.compile(r"scaled_dot_product(?:_\w*?attention)?")
"""Names of ops in which a product's name is but a word: what a kernel fuses around attention is named after it."""
_seen: dict[str, tuple[str, ...]] = {}


def products_inside(graph: Any) -> tuple[str, ...]:
    """Names of the kernels of a compiled graph that hold a product.

    They are templates of products and of attention, and small products that Inductor writes out as sums. Those that it
    leaves to a library (it calls ``aten.mm.out`` and the like) are dispatched, and not named here.
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
    if not starts:
        return []
    ends = [match.start() for match in starts[1:]] + [len(source)]
    library = _library_results(source)
    names = []
    for match, end in zip(starts, ends, strict=True):
        name, body = match[1], source[match.end() : end]
        is_template = name.startswith("triton_tem_") or "micro_gemm" in body or "flex_attention" in name
        words = {*_LONG_NAMES.sub("", name).split("_")}
        if is_template or (_PRODUCTS & words and not _follows(name, source, library)):
            names.append(f"inductor.{name}")
    return names


def _library_results(source: str) -> set[str]:
    """Names of the buffers that a library's product is written into, under all names that they go by."""
    results: set[str] = set()
    for line in source.splitlines():
        if "extern_kernels." in line or "torch.ops." in line:
            results.update(_OUTPUT.findall(line))
            results.update(_RESULT.findall(line))
        elif (alias := _ALIAS.match(line)) and alias[2] in results:
            results.add(alias[1])
    return results


def _follows(kernel: str, source: str, library: set[str]) -> bool:
    """Whether a kernel takes a library's product further: it is named after that product without holding one."""
    calls = re.findall(rf"^\s+{re.escape(kernel)}(?:\.run)?\((.*)\)", source, re.MULTILINE)
    return any(library & {*re.findall(r"\w+", arguments)} for arguments in calls)
