"""Argument checks of `packed_fp4_mm`."""

from __future__ import annotations

import torch
from torch import Tensor

from epiloq.ops.experts.matrices import number_of
from epiloq.weights.fp4 import FLOATS, FORMATS
from epiloq.weights.packed_fp4_weight import PackedFp4Weight, shapes_of_parts
from epiloq.weights.tensor_checks import check_memory, check_output_of, check_rows, described, refuse

NAME = "packed_fp4_mm"


def counts_of(offs: Tensor | None, masked_m: Tensor | None) -> Tensor | None:
    """`offs` or `masked_m`, whichever is given. Raises ValueError for both."""
    if offs is not None and masked_m is not None:
        refuse(NAME, "offs", "at most one of offs and masked_m", "both")
    return masked_m if offs is None else offs


def experts_of(x: Tensor, weight: PackedFp4Weight, counts: Tensor | None, masked: bool) -> int:
    """Number of matrices. Raises ValueError for mismatching counts, rows or weight."""
    if x.ndim == 0:
        refuse(NAME, "x", "at least one dimension", "a scalar")
    return 1 if counts is None else number_of(NAME, x, weight.n, weight.k, counts, masked)


def check(
    out: Tensor, x: Tensor, weight: PackedFp4Weight, bias: Tensor | None, counts: Tensor | None, out_given: bool
) -> None:
    """Raise ValueError, which names the argument, if one is invalid."""
    inputs: dict[str, Tensor | None] = {"x": x, "weight.q": weight.q, "weight.scale": weight.scale}
    inputs |= {"weight.global_scale": weight.global_scale, "bias": bias}
    inputs["masked_m" if x.ndim == 3 else "offs"] = counts
    for name, given in inputs.items():
        if given is not None:
            check_memory(name, given, x.device, NAME)
    if x.dtype not in FLOATS or x.shape[-1] != weight.k:
        refuse(NAME, "x", f"float32, float16 or bfloat16 with {weight.k} columns", described(x))
    if counts is None or x.ndim == 2:
        check_rows("x", x, NAME)
    elif weight.k > 1 and x.stride(-1) != 1:
        refuse(NAME, "x", "dense rows", described(x))
    if weight.format not in FORMATS:
        refuse(NAME, "weight.format", f"one of {', '.join(FORMATS)}", repr(weight.format))
    experts = 1 if counts is None else counts.numel()
    shapes = shapes_of_parts(weight.format, weight.n, weight.k)
    parts = {"q": weight.q, "scale": weight.scale}
    for name, tensor in parts.items():
        if tensor.dtype != torch.uint8 or tensor.shape != shapes[name] or not tensor.is_contiguous():
            refuse(NAME, f"weight.{name}", f"uint8 {list(shapes[name])}, dense", described(tensor))
    global_scale = weight.global_scale
    if global_scale is not None and (
        global_scale.dtype != torch.float32 or global_scale.shape not in ((1,), (experts,))
    ):
        refuse(NAME, "weight.global_scale", f"float32 [{experts}]", described(global_scale))
    rows = weight.n // experts
    shape = (rows,) if counts is None else (experts, rows)
    if bias is not None and (bias.dtype != x.dtype or bias.shape != shape or not bias.is_contiguous()):
        refuse(NAME, "bias", f"x's {x.dtype} {list(shape)}, dense", described(bias))
    if out_given:
        check_output_of(x, out, rows, inputs, NAME)
