"""FP8 functions of DeepGEMM, with the same signatures and semantics: only the import needs to change.

Products are from ``deep_gemm``, casts from ``deep_gemm.utils``. `compiled_dims` and `disable_ue8m0_cast` control
DeepGEMM's compiler and its scales on Blackwell; they are ignored here, where scales are float32.

Differences: any M, N and K; scales in any layout; casts divide and round half to even, where DeepGEMM multiplies by a
reciprocal (a difference of one step at a tie); invalid arguments raise ValueError.
"""

from __future__ import annotations

import torch
from torch import Tensor

import epiloq
from epiloq.compat._checks import require_matrix, rows_apart

__all__ = [
    "fp8_gemm_nt",
    "get_mn_major_tma_aligned_tensor",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "per_block_cast_to_fp8",
    "per_token_cast_to_fp8",
]

Scaled = tuple[Tensor, Tensor]
Recipe = tuple[int, int, int]

_DEFAULT: Recipe = (1, 128, 128)
_LEAST_AMAX = 1e-4
_OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)
_TMA_FLOATS = 4  # of a float32 in the 16 bytes that TMA's strides are multiples of


def fp8_gemm_nt(
    a: Scaled,
    b: Scaled,
    d: Tensor,
    c: Tensor | None = None,
    recipe: Recipe | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """``d = c + a @ b.t()``, with scales per group of 128 along K.

    `a` is float8_e4m3fn [M, K] with float32 [M, ceil(K / 128)]; `b` [N, K] with [ceil(N / 128), ceil(K / 128)], or
    with `recipe` (1, 1, 128) [N, ceil(K / 128)]. `d` [M, N] is bfloat16, float16 or float32, and `c` has the same
    dtype, or is `d` itself; with `c` the product is kept in float32 until it is added.
    """
    (x, scale_x), (weight, scale_weight) = a, b
    require_matrix("fp8_gemm_nt", a=x, b=weight, d=d)
    operands = (x, weight.t(), scale_x, scale_weight.t())
    if c is None:
        epiloq.groupwise_mm(*operands, recipe=recipe or _DEFAULT, out=d)
    else:
        if d.dtype not in _OUTPUTS or d.shape != (x.shape[0], weight.shape[0]):
            expected = f"bfloat16, float16 or float32 {[x.shape[0], weight.shape[0]]}"
            raise ValueError(f"fp8_gemm_nt: d: expected {expected}, got {d.dtype} {list(d.shape)}")
        if c.shape != d.shape or c.dtype != d.dtype:
            raise ValueError(
                f"fp8_gemm_nt: c: expected {d.dtype} {list(d.shape)} like d, got {c.dtype} {list(c.shape)}"
            )
        d.copy_(epiloq.groupwise_mm(*operands, recipe=recipe or _DEFAULT, out_dtype=torch.float32).add_(c))


def m_grouped_fp8_gemm_nt_contiguous(
    a: Scaled,
    b: Scaled,
    d: Tensor,
    grouped_layout: Tensor,
    recipe: Recipe | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
) -> None:
    """``d[i] = a[i] @ b[e].t()`` for the expert e of each row i.

    `a` is float8_e4m3fn [M, K] with float32 [M, ceil(K / 128)], rows sorted by expert; `b` [E, N, K] with
    [E, ceil(N / 128), ceil(K / 128)]. `grouped_layout` is int32: [M], each row's expert, -1 for rows of padding; or,
    with `use_psum_layout`, [E], the ends of the experts' rows. Padding rows of `d` are undefined. Unlike in DeepGEMM,
    experts need not start at multiples of 128. On CUDA nothing is read back to the host, so unsorted rows and invalid
    expert indices are not detected.
    """
    (x, scale_x), (weight, scale_weight) = a, b
    offs = grouped_layout if use_psum_layout else _ends(grouped_layout, x.shape[0], weight.shape[0])
    epiloq.grouped_mm(x, weight.mT, scale_x, scale_weight.mT, offs=offs, recipe=recipe or _DEFAULT, out=d)


def _ends(experts: Tensor, rows: int, count: int) -> Tensor:
    """Ends of the experts' rows from each row's expert; rows of padding go to the next expert, or to none."""
    name = "m_grouped_fp8_gemm_nt_contiguous: grouped_layout"
    if experts.dtype != torch.int32 or experts.shape != (rows,):
        raise ValueError(f"{name}: expected torch.int32 [{rows}], got {experts.dtype} {list(experts.shape)}")
    if not experts.is_cuda:
        if (experts[experts >= 0].diff() < 0).any():
            raise ValueError(f"{name}: expected rows sorted by expert")
        if rows and int(experts.max()) >= count:
            raise ValueError(f"{name}: expected experts below {count}, got {int(experts.max())}")
    ends = torch.zeros(count + 1, dtype=torch.int32, device=experts.device)
    after = torch.arange(1, rows + 1, dtype=torch.int32, device=experts.device)
    # On CUDA an invalid expert index must not cause a write outside `ends`.
    ends.scatter_reduce_(0, (experts + 1).clamp(0, count).long(), after, "amax")
    return ends[1:].cummax(0).values


def m_grouped_fp8_gemm_nt_masked(
    a: Scaled,
    b: Scaled,
    d: Tensor,
    masked_m: Tensor,
    expected_m: int,
    recipe: Recipe | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """``d[e, :masked_m[e]] = a[e, :masked_m[e]] @ b[e].t()``; other rows of `d` are not written.

    `a` is float8_e4m3fn [E, M, K] with float32 [E, M, ceil(K / 128)], `b` [E, N, K] with
    [E, ceil(N / 128), ceil(K / 128)], `masked_m` int32 [E]. `expected_m`, a hint to DeepGEMM, is ignored.
    """
    (x, scale_x), (weight, scale_weight) = a, b
    epiloq.grouped_mm(x, weight.mT, scale_x, scale_weight.mT, masked_m=masked_m, recipe=recipe or _DEFAULT, out=d)


def per_token_cast_to_fp8(
    x: Tensor, use_ue8m0: bool, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """Cast `x` [M, K], with any strides, to float8_e4m3fn with float32 scales [M, ceil(K / gran_k)]
    = max(max|x|, 1e-4) / 448.

    `use_ue8m0` rounds scales up to powers of two. Raises NotImplementedError for `use_packed_ue8m0` (four scales
    packed into an integer, for Blackwell).
    """
    require_matrix("per_token_cast_to_fp8", x=x)
    if use_packed_ue8m0:
        raise NotImplementedError("per_token_cast_to_fp8: use_packed_ue8m0: expected False; it is not implemented")
    rows = rows_apart("per_token_cast_to_fp8", "x", x)
    return epiloq.quantize_fp8(rows, granularity="group", group_size=gran_k, eps=_LEAST_AMAX, ue8m0=use_ue8m0)


def per_block_cast_to_fp8(x: Tensor, use_ue8m0: bool, gran_k: int = 128) -> tuple[Tensor, Tensor]:
    """Cast `x` [N, K], with any strides, to float8_e4m3fn with float32 scales of its square blocks,
    = max(max|x|, 1e-4) / 448."""
    require_matrix("per_block_cast_to_fp8", x=x)
    rows = rows_apart("per_block_cast_to_fp8", "x", x)
    return epiloq.quantize_fp8(rows, granularity="block", group_size=gran_k, eps=_LEAST_AMAX, ue8m0=use_ue8m0)


def get_mn_major_tma_aligned_tensor(x: Tensor) -> Tensor:
    """float32 scales […, M, G] as TMA reads them: strides (1, M rounded up to 4); `x` itself if it has this layout."""
    if x.dim() not in (2, 3) or x.dtype != torch.float32:
        raise ValueError(
            f"get_mn_major_tma_aligned_tensor: x: expected float32 of 2 or 3 dimensions, got {x.dtype} {list(x.shape)}"
        )
    m, groups = x.shape[-2:]
    pitch = -(-m // _TMA_FLOATS) * _TMA_FLOATS
    strides = (pitch * groups, 1, pitch)[3 - x.dim() :]
    if x.stride() == strides:
        return x
    return x.new_empty_strided(x.shape, strides).copy_(x)
