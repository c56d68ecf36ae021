"""Where directories say how they are quantised, and which other tensors they hold: as in published repositories."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import foreign_checkpoints as foreign
import other_mixtures
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.io.model import from_directory
from epiloq.formats.layers import Layers
from epiloq.formats.layouts.base import FormatError

TOKENS = torch.arange(20)[None] * 3
GPTQ = foreign.TOOLS["gptq"][1]
Tensors = dict[str, Tensor]


def llava() -> Any:
    towers = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(image_size=28, patch_size=14, **towers)
    text = transformers.LlamaConfig(intermediate_size=96, num_key_value_heads=2, **foreign.SIZES)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=200)
    return transformers.LlavaForConditionalGeneration(config).eval()


def language(name: str, linear: nn.Linear) -> foreign.Layer | None:
    return foreign.gptq(linear) if "language_model" in name else None


def everything(name: str, linear: nn.Linear) -> foreign.Layer:
    return foreign.gptq(linear)


def edit(folder: Path, config: Callable[[dict[str, Any]], object]) -> None:
    found = json.loads((folder / "config.json").read_text())
    config(found)
    (folder / "config.json").write_text(json.dumps(found))


def add(folder: Path, tensors: Tensors) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, {"format": "pt"})


@torch.no_grad()
def check(folder: Path, model: Any) -> None:
    """That both ways of opening a directory give the model's logits."""
    auto = transformers.AutoModelForImageTextToText if hasattr(model.config, "vision_config") else None
    for opened in (from_directory(folder), (auto or transformers.AutoModelForCausalLM).from_pretrained(folder)):
        torch.testing.assert_close(opened(TOKENS).logits, model(TOKENS).logits, rtol=1e-4, atol=1e-5)


PLACES: dict[str, Callable[[dict[str, Any]], object]] = {
    "the text model's configuration": lambda config: config["text_config"].update(quantization_config=GPTQ),
    "the former name": lambda config: config.update(compression_config=GPTQ),
    "two places that agree": lambda config: (
        config.update(compression_config=GPTQ),
        config["text_config"].update(quantization_config=GPTQ),
    ),
    "the top level, which precedes": lambda config: (
        config.update(quantization_config=GPTQ),
        config["text_config"].update(quantization_config=GPTQ | {"bits": 8}),
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_places(place: str, epiloq_in_transformers: None, seed: int, tmp_path: Path) -> None:
    model = foreign.write_as(tmp_path / "model", llava(), language, None, 1)
    edit(tmp_path / "model", PLACES[place])
    check(tmp_path / "model", model)
    opened = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    opened.save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "config.json").read_text())
    assert saved["quantization_config"]["quant_method"] == "gptq"
    assert "compression_config" not in saved and "quantization_config" not in saved["text_config"]
    check(tmp_path / "again", model)


def test_two_descriptions_that_differ(seed: int, tmp_path: Path) -> None:
    foreign.write_as(tmp_path / "model", llava(), language, None, 1)
    parts = {"text_config": GPTQ, "vision_config": GPTQ | {"bits": 8}}
    edit(tmp_path / "model", lambda config: [config[k].update(quantization_config=v) for k, v in parts.items()])
    with pytest.raises(FormatError, match=r"(text|vision)_config\.quantization_config, .*got two"):
        Checkpoint(tmp_path / "model")


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_sparse_weights_stored_as_dense_ones(key: str, epiloq_in_transformers: None, seed: int, tmp_path: Path) -> None:
    sparse = {"format": "dense", "global_sparsity": 0.5, "sparsity_structure": "2:4", "targets": ["Linear"]}
    described = {"quant_method": "compressed-tensors", "sparsity_config": sparse}
    model = foreign.write_as(tmp_path / "model", foreign.llama(), lambda *_: None, None, 1)
    edit(tmp_path / "model", lambda config: config.update({key: described}))
    check(tmp_path / "model", model)
    edit(tmp_path / "model", lambda config: config[key].update(sparsity_config={"format": "sparse-24-bitmask"}))
    with pytest.raises(FormatError, match="sparsity_config: expected none or the format dense"):
        from_directory(tmp_path / "model")


ATTENTION = "model.layers.1.self_attn"


@pytest.mark.parametrize(
    "names",
    [
        (f"{ATTENTION}.k_scale", f"{ATTENTION}.v_scale", f"{ATTENTION}.q_scale", f"{ATTENTION}.prob_scale"),
        (f"{ATTENTION}.kv_scale",),
        (f"{ATTENTION}.k_proj.k_scale", f"{ATTENTION}.v_proj.v_scale"),
        (f"{ATTENTION}.k_proj.output_scale", f"{ATTENTION}.v_proj.output_scale"),
    ],
)
def test_scales_of_caches_that_no_entry_describes(
    names: tuple[str, ...], epiloq_in_transformers: None, seed: int, tmp_path: Path
) -> None:
    """They matter to a quantised cache only."""
    model = foreign.write_as(tmp_path / "model", foreign.llama(), everything, GPTQ, 1)
    add(tmp_path / "model", {name: torch.tensor(0.5) for name in names})
    with pytest.warns(UserWarning, match="the key-value cache stays in the model's type"):
        check(tmp_path / "model", model)
    assert set(names) == Layers(Checkpoint(tmp_path / "model")).unused


