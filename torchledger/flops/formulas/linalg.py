"""Factorisations and solves of linear algebra: textbook counts, all marked approximate.

n: order; m: rows of an (m, n) matrix; k: right-hand sides; times the batch, times four for complex matrices. What
LAPACK and cuSOLVER really do differs by blocking and, in iterations, by the data.
Source: Golub and Van Loan, Matrix Computations; LAPACK Working Note 41.
"""

from __future__ import annotations

from fractions import Fraction
from math import prod
from typing import Any

from torch import Tensor

from torchledger.flops.rules import Cost, counts

BOOK = "Golub and Van Loan"
LAWN = "LAPACK Working Note 41"


def approximate(a: Tensor, each: Fraction | int, values_only: Fraction | int = 0) -> Cost:
    """``each`` FLOPs for every matrix of a (..., m, n), four times that if complex, rounded down."""
    times, factor = prod(a.shape[:-2]), 4 if a.is_complex() else 1
    return Cost(int(times * each) * factor, quality="approximate", values_only=int(times * values_only) * factor)


def lu_flops(m: int, n: int) -> Fraction:
    """m·n·r − (m + n)·r²/2 + r³/3 multiply-adds, r = min(m, n), twice: 2n³/3 for a square."""
    r = min(m, n)
    return 2 * m * n * r - (m + n) * r**2 + Fraction(2 * r**3, 3)


def qr_flops(m: int, n: int) -> Fraction:
    """2·m·n² − 2n³/3, with m and n exchanged for a wide matrix."""
    m, n = max(m, n), min(m, n)
    return 2 * m * n**2 - Fraction(2 * n**3, 3)


def right_sides(b: Tensor, a: Tensor, left: bool = True) -> int:
    """Count the right-hand sides: k of b (..., n, k), or of b (..., k, n) on the right; 1 for a vector b (..., n)."""
    if b.dim() < 2 or (b.dim() == a.dim() - 1 and b.shape == a.shape[:-1]):
        return 1
    return b.shape[-1] if left else b.shape[-2]


@counts("aten.linalg_cholesky_ex", "aten.cholesky", operands=(0,), quality="approximate", source=BOOK)
def cholesky(result: Any, a: Tensor, /, *_: Any, **__: Any) -> Cost:
    """n³/3.

    Σ over columns j of a product of the (n − j) rows below with j earlier elements, 2·(n − j)·j, is n³/3.
    """
    return approximate(a, Fraction(a.shape[-1] ** 3, 3))


@counts("aten.linalg_ldl_factor_ex", operands=(0,), quality="approximate", source=BOOK)
def ldl_factor(result: Any, a: Tensor, /, *_: Any, **__: Any) -> Cost:
    """n³/3.

    As Cholesky.
    """
    return approximate(a, Fraction(a.shape[-1] ** 3, 3))


@counts(
    "aten.linalg_lu_factor_ex",
    "aten.linalg_lu",
    "aten._linalg_det",
    "aten._linalg_slogdet",
    operands=(0,),
    quality="approximate",
    source=BOOK,
)
def lu(result: Any, a: Tensor, /, *_: Any, **__: Any) -> Cost:
    """2n³/3.

    Step j updates an (n − j)² block, 2·(n − j)² FLOPs. A rectangle takes 2·m·n·r − (m + n)·r² + 2r³/3 with r the
    smaller side. A determinant is the product of the diagonal.
    """
    return approximate(a, lu_flops(a.shape[-2], a.shape[-1]))


@counts("aten.linalg_lu_solve", "aten.linalg_ldl_solve", operands=(0, 2), quality="approximate", source=BOOK)
def factored_solve(result: Any, a: Tensor, pivots: Any, b: Tensor, /, *_: Any, left: bool = True, **__: Any) -> Cost:
    """2n²·k.

    Two triangular solves of n²·k.  a (n, n) factored, b (n, k), or (k, n) on the right.
    """
    return approximate(b, 2 * a.shape[-1] ** 2 * right_sides(b, a, left))


@counts("aten.cholesky_solve", "aten._cholesky_solve_helper", operands=(0, 1), quality="approximate", source=BOOK)
def cholesky_solve(result: Any, b: Tensor, a: Tensor, /, *_: Any, **__: Any) -> Cost:
    """2n²·k.

    Two triangular solves of n²·k.  a (n, n) factored, b (n, k).
    """
    return approximate(b, 2 * a.shape[-1] ** 2 * b.shape[-1])


