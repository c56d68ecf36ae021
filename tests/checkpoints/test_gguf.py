"""GGUF blocks bit for bit against the gguf package, and models of files against transformers with float weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epiloq
from epiloq.formats.layouts.base import FormatError
from epiloq.nn import OnlineQuantLinear, WeightOnlyLinear

package = pytest.importorskip("gguf")
np = pytest.importorskip("numpy")

from epiloq.formats.layouts import gguf

BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
KINDS = list(BYTES)


def blocks(n: int, k: int, kind: str) -> Tensor:
    """Any bits, but finite scales and offsets of any size: subnormal ones, negative ones and zeros too."""
    found = torch.randint(0, 256, (n, k // 32, BYTES[kind]), dtype=torch.uint8)
    found[..., 1] &= 0xBB  # Clears a bit of the exponent of d
    found[..., 3] &= 0xFF if kind != "Q4_1" else 0xBB
    return found.view(n, -1)


def theirs(data: Tensor, kind: str) -> Tensor:
    values = package.quants.dequantize(data.numpy(), package.GGMLQuantizationType[kind])
    return torch.from_numpy(values.copy())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (17, 576), (64, 128)])
def test_blocks_have_the_bits_of_the_package(seed: int, kind: str, n: int, k: int) -> None:
    data = blocks(n, k, kind)
    packed = gguf.to_packed(data, kind=kind, shape=(n, k))
    expected = theirs(data, kind)
    assert expected.isfinite().all() and expected.shape == (n, k)
    # Equal numbers; q = 0 times a negative scale is -0 in either.
    assert torch.equal(packed.dequantize(), expected)
    assert packed.symmetric == (kind != "Q4_1") and gguf.kind_of(packed) == kind
    again = gguf.from_packed(packed)["weight"]
    assert again.dtype == torch.uint8 and torch.equal(again, data)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_the_package_made(seed: int, kind: str) -> None:
    w = torch.randn(24, 96)
    data = torch.from_numpy(package.quants.quantize(w.numpy(), package.GGMLQuantizationType[kind]).copy())
    packed = gguf.to_packed(data, kind=kind)
    assert torch.equal(packed.dequantize(), theirs(data, kind))
    assert (packed.dequantize() - w).norm() < 0.15 * w.norm()
    assert torch.equal(gguf.from_packed(packed)["weight"], data)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_for_integer_products(seed: int, kind: str) -> None:
    """The same integers and scales; one rounding of Q4_1's offset."""
    w = torch.randn(20, 96)
    data = torch.from_numpy(package.quants.quantize(w.numpy(), package.GGMLQuantizationType[kind]).copy())
    weight, expected = gguf.to_online(data, kind=kind), theirs(data, kind)
    assert (weight.offset is None) == (kind != "Q4_1") and weight.bits == (8 if kind == "Q8_0" else 4)
    if kind == "Q4_1":
        assert ((weight.dequantize() - expected).abs() <= 2.0**-22 * (expected.abs().max() * 16)).all()
    else:
        assert torch.equal(weight.dequantize(), expected)
    layer = OnlineQuantLinear.from_prepared(weight, bias=torch.randn(20))
    x = torch.randn(3, 96)
    exact = x @ expected.t() + layer.bias
    assert (layer(x) - exact).norm() < 0.02 * exact.norm()
    restored = OnlineQuantLinear(96, 20, bits=weight.bits, group_size=32, symmetric=weight.offset is None)
    restored.load_state_dict(layer.state_dict())
    assert torch.equal(restored(x), layer(x))


def test_what_does_not_fit_is_named(seed: int) -> None:
    data = blocks(4, 64, "Q4_0")
    for call, message in (
        (lambda: gguf.to_packed(data, kind="Q6_K"), "kind: expected one of Q4_0, Q4_1, Q8_0, got 'Q6_K'"),
        (lambda: gguf.to_packed(data[:, :-1], kind="Q4_0"), "weight: expected uint8 rows of Q4_0 blocks of 18 bytes"),
        (lambda: gguf.to_packed(data.int(), kind="Q4_0"), "weight: expected uint8"),
        (lambda: gguf.to_packed(data[0], kind="Q4_0"), "weight: expected 2 dimensions"),
        (lambda: gguf.to_packed(data, kind="Q4_0", shape=(4, 96)), r"weight: expected blocks of a layer \[4, 96\]"),
        (lambda: gguf.to_online(data, kind="Q4_0", shape=(8, 64)), r"weight: expected blocks of a layer \[8, 64\]"),
    ):
        with pytest.raises(FormatError, match=message):
            call()
    q, one = torch.randint(0, 16, (4, 64)), torch.ones(4, 2).half()
    for changes, message in (
        ({"zero": torch.ones(4, 2, dtype=torch.int32)}, "without integer zero points"),
        ({"group_size": 64, "scale": one[:, :1], "offset": one[:, :1]}, "whole groups of 32"),
        ({"scale": one.float(), "offset": one.float()}, "scale: expected float16"),
        ({"bits": 8, "offset": one}, "8 bits with offsets"),
        ({"perm": torch.randperm(64), "offset": one}, "in order"),
    ):
        arguments: dict[str, Any] = {"q": q, "scale": one, "bits": 4, "group_size": 32, **changes}
        with pytest.raises(FormatError, match=message):
            gguf.from_packed(epiloq.pack_weight(**arguments))
    with pytest.raises(ValueError, match=r"OnlineQuantLinear: bias: expected \[4\] on cpu"):
        OnlineQuantLinear.from_prepared(gguf.to_online(data, kind="Q4_0"), torch.zeros(5))


