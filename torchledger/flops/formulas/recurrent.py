"""Recurrent layers. N: time steps times batch (of a packed sequence Σ batch_sizes); I: input; H: hidden; P: projection.

G gates: 4 for LSTM, 3 for GRU, 1 for a plain RNN. The products of a layer in one direction are G·H rows wide: with the
input (I) and with the last output (P where it is projected, else H). Gates are element-wise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from torchledger.flops.rules import Cost, Part, counts

GATES = {0: 1, 1: 1, 2: 4, 3: 3}
"""Gates by cuDNN's, MIOpen's and oneDNN's mode: RNN with ReLU, RNN with tanh, LSTM, GRU."""


class Layers(NamedTuple):
    """The shape of a stack of recurrent layers, and its weights in cuDNN's order where they are at hand."""

    n: int
    gates: int
    inputs: int
    hidden: int
    proj: int
    layers: int
    directions: int
    weights: Sequence[Tensor | None]
    stride: int

    def products(self) -> list[tuple[Tensor | None, int]]:
        """Each weight with the FLOPs of its product: w_ih 2·N·G·H·I, w_hh 2·N·G·H·P, w_hr 2·N·H·P."""
        rows = 2 * self.n * self.gates * self.hidden
        recurrent = self.proj or self.hidden
        found: list[tuple[Tensor | None, int]] = []
        for layer in range(self.layers):
            inputs = recurrent * self.directions if layer else self.inputs
            for direction in range(self.directions):
                start = (layer * self.directions + direction) * self.stride
                found += [(self.weight(start), rows * inputs), (self.weight(start + 1), rows * recurrent)]
                if self.proj:
                    found.append((self.weight(start + self.stride - 1), 2 * self.n * self.hidden * self.proj))
        return found

    def weight(self, position: int) -> Tensor | None:
        """The weight at ``position``, None where there is none."""
        return self.weights[position] if 0 <= position < len(self.weights) else None

    def forward(self, quality: str = "exact") -> Cost:
        """The sum of the products, each a part."""
        parts = tuple(Part(w, "forward", flops) for w, flops in self.products())
        return Cost(sum(part.flops for part in parts), parts=parts, quality=quality)

    def backward(self, weight_grads: bool = True) -> Cost:
        """Each product once for what flows back through it, and once for its weight's gradient if that is asked for."""
        kinds = ("input_grad", "weight_grad") if weight_grads else ("input_grad",)
        parts = tuple(Part(w, kind, flops) for w, flops in self.products() for kind in kinds)
        return Cost(sum(part.flops for part in parts), parts=parts)


def token_count(x: Tensor, batch_sizes: Sequence[int]) -> int:
    """N of x (T, B, I) or (B, T, I), or of packed x (N, I)."""
    if batch_sizes:
        return sum(batch_sizes)
    return x.numel() // x.shape[-1] if x.shape[-1] else 0


def onednn_layer(x: Tensor, weights: Sequence[Tensor], batch_sizes: Any, mode: int, hidden: int) -> Layers:
    """One layer in one direction, as oneDNN runs it."""
    return Layers(token_count(x, batch_sizes), GATES[mode], x.shape[-1], hidden, 0, 1, 1, weights, 4)


@counts("aten.mkldnn_rnn_layer", operands=(0, 1, 2))
def mkldnn_rnn_layer(
    y: Any,
    x: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Any,
    b_hh: Any,
    hx: Any,
    cx: Any,
    reverse: bool,
    batch_sizes: Sequence[int],
    mode: int,
    hidden: int,
    /,
    *_: Any,
    **__: Any,
) -> Cost:
    """2·N·G·H·(I + H).

    One layer in one direction.  x (T, B, I), w_ih (G·H, I), w_hh (G·H, H).
    """
    return onednn_layer(x, (w_ih, w_hh), batch_sizes, mode, hidden).forward()


@counts("aten.mkldnn_rnn_layer_backward", operands=(0, 1, 2))
def mkldnn_rnn_layer_backward(grads: Any, x: Tensor, w_ih: Tensor, w_hh: Tensor, /, *args: Any, **_: Any) -> Cost:
    """4·N·G·H·(I + H).

    Each forward product has two gradients.  Shapes as forward.
    """
    mode, hidden, batch_sizes = args[11], args[12], args[17]
    return onednn_layer(x, (w_ih, w_hh), batch_sizes, mode, hidden).backward()


def cudnn_layers(x: Tensor, weights: Sequence[Tensor], stride: int, args: Sequence[Any], projected: bool) -> Layers:
    """The layers of a cuDNN or MIOpen call, from ``mode`` on: mode, hidden, [proj,] layers, batch_first, ..."""
    mode, hidden = args[:2]
    proj = args[2] if projected else 0
    count, _, _, _, both, batch_sizes = args[2 + projected : 8 + projected]
    n = token_count(x, batch_sizes)
    return Layers(n, GATES[mode], x.shape[-1], hidden, proj, count, 2 if both else 1, weights, stride)


@counts("aten._cudnn_rnn", operands=(0, 1), ran=False)
def cudnn_rnn(
    y: Any, x: Tensor, weights: Sequence[Tensor], stride: int, buffer: Any, hx: Any, cx: Any, /, *args: Any, **_: Any
) -> Cost:
    """Σ 2·N·G·H·(I + P) + 2·N·H·P.

    The sum goes over layers and directions. The last term is there where the output is projected; else P is H.
    x (T, B, I).
    """
    return cudnn_layers(x, weights, stride, args, projected=True).forward()


