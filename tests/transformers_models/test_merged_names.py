"""Models whose files name tensors in ways of their own: layers as one, one layer twice, names like some to ignore."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")

import epiloq
import epiloq.integrations.transformers as integration
from epiloq.formats import epiloq_modules
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.io.model import from_directory
from epiloq.formats.layouts.base import FormatError
from epiloq.integrations.hf_quantizer.names import check
from model_families import FAMILIES, SIZES
from tiny_mixtures import mixtral, qwen3

# Other tests want transformers as it is.
integration.unregister()
pytestmark = pytest.mark.usefixtures("epiloq_in_transformers")


def nomic() -> tuple[Any, dict[str, torch.Tensor]]:
    """Query, key and value are one ``Wqkv`` in files."""
    config = transformers.NomicBertConfig(intermediate_size=64, max_position_embeddings=64, **SIZES)
    return transformers.NomicBertForMaskedLM(config), {"input_ids": torch.randint(3, 96, (2, 9))}


def dinov2() -> tuple[Any, dict[str, torch.Tensor]]:
    """The gate and what it gates are one matrix, each with a bias."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Dinov2Config(image_size=16, patch_size=8, use_swiglu_ffn=True, **sizes)
    return transformers.Dinov2Model(config), {"pixel_values": torch.randn(2, 3, 16, 16)}


def olmo_hybrid() -> tuple[Any, dict[str, torch.Tensor]]:
    """A convolution that stays in floating point is three in files."""
    sizes = {"intermediate_size": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
    widths = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_key_value_heads": 2}
    layers = {"layer_types": ["linear_attention", "full_attention"]}
    config = transformers.OlmoHybridConfig(pad_token_id=0, **SIZES, **sizes, **widths, **layers)
    return transformers.OlmoHybridForCausalLM(config), {"input_ids": torch.randint(3, 96, (2, 9))}


def dab_detr() -> tuple[Any, dict[str, torch.Tensor]]:
    """The decoder and the model predict boxes by the same layers, under two names."""
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_queries": 5}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.DabDetrConfig(
        backbone_config=backbone, use_timm_backbone=False, backbone=None, hidden_size=32, **sizes, **heads
    )
    return transformers.DabDetrForObjectDetection(config), {"pixel_values": torch.randn(1, 3, 32, 32)}


def mimi() -> tuple[Any, dict[str, torch.Tensor]]:
    """Patterns of what its parts leave aside match layers of the whole."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    convolutions = {"num_filters": 2, "upsample_groups": 32, "codebook_size": 16, "codebook_dim": 8}
    config = transformers.MimiConfig(
        vector_quantization_hidden_dimension=8, intermediate_size=32, **sizes, **convolutions
    )
    return transformers.MimiModel(config), {"input_values": torch.randn(1, 1, 2000)}


def glm_moe() -> tuple[Any, dict[str, torch.Tensor]]:
    """The same, where a smaller model's further layer is one of a larger model."""
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 60,
    }
    config = transformers.Glm4MoeConfig(
        **SIZES | {"hidden_size": 16, "num_hidden_layers": 47},
        **experts,
        intermediate_size=16,
        head_dim=8,
        num_key_value_heads=2,
    )
    return transformers.Glm4MoeForCausalLM(config), {"input_ids": torch.randint(3, 96, (1, 5))}


MODELS: list[Callable[[], tuple[Any, dict[str, torch.Tensor]]]] = [nomic, dinov2, olmo_hybrid, dab_detr, mimi, glm_moe]


def quantised(model: Any, scheme: str = "w4a16-g32") -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return epiloq.quantize_(model.eval(), scheme)


