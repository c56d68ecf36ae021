"""``epiloq quantize`` of every scheme, in every format that can represent it."""

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

from safetensors.torch import load_file

import epiloq
from command_line import WIDE, logits, quantize, run, teacher_and_text, text
from epiloq.evaluation.text import SEED, load_tokenizer, read_texts, sample, windows
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.layers import Layers
from epiloq.nn import WeightOnlyLinear
from epiloq.quantize import Grid
from epiloq.quantize.algorithms.table import ALGORITHMS
from epiloq.quantize.calibration import store
from epiloq.quantize.calibration.calibrate import calibrate
from epiloq.quantize.outputs import choose, refusals, schemes
from epiloq.quantize.targets import TARGETS
from tiny_teacher import save

# By GPTQ unless told otherwise, as other weights of 4 bits.
BY_GPTQ = {"w4a16-mxfp4", "w4a16-nvfp4", "w4a8-mxfp4-fp8", "w4a8-nvfp4-fp8", "w4a8-block"}
CODED = [name for name, target in TARGETS.items() if not isinstance(target.base, Grid)]
FORMATS_OF = {
    "w8a8-int8": ["compressed-tensors", "epiloq"],
    "w8a8-int8-azp": ["compressed-tensors", "epiloq"],
    "w8a8-int8-static": ["compressed-tensors", "epiloq"],
    "w8a8-block": ["epiloq"],
    "w4a8-block": ["epiloq"],
    "w4a8-block-g32": ["epiloq"],
    "fp8": ["compressed-tensors", "epiloq"],
    "fp8-token": ["compressed-tensors", "modelopt", "epiloq"],
    "fp8-block": ["deepseek-fp8", "compressed-tensors", "epiloq"],
    "w8a16-fp8": ["compressed-tensors", "epiloq"],
    "w8a16-fp8-block": ["compressed-tensors", "modelopt", "epiloq"],
    "w4a8-fp8": ["compressed-tensors", "epiloq"],
    "w4a8-int8": ["compressed-tensors", "epiloq"],
    "w4a8-mxfp4-fp8": ["compressed-tensors", "epiloq"],
    "w4a8-nvfp4-fp8": ["compressed-tensors", "epiloq"],
    "w8a16": ["compressed-tensors", "gptq", "epiloq"],
    "w4a16-g128": ["compressed-tensors", "gptq", "awq", "epiloq"],
    "w4a16-g64": ["compressed-tensors", "gptq", "awq", "epiloq"],
    "w4a16-g32": ["compressed-tensors", "gptq", "awq", "epiloq"],
    "w4a16": ["compressed-tensors", "gptq", "awq", "epiloq"],
    "w4a16-mxfp4": ["compressed-tensors", "epiloq"],
    "w4a16-nvfp4": ["compressed-tensors", "modelopt", "epiloq"],
}


def quantised(model: Any, scheme: str) -> Any:
    return epiloq.quantize_(model, scheme, calibrate=logits)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return teacher_and_text(tmp_path_factory.mktemp("teacher"), WIDE)


def test_the_table_of_schemes_is_whole() -> None:
    assert list(FORMATS_OF) == list(schemes())
    assert {name: [f for f, why in refusals(name).items() if why is None] for name in FORMATS_OF} == FORMATS_OF


@pytest.mark.parametrize(("scheme", "layout"), [(scheme, f) for scheme in CODED for f in FORMATS_OF[scheme]])
def test_quantize_rounds_as_quantize_does(teacher: Path, tmp_path: Path, scheme: str, layout: str) -> None:
    options = ("--scheme", scheme, "--algorithm", "rtn", "--json", tmp_path / "r.json")
    result = quantize(
        teacher, tmp_path / "out", *options, *(() if layout == FORMATS_OF[scheme][0] else ("--format", layout))
    )
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["algorithm"], report["layout"]) == ("rtn", layout)
    assert len(report["layer_errors"]) == 14 and all(0 < error < 0.2 for error in report["layer_errors"].values())
    expected = quantised(models.load_float(Checkpoint(teacher)), scheme)
    again, _ = models.load(Checkpoint(tmp_path / "out"))
    assert torch.equal(logits(again), logits(expected))
    carried = {file.name for file in teacher.iterdir()}
    assert {file.name for file in (tmp_path / "out").iterdir()} - {"report.html"} == carried
    result = run("eval", tmp_path / "out", "--text", text(teacher), "--json", tmp_path / "e.json")
    assert result.exit_code == 0, result.output
    method = {"deepseek-fp8": "fp8"}.get(layout, layout)
    assert json.loads((tmp_path / "e.json").read_text())["quantization"] == method


