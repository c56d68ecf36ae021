"""Models of GGUF files, every architecture and kind of block, against transformers with float weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from epiloq.formats.layouts.base import FormatError
from epiloq.nn import ExpertLinears, GatedExperts, OnlineQuantLinear, QuantizedEmbedding, WeightOnlyLinear

pytest.importorskip("gguf")
pytest.importorskip("numpy")
transformers = pytest.importorskip("transformers")

import gguf as package

import gguf_files
from epiloq.formats.io import gguf_model
from epiloq.formats.io.gguf_file import GgufFile
from gguf_files import ARCHITECTURES, HEADS, HIDDEN, VOCABULARY, reference, write

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


@pytest.mark.parametrize(
    ("arch", "values", "extra", "message"),
    [
        (
            "llama",
            {"rope.scaling.type": "longrope"},
            {},
            "llama.rope.scaling.type: expected none, linear or yarn, got longrope",
        ),
        (
            "llama",
            {"rope.scaling.yarn_log_multiplier": 0.1},
            {},
            "llama.rope.scaling.yarn_log_multiplier: not understood",
        ),
        ("llama", {"rope.scaling.attn_factor": 1.5}, {}, "llama.rope.scaling: attention or mixing factors"),
        ("llama", {"rope.dimension_count": 16}, {}, "llama.rope.dimension_count: expected 64, a whole head, got 16"),
        ("granite", {"logit_scale": None}, {}, "granite.logit_scale: expected int or float, got None"),
        ("granite", {"expert_count": 8}, {}, "granite.expert_count: not understood"),
        ("phi3", {}, {"rope_factors_long.weight": torch.ones(32)}, "rope_factors_short.weight: expected a tensor"),
        (
            "llama",
            {},
            {"rope_factors_long.weight": torch.ones(32), "rope_factors_short.weight": torch.ones(32)},
            "rope_factors_long.weight: not understood .*llama",
        ),
        ("phi3", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, {}, "expected none.*, got yarn"),
        ("qwen3moe", {"expert_count": 5}, {}, r"ffn_gate_exps.weight: expected \[5, 256, 256\], got \[4, 256, 256\]"),
        ("qwen3moe", {"expert_used_count": None}, {}, "qwen3moe.expert_used_count: expected int, got None"),
        ("qwen3moe", {"expert_shared_count": 1}, {}, "qwen3moe.expert_shared_count: not understood"),
        ("phi3", {"rope.dimension_count": 128}, {}, "rope.dimension_count: expected 64"),
        ("phi3", {"final_logit_softcapping": 30.0}, {}, "phi3.final_logit_softcapping: not understood"),
        ("qwen3", {"attn_logit_softcapping": 30.0}, {}, "qwen3.attn_logit_softcapping: not understood"),
        ("gemma", {"attention.sliding_window": 8}, {}, "gemma.attention.sliding_window: not understood"),
        ("llama", {"expert_count": 8}, {}, "llama.expert_count: not understood"),
        ("llama", {"attention.sliding_window": 8}, {}, "llama.attention.sliding_window: not understood"),
        ("llama", {"attention.causal": False}, {}, "llama.attention.causal: not understood"),
        ("llama", {"attention.scale": 0.5}, {}, "llama.attention.scale: not understood"),
        ("llama", {"attention.value_length": 32}, {}, "llama.attention.value_length: expected 64, got 32"),
        ("llama", {"block_count": None}, {}, "llama.block_count: expected int, got None"),
        ("llama", {"block_count": 3_000_000}, {}, "llama.block_count: expected at most 21"),
        ("llama", {"block_count": 3}, {}, "model.layers.2.self_attn.q_proj.weight: expected a tensor, found none"),
        ("llama", {"vocab_size": 8_000_000}, {}, r"token_embd.weight: expected \[8000000, 256\], got \[160, 256\]"),
        ("llama", {"feed_forward_length": 1 << 30}, {}, "blk.0.ffn_gate.weight: expected .*1073741824"),
        ("llama", {"attention.head_count": "4"}, {}, "llama.attention.head_count: expected int, got '4'"),
        ("llama", {"attention.head_count_kv": 3}, {}, "blk.0.attn_k.weight: expected"),
        (
            "llama",
            {"attention.layer_norm_rms_epsilon": float("nan")},
            {},
            "epsilon: expected a number above 0, got nan",
        ),
        ("llama", {"rope.freq_base": -1.0}, {}, "rope.freq_base: expected a number above 0"),
        ("llama", {}, {"rope_freqs.weight": torch.ones(7)}, r"rope_freqs.weight: expected \[32\], got \[7\]"),
        ("llama", {}, {"rope_freqs.weight": torch.zeros(32)}, "rope_freqs.weight: expected numbers above 0"),
        (
            "qwen2",
            {},
            {"rope_freqs.weight": torch.ones(32)},
            "rope_freqs.weight: not understood in .* qwen2",
        ),
        (
            "llama",
            {},
            {"blk.0.attn_sinks.weight": torch.ones(4)},
            "attn_sinks.weight: not a tensor of this model",
        ),
        ("qwen3", {}, {"blk.0.attn_q.bias": torch.ones(512)}, "expected a tensor, found none"),
    ],
)
def test_unknown_configurations_are_refused_by_name(
    seed: int, tmp_path: Path, arch: str, values: dict[str, Any], extra: dict[str, torch.Tensor], message: str
) -> None:
    write(tmp_path / "tiny.gguf", reference(arch), arch, MIXED, values=values, extra=extra)
    with pytest.raises(FormatError, match=message) as caught:
        gguf_model.load(tmp_path / "tiny.gguf")
    assert str(tmp_path / "tiny.gguf") in str(caught.value) and "\n" not in str(caught.value)


def test_one_file_of_several_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny-00001-of-00002.gguf"
    writer = package.GGUFWriter(path, "llama")  # the other files lack even the architecture
    writer.add_uint16("split.no", 0)
    writer.add_uint16("split.count", 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(FormatError, match=r"split.count: expected a whole model, got one of 2 files; join them by"):
        gguf_model.load(path)


def test_missing_tensors_are_named(seed: int, tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", reference("llama"), "llama", MIXED, drop="blk.1.attn_v.weight")
    with pytest.raises(FormatError, match=r"model.layers.1.self_attn.v_proj.weight: expected a tensor, found none"):
        gguf_model.load(tmp_path / "tiny.gguf")


def test_other_architectures_are_named(seed: int, tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", reference("llama"), "llama", MIXED)
    whole = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "tiny.gguf").write_bytes(whole.replace(b"llama", b"mamba"))
    with pytest.raises(FormatError, match=r"general\.architecture: expected one of llama, .*, got mamba"):
        gguf_model.load(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("attn_q", {"attn_q": "Q4_K"}), ("ffn_norm", {}), ("attn_v", {"attn_v": "Q8_0"})],
)
def test_numbers_not_finite_name_the_tensor(seed: int, tmp_path: Path, name: str, kinds: dict[str, str]) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, reference("llama"), "llama", kinds)
    stored = GgufFile(path).tensors[f"blk.1.{name}.weight"]
    whole, part = bytearray(path.read_bytes()), bytes(stored.data)
    at = whole.index(part)
    whole[at : at + 2] = b"\x00\x7c"  # Infinity in float16.
    if stored.kind == "F32":
        whole[at : at + 4] = b"\x00\x00\xc0\x7f"
    path.write_bytes(bytes(whole))
    for activations in (None, "int8"):
        with pytest.raises(FormatError, match=rf"blk\.1\.{name}\.weight: holds NaN or infinity"):
            gguf_model.load(path, activations=activations)  # type: ignore[arg-type]


def test_the_support_agrees_with_the_package() -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    for kind, (nbytes, size, _) in gguf_files.KINDS.items():
        assert GGML_QUANT_SIZES[GGMLQuantizationType[kind]] == (size, nbytes)
