"""The check of a Hessian ``sum x x^T`` that `gptq`, `awq`, `awq_scale` and `refine` share."""

from __future__ import annotations

from torch import Tensor

from epiloq.weights.rounding import check_finite

ASYMMETRY = 1e-2
"""Largest difference of mirrored elements, relative to the largest element, that rounding may cause (in bfloat16)."""


def check_hessian(caller: str, hessian: Tensor, columns: int) -> None:
    """Raise ValueError unless a matrix has the shape ``[K, K]``, finite elements, symmetry, and no negative element on
    its diagonal. Whether it is positive semi-definite, only a factorisation shows (`gptq.inverse_factor`).
    """
    if hessian.shape != (columns, columns):
        raise ValueError(f"{caller}: hessian: expected [{columns}, {columns}], got {list(hessian.shape)}")
    check_finite("hessian", hessian)
    if not columns:
        return
    least, most = (float(end) for end in hessian.diagonal().aminmax())
    if least < 0:
        raise ValueError(
            f"{caller}: hessian: expected a symmetric positive semi-definite matrix, got {least:g} on its diagonal"
        )
    difference = float((hessian - hessian.t()).max())
    if difference > ASYMMETRY * most:
        raise ValueError(
            f"{caller}: hessian: expected a symmetric positive semi-definite matrix, but mirrored elements differ by "
            f"{difference:g}"
        )