@counts("aten.cholesky_inverse", operands=(0,), quality="approximate", source=LAWN)
def cholesky_inverse(result: Any, a: Tensor, /, *_: Any, **__: Any) -> Cost:
    """2n³/3.

    The triangle's inverse, n³/3, times its transpose, n³/3.
    """
    return approximate(a, Fraction(2 * a.shape[-1] ** 3, 3))


@counts("aten._linalg_solve_ex", operands=(0, 1), quality="approximate", source=BOOK)
def solve(result: Any, a: Tensor, b: Tensor, /, *_: Any, left: bool = True, **__: Any) -> Cost:
    """2n³/3 + 2n²·k.

    LU, then two triangular solves.  a (n, n), b (n, k), (k, n) on the right, or (n).
    """
    n = a.shape[-1]
    return approximate(a, lu_flops(n, n) + 2 * n**2 * right_sides(b, a, left))


@counts("aten.linalg_solve_triangular", operands=(0, 1), quality="approximate", source=BOOK)
def solve_triangular(result: Any, a: Tensor, b: Tensor, /, *_: Any, left: bool = True, **__: Any) -> Cost:
    """n²·k.

    Each of k columns takes Σ 2j over j < n.  a (n, n), b (n, k), or (k, n) on the right.
    """
    return approximate(result, a.shape[-1] ** 2 * right_sides(b, a, left))


@counts("aten.triangular_solve", operands=(0, 1), quality="approximate", source=BOOK)
def triangular_solve(result: Any, b: Tensor, a: Tensor, /, *_: Any, **__: Any) -> Cost:
    """n²·k.

    Each of k columns takes Σ 2j over j < n.  a (n, n), b (n, k).
    """
    return approximate(result[0], a.shape[-1] ** 2 * b.shape[-1])


@counts("aten.linalg_inv_ex", operands=(0,), quality="approximate", source=BOOK)
def inverse(result: Any, a: Tensor, /, *_: Any, **__: Any) -> Cost:
    """2n³.

    LU, 2n³/3, and n right-hand sides whose zeros are used, 4n³/3.
    """
    return approximate(a, 2 * a.shape[-1] ** 3)


def householder_flops(m: int, n: int, k: int) -> Fraction:
    """4m·n·k − 2(m + n)·k² + 4k³/3: the first n columns of the product of k reflectors of m rows."""
    return 4 * m * n * k - 2 * (m + n) * k**2 + Fraction(4 * k**3, 3)


@counts("aten.geqrf", operands=(0,), quality="approximate", source=BOOK)
def geqrf(result: Any, a: Tensor, /, *_: Any, **__: Any) -> Cost:
    """2m·n² − 2n³/3.

    Step j reflects an (m − j, n − j) block, 4·(m − j)·(n − j). m ≥ n, else exchanged. Forming Q from the reflectors is
    not in it.
    """
    return approximate(a, qr_flops(a.shape[-2], a.shape[-1]))


@counts("aten.linalg_qr", operands=(0,), quality="approximate", source=LAWN)
def qr(result: Any, a: Tensor, mode: str = "reduced", /, **__: Any) -> Cost:
    """4m·n² − 4n³/3.

    The reflectors and R, 2m·n² − 2n³/3, and as much to form the n columns of Q from them; m ≥ n. A wide matrix takes
    2n·m² − 2m³/3 + 4m³/3. Mode "r" forms no Q; "complete" all m columns of it, 4m²·n − 4m·n² + 4n³/3.
    """
    m, n = a.shape[-2:]
    r = min(m, n)
    columns = {"r": 0, "complete": m}.get(mode, r)
    return approximate(a, qr_flops(m, n) + (householder_flops(m, columns, r) if columns else 0))


@counts("aten.linalg_householder_product", operands=(0, 1), quality="approximate", source=LAWN)
def householder_product(result: Any, a: Tensor, tau: Tensor, /, *_: Any, **__: Any) -> Cost:
    """4m·n·k − 2(m + n)·k² + 4k³/3.

    k reflectors are multiplied into the first n columns of an (m, m) identity, whose zeros are used.
    """
    return approximate(a, householder_flops(a.shape[-2], a.shape[-1], tau.shape[-1]))


@counts("aten.ormqr", operands=(0, 2), quality="approximate", source=LAWN)
def ormqr(result: Any, a: Tensor, tau: Tensor, c: Tensor, left: bool = True, /, *_: Any, **__: Any) -> Cost:
    """4m·n·k − 2n·k².

    k reflectors, each shorter by one, applied to c (m, n): 4·n·(m − j) for step j. From the right, 4m·n·k − 2m·k².
    """
    m, n, k = c.shape[-2], c.shape[-1], tau.shape[-1]
    return approximate(c, 4 * m * n * k - 2 * (n if left else m) * k**2)