def test_layers_outside_the_blocks_stay(seed: int, tmp_path: Path) -> None:
    """Whatever the scheme; `quantize_` takes those too, but for the head."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 256}
    config = transformers.OPTConfig(word_embed_proj_dim=16, ffn_dim=64, do_layer_norm_before=False, **sizes)
    save(tmp_path / "model", transformers.OPTForCausalLM(config))
    outside = ["model.decoder.project_in", "model.decoder.project_out"]
    for scheme in ("fp8-token", "w8a8-block", "w8a16"):
        options = ("--scheme", scheme, "--algorithm", "rtn", "--format", "epiloq")
        result = run("quantize", tmp_path / "model", "--output", tmp_path / scheme, *options)
        assert result.exit_code == 0, result.output
        assert Layers(Checkpoint(tmp_path / scheme)).unquantised == ["lm_head", *outside]
    taken = epiloq.quantize_(models.load_float(Checkpoint(tmp_path / "model")), "w8a16")
    assert all(isinstance(taken.get_submodule(name), WeightOnlyLinear) for name in outside)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w4a16-g64", "w8a8-int8", "w8a8-int8-static"])
def test_calibrated_weights_in_epiloqs_format(teacher: Path, tmp_path: Path, scheme: str) -> None:
    for layout in ("epiloq", "compressed-tensors"):
        options = ("--scheme", scheme, "--algorithm", "gptq", "--format", layout)
        assert quantize(teacher, tmp_path / layout, *options).exit_code == 0
    ours, theirs = (models.load(Checkpoint(tmp_path / layout))[0] for layout in ("epiloq", "compressed-tensors"))
    assert torch.equal(logits(ours), logits(theirs))
    result = run("convert", tmp_path / "compressed-tensors", tmp_path / "converted", "--format", "epiloq")
    assert result.exit_code == 0, result.output
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("epiloq", "converted"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_dynamic_layers_are_saved_with_static_ones(teacher: Path, tmp_path: Path) -> None:
    options = ("--scheme", "w8a8-int8-static", "--algorithm", "rtn", "--keep-dynamic", "*.down_proj")
    assert quantize(teacher, tmp_path / "out", *options).exit_code == 0
    result = run("convert", tmp_path / "out", tmp_path / "epiloq", "--format", "epiloq")
    assert result.exit_code == 0, result.output
    assert run("convert", tmp_path / "epiloq", tmp_path / "back", "--format", "compressed-tensors").exit_code == 0
    assert (tmp_path / "back" / "config.json").read_text() == (tmp_path / "out" / "config.json").read_text()
    found = [models.load(Checkpoint(tmp_path / name))[0] for name in ("out", "epiloq", "back")]
    kinds = {name: module.activation for name, module in found[1].named_modules() if hasattr(module, "activation")}
    assert {name.endswith("down_proj") for name, kind in kinds.items() if kind == "dynamic"} == {True}
    assert torch.equal(logits(found[0]), logits(found[1])) and torch.equal(logits(found[0]), logits(found[2]))


@pytest.mark.parametrize(
    ("scheme", "algorithm"),
    [
        *(("fp8-block", name) for name in ALGORITHMS if name not in ("rtn", "autoround")),
        *((scheme, "awq+gptq") for scheme in CODED if scheme != "fp8-block"),
        *((scheme, "smoothquant-search") for scheme in CODED if scheme != "fp8-block"),
    ],
)
def test_every_algorithm_for_every_scheme(teacher: Path, tmp_path: Path, scheme: str, algorithm: str) -> None:
    options = ("--scheme", scheme, "--algorithm", algorithm, "--json", tmp_path / "r.json")
    result = quantize(teacher, tmp_path / "out", *options)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert len(report["layer_errors"]) == 14 and all(0 < error < 0.3 for error in report["layer_errors"].values())
    model, quantization = models.load(Checkpoint(tmp_path / "out"))
    exact = logits(models.load_float(Checkpoint(teacher)))
    assert quantization is None
    # Random weights: 0.12 to 0.19 at four bits, 0.05 to 0.07 in FP8. A wrong model is off by more than 1.
    assert 0 < float((logits(model) - exact).norm() / exact.norm()) < (0.5 if scheme.startswith("w4a8-block") else 0.25)
    norm = "model.layers.0.input_layernorm.weight"
    moved = not torch.equal(model.get_parameter(norm), models.load_float(Checkpoint(teacher)).get_parameter(norm))
    assert moved or "smoothquant" not in algorithm


@pytest.mark.parametrize("scheme", CODED)
def test_compensation_lowers_output_errors(teacher: Path, tmp_path: Path, scheme: str) -> None:
    found = {}
    for algorithm in ("awq", "gptq"):  # Both say the error of outputs; awq's weights are rounded to nearest.
        options = ("--scheme", scheme, "--algorithm", algorithm, "--json", tmp_path / f"{algorithm}.json")
        assert quantize(teacher, tmp_path / algorithm, *options).exit_code == 0
        found[algorithm] = json.loads((tmp_path / f"{algorithm}.json").read_text())["layer_errors"]
    assert sum(found["gptq"].values()) < 0.8 * sum(found["awq"].values())


@pytest.mark.slow
@pytest.mark.parametrize("scheme", CODED)
def test_formats_store_compensated_weights_identically(teacher: Path, tmp_path: Path, scheme: str) -> None:
    """What is written opens as the weights that calibration ended with, in each format, and formats agree."""
    for layout in FORMATS_OF[scheme]:
        options = ("--scheme", scheme, "--algorithm", "gptq", "--format", layout)
        assert quantize(teacher, tmp_path / layout, *options).exit_code == 0
    source = models.load_float(Checkpoint(teacher))
    tokens = windows(load_tokenizer(teacher), read_texts(text(teacher)), 32)
    target = TARGETS[scheme]
    blocks = calibrate(source, sample(tokens, 8, SEED), target.grid(), ALGORITHMS["gptq"], inputs=target.inputs)
    walked = {name: weight for block in blocks for name, weight in block.weights.items()}
    found = []
    for layout in FORMATS_OF[scheme]:
        layers = Layers(Checkpoint(tmp_path / layout))
        assert layers.readers.keys() == walked.keys()
        assert all(torch.equal(layers.weight(name).dequantize(), walked[name].dequantize()) for name in walked)
        model, _ = models.load(Checkpoint(tmp_path / layout))
        found.append(logits(model))
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--scheme", "fp8-token", "--format", "gptq"),
            "fp8-token can be written as compressed-tensors, modelopt, epiloq",
        ),
        (("--scheme", "w8a16", "--format", "awq"), "can be written as compressed-tensors, gptq, epiloq"),
        (("--scheme", "fp8-block", "--format", "gptq"), "can be written as deepseek-fp8, compressed-tensors, epiloq"),
        (("--scheme", "w4a16-g64", "--format", "deepseek-fp8"), "only FP8 in blocks"),
        (("--scheme", "fp8", "--blocks", "model.norm"), "ModuleList"),
        (("--scheme", "fp8", "--keep-dynamic", "auto"), "expected a scheme with static scales, got fp8"),
        (("--scheme", "fp9"), "there are w8a8-int8"),
    ],
)
def test_wrong_pairs(teacher: Path, tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    result = quantize(teacher, tmp_path / "out", *options)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split()), result.output
    assert list(tmp_path.iterdir()) == []


def test_sizes_that_transformers_misreads_are_warned_of(tmp_path: Path) -> None:
    teacher = teacher_and_text(tmp_path, WIDE | {"intermediate_size": 192})
    with pytest.warns(UserWarning, match=r"dequantises 6 layers wrongly.*mlp"):
        assert quantize(teacher, tmp_path / "out", "--scheme", "fp8-block").exit_code == 0
    assert run("convert", tmp_path / "out", tmp_path / "epiloq", "--format", "epiloq").exit_code == 0
    with pytest.warns(UserWarning, match=r"dequantises 6 layers wrongly"):
        assert run("convert", tmp_path / "epiloq", tmp_path / "back", "--format", "deepseek-fp8").exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["fp8-block", "w4a8-block"])
def test_interrupted_run_resumes(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    options = ("--scheme", scheme, "--algorithm", "gptq", "--json", tmp_path / "r.json")
    assert quantize(teacher, tmp_path / "whole", *options).exit_code == 0
    write, written = store.Store.write, []

    def once(self: store.Store, block: Any) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(block.name)
        write(self, block)

    with monkeypatch.context() as patch:
        patch.setattr(store.Store, "write", once)
        result = quantize(teacher, tmp_path / "out", *options)
    assert result.exit_code == 130 and "continues from there" in result.output and not (tmp_path / "out").exists()
    resumed = quantize(teacher, tmp_path / "out", *options)
    assert resumed.exit_code == 0 and "blocks (1 of them kept of an interrupted run): " in resumed.output
    assert json.loads((tmp_path / "r.json").read_text())["blocks_resumed"] == 1
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    assert one.keys() == other.keys() and all(torch.equal(one[name].float(), other[name].float()) for name in one)


def test_defaults() -> None:
    assert choose("w4a16-g64", None) == "compressed-tensors"
    assert choose("fp8-block", None) == "deepseek-fp8"
    assert choose("fp8", None) == "compressed-tensors"
    assert {name for name, target in TARGETS.items() if target.algorithm == "rtn"} == set(CODED) - BY_GPTQ
