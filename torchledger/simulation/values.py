"""Values of simulated tensors: those that are known, and those that are assumed.

Small tensors of integers and bools, and single numbers, keep their true values beside them for as long as these follow
from what the host knows: so positions, masks, labels and counters are what they would be. Whatever depends on weights
or random numbers is unknown; a program that reads it gets an assumed value, and the assumption is counted.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from torchledger.simulation import host, truths
from torchledger.simulation.blocks import HOST, Block, Blocks, storage_of
from torchledger.simulation.operators import Operator

aten = torch.ops.aten
_Tensor = torch.Tensor
_empty, _empty_strided = torch.empty, torch.empty_strided
LARGEST_KNOWN = 1 << 18
"""Elements of the largest tensor whose values are kept."""
LARGEST_FLOATS = 64
_UNSET = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided)
_OVERWRITING = (aten.fill_, aten.zero_, aten.copy_)
_KEEPING = (aten._amp_foreach_non_finite_check_and_unscale_,)
"""Ops whose written tensors keep their values: no gradient is taken for infinite."""


class Values:
    """What is known of the values of simulated tensors, by storage."""

    def __init__(self, blocks: Blocks) -> None:
        self.live = blocks.live
        self.known: dict[int, torch.UntypedStorage] = {}
        self.taken_for_true: set[int] = set()
        """Storages of bools that are not known, and not taken for False."""
        self.assumptions: Counter[str] = Counter()
        """How often values were read that are not known, by kind."""

    def forget_storage(self, key: int) -> None:
        """A storage has gone."""
        self.known.pop(key, None)
        self.taken_for_true.discard(key)

    # Reading

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The known values of a tensor, as a real one; None where they are not known."""
        storage = self.known.get(id(storage_of(tensor)))
        if storage is not None:
            real = _empty(0, dtype=tensor.dtype, device="cpu")
            return real.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        if self._block(tensor) is None and tensor.device.type == "cpu":
            return tensor
        return None

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Values for a program that asks for them: known, or assumed and counted.

        Raises:
            SimulatedValueError: a host tensor without data.
        """
        known = self.of(tensor)
        if known is not None:
            return known
        block = self._block(tensor)
        if block is not None and block.place == HOST:
            host.refuse_reading(tensor, "read")
        value = int(tensor.dtype is not torch.bool or self._holds(tensor))
        self.assumptions[_kind(tensor, value)] += 1
        return torch.full((), value, dtype=tensor.dtype, device="cpu").expand(tensor.shape)

    # Writing

    def copy(self, source: torch.Tensor, copy: torch.Tensor) -> None:
        """A new tensor has the values of another, perhaps in another dtype."""
        if _may_be_known(copy) and (known := self.of(source)) is not None:
            self.set(copy, known)

    def set(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Say what the values of a tensor are, which has its storage for itself."""
        real = _empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        real.copy_(values)
        if storage_of(real).nbytes() == storage_of(tensor).nbytes():
            self.known[id(storage_of(tensor))] = storage_of(real)

    def forget(self, tensor: torch.Tensor) -> None:
        """The values of a tensor's storage are not known any more."""
        self.forget_storage(id(storage_of(tensor)))

    def follow(self, operator: Operator, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Work out the values of new results, where they are small and follow from known ones."""
        if isinstance(out, _Tensor):
            if not _may_be_known(out):
                if out.dtype is torch.bool:
                    self._assume(operator, args, out)
                return
        elif not isinstance(out, list | tuple) or not any(isinstance(t, _Tensor) and _may_be_known(t) for t in out):
            return
        if operator.is_random or getattr(operator.op, "overloadpacket", None) in _UNSET:
            return
        try:
            real = self._run(operator, args, kwargs)
        except _UnknownError:
            if isinstance(out, _Tensor) and not out.is_floating_point():
                self._follow_logic(operator, args, out)
            return
        for result, value in zip(_as_list(out), _as_list(real), strict=False):
            if not isinstance(result, _Tensor) or not isinstance(value, _Tensor) or not _may_be_known(result):
                continue
            if result.shape == value.shape:  # not so where the host makes less than a device
                self.set(result, value)

    def _follow_logic(self, operator: Operator, args: Any, out: torch.Tensor) -> None:
        """The result of a logical op may follow from one operand alone; else a bool is assumed."""
        value = self._absorbing(operator, args)
        if value is not None:
            self.set(out, torch.tensor(value, device="cpu"))
        elif out.dtype is torch.bool:
            self._assume(operator, args, out)

    def _absorbing(self, operator: Operator, args: Any) -> bool | None:
        return truths.find_absorbing(operator.op.overloadpacket, [self.of(t) for t in args if isinstance(t, _Tensor)])

    def _assume(self, operator: Operator, args: Any, out: torch.Tensor) -> None:
        if truths.is_taken_for_true(operator.op.overloadpacket, args, self._holds):
            self.taken_for_true.add(id(storage_of(out)))

    def _holds(self, tensor: Any) -> bool:
        """Whether bools are true throughout: known, or taken for it."""
        if not isinstance(tensor, _Tensor) or tensor.dtype is not torch.bool:
            return False
        known = self.of(tensor)
        return bool(known.all()) if known is not None else id(storage_of(tensor)) in self.taken_for_true

    def write(self, operator: Operator, args: Any, kwargs: dict[str, Any]) -> None:
        """An op writes into its first arguments: their values follow, or are not known any more."""
        packet = operator.op.overloadpacket
        target = args[0]
        overwrites = packet in _OVERWRITING
        if isinstance(target, _Tensor) and self.taken_for_true:
            self.taken_for_true.discard(id(storage_of(target)))
        if packet in _KEEPING or (not self.known and not overwrites):
            return
        if overwrites and id(storage_of(target)) not in self.known:
            if not self._is_whole(target):
                return
            if packet is aten.copy_ and self.of(args[1]) is None:
                return
            self.set(target, torch.zeros((), dtype=target.dtype, device="cpu"))
        if not any(id(storage_of(t)) in self.known for t in _tensors(args)):
            return
        try:
            if operator.is_random:
                raise _UnknownError
            self._run(operator, args, kwargs)
        except _UnknownError:
            if (value := self._absorbing(operator, args)) is not None and self._is_whole(target):
                self.set(target, torch.tensor(value, device="cpu"))
                return
            for value, argument in zip(args, operator.op._schema.arguments, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for tensor in _tensors((value,)):
                        self.forget(tensor)

    def _run(self, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
        real = [self._real(arg) for arg in args]
        named = {name: self._real(value) for name, value in kwargs.items() if name != "device"}
        if "device" in kwargs:
            named["device"] = torch.device("cpu")
        try:
            return operator.call(*real, **named)
        except (RuntimeError, NotImplementedError, TypeError):
            raise _UnknownError from None

    def _real(self, arg: Any) -> Any:
        if isinstance(arg, _Tensor):
            known = self.of(arg)
            if known is None:
                raise _UnknownError
            return known
        if isinstance(arg, list | tuple) and any(isinstance(item, _Tensor) for item in arg):
            return [self._real(item) for item in arg]
        return arg

    def _is_whole(self, target: torch.Tensor) -> bool:
        """Whether a tensor whose values may be known has its storage for itself."""
        return _may_be_known(target) and storage_of(target).nbytes() == target.numel() * target.element_size()

    def _block(self, tensor: torch.Tensor) -> Block | None:
        return self.live.get(id(storage_of(tensor)))


class _UnknownError(Exception):
    """Something that values would follow from is not known."""


def _may_be_known(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    n = tensor.numel()
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return n <= LARGEST_FLOATS
    return n <= LARGEST_KNOWN


def _kind(tensor: torch.Tensor, value: int) -> str:
    if tensor.dtype is torch.bool:
        return f"bool taken for {bool(value)}"
    return "float taken for 1.0" if tensor.dtype.is_floating_point or tensor.dtype.is_complex else "integer taken for 1"


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else (value,)


def _tensors(args: Any) -> Any:
    for arg in args:
        if isinstance(arg, _Tensor):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from (item for item in arg if isinstance(item, _Tensor))
