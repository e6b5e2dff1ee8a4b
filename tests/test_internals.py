"""The private names of torch: each is there, and does what is said of it; a missing one gives one clear error."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from torchledger import internals
from torchledger.errors import TorchVersionError

OPTIONAL = {"make_grads", "CheckpointFunctionNode"}


def probed() -> dict[str, Any]:
    return {name: getattr(internals, name) for name in internals.__annotations__ if not name.startswith("_")}


def test_every_name_is_there() -> None:
    assert internals._missing == []
    internals.require()
    for name, value in probed().items():
        assert value is not None or name in OPTIONAL, name


def test_a_missing_name_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "_missing", ["torch._C._no_such_name"])
    with pytest.raises(TorchVersionError, match=r"lacks torch\._C\._no_such_name.*2\.9 to 2\.15"):
        internals.require()


class Seeing(TorchDispatchMode):
    """Notes what the names say at each op."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, str, int, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        node = internals.current_autograd_node()
        self.seen.append(
            (
                func.overloadpacket.__name__,
                internals.current_graph_task_id(),
                type(node).__name__,
                internals.get_sequence_nr(),
                internals.is_fwd_grad_enabled(),
            )
        )
        return func(*args, **(kwargs or {}))


def test_functions_of_modes_are_not_called() -> None:
    called = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        with internals.without_torch_function():
            torch.ones(2).sin()
        assert called == []
        torch.ones(2)
    assert called


def test_numbers_of_nodes_and_graph_tasks() -> None:
    x = torch.ones(2, requires_grad=True)
    before = internals.get_sequence_nr()
    with Seeing() as mode:
        assert internals.current_dispatch_modes()[-1] is mode
        y = x.sin()
        node_number = y.grad_fn._sequence_nr()  # type: ignore[union-attr]
        y.sum().backward()
    forward = mode.seen[0]
    assert forward[:3] == ("sin", -1, "NoneType")
    assert forward[3] == before + 1 == node_number + 1  # one more than the node's own
    backward = {name: node for name, task, node, _, _ in mode.seen if task != -1}
    assert backward["cos"] == "SinBackward0"
    assert backward["detach"] == internals.AccumulateGrad.__name__


def test_dimensions_of_a_nodes_input() -> None:
    leaf = torch.ones(2, 3, 4, requires_grad=True)
    assert internals.input_dimensions(leaf.prod().grad_fn) == 3
    assert internals.input_dimensions((leaf * 2)[0].prod().grad_fn) == 2


def test_forward_gradients_are_off_inside_a_custom_function_alone() -> None:
    seen = []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append(internals.is_fwd_grad_enabled())
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            seen.append(internals.is_fwd_grad_enabled())
            return g

    Function.apply(torch.ones(2, requires_grad=True)).sum().backward()
    with torch.no_grad():
        seen.append(internals.is_fwd_grad_enabled())
    assert seen == [False, True, True]


def test_saved_tensor_hooks() -> None:
    assert not internals.top_saved_tensors_hooks(False)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert internals.top_saved_tensors_hooks(False)


def test_kernels_modes_and_wrappers() -> None:
    assert internals.has_kernel_for_key("aten::linear", "CompositeImplicitAutograd")
    assert not internals.has_kernel_for_key("aten::mm", "CompositeImplicitAutograd")
    with Seeing() as mode:
        with internals.no_dispatch_modes():
            assert internals.current_dispatch_modes() == []
        assert internals.pop_dispatch_mode(None) is mode
        internals.push_dispatch_mode(mode)
    seen = []
    torch.func.vmap(lambda x: seen.append(internals.is_functorch_wrapped(x)) or x)(torch.ones(2))
    assert seen == [True]
    assert not internals.is_functorch_wrapped(torch.ones(2))
    assert not internals.is_functional_tensor(torch.ones(2))


def test_a_missing_name_of_simulations_is_another_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "_missing_for_simulation", ["torch._C._no_such_name"])
    internals.require()
    with pytest.raises(TorchVersionError, match=r"lacks torch\._C\._no_such_name, which simulated devices stand on"):
        internals.require_simulation()


def test_keys_of_another_backend() -> None:
    meta = torch.empty(2, 3, device="meta")
    tensor = internals.make_subclass(torch.Tensor, meta, False, device_for_backend_keys=torch.device("hpu"))
    assert type(tensor) is torch.Tensor
    keys = internals.dispatch_keys(tensor)
    assert keys.has(internals.DispatchKey.HPU)
    assert not keys.has(internals.DispatchKey.Meta)
    assert tensor.untyped_storage() is meta.untyped_storage()
    internals.include_meta(True)
    try:
        assert internals.meta_included()
        assert (tensor + tensor).shape == (2, 3)
        assert internals.dispatch_keys(tensor.t()).has(internals.DispatchKey.HPU)
    finally:
        internals.include_meta(False)
    assert not internals.meta_included()
    assert torch.ones(2).uniform_().device.type == "cpu"


