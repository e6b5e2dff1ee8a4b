"""Which of several forward products of one autograd node a backward product belongs to.

A custom function or a compiled graph is one node. Its backward runs last what the forward ran first.
"""

from __future__ import annotations

from torchledger.record.parameters import ParameterBooks
from torchledger.record.places import NodeOwners, Used
from torchledger.record.storages import Books

_GRADIENTS = 2
"""Products of a product's backward."""


def match_product(
    matched: dict[tuple[int, bool], int],
    products: tuple[Used, ...],
    found: tuple[int, ...],
    sizes: tuple[int, ...],
    books: Books,
    parameters: ParameterBooks,
    log: NodeOwners,
) -> Used:
    """The forward product: of the parameter ``found`` among the operands, or that fits the sizes of this one.

    Args:
        matched: how often the running backward has matched each product, by its number; this one is added.
        products: of the node's forward, in order.
        found: the parameters among the operands of the backward's product.
        sizes: elements of its result and of its operands.
        books: for the sizes of products without parameters.
        parameters: for the sizes of parameters.
        log: for the sizes of products in custom functions.
    """
    best: Used | None = None
    for used in reversed(products):
        numbers, row = used
        if found:
            fits, limit = found[0] in numbers, 1
        elif numbers:
            fits, limit = bool(sizes) and any(parameters.n_elements(n) == sizes[0] for n in numbers), 1
            made = log.signatures.get(row, ())
            if fits and made[:1] == ("parameter",) and made[1]:
                fits = made[1] == tuple(sorted(sizes))
        else:
            fits, limit = _has_sizes(books, row, sizes), _GRADIENTS
        if not fits:
            continue
        key = (row, bool(found))
        if matched.get(key, 0) < limit:
            matched[key] = matched.get(key, 0) + 1
            return used
        best = best or used
    return best or (tuple(dict.fromkeys(n for numbers, _ in products for n in numbers)) if not sizes else (), -1)


def _has_sizes(books: Books, row: int, sizes: tuple[int, ...]) -> bool:
    """Whether a product without parameters had tensors of these sizes, in whatever order."""
    index = row - books.n_products_before
    link = books.products[index][9] if 0 <= index < len(books.products) else ()
    return bool(link) and sorted(link[5][:3]) == sorted(sizes)
