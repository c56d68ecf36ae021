"""Directories and requests that transformers with epiloq refuses: one ValueError, which names file and tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

import epiloq.integrations.transformers as integration
import foreign_checkpoints as foreign
from bitsandbytes_layers import KINDS
from epiloq import optimize_
from epiloq.integrations.transformers import EpiloqConfig
from epiloq.schemes import quantize_
from opened_models import logits, opened

# Other tests want transformers as it is.
integration.unregister()
pytestmark = pytest.mark.usefixtures("epiloq_in_transformers")
UP = "model.layers.1.mlp.up_proj"
WEIGHTS = "model.safetensors"
FOLDERS = ("gptq", "awq", "pack-quantized", "int-quantized", "float-quantized", "fp8")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in floating point and as other tools quantise it."""
    folder = tmp_path_factory.mktemp("whole")
    foreign.llama().save_pretrained(folder / "float")
    for tool in FOLDERS:
        foreign.write(folder / tool, foreign.llama(), tool, shards=1)
    return folder


Tensors = dict[str, torch.Tensor]


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {other: tensor for other, tensor in tensors.items() if other != name}


def having(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: change(tensors[name]).contiguous()}


def also(name: str, tensor: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: tensor}


def fewer(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[1:]


@pytest.mark.parametrize(
    ("tool", "change", "message"),
    [
        ("gptq", having(f"{UP}.qweight", fewer), rf"{WEIGHTS}: {UP}: qweight: expected torch.int32 \[8, 192\]"),
        ("gptq", without(f"{UP}.qzeros"), f"{WEIGHTS}: {UP}: qzeros: expected a tensor"),
        ("gptq", without(f"{UP}.qweight"), f"gptq: {UP}.weight: expected a tensor"),
        ("gptq", having(f"{UP}.g_idx", torch.zeros_like), f"{UP}: gptq: g_idx: expected 32 channels"),
        ("gptq", also(f"{UP}.bias", torch.zeros(3)), f"{UP}.bias: expected .*[192]"),
        ("awq", without("model.norm.weight"), "awq: model.norm.weight: expected a tensor, found none"),
        ("awq", having("model.norm.weight", fewer), rf"{WEIGHTS}: model.norm.weight: expected .* \[64\], got F32"),
        ("awq", having("model.norm.weight", torch.Tensor.int), f"{WEIGHTS}: model.norm.weight: expected torch.float32"),
        ("awq", also("model.norm.qweight", torch.zeros(3)), "model.norm: expected a linear layer model.norm"),
        (
            "awq",
            also("model.layers.2.mlp.up_proj.qweight", torch.zeros(3)),
            "up_proj in LlamaForCausalLM, found nothing",
        ),
        ("awq", also("lm_head.qweight", torch.zeros(3)), rf"{WEIGHTS}: lm_head: qweight: expected torch.int32"),
        (
            "awq",
            lambda tensors: without("model.embed_tokens.weight")(tensors) | {"lm_head.qweight": torch.zeros(3)},
            'lm_head: expected .* ties it to another.*write "tie_word_embeddings": false',
        ),
        (
            "fp8",
            also("model.layers.2.input_layernorm.weight", torch.ones(64)),
            r"layers\.2\.input_layernorm\.weight: not a tensor .*model\.layers has 2 by config\.json",
        ),
        ("fp8", also("norm.weight", torch.ones(64)), r"norm\.weight: is renamed to model\.norm\.weight, and so is"),
        (
            "gptq",
            also("layers.1.mlp.up_proj.qweight", torch.zeros(8, 192, dtype=torch.int32)),
            rf"qweight: is renamed to {UP}\.qweight, and so is layers\.1",
        ),
        ("gptq", also("model.norm.bias", torch.ones(64)), r"model\.norm\.bias: not a tensor of this model"),
        ("pack-quantized", without(f"{UP}.weight_zero_point"), f"{UP}: weight_zero_point: expected a tensor"),
        ("pack-quantized", having(f"{UP}.weight_shape", lambda t: t + 1), r"weight_shape: expected \[192, 64\]"),
        ("pack-quantized", also(f"{UP}.weight_g_idx", torch.zeros(64)), f"{UP}: weight_g_idx: expected torch.int32"),
        ("int-quantized", having(f"{UP}.weight", torch.Tensor.float), f"{UP}: weight: expected torch.int8"),
        ("int-quantized", without(f"{UP}.weight_scale"), rf"{UP}.weight: expected torch.float32 .*, got I8"),
        (
            "float-quantized",
            having(f"{UP}.weight_scale", fewer),
            rf"{WEIGHTS}: {UP}: weight_scale: expected floating point \[192, 1\]",
        ),
        ("float-quantized", without(f"{UP}.weight_scale"), rf"{UP}.weight: expected torch.float32 .*, got F8_E4M3"),
        ("float-quantized", also(f"{UP}.input_scale", torch.ones(1)), "weight, weight_scale, .*got input_scale"),
        (
            "fp8",
            having(f"{UP}.weight_scale_inv", lambda t: t[:1]),
            r"weight_scale_inv: expected floating point \[2, 1\]",
        ),
        ("fp8", without(f"{UP}.weight_scale_inv"), f"{UP}.weight: expected torch.float32 .*, got F8_E4M3"),
        ("fp8", having(f"{UP}.weight", lambda t: t.to(torch.float8_e5m2)), "weight: expected torch.float8_e4m3fn"),
    ],
)
def test_tensors_that_disagree(
    whole: Path, tmp_path: Path, tool: str, change: Callable[[Tensors], Tensors], message: str
) -> None:
    shutil.copytree(whole / tool, tmp_path / tool)
    file = tmp_path / tool / WEIGHTS
    save_file(change(load_file(file)), file, {"format": "pt"})
    with pytest.raises(ValueError, match=message) as error:
        opened(tmp_path / tool)
    assert str(tmp_path / tool) in str(error.value) and len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj", "model.layers.1.mlp.other_proj"])
def test_layers_that_a_base_model_lacks(whole: Path, tmp_path: Path, name: str) -> None:
    """A base model does not need the head of the files, but they have the rest of it under a prefix."""
    shutil.copytree(whole / "gptq", tmp_path / "gptq")
    file = tmp_path / "gptq" / WEIGHTS
    tensors = load_file(file)
    tensors |= {f"{name}.{part}": tensors[f"{UP}.{part}"].clone() for part in ("qweight", "qzeros", "scales", "g_idx")}
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"expected a linear layer .*{name.removeprefix('model.')} in LlamaModel"):
        transformers.AutoModel.from_pretrained(tmp_path / "gptq")


