"""GGUF files of models that are not understood, or incomplete: each is refused in a sentence that names the entry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from epiloq.formats.layouts.base import FormatError

pytest.importorskip("gguf")
pytest.importorskip("numpy")
pytest.importorskip("transformers")

import gguf as package

from epiloq.formats.io import gguf_model
from epiloq.formats.io.gguf_file import GgufFile
from gguf_files import MIXED, reference, write


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
