"""GPT-OSS's own checkpoints, experts in MXFP4: opened without the packages that transformers needs for that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers", minversion="5.0")

from safetensors.torch import load_file, save_file
from torch import Tensor

import epiloq
import epiloq.integrations.transformers as integration
from epiloq.formats.io import model as models
from epiloq.formats.layouts.base import FormatError
from epiloq.nn import Fp4Experts, GatedExperts, WeightOnlyLinear
from epiloq.optimize.rotary import rotary_attention
from gloo_ranks import Ranks

# Other tests want transformers as it is.
integration.unregister()

TOKENS = torch.arange(24).view(2, 12) * 5 + 1
LAYER = "model.layers.0.mlp.experts"
EXPERTS, HIDDEN, INTERMEDIATE = 5, 64, 96


def gpt_oss() -> Any:
    config = transformers.GptOssConfig(
        num_hidden_layers=2,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        vocab_size=256,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = transformers.GptOssForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.3 if "bias" in name or "router" in name else 0.1)
    return model


def blocks_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks and scales, as the files have them, of stacked matrices ``[E, K, N]``."""
    parts = [epiloq.fp4_quantize(matrix.t(), "mxfp4")[:2] for matrix in weight.float()]
    codes, scales = (torch.stack(each) for each in zip(*parts, strict=True))
    return codes.view(*scales.shape, 16), scales


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model in bfloat16, its experts in blocks."""
    torch.manual_seed(0)
    where = tmp_path_factory.mktemp("gpt_oss") / "model"
    gpt_oss().bfloat16().save_pretrained(where)
    tensors = load_file(where / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks_of(tensors.pop(name))
    save_file(tensors, where / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((where / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    }
    (where / "config.json").write_text(json.dumps(config))
    return where


def opened(where: Path, dtype: torch.dtype = torch.float32) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(where, dtype=dtype)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(TOKENS.to(model.device)).logits.float()  # type: ignore[no-any-return]


@pytest.mark.usefixtures("epiloq_in_transformers")
def test_it_computes_what_transformers_does(folder: Path) -> None:
    integration.unregister()
    expected = logits(opened(folder).float())  # some versions of transformers dequantise to bfloat16, which is exact
    integration.register()
    ours = opened(folder)
    experts = ours.get_submodule(LAYER)
    assert isinstance(experts, Fp4Experts) and (experts.alpha, experts.limit) == (1.702, 7.0)
    found = logits(ours)
    assert float((found - expected).norm() / expected.norm()) < 1e-5
    half = logits(opened(folder, torch.bfloat16))
    assert float((half - expected).norm() / expected.norm()) < 0.03


@pytest.mark.usefixtures("epiloq_in_transformers")
def test_experts_stay_in_four_bits(folder: Path, tmp_path: Path) -> None:
    ours = opened(folder)
    experts = ours.get_submodule(LAYER)
    stored = load_file(folder / "model.safetensors")
    for name, tensor in experts.file_state().items():
        assert torch.equal(tensor, stored[f"{LAYER}.{name}"].to(tensor.dtype)), name
    assert {t.dtype for name, t in experts.state_dict().items() if "bias" not in name} == {torch.uint8}
    weights = sum(t.nbytes for name, t in experts.state_dict().items() if "bias" not in name)
    # H and I are padded to multiples of 128.
    assert weights == EXPERTS * (2 * INTERMEDIATE + HIDDEN) * 128 * (1 / 2 + 1 / 32)
    assert not any(parameter.requires_grad for parameter in experts.parameters())
    half = opened(folder, torch.bfloat16)
    half.save_pretrained(tmp_path / "saved")
    again = load_file(tmp_path / "saved" / "model.safetensors")
    assert again.keys() == stored.keys() and all(torch.equal(again[name], stored[name]) for name in stored)
    assert torch.equal(logits(opened(tmp_path / "saved", torch.bfloat16)), logits(half))


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize("world", [1, 2])
def test_ranks_have_some_of_the_experts(folder: Path, tmp_path: Path, world: int) -> None:
    """Logits are those of one process but for the order of sums; what is saved is the same bytes."""
    integration.register()
    try:
        expected = logits(opened(folder))
    finally:
        integration.unregister()
    stored = load_file(folder / "model.safetensors")

    def run(rank: int) -> None:
        integration.register()
        ours = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, tp_plan="auto")
        experts = ours.get_submodule(LAYER)
        assert experts.experts == (EXPERTS if world == 1 else [3, 2][rank])
        found = logits(ours)
        assert float((found - expected).norm() / expected.norm()) < 1e-5
        half = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, tp_plan="auto")
        half.save_pretrained(tmp_path / "saved")
        dist.barrier()
        again = load_file(tmp_path / "saved" / "model.safetensors")
        assert again.keys() == stored.keys() and all(torch.equal(again[name], stored[name]) for name in stored)
        assert half.get_submodule(LAYER).experts == experts.experts

    Ranks(tmp_path, world, run).check()


BAD: list[tuple[str, Any, str]] = [
    ("tensor", (f"{LAYER}.down_proj_scales", None), r"down_proj_scales: expected a tensor, found none"),
    ("tensor", (f"{LAYER}.down_proj_scales", torch.zeros(5, 64, 2)), r"down_proj_scales: expected torch\.uint8"),
    (
        "tensor",
        (f"{LAYER}.down_proj_blocks", torch.zeros(5, 64, 3, 8, dtype=torch.uint8)),
        "down_proj_blocks: expected",
    ),
    ("config", {"modules_to_not_convert": [LAYER]}, "leaves them in floating point"),
    ("config", {"group_size": 16}, "group_size: epiloq does not know what it does"),
]


@pytest.mark.usefixtures("epiloq_in_transformers")
@pytest.mark.parametrize(("what", "change", "text"), BAD)
def test_refused(folder: Path, tmp_path: Path, what: str, change: Any, text: str) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    if what == "config":
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] |= change
        (tmp_path / "config.json").write_text(json.dumps(config))
    else:
        tensors = load_file(folder / "model.safetensors")
        name, tensor = change
        tensors.pop(name)
        save_file(tensors | ({} if tensor is None else {name: tensor}), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=text):
        opened(tmp_path)


@pytest.mark.usefixtures("epiloq_in_transformers")
@pytest.mark.parametrize(
    ("part", "value", "layer", "text"),
    [
        ("gate_up_proj_scales", 255, "up_proj: weight_scale", r"expected powers of two, got NaN \(255\)"),
        ("down_proj_scales", 255, "down_proj: weight_scale", r"expected powers of two, got NaN \(255\)"),
        ("gate_up_proj_bias", float("nan"), "up_proj: bias", "expected finite numbers, got NaN or infinity"),
        ("down_proj_bias", float("inf"), "down_proj: bias", "expected finite numbers, got NaN or infinity"),
    ],
)
def test_numbers_that_are_not_finite(
    folder: Path, tmp_path: Path, part: str, value: float, layer: str, text: str
) -> None:
    """E8M0 has no infinity, and one code for NaN. The message names file and tensor, however the model is opened."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{LAYER}.{part}"].view(-1)[-1] = value
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"model\.safetensors: {LAYER}.*: {part}: {text}"):
        opened(tmp_path)
    with pytest.raises(ValueError, match=rf"model\.safetensors: {LAYER}\.4\.{layer}: {text}"):
        models.from_directory(tmp_path)


