"""Products that compiled code and higher-order ops run again in their backward.

Such code is one autograd node for all its ops, and what its backward computes again of the forward (a checkpoint that
was compiled, the branch of `cond`, the body of `map`) runs beside the gradients. A product that multiplies a parameter
the same way round as one of the forward did is that one once more: its input gradient takes it the other way round.
Where no parameter takes part, two gradients are due for each product of the forward (and one of each weight's that has
these sizes); further ones of its sizes are that product once more.
"""

from __future__ import annotations

from typing import Any

import torch

from torchledger.record.places import Run, Signature, is_compilers_node

_GRADIENTS = 2
_OF_MATRICES = frozenset(("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot"))
"""The ops that gradients of products are made of, as well as the products themselves."""


def signature(name: str, args: Any, out: Any, found: tuple[int, ...], first: int) -> Signature:
    """What another run of a product has in common with it.

    Args:
        name: The op.
        args: Its arguments.
        out: Its result.
        found: The parameters among its operands.
        first: The position of the first of them; below 0 for none.
    """
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    of_matrices = name.removeprefix("aten.") in _OF_MATRICES
    sizes = tuple(sorted([_numel(out), *(t.numel() for t in tensors[-2:])])) if of_matrices else ()
    if found and first >= 0:
        operand = args[first]
        return "parameter", sizes, found[0], tuple(operand.shape), operand.stride()
    if of_matrices:
        return "sizes", sizes
    return "op", name, tuple(tuple(t.shape) for t in tensors)


def is_rerun(run: Run, node: Any, seen: Signature) -> bool:
    """Whether a product in a node's backward is one of its forward once more; each is found so once a backward.

    Args:
        run: The backward.
        node: The node.
        seen: The product's signature.
    """
    if not is_compilers_node(node):
        return False
    number = node._sequence_nr()
    log = run.log
    known = [log.signatures.get(row) or log.signatures_before.get(row) for _, row in log.products_of(number)]
    reruns = run.reruns
    if seen[0] != "sizes":
        n_made, key = known.count(seen), (number, seen)
        reruns[key] = reruns.get(key, 0) + 1
        return reruns[key] <= n_made
    n_made = known.count(seen)
    n_weights = sum(other is not None and other[:2] == ("parameter", seen[1]) for other in known)
    key = (number, seen)
    reruns[key] = reruns.get(key, 0) + 1
    return bool(n_made) and reruns[key] > _GRADIENTS * n_made + n_weights


def _numel(value: Any) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else 0
