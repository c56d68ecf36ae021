"""Models of GGUF files, every architecture and kind of block, against transformers with float weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from epiloq.nn import ExpertLinears, GatedExperts, OnlineQuantLinear, QuantizedEmbedding, WeightOnlyLinear

pytest.importorskip("gguf")
pytest.importorskip("numpy")
transformers = pytest.importorskip("transformers")


import gguf_files
from epiloq.formats.io import gguf_model
from epiloq.formats.io.gguf_file import GgufFile
from gguf_files import ARCHITECTURES, HEADS, HIDDEN, MIXED, VOCABULARY, reference, write

K_QUANTS = {
    "attn_q": "Q4_K",
    "attn_k": "Q5_K",
    "attn_v": "Q6_K",
    "attn_output": "Q3_K",
    "ffn_down": "Q2_K",
    "ffn_": "Q4_K",
    "token_embd": "Q6_K",
    "output": "Q6_K",
}


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 23))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Sums in another order, through all layers."""
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("kinds", [MIXED, K_QUANTS], ids=["mixed", "k-quants"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
@torch.no_grad()
def test_models_run_on_the_integers_of_a_file(seed: int, tmp_path: Path, arch: str, kinds: dict[str, str]) -> None:
    model = reference(arch)
    write(tmp_path / "tiny.gguf", model, arch, kinds)
    ids = tokens()
    expected = model(ids).logits
    ours: Any = gguf_model.load(tmp_path / "tiny.gguf")
    assert type(ours) is type(model) and not ours.training
    layer, other = ours.model.layers[1], model.model.layers[1]
    for name in ("qkv_proj",) if arch == "phi3" else ("q_proj", "k_proj", "v_proj"):
        found = getattr(layer.self_attn, name)
        assert isinstance(found, WeightOnlyLinear)
        assert torch.equal(found.weight.dequantize(), getattr(other.self_attn, name).weight)
    if arch == "qwen3moe":
        assert isinstance(layer.mlp.experts, ExpertLinears)
    else:
        assert isinstance(layer.mlp.down_proj, WeightOnlyLinear)
    assert isinstance(ours.lm_head, WeightOnlyLinear)
    table = ours.model.embed_tokens
    assert isinstance(table, QuantizedEmbedding)
    assert torch.equal(table.packed.dequantize(), model.model.embed_tokens.weight)
    assert (table.weight_q is ours.lm_head.weight_q) == bool(model.config.tie_word_embeddings)
    assert type(layer.self_attn.o_proj) is (nn.Linear if kinds is MIXED else WeightOnlyLinear)
    close(ours(ids).logits, expected)
    integers: Any = gguf_model.load(tmp_path / "tiny.gguf", activations="int8")
    if arch != "qwen3moe":
        assert isinstance(integers.model.layers[0].mlp.down_proj, OnlineQuantLinear)
    assert isinstance(integers.lm_head, OnlineQuantLinear)
    # A token whose experts are nearly equal may get others.
    far = 0.2 if arch == "qwen3moe" else 0.06
    assert (integers(ids).logits - expected).norm() < far * expected.norm()
    half: Any = gguf_model.load(tmp_path / "tiny.gguf", dtype=torch.bfloat16)
    assert half.model.norm.weight.dtype == torch.bfloat16
    assert (half(ids).logits.float() - expected).norm() < max(far, 0.1) * expected.norm()


@pytest.mark.parametrize(
    "arch", [name for name in ARCHITECTURES if name not in ("gemma", "granite", "phi3", "qwen3moe")]
)
@torch.no_grad()
def test_transformers_reads_the_same_model(seed: int, tmp_path: Path, arch: str) -> None:
    """Its own reading of the file. (It knows no Gemma of the first version, nor Granite's and Phi-3's
    scaling, nor the size of experts.)"""
    model = reference(arch)
    write(tmp_path / "tiny.gguf", model, arch, {"attn_": "Q8_0", "ffn_": "Q4_0", "token_embd": "F16"})
    options: Any = {"gguf_file": "tiny.gguf", "dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **options).eval()
    ids = tokens()
    for layer in theirs.model.layers if arch in ("gemma2", "gemma3") else []:
        layer.self_attn.scaling = 128**-0.5  # It has its own default, of models of other sizes.
    close(gguf_model.load(tmp_path / "tiny.gguf")(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@torch.no_grad()
def test_tied_heads_are_the_embedding(seed: int, tmp_path: Path, arch: str) -> None:
    model = reference(arch, tied=True)
    write(tmp_path / "tiny.gguf", model, arch, MIXED)
    assert "output.weight" not in GgufFile(tmp_path / "tiny.gguf").tensors
    ids = tokens()
    close(gguf_model.load(tmp_path / "tiny.gguf")(ids).logits, model(ids).logits)


@torch.no_grad()
def test_biases_of_a_llama(seed: int, tmp_path: Path) -> None:
    """Of q and k they are in the order of the rows."""
    model = reference("llama", attention_bias=True)
    write(tmp_path / "tiny.gguf", model, "llama", MIXED)
    ids = tokens()
    close(gguf_model.load(tmp_path / "tiny.gguf")(ids).logits, model(ids).logits)


HEAD = HIDDEN // HEADS


def llama3(head: int, factor: float, original: int, theta: float = 10000.0) -> torch.Tensor:
    """What llama.cpp's conversion writes of Llama 3.1's scaling: one over a frequency's factor."""
    frequencies = 1 / theta ** (torch.arange(0, head, 2).double() / head)
    turns = original * frequencies / (2 * torch.pi)
    smooth = ((turns - 1) / 3).clamp(0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).float()


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SCALINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "linear": (
        "llama",
        {"rope_type": "linear", "factor": 4.0},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {},
    ),
    "old linear": ("llama", {"rope_type": "linear", "factor": 4.0}, {"rope.scale_linear": 4.0}, {}),
    "none": ("llama", {}, {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {}),
    "qwen2 linear": ("qwen2", {"rope_type": "linear", "factor": 2.0}, {"rope.scaling.factor": 2.0}, {}),
    "yarn": (
        "qwen3",
        YARN,
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16},
        {},
    ),
    "yarn with a factor": (
        "llama",
        YARN | {"attention_factor": 1.5 * (1 + 0.1 * torch.tensor(4.0).log().item())},
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16,
            "rope.scaling.attn_factor": 1.5,
        },
        {},
    ),
    "llama 3.1": (
        "llama",
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        {},
        {"rope_freqs.weight": llama3(HEAD, 8.0, 32)},
    ),
    "factors of one": ("llama", {}, {}, {"rope_freqs.weight": torch.ones(HEAD // 2)}),
}


@pytest.mark.parametrize("how", SCALINGS)
@torch.no_grad()
def test_scaled_positions_are_applied(seed: int, tmp_path: Path, how: str) -> None:
    """As llama.cpp does; transformers, given the same scaling in its own words, is the reference."""
    arch, message, values, extra = SCALINGS[how]
    model = reference(arch, rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **message})
    plain = reference(arch)
    plain.load_state_dict(model.state_dict())
    write(tmp_path / "tiny.gguf", model, arch, values=values, extra=extra)
    ids = tokens()
    expected = model(ids).logits
    close(gguf_model.load(tmp_path / "tiny.gguf")(ids).logits, expected)
    assert torch.allclose(plain(ids).logits, expected, atol=1e-2) == (not message)


SHORT, LONG = torch.linspace(1, 2, HEAD // 4), torch.linspace(1, 9, HEAD // 4)


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("length", [12, 23], ids=["short", "long"])
@torch.no_grad()
def test_phi3_of_long_contexts(seed: int, tmp_path: Path, length: int, window: int | None) -> None:
    """Half of a head is rotated, by factors of their own beyond the original 16 tokens, and attention has a window."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "factor": 4.0}
    rope |= {"short_factor": SHORT.tolist(), "long_factor": LONG.tolist(), "attention_factor": 1.25}
    rope |= {"original_max_position_embeddings": 16}
    model = reference("phi3", rope_parameters=rope, sliding_window=window, original_max_position_embeddings=16)
    values = {"rope.scaling.original_context_length": 16, "rope.scaling.attn_factor": 1.25}
    extra = {"rope_factors_short.weight": SHORT, "rope_factors_long.weight": LONG}
    write(tmp_path / "tiny.gguf", model, "phi3", MIXED, values=values, extra=extra)
    ids = tokens()[:, :length]
    expected = model(ids).logits
    close(gguf_model.load(tmp_path / "tiny.gguf")(ids).logits, expected)
    plain = reference("phi3", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    plain.load_state_dict(model.state_dict())
    assert not torch.allclose(plain(ids).logits, expected, atol=1e-2)


@torch.no_grad()
def test_experts_of_one_kind_run_together(seed: int, tmp_path: Path) -> None:
    model = reference("qwen3moe")
    write(tmp_path / "tiny.gguf", model, "qwen3moe", {"ffn_": "Q4_0"})
    ours: Any = gguf_model.load(tmp_path / "tiny.gguf")
    assert all(isinstance(layer.mlp.experts, GatedExperts) for layer in ours.model.layers)
    ids = tokens()
    close(ours(ids).logits, model(ids).logits)


@torch.no_grad()
def test_a_granite_without_factors(seed: int, tmp_path: Path) -> None:
    one = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": HEAD**-0.5}
    model = reference("granite", **one)
    left = dict.fromkeys(("embedding_scale", "residual_scale", "attention.scale"))
    write(tmp_path / "tiny.gguf", model, "granite", MIXED, values=left)  # type: ignore[arg-type]
    ids = tokens()
    close(gguf_model.load(tmp_path / "tiny.gguf")(ids).logits, model(ids).logits)


@torch.no_grad()
def test_scaled_positions_of_gemma3_are_those_of_global_layers(seed: int, tmp_path: Path) -> None:
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    model = reference("gemma3", rope_parameters=rope)
    write(tmp_path / "tiny.gguf", model, "gemma3", values={"rope.scaling.type": "linear", "rope.scaling.factor": 8.0})
    ids = tokens()
    close(gguf_model.load(tmp_path / "tiny.gguf")(ids).logits, model(ids).logits)


def test_the_support_agrees_with_the_package() -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    for kind, (nbytes, size, _) in gguf_files.KINDS.items():
        assert GGML_QUANT_SIZES[GGMLQuantizationType[kind]] == (size, nbytes)
