"""GGUF files written by the gguf package from models of transformers, and what every kind of block stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf as package
import numpy as np
import torch
import transformers
from torch import Tensor

# Bytes, values, and where float16 numbers are, of a block.
KINDS: Mapping[str, tuple[int, int, tuple[int, ...]]] = {
    "Q4_0": (18, 32, (0,)),
    "Q4_1": (20, 32, (0, 2)),
    "Q5_0": (22, 32, (0,)),
    "Q5_1": (24, 32, (0, 2)),
    "Q8_0": (34, 32, (0,)),
    "Q2_K": (84, 256, (80, 82)),
    "Q3_K": (110, 256, (108,)),
    "Q4_K": (144, 256, (0, 2)),
    "Q5_K": (176, 256, (0, 2)),
    "Q6_K": (210, 256, (208,)),
}
# Kinds by parts of names: one of each, not of K-quants.
MIXED = {
    "attn_q": "Q4_0",
    "attn_k": "Q4_1",
    "attn_v": "Q8_0",
    "attn_output": "F16",
    "ffn_down": "Q5_0",
    "ffn_gate": "Q5_1",
    "ffn_up": "BF16",
    "token_embd": "Q8_0",
    "output": "Q4_0",
}
HIDDEN, FFN, HEADS, KV, LAYERS, VOCABULARY, CONTEXT = 256, 512, 4, 2, 2, 160, 64
_SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
}
_HEAD = {"head_dim": 128}
# transformers' names of configurations, and what each needs beside sizes.
ARCHITECTURES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", _HEAD),
    "phi3": ("phi3", {"pad_token_id": None, "sliding_window": None}),
    "granite": (
        "granite",
        {
            "logits_scaling": 3.0,
            "embedding_multiplier": 2.5,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
        },
    ),
    "qwen3moe": (
        "qwen3_moe",
        _HEAD | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True},
    ),
    "gemma": ("gemma", _HEAD),
    "gemma2": ("gemma2", _HEAD | {"query_pre_attn_scalar": 128, "sliding_window": 8}),
    "gemma3": ("gemma3_text", _HEAD | {"query_pre_attn_scalar": 128, "sliding_window": 8, "num_hidden_layers": 7}),
}


# What the second float16 of a block is to the first where values are to lie around zero.
_MIDDLE = {"Q4_1": -7.5, "Q5_1": -15.5, "Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}


def blocks(n: int, k: int, kind: str, *, small: bool = False) -> Tensor:
    """Any bits, but finite float16: subnormal, negative and zero ones too. Small ones make weights of about 0.06."""
    nbytes, size, halves = KINDS[kind]
    found = torch.randint(0, 256, (n, k // size, nbytes), dtype=torch.uint8)
    if not small:
        for at in halves:
            found[..., at + 1] &= 0xBB  # Clears a bit of the exponent.
        return found.view(n, -1)

    def scaled(d: Tensor) -> Tensor:
        for at, factor in zip(halves, (1.0, _MIDDLE.get(kind, 0.0)), strict=False):
            found[..., at : at + 2] = (d * factor).half().view(torch.uint8)
        return found.view(n, -1)

    spread = meaning(scaled(torch.ones(n, k // size, 1)), kind).std()
    return scaled(0.06 / spread * (torch.rand(n, k // size, 1) * 0.4 + 0.8))


def meaning(data: Tensor, kind: str) -> Tensor:
    """The gguf package's own values, float32."""
    return torch.from_numpy(package.quants.dequantize(data.numpy(), package.GGMLQuantizationType[kind]).copy())


