"""Small mixtures of experts as transformers has them, and a checkpoint as DeepSeek-V3's is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

TOKENS = torch.arange(26).view(2, 13) * 5 % 63 + 1
_COMMON = {"vocab_size": 64, "hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2}


def _filled(model: Any, dtype: torch.dtype) -> Any:
    """Weights of many magnitudes, so that scales differ, and logits that depend on every layer."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            values = torch.randn(parameter.shape) * torch.exp(torch.randn(parameter.shape) / 2)
            parameter.data = (values / (1 if "embed" in name else parameter.shape[-1] ** 0.5)).to(dtype)
        else:
            parameter.data = parameter.data.to(dtype)
    return model.eval()


def qwen3(dtype: torch.dtype = torch.float32, **sizes: int) -> Any:
    """Dense in the first layer; files name an expert's matrices gate_proj, up_proj, down_proj."""
    own = {"moe_intermediate_size": 64, "intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
    heads = {"num_key_value_heads": 1, "head_dim": 64, "mlp_only_layers": [0]}
    return _filled(
        transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**_COMMON | own | heads | sizes)), dtype
    )


def mixtral(dtype: torch.dtype = torch.float32) -> Any:
    """Files name them block_sparse_moe.experts.0.w1, w3, w2; the model has mlp.experts."""
    own = {"intermediate_size": 64, "num_local_experts": 4, "num_key_value_heads": 1}
    return _filled(transformers.MixtralForCausalLM(transformers.MixtralConfig(**_COMMON | own)), dtype)


def deepseek(dtype: torch.dtype = torch.float32) -> Any:
    """A dense layer, then one of 8 experts in 2 groups and a shared one; latent attention."""
    attention = {"q_lora_rank": 128, "kv_lora_rank": 128, "v_head_dim": 64}
    heads = {"qk_rope_head_dim": 128, "qk_nope_head_dim": 64, "num_key_value_heads": 2}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    sizes = {"intermediate_size": 256, "moe_intermediate_size": 64, "first_k_dense_replace": 1}
    config = transformers.DeepseekV3Config(**_COMMON | attention | heads | experts | sizes)
    return _filled(transformers.DeepseekV3ForCausalLM(config), dtype)


def granite() -> Any:
    """Files stack the experts too."""
    own = {"intermediate_size": 64, "num_local_experts": 4, "num_key_value_heads": 1}
    return _filled(transformers.GraniteMoeForCausalLM(transformers.GraniteMoeConfig(**_COMMON | own)), torch.float32)


def gpt_oss() -> Any:
    """Experts with biases, transposed and interleaved."""
    own = {"intermediate_size": 64, "num_local_experts": 4, "num_key_value_heads": 1, "head_dim": 64}
    return _filled(transformers.GptOssForCausalLM(transformers.GptOssConfig(**_COMMON | own)), torch.float32)


def jetmoe() -> Any:
    """Experts of attention, too, which are called with rows and how many of them each has."""
    own = {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 32}
    common = {name: value for name, value in _COMMON.items() if name != "num_attention_heads"}
    config = transformers.JetMoeConfig(**common, **own, num_key_value_heads=2)
    return _filled(transformers.JetMoeForCausalLM(config), torch.float32)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(TOKENS, use_cache=False).logits  # type: ignore[no-any-return]


@torch.no_grad()
def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight in FP8 with the scales of its 128 x 128 blocks, in plain torch."""
    q, scales = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), []
    for i in range(0, weight.shape[0], 128):
        row = []
        for j in range(0, weight.shape[1], 128):
            part = weight[i : i + 128, j : j + 128].float()
            row.append(part.abs().max() / 448)
            q[i : i + 128, j : j + 128] = (part / row[-1]).to(torch.float8_e4m3fn)
        scales.append(torch.stack(row))
    return q, torch.stack(scales)


def restored(q: Tensor, scale: Tensor) -> Tensor:
    """The float32 weight that blocks stand for."""
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return q.float() * wide[: q.shape[0], : q.shape[1]]


def published(model: Any, folder: Path, experts: bool = True) -> Path:
    """A model as DeepSeek publishes its own: FP8 linear layers, a matrix an expert, a layer for one more prediction.

    Without `experts` those stay in floating point.
    """
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        layer = "proj" in name.rsplit(".", 2)[-2] and tensor.ndim == 2
        if layer and (experts or ".experts." not in name):
            tensors[name], tensors[f"{name}_scale_inv"] = blocks(tensor)
        else:
            tensors[name] = tensor
    tensors["model.layers.61.enorm.weight"] = torch.ones(128)
    extra = "model.layers.61.mlp.experts.0.gate_proj.weight"
    tensors[extra], tensors[f"{extra}_scale_inv"] = blocks(torch.randn(64, 128))
    save_file(tensors, file, metadata={"format": "pt"})
    message = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": message}))
    return folder


def opened(folder: Path) -> Any:
    """A directory opened by transformers: with epiloq's layers where the fixture has registered them."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def dequantised(folder: Path) -> Any:
    """An FP8 directory as transformers dequantises it."""
    config = transformers.FineGrainedFP8Config(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype="auto")
