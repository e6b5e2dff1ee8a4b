"""fvcore's numbers, which are those of whole ops (``linear``), on the ops that run inside (``aten.addmm``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import NamedTuple

from torchledger.flops.opinions import AUTOGRAD_FUNCTION, FORWARD, FvcoreCount, Product

_PRODUCTS = frozenset(f"aten::{name}" for name in ("_convolution", "addmm", "bmm", "einsum", "linear", "matmul", "mm"))
"""The kinds of fvcore's ops that are products; the others that it counts are element-wise work."""

_Op = tuple[str, int | None]


class Posted(NamedTuple):
    """FLOPs by op; and by op, the reasons for which they differ from ours, with the calls of each."""

    flops: Counter[str]
    reasons: dict[str, Counter[str]]

    def explain(self, op: str, why: str) -> None:
        """One more call of ``op`` differs for this reason."""
        self.reasons.setdefault(op, Counter())[why] += 1


def post_fvcore(count: FvcoreCount) -> Posted:
    """Post each number of fvcore's to the op that ran there, as our products in the same trace tell.

    >>> product = Product("aten.addmm", FORWARD, 48, (), "aten::linear", 1)
    >>> post_fvcore(FvcoreCount(ops=[("aten::linear", 48), ("aten::layer_norm", 8)], products=[product])).flops
    Counter({'aten.addmm': 48, 'aten.layer_norm': 8})
    """
    posted = Posted(Counter(), {})
    runs: dict[int, list[Product]] = {}
    for product in count.products:
        if product.inside in _PRODUCTS:
            runs.setdefault(product.run, []).append(product)
        else:
            posted.explain(product.op, _why_missing(product.inside))
    theirs = []
    for kind, flops in count.ops:
        name = _name_of(kind)
        if kind in _PRODUCTS:
            theirs.append((kind, flops))
        elif flops:
            posted.flops[f"aten.{name}"] += flops
            posted.explain(f"aten.{name}", f"fvcore counts {name}, which is element-wise work, not counted here")
    for products, op in _pairs(list(runs.values()), theirs):
        _post(posted, products, op, count)
    return posted


def _pairs(ours: list[list[Product]], theirs: list[_Op]) -> Iterator[tuple[list[Product], _Op | None]]:
    """Each op of the trace that ran products of ours, with fvcore's number for it, or None where fvcore dropped it.

    Both are in the order of the trace.
    """
    keys = [(products[0].inside, sum(product.flops for product in products)) for products in ours]
    if [kind for kind, _ in keys] == [kind for kind, _ in theirs]:
        yield from zip(ours, theirs, strict=True)
        return
    for _, i, i_end, j, j_end in SequenceMatcher(None, keys, theirs, autojunk=False).get_opcodes():
        left = theirs[j:j_end]
        for products in ours[i:i_end]:
            op = next((op for op in left if op[0] == products[0].inside), None)
            if op is not None:
                left.remove(op)
            yield products, op
        for op in left:
            yield [Product(f"aten.{_name_of(op[0])}", FORWARD, 0, (), op[0], 0)], op


def _post(posted: Posted, products: list[Product], op: _Op | None, count: FvcoreCount) -> None:
    name = _name_of(products[0].inside)
    flops = op[1] if op else None
    if flops == sum(product.flops for product in products):
        for product in products:
            posted.flops[product.op] += product.flops
        return
    largest = max(products, key=lambda product: product.flops)
    posted.flops[largest.op] += flops or 0
    for product in products:
        if op is None:
            why = f"fvcore drops {name} where no output depends on it"
        elif flops is None:
            why = f"fvcore's formula for {name} fails: {count.failed[op[0]]}"
        else:
            why = _why_other(name, product)
        posted.explain(product.op, why)


def _why_missing(kind: str) -> str:
    """Why fvcore has no number for a product inside an op of that kind."""
    if kind == AUTOGRAD_FUNCTION:
        return "fvcore does not look into autograd functions"
    return f"fvcore does not know {_name_of(kind)}" if kind else "fvcore's trace does not have it"


def _why_other(name: str, product: Product) -> str:
    """Why fvcore has another number for the op ``name`` than our products in it add up to."""
    if "integer" in product.traits:
        return f"fvcore counts {name} of integers, which are apart here, as int-ops"
    if "complex" in product.traits:
        return f"fvcore counts {name} of complex numbers as one of real numbers, a quarter of it"
    if "sparse" in product.traits:
        return f"fvcore counts {name} of a sparse operand as if it were dense"
    if name == "einsum":
        return "fvcore has einsum's FLOPs from numpy, in four digits and for the order in which numpy multiplies"
    if name == "matmul":
        return "fvcore leaves out the batch that only matmul's second operand has"
    return f"fvcore's formula for {name} gives another number"


def _name_of(kind: str) -> str:
    """``linear`` for ``aten::linear``, ``mylib.op`` for ``mylib::op``."""
    return kind.removeprefix("aten::").replace("::", ".")
