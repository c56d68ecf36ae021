"""Random models as ordinary checkpoints, generated on the GPU, for benchmarks of engines.

Weights have about the variance 1 / K, so that activations keep their size from layer to layer, and scales vary by a
factor of two, so that a scale that is applied to other values changes the outputs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from epiloq.bench.models.plan import SHAPES

INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True}
FP4: dict[str, Any] = {"num_bits": 4, "type": "float", "symmetric": True}
PER_GROUP: dict[str, Any] = {"strategy": "group", "group_size": 128, "dynamic": False}
MXFP4_GROUPS: dict[str, Any] = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
NVFP4_GROUPS: dict[str, Any] = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
PER_CHANNEL: dict[str, Any] = {"strategy": "channel", "dynamic": False}
PER_TOKEN: dict[str, Any] = {"strategy": "token", "dynamic": True}
# Format, weights and input activations, as compressed-tensors describes them.
COMPRESSED: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "w4a16": ("pack-quantized", INT4 | PER_GROUP, None),
    "fp8": ("float-quantized", FP8 | PER_CHANNEL, FP8 | PER_TOKEN),
    "int8": ("int-quantized", INT8 | PER_CHANNEL, INT8 | PER_TOKEN),
}
KINDS = [*COMPRESSED, "fp8-block", "mxfp4"]
"""How matrices of models are quantised; mxfp4 is the format of GPT-OSS, and only its."""
LAYERS_ALONE: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "w8a16": ("pack-quantized", INT8 | PER_GROUP, None),
    "w8a16-fp8": ("float-quantized", FP8 | PER_CHANNEL, None),
    "nvfp4": ("nvfp4-pack-quantized", FP4 | NVFP4_GROUPS, None),
    "mxfp4-linear": ("mxfp4-pack-quantized", FP4 | MXFP4_GROUPS, None),
}
"""Further kinds for `layers.py`, which writes no checkpoints."""
MODELS: dict[str, dict[str, Any]] = {
    "llama-3-8b": SHAPES["llama-3-8b"]
    | {
        "architectures": ["LlamaForCausalLM"],
        "head_dim": 128,
        "rope_theta": 500000.0,
    },
    "qwen3-30b-a3b": SHAPES["qwen3-30b-a3b"]
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "intermediate_size": 6144,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_theta": 1000000.0,
    },
    "mixtral-8x7b": SHAPES["mixtral-8x7b"]
    | {
        "architectures": ["MixtralForCausalLM"],
        "head_dim": 128,
        "rope_theta": 1000000.0,
    },
    "gpt-oss-20b": SHAPES["gpt-oss-20b"]
    | {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "swiglu_limit": 7.0,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
}
BLOCK = 128
GROUP = 128


class Names(NamedTuple):
    """Of a decoder layer's MLP or experts, and their matrices."""

    mlp: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


NAMES = {"mixtral": Names("block_sparse_moe", "w1", "w3", "w2")}


def number_of_experts(config: dict[str, Any]) -> int:
    """0 for a dense model."""
    return int(config.get("num_experts") or config.get("num_local_experts") or 0)


def config_of(model: str, kind: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a model's checkpoint; `sizes` replace those of the model."""
    if (kind == "mxfp4") != (model == "gpt-oss-20b"):
        raise ValueError(f"expected mxfp4 for gpt-oss-20b and another kind for other models, got {kind} for {model}")
    config: dict[str, Any] = {**MODELS[model], **sizes}
    config |= {"max_position_embeddings": 4096, "dtype": "bfloat16", "tie_word_embeddings": False}
    experts = number_of_experts(config)
    mlp = NAMES.get(config["model_type"], Names()).mlp
    routers = [f"model.layers.{layer}.{mlp}.gate" for layer in range(config["num_hidden_layers"])] if experts else []
    return config | {"quantization_config": quantisation(kind, routers)}


def quantisation(kind: str, routers: list[str]) -> dict[str, Any]:
    """A checkpoint's ``quantization_config``; `routers` are the names of floating-point layers."""
    if kind == "fp8-block":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ["lm_head", *routers],
        }
    if kind == "mxfp4":
        floating = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        return {"quant_method": "mxfp4", "modules_to_not_convert": floating}
    form, weights, inputs = (COMPRESSED | LAYERS_ALONE)[kind]
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "ignore": ["lm_head", r"re:.*\.gate$"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": form},
        },
    }


