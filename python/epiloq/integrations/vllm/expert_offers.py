"""How epiloq would run the experts of each of vLLM's methods: the layouts of their tensors, and what they lack."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import vllm.envs as envs
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQMoEMethod
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQMoEMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_mxfp4 as compressed_mxfp4,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4 as compressed_nvfp4,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_fp8 as compressed_fp8,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_int8 as compressed_int8,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16 as compressed_words,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16_marlin as compressed_words_marlin,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod

from epiloq.formats.layouts.awq import ORDER
from epiloq.integrations.engines.experts import (
    MXFP4_BLOCK,
    NVFP4_BLOCK,
    Sizes,
    fp4_experts,
    fp8_block_experts,
    gpt_oss_experts,
    matrix_of_words,
    packed_experts,
    reason_against_graphs,
    row_experts,
)
from epiloq.integrations.vllm.device import capability_here
from epiloq.nn.base.prepared_linear import FP8_BLOCK
from epiloq.nn.experts.fp4_experts import Fp4Experts
from epiloq.nn.experts.gated_experts import GatedExperts
from epiloq.weights.packed_weight import PackedWeight

Reader: TypeAlias = "Callable[[Any, Sizes], GatedExperts | Fp4Experts]"

GATES: Mapping[MoEActivation, Callable[[], nn.Module]] = {
    MoEActivation.SILU: nn.SiLU,
    MoEActivation.GELU: nn.GELU,
    MoEActivation.GELU_TANH: partial(nn.GELU, "tanh"),
}
"""Activations of gates, which are multiplied by ups."""


def gate_of(layer: Any) -> nn.Module:
    return GATES[layer.activation]()


@dataclass(frozen=True)
class Offer:
    """How epiloq would run the experts of one of vLLM's methods.

    kind
        The kind of layers, as in ``EPILOQ_ENGINE_LAYERS``.
    read
        Returns the experts of a loaded layer, given their sizes.
    reason
        Why it does not; None if it does.
    activations, has_bias
        The layer's must be one of these, and this.
    multiple
        Of which the intermediate size is made one, by zeros.
    """

    kind: str
    read: Reader
    reason: str | None
    activations: Collection[MoEActivation] = tuple(GATES)
    has_bias: bool = False
    multiple: int = 1


@dataclass(frozen=True)
class _Words:
    """Names of packed experts' tensors without ``w13_`` and ``w2_``, and how they are packed."""

    bits: int
    group_size: int
    q: str
    scale: str
    zero: str | None
    by_output: bool = False

    def read(self, layer: Any, sizes: Sizes) -> GatedExperts:
        return packed_experts(sizes, self._matrices(layer, "w13"), self._matrices(layer, "w2"), gate_of(layer))

    def _matrices(self, layer: Any, name: str) -> Iterator[PackedWeight]:
        q, scale = (getattr(layer, f"{name}_{part}").data for part in (self.q, self.scale))
        zero = None if self.zero is None else getattr(layer, f"{name}_{self.zero}").data
        order = ORDER if self.by_output else None
        options: dict[str, Any] = {"bits": self.bits, "group_size": self.group_size}
        for expert in range(len(q)):
            points = None if zero is None else zero[expert]
            yield matrix_of_words(q[expert], scale[expert], points, order=order, by_output=self.by_output, **options)

    def offer(self, sizes: Sizes, dtype: torch.dtype, reason: str | None) -> Offer:
        if reason is None and envs.VLLM_MARLIN_INPUT_DTYPE is not None:
            reason = "8-bit activations were asked for with VLLM_MARLIN_INPUT_DTYPE"
        reason = reason or reason_against_recording(sizes, self.bits, self.group_size, dtype)
        return Offer(f"w{self.bits}a16-experts", self.read, reason)


def reason_against_recording(sizes: Sizes, bits: int, group_size: int, dtype: torch.dtype) -> str | None:
    """Why a CUDA graph cannot record packed experts on the device here; None if it can, and on a CPU."""
    capability = capability_here()
    if capability is None:
        return None
    if envs.VLLM_BATCH_INVARIANT:
        return "batch-invariant packed experts are multiplied one after the other, which CUDA graphs cannot record"
    return reason_against_graphs(sizes, bits, group_size, dtype, capability)


def _of_compressed_words(method: Any, sizes: Sizes) -> Offer:
    # Channels have no group size.
    words = _Words(
        method.num_bits,
        method.group_size or -1,
        "weight_packed",
        "weight_scale",
        None if method.weight_quant.symmetric else "weight_zero_point",
    )
    backend = getattr(method, "wna16_backend", None)
    reason = "expected no activation order" if method.weight_quant.actorder in ("group", "dynamic") else None
    return words.offer(sizes, method.moe.in_dtype, reason or _reason_against_layout(backend))


def _of_gptq(method: Any, sizes: Sizes) -> Offer:
    config = method.quant_config
    words = _Words(config.weight_bits, config.group_size, "qweight", "scales", None)
    reason = "expected no activation order" if config.desc_act else None
    reason = reason or (None if config.is_sym else "expected symmetric weights in GPTQ's format")
    return words.offer(sizes, method.moe.in_dtype, reason or _reason_against_layout(method.wna16_moe_backend))


def _of_awq(method: Any, sizes: Sizes) -> Offer:
    config = method.quant_config
    words = _Words(config.weight_bits, config.group_size, "qweight", "scales", "qzeros", by_output=True)
    reason = None if config.zero_point else "expected zero points in AWQ's format"
    return words.offer(sizes, method.moe.in_dtype, reason or _reason_against_layout(method.wna16_moe_backend))