@pytest.mark.usefixtures("epiloq_in_transformers")
def test_opened_without_from_pretrained_and_converted(folder: Path, tmp_path: Path) -> None:
    """By epiloq's commands, each expert's matrices are layers; other formats hold the same numbers."""
    pytest.importorskip("typer", reason="the command line needs the extra cli")
    pytest.importorskip("rich", reason="the command line needs the extra cli")
    from command_line import run
    from epiloq.formats.io.checkpoint import Checkpoint
    from epiloq.formats.io.model import from_directory
    from epiloq.formats.layers import Layers

    layers, tensors = Layers(Checkpoint(folder)), load_file(folder / "model.safetensors")
    blocks, scales = (tensors[f"{LAYER}.gate_up_proj_{part}"] for part in ("blocks", "scales"))
    exact = epiloq.fp4_dequantize(blocks.flatten(0, 1).flatten(1), scales.flatten(0, 1), in_features=HIDDEN)
    exact = exact.view(EXPERTS, INTERMEDIATE, 2, HIDDEN)
    for expert in (0, EXPERTS - 1):
        for position, name in enumerate(("gate_proj", "up_proj")):
            found = layers.dequantize(f"{LAYER}.{expert}.{name}")
            assert found is not None and torch.equal(found, exact[expert, :, position])
    expected, model = logits(opened(folder)), from_directory(folder)
    assert relative(logits(model), expected) < 0.02
    result = run("inspect", folder, "--check")
    assert result.exit_code == 0, result.output
    for layout in ("epiloq", "compressed-tensors"):
        result = run("convert", folder, tmp_path / layout, "--format", layout)
        assert result.exit_code == 0, result.output
        for again in (from_directory(tmp_path / layout), opened(tmp_path / layout, torch.bfloat16)):
            assert isinstance(again.get_submodule(LAYER), GatedExperts)
            assert torch.equal(logits(again), logits(model))
    result = run("convert", folder, tmp_path / "deepseek-fp8", "--format", "deepseek-fp8")
    assert result.exit_code == 0, result.output
    blocks_of_fp8 = Layers(Checkpoint(tmp_path / "deepseek-fp8"))
    for name in (f"{LAYER}.{expert}.{part}_proj" for expert in range(EXPERTS) for part in ("gate", "up", "down")):
        found, wanted = blocks_of_fp8.dequantize(name), layers.dequantize(name)
        assert found is not None and wanted is not None and torch.equal(found, wanted)
    result = run("convert", folder, tmp_path / "awq", "--format", "awq")
    assert result.exit_code == 2 and "cannot represent" in result.output and not (tmp_path / "awq").exists()