@pytest.mark.parametrize(
    ("tool", "change", "message"),
    [
        ("gptq", {"bits": 8}, f"{WEIGHTS}: model.layers.0.*: qweight: expected torch.int32"),
        ("gptq", {"bits": 9}, "config.json: quantization_config: bits: expected 2 to 8, got 9"),
        ("gptq", {"bits": None}, "config.json: gptq: quantization_config: expected bits and group_size"),
        ("gptq", {"checkpoint_format": "marlin"}, "config.json: gptq: checkpoint_format: expected one of"),
        ("awq", {"bits": 3}, "config.json: awq: quantization_config: expected 4 bits"),
        ("awq", {"version": "marlin"}, "config.json: awq: version: expected one of gemm, gemv, gemv_fast"),
        ("awq", {"version": "gemv"}, rf"{WEIGHTS}: model.layers.0.*: q(weight|zeros): expected torch.int32"),
        ("pack-quantized", {"config_groups": {}}, "config.json: compressed-tensors: config_groups"),
        ("fp8", {"weight_block_size": [64]}, r"config.json: .*weight_block_size: expected rows and columns"),
        ("awq", {"quant_method": "gptq", "sym": False}, "zero_point: epiloq does not know .*, got True"),
    ],
)
def test_configurations_that_disagree(
    whole: Path, tmp_path: Path, tool: str, change: dict[str, Any], message: str
) -> None:
    shutil.copytree(whole / tool, tmp_path / tool)
    file = tmp_path / tool / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= change
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message) as error:
        opened(tmp_path / tool)
    assert str(tmp_path / tool) in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 3}, r"model.layers.2.*: expected a tensor, found none"),
        ({"num_hidden_layers": 1}, r"model.layers.1.*: expected a linear layer .* found nothing"),
        ({"hidden_size": 128}, r"model.*: expected .*64"),
    ],
)
def test_models_that_disagree(whole: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    shutil.copytree(whole / "awq", tmp_path / "awq")
    file = tmp_path / "awq" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        opened(tmp_path / "awq")


def test_truncated_files(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "awq", tmp_path / "awq")
    file = tmp_path / "awq" / WEIGHTS
    tensors = load_file(file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=WEIGHTS):
        opened(tmp_path / "awq")
    file.unlink()
    torch.save(tensors, tmp_path / "awq" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"expected model\.safetensors"):
        opened(tmp_path / "awq")


@pytest.mark.parametrize(
    ("tool", "options", "message"),
    [
        ("awq", {"dtype": torch.float64}, "dtype: expected one of torch.float32"),
        ("awq", {"dtype": torch.int8}, "dtype|floating"),
        (
            "awq",
            {"key_mapping": {"q_proj": "o_proj"}},
            "key_mapping: expected none with a quantised directory, got 'q_proj'; rename the tensors",
        ),
        ("float", {"quantization_config": EpiloqConfig()}, "scheme: expected one of .*w8a8-int8.* got None"),
        ("float", {"quantization_config": EpiloqConfig("w3")}, "got 'w3'"),
        ("float", {"quantization_config": EpiloqConfig("w8a8-int8-static")}, "got 'w8a8-int8-static'"),
        ("float", {"quantization_config": EpiloqConfig("conv-w8a16")}, "expected one of [^:]*, got 'conv-w8a16'"),
        (
            "float",
            {"quantization_config": EpiloqConfig("w8a8-int8", modules_to_not_convert=["model"])},
            "expected at least one",
        ),
    ],
)
def test_requests(whole: Path, tool: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        opened(whole / tool, **options)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ignore", "got 'ignore'; layers are left in floating point by modules_to_not_convert"),
        ("group_size", "scheme, modules_to_not_convert, quant_method, head, embedding, got 'group_size'"),
    ],
)
def test_unknown_arguments(whole: Path, tmp_path: Path, name: str, message: str) -> None:
    """Those of a caller are refused; unknown entries of config.json are kept."""
    with pytest.raises(TypeError, match=f"EpiloqConfig: .*{message}"):
        EpiloqConfig("w8a8-int8", **{name: ["model.layers.0"]})
    given = {"quant_method": "epiloq", "scheme": "w8a8-int8", name: ["model.layers.0"]}
    with pytest.raises(TypeError, match=f"EpiloqConfig: .*{message}"):
        opened(whole / "float", quantization_config=given)
    quantize_(foreign.llama(), "w8a8-int8").save_pretrained(tmp_path / "model")
    described = json.loads((tmp_path / "model" / "config.json").read_text())
    described["quantization_config"][name] = ["model.layers.0"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(described))
    opened(tmp_path / "model").save_pretrained(tmp_path / "again")
    opened(tmp_path / "model", quantization_config=EpiloqConfig())
    assert EpiloqConfig.from_dict(described["quantization_config"]).to_dict() == described["quantization_config"]


