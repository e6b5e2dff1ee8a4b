"""What an op gives, without its values: asked of torch's meta kernels once for each signature, and then made anew."""

from __future__ import annotations

from typing import Any

import torch

from torchledger.errors import SimulationError
from torchledger.simulation.blocks import storage_of
from torchledger.simulation.keys import META, Backend, inside
from torchledger.simulation.operators import Operator

_Tensor = torch.Tensor
_empty_strided = torch.empty_strided
_NOTHING = object()
_PLAIN = (int, float, bool, complex, str, torch.dtype, torch.layout, torch.memory_format, torch.device, type(None))
LIMIT = 50_000
"""How many signatures are kept."""


class Results:
    """Makes the results of ops."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._specs: dict[Any, Any] = {}
        self._checked: set[Any] = set()

    def make(self, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
        """The results of a functional op on simulated tensors, each with a new storage that lies nowhere yet.

        Raises:
            SimulationError: torch does not know what the op would give.
        """
        try:
            key = (id(operator), torch.get_default_dtype(), *map(signature, args), *_named(kwargs))
            spec = self._specs.get(key, _NOTHING)
        except TypeError:
            key, spec = None, _NOTHING
        if spec is _NOTHING:
            out = self.run(operator, args, kwargs)
            if key is not None and len(self._specs) < LIMIT and not _aliases(out, args):
                self._specs[key] = _spec(out)
            return self.wrap(out)
        return self._from_spec(spec)

    def run(self, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an op's meta kernel."""
        if "generator" in kwargs:
            kwargs = {k: v for k, v in kwargs.items() if k != "generator"}
        args = [self._without_data(arg) for arg in args]
        kwargs = {name: self._without_data(value) for name, value in kwargs.items()}
        with inside():
            try:
                return operator.call(*args, **kwargs)
            except NotImplementedError as error:
                raise SimulationError(
                    f"torch does not know what {operator.name} gives without running it (no meta kernel): "
                    f"{str(error).splitlines()[0]} Give a custom op one with torch.library.register_fake."
                ) from error

    def _without_data(self, arg: Any) -> Any:
        """An argument of a meta kernel: a real tensor would draw the result to the host."""
        if isinstance(arg, _Tensor):
            if arg.layout is torch.strided and storage_of(arg).device.type == "cpu":
                return _empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=META)
        elif isinstance(arg, list | tuple) and any(isinstance(item, _Tensor) for item in arg):
            return [self._without_data(item) for item in arg]
        return arg

    def check(self, operator: Operator, args: Any, kwargs: dict[str, Any]) -> None:
        """Let an in-place op complain of its arguments, once for each signature; it writes nothing."""
        try:
            key = (id(operator), *map(signature, args), *_named(kwargs))
            if key in self._checked:
                return
        except TypeError:
            key = None
        self.run(operator, args, kwargs)
        if key is not None and len(self._checked) < LIMIT:
            self._checked.add(key)

    def wrap(self, out: Any) -> Any:
        """Results of a meta kernel as simulated tensors."""
        if isinstance(out, _Tensor):
            return self.backend.rekey(out)
        if isinstance(out, list | tuple):
            return type(out)(self.wrap(item) for item in out)
        return out

    def fresh(self, shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        """A simulated tensor with a new storage."""
        return self.backend.rekey(_empty_strided(shape, stride, dtype=dtype, device=META))

    def within(self, n_elements: int, shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        """A simulated tensor with a new storage that has room for more."""
        room = _empty_strided((n_elements,), (1,), dtype=dtype, device=META)
        return self.backend.rekey(room.as_strided(shape, stride))

    def _from_spec(self, spec: Any) -> Any:
        if type(spec) is tuple:
            if spec[3]:
                return self.within(spec[3], spec[0], spec[1], spec[2])
            return self.backend.rekey(_empty_strided(spec[0], spec[1], dtype=spec[2], device=META))
        if type(spec) is list:
            return tuple(self._from_spec(item) for item in spec)
        return spec


def contiguous_strides(shape: Any) -> tuple[int, ...]:
    """The strides of a contiguous tensor.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def signature(arg: Any) -> Any:
    """What of an argument the results of an op depend on."""
    if isinstance(arg, _Tensor):
        if arg.layout is not torch.strided:
            raise TypeError
        return (arg.shape, arg.stride(), arg.dtype)
    if type(arg) in (int, float, bool):
        return (arg.__class__, arg)
    if isinstance(arg, list | tuple):
        return tuple(map(signature, arg))
    if isinstance(arg, _PLAIN):
        return arg
    raise TypeError


def _named(kwargs: dict[str, Any]) -> Any:
    return [(name, signature(value)) for name, value in kwargs.items() if name != "generator"] if kwargs else ()


def _spec(out: Any) -> Any:
    """What is kept of a result; one list for all of several."""
    if isinstance(out, _Tensor):
        shape, stride = out.shape, out.stride()
        needed = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if out.numel() else 0
        room = storage_of(out).nbytes() // out.element_size()
        return (shape, stride, out.dtype, room if room != needed else 0)
    if isinstance(out, list | tuple):
        return [_spec(item) for item in out]
    return out


def _aliases(out: Any, args: Any) -> bool:
    """Whether a result is a view of an argument or of another result, or of no plain kind."""
    seen = set()
    for arg in args:
        for tensor in arg if isinstance(arg, list | tuple) else (arg,):
            if isinstance(tensor, _Tensor):
                seen.add(id(storage_of(tensor)))
    for tensor in out if isinstance(out, list | tuple) else (out,):
        if isinstance(tensor, list | tuple):
            return True
        if isinstance(tensor, _Tensor):
            if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
                return True
            if id(storage_of(tensor)) in seen or tensor.storage_offset():
                return True
            seen.add(id(storage_of(tensor)))
    return False