@pytest.mark.usefixtures("epiloq_in_transformers")
def test_optimised(folder: Path) -> None:
    model = opened(folder)
    wanted = logits(model)
    ids = torch.arange(5)[None]
    tokens = model.generate(ids, max_new_tokens=6, do_sample=False)
    epiloq.optimize_(model)
    assert relative(logits(model), wanted) < 0.02
    # Attention, in floating point in these files, has its heads rotated together.
    attention = model.model.layers[0].self_attn
    assert vars(attention)["forward"].func is rotary_attention
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), tokens)


@pytest.mark.usefixtures("epiloq_in_transformers")
def test_other_layers_may_be_quantised_but_not_saved(folder: Path, tmp_path: Path) -> None:
    model = opened(folder)
    wanted = logits(model)
    epiloq.optimize_(epiloq.quantize_(model, "w8a16", head="w8a16"))
    assert isinstance(model.lm_head, WeightOnlyLinear) and isinstance(model.get_submodule(LAYER), Fp4Experts)
    assert 0 < relative(logits(model), wanted) < 0.1
    with pytest.raises(FormatError, match=r"save_pretrained: .*self_attn.q_proj: quantised since .*'mxfp4'"):
        model.save_pretrained(tmp_path / "saved")
    assert not list((tmp_path / "saved").glob("*.safetensors"))


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("part", ["gate_up_proj_scales", "down_proj_bias", "down_proj_blocks"])
def test_commands_name_missing_and_wrong_tensors(folder: Path, tmp_path: Path, part: str) -> None:
    from epiloq.formats.io.checkpoint import Checkpoint
    from epiloq.formats.layers import Layers

    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    wrong = {"none": None, "shape": tensors[f"{LAYER}.{part}"][..., :1], "type": torch.ones(3, 2, dtype=torch.int32)}
    for tensor in wrong.values():
        rest = {name: value for name, value in tensors.items() if name != f"{LAYER}.{part}"}
        changed = rest if tensor is None else rest | {f"{LAYER}.{part}": tensor.contiguous()}
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=LAYER.replace(".", r"\.")):
            Layers(Checkpoint(tmp_path))
