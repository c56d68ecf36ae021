"""transformers on epiloq's layers: directories of epiloq and of other tools, saved, compiled, quantised on loading."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

import epiloq
import epiloq.integrations.transformers as integration
import foreign_checkpoints as foreign
import tiny_mixtures
from epiloq.formats import deepseek_fp8, epiloq_modules
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.integrations.transformers import EpiloqConfig
from epiloq.nn import Fp8BlockLinear, Fp8Linear, Int8Linear, WeightOnlyLinear
from epiloq.quantize import job as jobs
from epiloq.quantize.settings import Settings
from opened_models import layers, logits, opened

# Other tests want transformers as it is.
integration.unregister()
pytestmark = pytest.mark.usefixtures("epiloq_in_transformers")


def dequantised(layer: Any) -> torch.Tensor:
    if isinstance(layer, WeightOnlyLinear):
        return layer.weight.dequantize()
    state = layer.file_state()
    if isinstance(layer, Int8Linear):
        return state["weight"] * state["weight_scale"][:, None]  # type: ignore[no-any-return]
    if isinstance(layer, Fp8Linear):
        return state["weight"].float() * state["weight_scale"].view(-1, 1)  # type: ignore[no-any-return]
    blocks = state["weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    return state["weight"].float() * blocks[: layer.out_features, : layer.in_features]  # type: ignore[no-any-return]


def quantised(folder: Path, scheme: str, layout: str, model: str = "llama", symmetric: bool = False) -> Path:
    """A directory of ``epiloq quantize``, rounded to nearest."""
    foreign.MODELS[model]().save_pretrained(folder / "float")
    settings = Settings(folder / "float", folder / "out", scheme, "rtn", layout, symmetric=symmetric)
    jobs.perform(jobs.prepare(settings))
    return folder / "out"


@pytest.mark.parametrize(
    ("scheme", "layout", "model", "symmetric"),
    [
        ("w4a16-g32", "compressed-tensors", "qwen2", False),
        ("w4a16-g32", "gptq", "gpt_neox", False),
        ("w4a16-g32", "gptq", "opt", True),
        ("w4a16-g32", "awq", "llama", False),
        ("w4a16", "compressed-tensors", "qwen2", False),
        ("w4a16", "gptq", "llama", False),
        ("w4a16", "awq", "llama", False),
        ("w8a16", "compressed-tensors", "gpt_neox", True),
        ("w8a8-int8", "compressed-tensors", "opt", True),
        ("w8a8-int8-azp", "compressed-tensors", "qwen2", True),
        ("fp8", "compressed-tensors", "gpt_neox", False),
        ("fp8-token", "compressed-tensors", "qwen2", False),
        ("w4a16-g64", "epiloq", "qwen2", False),
        ("w8a8-int8", "epiloq", "gpt_neox", True),
    ],
)
def test_own_directories(seed: int, tmp_path: Path, scheme: str, layout: str, model: str, symmetric: bool) -> None:
    """The bits of ``epiloq eval``, before and after ``save_pretrained``, in the format that it was."""
    folder = quantised(tmp_path, scheme, layout, model, symmetric)
    found = opened(folder)
    exact, _ = models.load(Checkpoint(folder))
    assert torch.equal(logits(found), logits(exact)) and not found.training
    assert len(layers(found)) == len(layers(exact)) > 0
    assert isinstance(found.get_output_embeddings(), torch.nn.Linear)
    found.save_pretrained(tmp_path / "again", max_shard_size="40KB")
    assert torch.equal(logits(opened(tmp_path / "again")), logits(found))
    before, after = Checkpoint(folder), Checkpoint(tmp_path / "again")
    assert after.quantization == before.quantization and len(set(after.files.values())) > 2
    tensors = dict(after.tensors())
    assert tensors.keys() == before.files.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in before.tensors())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_blocks(seed: int, tmp_path: Path, dtype: torch.dtype) -> None:
    foreign.llama().to(dtype).save_pretrained(tmp_path / "float")
    model = epiloq.quantize_(opened(tmp_path / "float"), "fp8-block")
    with pytest.warns(UserWarning, match="dequantises"):
        deepseek_fp8.save(model, tmp_path / "out")
    found = opened(tmp_path / "out")
    assert found.dtype == dtype and torch.equal(logits(found), logits(model))
    found.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(opened(tmp_path / "again")), logits(model))


@pytest.mark.parametrize(
    ("tool", "model"),
    [
        ("gptq", "llama"),
        ("gptq", "opt"),
        ("gptq in activation order", "gpt_neox"),
        ("gptq in activation order", "qwen2"),
        ("awq", "qwen2"),
        ("awq", "llama"),
        ("awq gemv", "opt"),
        ("awq gemv", "qwen2"),
        ("awq gemv_fast", "opt"),
        ("awq gemv_fast", "llama"),
        ("pack-quantized", "opt"),
        ("pack-quantized", "qwen2"),
        ("int-quantized", "gpt_neox"),
        ("static int-quantized", "llama"),
        ("float-quantized", "qwen2"),
        ("static float-quantized", "opt"),
        ("fp8", "llama"),
        ("fp8", "opt"),
    ],
)
def test_directories_of_other_tools(seed: int, tmp_path: Path, tool: str, model: str) -> None:
    exact = foreign.write(tmp_path / "out", foreign.MODELS[model](), tool)
    found = opened(tmp_path / "out")
    kinds = {"int-quantized": Int8Linear, "float-quantized": Fp8Linear, "fp8": Fp8BlockLinear}
    kind = kinds.get(tool.removeprefix("static "), WeightOnlyLinear)
    assert {type(layer) for layer in layers(found).values()} == {kind}
    for name, layer in layers(found).items():
        assert torch.equal(dequantised(layer), exact.get_parameter(f"{name}.weight")), name
    # Activations in 8 bits err (over random weights by 0.013, in FP8 by up to 0.1), those of a scale nobody measured
    # without bounds; weights alone do not.
    error = (logits(found) - logits(exact)).norm() / logits(exact).norm()
    bounds = {"int-quantized": 0.05, "float-quantized": 0.3, "fp8": 0.3}
    assert error < (torch.inf if "static" in tool else bounds.get(tool, 1e-5))
    found.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(opened(tmp_path / "again")), logits(found))


def test_packed_by_its_own_package(seed: int, tmp_path: Path) -> None:
    """The packer of the package compressed-tensors, in place of the one in this test's helper."""
    package = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    q = torch.randint(-8, 8, (64, 96), dtype=torch.int8)
    assert torch.equal(package.pack_to_int32(q, 4), foreign.words((q + 8).numpy()))