@counts("aten._linalg_eigh", operands=(0,), quality="approximate", source=BOOK)
def eigh(result: Any, a: Tensor, uplo: str = "L", vectors: bool = True, /, **_: Any) -> Cost:
    """9n³.

    Tridiagonal reduction, 4n³/3, then QR iterations that gather vectors; 4n³/3 without vectors.
    """
    n = a.shape[-1]
    values = Fraction(4 * n**3, 3)
    return approximate(a, 9 * n**3, values) if vectors else approximate(a, values)


@counts("aten.linalg_eig", operands=(0,), quality="approximate", source=BOOK)
def eig(result: Any, a: Tensor, /, *_: Any, **__: Any) -> Cost:
    """25n³.

    Hessenberg reduction and QR iterations with vectors.
    """
    return approximate(a, 25 * a.shape[-1] ** 3, 10 * a.shape[-1] ** 3)


@counts("aten._linalg_eigvals", "aten.linalg_eigvals", operands=(0,), quality="approximate", source=BOOK)
def eigvals(result: Any, a: Tensor, /, *_: Any, **__: Any) -> Cost:
    """10n³.

    Hessenberg reduction and QR iterations without vectors.
    """
    return approximate(a, 10 * a.shape[-1] ** 3)


def svd_flops(m: int, n: int, vectors: bool = True) -> Fraction:
    """6·m·n² + 20n³ with vectors, 4·m·n² − 4n³/3 without, m ≥ n, else exchanged."""
    m, n = max(m, n), min(m, n)
    return Fraction(6 * m * n**2 + 20 * n**3) if vectors else 4 * m * n**2 - Fraction(4 * n**3, 3)


@counts("aten._linalg_svd", operands=(0,), quality="approximate", source=BOOK)
def svd(result: Any, a: Tensor, full: bool = False, vectors: bool = True, /, **_: Any) -> Cost:
    """6m·n² + 20n³.

    QR first, then bidiagonalisation and iterations, with both sets of vectors; 4m·n² − 4n³/3 for the values alone.
    """
    m, n = a.shape[-2:]
    values = svd_flops(m, n, vectors=False)
    return approximate(a, svd_flops(m, n), values) if vectors else approximate(a, values)


@counts("aten.linalg_pinv", operands=(0,), quality="approximate", source=BOOK)
def pinv(result: Any, a: Tensor, /, *_: Any, hermitian: bool = False, **__: Any) -> Cost:
    """6m·n² + 20n³ + 2m·n².

    SVD, or eigenvalues (9n³) of a Hermitian matrix, then a product of the scaled vectors.
    """
    m, n = max(a.shape[-2:]), min(a.shape[-2:])
    return approximate(a, (9 * n**3 if hermitian else svd_flops(m, n)) + 2 * m * n * n)


@counts("aten.linalg_polar", "aten.linalg_matrix_sqrth", operands=(0,), quality="approximate", source=BOOK)
def through_svd(result: Any, a: Tensor, /, *_: Any, **__: Any) -> Cost:
    """6m·n² + 20n³ + 2m·n².

    A decomposition, then a product of its vectors. How these ops iterate depends on the device.
    """
    m, n = max(a.shape[-2:]), min(a.shape[-2:])
    return approximate(a, svd_flops(m, n) + 2 * m * n * n)


@counts("aten.linalg_lstsq", operands=(0, 1), quality="approximate", source=BOOK)
def lstsq(result: Any, a: Tensor, b: Tensor, /, *_: Any, **__: Any) -> Cost:
    """2m·n² − 2n³/3 + (4m·n − 2n²)·k + n²·k.

    QR, its reflectors applied to k right-hand sides, then a triangular solve.  a (m, n), b (m, k).
    """
    m, n = max(a.shape[-2:]), min(a.shape[-2:])
    k = right_sides(b, a)
    return approximate(a, qr_flops(m, n) + (4 * m * n - 2 * n**2) * k + n**2 * k)


@counts("aten.linalg_matrix_exp", operands=(0,), quality="approximate", source="Bader, Blanes, Casas 2019")
def matrix_exp(result: Any, a: Tensor, /, *_: Any, **__: Any) -> Cost:
    """10n³.

    Five products evaluate the Taylor polynomial of degree 18; small norms take fewer, large ones square the result.
    """
    return approximate(a, 10 * a.shape[-1] ** 3)
