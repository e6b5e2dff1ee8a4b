"""FLOP formulas, one module a family; importing this package enters them all into the table."""

from torchledger.flops.formulas import (
    attention,
    compiled,
    conv,
    cudnn_attention,
    fast_paths,
    fft,
    flex,
    grouped,
    linalg,
    matmul,
    packed_attention,
    quantized,
    recurrent,
    sparse,
)

__all__ = [
    "attention",
    "compiled",
    "conv",
    "cudnn_attention",
    "fast_paths",
    "fft",
    "flex",
    "grouped",
    "linalg",
    "matmul",
    "packed_attention",
    "quantized",
    "recurrent",
    "sparse",
]
