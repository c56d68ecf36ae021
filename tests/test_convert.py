"""`epiloq convert`: the same weights in another format, and the reason where a format has no words for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import epiloq
from epiloq.cli import app
from epiloq.demo import DemoError
from epiloq.demo.teacher import find_gguf
from epiloq.formats import convert, deepseek_fp8, epiloq_modules
from epiloq.formats import model as models
from epiloq.formats.checkpoint import Checkpoint, Writer, carry_over
from epiloq.formats.layers import Layers
from epiloq.formats.layouts import FormatError, Quantization
from epiloq.formats.model import Target
from epiloq.formats.table import FORMATS
from epiloq.quantize import Grid, QuantizedWeight, gptq, rtn
from epiloq.schemes import default_filter
from tiny_teacher import save, tiny_model

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app.create_app(), [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "model"
    save(folder, tiny_model(**SIZES))
    (folder / "LICENSE").write_text("mine")
    (folder / "templates").mkdir()
    (folder / "templates" / "tool.jinja").write_text("{{ x }}")
    for name in ("pytorch_model.bin", "quantize_config.json", ".hidden", "pytorch_model.bin.index.json"):
        (folder / name).write_text("{}")
    return folder


def written(
    teacher: Path, folder: Path, layout: str, quantization: Quantization, change: Callable[[QuantizedWeight], Any]
) -> Path:
    """The teacher rounded to a grid (and changed), in a format."""
    checkpoint = Checkpoint(teacher)
    model = models.load_float(checkpoint)
    takes = default_filter(model)
    target = Target(FORMATS[layout], quantization, torch.float32, Writer(folder))
    grid = replace(quantization.grid, scale_dtype=torch.float16)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, module in linears.items():
        if takes(module, name):
            target.layer(name, change(rtn(module.weight, grid)), quantization)
    for name, tensor in checkpoint.tensors():
        if name.removesuffix(".weight") not in target.quantised:
            target.writer.add(name, tensor)
    target.close(checkpoint.config, linears)
    carry_over(teacher, folder)
    return folder


def unchanged(weight: QuantizedWeight) -> QuantizedWeight:
    return weight


def weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor that a directory stands for, quantised layers de-quantised."""
    layers = Layers(Checkpoint(folder))
    found = {f"{name}.weight": layers.weight(name).dequantize() for name in layers.readers}
    return found | {name: layers.checkpoint.tensor(name) for name in layers.rest}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


INT4 = Quantization(Grid(4, 32, symmetric=False))
SAYABLE = {
    "int4 asymmetric": (INT4, ("compressed-tensors", "gptq", "awq", "epiloq")),
    "int4 symmetric": (Quantization(Grid(4, 32, symmetric=True)), ("compressed-tensors", "gptq", "epiloq")),
    "int8 channel": (Quantization(Grid(8, -1, symmetric=True)), ("compressed-tensors", "gptq", "epiloq")),
    "int8 asymmetric": (Quantization(Grid(8, 32, symmetric=False)), ("compressed-tensors", "gptq", "epiloq")),
    "w8a8": (Quantization(Grid(8, -1, symmetric=True), "int8"), ("compressed-tensors", "epiloq")),
    "w8a8 azp": (Quantization(Grid(8, -1, symmetric=True), "int8-azp"), ("compressed-tensors", "epiloq")),
}
PAIRS = [(kind, *pair) for kind, (_, names) in SAYABLE.items() for pair in permutations(names, 2)]