def test_layers_on_a_disk(whole: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    names = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", "model.layers.0")
    device_map = {**dict.fromkeys(names, "cpu"), "model.layers.1": "disk"}
    with pytest.raises(ValueError, match=r"model.layers.1.*offloaded; use a device_map"):
        opened(whole / "awq", device_map=device_map, offload_folder=tmp_path)


@pytest.mark.parametrize("merge_first", [False, True])
@pytest.mark.parametrize("tool", ["gptq in activation order", "awq", "pack-quantized", "float-quantized in blocks"])
def test_offloaded_by_accelerate(tmp_path: Path, tool: str, merge_first: bool) -> None:
    """Hooks bring the values of a layer when it runs, also where `optimize_` had merged it with others."""
    accelerate = pytest.importorskip("accelerate")
    foreign.write(tmp_path / "model", foreign.llama(), tool, shards=1)
    names = ("lm_head", "model.embed_tokens", "model.norm", "model.rotary_emb", "model.layers.1")
    device_map = {**dict.fromkeys(names, "cpu"), "model.layers.0": "disk"}
    offload: list[Callable[[Any], Any]] = [
        lambda model: accelerate.cpu_offload(model, torch.device("cpu"), offload_buffers=True),
        lambda model: accelerate.disk_offload(model, tmp_path / "disk", torch.device("cpu"), offload_buffers=True),
        lambda model: accelerate.dispatch_model(
            model, device_map, main_device="cpu", offload_dir=tmp_path / "some", force_hooks=True
        ),
    ]
    expected = logits(opened(tmp_path / "model"))
    for by in offload:
        model = opened(tmp_path / "model")
        if merge_first:
            optimize_(model)
            logits(model)
        by(model)
        assert any(parameter.is_meta for parameter in model.parameters())
        for _ in range(2):
            torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
        if not merge_first:
            optimize_(model)
            torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
        accelerate.hooks.remove_hook_from_submodules(model)
        torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a8-int8"])
def test_saving_offloaded_layers(tmp_path: Path, scheme: str) -> None:
    """They are on the meta device until a hook loads them: refused before a file is written, whole afterwards."""
    accelerate = pytest.importorskip("accelerate")
    model = quantize_(foreign.llama(), scheme)
    expected = logits(model)
    accelerate.cpu_offload(model, torch.device("cpu"), offload_buffers=True)
    assert torch.equal(logits(model), expected)
    with pytest.raises(ValueError, match=r"save_pretrained: .*: its values are offloaded; .*remove_hook_from_submod"):
        model.save_pretrained(tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))
    accelerate.hooks.remove_hook_from_submodules(model)
    model.save_pretrained(tmp_path / "out")
    assert torch.equal(logits(opened(tmp_path / "out")), expected)


@pytest.mark.parametrize("tool", ["gptq", "nf4"])
def test_files_beside_those_of_the_directory_are_refused(seed: int, tmp_path: Path, tool: str) -> None:
    """Some tensors are not read by transformers (scales of bitsandbytes): they would be those of the other file."""
    pack, config = (foreign.TOOLS | KINDS)[tool]
    for name in ("model", "other"):
        foreign.write_as(tmp_path / name, foreign.llama(), lambda _, linear: pack(linear), config, shards=1)
    shutil.copy(tmp_path / "other" / WEIGHTS, tmp_path / "model" / "model.fp16.safetensors")
    opened(tmp_path / "model")
    with pytest.raises(ValueError, match=r"to load model\.safetensors, got model\.fp16\.safetensors; leave out"):
        opened(tmp_path / "model", variant="fp16")
    torch.save(load_file(tmp_path / "other" / WEIGHTS), tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"to load model\.safetensors, got pytorch_model\.bin; leave out"):
        opened(tmp_path / "model", use_safetensors=False)
