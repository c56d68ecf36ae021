"""Mixtures of experts on FP4 weights: quantised, written a matrix an expert, and opened again."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file
from torch import Tensor, nn

import epiloq
from command_line import run
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.models import mixtures
from epiloq.nn import ExpertLinears, GatedExperts, PackedFp4Experts
from fp4_reference import dequantized
from reference import typical_error
from tiny_mixtures import TOKENS, deepseek, logits, mixtral, qwen3

EXPERTS = "model.layers.1.mlp.experts"
FAMILIES: dict[str, tuple[Callable[..., Any], str, tuple[str, ...]]] = {
    "qwen3": (qwen3, EXPERTS, ("gate_proj", "up_proj", "down_proj")),
    "mixtral": (mixtral, "model.layers.1.block_sparse_moe.experts", ("w1", "w3", "w2")),
    "deepseek": (deepseek, EXPERTS, ("gate_proj", "up_proj", "down_proj")),
}
CASES = (("qwen3", "nvfp4"), ("mixtral", "mxfp4"), ("deepseek", "nvfp4"), ("deepseek", "mxfp4"))


def stored_weight(tensors: dict[str, Tensor], layer: str) -> Tensor:
    """What a layer's tensors stand for, by the format's definition, float32."""
    codes, scale = tensors[f"{layer}.weight_packed"], tensors[f"{layer}.weight_scale"]
    divisor = tensors.get(f"{layer}.weight_global_scale")
    factor = None if divisor is None else divisor.reciprocal()
    return dequantized(codes, scale, factor, 2 * codes.shape[1]).float()


@pytest.mark.parametrize(("family", "form"), CASES)
@torch.no_grad()
def test_quantised_saved_and_opened(
    family: str, form: str, epiloq_in_transformers: None, seed: int, tmp_path: Path
) -> None:
    make, stored, projections = FAMILIES[family]
    make(torch.bfloat16).save_pretrained(tmp_path / "model")
    options = ("--scheme", f"w4a16-{form}", "--algorithm", "rtn", "--output", tmp_path / "out")
    with warnings.catch_warnings(record=True) as text:
        warnings.simplefilter("always")
        result = run("quantize", tmp_path / "model", *options)
    assert result.exit_code == 0, result.output
    assert any("leaves out the global scales" in str(each.message) for each in text) == (form == "nvfp4")
    assert "floating point:" not in result.output.replace("lm_head", "")
    checkpoint = Checkpoint(tmp_path / "out")
    model, _ = models.load(checkpoint)
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    for found in (model, opened):
        experts = found.get_submodule(EXPERTS)
        assert isinstance(experts, GatedExperts) and isinstance(experts.down, PackedFp4Experts)
    assert torch.equal(logits(model), logits(opened))
    # The float model with the weights that the files' tensors stand for, read by the format's definition.
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    dense = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    mixtures.unstack_experts_(dense)
    apart = dense.get_submodule(EXPERTS)
    assert isinstance(apart, ExpertLinears)
    for name, layer in dense.named_modules():
        where = checkpoint.stored_layer(name)
        if isinstance(layer, nn.Linear) and f"{where}.weight_packed" in tensors:
            layer.weight = nn.Parameter(stored_weight(tensors, where).to(torch.bfloat16))
    quantised = {name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")}
    assert {f"{stored}.{e}.{part}" for e in range(apart.experts) for part in projections} <= quantised
    assert typical_error(logits(opened), logits(dense)) < 0.05
    ids = opened.generate(TOKENS[:, :5], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert ids.shape == (2, 9)
    opened.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == tensors.keys()
    for name, tensor in again.items():
        # Some versions of transformers load a router's bias in float32 whatever the file's type is.
        same = tensor.dtype == tensors[name].dtype or name.endswith("e_score_correction_bias")
        assert same and torch.equal(tensor.float(), tensors[name].float()), name


@pytest.mark.parametrize(
    ("family", "scheme"),
    [("qwen3", "w4a16-mxfp4"), ("deepseek", "w4a16-mxfp4"), ("qwen3", "w4a8-fp8"), ("qwen3", "w8a16")],
)
def test_stock_transformers_opens_experts(family: str, scheme: str, seed: int, tmp_path: Path) -> None:
    """It leaves activations of experts in floating point. Of NVFP4's experts it leaves out the global scale, without a
    word (5.24): docs/guide/moe.md."""
    pytest.importorskip("compressed_tensors")
    import epiloq.integrations.transformers as integration

    integration.unregister()
    sizes = {"moe_intermediate_size": 128} if scheme == "w4a8-fp8" else {}  # fills whole groups
    FAMILIES[family][0](torch.bfloat16, **sizes).save_pretrained(tmp_path / "model")
    options = ("--scheme", scheme, "--algorithm", "rtn", "--output", tmp_path / "out")
    assert run("quantize", tmp_path / "model", *options).exit_code == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert type(theirs.get_submodule(EXPERTS)).__module__.startswith("transformers.")
    ours = models.load(Checkpoint(tmp_path / "out"))[0]
    assert typical_error(logits(theirs), logits(ours)) < (0.15 if scheme == "w4a8-fp8" else 0.05)


@pytest.mark.slow
def test_experts_as_modelopt_has_them(epiloq_in_transformers: None, seed: int, tmp_path: Path) -> None:
    """With factors rather than their reciprocals, and the same numbers."""
    mixtral(torch.bfloat16).save_pretrained(tmp_path / "model")
    found = []
    for layout in ("modelopt", "compressed-tensors"):
        options = ("--scheme", "w4a16-nvfp4", "--algorithm", "rtn", "--format", layout, "--output", tmp_path / layout)
        result = run("quantize", tmp_path / "model", *options)
        assert result.exit_code == 0, result.output
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / layout, dtype="auto")
        experts = model.get_submodule(EXPERTS)
        assert isinstance(experts, GatedExperts) and isinstance(experts.down, PackedFp4Experts)
        assert experts.down.reciprocal == (layout != "modelopt")
        found.append(logits(model))
        model.save_pretrained(tmp_path / f"{layout} again")
        before, after = (load_file(tmp_path / name / "model.safetensors") for name in (layout, f"{layout} again"))
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(*found)
    expert = "model.layers.1.block_sparse_moe.experts.3.w1"
    assert f"{expert}.weight_scale_2" in Checkpoint(tmp_path / "modelopt").files


@torch.no_grad()
def test_layers_that_engines_multiply_as_one_share_a_global_scale(seed: int, tmp_path: Path) -> None:
    """Of the largest number in any of them, in memory and on the command line; others have their own."""
    model = deepseek()
    weights = {name: module.weight for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    weights |= {
        f"{EXPERTS}.{e}.{part}": module.get_parameter(stack)[e]
        for name, module in model.named_modules()
        if name == EXPERTS
        for e in range(8)
        for part, stack in (("gate_proj", "gate_up_proj"), ("down_proj", "down_proj"))
    }
    model.save_pretrained(tmp_path / "model")
    options = ("--scheme", "w4a16-nvfp4", "--algorithm", "rtn", "--output", tmp_path / "out")
    assert run("quantize", tmp_path / "model", *options).exit_code == 0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    found = {
        name.removesuffix(".weight_global_scale"): t for name, t in tensors.items() if name.endswith("global_scale")
    }
    latent = "model.layers.0.self_attn.q_a_proj", "model.layers.0.self_attn.kv_a_proj_with_mqa"
    dense = "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"
    for names in (latent, dense):
        expected = 2688 / max(weights[name].abs().max() for name in names)
        for name in names:
            torch.testing.assert_close(found[name].squeeze(), expected)
    for e in range(8):
        both = weights[f"{EXPERTS}.{e}.gate_proj"]  # gate and up
        for part, weight in (("gate", both), ("up", both), ("down", weights[f"{EXPERTS}.{e}.down_proj"])):
            torch.testing.assert_close(found[f"{EXPERTS}.{e}.{part}_proj"].squeeze(), 2688 / weight.abs().max())
    experts = epiloq.quantize_(model, "w4a16-nvfp4").get_submodule(EXPERTS)
    assert isinstance(experts, GatedExperts)
    assert experts.gate_up._made[2].numel() == 8  # one product
    for name, tensor in experts.file_state().items():
        if name.endswith("global_scale"):
            assert torch.equal(tensor, tensors[f"{EXPERTS}.{name}"])