@pytest.mark.parametrize(("kind", "source", "target"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_weights_stay(teacher: Path, tmp_path: Path, kind: str, source: str, target: str) -> None:
    written(teacher, tmp_path / "in", source, SAYABLE[kind][0], unchanged)
    report = convert.perform(convert.prepare(tmp_path / "in", tmp_path / "out", target), largest_shard=40_000)
    assert report["layers"] == 14 and (report["from"], report["to"]) == (source, target)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert same(weights(tmp_path / "in"), weights(tmp_path / "out"))
    layers = Layers(Checkpoint(tmp_path / "out"))
    assert layers.format == target
    described = layers.quantization
    assert described is not None and described.activations == SAYABLE[kind][0].activations
    assert layers.unquantised == ["lm_head"]
    back = convert.perform(convert.prepare(tmp_path / "out", tmp_path / "back", source))
    assert back["bytes_after"] == report["bytes_before"]
    assert same(dict(Checkpoint(tmp_path / "back").tensors()), dict(Checkpoint(tmp_path / "in").tensors()))
    said = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("in", "back")]
    assert said[0] == said[1]


@pytest.mark.parametrize("symmetric", [False, True])
def test_three_bits(tmp_path: Path, symmetric: bool) -> None:
    """Fields that go on in the next word, of sizes that fill periods of 32."""
    save(tmp_path / "model", tiny_model(**{**SIZES, "head_dim": 32}))
    kind, chain = Quantization(Grid(3, 32, symmetric)), ("gptq", "compressed-tensors", "epiloq", "gptq")
    written(tmp_path / "model", tmp_path / "0", chain[0], kind, unchanged)
    for step, layout in enumerate(chain[1:]):
        convert.perform(convert.prepare(tmp_path / f"{step}", tmp_path / f"{step + 1}", layout))
        assert same(weights(tmp_path / "0"), weights(tmp_path / f"{step + 1}"))
    first, last = (dict(Checkpoint(tmp_path / name).tensors()) for name in "03")
    assert same(first, last)
    with pytest.raises(FormatError, match="cannot say 3 bits, only 4 bits"):
        convert.prepare(tmp_path / "0", tmp_path / "no", "awq")


def test_biases_of_zeros_are_left_aside(teacher: Path, tmp_path: Path) -> None:
    """AutoGPTQ writes them for layers without one."""
    written(teacher, tmp_path / "in", "gptq", INT4, unchanged)
    file = tmp_path / "in" / "model.safetensors"
    tensors, name = load_file(file), "model.layers.0.mlp.up_proj.bias"
    save_file(tensors | {name: torch.zeros(96, dtype=torch.float16)}, file)
    model, _ = models.load(Checkpoint(tmp_path / "in"))
    assert model.get_submodule("model.layers.0.mlp.up_proj").bias is None
    save_file(tensors | {name: torch.ones(96, dtype=torch.float16)}, file)
    with pytest.raises(FormatError, match=f"{name}: not a tensor of this model"):
        Layers(Checkpoint(tmp_path / "in"))


def test_symmetric_weights_in_awq(teacher: Path, tmp_path: Path) -> None:
    """awq has zero points always: 8 for symmetric weights, and no way back to none."""
    written(teacher, tmp_path / "in", "gptq", SAYABLE["int4 symmetric"][0], unchanged)
    convert.perform(convert.prepare(tmp_path / "in", tmp_path / "out", "awq"))
    assert same(weights(tmp_path / "in"), weights(tmp_path / "out"))
    convert.perform(convert.prepare(tmp_path / "out", tmp_path / "again", "epiloq"))
    assert same(weights(tmp_path / "in"), weights(tmp_path / "again"))


@pytest.mark.parametrize("target", ["deepseek-fp8", "epiloq"])
def test_fp8_blocks(tmp_path: Path, target: str) -> None:
    """Sizes above and below 128 that are no multiples of it."""
    odd = {"hidden_size": 136, "intermediate_size": 200, "num_attention_heads": 4, "head_dim": 34}
    model = epiloq.quantize_(tiny_model(**odd), "fp8-block")
    stores = {"deepseek-fp8": deepseek_fp8.save, "epiloq": epiloq_modules.save}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)
        stores.pop(target)
        (store,) = stores.values()
        store(model, tmp_path / "in")
    convert.perform(convert.prepare(tmp_path / "in", tmp_path / "out", target))
    assert same(weights(tmp_path / "in"), weights(tmp_path / "out"))
    tokens = torch.arange(40)[None] * 5
    again, _ = models.load(Checkpoint(tmp_path / "out"))
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)


def ordered(weight: QuantizedWeight) -> QuantizedWeight:
    """Groups in activation order, as GPTQ makes them without static groups."""
    x = torch.randn(200, weight.q.shape[1]) * torch.rand(weight.q.shape[1])
    grid = replace(weight.grid, scale_dtype=torch.float16)
    return gptq(weight.dequantize(), x.t() @ x, grid, static_groups=False)


def test_activation_order(seed: int, teacher: Path, tmp_path: Path) -> None:
    written(teacher, tmp_path / "in", "gptq", INT4, ordered)
    assert json.loads((tmp_path / "in" / "config.json").read_text())["quantization_config"]["desc_act"] is True
    report = convert.perform(convert.prepare(tmp_path / "in", tmp_path / "out", "epiloq"))
    assert report["act_order"] is True
    assert same(weights(tmp_path / "in"), weights(tmp_path / "out"))
    convert.perform(convert.prepare(tmp_path / "out", tmp_path / "back", "gptq"))
    assert same(dict(Checkpoint(tmp_path / "back").tensors()), dict(Checkpoint(tmp_path / "in").tensors()))
    for target in ("awq", "compressed-tensors"):
        result = run("convert", tmp_path / "in", tmp_path / "no", "--format", target)
        assert result.exit_code == 2 and "activation order" in result.output and "proj" in result.output
        assert not (tmp_path / "no").exists()


def sixteen(weight: QuantizedWeight) -> QuantizedWeight:
    assert weight.zero is not None
    return replace(weight, zero=torch.full_like(weight.zero, 16))


