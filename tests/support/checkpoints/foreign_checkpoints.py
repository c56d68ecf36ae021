"""Quantised model directories as other tools write them, packed here without epiloq's code, and what they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

Layer = tuple[dict[str, Tensor], Tensor]

SIZES = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
# AutoAWQ's order of the eight columns of a word.
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def llama() -> Any:
    """Tied embeddings, no biases."""
    config = transformers.LlamaConfig(
        intermediate_size=192, num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=64, **SIZES
    )
    return transformers.LlamaForCausalLM(config).eval()


def qwen2() -> Any:
    """Biases of queries, keys and values, an output head of its own."""
    config = transformers.Qwen2Config(
        intermediate_size=96, num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=64, **SIZES
    )
    return with_biases(transformers.Qwen2ForCausalLM(config).eval())


def gpt_neox() -> Any:
    """Biases everywhere, queries, keys and values in one layer."""
    config = transformers.GPTNeoXConfig(
        intermediate_size=96, tie_word_embeddings=False, max_position_embeddings=64, **SIZES
    )
    return with_biases(transformers.GPTNeoXForCausalLM(config).eval())


def opt() -> Any:
    """Biases everywhere, tied embeddings."""
    config = transformers.OPTConfig(ffn_dim=128, word_embed_proj_dim=64, max_position_embeddings=64, **SIZES)
    return with_biases(transformers.OPTForCausalLM(config).eval())


MODELS: dict[str, Callable[[], Any]] = {"llama": llama, "qwen2": qwen2, "gpt_neox": gpt_neox, "opt": opt}


def with_biases(model: Any) -> Any:
    """Random biases rather than zeros."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return model


def words(fields: np.ndarray[Any, Any], bits: int = 4) -> Tensor:
    """``[…, n]`` fields to int32 ``[…, n * bits / 32]``, the first in the lowest bits; fields of 3 bits may continue in
    the next word."""
    each = fields.astype(np.uint8)[..., None] >> np.arange(bits, dtype=np.uint8) & 1
    stream = each.reshape(*fields.shape[:-1], -1, 32).astype(np.uint64) << np.arange(32, dtype=np.uint64)
    packed = stream.sum(-1).astype(np.uint32).view(np.int32)
    return torch.from_numpy(np.ascontiguousarray(packed))


