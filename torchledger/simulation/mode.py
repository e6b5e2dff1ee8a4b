"""The dispatch mode that stands for the device: each op's results, where they lie, and what they take of its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchledger import internals
from torchledger.simulation import dependent, hidden, host, moves, products, sparse, sums
from torchledger.simulation.blocks import HOST, Block, storage_of
from torchledger.simulation.contracts import Device
from torchledger.simulation.keys import GENUINE_META, inside
from torchledger.simulation.operators import Kind, Operator
from torchledger.simulation.specials import SPECIALS

_Tensor = torch.Tensor
_VIEW, _INPLACE, _OUT = int(Kind.VIEW), int(Kind.INPLACE), int(Kind.OUT)
_COMPOSITE, _HIGHER_ORDER = int(Kind.COMPOSITE), int(Kind.HIGHER_ORDER)
_composite_key = internals.composite_implicit_key


class SimulationMode(TorchDispatchMode):
    """Runs the ops of one thread on the simulated device."""

    supports_higher_order_operators = True

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.blocks = device.blocks
        self.live = device.blocks.live
        self.results = device.results
        self.values = device.values
        self.operators: dict[int, Operator] = {}
        self.composites: dict[Any, Callable[..., Any]] = {}
        """Compositions that a device makes otherwise; in inference mode they arrive here whole."""
        self.in_linear = False
        """Whether `linear` itself adds the bias now."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled function would run as it is; the simulation refuses to compile by itself."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator = self.operators.get(id(func))
        if operator is None:
            operator = self.learn(func)
        if kwargs is None:
            kwargs = {}
        for t in types:
            if t is not _Tensor and t.__torch_dispatch__ is not internals.no_torch_dispatch:
                return NotImplemented
        try:
            return self.run(func, operator, args, kwargs)
        except NotImplementedError:
            if not sparse.has_sparse(args):
                raise
        return sparse.run(self, operator, args, kwargs)

    def run(self, func: Any, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an op of dense tensors.

        Raises:
            NotImplementedError: a sparse tensor is among its arguments, which has no storage of its own.
        """
        kind = operator.kind
        if operator.special is not None:
            return operator.special(self, operator, args, kwargs)
        if kind == _VIEW:
            return self.run_view(operator, args, kwargs)
        if kind == _COMPOSITE:
            with self:
                composite = self.composites.get(func)
                if composite is not None:
                    return composite(*args, **kwargs)
                return func._op_dk(_composite_key, *args, **kwargs)
        if kind == _HIGHER_ORDER:
            return func(*args, **kwargs)
        if kind == _INPLACE:
            return self.run_inplace(operator, args, kwargs)
        if kind == _OUT:
            return self.run_out(operator, args, kwargs)
        return self.run_functional(operator, args, kwargs)

    def learn(self, func: Any) -> Operator:
        """Work out an operator's entry at its first call."""
        special: Callable[..., Any] | None = SPECIALS.get(func)
        operator = self.operators[id(func)] = Operator(func, special, self.device.backend.name)
        operator.operands = hidden.PRODUCTS.get(func)
        return operator

    # Where things lie

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The block of a simulated tensor, None for a real one."""
        try:
            return self.live.get(id(storage_of(tensor)))
        except (NotImplementedError, RuntimeError):
            return None

    def locate(self, operator: Operator, args: Any, kwargs: dict[str, Any]) -> int | None:
        """The place of an op's simulated arguments: a device, `HOST`, or None where there are none.

        Raises:
            RuntimeError: as a device does, where some lie on it and others on the host.
        """
        place: int | None = None
        others: list[torch.Tensor] | None = None
        live = self.live
        for arg in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(arg, _Tensor):
                block = live.get(id(storage_of(arg)))
                if block is None:
                    others = [arg] if others is None else [*others, arg]
                elif place is None:
                    place = block.place
                elif place != block.place:
                    place = self.meeting(operator, place, block.place, arg)
            elif type(arg) is list or type(arg) is tuple:
                for item in arg:
                    if isinstance(item, _Tensor):
                        block = live.get(id(storage_of(item)))
                        if block is None:
                            others = [item] if others is None else [*others, item]
                        elif place is None:
                            place = block.place
                        elif place != block.place:
                            place = self.meeting(operator, place, block.place, item)
        if others is not None and place is not None and place >= 0:
            for tensor in others:
                moves.check_same_device(operator, tensor, place)
        return place

    def meeting(self, operator: Operator, one: int, other: int, tensor: torch.Tensor) -> int:
        """The place of an op with arguments in two places."""
        if tensor.dim() and not moves.may_differ(operator):
            moves.raise_two_devices(one, other, operator.name)
        return max(one, other)

    def target(self, device: torch.device | None, place: int | None) -> int | torch.device | None:
        """Where results are to lie: a place, or a device that is real."""
        if device is None:
            return place
        if device.type == "cuda":
            return self.device.index_of(device)
        if device.type != "meta":
            return HOST if place == HOST else device
        if device.index == GENUINE_META:
            return device
        if device.index is not None:
            return device.index
        # From the options of a simulated tensor, whose index is lost.
        return place if place is not None else host.default_place(self.device)

    # How things run

    def run_view(self, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
        """An op that makes another view of a storage."""
        for arg in args:
            if isinstance(arg, _Tensor) and self.block_of(arg) is not None:
                with inside():
                    out = operator.call(*args, **kwargs)
                return self.keyed(out)
        if sparse.has_sparse(args):
            return sparse.run(self, operator, args, kwargs)
        return operator.call(*args, **kwargs)

    def keyed(self, out: Any) -> Any:
        """Views made by a meta kernel: those that lost the keys get them back."""
        if isinstance(out, _Tensor):
            backend = self.device.backend
            return out if internals.dispatch_keys(out).has(backend.key) else backend.rekey(out)
        if isinstance(out, list | tuple):
            return type(out)(self.keyed(item) for item in out)
        return out

    def run_inplace(self, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
        """An op that writes into its first argument: nothing is at stake but values that somebody may read."""
        place = self.locate(operator, args, kwargs)
        if place is None:
            return operator.call(*args, **kwargs)
        host.check_target(self, operator, args, place)
        if len(args) and not isinstance(args[0], list | tuple):
            self.results.check(operator, args, kwargs)
        hidden.run_inside(self, operator, args, None, place)
        self.values.write(operator, args, kwargs)
        if not operator.returns_first:
            return None
        written = args[0]
        return written if operator.returns_first == 1 else tuple(args[: operator.returns_first])

    def run_out(self, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
        """An op that may change the size of what it writes into."""
        place = self.locate(operator, args, kwargs)
        if place is None:
            return operator.call(*args, **kwargs)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": None}
        out = self.results.run(operator, args, kwargs)
        for arg in (*args, *kwargs.values()):
            if isinstance(arg, _Tensor):
                self.blocks.resize(storage_of(arg))
                self.values.forget(arg)
        return self.keyed(out)

    def run_functional(self, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
        """An op that makes new tensors."""
        place = self.locate(operator, args, kwargs)
        device = kwargs.get("device") if operator.has_device else None
        if place is None and device is None:
            return operator.call(*args, **kwargs)
        target = self.target(device, place)
        if isinstance(target, torch.device):
            return moves.make_elsewhere(self, operator, args, kwargs, target, place)
        if device is not None:
            kwargs = {**kwargs, "device": torch.device("meta")}
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if operator.operands is not None:
            products.check_operands(operator, operator.operands(args))
        out = self.results.make(operator, args, kwargs)
        assert target is not None
        if target >= 0 and operator.op in sums.SUMS and sums.enter(self, operator, args, out):
            return out
        self.enter(out, target)
        if target >= 0:
            hidden.run_inside(self, operator, args, out, target)
        self.values.follow(operator, args, kwargs, out)
        dependent.note_classes(self, operator, args, out)
        return out

    def enter(self, out: Any, place: int) -> None:
        """Give results a place and memory, in their order."""
        if isinstance(out, _Tensor):
            if sparse.is_sparse(out):
                self.enter(sparse.parts_of(out), place)
            elif id(storage_of(out)) not in self.live:
                self.blocks.enter(out, place, self.device.stream)
        elif isinstance(out, list | tuple):
            for item in out:
                self.enter(item, place)
