"""Every private name of torch that torchledger stands on, looked up once.

Where one is missing, the first use of a ledger fails with one error that names it, instead of some line in the middle
of a step. Names that torchledger can do without are `optional` and None when missing.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from operator import attrgetter
from types import FrameType
from typing import Any, Final, TypeVar

import torch
import torch.utils._device
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from torchledger.errors import TorchVersionError

Function = TypeVar("Function", bound=Callable[..., Any])

_missing: list[str] = []


def _required(path: str) -> Any:
    try:
        return attrgetter(path)(torch)
    except AttributeError:
        _missing.append(f"torch.{path}")
        return None


def _of_optimizers(name: str) -> Any:
    module = sys.modules[torch.optim.Optimizer.__module__]  # which `torch.optim` does not show
    if not hasattr(module, name):
        _missing.append(f"{module.__name__}.{name}")
    return getattr(module, name, None)


def _optional(path: str) -> Any:
    try:
        return attrgetter(path)(torch)
    except AttributeError:
        return None


current_graph_task_id: Final[Callable[[], int]] = _required("_C._current_graph_task_id")
"""The number of the backward that runs on this thread, -1 when none does."""
current_autograd_node: Final[Callable[[], Any]] = _required("_C._current_autograd_node")
"""The node whose backward runs on this thread."""
get_sequence_nr: Final[Callable[[], int]] = _required("_C._autograd._get_sequence_nr")
"""The number that the next autograd node of this thread will carry."""
is_fwd_grad_enabled: Final[Callable[[], bool]] = _required("_C._is_fwd_grad_enabled")
"""False inside the forward of a custom autograd function (and in inference mode), True under plain `no_grad`."""
AccumulateGrad: Final[type] = _required("_C._functions.AccumulateGrad")
"""The class of the nodes that store `p.grad`."""
top_saved_tensors_hooks: Final[Callable[[bool], Any]] = _required("_C._autograd._top_saved_tensors_default_hooks")
"""The innermost pair of saved-tensor hooks, or None."""
has_kernel_for_key: Final[Callable[[str, str], bool]] = _required("_C._dispatch_has_kernel_for_dispatch_key")
"""Whether an operator has a kernel of its own for a dispatch key."""
is_functional_tensor: Final[Callable[[torch.Tensor], bool]] = _required("_is_functional_tensor")
"""Whether a tensor is one of functionalization's wrappers, whose values are not to be read."""
composite_explicit_key: Final[Any] = _required("_C.DispatchKey.CompositeExplicitAutograd")
"""The dispatch key under which higher-order ops keep the kernel for all devices."""
backend_select_key: Final[Any] = _required("_C.DispatchKey.BackendSelect")
"""The dispatch key under which higher-order ops choose the kernel of a device."""
current_dispatch_modes: Final[Callable[[], list[Any]]] = _required(
    "utils._python_dispatch._get_current_dispatch_mode_stack"
)
"""The dispatch modes of this thread, outermost first."""
pop_dispatch_mode: Final[Callable[[Any], Any]] = _required("_C._pop_torch_dispatch_stack")
"""Take the innermost mode off this thread's stack."""
push_dispatch_mode: Final[Callable[[Any], None]] = _required("_C._push_on_torch_dispatch_stack")
"""Put a mode on this thread's stack."""
no_torch_dispatch: Final[Any] = _required("_C._disabled_torch_dispatch_impl")
"""The `__torch_dispatch__` of subclasses that do without one."""
composite_implicit_key: Final[Any] = _required("_C.DispatchKey.CompositeImplicitAutograd")
"""The dispatch key of kernels that are made of other ops."""
is_functorch_wrapped: Final[Callable[[torch.Tensor], bool]] = _required("_C._functorch.is_functorch_wrapped_tensor")
"""Whether a tensor is one of a function transform's, which hides its storage."""
get_tracing_state: Final[Callable[[], Any]] = _required("_C._get_tracing_state")
"""The state of a `torch.jit.trace` that runs, or None."""
set_tracing_state: Final[Callable[[Any], None]] = _required("_C._set_tracing_state")
"""Let it go on, or (None) stand still."""
last_script_graph: Final[Callable[[], Any]] = _optional("_C._last_executed_optimized_graph") or (lambda: None)
"""The graph of scripted code, as it was optimized, that this thread ran last; None where none has."""
script_callables: Final[tuple[Any, ...]] = (_required("_C.ScriptMethod"), _required("_C.ScriptFunction"))
"""The classes of what runs scripted code."""
script_texts: Final[tuple[tuple[Any, str], ...]] = tuple(
    (kind, name)
    for kind in (_optional("_C.Graph"), _optional("_C.Node"))
    for name in ("__repr__", "str", "t")
    if name in getattr(kind, "__dict__", ())
)
"""What prints graphs of scripted code, and reads their constants."""
is_key_excluded: Final[Callable[[str], bool]] = _required("_C._dispatch_tls_is_dispatch_key_excluded")
"""Whether this thread dispatches past a key."""
set_key_excluded: Final[Callable[[str, bool], None]] = _required("_C._dispatch_tls_set_dispatch_key_excluded")
"""Dispatch past a key on this thread, or no longer."""
no_dispatch_modes: Final[Callable[[], Any]] = _required("utils._python_dispatch._disable_current_modes")
"""A context without the dispatch modes of this thread."""
engine_run_backward: Final[Callable[..., Any]] = _required("autograd._engine_run_backward")
"""The function through which Python starts every backward; patched in its module while recording."""
optimizer_pre_hooks: Final[dict[int, Any]] = _of_optimizers("_global_optimizer_pre_hooks")
"""The hooks that run before each step of any optimizer."""
optimizer_post_hooks: Final[dict[int, Any]] = _of_optimizers("_global_optimizer_post_hooks")
"""The hooks that run after it."""
without_torch_function: Final[Callable[[], Any]] = _required("_C.DisableTorchFunction")
"""A context in which no torch function mode or subclass of the program's is told what we read."""
torch_function_state: Final[Callable[[], Any]] = _required("_C._get_torch_function_state")
"""Whether this thread tells torch function modes and subclasses of calls."""
set_torch_function_state: Final[Callable[[Any], None]] = _required("_C._set_torch_function_state")
"""Let it, or no longer."""
functions_on: Final[Callable[[], bool]] = _required("_C._is_torch_function_enabled")
"""Whether tensor subclasses are told of calls, on this thread."""
no_torch_function: Final[Any] = _required("_C._disabled_torch_function_impl")
"""The `__torch_function__` of subclasses that do without one."""
function_modes_on: Final[Callable[[], bool]] = _required("_C._is_torch_function_mode_enabled")
"""Whether a torch function mode is on, on this thread."""
make_grads: Final[Any] = _optional("autograd._make_grads")
"""What makes the first gradient of a backward, just before the engine starts."""
TrueTensorTypes: Final[tuple[type, ...]] = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""Types whose ops the dispatcher does not hand to a subclass."""
CheckpointFunctionNode: Final[type | None] = getattr(
    _optional("utils.checkpoint.CheckpointFunction"), "_backward_cls", None
)
"""The class of reentrant checkpointing's node."""

