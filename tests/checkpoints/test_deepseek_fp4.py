"""DeepSeek's checkpoints with experts in FP4 beside FP8 blocks: packed E2M1 in int8, scales of E8M0 for 32 numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from torch import Tensor

import epiloq.integrations.transformers as integration
from command_line import run
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.layouts.base import FormatError
from epiloq.nn import Fp8BlockExperts, Fp8BlockLinear, GatedExperts, PackedFp4Experts
from reference import typical_error
from rounded_models import same, weights
from tiny_mixtures import blocks, deepseek, logits, published

# Other tests want transformers as it is.
integration.unregister()

EXPERTS = "model.layers.1.mlp.experts"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def in_fp4(folder: Path, scale: str, beside: bool) -> Path:
    """A directory as DeepSeek publishes V4's: its experts' matrices random, scales called `scale` in all layers."""
    published(deepseek(), folder)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        layer = name.removesuffix("_scale_inv").removesuffix(".weight")
        if ".mlp.experts." not in name or name.startswith("model.layers.61."):
            stored = name.replace("weight_scale_inv", scale)
            tensors[stored] = tensor.to(torch.float8_e8m0fnu) if scale == "scale" and stored != name else tensor
        elif name.endswith(".weight"):
            n, k = tensor.shape
            tensors[name] = torch.randint(-128, 128, (n, k // 2), dtype=torch.int8)
            exponents = torch.randint(119, 123, (n, k // 32), dtype=torch.uint8)
            tensors[f"{layer}.{scale}"] = exponents.view(torch.float8_e8m0fnu)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (config if beside else config["quantization_config"])["expert_dtype"] = "fp4"
    config["quantization_config"]["scale_fmt"] = "ue8m0"
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def exact(tensors: dict[str, Tensor], layer: str, scale: str) -> Tensor:
    """A matrix by the definition, low halves of bytes first."""
    codes = tensors[f"{layer}.weight"].view(torch.uint8).long()
    values = E2M1[torch.stack((codes & 15, codes >> 4), 2).flatten(1)]
    factors = torch.exp2(tensors[f"{layer}.{scale}"].view(torch.uint8).float() - 127)
    return values * factors.repeat_interleave(32, 1)


@pytest.mark.filterwarnings("ignore:.*activations stay in floating point")
@pytest.mark.parametrize(("scale", "beside"), [("weight_scale_inv", False), ("scale", True)])
def test_opened_and_converted(scale: str, beside: bool, seed: int, tmp_path: Path) -> None:
    folder = in_fp4(tmp_path / "in", scale, beside)
    tensors = load_file(folder / "model.safetensors")
    model, _ = models.load(Checkpoint(folder))
    experts = model.get_submodule(EXPERTS)
    assert isinstance(experts, GatedExperts) and isinstance(experts.down, PackedFp4Experts)
    assert isinstance(model.get_submodule("model.layers.1.mlp.shared_experts.up_proj"), Fp8BlockLinear)
    held = weights(folder)
    for expert in range(8):
        for projection in ("gate_proj", "up_proj", "down_proj"):
            layer = f"{EXPERTS}.{expert}.{projection}"
            assert torch.equal(held[f"{layer}.weight"], exact(tensors, layer, scale))
    result = run("inspect", folder, "--check", "--json", tmp_path / "facts.json")
    assert result.exit_code == 0, result.output
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["format"] == "deepseek-fp4" and facts["formats"]["deepseek-fp8"] is None and facts["wrong"] == {}
    with pytest.warns(UserWarning, match="weights are the same numbers, but activations"):
        result = run("convert", folder, tmp_path / "fp8", "--format", "deepseek-fp8")
    assert result.exit_code == 0, result.output
    assert "expert_dtype" not in (tmp_path / "fp8" / "config.json").read_text()
    assert same(weights(tmp_path / "fp8"), held)
    eight, _ = models.load(Checkpoint(tmp_path / "fp8"))
    assert isinstance(eight.get_submodule(EXPERTS).down, Fp8BlockExperts)
    assert typical_error(logits(eight), logits(model)) < 0.5
    result = run("convert", folder, tmp_path / "own", "--format", "epiloq")
    assert result.exit_code == 0, result.output
    assert torch.equal(logits(models.load(Checkpoint(tmp_path / "own"))[0]), logits(model))


@pytest.mark.filterwarnings("ignore:.*activations stay in floating point")
def test_read_by_transformers(seed: int, tmp_path: Path) -> None:
    """It de-quantises int8 as two E2M1 numbers, too."""
    folder = in_fp4(tmp_path / "in", "weight_scale_inv", beside=False)
    config = transformers.FineGrainedFP8Config(dequantize=True, expert_dtype="fp4")
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype="auto")
    stack, held = theirs.get_submodule(EXPERTS), weights(folder)
    for expert in range(8):
        gate, up, down = (
            held[f"{EXPERTS}.{expert}.{projection}.weight"] for projection in ("gate_proj", "up_proj", "down_proj")
        )
        assert torch.equal(stack.gate_up_proj[expert].float(), torch.cat((gate, up)))
        assert torch.equal(stack.down_proj[expert].float(), down)


@pytest.mark.filterwarnings("ignore:.*activations stay in floating point")
def test_through_transformers_and_saved(epiloq_in_transformers: None, seed: int, tmp_path: Path) -> None:
    folder = in_fp4(tmp_path / "in", "weight_scale_inv", beside=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert isinstance(model.get_submodule(EXPERTS).down, PackedFp4Experts)
    assert torch.equal(logits(model), logits(models.load(Checkpoint(folder))[0]))
    model.save_pretrained(tmp_path / "again")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "again"))
    before = {name: tensor for name, tensor in before.items() if not name.startswith("model.layers.61.")}
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_numbers_that_the_configuration_denies(seed: int, tmp_path: Path) -> None:
    """FP4 experts where it says FP8, and a layer that it leaves in floating point."""
    folder = in_fp4(tmp_path / "in", "scale", beside=True)
    config = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"expert_dtype": "fp8"}, rf"{EXPERTS}\.0\..*weight: expected torch.float8_e4m3fn"),
        ({"modules_to_not_convert": [f"{EXPERTS}.3"]}, rf"leaves {EXPERTS}\.3\..* in floating point"),
    ):
        text = {**config, "quantization_config": config["quantization_config"] | change}
        (folder / "config.json").write_text(json.dumps(text))
        with pytest.raises(FormatError, match=message):
            models.load(Checkpoint(folder))


def v4(folder: Path, grouped: bool) -> tuple[Path, Any]:
    """A small DeepSeek-V4 under the names of its own files, experts in FP4, and what it stands for.

    `grouped`: its grouped projection is in FP8, too.
    """
    heads = {"num_attention_heads": 2, "head_dim": 64, "qk_rope_head_dim": 32, "q_lora_rank": 64, "o_lora_rank": 64}
    sizes = {"vocab_size": 64, "hidden_size": 128, "moe_intermediate_size": 64, "n_routed_experts": 4}
    kinds = {"layer_types": ["heavily_compressed_attention"], "mlp_layer_types": ["moe"], "num_hidden_layers": 1}
    rest = {"o_groups": 2, "num_experts_per_tok": 2, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 4}
    model: Any = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**heads, **sizes, **kinds, **rest))
    model.save_pretrained(folder)
    tensors: dict[str, Tensor] = {}
    stacks = model.model.layers[0].mlp.experts
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors[name] = tensor
        layer = name.removesuffix(".weight")
        if ".ffn.experts." in name:
            n, k = tensor.shape
            tensors[name] = torch.randint(-128, 128, (n, k // 2), dtype=torch.int8)
            scale = torch.randint(119, 123, (n, k // 32), dtype=torch.uint8).view(torch.float8_e8m0fnu)
            tensors[f"{layer}.scale"] = scale
            expert, part = layer.split(".")[-2:]
            rows = {"w1": slice(0, 64), "w3": slice(64, 128), "w2": slice(None)}[part]
            place = stacks.down_proj if part == "w2" else stacks.gate_up_proj
            place.data[int(expert), rows] = exact(tensors, layer, "scale")
        elif grouped and layer.endswith("wo_a"):
            tensors[name], scale = blocks(tensor)
            tensors[f"{layer}.scale"] = scale.to(torch.float8_e8m0fnu)
    assert any(name.endswith(".ffn.experts.3.w2.scale") for name in tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    found = json.loads((folder / "config.json").read_text()) | {"expert_dtype": "fp4", "quantization_config": text}
    (folder / "config.json").write_text(json.dumps(found))
    return folder, model.eval()


@pytest.mark.filterwarnings("ignore:.*activations stay in floating point")
@pytest.mark.skipif(not hasattr(transformers, "DeepseekV4Config"), reason="this transformers has no DeepSeek-V4")
def test_experts_whose_gates_have_a_limit(epiloq_in_transformers: None, seed: int, tmp_path: Path) -> None:
    """DeepSeek-V4's, whose files have names of their own."""
    folder, expected = v4(tmp_path / "v4", grouped=False)
    ours, _ = models.load(Checkpoint(folder))
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for model in (ours, theirs):
        experts = model.get_submodule("model.layers.0.mlp.experts")
        assert isinstance(experts, GatedExperts) and isinstance(experts.down, PackedFp4Experts)
        x, index, shares = torch.randn(20, 128) * 20, torch.randint(0, 4, (20, 2)), torch.rand(20, 2)
        with torch.no_grad():
            plain = expected.model.layers[0].mlp.experts(x, index, shares)
            assert typical_error(experts(x, index, shares), plain) < 1e-4
        torch.testing.assert_close(logits(model), logits(expected), rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*activations stay in floating point")
@pytest.mark.skipif(not hasattr(transformers, "DeepseekV4Config"), reason="this transformers has no DeepSeek-V4")
def test_grouped_projections_are_refused(epiloq_in_transformers: None, seed: int, tmp_path: Path) -> None:
    """A subclass of nn.Linear that multiplies by a block of its weight each."""
    folder, _ = v4(tmp_path / "v4", grouped=True)
    for way in (lambda: models.load(Checkpoint(folder)), lambda: transformers.AutoModel.from_pretrained(folder)):
        with pytest.raises(FormatError, match=r"o_a.*: expected a plain linear layer, but DeepseekV4GroupedLinear is"):
            way()