@dataclass
class Integers:
    """A random weight ``scale * (q - zero)`` of groups along K, column c in the group groups[c]."""

    q: Tensor
    scale: Tensor
    zero: Tensor
    groups: Tensor

    @classmethod
    def random(
        cls, rows: int, columns: int, length: int, bits: int = 4, dtype: torch.dtype = torch.float16
    ) -> Integers:
        top, count = 1 << bits, -(-columns // length)
        return cls(
            torch.randint(0, top, (rows, columns)),
            (torch.rand(rows, count) * 0.1 / top + 0.1 / top).to(dtype),
            torch.randint(top // 4, top - top // 4, (rows, count)),
            torch.arange(columns) // length,
        )

    @property
    def weight(self) -> Tensor:
        zero, scale = self.zero[:, self.groups], self.scale.float()[:, self.groups]
        return scale * (self.q - zero)


def gptq(linear: nn.Linear, act_order: bool = False) -> Layer:
    """AutoGPTQ's first version: zero points less one; groups in any order of the columns; a bias of zeros if none."""
    made = Integers.random(linear.out_features, linear.in_features, 32)
    if act_order:
        made.groups = made.groups[torch.randperm(linear.in_features)]
    bias = {} if linear.bias is not None else {"bias": torch.zeros(linear.out_features, dtype=torch.float16)}
    return {
        "qweight": words(made.q.numpy()).T.contiguous(),
        "qzeros": words((made.zero - 1).T.numpy()),
        "scales": made.scale.T.contiguous(),
        "g_idx": made.groups.int(),
        **bias,
    }, made.weight


def interleaved(values: Tensor) -> Tensor:
    """AWQ's words of 4-bit values ``[N, K]``, transposed."""
    return words(values.T.reshape(values.shape[1], -1, 8)[:, :, AWQ_ORDER].reshape(values.shape[1], -1).numpy())


def awq(linear: nn.Linear) -> Layer:
    """AutoAWQ's gemm layout."""
    made = Integers.random(linear.out_features, linear.in_features, 32)

    return {
        "qweight": interleaved(made.q),
        "qzeros": interleaved(made.zero),
        "scales": made.scale.T.contiguous(),
    }, made.weight


def awq_gemv(linear: nn.Linear) -> Layer:
    """AutoAWQ's gemv layout: along the input channels, parameters of groups of 32 for a multiple of 32 groups."""
    made = Integers.random(linear.out_features, linear.in_features, 32)
    zero, scale = (nn.functional.pad(values, (0, -values.shape[1] % 32)) for values in (made.zero, made.scale))
    return {"qweight": words(made.q.numpy()), "qzeros": words(zero.numpy()), "scales": scale}, made.weight


def awq_gemv_fast(linear: nn.Linear) -> Layer:
    """AutoAWQ's gemv_fast layout: tiles of 4 x 64, and real offsets instead of zero points."""
    made = Integers.random(linear.out_features, linear.in_features, 32)
    offset = -(made.scale.float() * made.zero).half()
    # Pairs of columns by eights, then evens before odds in eight fields.
    pairs = [8 * eighth + 2 * pair + e for pair in range(4) for eighth in range(4) for e in range(2)]
    order = [32 * half + pairs[8 * (i // 8) + AWQ_ORDER[i % 8]] for half in range(2) for i in range(32)]
    tiles = made.q.numpy().reshape(linear.out_features // 4, 4, -1, 64)[..., order].transpose(0, 2, 1, 3)
    fields = tiles.reshape(linear.out_features // 4, -1, 4).astype(np.uint16)
    packed = (fields << np.arange(0, 16, 4, dtype=np.uint16)).sum(-1).astype(np.uint16).view(np.int16)
    scales, zeros = (nn.functional.pad(v.T, (0, 0, 0, -v.shape[1] % 32)).contiguous() for v in (made.scale, offset))
    spread, shift = made.scale.float()[:, made.groups], offset.float()[:, made.groups]
    return {"qweight": torch.from_numpy(packed), "qzeros": zeros, "scales": scales}, spread * made.q + shift


def compressed_tensors(linear: nn.Linear) -> Layer:
    """llm-compressor's pack-quantized: signed values and zero points, stored with 8 added."""
    made = Integers.random(linear.out_features, linear.in_features, 32, dtype=torch.bfloat16)
    return {
        "weight_packed": words(made.q.numpy()),
        "weight_scale": made.scale,
        "weight_zero_point": words(made.zero.T.numpy()).T.contiguous(),
        "weight_shape": torch.tensor([linear.out_features, linear.in_features]),
    }, made.weight


def int_quantized(linear: nn.Linear) -> Layer:
    """llm-compressor's int-quantized, W8A8."""
    q = torch.randint(-127, 128, (linear.out_features, linear.in_features), dtype=torch.int8)
    scale = torch.rand(linear.out_features, 1) * 1e-3 + 5e-4
    return {"weight": q, "weight_scale": scale}, q * scale


def int_static(linear: nn.Linear) -> Layer:
    """The same with one scale of all activations."""
    tensors, weight = int_quantized(linear)
    inputs = {"input_scale": torch.rand(1) * 0.01 + 0.01, "input_zero_point": torch.randint(-9, 9, (1,)).char()}
    return tensors | inputs, weight


def fp8_channels(linear: nn.Linear) -> Layer:
    """llm-compressor's float-quantized, a scale for each channel."""
    q = torch.randn(linear.out_features, linear.in_features).to(torch.float8_e4m3fn)
    scale = (torch.rand(linear.out_features, 1) * 0.05 + 0.05).bfloat16()
    return {"weight": q, "weight_scale": scale}, q.float() * scale.float()


def fp8_static(linear: nn.Linear) -> Layer:
    """The same with one scale of the weight, and one of all activations."""
    q = torch.randn(linear.out_features, linear.in_features).to(torch.float8_e4m3fn)
    scale, inputs = (torch.rand(1) * 0.05 + 0.05).bfloat16(), (torch.rand(1) * 0.01 + 0.01).bfloat16()
    return {"weight": q, "weight_scale": scale, "input_scale": inputs}, q.float() * scale.float()


def fp8_blocks(linear: nn.Linear) -> Layer:
    """The same with a scale for each block, as DeepSeek-V3 has them, in the model's type."""
    tensors, weight = deepseek_fp8(linear)
    return {"weight": tensors["weight"], "weight_scale": tensors["weight_scale_inv"]}, weight


def deepseek_fp8(linear: nn.Linear) -> Layer:
    """DeepSeek-V3's blocks of 128 x 128."""
    q = torch.randn(linear.out_features, linear.in_features).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-linear.out_features // 128), -(-linear.in_features // 128)) * 0.05 + 0.05
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: q.shape[0], : q.shape[1]]
    return {"weight": q, "weight_scale_inv": scale}, q.float() * spread


_GROUPS = {
    "num_bits": 4,
    "type": "int",
    "symmetric": False,
    "strategy": "group",
    "group_size": 32,
    "dynamic": False,
    "actorder": None,
    "observer": "minmax",
    "observer_kwargs": {},
    "block_structure": None,
}
_CHANNELS = _GROUPS | {"num_bits": 8, "symmetric": True, "strategy": "channel", "group_size": None}
_TOKENS = _CHANNELS | {"strategy": "token", "dynamic": True, "observer": None}
_TENSOR = _CHANNELS | {"strategy": "tensor", "symmetric": False}
_FP8_CHANNELS, _FP8_TOKENS = _CHANNELS | {"type": "float"}, _TOKENS | {"type": "float"}
_FP8_TENSOR = _FP8_CHANNELS | {"strategy": "tensor"}
_FP8_BLOCKS = _FP8_CHANNELS | {"strategy": "block", "block_structure": [128, 128]}
_FP8_GROUPS = _FP8_TOKENS | {"strategy": "group", "group_size": 128}


def _ct(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "format": layout,
        "global_compression_ratio": 1.5,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


# What the tools write under quantization_config.
_AUTO_GPTQ = {
    "bits": 4,
    "group_size": 32,
    "damp_percent": 0.1,
    "desc_act": True,
    "static_groups": False,
    "sym": False,
    "true_sequential": True,
    "model_name_or_path": None,
    "model_file_base_name": "model",
    "quant_method": "gptq",
}
_AUTO_AWQ = {
    "quant_method": "awq",
    "zero_point": True,
    "group_size": 32,
    "bits": 4,
    "version": "gemm",
    "modules_to_not_convert": None,
}
_DEEPSEEK = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}

Tool = tuple[Callable[[nn.Linear], Layer], dict[str, Any]]
TOOLS: dict[str, Tool] = {
    "gptq": (gptq, _AUTO_GPTQ | {"desc_act": False}),
    "gptq in activation order": (lambda linear: gptq(linear, act_order=True), _AUTO_GPTQ),
    "awq": (awq, _AUTO_AWQ),
    "awq gemv": (awq_gemv, _AUTO_AWQ | {"version": "gemv"}),
    "awq gemv_fast": (awq_gemv_fast, _AUTO_AWQ | {"version": "GEMV_FAST"}),
    "pack-quantized": (compressed_tensors, _ct("pack-quantized", _GROUPS, None)),
    "int-quantized": (int_quantized, _ct("int-quantized", _CHANNELS, _TOKENS)),
    "static int-quantized": (int_static, _ct("int-quantized", _CHANNELS, _TENSOR)),
    "float-quantized": (fp8_channels, _ct("float-quantized", _FP8_CHANNELS, _FP8_TOKENS)),
    "static float-quantized": (fp8_static, _ct("float-quantized", _FP8_TENSOR, _FP8_TENSOR)),
    "fp8": (deepseek_fp8, _DEEPSEEK),
}
FP8_BLOCKS = "float-quantized in blocks"
"""Which is read of any sizes, but written only of inputs that fill groups of 128."""
_ALL = TOOLS | {FP8_BLOCKS: (fp8_blocks, _ct("float-quantized", _FP8_BLOCKS, _FP8_GROUPS))}


def write(folder: Path, model: Any, tool: str | Tool, shards: int = 2) -> Any:
    """Quantise `model` as `tool` would into a new `folder`; then it has the weights that the folder stands for."""
    pack, config = _ALL[tool] if isinstance(tool, str) else tool
    return write_as(folder, model, lambda name, linear: pack(linear), config, shards)


def write_as(
    folder: Path,
    model: Any,
    pack: Callable[[str, nn.Linear], Layer | None],
    config: dict[str, Any] | None,
    shards: int = 2,
) -> Any:
    """The same by a function of a layer and its name, which gives None for those that stay in floating point."""
    head = model.get_output_embeddings()
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    tied = model.all_tied_weights_keys
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items() if name not in tied}
    for name, linear in linears.items():
        packed = pack(name, linear)
        if packed is None:
            continue
        parts, weight = packed
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        linear.weight.data = weight
    folder.mkdir()
    message = model.config.to_dict() | {"architectures": [type(model).__name__]}
    message |= {} if config is None else {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(message | {"dtype": "float32"}))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return model
    # Every other tensor in another file: parts of a layer lie apart.
    files = {name: f"model-{1 + i % shards:05}-of-{shards:05}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        held = {name: tensors[name].contiguous() for name in tensors if files[name] == file}
        save_file(held, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return model