def test_a_bias_that_the_model_does_not_have(epiloq_in_transformers: None, seed: int, tmp_path: Path) -> None:
    foreign.write_as(tmp_path / "model", foreign.llama(), everything, GPTQ, 1)
    add(tmp_path / "model", {"model.layers.1.mlp.up_proj.bias": torch.ones(192)})
    for opened in (from_directory, transformers.AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.bias: not a tensor of this model"):
            opened(tmp_path / "model")


def glm() -> Any:
    """A dense layer and one of experts; transformers names layer 46 and 92 as those for further predictions."""
    routed = {"n_routed_experts": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
    return other_mixtures.made("Glm4Moe", head_dim=32, num_nextn_predict_layers=1, **routed)


def packed_checkpoint(model: Any, folder: Path, config: dict[str, Any]) -> Path:
    """A directory in GPTQ of a model whose reference is in the folder beside."""
    reference = folder.with_name("reference")
    model.save_pretrained(reference)
    tensors, packed = load_file(reference / "model.safetensors"), dict[str, Tensor]()
    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight")
        if "proj" not in name or tensor.ndim != 2:
            packed[name] = tensor
            continue
        linear = nn.Linear(tensor.shape[1], tensor.shape[0], bias=False)
        parts, tensors[name] = foreign.gptq(linear)
        packed |= {f"{layer}.{part}": value for part, value in parts.items() if part != "bias"}
    folder.mkdir()
    save_file(tensors, reference / "model.safetensors", {"format": "pt"})
    save_file(packed, folder / "model.safetensors", {"format": "pt"})
    entries = json.loads((reference / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(entries | {"quantization_config": config}))
    return reference


@pytest.mark.parametrize("layer", ["model.layers.46", "model.layers.2"])
def test_layers_for_further_predictions(layer: str, epiloq_in_transformers: None, seed: int, tmp_path: Path) -> None:
    """However they are quantised: here as the others, and in FP8, which the configuration does not describe."""
    rules = {"dynamic": {f"-:{layer}.mlp": {}}}
    reference = packed_checkpoint(glm(), tmp_path / "model", GPTQ | rules)
    parts, _ = foreign.gptq(nn.Linear(64, 128, bias=False))
    further = {f"{layer}.self_attn.q_proj.{part}": tensor for part, tensor in parts.items()}
    further[f"{layer}.mlp.down_proj.weight"] = torch.zeros(64, 96, dtype=torch.float8_e4m3fn)
    further |= {f"{layer}.mlp.down_proj.weight_scale_inv": torch.ones(1, 1), f"{layer}.enorm.weight": torch.ones(64)}
    add(tmp_path / "model", further)
    check(tmp_path / "model", transformers.AutoModelForCausalLM.from_pretrained(reference))


def test_a_layer_more_than_the_configuration_has(seed: int, tmp_path: Path) -> None:
    packed_checkpoint(glm(), tmp_path / "model", GPTQ)
    parts, _ = foreign.gptq(nn.Linear(64, 128, bias=False))
    add(tmp_path / "model", {f"model.layers.3.self_attn.q_proj.{part}": tensor for part, tensor in parts.items()})
    with pytest.raises(FormatError, match=r"model\.layers\.3\.self_attn\.q_proj"):
        from_directory(tmp_path / "model")


def test_stacked_experts_in_floating_point_beside_quantised_layers(
    epiloq_in_transformers: None, seed: int, tmp_path: Path
) -> None:
    """transformers would expect a matrix an expert in files of compressed-tensors."""
    sizes = {"intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 16}
    model = other_mixtures.made("Llama4Text", **sizes, interleave_moe_layer_step=1)
    tool = foreign.TOOLS["pack-quantized"]

    def attention(name: str, linear: nn.Linear) -> foreign.Layer | None:
        return tool[0](linear) if "self_attn" in name else None

    foreign.write_as(tmp_path / "model", model, attention, tool[1], 1)
    check(tmp_path / "model", model)


def test_shards_without_their_index(seed: int, tmp_path: Path) -> None:
    foreign.write_as(tmp_path / "model", foreign.llama(), everything, GPTQ, 2)
    (tmp_path / "model" / "model.safetensors.index.json").unlink()
    with pytest.raises(FormatError, match=r"shards \(model-00001-of-00002.safetensors\): expected the index"):
        Checkpoint(tmp_path / "model")