@counts("aten._cudnn_rnn_backward", operands=(0, 1), ran=False)
def cudnn_rnn_backward(grads: Any, x: Tensor, weights: Sequence[Tensor], stride: int, /, *args: Any, **_: Any) -> Cost:
    """Σ 4·N·G·H·(I + P) + 4·N·H·P.

    Each forward product has two gradients; those of the weights are left out where they are not asked for.
    """
    return cudnn_layers(x, weights, stride, args[7:], projected=True).backward(args[-1][3])


@counts("aten.miopen_rnn", operands=(0, 1), ran=False)
def miopen_rnn(
    y: Any, x: Tensor, weights: Sequence[Tensor], stride: int, hx: Any, cx: Any, /, *args: Any, **_: Any
) -> Cost:
    """Σ 2·N·G·H·(I + H).

    The sum goes over layers and directions.  x (T, B, I).
    """
    return cudnn_layers(x, weights, stride, args, projected=False).forward()


@counts("aten.miopen_rnn_backward", operands=(0, 1), ran=False)
def miopen_rnn_backward(grads: Any, x: Tensor, weights: Sequence[Tensor], stride: int, /, *args: Any, **_: Any) -> Cost:
    """Σ 4·N·G·H·(I + H).

    Each forward product has two gradients; those of the weights are left out where they are not asked for.
    """
    return cudnn_layers(x, weights, stride, args[7:], projected=False).backward(args[-1][3])


def mps_layers(x: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], args: Sequence[Any]) -> Layers:
    """The layers of an LSTM on MPS: args are has_biases, layers, dropout, train, bidirectional, batch_first."""
    stride = 4 if args[0] else 2
    return Layers(token_count(x, ()), 4, x.shape[-1], hx[0].shape[-1], 0, args[1], 2 if args[4] else 1, params, stride)


@counts("aten._lstm_mps", operands=(0, 2), ran=False)
def lstm_mps(y: Any, x: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], /, *args: Any, **_: Any) -> Cost:
    """Σ 8·N·H·(I + H).

    The sum goes over layers and directions.  x (T, B, I).
    """
    return mps_layers(x, hx, params, args).forward()


@counts("aten.lstm_mps_backward", operands=(5, 8), ran=False)
def lstm_mps_backward(
    grads: Any,
    gy: Any,
    ghy: Any,
    gcy: Any,
    z: Any,
    cells: Any,
    x: Tensor,
    outputs: Any,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    /,
    *args: Any,
    **_: Any,
) -> Cost:
    """Σ 16·N·H·(I + H).

    Each forward product has two gradients.  Shapes as forward.
    """
    return mps_layers(x, hx, params, args).backward()


def quantized_layers(x: Tensor, h: Tensor, gates: int, both: bool) -> Layers:
    """Layers whose weights are packed out of sight: the state h (layers·directions, B, H) tells their number."""
    directions = 2 if both else 1
    return Layers(token_count(x, ()), gates, x.shape[-1], h.shape[-1], 0, h.shape[0] // directions, directions, (), 0)


@counts("aten.quantized_lstm", quality="integer", operands=(0,))
def quantized_lstm(y: Any, x: Tensor, second: Any, *args: Any, **_: Any) -> Cost:
    """Σ 8·N·H·(I + H) integer operations.

    The sum goes over layers and directions.  x (T, B, I), or packed x (N, I) with batch_sizes.
    """
    packed = isinstance(second, Tensor)
    hx = args[0] if packed else second
    return quantized_layers(x, hx[0], 4, args[6] if packed else args[5]).forward("integer")


@counts("aten.quantized_gru", quality="integer", operands=(0,))
def quantized_gru(y: Any, x: Tensor, second: Tensor, *args: Any, **_: Any) -> Cost:
    """Σ 6·N·H·(I + H) integer operations.

    The sum goes over layers and directions.  x (T, B, I), or packed x (N, I) with batch_sizes.
    """
    packed = isinstance(args[0], Tensor)
    return quantized_layers(x, args[0] if packed else second, 3, args[6] if packed else args[5]).forward("integer")


def cell_cost(gates: int, x: Tensor, h: Tensor) -> Cost:
    """2·B·G·H·(I + H) integer operations.  x (B, I), h (B, H)."""
    return Cost(2 * x.shape[0] * gates * h.shape[-1] * (x.shape[-1] + h.shape[-1]), quality="integer")


@counts("quantized.quantized_lstm_cell_dynamic", quality="integer", operands=(0,))
@counts("aten.quantized_lstm_cell", quality="integer", operands=(0,), ran=False)
def quantized_lstm_cell(y: Any, x: Tensor, hx: Sequence[Tensor], /, *_: Any, **__: Any) -> Cost:
    """8·B·H·(I + H) integer operations.

    x (B, I), hx[0] (B, H).
    """
    return cell_cost(4, x, hx[0])


@counts("quantized.quantized_gru_cell_dynamic", quality="integer", operands=(0, 1))
@counts("aten.quantized_gru_cell", quality="integer", operands=(0, 1), ran=False)
def quantized_gru_cell(y: Any, x: Tensor, h: Tensor, /, *_: Any, **__: Any) -> Cost:
    """6·B·H·(I + H) integer operations.

    x (B, I), h (B, H).
    """
    return cell_cost(3, x, h)


@counts(
    "quantized.quantized_rnn_relu_cell_dynamic",
    "quantized.quantized_rnn_tanh_cell_dynamic",
    quality="integer",
    operands=(0, 1),
)
@counts("aten.quantized_rnn_relu_cell", "aten.quantized_rnn_tanh_cell", quality="integer", operands=(0, 1), ran=False)
def quantized_rnn_cell(y: Any, x: Tensor, h: Tensor, /, *_: Any, **__: Any) -> Cost:
    """2·B·H·(I + H) integer operations.

    x (B, I), h (B, H).
    """
    return cell_cost(1, x, h)