def fill_weights(layer: Any) -> None:
    """Random numbers for a layer's own parameters in an engine, in place of those of a checkpoint.

    FP8 numbers are from 0.25 to 1 of either sign, so that products with their scales have about the variance 1 / K.
    Bytes of MXFP4 and NVFP4 weights are any. Scales of MXFP4 are E8M0 powers from 2^-7 to 2^-4; those of NVFP4 are FP8
    numbers from 0.25 to 1, divided by a global scale of 64.
    """
    import torch

    for name, parameter in layer.named_parameters(recurse=False):
        values, is_scale = parameter.data, "scale" in name
        if values.dtype == torch.float8_e4m3fn:
            codes = values.view(torch.uint8).random_(0x28, 0x38)
            if not is_scale:
                codes.bitwise_or_(torch.empty_like(codes).random_(2).mul_(0x80))
        elif values.dtype == torch.uint8:
            values.random_(120, 124) if is_scale else values.random_(256)
        elif not values.is_floating_point():
            values.random_()
        elif "global_scale" in name:
            values.fill_(64)
        elif is_scale:
            values.uniform_(0.02, 0.04)
        elif "bias" in name:
            values.zero_()
        else:
            values.fill_(1) if values.ndim == 1 else values.normal_(0, 0.02)


def write_config(folder: Path, model: str, kind: str, sizes: dict[str, Any]) -> dict[str, Any]:
    config = config_of(model, kind, sizes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return config


def write_checkpoint(folder: Path, model: str, kind: str, sizes: dict[str, Any]) -> None:
    """One file for each layer, and one for the rest; config.json, which marks a complete checkpoint, last."""
    import torch
    from safetensors.torch import save_file

    config = config_of(model, kind, sizes)
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    layers = config["num_hidden_layers"]
    found: dict[str, str] = {}
    with ThreadPoolExecutor(4) as pool, torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        waiting = []
        for part in range(layers + 1):
            name = f"model-{part:05d}.safetensors"
            tensors = dict(_ends(config) if part == layers else _layer(config, kind, f"model.layers.{part}"))
            found |= dict.fromkeys(tensors, name)
            waiting.append(pool.submit(save_file, tensors, folder / name, {"format": "pt"}))
            if len(waiting) > 4:
                waiting.pop(0).result()
        for each in waiting:
            each.result()
    index = {"metadata": {}, "weight_map": found}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    write_config(folder, model, kind, sizes)


def _normal(*shape: int, scale: float = 1.0) -> Any:
    import torch

    return (torch.randn(shape, dtype=torch.bfloat16) * scale).cpu()


def _ends(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    import torch

    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    yield "model.embed_tokens.weight", _normal(vocabulary, hidden)
    yield "lm_head.weight", _normal(vocabulary, hidden, scale=hidden**-0.5)
    yield "model.norm.weight", torch.ones(hidden, dtype=torch.bfloat16, device="cpu")


def _layer(config: dict[str, Any], kind: str, prefix: str) -> Iterator[tuple[str, Any]]:
    import torch

    hidden, head = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}.{norm}.weight", torch.ones(hidden, dtype=torch.bfloat16, device="cpu")
    if config["model_type"] == "qwen3_moe":
        for norm in ("q_norm", "k_norm"):
            yield f"{prefix}.self_attn.{norm}.weight", torch.ones(head, dtype=torch.bfloat16, device="cpu")
    attention = {
        "q_proj": (heads * head, hidden),
        "k_proj": (kv_heads * head, hidden),
        "v_proj": (kv_heads * head, hidden),
        "o_proj": (hidden, heads * head),
    }
    if config["model_type"] == "gpt_oss":
        yield f"{prefix}.self_attn.sinks", _normal(heads)
        for name, (n, k) in attention.items():
            yield f"{prefix}.self_attn.{name}.weight", _normal(n, k, scale=k**-0.5)
            yield f"{prefix}.self_attn.{name}.bias", _normal(n, scale=0.1)
        yield from _experts_of_gpt_oss(config, f"{prefix}.mlp")
        return
    for name, (n, k) in attention.items():
        yield from _matrices(kind, [f"{prefix}.self_attn.{name}"], n, k)
    experts = number_of_experts(config)
    intermediate = config.get("moe_intermediate_size") or config["intermediate_size"]
    names = NAMES.get(config["model_type"], Names())
    mlp = f"{prefix}.{names.mlp}"
    parents = [f"{mlp}.experts.{expert}" for expert in range(experts)] if experts else [mlp]
    if experts:
        # Wide logits: the last expert of a token has a small weight, so that rounding that changes it changes little.
        yield f"{mlp}.gate.weight", _normal(experts, hidden, scale=2 * hidden**-0.5)
    for name in (names.gate, names.up):
        yield from _matrices(kind, [f"{parent}.{name}" for parent in parents], intermediate, hidden)
    yield from _matrices(kind, [f"{parent}.{names.down}" for parent in parents], hidden, intermediate)


def _scales(*shape: int, scale: float) -> Any:
    """Uniform between 2/3 and 4/3 of `scale`."""
    import torch

    return (torch.rand(shape) + 1) * (scale * 2 / 3)


def _matrices(kind: str, names: list[str], n: int, k: int) -> Iterator[tuple[str, Any]]:
    """Matrices ``[n, k]`` of one size, generated together."""
    import torch

    count, deviation = len(names), k**-0.5
    if kind == "w4a16":
        # Eight uniform codes in a word, which stand for -8 to 7.
        words = torch.randint(-(2**31), 2**31, (count, n, k // 8), dtype=torch.int32)
        scales = _scales(count, n, k // GROUP, scale=deviation / math.sqrt(21.5)).bfloat16()
        tensors = {"weight_packed": words, "weight_scale": scales}
        shape = torch.tensor([n, k], dtype=torch.int64, device="cpu")
        yield from ((f"{name}.weight_shape", shape.clone()) for name in names)
    elif kind == "int8":
        codes = (torch.randn(count, n, k, dtype=torch.bfloat16) * 32).clamp(-127, 127).to(torch.int8)
        tensors = {"weight": codes, "weight_scale": _scales(count, n, 1, scale=deviation / 32)}
    else:
        codes = (torch.randn(count, n, k, dtype=torch.bfloat16) * 64).clamp(-448, 448).to(torch.float8_e4m3fn)
        of_blocks = kind == "fp8-block"
        shape_of_scales = (count, math.ceil(n / BLOCK), math.ceil(k / BLOCK)) if of_blocks else (count, n, 1)
        name = "weight_scale_inv" if of_blocks else "weight_scale"
        tensors = {"weight": codes, name: _scales(*shape_of_scales, scale=deviation / 64)}
    for stored, stack in tensors.items():
        yield from ((f"{name}.{stored}", matrix) for name, matrix in zip(names, stack.cpu(), strict=True))


def _experts_of_gpt_oss(config: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    import torch

    hidden, intermediate, experts = config["hidden_size"], config["intermediate_size"], number_of_experts(config)
    yield f"{prefix}.router.weight", _normal(experts, hidden, scale=2 * hidden**-0.5)
    yield f"{prefix}.router.bias", _normal(experts, scale=0.1)
    for name, n, k in (("gate_up_proj", 2 * intermediate, hidden), ("down_proj", hidden, intermediate)):
        # Uniform E2M1 codes have the root mean square 2.93; exponents are biased by 127.
        exponent = 127 + round(math.log2(k**-0.5 / 2.93))
        blocks = torch.randint(0, 256, (experts, n, k // 32, 16), dtype=torch.uint8)
        scales = torch.randint(exponent - 1, exponent + 1, (experts, n, k // 32), dtype=torch.uint8)
        yield f"{prefix}.experts.{name}_blocks", blocks.cpu()
        yield f"{prefix}.experts.{name}_scales", scales.cpu()
        yield f"{prefix}.experts.{name}_bias", _normal(experts, n, scale=0.1)
