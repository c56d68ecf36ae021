"""epiloq's products as linear kernels of vLLM, which its int8, FP8 and mixed-precision layers choose from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.kernels import linear as engine
from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassInt8ScaledMMLinearKernel
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.platforms import PlatformEnum

import epiloq
from epiloq.integrations.vllm.device import Answer, supported
from epiloq.integrations.vllm.float_weights import (
    EpiloqFp8OnOlderLinearKernel,
    EpiloqFp8WeightOnlyLinearKernel,
    EpiloqMxFp4LinearKernel,
    EpiloqNvFp4LinearKernel,
)
from epiloq.integrations.vllm.mixed_precision import EpiloqMixedPrecisionLinearKernel
from epiloq.integrations.vllm.quantizer import EpiloqQuantFP8
from epiloq.nn.base.prepared_linear import FP8_BLOCK, K_MULTIPLE, N_MULTIPLE, padded

_FP8 = torch.float8_e4m3fn


class EpiloqInt8LinearKernel(CutlassInt8ScaledMMLinearKernel):
    """int8 weights per channel or tensor; int8 activations per token or tensor, with a zero point or without."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        return supported("int8", compute_capability)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """After the engine's preparation, pad sizes that the kernels do not support."""
        super().process_weights_after_loading(layer)
        weight_name, scale_name, _, _, sums_name = self.layer_param_names
        weight = getattr(layer, weight_name).data.t()
        self.out_features = weight.shape[0]
        n, k = (-(-size // of) * of for size, of in zip(weight.shape, (N_MULTIPLE, K_MULTIPLE), strict=True))
        _replace(layer, weight_name, padded(weight.contiguous(), (n, k)).t())
        for name in (scale_name, sums_name):
            values = getattr(layer, name, None)
            if values is not None:
                flat = values.data.reshape(-1)
                one = name == scale_name and flat.numel() == 1  # for all rows
                _replace(layer, name, flat if one else padded(flat, (n,)))

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight, weight_scale, input_scale, input_zero, sums = self._get_layer_params(layer)
        q, scale, azp = epiloq.quantize_int8(
            x.reshape(-1, x.shape[-1]),
            scale=None if input_scale is None else input_scale.reshape(1),
            azp=None if input_zero is None else input_zero.reshape(1),
            symmetric=sums is None,
            pad_to=K_MULTIPLE,
            range_includes_zero=False,
        )
        bias = None if bias is None else padded(bias, (weight.shape[1],))
        rest: dict[str, Any] = {"out_dtype": x.dtype, "constant_b": True}
        if sums is None:
            y = epiloq.scaled_mm(q, weight, scale, weight_scale, bias, **rest)
        else:
            # A static zero point is multiplied with the column sums.
            azp = None if self.config.is_static_input_scheme else azp
            y = epiloq.scaled_mm_azp(q, weight, scale, weight_scale, sums, azp, bias, **rest)
        return _cut(y, self.out_features).view(*x.shape[:-1], self.out_features)


class EpiloqFp8LinearKernel(engine.FP8ScaledMMLinearKernel):
    """FP8 weights per channel or tensor; FP8 activations per token or tensor."""

    def __init__(self, c: Any, layer_param_names: Sequence[str]) -> None:
        super().__init__(c, layer_param_names)
        inputs = c.activation_quant_key.scale
        self.quant_fp8 = EpiloqQuantFP8(static=inputs.static, group_shape=inputs.group_shape)

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        return supported("fp8", compute_capability)

    @classmethod
    def can_implement(cls, c: Any) -> Answer:
        weight, inputs = c.weight_quant_key, c.activation_quant_key
        if (weight.dtype, inputs.dtype) != (_FP8, _FP8):
            return False, f"expected float8_e4m3fn weights and activations, got {weight.dtype} and {inputs.dtype}"
        if weight.scale.group_shape not in (GroupShape.PER_TENSOR, GroupShape.PER_CHANNEL):
            return False, f"expected a weight scale per tensor or channel, got {weight.scale.group_shape}"
        if inputs.scale.group_shape not in (GroupShape.PER_TENSOR, GroupShape.PER_TOKEN):
            return False, f"expected an input scale per tensor or token, got {inputs.scale.group_shape}"
        return _sizes(c)

    def apply_scaled_mm(
        self,
        *,
        A: Tensor,
        B: Tensor,
        out_dtype: torch.dtype,
        As: Tensor,
        Bs: Tensor,
        bias: Tensor | None,
        output_shape: list[int],
    ) -> Tensor:
        scales = As.reshape(-1), Bs.reshape(-1)
        return epiloq.scaled_mm(A, B, *scales, bias, out_dtype=out_dtype, constant_b=True).view(*output_shape)


class EpiloqFp8BlockLinearKernel(engine.Fp8BlockScaledMMLinearKernel):
    """FP8 weights in blocks of 128 x 128; FP8 activations in groups of 128."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        inputs = config.activation_quant_key.scale
        self.quant_fp8 = EpiloqQuantFP8(
            static=inputs.static, group_shape=inputs.group_shape, use_ue8m0=False, column_major_scales=True
        )

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        return supported("fp8-block", compute_capability)

    @classmethod
    def can_implement(cls, config: Any) -> Answer:
        possible, reason = super().can_implement(config)
        if not possible:
            return possible, reason
        weight, inputs = config.weight_quant_key.scale.group_shape, config.activation_quant_key.scale.group_shape
        if tuple(weight) != (FP8_BLOCK, FP8_BLOCK) or tuple(inputs) != (1, FP8_BLOCK):
            return False, f"expected blocks of (128, 128) and groups of (1, 128), got {tuple(weight)}, {tuple(inputs)}"
        return _sizes(config)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """After the engine's preparation, convert scales to float32 (some checkpoints have E8M0 scales)."""
        super().process_weights_after_loading(layer)
        for name in ("weight_scale_inv", "weight_scale"):
            scale = getattr(layer, name, None)
            if scale is not None and scale.dtype != torch.float32:
                _replace(layer, name, scale.data.to(torch.float32))

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        return epiloq.groupwise_mm(A, B.t(), As, Bs.t(), out_dtype=self.config.out_dtype, constant_b=True)


def register() -> None:
    """Insert the kernels before the engine's own on CUDA, and after them on a CPU.

    Repeated calls have no effect. All kernels are listed whatever is chosen; unsupported ones decline with a reason,
    which vLLM's messages show.
    """
    older, marlin = EpiloqFp8OnOlderLinearKernel, (engine.MarlinNvFp4LinearKernel, engine.MarlinMxFp4LinearKernel)
    first: tuple[type, ...] = ()
    # Lists of kernels, the entries to insert, and before which: kernels that multiply FP4 by FP4 stay first.
    lists: tuple[tuple[Any, Any, Any], ...] = (
        (engine._POSSIBLE_INT8_KERNELS, EpiloqInt8LinearKernel, first),
        (engine._POSSIBLE_FP8_KERNELS, older, first),
        (engine._POSSIBLE_FP8_KERNELS, EpiloqFp8LinearKernel, first),
        (engine._POSSIBLE_FP8_BLOCK_KERNELS, EpiloqFp8BlockLinearKernel, first),
        (engine._POSSIBLE_KERNELS, EpiloqMixedPrecisionLinearKernel, first),
        (engine._POSSIBLE_WFP8A16_KERNELS, EpiloqFp8WeightOnlyLinearKernel, first),
        (engine._POSSIBLE_NVFP4_KERNELS, EpiloqNvFp4LinearKernel, marlin),
        (engine._POSSIBLE_MXFP4_KERNELS, EpiloqMxFp4LinearKernel, marlin),
    )
    for by_platform, kernel, before in lists:
        cuda = by_platform.setdefault(PlatformEnum.CUDA, [])
        cpu = by_platform.setdefault(PlatformEnum.CPU, [])
        if kernel not in cuda:
            cuda.insert(next((i for i, other in enumerate(cuda) if other in before), 0), kernel)
        if kernel not in cpu and kernel is not older:
            cpu.append(kernel)


def _sizes(config: Any) -> Answer:
    n, k = config.weight_shape
    if n % N_MULTIPLE or k % K_MULTIPLE:
        return False, f"expected multiples of {N_MULTIPLE} outputs and of {K_MULTIPLE} inputs, got {n} and {k}"
    return True, None


def _replace(layer: nn.Module, name: str, values: Tensor) -> None:
    setattr(layer, name, nn.Parameter(values, requires_grad=False))


def _cut(y: Tensor, columns: int) -> Tensor:
    return y if y.shape[1] == columns else y[:, :columns].contiguous()