@pytest.mark.parametrize("scheme", ["w8a8-int8-azp", "w4a8-block", "fp8-token", "fp8-block", "w4a16-g64"])
def test_quantised_after_loading(seed: int, tmp_path: Path, scheme: str) -> None:
    """As `quantize_` does it, and saved in epiloq's own format."""
    foreign.qwen2().save_pretrained(tmp_path / "float")
    found = opened(tmp_path / "float", quantization_config=EpiloqConfig(scheme))
    assert torch.equal(logits(found), logits(epiloq.quantize_(opened(tmp_path / "float"), scheme)))
    assert len(layers(found)) == 14 and found.is_quantized
    found.save_pretrained(tmp_path / "out")
    message = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert message == found.config.quantization_config.to_dict() and "quant_method" not in message
    again = opened(tmp_path / "out")
    assert torch.equal(logits(again), logits(found))
    assert {name: repr(layer) for name, layer in layers(again).items()} == {
        n: repr(m) for n, m in layers(found).items()
    }
    read, _ = models.load(Checkpoint(tmp_path / "out"))
    assert torch.equal(logits(read), logits(found))


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_excluded_layers(seed: int, tmp_path: Path) -> None:
    foreign.gpt_neox().save_pretrained(tmp_path / "float")
    left = ["gpt_neox.layers.1", "gpt_neox.layers.0.attention.dense"]
    found = opened(tmp_path / "float", quantization_config=EpiloqConfig("w8a16", modules_to_not_convert=left))
    assert sorted(layers(found)) == [
        f"gpt_neox.layers.0.{name}" for name in ("attention.query_key_value", "mlp.dense_4h_to_h", "mlp.dense_h_to_4h")
    ]
    found.save_pretrained(tmp_path / "out")
    again = opened(tmp_path / "out", quantization_config=EpiloqConfig())
    assert layers(again).keys() == layers(found).keys() and torch.equal(logits(again), logits(found))


