"""epiloq's weight-only product as a mixed-precision kernel of vLLM, for GPTQ, AWQ and compressed-tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from vllm.model_executor.kernels.linear.mixed_precision import MPLinearKernel
from vllm.model_executor.parameter import permute_param_layout_
from vllm.platforms import current_platform
from vllm.scalar_type import scalar_types

import epiloq
from epiloq.formats.layouts.base import order_of
from epiloq.formats.layouts.words import period, unpack
from epiloq.integrations.vllm.device import Answer, supported
from epiloq.nn.base.packed_linear import has_kernel
from epiloq.weights.packed_weight import PackedWeight, pack_weight

_TYPES = {
    scalar_types.uint4b8: (4, False),
    scalar_types.uint8b128: (8, False),
    scalar_types.uint4: (4, True),
    scalar_types.uint8: (8, True),
}
"""Bits, and whether there are zero points, for each of the engine's weight types."""


class EpiloqMixedPrecisionLinearKernel(MPLinearKernel):
    """4- and 8-bit weights per channel or group, with zero points or without, and 16-bit activations."""

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    @classmethod
    def can_implement(cls, c: Any) -> Answer:
        if c.weight_type not in _TYPES:
            return False, f"epiloq expects weights of one of {', '.join(map(str, _TYPES))}, got {c.weight_type}"
        bits, zeros = _TYPES[c.weight_type]
        possible, reason = supported(f"w{bits}a16")
        if not possible:
            return possible, reason
        if c.zero_points != zeros:
            return False, f"epiloq expects zero points with {c.weight_type} {'always' if zeros else 'never'}"
        wide = () if current_platform.is_cuda() else (torch.float32,)
        if c.act_type not in (torch.float16, torch.bfloat16, *wide):
            return False, f"epiloq expects 16-bit activations, got {c.act_type}"
        if c.out_type not in (None, c.act_type):
            return False, f"epiloq expects an output in the activations' {c.act_type}, got {c.out_type}"
        return _groups(c, bits)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pack the engine's int32 words in the order of epiloq's kernels."""
        packed = self._packed(layer)
        self.numbers = (packed.bits, packed.n, packed.k, packed.group_size)
        # under the names of the original tensors, so that these are released
        values: dict[str, Tensor | None] = {self.w_q_name: packed.q, self.w_s_name: packed.scale}
        values |= {self.w_zp_name or "weight_zero": packed.zero, self.w_gidx_name or "weight_perm": packed.perm}
        self.names = tuple(values)
        for name, tensor in values.items():
            if hasattr(layer, name):
                delattr(layer, name)
            layer.register_parameter(name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))
        self.weight = self._weight(layer)

    def _packed(self, layer: nn.Module) -> PackedWeight:
        c = self.config
        bits, zeros = _TYPES[c.weight_type]
        k, n = c.partition_weight_shape
        words, scale, zero, index = self._get_weight_params(layer)
        words = permute_param_layout_(words, input_dim=1, output_dim=0, packed_dim=1).data
        q = unpack(words.contiguous(), bits, k)
        scale = permute_param_layout_(scale, input_dim=1, output_dim=0).data.contiguous()
        points = None
        if zeros:
            assert zero is not None
            zero = permute_param_layout_(zero, input_dim=1, output_dim=0, packed_dim=0).data
            points = unpack(zero.t().contiguous(), bits, n).t().contiguous()
        else:
            q = (q.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)
        perm = None
        if c.has_g_idx:
            assert index is not None
            perm = order_of(index.data, k if c.group_size == -1 else c.group_size, "vllm", str(self.w_gidx_name))
            q = q if perm is None else q[:, perm]
        return pack_weight(q, scale, points, bits=bits, group_size=c.group_size, perm=perm)

    def _weight(self, layer: nn.Module) -> PackedWeight:
        q, scale, zero, perm = (getattr(layer, name) for name in self.names)
        return PackedWeight(q, scale, zero, None, perm, *self.numbers)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        # Compiled graphs take the layer's parameters as inputs; eager calls save the time of collecting them.
        weight = self._weight(layer) if is_dynamo_compiling() else self.weight
        return epiloq.weight_only_mm(x, weight, bias)


def _groups(c: Any, bits: int) -> Answer:
    """Whether sizes fill words and groups, and kernels support the group size."""
    (full_k, _), (k, n), size = c.full_weight_shape, c.partition_weight_shape, c.group_size
    fields = period(bits)
    if k % fields or (c.zero_points and n % fields):
        return False, f"epiloq expects sizes that fill int32 words, multiples of {fields}, got {n} x {k}"
    if k != full_k and c.has_g_idx:
        return False, "epiloq expects no activation order in a layer whose inputs are divided among GPUs"
    if size == -1:
        return True, None
    if k % size:
        return False, f"epiloq expects whole groups of {size} in each part of the layer, got {k} inputs"
    if current_platform.is_cuda() and not has_kernel(bits, k, size):
        return False, f"epiloq expects groups of 32, 64, 128 times a power of two or whole rows, got {size}"
    return True, None
