"""Products on a GPU into a given output, checked against float64, with the name of the kernel that ran."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import epiloq
from float8_reference import assert_float8_close, make_float8_problem
from groupwise_reference import Recipe, assert_close, make
from reference import assert_within_one_ulp, make_problem, poisoned

Product = Callable[[int, int, int, Tensor], str]


def int8(m: int, n: int, k: int, out: Tensor, bias: bool = False, zero_point: str = "none") -> str:
    p = make_problem(m, n, k, device="cuda", dtype=out.dtype, bias=bias, zero_point=zero_point)
    operands = (p.a, p.b, p.scale_a, p.scale_b)
    if p.azp_adj is None:
        epiloq.scaled_mm(*operands, p.bias, out=out, out_dtype=out.dtype)
    else:
        epiloq.scaled_mm_azp(*operands, p.azp_adj, p.azp, p.bias, out=out, out_dtype=out.dtype)
    assert_within_one_ulp(out, p)
    return epiloq.explain("scaled_mm", *operands)


def float8(m: int, n: int, k: int, out: Tensor, bias: bool = False) -> str:
    p = make_float8_problem(m, n, k, device="cuda", dtype=out.dtype, bias=bias)
    operands = (p.a, p.b, p.scale_a, p.scale_b)
    epiloq.scaled_mm(*operands, p.bias, out=out, out_dtype=out.dtype)
    assert_float8_close(out, p)
    return epiloq.explain("scaled_mm", *operands)


def groups(m: int, n: int, k: int, out: Tensor, recipe: Recipe = (1, 128, 128), columns: bool = True) -> str:
    p = make(m, n, k, device="cuda", recipe=recipe)
    p = p.in_columns(4) if columns else p
    bias = None if columns else torch.randn(n, device="cuda").to(out.dtype)
    epiloq.groupwise_mm(p.a, p.b, p.scale_a, p.scale_b, bias, recipe=recipe, out=out)
    assert_close(out, *p.operands(), bias)
    return epiloq.explain("groupwise_mm", p.a, p.b, p.scale_a, p.scale_b, recipe=recipe)


PRODUCTS: dict[str, Product] = {"int8": int8, "float8": float8, "groups": groups}
EPILOGUES: dict[str, Product] = {
    **PRODUCTS,
    "int8, zero points, bias": partial(int8, bias=True, zero_point="token"),
    "int8, one zero point": partial(int8, zero_point="static"),
    "float8, bias": partial(float8, bias=True),
    "groups, scales in rows, bias": partial(groups, columns=False),
    "a scale a column": partial(groups, recipe=(1, 1, 128)),
}


def only_its_own(
    product: Product, sizes: tuple[int, int, int], before: int, after: int, dtype: torch.dtype = torch.bfloat16
) -> str:
    """Name of the kernel that ran, after checking that it wrote its output and nothing around it."""
    m, n, k = sizes
    wide = poisoned((m + 16, before + n + after), dtype, "cuda")
    kernel = product(m, n, k, wide[:m, before : before + n])
    assert wide[:, :before].isnan().all() and wide[:, before + n :].isnan().all() and wide[m:].isnan().all()
    return kernel
