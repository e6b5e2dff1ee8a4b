"""Recurrent layers: one cuDNN op on a device, where the composition makes ops for each step.

Source: ``aten/src/ATen/native/RNN.cpp`` and ``cudnn/RNN.cpp`` of torch 2.13. What cuDNN keeps for the backward in its
reserve space is not known here, so peaks are too low by that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchledger import internals
from torchledger.simulation.contracts import Device, Mode
from torchledger.simulation.keys import inside
from torchledger.simulation.operators import Operator
from torchledger.simulation.results import contiguous_strides

aten = torch.ops.aten
_composite_key = internals.composite_implicit_key
RELU, TANH, LSTM, GRU = 0, 1, 2, 3
_DTYPES = (torch.float16, torch.float32, torch.float64)


def table(device: Device, is_on_device: Callable[[torch.Tensor], bool]) -> dict[Any, Callable[..., Any]]:
    """The ops and what stands for their composition."""
    found: dict[Any, Callable[..., Any]] = {}
    for packet, mode in ((aten.lstm, LSTM), (aten.gru, GRU), (aten.rnn_tanh, TANH), (aten.rnn_relu, RELU)):
        found[packet.input] = _layer(device, is_on_device, packet.input, mode, packed=False)
        found[packet.data] = _layer(device, is_on_device, packet.data, mode, packed=True)
    return found


def _layer(device: Device, is_on_device: Any, op: Any, mode: int, *, packed: bool) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        data = args[0]
        if not is_on_device(data) or data.dtype not in _DTYPES or not torch.backends.cudnn.enabled:
            return op._op_dk(_composite_key, *args)
        device.note("the reserve space of cuDNN's recurrent layers is not modelled: peaks with them are too low by it")
        if packed:
            _, sizes, state, weights, has_biases, n_layers, dropout, train, bidirectional = args
            batch_sizes, batch_first = sizes.tolist(), False
        else:
            _, state, weights, has_biases, n_layers, dropout, train, bidirectional, batch_first = args
            batch_sizes = []
        hx, cx = state if mode == LSTM else (state, None)
        hidden = (cx if cx is not None else hx).shape[2]
        projection = hx.shape[2] if cx is not None and hx.shape[2] != hidden else 0
        out, hy, cy, *_ = aten._cudnn_rnn(
            data, weights, 4 if has_biases else 2, None, hx, cx, mode, hidden, projection, n_layers, batch_first,
            dropout, train, bidirectional, batch_sizes, None,
        )  # fmt: skip
        return (out, hy, cy) if mode == LSTM else (out, hy)

    return run


def rnn(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """`aten._cudnn_rnn`: output, states, a reserve of unknown size (taken for none), and no copy of the weights."""
    place = mode.locate(operator, args, kwargs)
    if place is None:
        return operator.call(*args, **kwargs)
    out, hy, cy, reserve, _ = mode.results.run(operator, args, kwargs)
    outs = mode.results.wrap((out, hy, cy, reserve, reserve.new_empty(0)))
    mode.enter(outs, place)
    return outs


def pack_padded(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """`aten._pack_padded_sequence`: the steps of all sequences, of which a copy goes before, and how many run at each.

    Source: ``aten/src/ATen/native/PackedSequence.cpp``: it joins contiguous pieces of the input.
    """
    place = mode.locate(operator, args, kwargs)
    if place is None:
        return operator.call(*args, **kwargs)
    x, lengths, batch_first = args
    known = mode.values.read(lengths)
    sizes = aten._pack_padded_sequence.default(torch.empty(x.shape[:2], device="cpu"), known, batch_first)[1]
    step = math.prod(x.shape[2:]) * x.element_size()
    shape = (int(sizes.sum()), *x.shape[2:])
    out = mode.results.fresh(shape, contiguous_strides(shape), x.dtype)
    copies = []
    with inside():
        x = x.transpose(0, 1) if batch_first else x
        for first, n_steps, n_sequences in _runs(sizes.tolist()):
            piece = x[first : first + n_steps, :n_sequences]
            if place >= 0 and not piece.is_contiguous():
                copies.append(n_steps * n_sequences * step)
    addresses = [mode.device.take_hidden(nbytes) for nbytes in copies]
    mode.enter(out, place)
    for address, nbytes in zip(addresses, copies, strict=True):
        mode.device.give_hidden(address, nbytes)
    return out, sizes


def _runs(sizes: list[int]) -> Iterator[tuple[int, int, int]]:
    """Steps in a row at which equally many sequences run: the first, and how many steps of how many."""
    first = 0
    for size, group in itertools.groupby(sizes):
        n = len(list(group))
        yield first, n, size
        first += n


def rnn_backward(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    """`aten._cudnn_rnn_backward`: gradients of the input, the states and the weights."""
    named = dict(zip((argument.name for argument in operator.op._schema.arguments), args, strict=False)) | kwargs
    place = mode.locate(operator, args, kwargs)
    if place is None:
        return operator.call(*args, **kwargs)
    fresh = mode.results.fresh

    def like(tensor: torch.Tensor | None) -> Any:
        return None if tensor is None else fresh(tensor.shape, contiguous_strides(tensor.shape), tensor.dtype)

    wanted = named["output_mask"]
    firsts = [like(named[name]) if wanted[i] else None for i, name in enumerate(("input", "hx", "cx"))]
    weights = [like(w) for w in named["weight"]] if wanted[3] else []
    mode.enter((*firsts, *weights), place)
    return (*firsts, weights)


SPECIALS = {
    aten._pack_padded_sequence.default: pack_padded,
    aten._cudnn_rnn.default: rnn,
    aten._cudnn_rnn_backward.default: rnn_backward,
}
