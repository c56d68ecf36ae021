"""epiloq's FP8 quantiser in the place of vLLM's CUDA kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8

import epiloq


class EpiloqQuantFP8(QuantFP8):
    """Activations per token or tensor, in groups of 128, or by a static scale.

    It replaces what vLLM runs as a kernel of its own: a product that follows epiloq's loads its weight while that runs
    (programmatic dependent launch). Where vLLM compiles the quantiser, inductor joins it with what precedes it, and
    with UE8M0 scales and groups of other sizes vLLM's kernel stays.
    """

    def forward_cuda(
        self, x: Tensor, scale: Tensor | None = None, scale_ub: Tensor | None = None, use_triton: bool = False
    ) -> tuple[Tensor, Tensor]:
        """``x`` is ``[M, K]``; returns FP8 ``[M, K]`` and scales ``[1]``, ``[M, 1]`` or ``[M, K / 128]``, float32."""
        if torch.compiler.is_compiling() or not self._is_supported(scale):
            return super().forward_cuda(x, scale, scale_ub, use_triton)
        if scale is not None:
            return epiloq.quantize_fp8(x, scale=scale.reshape(1))
        if self.is_group_quant:
            return epiloq.quantize_fp8(x, granularity="group", scale_layout="column")
        return epiloq.quantize_fp8(
            x, granularity="token" if self.use_per_token_if_dynamic else "tensor", scale_ub=scale_ub
        )

    def _is_supported(self, scale: Tensor | None) -> bool:
        if self.is_group_quant:
            return not self.static and tuple(self.group_shape) == (1, 128) and not self.use_ue8m0
        return self.num_token_padding is None and (scale is None or scale.numel() == 1)
