"""``epiloq quantize`` of models of which some layers cannot, or shall not, be quantised; formats that fit a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

for needed in ("typer", "rich", "safetensors", "transformers"):
    pytest.importorskip(needed, reason="the command needs the extra hf")

import transformers

from command_line import ROUND, logits, quantize, run, teacher_and_text
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.layers import Layers
from epiloq.quantize import job as jobs

W4 = ("--scheme", "w4a16-g32")


def in_floating_point(folder: Path) -> set[str]:
    return {name for name in Layers(Checkpoint(folder)).unquantised if name != "lm_head"}


@pytest.mark.parametrize("layout", ["compressed-tensors", "gptq", "awq", "epiloq"])
def test_layers_to_ignore(teacher: Path, tmp_path: Path, layout: str) -> None:
    options = (*W4, "--format", layout, "--ignore", "*.down_proj", "--ignore", "re:.*layers\\.0\\..*k_proj")
    result = quantize(teacher, tmp_path / "out", *options, "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    left = {"model.layers.0.self_attn.k_proj", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"}
    assert in_floating_point(tmp_path / "out") == left
    assert "2 layers in floating point: model.layers.0.mlp.down_proj, model.layers.1.mlp.down_proj: --ignore" in (
        result.output
    )
    assert json.loads((tmp_path / "r.json").read_text())["float_layers"].keys() == left
    assert "Left in floating point:" in (tmp_path / "out" / "report.html").read_text()
    model, source = models.load(Checkpoint(tmp_path / "out"))[0], models.load_float(Checkpoint(teacher))
    for name in left:
        assert torch.equal(model.get_parameter(f"{name}.weight"), source.get_parameter(f"{name}.weight"))
    assert float((logits(model) - logits(source)).norm() / logits(source).norm()) < 0.1


def test_a_whole_block_to_ignore(teacher: Path, tmp_path: Path) -> None:
    result = quantize(teacher, tmp_path / "out", *W4, "--algorithm", "awq+gptq", "--ignore", "model.layers.0")
    assert result.exit_code == 0, result.output
    assert {name.split(".")[2] for name in in_floating_point(tmp_path / "out")} == {"0"}
    nothing = quantize(teacher, tmp_path / "none", *W4, "--ignore", "model.layers")
    assert nothing.exit_code == 2 and "found none: model.layers.0.self_attn.q_proj: --ignore" in nothing.output
    wrong = quantize(teacher, tmp_path / "none", *W4, "--ignore", "*.wide_proj")
    assert wrong.exit_code == 2 and "--ignore: expected patterns of layers' names" in wrong.output
    assert not (tmp_path / "none").exists()


def test_other_layers_to_ignore_are_other_settings(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(jobs.Store, "write", stopped)
        assert quantize(teacher, tmp_path / "out", *W4).exit_code == 130
    result = quantize(teacher, tmp_path / "out", *W4, "--ignore", "*.down_proj")
    assert result.exit_code == 2 and "other settings (layers in floating point)" in result.output


ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize(
    ("layout", "left"), [("compressed-tensors", {"o_proj"}), ("gptq", ATTENTION), ("awq", ATTENTION), ("epiloq", set())]
)
def test_layers_of_unsupported_sizes_are_kept(tmp_path: Path, layout: str, left: set[str]) -> None:
    """A layer of 4 inputs under groups of 32. It is little of the weights, so the format is chosen all the same."""
    sizes = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 192}
    teacher = teacher_and_text(tmp_path, ROUND | sizes)
    options = () if layout == "compressed-tensors" else ("--format", layout)
    result = quantize(teacher, tmp_path / "out", *W4, *options, "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    expected = {f"model.layers.{block}.self_attn.{name}" for block in range(2) for name in left}
    assert in_floating_point(tmp_path / "out") == expected
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["layout"] == layout and len(report["layer_errors"]) == 14 - len(expected)
    reasons = report["float_layers"]
    assert reasons.keys() == expected and all(why.startswith(layout) for why in reasons.values())
    assert ("layers in floating point: model.layers.0.self_attn." in result.output) == bool(left)
    model, source = models.load(Checkpoint(tmp_path / "out"))[0], models.load_float(Checkpoint(teacher))
    assert float((logits(model) - logits(source)).norm() / logits(source).norm()) < 0.1


def test_first_supported_format_is_chosen(teacher: Path, tmp_path: Path) -> None:
    """Groups of 128 where layers have 64 and 96 inputs, as SmolLM2 has 576: no refusal, and a word beforehand."""
    result = quantize(teacher, tmp_path / "out", "--scheme", "w4a16-g128")
    assert result.exit_code == 0, result.output
    before, _, _ = result.output.partition("of weights")
    message = " ".join(before.split())
    assert "warning: format gptq: compressed-tensors cannot hold 14 of 14 layers" in message
    assert "for compressed-tensors type --scheme w4a16-g32 --format compressed-tensors" in message
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["group_size"]) == ("gptq", 128)
    assert in_floating_point(tmp_path / "out") == set() and run("inspect", tmp_path / "out").exit_code == 0


@pytest.mark.parametrize("layout", [None, "compressed-tensors"])
def test_experts_that_files_stack(tmp_path: Path, layout: str | None) -> None:
    """GPT-OSS's: most of its weights, which one format stores."""
    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    config = transformers.GptOssConfig(vocab_size=128, hidden_size=128, **heads, **experts)
    transformers.GptOssForCausalLM(config).bfloat16().save_pretrained(tmp_path / "float")
    given = () if layout is None else ("--format", layout)
    options = (*W4, "--algorithm", "rtn", *given, "--output", tmp_path / "out")
    result = run("quantize", tmp_path / "float", *options)
    assert result.exit_code == 0, result.output
    left = in_floating_point(tmp_path / "out")
    text = " ".join(result.output.split())
    if layout is None:
        assert not left and "format epiloq: compressed-tensors cannot hold the experts" in text
    else:
        assert "experts in floating point: model.layers.0.mlp.experts: stacked in files" in text
