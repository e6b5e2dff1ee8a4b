"""Sums that a device makes in place, and a program under a dispatch mode does not.

Under any mode autograd adds gradients that meet out of place, and scatters into a new tensor where it would scatter
into its own. On a device without one it writes into the operand, if nothing else holds it; then that operand goes as
soon as the sum is made, which is how it is told here: see `Blocks.enter_sum`.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

from torchledger import internals
from torchledger.simulation.contracts import Mode
from torchledger.simulation.operators import Operator

aten = torch.ops.aten
SUMS = {
    aten.add.Tensor,
    aten.scatter.src,
    aten.scatter_add.default,
    aten.index_add.default,
    aten.index_put.default,
    aten._unsafe_index_put.default,
}
_engine_code = internals.engine_run_backward.__code__
_current_node = internals.current_autograd_node


def enter(mode: Mode, operator: Operator, args: Any, out: Any) -> bool:
    """Enter the result of a sum, if it may be one that a device makes in place.

    Args:
        mode: The mode that runs it.
        operator: One of `SUMS`.
        args: Its arguments; the first is what it would be made in.
        out: Its result, which lies nowhere yet.
    """
    old = args[0]
    if type(old) is not torch.Tensor or old.shape != out.shape or old.dtype is not out.dtype or old._is_view():
        return False
    block = mode.block_of(old)
    if block is None or block.place < 0:
        return False
    if operator.op is aten.add.Tensor and mode.in_linear:
        mode.blocks.enter_sum(out, block)
        return True
    if internals.current_graph_task_id() == -1 or torch.is_grad_enabled() or not _engine_calls(sys._getframe(2)):
        return False
    node = _current_node()
    if node is None:
        return False
    made_by_node = block.node == node._sequence_nr()
    if operator.op is aten.add.Tensor:
        targets = [edge for edge in node.next_functions if edge[0] is not None]
        if made_by_node and len(set(targets)) == len(targets):
            return False  # one gradient to each target: not the engine's sum, but the node's own
    elif not made_by_node:
        return False
    mode.blocks.enter_sum(out, block)
    return True


def _engine_calls(frame: FrameType | None) -> bool:
    """Whether no Python but dispatch modes stands between an op and the engine."""
    while frame is not None and frame.f_code.co_name in ("__torch_dispatch__", "__call__", "run", "run_functional"):
        frame = frame.f_back
    return frame is not None and frame.f_code is _engine_code