def _reason_against_layout(backend: WNA16MoEBackend | None) -> str | None:
    """Why weights that vLLM loads for a backend cannot be read."""
    if backend in (WNA16MoEBackend.FLASHINFER_TRTLLM, WNA16MoEBackend.HUMMING):
        return f"expected weights in Marlin's layout, got those for {backend.value}"
    return None


def _of_fp8(method: Any, sizes: Sizes) -> Offer:
    """The checkpoints of the method ``fp8``: in blocks or per tensor."""
    static = method.quant_config.activation_scheme == "static"
    return _of_float8(method.weight_block_size, method.weight_scale_name, static, sizes)


def _of_compressed_fp8(method: Any, sizes: Sizes) -> Offer:
    return _of_float8(method.weight_block_size, "weight_scale", method.static_input_scales, sizes)


def _of_float8(block: Sequence[int] | None, scale: str, static: bool, sizes: Sizes) -> Offer:
    if block is None:
        reason = "expected a dynamic scale of activations, got a static one" if static else None
        return Offer("fp8-experts", partial(_read_values, row_experts, ("weight", scale)), reason)
    reason = None
    if tuple(block) != (FP8_BLOCK, FP8_BLOCK):
        reason = f"expected blocks of {FP8_BLOCK} x {FP8_BLOCK}, got {block[0]} x {block[1]}"
    elif sizes.intermediate % FP8_BLOCK:
        reason = f"expected multiples of {FP8_BLOCK} per rank, got an intermediate size of {sizes.intermediate}"
    return Offer("fp8-block-experts", partial(_read_values, fp8_block_experts, ("weight", scale)), reason)


def _of_compressed_int8(method: Any, sizes: Sizes) -> Offer:
    reason = None if method.input_quant.symmetric else "expected no zero points of activations"
    return Offer("int8-experts", partial(_read_values, row_experts, ("weight", "weight_scale")), reason)


def _of_mxfp4(method: Any, sizes: Sizes) -> Offer:
    read = partial(_read_values, fp4_experts, ("weight_packed", "weight_scale"))
    return Offer("mxfp4-experts", read, _reason_against_blocks(sizes, MXFP4_BLOCK))


def _of_nvfp4(method: Any, sizes: Sizes) -> Offer:
    read = partial(_read_values, fp4_experts, ("weight_packed", "weight_scale", "weight_global_scale"))
    return Offer("nvfp4-experts", read, _reason_against_blocks(sizes, NVFP4_BLOCK))


def _reason_against_blocks(sizes: Sizes, block: int) -> str | None:
    if sizes.hidden % block or sizes.intermediate % block:
        return f"expected multiples of {block}, got hidden size {sizes.hidden} and {sizes.intermediate} per rank"
    return None


def _read_values(make: Callable[..., GatedExperts], parts: Sequence[str], layer: Any, sizes: Sizes) -> GatedExperts:
    return make(sizes, *_tensors(layer, *parts), gate_of(layer))


def _read_gpt_oss(layer: Any, sizes: Sizes) -> Fp4Experts:
    return gpt_oss_experts(sizes, *_tensors(layer, "weight", "weight_scale", "bias"))


def _tensors(layer: Any, *parts: str) -> tuple[list[Tensor], list[Tensor]]:
    """Those of gate and up, and of down."""
    gate_up, down = ([getattr(layer, f"{name}_{part}").data for part in parts] for name in ("w13", "w2"))
    return gate_up, down


_OF_16_BITS = (
    Mxfp4MoeBackend.FLASHINFER_CUTLASS_MXFP4_BF16,
    Mxfp4MoeBackend.FLASHINFER_TRTLLM_MXFP4_BF16,
    Mxfp4MoeBackend.MARLIN,
    Mxfp4MoeBackend.TRITON,
    Mxfp4MoeBackend.TRITON_UNFUSED,
    Mxfp4MoeBackend.CPU,
)
"""vLLM's kernels whose activations stay in bfloat16; the user can ask for others."""


def _of_gpt_oss(method: Any, sizes: Sizes) -> Offer:
    reason = None
    if sizes.hidden % MXFP4_BLOCK:
        reason = f"expected a multiple of {MXFP4_BLOCK}, got a hidden size of {sizes.hidden}"
    elif method.moe.in_dtype != torch.bfloat16:
        reason = f"expected bfloat16 activations, got {method.moe.in_dtype}"
    elif method.mxfp4_backend not in _OF_16_BITS:
        reason = f"expected bfloat16 activations, got the backend {method.mxfp4_backend.value}"
    gates = (MoEActivation.SWIGLUOAI,)
    return Offer("mxfp4-experts", _read_gpt_oss, reason, gates, has_bias=True, multiple=MXFP4_BLOCK)


OFFERS: Mapping[type, Callable[[Any, Sizes], Offer]] = {
    compressed_words_marlin.CompressedTensorsWNA16MarlinMoEMethod: _of_compressed_words,
    compressed_words.CompressedTensorsWNA16MoEMethod: _of_compressed_words,
    AutoGPTQMoEMethod: _of_gptq,
    AutoAWQMoEMethod: _of_awq,
    Fp8MoEMethod: _of_fp8,
    compressed_fp8.CompressedTensorsW8A8Fp8MoEMethod: _of_compressed_fp8,
    compressed_int8.CompressedTensorsW8A8Int8MoEMethod: _of_compressed_int8,
    compressed_mxfp4.CompressedTensorsW4A4Mxfp4MoEMethod: _of_mxfp4,
    compressed_nvfp4.CompressedTensorsW4A4Nvfp4MoEMethod: _of_nvfp4,
    GptOssMxfp4MoEMethod: _of_gpt_oss,
}
"""By vLLM's method; subclasses, which may load other tensors, are left to vLLM."""