def test_autocast_kernels_of_another_backend() -> None:
    key = internals.DispatchKey.AutocastHPU
    assert not internals.has_backend_fallback(key)
    library = torch.library.Library("_", "IMPL")
    library.fallback(internals.fallthrough_kernel, "AutocastHPU")
    assert internals.has_backend_fallback(key)
    internals.library_destroy(library)
    assert not internals.has_backend_fallback(key)
    with internals.exclude_keys(internals.DispatchKeySet(key)):
        assert internals.is_key_excluded("AutocastHPU")


def test_device_contexts_and_groups() -> None:
    assert torch.zeros in internals.device_constructors()
    with torch.device("cpu") as context:
        assert isinstance(context, torch.device)
    assert hasattr(internals.DeviceContext, "__torch_function__")
    torch.set_default_device("cpu")
    try:
        assert internals.global_device_context.device_context.device == torch.device("cpu")
    finally:
        torch.set_default_device(None)
        del internals.global_device_context.device_context
    x = torch.ones(2)
    ((device, dtype),) = internals.group_tensors([[x, x]], False)
    assert (device, dtype) == (torch.device("cpu"), torch.float32)


def test_names_that_are_imported_later() -> None:
    import torch._dynamo
    import torch._inductor.output_code

    assert hasattr(internals.dynamo_callbacks(), "register_start_callback")
    assert internals.inductor_graphs() is torch._inductor.output_code.CompiledFxGraph
    assert isinstance(internals.guards_ignore_modes(), bool)
    assert internals.get_tracing_state() is None
    assert not internals.is_key_excluded("Tracer")


def checkpointed(context_fn: Any, look: Any) -> None:
    x = torch.ones(2, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        look()
        return x.sin().cos()

    checkpoint(function, x, use_reentrant=False, context_fn=context_fn).sum().backward()


def test_recomputations_of_a_segment() -> None:
    found: list[tuple[dict[int, bool] | None, bool]] = []

    def look() -> None:
        hook = internals.top_saved_tensors_hooks(False)[0]
        recomputing = internals.current_graph_task_id() != -1
        found.append((internals.recomputations_of(hook, recomputing=recomputing), recomputing))

    checkpointed(noop_context_fn, look)
    (forward, first), (again, second) = found
    assert (first, second) == (False, True)
    assert forward is again  # torch's own note of this segment
    assert list(again.values()) == [True]


@pytest.mark.parametrize("hook", [None, len, lambda x: x, torch.sin], ids=["none", "builtin", "plain", "op"])
def test_what_is_no_segments_hook(hook: Any) -> None:
    for recomputing in (False, True):
        assert internals.recomputations_of(hook, recomputing=recomputing) is None
    assert not internals.is_selective_checkpoint(hook)


@pytest.mark.parametrize("selective", [False, True], ids=["whole", "selective"])
def test_selective_checkpoints(selective: bool) -> None:
    context_fn = (
        functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])
        if selective
        else noop_context_fn
    )
    found = []

    def look() -> None:
        if internals.current_graph_task_id() == -1:
            found.append(internals.is_selective_checkpoint(internals.top_saved_tensors_hooks(False)[0]))

    checkpointed(context_fn, look)
    assert found == [selective]


def test_enclosing_segments() -> None:
    found: list[tuple[list[bool], bool, bool]] = []

    def look() -> None:
        recomputing = internals.current_graph_task_id() != -1
        hook = internals.top_saved_tensors_hooks(False)[0]
        around = list(internals.enclosing_segments(sys._getframe()))
        own = internals.recomputations_of(hook, recomputing=hook.__qualname__.startswith("_recomputation"))
        found.append(([again for _, again in around], around[0][0].is_recomputed is own, recomputing))

    def inner(x: torch.Tensor) -> torch.Tensor:
        look()
        return x.sin()

    def outer(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(inner, x.cos(), use_reentrant=False).tan()

    assert list(internals.enclosing_segments(sys._getframe())) == []
    assert list(internals.enclosing_segments(None)) == []
    x = torch.ones(2, requires_grad=True)
    checkpoint(outer, x, use_reentrant=False).sum().backward()
    assert found[0] == ([False, False], True, False)  # its own, and the one around it
    # In the outer one's recompute a new one begins; in its own there is nothing behind.
    assert found[1:] == [([False, True], True, True), ([True], True, True)]