enable_profiler: Final[Callable[[Any], None]] = _optional("_C._autograd._enable_profiler_legacy")
"""Begin to note ops and the CPU allocator's events on this thread: unlike the newer profiler, it writes no log."""
disable_profiler: Final[Callable[[], Any]] = _optional("_C._autograd._disable_profiler_legacy")
"""End it; what was noted, in order, for each thread."""
ProfilerConfig: Final[Any] = _optional("_C._profiler.ProfilerConfig")
"""What to note."""
ProfilerState: Final[Any] = _optional("_C._profiler.ProfilerState")
"""By which means."""
ProfilerOptions: Final[Any] = _optional("_C._profiler._ExperimentalConfig")
"""More of its options."""
RecordFunctionFast: Final[Any] = _optional("_C._profiler._RecordFunctionFast")
"""A range in what a profiler notes, that is no op."""


def recomputations_of(pack_hook: Any, *, recomputing: bool) -> dict[int, bool] | None:
    """Torch's own note of which backwards recomputed a segment of a non-reentrant checkpoint; None where it has none.

    Args:
        pack_hook: The innermost saved-tensor hook, in the segment's forward or in its recompute.
        recomputing: Which of the two.
    """
    frame = _captured(pack_hook, "target_frame_ref" if recomputing else "frame")
    return getattr(frame() if recomputing and frame is not None else frame, "is_recomputed", None)


