"""Recurrent layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flops.counting import Row, meta

LSTM, GRU = 2, 3


def lstm(*, batch: int = 4, steps: int = 10, backward: bool = False, **kwargs: Any) -> None:
    model = nn.LSTM(16, 32, **kwargs)
    y, _ = model(torch.ones(steps, batch, 16, requires_grad=True))
    if backward:
        y.sum().backward()


def quantized_lstm() -> None:
    model = torch.ao.nn.quantized.dynamic.LSTM(16, 32, 2, bidirectional=True)
    model(torch.ones(10, 4, 16))


def quantized_gru() -> None:
    torch.ao.nn.quantized.dynamic.GRU(16, 32, 2)(torch.ones(10, 4, 16))


def quantized_cell(name: str, **kwargs: str) -> None:
    cell = getattr(torch.ao.nn.quantized.dynamic, name)(16, 32, **kwargs)
    cell(torch.ones(4, 16))


def weights(layers: int, directions: int, gates: int, biases: bool, proj: int = 0) -> list[Tensor]:
    found = []
    for layer in range(layers):
        inputs = 16 if layer == 0 else (proj or 32) * directions
        for _ in range(directions):
            found += [meta(gates * 32, inputs), meta(gates * 32, proj or 32)]
            found += [meta(gates * 32)] * 2 * biases + [meta(proj, 32)] * bool(proj)
    return found


def cudnn(mode: int, gates: int, layers: int, directions: int, proj: int = 0, sizes: tuple[int, ...] = ()) -> Any:
    """``_cudnn_rnn`` for 40 tokens of width 16, hidden 32, with biases."""
    x = meta(sum(sizes), 16) if sizes else meta(10, 4, 16)
    ws = weights(layers, directions, gates, True, proj)
    stride = len(ws) // (layers * directions)
    tail = (mode, 32, proj, layers, False, 0.0, True, directions == 2, list(sizes))
    return (None, x, ws, stride, None, None, None, *tail, None)


def cudnn_grads(mode: int, gates: int, mask: list[bool]) -> Any:
    ws = weights(1, 1, gates, True)
    tail = (mode, 32, 0, 1, False, 0.0, True, False, [])
    return (None, meta(10, 4, 16), ws, 4, None, None, None, None, None, None, None, *tail, None, None, mask)


def miopen(grads: bool) -> Any:
    ws = weights(2, 1, 4, True)
    tail = (LSTM, 32, 2, False, 0.0, True, False, [])
    if not grads:
        return (None, meta(10, 4, 16), ws, 4, None, None, *tail, None)
    return (None, meta(10, 4, 16), ws, 4, None, None, None, None, None, None, None, *tail, None, None, [True] * 4)


HX = (meta(2, 4, 32), meta(2, 4, 32))

ROWS = [
    # two layers, 40 tokens, no bias: 2·40·128·(16 + 32) + 2·40·128·(32 + 32)
    Row(
        "aten.mkldnn_rnn_layer",
        1_146_880,
        lambda: lstm(num_layers=2, bias=False),
        parts=(("forward", 163_840), ("forward", 327_680), ("forward", 327_680), ("forward", 327_680)),
    ),
    # two directions of one layer: 2·2·40·128·48
    Row("aten.mkldnn_rnn_layer", 983_040, lambda: lstm(bidirectional=True)),
    Row("aten.mkldnn_rnn_layer_backward", 2_293_760, lambda: lstm(num_layers=2, bias=False, backward=True)),
    Row("aten._cudnn_rnn", 1_146_880, lambda: cudnn(LSTM, 4, 2, 1), run=False),
    # GRU, both directions; the second layer reads 64: 2·2·40·96·(16 + 32) + 2·2·40·96·(64 + 32)
    Row("aten._cudnn_rnn", 2_211_840, lambda: cudnn(GRU, 3, 2, 2), run=False),
    # projected to 8: 2·40·128·(16 + 8) + 2·40·32·8
    Row(
        "aten._cudnn_rnn",
        266_240,
        lambda: cudnn(LSTM, 4, 1, 1, proj=8),
        run=False,
        parts=(("forward", 163_840), ("forward", 81_920), ("forward", 20_480)),
    ),
    # packed: 3 + 2 + 1 tokens, 2·6·128·48
    Row("aten._cudnn_rnn", 73_728, lambda: cudnn(LSTM, 4, 1, 1, sizes=(3, 2, 1)), run=False),
    # 2·40·128·48, twice, and once where no weight needs a gradient
    Row("aten._cudnn_rnn_backward", 983_040, lambda: cudnn_grads(LSTM, 4, [True] * 4), run=False),
    Row(
        "aten._cudnn_rnn_backward",
        491_520,
        lambda: cudnn_grads(LSTM, 4, [True, True, True, False]),
        run=False,
        parts=(("input_grad", 163_840), ("input_grad", 327_680)),
    ),
    Row("aten.miopen_rnn", 1_146_880, lambda: miopen(False), run=False),
    Row("aten.miopen_rnn_backward", 2_293_760, lambda: miopen(True), run=False),
    Row(
        "aten._lstm_mps",
        1_146_880,
        lambda: (None, meta(10, 4, 16), HX, weights(2, 1, 4, True), True, 2, 0.0, True, False, False),
        run=False,
    ),
    Row(
        "aten.lstm_mps_backward",
        2_293_760,
        lambda: (
            None,
            None,
            None,
            None,
            None,
            None,
            meta(10, 4, 16),
            None,
            HX,
            weights(2, 1, 4, False),
            False,
            2,
            0.0,
            True,
            False,
            False,
        ),
        run=False,
    ),
    # layers of both directions: 2·2·40·128·(16 + 32) + 2·2·40·128·(64 + 32)
    Row("aten.quantized_lstm", 2_949_120, quantized_lstm, quality="integer"),
    # 2·40·96·(16 + 32) + 2·40·96·(32 + 32)
    Row("aten.quantized_gru", 860_160, quantized_gru, quality="integer"),
    # packed, 14 tokens: 2·14·128·48
    Row(
        "aten.quantized_lstm",
        172_032,
        lambda: (None, meta(14, 16), meta(5), (meta(1, 4, 32),), [], True, 1, 0.0, False, False),
        quality="integer",
        run=False,
    ),
    Row(
        "aten.quantized_gru",
        129_024,
        lambda: (None, meta(14, 16), meta(5), meta(1, 4, 32), [], True, 1, 0.0, False, False),
        quality="integer",
        run=False,
    ),
    # 2·4·G·32·(16 + 32)
    Row("quantized.quantized_lstm_cell_dynamic", 49_152, lambda: quantized_cell("LSTMCell"), quality="integer"),
    Row("quantized.quantized_gru_cell_dynamic", 36_864, lambda: quantized_cell("GRUCell"), quality="integer"),
    Row("quantized.quantized_rnn_tanh_cell_dynamic", 12_288, lambda: quantized_cell("RNNCell"), quality="integer"),
    Row(
        "quantized.quantized_rnn_relu_cell_dynamic",
        12_288,
        lambda: quantized_cell("RNNCell", nonlinearity="relu"),
        quality="integer",
    ),
    Row(
        "aten.quantized_lstm_cell",
        49_152,
        lambda: (None, meta(4, 16), (meta(4, 32), meta(4, 32))),
        quality="integer",
        run=False,
    ),
    *(
        Row(f"aten.quantized_{name}_cell", n, lambda: (None, meta(4, 16), meta(4, 32)), quality="integer", run=False)
        for name, n in (("gru", 36_864), ("rnn_relu", 12_288), ("rnn_tanh", 12_288))
    ),
]