def test_a_static_scheme_comes_back(seed: int, tmp_path: Path) -> None:
    model = epiloq.quantize_(foreign.llama(), "w8a8-int8-static", calibrate=logits)
    epiloq_modules.write(model, model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}, tmp_path / "out")
    found = opened(tmp_path / "out")
    found.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(found), logits(model)) and torch.equal(logits(opened(tmp_path / "again")), logits(model))


def test_registering_can_be_taken_back() -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

    integration.unregister()
    assert AUTO_QUANTIZER_MAPPING["gptq"].__name__ == "GptqHfQuantizer" and "epiloq" not in AUTO_QUANTIZER_MAPPING
    assert AUTO_QUANTIZATION_CONFIG_MAPPING["awq"].__name__ == "AwqConfig"
    integration.register()
    # torchao's own class quantises models in floating point.
    methods = [method if method != "torchao" else "torchao by epiloq" for method in integration.METHODS]
    assert {AUTO_QUANTIZER_MAPPING[method] for method in methods} == {integration.EpiloqQuantizer}
    assert {AUTO_QUANTIZATION_CONFIG_MAPPING[method] for method in methods} == {EpiloqConfig}


@pytest.mark.parametrize(
    ("tool", "model", "head"),
    [("gptq", "llama", "score"), ("pack-quantized", "gpt_neox", "classifier"), ("fp8", "qwen2", "score")],
)
@torch.no_grad()
def test_a_classifier_of_a_language_models_files(seed: int, tmp_path: Path, tool: str, model: str, head: str) -> None:
    """Its new head is initialised by transformers; the language model's, which it lacks, is left out."""
    exact = foreign.write(tmp_path / "in", foreign.MODELS[model](), tool)
    ids = torch.randint(0, 256, (2, 9))
    classes = transformers.AutoModelForTokenClassification
    found = classes.from_pretrained(tmp_path / "in", num_labels=3).eval()
    states, expected = (each(ids, output_hidden_states=True).hidden_states[-1] for each in (found, exact))
    assert float((states - expected).norm() / expected.norm()) < (0.3 if tool == "fp8" else 1e-5)
    weight = found.get_parameter(f"{head}.weight")
    assert weight.shape[0] == 3 and 0 < float(weight.std()) < 0.1
    found.save_pretrained(tmp_path / "again")
    again = classes.from_pretrained(tmp_path / "again").eval()
    assert torch.equal(again(ids).logits, found(ids).logits)


@pytest.mark.parametrize("kind", ["AutoModelForTokenClassification", "AutoModel"])
@torch.no_grad()
def test_models_without_the_quantised_head_of_the_files(seed: int, tmp_path: Path, kind: str) -> None:
    exact = foreign.qwen2()
    epiloq.quantize_(exact, "w4a16-g32", head="w8a16")
    epiloq_modules.save(exact, tmp_path / "in")
    ids = torch.randint(0, 256, (2, 9))
    found = getattr(transformers, kind).from_pretrained(tmp_path / "in").eval()
    states = [each(ids, output_hidden_states=True).hidden_states[-1] for each in (found, exact)]
    assert torch.equal(*states)
    found.save_pretrained(tmp_path / "again")
    again = getattr(transformers, kind).from_pretrained(tmp_path / "again").eval()
    assert torch.equal(again(ids)[0], found(ids)[0])


