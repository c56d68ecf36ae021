"""Layers whose inputs are multiplied by a vector first: ModelOpt's AWQ where it could fold the vector into no layer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from torch import nn

import epiloq
import epiloq.integrations.transformers as integration
import foreign_checkpoints as foreign
from command_line import run
from epiloq.formats import convert
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.layouts.base import FormatError
from epiloq.nn import ExpertLinears, Fp4Linear, WeightOnlyLinear
from modelopt_layers import fp8_blocks, int4, int4_fp8, nvfp4, scaled
from opened_models import logits, opened
from rounded_models import same, weights

# Other tests want transformers as it is.
integration.unregister()
pytestmark = [
    pytest.mark.usefixtures("epiloq_in_transformers"),
    pytest.mark.filterwarnings("ignore:.*activations stay in floating point"),
]

FLAT = {"quant_method": "modelopt", "producer": {"name": "modelopt"}, "ignore": ["lm_head"], "pre_quant_scale": True}
KINDS: dict[str, tuple[Any, int, type[nn.Module]]] = {
    "NVFP4_AWQ": (nvfp4, 16, Fp4Linear),
    "W4A16_AWQ": (int4, 32, WeightOnlyLinear),
    "W4A8_AWQ": (int4_fp8, 32, WeightOnlyLinear),
}
OUT, DOWN = "model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj"


def written(folder: Path, algorithm: str, model: Any, ends: tuple[str, ...] = ("o_proj", "down_proj")) -> Any:
    """A directory whose layers of some names have the vector, half of them in bfloat16, and the float model of it."""
    pack, group, _ = KINDS[algorithm]

    def packed(name: str, linear: nn.Linear) -> foreign.Layer:
        dtype = torch.bfloat16 if ".0." in name else torch.float32
        return scaled(pack(linear), dtype) if name.endswith(ends) else pack(linear)

    config = FLAT | {"quant_algo": algorithm, "group_size": group}
    return foreign.write_as(folder, model, packed, config, shards=1)


def close(model: Any, exact: Any) -> bool:
    found, wanted = logits(model), logits(exact)
    return float((found - wanted).norm() / wanted.norm()) < 1e-5


@pytest.mark.parametrize("algorithm", KINDS)
def test_opened_saved_and_converted(algorithm: str, seed: int, tmp_path: Path) -> None:
    exact = written(tmp_path / "in", algorithm, foreign.llama())
    model, _ = models.load(Checkpoint(tmp_path / "in"))
    for name in (OUT, DOWN):
        layer: Any = model.get_submodule(name)
        assert type(layer) is KINDS[algorithm][2] and layer.scaled_input
        torch.testing.assert_close(layer.dequantized_weight(), exact.get_submodule(name).weight.detach())
    for name, values in weights(tmp_path / "in").items():
        torch.testing.assert_close(values, exact.get_parameter(name), rtol=2**-22, atol=0)
    assert close(model, exact)
    theirs = opened(tmp_path / "in")
    assert torch.equal(logits(theirs), logits(model))
    assert torch.equal(logits(copy.deepcopy(theirs)), logits(model))
    theirs.save_pretrained(tmp_path / "saved")
    before, after = (load_file(path / "model.safetensors") for path in (tmp_path / "in", tmp_path / "saved"))
    assert before.keys() == after.keys()
    assert all(after[name].dtype == t.dtype and torch.equal(after[name], t) for name, t in before.items())
    convert.perform(convert.prepare(tmp_path / "in", tmp_path / "epiloq", "epiloq"))
    assert torch.equal(logits(models.load(Checkpoint(tmp_path / "epiloq"))[0]), logits(model))
    assert torch.equal(logits(opened(tmp_path / "epiloq")), logits(model))
    assert same(weights(tmp_path / "epiloq"), weights(tmp_path / "in"))
    result = run("inspect", tmp_path / "in", "--check")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("algorithm", ["NVFP4_AWQ", "W4A16_AWQ"])
@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt", "awq", "deepseek-fp8"])
def test_formats_without_the_vector_refuse_it(algorithm: str, layout: str, seed: int, tmp_path: Path) -> None:
    written(tmp_path / "in", algorithm, foreign.llama())
    convert.perform(convert.prepare(tmp_path / "in", tmp_path / "epiloq", "epiloq"))
    for source in ("epiloq",) if layout == "modelopt" else ("in", "epiloq"):
        result = run("convert", tmp_path / source, tmp_path / "out", "--format", layout)
        assert result.exit_code == 2, result.output
        assert "scale" in result.output and not (tmp_path / "out").exists()


@pytest.mark.parametrize("algorithm", KINDS)
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
def test_merged_layers_have_one_vector_or_stay_apart(algorithm: str, shared: bool, seed: int, tmp_path: Path) -> None:
    """Gate and up, and query, key and value, are merged if their inputs are scaled alike."""
    ends = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    written(tmp_path / "in", algorithm, foreign.llama(), ends)
    if shared:
        tensors = load_file(tmp_path / "in" / "model.safetensors")
        first: dict[tuple[str, str], Any] = {}
        for name in sorted(tensors):
            layers, _, part = name.rpartition(".")
            if part in ("pre_quant_scale", "weight_scale_2") and layers.endswith(ends):
                tensors[name] = first.setdefault((layers.rpartition(".")[0], part), tensors[name]).clone()
        save_file(tensors, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    model = opened(tmp_path / "in")
    wanted = logits(model)
    epiloq.optimize_(model)
    found = logits(model)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5
    assert ("forward" in vars(model.get_submodule("model.layers.0.mlp.up_proj"))) == shared


@pytest.mark.parametrize("algorithm", ["NVFP4_AWQ", "W4A16_AWQ"])
def test_experts_with_vectors_of_their_own(algorithm: str, seed: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 192}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.MixtralConfig(**sizes, **heads, tie_word_embeddings=False)
    model = transformers.MixtralForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "float")
    tensors, exact = load_file(tmp_path / "float" / "model.safetensors"), {}
    pack, group, _ = KINDS[algorithm]
    for name in [name for name in tensors if ".experts." in name or "self_attn" in name]:
        weight = tensors.pop(name)
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        parts, exact[name] = scaled(pack(linear)) if "w2" in name else pack(linear)
        tensors |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}
    said = FLAT | {"quant_algo": algorithm, "group_size": group, "ignore": ["lm_head", "*.gate"]}
    foreign.write_as(tmp_path / "in", model, lambda *_: None, said, shards=1)
    save_file(tensors, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    save_file(load_file(tmp_path / "float" / "model.safetensors") | exact, tmp_path / "float" / "model.safetensors")
    float_model = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "float").eval()
    found = opened(tmp_path / "in")
    assert any(isinstance(module, ExpertLinears) for module in found.modules())
    assert close(found, float_model)
    found.save_pretrained(tmp_path / "saved")
    assert same(load_file(tmp_path / "saved" / "model.safetensors"), tensors)


WRONG = {
    "shape": (torch.ones(5), "pre_quant_scale: expected floating point [96], got torch.float32 [5]"),
    "type": (torch.ones(96, dtype=torch.int32), "pre_quant_scale: expected floating point [96], got torch.int32"),
    "value": (torch.full((96,), float("nan")), "pre_quant_scale: expected finite numbers, got NaN or infinity"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_vectors_are_named(what: str, seed: int, tmp_path: Path) -> None:
    written(tmp_path / "in", "NVFP4_AWQ", foreign.llama())
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    name, (wrong, message) = f"{OUT}.pre_quant_scale", WRONG[what]
    wrong = wrong if len(wrong) == 5 else wrong[:1].expand(tensors[name].shape[0]).clone()
    save_file(tensors | {name: wrong}, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    for open_ in (lambda: models.load(Checkpoint(tmp_path / "in")), lambda: opened(tmp_path / "in")):
        with pytest.raises(FormatError) as refused:
            open_()
        assert OUT in str(refused.value)
        assert message.replace("[96]", str(list(tensors[name].shape))) in str(refused.value)


def test_layers_of_other_kinds_refuse_the_vector(seed: int, tmp_path: Path) -> None:
    config = FLAT | {"quant_algo": "FP8_PB_WO", "pre_quant_scale": None}
    foreign.write_as(tmp_path / "in", foreign.llama(), lambda _, x: scaled(fp8_blocks(x)), config, shards=1)
    with pytest.raises(FormatError, match="got pre_quant_scale: no layer of that kind scales its inputs"):
        models.load(Checkpoint(tmp_path / "in"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [WeightOnlyLinear, Fp4Linear])
def test_the_product_of_scaled_inputs(kind: Any, dtype: torch.dtype, seed: int) -> None:
    """The input is rounded once after it was multiplied; the rest is the layer without a vector."""
    linear = nn.Linear(96, 40, dtype=dtype)
    plain = kind.from_linear(linear, **({"group_size": 32} if kind is WeightOnlyLinear else {}))
    options = {"group_size": 32} if kind is WeightOnlyLinear else {}
    layer: Any = kind(96, 40, scaled_input=True, dtype=dtype, **options)
    vector = torch.rand(96, dtype=torch.float64) + 0.5
    layer.load_state_dict(plain.state_dict() | {"pre_quant_scale": vector.float()})
    x = torch.randn(2, 7, 96, dtype=dtype, requires_grad=True)
    y = layer(x)
    scaled_x = (x.detach().double() * vector.float().double()).float().to(dtype)
    assert torch.equal(y, plain(scaled_x))
    y.double().sum().backward()
    exact = layer.dequantized_weight().double().sum(0).expand(x.shape)
    assert x.grad is not None
    torch.testing.assert_close(
        x.grad.double(), exact, rtol=0, atol=float(exact.abs().max()) * torch.finfo(dtype).eps * 8
    )
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x.detach()), y.detach())
    with pytest.raises(ValueError, match="x: expected shape"):
        layer(torch.randn(2, 1, dtype=dtype))


def test_no_vector_with_an_activation_order() -> None:
    with pytest.raises(ValueError, match="scaled_input: expected False with act_order"):
        WeightOnlyLinear(64, 16, act_order=True, scaled_input=True)
