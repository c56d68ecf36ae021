"""GGUF files written by the gguf package from models of transformers, and what every kind of block stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
            value.copy_(torch.randn_like(value) * (0.1 if value.dim() == 2 else 0.2))
            if key.endswith("norm.weight") and not gemma:
                value.add_(1)
    return model


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
    if arch == "llama":
        usual |= {"rope.dimension_count": HIDDEN // HEADS}
    elif arch != "qwen2":
        usual |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if arch in ("gemma2", "gemma3"):
        usual |= {"attention.sliding_window": config.sliding_window}
    if arch == "gemma2":
        usual |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    for key, value in {**usual, **values}.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}
        if value is not None:
            add[type(value)](f"{arch}.{key}", value)  # type: ignore[operator]
    tokenizer(writer)
    names = package.get_tensor_name_map(package.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        w = parameter.detach()
        offset = 1.0 if arch.startswith("gemma") and name.endswith("norm.weight") else 0.0
        kind = next((k for part, k in kinds.items() if part in theirs), "F32") if w.dim() == 2 else "F32"
        heads = {"q_proj": HEADS, "k_proj": KV}.get(name.split(".")[-2], 0) if arch == "llama" else 0
        stored = rotated_pairs_together(w, heads) if heads else w
        if kind.endswith("_K"):
            data: Any = blocks(*w.shape, kind, small=True).numpy()
        else:
            data = package.quants.quantize((stored + offset).numpy(), package.GGMLQuantizationType[kind])
        read = package.quants.dequantize(data, package.GGMLQuantizationType[kind])
        back = torch.from_numpy(read.copy()).view(w.shape) - offset
        if heads:  # The inverse order.
            d = w.shape[0] // heads
            back = back.view(heads, d // 2, 2, -1).transpose(1, 2).reshape(w.shape)
        parameter.data.copy_(back)
        if theirs != drop:
            writer.add_tensor(theirs, np.ascontiguousarray(data), raw_dtype=package.GGMLQuantizationType[kind])
    for name, tensor in extra.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
