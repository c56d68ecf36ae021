"""SmolLM2's weights through every format, if its file is there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

from epiloq.demo import DemoError
from epiloq.demo.teacher import find_gguf
from epiloq.formats import convert
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.layouts.base import Quantization
from epiloq.quantize import Grid
from rounded_models import same, unchanged, weights, written
from tiny_teacher import save


@pytest.fixture(scope="module")
def real_block(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's first block, as a model of one layer with an embedding of its own."""
    reader = pytest.importorskip("gguf").GGUFReader
    try:
        stored = {tensor.name: tensor for tensor in reader(find_gguf()).tensors}
    except DemoError as error:
        pytest.skip(str(error))
    from gguf.quants import dequantize

    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    names |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
    config = transformers.LlamaConfig(
        vocab_size=256,
        num_hidden_layers=1,
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in names:
            found = stored[f"blk.0.{names[name.rpartition('.')[2]]}.weight"]
            values = torch.from_numpy(dequantize(found.data, found.tensor_type).copy())
            module.weight.data = values.view(module.weight.shape)
    return save(tmp_path_factory.mktemp("real") / "model", model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantization", "chain"),
    [
        (
            Quantization(Grid(4, 64, symmetric=False)),
            ("compressed-tensors", "gptq", "awq", "epiloq", "compressed-tensors"),
        ),
        (Quantization(Grid(8, -1, symmetric=True), "int8"), ("compressed-tensors", "epiloq", "compressed-tensors")),
    ],
    ids=["w4a16", "w8a8"],
)
def test_real_weights_through_every_format(
    real_block: Path, tmp_path: Path, quantization: Quantization, chain: tuple[str, ...]
) -> None:
    written(real_block, tmp_path / "0", chain[0], quantization, unchanged)
    for step, layout in enumerate(chain[1:]):
        convert.perform(convert.prepare(tmp_path / f"{step}", tmp_path / f"{step + 1}", layout))
    first, last = (dict(Checkpoint(tmp_path / name).tensors()) for name in ("0", f"{len(chain) - 1}"))
    assert same(first, last)
    exact = dict(Checkpoint(real_block).tensors())
    for name, values in weights(tmp_path / "1").items():
        error = float((values.float() - exact[name]).norm() / exact[name].norm())
        assert 0 < error < 0.12 if "proj" in name else error == 0
