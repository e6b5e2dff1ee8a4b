"""What cuBLAS takes from the allocator."""

from __future__ import annotations


def count_workspace_bytes(major: int | None, config: str = "") -> int:
    """What cuBLAS takes from the allocator for each handle and stream, in bytes.

    ``CUBLAS_WORKSPACE_CONFIG`` (``:KiB:count``, summed) decides; else 32 MiB on compute capability 9, 10 and 12, and
    8,519,680 elsewhere (`CUDAContextLight`, `cublasCommonArgs` of torch 2.13; read, not measured here).

    Args:
        major: the compute capability's first number; None where there is no CUDA device.
        config: ``CUBLAS_WORKSPACE_CONFIG``.

    >>> count_workspace_bytes(9), count_workspace_bytes(8), count_workspace_bytes(None)
    (33554432, 8519680, 0)
    >>> count_workspace_bytes(9, ":4096:2:16:8")
    8519680
    """
    if config := config.strip(":"):
        try:
            numbers = [int(part) for part in config.split(":")]
            return sum(1024 * size * n for size, n in zip(numbers[::2], numbers[1::2], strict=True))
        except ValueError:
            return 0
    if major is None:
        return 0
    return 33_554_432 if major in (9, 10, 12) else 8_519_680
