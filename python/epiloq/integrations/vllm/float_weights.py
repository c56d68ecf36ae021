"""epiloq's products of FP8 and FP4 weights with 16-bit activations as linear kernels of vLLM."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.model_executor.kernels import linear as engine
from vllm.model_executor.kernels.linear.mxfp4.base import MxFp4LinearKernel
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

import epiloq
from epiloq.integrations.vllm.device import Answer, supported
from epiloq.nn.base.prepared_linear import FP8_BLOCK, K_MULTIPLE
from epiloq.weights.fp4 import FORMATS
from epiloq.weights.packed_fp4_weight import PackedFp4Weight

_FP8 = torch.float8_e4m3fn
_TENSOR_CORES = 89
"""The lowest compute capability with FP8 tensor cores."""


class EpiloqFp8WeightOnlyLinearKernel(engine.FP8ScaledMMLinearKernel):
    """FP8 weights per channel, tensor or block of 128 x 128; activations stay in 16 bits."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        return supported("w8a16-fp8", compute_capability)

    @classmethod
    def can_implement(cls, c: Any) -> Answer:
        key = c.weight_quant_key
        if key.dtype != _FP8:
            return False, f"expected float8_e4m3fn weights, got {key.dtype}"
        shape = key.scale.group_shape
        if shape not in (GroupShape.PER_TENSOR, GroupShape.PER_CHANNEL) and tuple(shape) != (FP8_BLOCK, FP8_BLOCK):
            return False, f"expected a weight scale per tensor, channel or block of 128 x 128, got {shape}"
        if c.weight_shape[1] % K_MULTIPLE:
            return False, f"expected a multiple of {K_MULTIPLE} inputs, got {c.weight_shape[1]}"
        return True, None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Make the weight row-major, and scales float32, per row, block or tensor."""
        weight_name, scale_name = self.layer_param_names[:2]
        shape, weight = self.config.weight_quant_key.scale.group_shape, getattr(layer, weight_name).data
        if tuple(shape) == (FP8_BLOCK, FP8_BLOCK):
            # The engine renames scales of blocks and leaves the weight as stored.
            scale_name = "weight_scale_inv" if hasattr(layer, "weight_scale_inv") else scale_name
            scale, self.block = getattr(layer, scale_name).data, (FP8_BLOCK, FP8_BLOCK)
        else:
            scale, weight = getattr(layer, scale_name).data.reshape(-1, 1), weight.t()
            self.block = (-1, -1) if scale.numel() == 1 else (1, -1)
        self.names = weight_name, scale_name
        for name, tensor in zip(self.names, (weight.contiguous(), scale.float().contiguous()), strict=True):
            setattr(layer, name, nn.Parameter(tensor, requires_grad=False))

    def apply_weights(self, layer: nn.Module, x: Any, bias: Tensor | None = None) -> Tensor:
        weight, scale = (getattr(layer, name) for name in self.names)
        y = epiloq.fp8_weight_mm(x.reshape(-1, x.shape[-1]), weight, scale, bias, block=self.block)
        return y.view(*x.shape[:-1], weight.shape[0])

    def apply_scaled_mm(self, **given: Any) -> Tensor:
        raise NotImplementedError("epiloq: expected activations in 16 bits, got quantised ones")


class EpiloqFp8OnOlderLinearKernel(EpiloqFp8WeightOnlyLinearKernel):
    """The same for layers that ask for FP8 activations, on GPUs whose tensor cores do not have FP8."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        if compute_capability is not None and compute_capability >= _TENSOR_CORES:
            return False, f"FP8 activations run from compute capability {_TENSOR_CORES / 10} on"
        return super().is_supported(compute_capability)


class _Fp4:
    """Shared by both formats: weights packed for epiloq's product; activations stay in 16 bits."""

    form: ClassVar[str]

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        return supported("w4a16-fp4", compute_capability)

    @classmethod
    def can_implement(cls, config: Any) -> Answer:
        return True, None

    def pack(self, layer: Any, factor: Tensor | None) -> None:
        """Replace the engine's codes and scales by packed ones.

        Raises ValueError for a part of a block, whose scale the engine has not loaded. `can_implement` is told no size.
        """
        columns, block = layer.input_size_per_partition, FORMATS[self.form].block_size
        if columns % block:
            ranks = layer.input_size // columns
            raise ValueError(
                f"epiloq: {layer.prefix}: expected a multiple of {block} inputs per rank, because vLLM divides "
                f"{self.form}'s scales by blocks of {block}, got {layer.input_size} on {ranks} ranks; use fewer ranks, "
                "or epiloq's own format (epiloq convert --format epiloq), which has no such limit"
            )
        weight = epiloq.pack_fp4_weight(
            layer.weight.data, layer.weight_scale.data, in_features=columns, global_scale=factor
        )
        self.numbers = weight.format, weight.n, weight.k
        parts = {"weight": weight.q, "weight_scale": weight.scale, "weight_global_scale": weight.global_scale}
        for name, tensor in parts.items():
            if tensor is not None:
                setattr(layer, name, nn.Parameter(tensor, requires_grad=False))

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        factor = getattr(layer, "weight_global_scale", None)
        weight = PackedFp4Weight(layer.weight, layer.weight_scale, factor, *self.numbers)
        return epiloq.packed_fp4_mm(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], weight.n)


class EpiloqMxFp4LinearKernel(_Fp4, MxFp4LinearKernel):
    """MXFP4: blocks of 32 with power-of-two scales."""

    form = "mxfp4"

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.pack(layer, None)


class EpiloqNvFp4LinearKernel(_Fp4, NvFp4LinearKernel):
    """NVFP4: blocks of 16 with FP8 scales, and a global scale."""

    form = "nvfp4"

    def process_weights_after_loading(self, layer: Any) -> None:
        self.pack(layer, layer.weight_global_scale.data.float().reshape(1))