def test_zero_points_of_the_first_gptq(teacher: Path, tmp_path: Path) -> None:
    """Its 15 stands for 16, which epiloq's format says too, and the others have no field for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("epiloq.formats.table._gptq_version", lambda quantization: "gptq")
        patch.setattr("epiloq.formats.table.on_grid", lambda weight, name: weight)
        written(teacher, tmp_path / "in", "gptq", INT4, sixteen)
    for target in ("awq", "compressed-tensors"):
        result = run("convert", tmp_path / "in", tmp_path / "no", "--format", target)
        assert result.exit_code == 2 and "zero point of 16" in result.output
    convert.perform(convert.prepare(tmp_path / "in", tmp_path / "out", "epiloq"))
    assert same(weights(tmp_path / "in"), weights(tmp_path / "out"))
    result = run("convert", tmp_path / "out", tmp_path / "no", "--format", "gptq")
    assert result.exit_code == 2 and "zero point of 16" in result.output
    assert not (tmp_path / "no").exists()


def wide(weight: QuantizedWeight) -> QuantizedWeight:
    return replace(weight, scale=weight.scale * (1 + 2**-20))


def test_scales_that_would_be_rounded(teacher: Path, tmp_path: Path) -> None:
    written(teacher, tmp_path / "in", "compressed-tensors", INT4, wide)
    convert.perform(convert.prepare(tmp_path / "in", tmp_path / "out", "epiloq"))
    assert same(weights(tmp_path / "in"), weights(tmp_path / "out"))
    for target in ("gptq", "awq"):
        result = run("convert", tmp_path / "in", tmp_path / "no", "--format", target)
        assert result.exit_code == 2 and "float16" in result.output and not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("kind", "target", "said"),
    [
        ("int8 channel", "awq", "cannot say 8 bits"),
        ("w8a8", "gptq", "activations cannot be said"),
        ("w8a8", "awq", "activations cannot be said"),
        ("int4 asymmetric", "deepseek-fp8", "cannot say integers of 4 bits, only FP8 in blocks of 128 x 128"),
        ("int4 asymmetric", "compressed-tensors", "is in the format compressed-tensors already"),
        ("int4 asymmetric", "gguf", "there are compressed-tensors, gptq, awq, deepseek-fp8, epiloq"),
    ],
)
def test_reasons(teacher: Path, tmp_path: Path, kind: str, target: str, said: str) -> None:
    written(teacher, tmp_path / "in", "compressed-tensors", SAYABLE[kind][0], unchanged)
    result = run("convert", tmp_path / "in", tmp_path / "out", "--format", target)
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", " ").split())
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("scheme", ["fp8", "fp8-token", "w8a8-block", "w4a8-block"])
def test_what_only_epiloq_says(tmp_path: Path, scheme: str) -> None:
    epiloq_modules.save(epiloq.quantize_(tiny_model(**SIZES), scheme), tmp_path / "in")
    for target in ("compressed-tensors", "gptq", "awq", "deepseek-fp8"):
        with pytest.raises(FormatError, match=r"cannot say (Fp8Linear|OnlineQuantLinear)\("):
            convert.prepare(tmp_path / "in", tmp_path / "out", target)


def test_layers_that_differ(tmp_path: Path) -> None:
    model = epiloq.quantize_(tiny_model(**SIZES), "w8a16", lambda module, name: name.endswith("q_proj"))
    epiloq_modules.save(epiloq.quantize_(model, "w4a16-g32"), tmp_path / "in")
    assert len(json.loads((tmp_path / "in" / "config.json").read_text())["quantization_config"]["modules"]) == 2
    with pytest.raises(FormatError, match="not all alike"):
        convert.prepare(tmp_path / "in", tmp_path / "out", "compressed-tensors")


def test_what_else_is_in_the_directory(teacher: Path, tmp_path: Path) -> None:
    written(teacher, tmp_path / "in", "awq", INT4, unchanged)
    result = run("convert", tmp_path / "in", tmp_path / "out", "--format", "gptq", "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "r.json").read_text())["layers"] == 14
    expected = {"config.json", "model.safetensors", "LICENSE", "templates/tool.jinja", "generation_config.json"}
    found = {str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*") if file.is_file()}
    assert expected <= found and {name for name in found - expected if not name.startswith("tokenizer")} == set()
    for name in found - {"config.json", "model.safetensors"}:
        assert (tmp_path / "out" / name).read_bytes() == (teacher / name).read_bytes()


def test_existing_output_and_failures(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(teacher, tmp_path / "in", "awq", INT4, unchanged)
    (tmp_path / "out").mkdir()
    result = run("convert", tmp_path / "in", tmp_path / "out", "--format", "gptq")
    assert result.exit_code == 2 and "exists already" in result.output and list((tmp_path / "out").iterdir()) == []
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert run("convert", tmp_path / "in", tmp_path / "link", "--format", "gptq").exit_code == 2
    before = sorted(tmp_path.iterdir())
    for error, code in ((OSError(28, "No space left on device"), 1), (KeyboardInterrupt(), 130)):

        def fails(*_: object, error: BaseException = error) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(Writer, "close", fails)
            result = run("convert", tmp_path / "in", tmp_path / "new", "--format", "gptq")
        assert result.exit_code == code, result.output
        assert sorted(tmp_path.iterdir()) == before
    assert run("convert", teacher, tmp_path / "new", "--format", "gptq").exit_code == 2
    assert run("convert", tmp_path / "absent", tmp_path / "new", "--format", "gptq").exit_code == 2
    assert sorted(tmp_path.iterdir()) == before


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