def rotated_pairs_together(w: Tensor, heads: int) -> Tensor:
    """llama.cpp's order of the rows of q and k: row i and row i + d / 2 of a head side by side."""
    d = w.shape[0] // heads
    order = [head * d + i + half * d // 2 for head in range(heads) for i in range(d // 2) for half in range(2)]
    return w[order]


def reference(arch: str, *, tied: bool = False, **changes: Any) -> Any:
    """A model of random weights, biases and norms."""
    name, more = ARCHITECTURES[arch]
    gemma = arch.startswith("gemma")
    message = {**_SIZES, **more, "tie_word_embeddings": tied or gemma, **changes}
    config = transformers.AutoConfig.for_model(name, **message)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for key, value in model.named_parameters():
        with torch.no_grad():
            value.copy_(torch.randn_like(value) * (0.1 if value.dim() > 1 else 0.2))
            if key.endswith("norm.weight") and not gemma:
                value.add_(1)
    return model


def letter_tokenizer(writer: package.GGUFWriter) -> None:
    """A byte-pair encoding: the printable letters, one merge, and ends."""
    tokens = [chr(code) for code in range(33, 127)]
    tokens += ["ab", *(f"<unused{i}>" for i in range(VOCABULARY - len(tokens) - 3)), "<s>", "</s>"]
    kind = package.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([kind.CONTROL if len(token) > 2 else kind.NORMAL for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(VOCABULARY - 2)
    writer.add_eos_token_id(VOCABULARY - 1)
    writer.add_chat_template("{{ messages[0].content }}")


def write(
    path: Path,
    model: Any,
    arch: str,
    kinds: Mapping[str, str] = {},
    *,
    values: Mapping[str, float | str | bool] = {},
    drop: str = "",
    extra: Mapping[str, Tensor] = {},
    tokenizer: Callable[[package.GGUFWriter], None] = lambda writer: None,
) -> None:
    """Write a model, whose parameters become what was written.

    kinds
        By part of a tensor's name, the first that fits: its kind of block, else float32. The package has no rounding to
        K-quants: such a tensor gets random blocks.
    values
        Values of the architecture beside the usual ones; a None takes a usual one away.
    tokenizer
        Adds one.
    """
    config = model.config
    rope = config.rope_parameters
    theta = rope.get("rope_theta") or rope["full_attention"]["rope_theta"]
    writer = package.GGUFWriter(path, arch)
    usual: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": float(theta),
        "vocab_size": VOCABULARY,
    }
    if arch in ("llama", "granite", "phi3"):
        usual |= {"rope.dimension_count": int(HIDDEN // HEADS * rope.get("partial_rotary_factor", 1))}
    elif arch != "qwen2":
        usual |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if arch in ("gemma2", "gemma3"):
        usual |= {"attention.sliding_window": config.sliding_window}
    if arch == "gemma2":
        usual |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    if arch == "qwen3moe":
        usual |= {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}
        usual |= {"expert_feed_forward_length": config.moe_intermediate_size}
    if arch == "phi3":
        usual |= {"attention.sliding_window": config.sliding_window or 0}
    if arch == "granite":
        scales = {"logit": "logits_scaling", "embedding": "embedding_multiplier", "residual": "residual_multiplier"}
        usual |= {f"{name}_scale": getattr(config, entry) for name, entry in scales.items()}
        usual |= {"attention.scale": config.attention_multiplier}
    for key, value in {**usual, **values}.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}
        if value is not None:
            add[type(value)](f"{arch}.{key}", value)  # type: ignore[operator]
    tokenizer(writer)
    names = package.get_tensor_name_map(package.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    for name, w in parts(model):
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        offset = 1.0 if arch.startswith("gemma") and name.endswith("norm.weight") else 0.0
        kind = next((k for part, k in kinds.items() if part in theirs), "F32") if w.dim() > 1 else "F32"
        heads = {"q_proj": HEADS, "k_proj": KV}.get(name.split(".")[-2], 0) if arch in ("llama", "granite") else 0
        stored = rotated_pairs_together(w, heads) if heads else w
        if kind.endswith("_K"):
            data: Any = blocks(w[..., 0].numel(), w.shape[-1], kind, small=True).view(*w.shape[:-1], -1).numpy()
        else:
            data = package.quants.quantize((stored + offset).numpy(), package.GGMLQuantizationType[kind])
        read = package.quants.dequantize(data, package.GGMLQuantizationType[kind])
        back = torch.from_numpy(read.copy()).view(w.shape) - offset
        if heads:  # The inverse order.
            d = w.shape[0] // heads
            back = back.view(heads, d // 2, 2, -1).transpose(1, 2).reshape(w.shape)
        w.copy_(back)
        if theirs != drop:
            writer.add_tensor(theirs, np.ascontiguousarray(data), raw_dtype=package.GGMLQuantizationType[kind])
    for name, tensor in extra.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def parts(model: Any) -> Iterator[tuple[str, Tensor]]:
    """A model's parameters by name; gates and other halves of stacked experts apart, as files have them."""
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                yield f"{name.replace('gate_up', part)}.weight", half
        else:
            yield f"{name}.weight" if name.endswith("experts.down_proj") else name, tensor