# --- files

HIDDEN, FFN, HEADS, KV, LAYERS, VOCABULARY = 64, 96, 4, 2, 2, 160


def rotated_pairs_together(w: Tensor, heads: int) -> Tensor:
    """llama.cpp's order of the rows of q and k: row i and row i + d / 2 of a head side by side."""
    d = w.shape[0] // heads
    order = [head * d + i + half * d // 2 for head in range(heads) for i in range(d // 2) for half in range(2)]
    return w[order]


def write(path: Path, kinds: dict[str, str], *, tied: bool, drop: str = "", extra: str = "") -> dict[str, Tensor]:
    """A llama of random weights; returns its tensors by transformers' names, as float32 of what was written."""
    writer = package.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_block_count, LAYERS),
        (writer.add_context_length, 64),
        (writer.add_embedding_length, HIDDEN),
        (writer.add_feed_forward_length, FFN),
        (writer.add_head_count, HEADS),
        (writer.add_head_count_kv, KV),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_rope_freq_base, 10000.0),
        (writer.add_rope_dimension_count, HIDDEN // HEADS),
        (writer.add_vocab_size, VOCABULARY),
    ):
        add(value)
    found: dict[str, Tensor] = {}

    def put(name: str, theirs_name: str, *shape: int, heads: int = 0) -> None:
        w = torch.randn(shape) * (0.1 if len(shape) == 2 else 0.2) + (0 if len(shape) == 2 else 1)
        kind = package.GGMLQuantizationType[next((k for part, k in kinds.items() if part in name), "F32")]
        data = package.quants.quantize(w.numpy(), kind)
        found[theirs_name] = torch.from_numpy(package.quants.dequantize(data, kind).copy()).view(shape)
        if heads:
            data = package.quants.quantize(rotated_pairs_together(w, heads).numpy(), kind)
        if name != drop:
            writer.add_tensor(name, data, raw_dtype=kind)

    head = HIDDEN // HEADS
    put("token_embd.weight", "model.embed_tokens.weight", VOCABULARY, HIDDEN)
    put("output_norm.weight", "model.norm.weight", HIDDEN)
    if tied:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    else:
        put("output.weight", "lm_head.weight", VOCABULARY, HIDDEN)
    for i in range(LAYERS):
        ours, layer = f"blk.{i}", f"model.layers.{i}"
        put(f"{ours}.attn_norm.weight", f"{layer}.input_layernorm.weight", HIDDEN)
        put(f"{ours}.ffn_norm.weight", f"{layer}.post_attention_layernorm.weight", HIDDEN)
        put(f"{ours}.attn_q.weight", f"{layer}.self_attn.q_proj.weight", HIDDEN, HIDDEN, heads=HEADS)
        put(f"{ours}.attn_k.weight", f"{layer}.self_attn.k_proj.weight", KV * head, HIDDEN, heads=KV)
        put(f"{ours}.attn_v.weight", f"{layer}.self_attn.v_proj.weight", KV * head, HIDDEN)
        put(f"{ours}.attn_output.weight", f"{layer}.self_attn.o_proj.weight", HIDDEN, HIDDEN)
        put(f"{ours}.ffn_gate.weight", f"{layer}.mlp.gate_proj.weight", FFN, HIDDEN)
        put(f"{ours}.ffn_up.weight", f"{layer}.mlp.up_proj.weight", FFN, HIDDEN)
        put(f"{ours}.ffn_down.weight", f"{layer}.mlp.down_proj.weight", HIDDEN, FFN)
    if extra:
        writer.add_tensor(extra, np.zeros(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


def reference(tensors: dict[str, Tensor]) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_attention_heads=HEADS,
        num_key_value_heads=KV,
        num_hidden_layers=LAYERS,
        vocab_size=VOCABULARY,
        rms_norm_eps=1e-5,
        max_position_embeddings=64,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config).eval()
    model.load_state_dict(tensors)
    return model


MIXED = {"attn_q": "Q4_0", "attn_k": "Q4_1", "attn_v": "Q8_0", "attn_output": "F16", "ffn_down": "Q5_0", "ffn_": "Q4_1"}


@pytest.mark.parametrize(
    ("kinds", "tied"), [({**MIXED, "token_embd": "Q8_0"}, True), ({**MIXED, "output.": "Q4_0"}, False)]
)
@torch.no_grad()
def test_models_run_on_the_integers_of_a_file(seed: int, tmp_path: Path, kinds: dict[str, str], tied: bool) -> None:
    from epiloq.formats.io import gguf_model

    tensors = write(tmp_path / "tiny.gguf", kinds, tied=tied)
    tokens = torch.randint(0, VOCABULARY, (2, 11))
    expected = reference(tensors)(tokens).logits
    model: Any = gguf_model.load(tmp_path / "tiny.gguf")
    layer = model.model.layers[1]
    assert all(isinstance(m, WeightOnlyLinear) for m in (layer.self_attn.q_proj, layer.mlp.up_proj, model.lm_head))
    assert all(type(m) is nn.Linear for m in (layer.self_attn.o_proj, layer.mlp.down_proj))
    assert not model.training and layer.self_attn.k_proj.bits == 4 and layer.self_attn.v_proj.bits == 8
    for name in ("q_proj", "k_proj"):
        exact = tensors[f"model.layers.1.self_attn.{name}.weight"]
        assert torch.equal(getattr(layer.self_attn, name).weight.dequantize(), exact)
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    integers: Any = gguf_model.load(tmp_path / "tiny.gguf", activations="int8")
    assert isinstance(integers.model.layers[0].self_attn.q_proj, OnlineQuantLinear)
    assert isinstance(integers.lm_head, OnlineQuantLinear)
    assert (integers(tokens).logits - expected).norm() < 0.03 * expected.norm()
    half: Any = gguf_model.load(tmp_path / "tiny.gguf", dtype=torch.bfloat16)
    assert half.model.norm.weight.dtype == torch.bfloat16
    assert (half(tokens).logits.float() - expected).norm() < 0.05 * expected.norm()


def test_files_that_disagree_are_refused(seed: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from epiloq.formats.io import gguf_model

    path = tmp_path / "tiny.gguf"
    for changes, message in (
        ({"drop": "blk.1.attn_v.weight"}, r"model.layers.1.self_attn.v_proj.weight: expected a tensor, found none"),
        ({"extra": "blk.0.attn_sinks.weight"}, "blk.0.attn_sinks.weight: not a tensor of this model"),
    ):
        write(path, MIXED, tied=False, **changes)
        with pytest.raises(FormatError, match=message):
            gguf_model.load(path)
    write(path, MIXED, tied=False)
    whole = path.read_bytes()
    for size in (3, 40, len(whole) // 2, len(whole) - 64):
        path.write_bytes(whole[:size])
        with pytest.raises(FormatError, match="not a whole GGUF file"):
            gguf_model.load(path)
    path.write_bytes(b"no such file" * 100)
    with pytest.raises(FormatError, match="not a whole GGUF file"):
        gguf.GgufFile(path)
    path.write_bytes(whole.replace(b"llama", b"mamba"))
    with pytest.raises(FormatError, match=r"general\.architecture: expected one of llama, got mamba"):
        gguf_model.load(path)
    assert math.isfinite(float(gguf.GgufFile(path).tensors["blk.0.ffn_down.weight"].dequantize().sum()))


# "Four score and seven years ago our fathers brought forth on this continent, a new nation, .. created equal."
WELL_KNOWN = """19622 6581 284 4962 929 3156 653 16576 3621 7146 335 451 10904 28 253 725 3442 28 19250 281 20577 28 284
5636 288 260 20723 338 511 1800 359 2312 4037 30"""


@torch.no_grad()
def test_smollm2_as_it_is_published(seed: int) -> None:
    """Q4_1 layers, a Q8_0 embedding that is the head too: it knows the sentence, so rows are where they belong."""
    pytest.importorskip("transformers")
    from epiloq.demo import DemoError
    from epiloq.demo.teacher import find_gguf
    from epiloq.formats.io import gguf_model

    try:
        path = find_gguf()
    except DemoError as error:
        pytest.skip(str(error))
    model: Any = gguf_model.load(path)
    kinds = [
        (m.bits, m.group_size, m.weight_offset is not None) for m in model.modules() if type(m) is WeightOnlyLinear
    ]
    assert kinds.count((4, 32, True)) == 210 and kinds.count((8, 32, False)) == 1 == len(kinds) - 210
    tokens = torch.tensor([[int(token) for token in WELL_KNOWN.split()]])
    # The float model, de-quantised by transformers, has 2.97498.
    assert float(model(tokens, labels=tokens).loss) == pytest.approx(2.97498, abs=1e-3)
