"""Benchmark cases: layer shapes of known models, token counts and named suites of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from epiloq.bench.convolutions import PP_OCR, RESNET50, Layer


class Shape(NamedTuple):
    """Weight shape of a linear layer: N output features, K input features."""

    layer: str
    n: int
    k: int


@dataclass(frozen=True)
class Case:
    """One row of a benchmark. An operation without a weight has ``n == 0``: M rows by K columns."""

    operation: str
    variant: str
    layer: str = field(compare=False)  # a shape is one case, whichever layer it is known as
    m: int
    n: int
    k: int

    def __str__(self) -> str:
        size = f"{self.n}x{self.k}" if self.n else f"K={self.k}"
        return f"{self.operation} {self.variant} {size} M={self.m}"


@dataclass(frozen=True)
class Suite:
    """Shapes x token counts x variants of each operation. An empty ``peers`` means every peer."""

    shapes: tuple[Shape, ...]
    tokens: tuple[int, ...]
    variants: Mapping[str, tuple[str, ...]]
    peers: tuple[str, ...] = ()


TOKENS = (1, 16, 32, 64, 128, 256, 1024, 4096)
SCALED = {"scaled_mm": ("scaled",)}
BLOCKWISE = {"online_quant_mm": ("w8g128", "w4g128")}
SCALED_AND_TOKEN = {"scaled_mm": ("scaled",), "quantize_int8": ("token",)}
FLOAT8 = {"scaled_mm_fp8": ("fast", "accurate"), "groupwise_mm": ("group",)}
WEIGHT_ONLY = {"weight_only_mm": ("w4_g128", "w4_g128_fp16", "w4_g32_zero", "w8")}
EVERYTHING = {
    "scaled_mm": ("scaled", "bias", "azp", "azp_per_token"),
    "quantize_int8": ("token", "token_azp", "static"),
}

_FUSED = ("int8_token", "fp8_token", "fp8_group")
QUANTISERS = {
    "quantize_int8": ("token", "token_azp", "static"),
    "quantize_fp8": ("tensor", "static", "token", "group", "group_column", "block"),
    "quantize_blockwise_int8": ("g32", "g128", "g128_symmetric"),
    "rms_norm_quant": (*_FUSED, *(f"add_{variant}" for variant in _FUSED)),
    "silu_and_mul_quant": _FUSED,
    "silu_and_mul": ("gpt_oss",),
}

# Fused projections as serving stacks run them: q, k and v in one weight, gate and up in one weight.
LLAMA3_8B = (
    Shape("qkv", 6144, 4096),
    Shape("o", 4096, 4096),
    Shape("gate_up", 28672, 4096),
    Shape("down", 4096, 14336),
)
LLAMA3_70B = (
    Shape("qkv", 10240, 8192),
    Shape("o", 8192, 8192),
    Shape("gate_up", 57344, 8192),
    Shape("down", 8192, 28672),
)
DEEPSEEK_V3 = (
    Shape("q_a_kv_a", 2112, 7168),
    Shape("q_b", 24576, 1536),
    Shape("kv_b", 32768, 512),
    Shape("o", 7168, 16384),
    Shape("gate_up", 36864, 7168),
    Shape("down", 7168, 18432),
    Shape("shared_gate_up", 4096, 7168),
    Shape("shared_down", 7168, 2048),
)
SMOLLM2 = (
    Shape("q_o", 576, 576),
    Shape("k_v", 192, 576),
    Shape("gate_up", 1536, 576),
    Shape("down", 576, 1536),
)
H200 = (
    Shape("llama3-8b qkv", 6144, 4096),
    Shape("llama3-8b gate_up", 28672, 4096),
    Shape("llama3-8b down", 4096, 14336),
    Shape("deepseek-v3 q_a_kv_a", 2112, 7168),
    Shape("deepseek-v3 q_b", 24576, 1536),
    Shape("deepseek-v3 o", 7168, 16384),
    Shape("llama3-70b o", 8192, 8192),
)
# No kernel and no table was tuned on these.
UNTUNED = tuple(
    Shape(f"{n} x {k}", n, k)
    for n, k in (
        (10240, 5120),
        (5120, 25600),
        (3584, 18944),
        (4608, 3584),
        (1280, 8192),
        (8192, 3584),
        (5120, 2880),
    )
)
# First multiples of 8 and 16 that no tile size divides, then sizes that need the ragged path.
ODD = (
    Shape("smollm2 q_o", 576, 576),
    Shape("ragged tiles", 1040, 2064),
    Shape("K % 16 = 8", 520, 1000),
    Shape("odd", 4095, 4095),
    Shape("small odd", 33, 100),
)


# q k^T and p v of one head: one of N and K is the head size of 128, the other one the number of tokens.
ATTENTION = tuple(
    shape for t in (512, 4096) for shape in (Shape(f"scores of {t}", t, 128), Shape(f"values of {t}", 128, t))
)


def _convolutions(layers: Mapping[str, Layer]) -> tuple[Shape, ...]:
    return tuple(Shape(name, layer.outputs, layer.k) for name, layer in layers.items())


CONVOLUTIONS = {"conv2d_int8": ("relu",), "conv2d_weight_only": ("w4_g128", "w8")}

SUITES: dict[str, Suite] = {
    "quick": Suite((SMOLLM2[2], Shape("square", 2048, 2048)), (1, 17, 256), SCALED_AND_TOKEN),
    "h200": Suite(H200, TOKENS, SCALED),
    "blockwise": Suite(
        (Shape("square", 4096, 4096), H200[0], H200[2]), (16, 64, 256, 1024), BLOCKWISE, ("bf16", "staged")
    ),
    "h200-fp8": Suite(H200, TOKENS, FLOAT8),
    "epilogues": Suite((LLAMA3_8B[0], LLAMA3_8B[3], LLAMA3_70B[1]), (1, 64, 1024, 4096), EVERYTHING),
    # A quantiser and the product after it.
    "layers": Suite(
        LLAMA3_8B,
        (1, 16, 64, 128, 256, 1024),
        {"layer": ("int8_token", "fp8_token", "fp8_group", "norm_int8_token", "norm_fp8_group")},
    ),
    "llama3-8b": Suite(LLAMA3_8B, TOKENS, SCALED_AND_TOKEN),
    "llama3-70b": Suite(LLAMA3_70B, TOKENS, SCALED_AND_TOKEN),
    "deepseek-v3": Suite(DEEPSEEK_V3, TOKENS, SCALED_AND_TOKEN),
    # The last two are 64 and 128 MiB of bf16.
    "quantisers": Suite((LLAMA3_70B[1],), (1, 64, 4096, 8192), QUANTISERS, ("copy", "unfused")),
    "smollm2": Suite(SMOLLM2, (1, 16, 64, 256, 1024), SCALED_AND_TOKEN),
    "weight-only": Suite(H200, (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024), WEIGHT_ONLY),
    # 4-bit weights with 16-bit and with FP8 activations.
    "four-bits": Suite(
        UNTUNED,
        (1, 16, 64, 128, 256, 512, 1024, 4096),
        {"weight_only_mm": ("w4_g128",), "w4a8_mm": ("g128", "mxfp4"), "packed_fp4_mm": ("mxfp4", "nvfp4")},
        ("dense", "fp8 weights", "machete", "marlin", "vllm"),
    ),
    # DeepSeek-V3's routed experts; M counts the rows of an expert.
    "moe": Suite(
        (Shape("expert gate_up", 4096, 7168), Shape("expert down", 7168, 2048)),
        (8, 128, 1024),
        {"grouped_mm": ("e8", "e32", "e32_ragged", "e8_rows")},
    ),
    # Qwen3-30B-A3B's experts, and DeepSeek-V3's, eight on a GPU.
    "moe-4bit": Suite(
        (Shape("expert gate_up", 1536, 2048), Shape("expert down", 2048, 768)),
        (1, 4, 16),
        {"grouped_packed_mm": ("e128", "e128_ragged")},
    ),
    "moe-4bit-large": Suite(
        (Shape("expert gate_up", 4096, 7168),), (1, 16, 64), {"grouped_packed_mm": ("e8", "e8_fp8")}
    ),
    "attention": Suite(ATTENTION, (512, 4096), {"scaled_bmm": ("int8_b32", "fp8_b32")}),
    # M counts images.
    "resnet50": Suite(_convolutions(RESNET50), (32,), {"conv2d_int8": ("relu",)}),
    "resnet50-1": Suite(_convolutions(RESNET50), (1,), CONVOLUTIONS),
    "pp-ocr": Suite(_convolutions(PP_OCR), (1,), CONVOLUTIONS),
    "odd": Suite(ODD, (1, 17, 100, 300), EVERYTHING),
}
