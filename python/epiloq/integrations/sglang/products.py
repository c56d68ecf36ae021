"""epiloq's products instead of sgl-kernel's in SGLang's int8 and FP8 linear layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor

import epiloq
from epiloq.integrations.engines.choice import runs_on

_QUANTIZATION = "sglang.srt.layers.quantization"
_INT8 = f"{_QUANTIZATION}.compressed_tensors.schemes.compressed_tensors_w8a8_int8"
TARGETS = {
    f"{_QUANTIZATION}.w8a8_int8.int8_scaled_mm": "int8",
    f"{_INT8}.int8_scaled_mm": "int8",
    f"{_QUANTIZATION}.fp8_utils.fp8_scaled_mm": "fp8",
    f"{_QUANTIZATION}.fp8_utils.fp8_blockwise_scaled_mm": "fp8-block",
}
"""The functions with sgl-kernel's arguments that layers call (on CUDA devices only), and the kind of their layers."""


def taken(kind: str, mat_a: Tensor, mat_b: Tensor) -> tuple[bool, str | None]:
    """Whether epiloq runs a product ``[M, K] @ [K, N]`` of a kind of layer, and the reason if not."""
    if mat_a.is_cuda:
        major, minor = torch.cuda.get_device_capability(mat_a.device)
        possible, reason = runs_on(kind, 10 * major + minor)
    else:
        possible, reason = runs_on(kind, None)
    (k, n) = mat_b.shape
    if possible and (k % 16 or n % 8):
        return False, f"expected multiples of 8 outputs and of 16 inputs, got {n} and {k}"
    return possible, reason


def around(kind: str) -> Callable[..., Tensor]:
    """A hook that runs supported products on epiloq, and the others with the original function."""

    def product(
        original: Callable[..., Tensor],
        mat_a: Tensor,
        mat_b: Tensor,
        scales_a: Tensor,
        scales_b: Tensor,
        out_dtype: torch.dtype,
        bias: Tensor | None = None,
    ) -> Tensor:
        if not taken(kind, mat_a, mat_b)[0]:
            rest = () if bias is None else (bias,)
            return original(mat_a, mat_b, scales_a, scales_b, out_dtype, *rest)
        options: dict[str, Any] = {"out_dtype": out_dtype, "constant_b": True}
        if kind == "fp8-block":
            return epiloq.groupwise_mm(mat_a, mat_b, scales_a, scales_b, bias, **options)
        return epiloq.scaled_mm(mat_a, mat_b, scales_a.reshape(-1), scales_b.reshape(-1), bias, **options)

    return product


def register() -> None:
    """Register a hook for each of these functions that this version of SGLang has. Repeated calls have no effect."""
    for target, kind in TARGETS.items():
        module, _, name = target.rpartition(".")
        try:
            there = hasattr(__import__(module, fromlist=[name]), name)
        except ImportError:
            there = False
        known = any(getattr(hook, "of_epiloq", False) for _, hook, _ in HookRegistry._hooks.get(target, ()))
        if there and not known:
            hook = around(kind)
            hook.of_epiloq = True  # type: ignore[attr-defined]
            HookRegistry.register(target, hook, HookType.AROUND)