@pytest.mark.parametrize(("tool", "model"), [("gptq", "llama"), ("pack-quantized", "gpt_neox"), ("fp8", "qwen2")])
@torch.no_grad()
def test_dequantised_models(seed: int, tmp_path: Path, tool: str, model: str) -> None:
    """``dequantize()`` leaves a plain model, which computes with the values of the files and can be saved and cast."""
    exact = foreign.write(tmp_path / "in", foreign.MODELS[model](), tool)
    found = opened(tmp_path / "in")
    found.save_pretrained(tmp_path / "again")  # which makes a text of the configuration's dtype
    found = found.dequantize()
    assert not any(type(module).__module__.startswith("epiloq") for module in found.modules())
    torch.testing.assert_close(logits(found), logits(exact), rtol=1e-4, atol=1e-5)
    found.save_pretrained(tmp_path / "float")
    assert "quantization_config" not in json.loads((tmp_path / "float" / "config.json").read_text())
    torch.testing.assert_close(logits(opened(tmp_path / "float").half().float()), logits(exact), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("tool", ["gptq", "fp8", "epiloq"])
@torch.no_grad()
def test_opened_models_are_pickled(seed: int, tmp_path: Path, tool: str) -> None:
    """As for another process, and by ``torch.save``; the copy is saved in the same format."""
    exact = foreign.qwen2()
    if tool == "epiloq":
        epiloq_modules.save(epiloq.quantize_(exact, "w4a16-g32"), tmp_path / "in")
    else:
        foreign.write(tmp_path / "in", exact, tool)
    found = opened(tmp_path / "in")
    for copied in (pickle.loads(pickle.dumps(found)), copy.deepcopy(found)):
        assert torch.equal(logits(copied), logits(found))
        copied.save_pretrained(tmp_path / "again")
        assert torch.equal(logits(opened(tmp_path / "again")), logits(found))


def test_experts_are_not_dequantised(seed: int, tmp_path: Path) -> None:
    model = tiny_mixtures.qwen3()
    epiloq.quantize_(model, "w8a16")
    epiloq_modules.save(model, tmp_path / "in")
    found = opened(tmp_path / "in")
    with pytest.raises(NotImplementedError, match=r"dequantize: model\.layers\.\d\.mlp\.experts: expected whole"):
        found.dequantize()
    assert type(found.model.layers[0].self_attn.q_proj) is WeightOnlyLinear


@pytest.mark.parametrize("kind", ["AutoModel", "AutoModelForSequenceClassification"])
@torch.no_grad()
def test_a_pooler_that_the_saved_class_has_not(seed: int, tmp_path: Path, kind: str) -> None:
    """A model for masked tokens has none. It is initialised and saved again, in floating point."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    exact = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=99, **sizes)).eval()
    foreign.write(tmp_path / "in", exact, "pack-quantized")
    ids = torch.arange(1, 9)[None]
    found = getattr(transformers, kind).from_pretrained(tmp_path / "in").eval()
    states = [each(ids, output_hidden_states=True).hidden_states[-1] for each in (found, exact)]
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-5)
    assert type(found.get_submodule("pooler" if kind == "AutoModel" else "bert.pooler").dense) is torch.nn.Linear
    found.save_pretrained(tmp_path / "again")
    again = getattr(transformers, kind).from_pretrained(tmp_path / "again").eval()
    torch.testing.assert_close(again(ids)[-1], found(ids)[-1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "tensor", "message"),
    [
        ("AutoModelForCausalLM", "lm_head.weight", "lm_head.weight: expected a tensor, found none"),
        ("AutoModelForTokenClassification", "model.norm.weight", "model.norm.weight: expected a tensor, found none"),
    ],
)
def test_other_parts_are_never_random(seed: int, tmp_path: Path, kind: str, tensor: str, message: str) -> None:
    """Neither a language model's own head, if the files are those of its base model, nor anything in the base model."""
    foreign.write(tmp_path / "in", foreign.qwen2(), "gptq", shards=1)
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    del tensors[tensor]
    save_file(tensors, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen2Model"]}))
    with pytest.raises(ValueError, match=message):
        getattr(transformers, kind).from_pretrained(tmp_path / "in")
