"""Linear algebra and Fourier transforms: textbook counts."""

from __future__ import annotations

import torch
from torch import Tensor

from flops.counting import Row, meta

aten = torch.ops.aten
APPROXIMATE = "approximate"


def spd(*batch: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Positive definite (..., 6, 6)."""
    return (torch.eye(6) * 4 + 1).expand(*batch, 6, 6).clone().to(dtype)


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*shape, dtype=dtype)


def tall() -> Tensor:
    return torch.arange(24.0).reshape(6, 4).sin()


def row(op: str, flops: int, call: object, run: bool = True) -> Row:
    return Row(op, flops, call, quality=APPROXIMATE, run=run)  # type: ignore[arg-type]


CHOLESKY = torch.linalg.cholesky(spd())

ROWS = [
    # n = 6: n³/3
    row("aten.linalg_cholesky_ex", 72, lambda: torch.linalg.cholesky(spd())),
    row("aten.linalg_cholesky_ex", 216, lambda: torch.linalg.cholesky(spd(3))),
    row("aten.linalg_cholesky_ex", 288, lambda: torch.linalg.cholesky(spd(dtype=torch.complex64))),
    row("aten.cholesky", 72, lambda: aten.cholesky(spd())),
    row("aten.linalg_ldl_factor_ex", 72, lambda: torch.linalg.ldl_factor(spd())),
    # 2n³/3
    row("aten.linalg_lu_factor_ex", 144, lambda: torch.linalg.lu_factor(spd())),
    # (6, 4): 2·6·4·4 − 10·16 + 2·64/3 = 74.67
    row("aten.linalg_lu_factor_ex", 74, lambda: torch.linalg.lu_factor(tall())),
    row("aten.linalg_lu", 144, lambda: torch.linalg.lu(spd())),
    row("aten._linalg_det", 144, lambda: torch.linalg.det(spd())),
    row("aten._linalg_slogdet", 144, lambda: torch.linalg.slogdet(spd())),
    row("aten.cholesky_inverse", 144, lambda: torch.cholesky_inverse(CHOLESKY)),
    # 2n²k, k = 2; on the right b is (2, 6)
    row("aten.linalg_lu_solve", 144, lambda: torch.linalg.lu_solve(*torch.linalg.lu_factor(spd()), t(6, 2))),
    row(
        "aten.linalg_lu_solve",
        144,
        lambda: torch.linalg.lu_solve(*torch.linalg.lu_factor(spd()), t(2, 6), left=False),
    ),
    row("aten.linalg_ldl_solve", 144, lambda: torch.linalg.ldl_solve(*torch.linalg.ldl_factor(spd()), t(6, 2))),
    row("aten.cholesky_solve", 144, lambda: torch.cholesky_solve(t(6, 2), CHOLESKY)),
    row("aten._cholesky_solve_helper", 144, lambda: aten._cholesky_solve_helper(t(6, 2), CHOLESKY, False)),
    # 2n³/3 + 2n²k
    row("aten._linalg_solve_ex", 288, lambda: torch.linalg.solve(spd(), t(6, 2))),
    row("aten._linalg_solve_ex", 216, lambda: torch.linalg.solve(spd(), t(6))),
    row("aten._linalg_solve_ex", 648, lambda: torch.linalg.solve(spd(3), t(3, 6))),
    row("aten._linalg_solve_ex", 288, lambda: torch.linalg.solve(spd(), t(2, 6), left=False)),
    # n²k
    row("aten.linalg_solve_triangular", 72, lambda: torch.linalg.solve_triangular(spd().triu(), t(6, 2), upper=True)),
    row(
        "aten.linalg_solve_triangular",
        216,
        lambda: torch.linalg.solve_triangular(spd().triu(), t(3, 2, 6), upper=True, left=False),
    ),
    row("aten.triangular_solve", 72, lambda: torch.triangular_solve(t(6, 2), spd().triu())),
    # 2n³
    row("aten.linalg_inv_ex", 432, lambda: torch.linalg.inv(spd())),
    # (6, 4): R 2·6·16 − 2·64/3 = 149.33, and four columns of Q, which are the householder_product below
    row("aten.linalg_qr", 298, lambda: torch.linalg.qr(tall())),
    row("aten.linalg_qr", 149, lambda: torch.linalg.qr(tall(), mode="r")),
    # all six columns: 4·6·6·4 − 2·12·16 + 4·64/3 = 277.33
    row("aten.linalg_qr", 426, lambda: torch.linalg.qr(tall(), mode="complete")),
    # (4, 6): R as before, Q (4, 4) of 4·64/3 = 85.33 whatever the mode
    row("aten.linalg_qr", 234, lambda: torch.linalg.qr(tall().t())),
    row("aten.linalg_qr", 234, lambda: torch.linalg.qr(tall().t(), mode="complete")),
    row("aten.linalg_qr", 576, lambda: torch.linalg.qr(spd())),
    row("aten.geqrf", 149, lambda: torch.geqrf(tall())),
    # 4·6·4·4 − 2·10·16 + 4·64/3 = 149.33
    row("aten.linalg_householder_product", 149, lambda: torch.linalg.householder_product(*torch.geqrf(tall()))),
    # c (6, 3), 4 reflectors: 4·6·3·4 − 2·3·16; on the right c (3, 6), 4·3·6·4 − 2·3·16
    row("aten.ormqr", 192, lambda: torch.ormqr(*torch.geqrf(tall()), t(6, 3))),
    row("aten.ormqr", 192, lambda: torch.ormqr(*torch.geqrf(tall()), t(3, 6), left=False)),
    # 9n³, and 4n³/3 for the values
    row("aten._linalg_eigh", 1944, lambda: torch.linalg.eigh(spd())),
    row("aten._linalg_eigh", 288, lambda: (None, meta(6, 6), "L", False), run=False),
    row("aten.linalg_eig", 5400, lambda: torch.linalg.eig(spd())),
    row("aten.linalg_eigvals", 2160, lambda: torch.linalg.eigvals(spd(), out=t(6, dtype=torch.complex64))),
    row("aten._linalg_eigvals", 2160, lambda: aten._linalg_eigvals(spd())),
    # (6, 4): 6·6·16 + 20·64, and 4·6·16 − 4·64/3 = 298.67 for the values
    row("aten._linalg_svd", 1856, lambda: torch.linalg.svd(tall())),
    row("aten._linalg_svd", 1856, lambda: torch.linalg.svd(tall().t())),
    row("aten._linalg_svd", 298, lambda: (None, meta(6, 4), False, False), run=False),
    # and a product of 2·6·4·4
    row("aten.linalg_pinv", 2048, lambda: torch.linalg.pinv(tall())),
    row("aten.linalg_polar", 2048, lambda: torch.linalg.polar(tall())),
    # 6·216 + 20·216 + 2·216
    row("aten.linalg_matrix_sqrth", 6048, lambda: torch.linalg.matrix_sqrth(spd())),
    # 149.33 + (4·6·4 − 2·16)·2 + 16·2
    row("aten.linalg_lstsq", 309, lambda: torch.linalg.lstsq(tall(), t(6, 2))),
    row("aten.linalg_matrix_exp", 2160, lambda: torch.linalg.matrix_exp(spd())),
    # 3 transforms of 8: 5·24·3
    row("aten._fft_c2c", 360, lambda: torch.fft.fft(t(3, 8, dtype=torch.complex64))),
    # over both dimensions, 3 of 4·8: 5·96·5
    row("aten._fft_c2c", 2400, lambda: torch.fft.fft2(t(3, 4, 8, dtype=torch.complex64))),
    row("aten._fft_c2c", 0, lambda: torch.fft.fft(t(3, 1, dtype=torch.complex64))),
    # 5·12·log2(6) / 2 = 77.55
    row("aten._fft_r2c", 78, lambda: torch.fft.rfft(t(2, 6))),
    row("aten._fft_r2c", 180, lambda: torch.fft.fft(t(3, 8))),
    row("aten._fft_c2r", 180, lambda: torch.fft.irfft(t(3, 5, dtype=torch.complex64))),
]