@torch.no_grad()
def answer(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    found = model(**given)
    return next(found[key] for key in ("logits", "last_hidden_state", "audio_values") if key in found)  # type: ignore


@pytest.mark.parametrize("make", MODELS)
def test_models_saved_by_transformers_open(
    seed: int, tmp_path: Path, make: Callable[[], tuple[Any, dict[str, torch.Tensor]]]
) -> None:
    model, given = make()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / "float")
    kind = type(model)
    # In memory, and after loading, which tells the model how its files are named.
    for source in (model, kind.from_pretrained(tmp_path / "float")):
        made = quantised(source)
        expected, folder = answer(made, given), tmp_path / f"{len(list(tmp_path.iterdir()))}"
        made.save_pretrained(folder)
        again, info = kind.from_pretrained(folder, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        # Convolutions may add in another order where tensors lie otherwise in memory.
        bound = 1e-5 if make in (dab_detr, mimi) else 0.0
        for found in (again, from_directory(folder)):
            assert epiloq_modules.layers_of(found) == epiloq_modules.layers_of(made)
            assert float((answer(found, given) - expected).norm() / expected.norm()) <= bound


class SharesPredictor(transformers.DabDetrForObjectDetection):  # type: ignore[misc,name-defined]
    """One module under two names, as in transformers 5.17; later versions tie the weights of two modules."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.decoder.bbox_embed = self.bbox_predictor


def test_one_module_under_two_names(seed: int, tmp_path: Path) -> None:
    model, given = dab_detr()
    model = SharesPredictor(model.config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    made = quantised(model)
    assert made.bbox_predictor is made.model.decoder.bbox_embed
    expected = answer(made, given)
    made.save_pretrained(tmp_path / "saved")
    for each in (SharesPredictor, transformers.DabDetrForObjectDetection):
        again, info = each.from_pretrained(tmp_path / "saved", output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert epiloq_modules.layers_of(again) == epiloq_modules.layers_of(made)
        assert float((answer(again, given) - expected).norm() / expected.norm()) <= 1e-5


def test_a_tensor_tied_to_one_that_is_tied(seed: int, tmp_path: Path) -> None:
    """Grounding DINO's decoder predicts boxes by the model's layers, which are all the first of them."""
    model = FAMILIES["neox"]()
    first, second, third = (
        f"gpt_neox.{name}.bias"
        for name in ("layers.0.mlp.dense_4h_to_h", "layers.1.mlp.dense_4h_to_h", "final_layer_norm")
    )
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in (first, second)}
    model.config.save_pretrained(tmp_path)
    safetensors.save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match="expected a tensor, found none"):
        check(model, Checkpoint(tmp_path), unused=())
    model.all_tied_weights_keys = {first: second, second: third}
    check(model, Checkpoint(tmp_path), unused=())


@pytest.mark.parametrize("left", ["*.experts.*", "*.1.mlp.experts.*"])
@pytest.mark.parametrize("make", [mixtral, qwen3])
def test_experts_left_in_floating_point_keep_their_names(
    make: Callable[[], Any], left: str, seed: int, tmp_path: Path
) -> None:
    """Stacked again in the model, they have a matrix each in files, as transformers writes them."""
    made = make()
    made.save_pretrained(tmp_path / "float")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        epiloq.quantize_(made, "w8a16", ignore=[left]).save_pretrained(tmp_path / "once")
    model = type(made).from_pretrained(tmp_path / "once")
    assert model.model.layers[1].mlp.experts.gate_up_proj.ndim == 3
    model.save_pretrained(tmp_path / "twice")
    given, once, twice = (
        safetensors.load_file(tmp_path / name / "model.safetensors") for name in ("float", "once", "twice")
    )
    assert once.keys() == twice.keys() and all(torch.equal(tensor, twice[name]) for name, tensor in once.items())
    experts = {name for name in given if "layers.1." in name and ".experts." in name}
    assert len(experts) == 12 and all(torch.equal(twice[name], given[name]) for name in experts)
    if left == "*.experts.*":
        model.dequantize()
        model.save_pretrained(tmp_path / "dequantised")
        assert safetensors.load_file(tmp_path / "dequantised" / "model.safetensors").keys() == given.keys()