def is_selective_checkpoint(pack_hook: Any) -> bool:
    """Whether the segment of a non-reentrant checkpoint keeps the results of some of its ops.

    Args:
        pack_hook: The innermost saved-tensor hook, in the segment's forward. (The modes of this thread do not tell: the
            one that keeps results is off the stack while it hands an op on.)
    """
    return is_selective_segment(_captured(pack_hook, "frame"))


def is_selective_segment(segment: Any) -> bool:
    """The same of a segment itself, as torch notes it."""
    recompute = getattr(segment, "recompute_fn", None)
    return isinstance(_captured(recompute, "recompute_context"), TorchDispatchMode)


def enclosing_segments(frame: FrameType | None) -> Iterator[tuple[Any, bool]]:
    """The segments of non-reentrant checkpoints that run around a Python frame, as torch notes them, innermost first.

    Each with whether it is its recompute that runs there, behind which there is no more.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_filename == torch.utils.checkpoint.__file__:
            if "gen" in code.co_varnames:  # `checkpoint`, or what it calls in newer versions
                inner = getattr(frame.f_locals.get("gen"), "gi_frame", None)
                segment = None if inner is None else inner.f_locals.get("new_frame")
                if segment is not None:
                    yield segment, False
            elif code.co_name == "unpack_hook" and "frame" in code.co_freevars:
                yield frame.f_locals["frame"], True
                return
            elif code.co_name == "backward":
                return
        frame = frame.f_back


def _captured(function: Any, name: str) -> Any:
    """What a function's closure holds under a name; None if it has none such."""
    function = getattr(function, "_torchdynamo_orig_callable", function)
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or not cells or name not in code.co_freevars:
        return None
    return cells[code.co_freevars.index(name)].cell_contents


def input_dimensions(node: Any) -> int | None:
    """How many dimensions the first input of an autograd node's forward had; None where torch does not tell."""
    target, index = node.next_functions[0]
    metadata = getattr(target, "_input_metadata", None)
    return None if metadata is None else len(metadata[index].shape)


@contextlib.contextmanager
def no_tracing() -> Iterator[None]:
    """A context that a `torch.jit.trace` of this thread does not see: sizes are plain numbers in it."""
    state = get_tracing_state()
    if state is None:
        yield
        return
    before = getattr(_standing, "trace", None)
    _set_tracing(None)
    _standing.trace = state
    try:
        yield
    finally:
        _standing.trace = before
        _set_tracing(state)


_standing = threading.local()
"""The trace that `no_tracing` keeps out of this thread."""


@contextlib.contextmanager
def tracing_again() -> Iterator[None]:
    """Inside `no_tracing`: a context that the trace sees after all, also from inside a mode's handler."""
    state = getattr(_standing, "trace", None)
    if state is None:
        yield
        return
    excluded = is_key_excluded("Tracer")
    set_key_excluded("Tracer", False)
    set_tracing_state(state)
    try:
        yield
    finally:
        set_tracing_state(None)
        set_key_excluded("Tracer", excluded)


def _set_tracing(state: Any) -> None:
    excluded = is_key_excluded("Tracer")  # the handler of a mode dispatches past it, where torch refuses
    set_key_excluded("Tracer", False)
    set_tracing_state(state)
    set_key_excluded("Tracer", excluded)


def require() -> None:
    """Fail with one clear error where the installed torch lacks a name that recording stands on.

    Raises:
        TorchVersionError: it lists the missing names and the versions that have them.
    """
    if _missing:
        raise TorchVersionError(
            f"torch {torch.__version__} lacks {', '.join(_missing)}, which torchledger records with. "
            f"Versions 2.9 to 2.15 have them: install one of those, or a newer torchledger."
        )


def unseen(function: Function) -> Function:
    """The function, of which no torch function mode or subclass of the program's is told what it reads."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with without_torch_function():
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]


def has_torch_function(tensor: torch.Tensor) -> bool:
    """Whether a tensor's class is told of the calls that it is given to."""
    kind: Any = type(tensor)
    return kind not in TrueTensorTypes and kind.__torch_function__ is not no_torch_function


def is_plain_module_call(function: Any) -> bool:
    """Whether a function is torch's own `nn.Module.__call__`, which does no more than choose what it calls."""
    code = getattr(function, "__code__", None)
    return (
        function is getattr(torch.nn.Module, "_wrapped_call_impl", None)
        and code is not None
        and code.co_names == ("_compiled_call_impl", "_call_impl")
    )


