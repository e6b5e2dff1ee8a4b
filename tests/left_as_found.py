"""What of torch and Python a ledger may change while it records, to be compared before and after."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.autograd
from torch import nn
from torch.optim import Optimizer
from torch.utils import _python_dispatch

FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)


def torch_state() -> dict[str, Any]:
    """All of it, by name."""
    optimizers: Any = sys.modules[Optimizer.__module__]
    callbacks = sys.modules.get("torch._dynamo.callback")
    handler: Any = getattr(callbacks, "callback_handler", None)
    stack = [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]
    return {
        "Module.__call__": nn.Module.__call__,
        "run_backward": torch.autograd._engine_run_backward,  # type: ignore[attr-defined]
        "resize_": torch.UntypedStorage.__dict__.get("resize_"),
        "before optimizer steps": list(optimizers._global_optimizer_pre_hooks.values()),
        "after optimizer steps": list(optimizers._global_optimizer_post_hooks.values()),
        "modes": stack,
        "function modes": torch._C._len_torch_function_stack(),
        "flags": [getattr(_python_dispatch, flag, None) for flag in FLAGS],
        "recursion limit": sys.getrecursionlimit(),
        "while compiling": [list(handler.start_callbacks), list(handler.end_callbacks)] if handler else [[], []],
        "grad mode": torch.is_grad_enabled(),
        "torch functions": torch._C._get_torch_function_state(),
    }
