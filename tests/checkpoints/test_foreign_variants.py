"""Directories of other tools whose layers differ or are rarer kinds: opened, converted and saved alike everywhere."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
pytest.importorskip("transformers")

import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.quantizers import quantizers_utils

import epiloq.integrations.transformers as integration
import foreign_checkpoints as foreign
import foreign_layers
import foreign_variants as variants
from command_line import run
from epiloq.formats import convert
from epiloq.formats.configs.keys import skips
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.nn import Fp8BlockLinear, Fp8Linear, Fp8WeightOnlyLinear, Int8Linear, W4A8Linear, WeightOnlyLinear
from opened_models import logits, opened
from rounded_models import same, weights

# Other tests want transformers as it is.
integration.unregister()

UP = "model.layers.0.mlp.up_proj"
RUNS: dict[str, type[nn.Module]] = {
    "layouts that differ": Int8Linear,
    "int8 per tensor": Int8Linear,
    "int8 per tensor, static": Int8Linear,
    "int4 with fp8, as vLLM reads it": W4A8Linear,
    "int4 with fp8, asymmetric": W4A8Linear,
    "int4 per channel with fp8": W4A8Linear,
    "int4 with int8, as vLLM reads it": W4A8Linear,
    "fp8 weights alone": Fp8WeightOnlyLinear,
    "fp8 weights alone, per tensor": Fp8WeightOnlyLinear,
    "fp8 weights alone, in groups": Fp8WeightOnlyLinear,
    "fp8 in groups, activations per token": Fp8WeightOnlyLinear,
    "mxfp8 of compressed-tensors": Fp8WeightOnlyLinear,
    "mxfp8 of compressed-tensors, weights alone": Fp8WeightOnlyLinear,
    "fp8 blocks of 64 x 128": Fp8BlockLinear,
    "fp8 blocks of 256 x 128": Fp8BlockLinear,
    "fp8 blocks of 128 x 64": Fp8WeightOnlyLinear,
    "mxfp8": Fp8WeightOnlyLinear,
    "mxfp8, as fp8": Fp8WeightOnlyLinear,
    "fp8 per tensor, static": Fp8Linear,
    "fp8 per tensor, dynamic": Fp8Linear,
    "fp8 per tensor, nothing ignored": Fp8Linear,
    "fbgemm_fp8": Fp8Linear,
}


def make(folder: Path, name: str) -> Any:
    pack, config = variants.VARIANTS[name]
    return foreign.write_as(folder, foreign.llama(), pack, config, shards=1)


@pytest.mark.usefixtures("epiloq_in_transformers")
@pytest.mark.filterwarnings("ignore:.*no kernel supports")
@pytest.mark.parametrize("name", variants.VARIANTS)
def test_opened_everywhere(seed: int, tmp_path: Path, name: str) -> None:
    exact = make(tmp_path / "in", name)
    model, _ = models.load(Checkpoint(tmp_path / "in"))
    assert type(model.get_submodule(UP)) is RUNS.get(name, WeightOnlyLinear)
    for layer, values in weights(tmp_path / "in").items():
        torch.testing.assert_close(values, exact.get_parameter(layer), rtol=1e-6, atol=0)
    expected, wanted = logits(model), logits(exact)
    # With quantised activations a little further off.
    assert float((expected - wanted).norm() / wanted.norm()) < (1e-5 if name not in RUNS else 0.15)
    theirs = opened(tmp_path / "in")
    assert torch.equal(logits(theirs), expected)
    theirs.save_pretrained(tmp_path / "saved")
    assert same(weights(tmp_path / "saved"), weights(tmp_path / "in"))
    convert.perform(convert.prepare(tmp_path / "in", tmp_path / "epiloq", "epiloq"))
    assert torch.equal(logits(models.load(Checkpoint(tmp_path / "epiloq"))[0]), expected)
    result = run("inspect", tmp_path / "in", "--check", "--json", tmp_path / "facts.json")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "facts.json").read_text())["wrong"] == {}


@torch.no_grad()
@pytest.mark.usefixtures("epiloq_in_transformers")
@pytest.mark.parametrize("name", ["groups by expression, name and class", "gptq dynamic", "auto-round"])
def test_the_base_model_alone(seed: int, tmp_path: Path, name: str) -> None:
    """The configuration has names of the whole model's layers, also of the base model's files."""
    exact, tokens = make(tmp_path / "in", name), torch.arange(1, 25).view(2, 12)
    expected = exact.model(tokens).last_hidden_state
    base = transformers.AutoModel.from_pretrained(tmp_path / "in")
    base.save_pretrained(tmp_path / "base")
    again = transformers.AutoModel.from_pretrained(tmp_path / "base")
    for found in (base, again, models.from_directory(tmp_path / "base")):
        torch.testing.assert_close(found(tokens).last_hidden_state, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "groups by expression, name and class",
        "layouts that differ",
        "int8 per tensor",
        "int8 weights alone",
        "fp8 weights alone",
        "fp8 weights alone, per tensor",
        "fp8 weights alone, in groups",
        "mxfp8 of compressed-tensors",
        "mxfp8 of compressed-tensors, weights alone",
        "5 bits",
        "7 bits per channel",
        "5 bits in bytes",
    ],
)
def test_dequantisation_matches_the_package(seed: int, tmp_path: Path, name: str) -> None:
    """Stock transformers with compressed-tensors restores the weights that epiloq reads, by its own matching."""
    pytest.importorskip("compressed_tensors")
    make(tmp_path / "in", name)
    # The package restores MXFP8 in bfloat16, which holds it exactly.
    dtype = torch.bfloat16 if "mxfp8" in name else torch.float32
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in", dtype=dtype)
    logits(theirs)  # Weights are restored by the first call.
    for layer, values in weights(tmp_path / "in").items():
        torch.testing.assert_close(theirs.get_parameter(layer), values.to(dtype), rtol=1e-6, atol=0)


def test_layers_that_differ_convert(seed: int, tmp_path: Path) -> None:
    """Exceptions become groups of compressed-tensors, and groups exceptions of GPTQ."""
    make(tmp_path / "0", "auto-round")
    for step, layout in enumerate(("compressed-tensors", "gptq", "epiloq", "compressed-tensors")):
        convert.perform(convert.prepare(tmp_path / f"{step}", tmp_path / f"{step + 1}", layout))
        assert same(weights(tmp_path / f"{step + 1}"), weights(tmp_path / "0")), layout
    assert (tmp_path / "1" / "config.json").read_text() == (tmp_path / "4" / "config.json").read_text()
    dynamic = json.loads((tmp_path / "2" / "config.json").read_text())["quantization_config"]["dynamic"]
    assert dynamic[r"+:^model\.layers\.0\.mlp\.down_proj$"] == {"bits": 8, "group_size": -1, "sym": True}
    assert r"-:^model\.layers\.0\.self_attn\.v_proj$" in dynamic


def test_activations_are_limited(seed: int, tmp_path: Path) -> None:
    """As fbgemm does: the scale of a token is at most the limit / 448, and what is larger saturates."""
    pack, config = variants.VARIANTS["fbgemm_fp8"]
    foreign.write_as(tmp_path / "in", foreign.llama(), pack, config | {"activation_scale_ub": 2.0})
    layer = models.load(Checkpoint(tmp_path / "in"))[0].get_submodule(UP)
    x = torch.randn(9, 64) * 3
    scale = x.abs().amax(1, keepdim=True).clamp(max=2.0) / 448
    q = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    expected = q.double() @ layer.weight.double().t()
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("beside", ["quantize_config.json", "quant_config.json"])
def test_descriptions_beside_config_json(seed: int, tmp_path: Path, beside: str) -> None:
    """What older AutoGPTQ and AutoAWQ wrote; the first names the file of weights too."""
    pack, message = (foreign_layers.gptq(), {"bits": 4, "group_size": 32, "desc_act": False, "sym": False})
    if beside == "quant_config.json":
        pack, message = foreign_layers.awq, {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    exact = foreign.write_as(tmp_path / "in", foreign.llama(), pack, None, shards=1)
    if beside == "quantize_config.json":
        message["model_file_base_name"] = "gptq_model-4bit-32g"
        (tmp_path / "in" / "model.safetensors").rename(tmp_path / "in" / "gptq_model-4bit-32g.safetensors")
    (tmp_path / "in" / beside).write_text(json.dumps(message))
    for layer, values in weights(tmp_path / "in").items():
        torch.testing.assert_close(values, exact.get_parameter(layer), rtol=1e-6, atol=0)
    convert.perform(convert.prepare(tmp_path / "in", tmp_path / "out", "compressed-tensors"))
    assert same(weights(tmp_path / "out"), weights(tmp_path / "in"))


@pytest.mark.usefixtures("epiloq_in_transformers")
@pytest.mark.parametrize("beside", ["quantize_config.json", "quant_config.json"])
def test_transformers_opens_what_is_described_beside(seed: int, tmp_path: Path, beside: str) -> None:
    """The same logits as with the description in config.json; a directory in floating point is opened as ever."""
    pack, message = (foreign_layers.gptq(), {"bits": 4, "group_size": 32, "desc_act": False, "sym": False})
    method: dict[str, Any] = {"quant_method": "gptq"}
    if beside == "quant_config.json":
        pack, message = foreign_layers.awq, {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
        method = {"quant_method": "awq"}
    model, tokens = foreign.llama(), torch.randint(0, 256, (1, 9))
    foreign.write_as(tmp_path / "usual", model, pack, message | method)
    shutil.copytree(tmp_path / "usual", tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    (tmp_path / "in" / beside).write_text(json.dumps(message))
    results = [opened(tmp_path / name) for name in ("in", "usual")]
    assert any(type(module).__module__.startswith("epiloq.nn") for module in results[0].modules())
    found, expected = (result(tokens).logits for result in results)
    assert torch.equal(found, expected)
    results[0].save_pretrained(tmp_path / "again")
    assert torch.equal(opened(tmp_path / "again")(tokens).logits, expected)
    foreign.write_as(tmp_path / "float", model, lambda name, layer: None, None)
    (tmp_path / "float" / beside).write_text(json.dumps(message))
    torch.testing.assert_close(opened(tmp_path / "float")(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gptq without g_idx", {"dynamic": {"-:.*up_proj": {}}}),
        ("gptq without g_idx", {"modules_to_not_convert": ["mlp"]}),
        ("auto-round, awq", {"extra_config": {UP: {"bits": 16}}}),
        ("fp8 per tensor, static", {"ignored_layers": ["lm_head", "model.layers.0.mlp"]}),
        ("fbgemm_fp8", {"modules_to_not_convert": [UP]}),
        ("int8 weights alone", {"ignore": [UP]}),
        ("int8 weights alone", {"config_groups": {"a": variants.ct_group(["re:.*self_attn.*"], variants.args())}}),
    ],
)
@pytest.mark.usefixtures("epiloq_in_transformers")
def test_tensors_of_layers_that_are_left_out(seed: int, tmp_path: Path, name: str, change: dict[str, Any]) -> None:
    """Files that hold a quantised layer, and a configuration that says there is none: one of them is wrong."""
    pack, config = variants.VARIANTS[name]
    foreign.write_as(tmp_path / "in", foreign.llama(), pack, config | change)
    for read in (opened, models.from_directory):
        with pytest.raises(ValueError, match=r"mlp\.\w+\.\w+: .*config.json leaves .*mlp\.\w+ in floating point"):
            read(tmp_path / "in")


@pytest.mark.usefixtures("epiloq_in_transformers")
@pytest.mark.parametrize("name", ["fp8 per tensor, dynamic", "fbgemm_fp8", "mxfp8", "fp8 blocks of 64 x 128"])
@pytest.mark.filterwarnings("ignore:.*no kernel supports")
def test_names_that_transformers_does_not_match(seed: int, tmp_path: Path, name: str) -> None:
    """It quantises layers of which only a part in the middle is listed, and then lists it in config.json."""
    pack, config = variants.VARIANTS[name]
    listed = ["lm_head", "mlp", "self_attn", "layers.0", "re:.*proj", "up", "*"]
    foreign.write_as(tmp_path / "in", foreign.llama(), pack, config | {"modules_to_not_convert": listed})
    found = models.from_directory(tmp_path / "in")
    assert type(found.get_submodule(UP)) is RUNS[name]
    assert torch.equal(logits(opened(tmp_path / "in")), logits(found))


@given(st.lists(st.text("ab.*|u", max_size=6)), st.text("ab.u", min_size=1, max_size=12))
@settings(max_examples=300, deadline=None)
def test_the_rule_is_that_of_transformers(listed: list[str], layer: str) -> None:
    with contextlib.suppress(re.error):
        expected = not quantizers_utils.should_convert_module(layer, [name for name in listed if name])
        assert skips(listed, layer) == expected


@pytest.mark.usefixtures("epiloq_in_transformers")
@pytest.mark.parametrize("tied", [False, True])
def test_a_quantised_head(seed: int, tmp_path: Path, tied: bool) -> None:
    """Which is not the embedding, whatever config.json says, because the files have both."""
    model = foreign.llama()
    pack, config = variants.VARIANTS["gptq without g_idx"]
    foreign.write_as(tmp_path / "in", model, pack, config | {"lm_head": True}, shards=1)
    head = nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)
    packed = pack("lm_head", head)
    assert packed is not None
    file, message = tmp_path / "in" / "model.safetensors", tmp_path / "in" / "config.json"
    tensors = {name: tensor for name, tensor in load_file(file).items() if name != "lm_head.weight"}
    save_file(tensors | {f"lm_head.{part}": tensor for part, tensor in packed[0].items()}, file, {"format": "pt"})
    message.write_text(json.dumps(json.loads(message.read_text()) | {"tie_word_embeddings": tied}))
    embedding = tensors["model.embed_tokens.weight"]
    results = [models.load(Checkpoint(tmp_path / "in"))[0], opened(tmp_path / "in")]
    for found in results:
        assert type(found.lm_head) is WeightOnlyLinear
        assert torch.equal(found.model.embed_tokens.weight, embedding)
        with torch.no_grad():
            hidden = found.model(torch.arange(9)[None]).last_hidden_state
            torch.testing.assert_close(found.lm_head(hidden), hidden @ packed[1].t(), rtol=1e-4, atol=1e-5)
    results[1].save_pretrained(tmp_path / "again")
    assert torch.equal(logits(opened(tmp_path / "again")), logits(results[0]))


def test_files_lack_what_a_model_computes(seed: int, tmp_path: Path) -> None:
    """Sines of positions, which transformers leaves out of files; a missing trained tensor is still refused."""
    sizes = {f"{part}_{size}": value for part in ("encoder", "decoder") for size, value in _OF_PARTS.items()}
    ids = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1}
    exact = transformers.MarianMTModel(transformers.MarianConfig(d_model=64, vocab_size=128, **sizes, **ids)).eval()
    folder = tmp_path / "in"
    foreign.write_as(folder, exact, *variants.VARIANTS["int8 weights alone"], shards=1)
    tensors = load_file(folder / "model.safetensors")
    left = {name: tensor for name, tensor in tensors.items() if "embed_positions" not in name}
    assert len(left) == len(tensors) - 2
    save_file(left, folder / "model.safetensors", {"format": "pt"})
    tokens = {"input_ids": torch.arange(2, 13)[None], "decoder_input_ids": torch.arange(3, 9)[None]}
    with torch.no_grad():
        found, wanted = (model(**tokens).logits for model in (models.load(Checkpoint(folder))[0], exact))
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5
    del left["model.encoder.layers.0.fc1.bias"]
    save_file(left, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.0\.fc1\.bias: expected a tensor, found none"):
        models.load(Checkpoint(folder))


_OF_PARTS = {"layers": 1, "attention_heads": 4, "ffn_dim": 96}