def guards_ignore_modes() -> bool:
    """Whether Dynamo's guards leave out the dispatch keys that a mode sets (they do from torch 2.10 on)."""
    return hasattr(torch._C._dynamo.guards, "set_is_in_mode_without_ignore_compile_internals")


def inductor_graphs() -> Any:
    """The class of the graphs that Inductor compiled, or None as long as nothing has imported it."""
    module = sys.modules.get("torch._inductor.output_code")
    return getattr(module, "CompiledFxGraph", None)


def dynamo_callbacks() -> Any:
    """Dynamo's compile callbacks, or None as long as nothing has imported Dynamo."""
    module = sys.modules.get("torch._dynamo.callback")
    return getattr(module, "callback_handler", None)


def packages() -> list[Any]:
    """The classes that run packages of AOTInductor."""
    spaces = _optional("_C._aoti")
    return [kind for name, kind in vars(spaces).items() if name.startswith("AOTIModel")] if spaces else []


def dynamo_frames() -> Any:
    """Dynamo's module that turns frames into graphs, or None as long as nothing has imported it."""
    return sys.modules.get("torch._dynamo.convert_frame")


# What simulated devices stand on.

_missing_for_simulation: list[str] = []


def _simulating(path: str) -> Any:
    try:
        return attrgetter(path)(torch)
    except AttributeError:
        _missing_for_simulation.append(f"torch.{path}")
        return None


make_subclass: Final[Callable[..., torch.Tensor]] = _simulating("Tensor._make_subclass")
"""A tensor on the same storage as another, which may carry the dispatch keys of another backend."""
dispatch_keys: Final[Callable[[torch.Tensor], Any]] = _simulating("_C._dispatch_keys")
"""The dispatch keys that a tensor carries."""
meta_included: Final[Callable[[], bool]] = _simulating("_C._meta_in_tls_dispatch_include")
"""Whether all calls of this thread dispatch as if a tensor were on `meta`."""
include_meta: Final[Callable[[bool], None]] = _simulating("_C._set_meta_in_tls_dispatch_include")
"""Let them, or no longer."""
exclude_keys: Final[Any] = _simulating("_C._ExcludeDispatchKeyGuard")
"""A context in which no call dispatches to some keys."""
DispatchKey: Final[Any] = _simulating("_C.DispatchKey")
"""The dispatch keys."""
DispatchKeySet: Final[Any] = _simulating("_C.DispatchKeySet")
"""Sets of them."""
has_backend_fallback: Final[Callable[[Any], bool]] = _simulating("_C._dispatch_has_backend_fallback")
"""Whether a key has a kernel for every op that has none of its own."""
fallthrough_kernel: Final[Any] = _simulating("library.fallthrough_kernel")
"""What a library registers where dispatch is to go on to the next key."""
library_destroy: Final[Any] = _simulating("library.Library._destroy")
"""Takes back what a library registered."""
device_constructors: Final[Callable[[], set[Any]]] = _simulating("utils._device._device_constructors")
"""The functions that a `with torch.device(...)` gives its device to."""
DeviceContext: Final[Any] = _simulating("utils._device.DeviceContext")
"""The mode that it enters."""
global_device_context: Final[Any] = _simulating("_GLOBAL_DEVICE_CONTEXT")
"""Where `torch.set_default_device` keeps the mode that it entered on this thread."""
group_tensors: Final[Callable[..., Any]] = _simulating("_C._group_tensors_by_device_and_dtype")
"""What optimizers sort their tensors with."""
parse_to: Final[Callable[..., Any]] = _simulating("_C._nn._parse_to")
"""What `Module.to` reads its arguments with."""
functorch_unwrapped: Final[Callable[[torch.Tensor], torch.Tensor]] = _simulating("_C._functorch.get_unwrapped")
"""The tensor inside one of a function transform's."""
script_builtins: Final[Callable[[], dict[int, str]]] = _simulating("jit._builtins._get_builtin_table")
"""The ops that `torch.jit.script` knows functions of torch's as, by id."""


def require_simulation() -> None:
    """Fail with one clear error where the installed torch lacks a name that simulated devices stand on.

    Raises:
        TorchVersionError: it lists the missing names and the versions that have them.
    """
    require()
    if _missing_for_simulation:
        raise TorchVersionError(
            f"torch {torch.__version__} lacks {', '.join(_missing_for_simulation)}, which simulated devices stand on. "
            f"Versions 2.9 to 2.15 have them: install one of those, or a newer torchledger."
        )
