"""`epiloq inspect` and `epiloq compare`: what a directory holds, and how far two are apart."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import Result

import epiloq
from command_line import WIDE, run, teacher_and_text, text
from epiloq.evaluation.comparison import answers, layer_error
from epiloq.evaluation.perplexity import perplexity
from epiloq.formats import epiloq_modules
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from tiny_teacher import save, tiny_model


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return teacher_and_text(tmp_path_factory.mktemp("teacher"), WIDE)


@pytest.fixture(scope="module")
def quantised(teacher: Path) -> Path:
    folder = teacher.with_name("w4")
    options = ("--scheme", "w4a16-g64", "--algorithm", "rtn", "--format", "gptq")
    assert run("quantize", teacher, "--output", folder, *options).exit_code == 0
    return folder


def facts(folder: Path, tmp_path: Path, *options: str) -> tuple[dict[str, Any], Result]:
    result = run("inspect", folder, "--json", tmp_path / "facts.json", *options)
    return json.loads((tmp_path / "facts.json").read_text()), result


def test_inspect_output(quantised: Path, tmp_path: Path) -> None:
    found, result = facts(quantised, tmp_path, "--check")
    assert result.exit_code == 0, result.output
    assert (found["format"], found["version"], found["scheme"]) == ("gptq", "gptq_v2", "w4a16-g64")
    assert sum(row["layers"] for row in found["kinds"]) == 14 and len(found["kinds"]) == 7
    down = next(row for row in found["kinds"] if row["kind"] == "down_proj")
    parts = 2 * (128 * 256 // 2 + 2 * 128 * 4 + 128 * 4 // 2 + 4 * 256)  # q, scales, zeros, g_idx of two layers.
    assert down == {
        "kind": "down_proj",
        "layers": 2,
        "shape": [128, 256],
        "weights": "int4",
        "bits": 4,
        "group_size": 64,
        "symmetric": False,
        "activations": None,
        "act_order": False,
        "bytes": parts,
        "bytes_before": 2 * 128 * 256 * 4,
    }
    tensors = load_file(quantised / "model.safetensors")
    assert found["bytes"]["after"] == sum(t.nbytes for t in tensors.values())
    assert found["bytes"]["after_by_dtype"]["F32"] == sum(
        t.nbytes for t in tensors.values() if t.dtype == torch.float32
    )
    assert found["not_quantised"]["linear"] == ["lm_head"]
    assert found["not_quantised"]["largest"][0] == "model.embed_tokens.weight"
    assert [name for name, reason in found["formats"].items() if reason] == ["deepseek-fp8", "modelopt"]
    assert found["wrong"] == {} and "down_proj" in result.output and "deepseek-fp8: no" in result.output


def test_bytes_before_are_the_teachers(teacher: Path, quantised: Path, tmp_path: Path) -> None:
    before, _ = facts(teacher, tmp_path)
    after, _ = facts(quantised, tmp_path)
    assert before["format"] is None and before["kinds"] == [] and before["formats"] == {}
    assert after["bytes"]["before"] == before["bytes"]["before"] == before["bytes"]["after"] > after["bytes"]["after"]


SCHEMES = ("w8a8-int8-azp", "w4a8-block", "fp8", "fp8-token", "fp8-block", "w8a16", "w4a16-g64")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_inspect_knows_schemes(tmp_path: Path, scheme: str) -> None:
    epiloq_modules.save(epiloq.quantize_(tiny_model(), scheme), tmp_path / "out")
    found, result = facts(tmp_path / "out", tmp_path)
    assert result.exit_code == 0, result.output
    assert (found["format"], found["version"], found["scheme"]) == ("epiloq", epiloq_modules.VERSION, scheme)
    assert {row["weights"][:3] for row in found["kinds"]} == {"fp8" if "fp8" in scheme else "int"}
    assert found["formats"]["epiloq"] is None


def test_inspect_knows_a_scheme_without_zero_points(tmp_path: Path) -> None:
    model, plain = epiloq.quantize_(tiny_model(), "w4a16-g64"), dict(tiny_model().named_modules())
    chosen = [name for name, layer in model.named_modules() if isinstance(layer, epiloq.nn.WeightOnlyLinear)]
    for name in chosen:
        linear = cast(nn.Linear, plain[name])
        model.set_submodule(name, epiloq.nn.WeightOnlyLinear.from_linear(linear, group_size=64))
    epiloq_modules.save(model, tmp_path / "out")
    assert facts(tmp_path / "out", tmp_path)[0]["scheme"] == "w4a16-g64"


def test_check_names_what_is_not_finite(quantised: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "config.json").write_text((quantised / "config.json").read_text())
    tensors = load_file(quantised / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.scales"][0, 3] = torch.inf
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, bad / "model.safetensors")
    assert run("inspect", bad).exit_code == 0
    found, result = facts(bad, tmp_path, "--check")
    assert result.exit_code == 2
    assert sorted(found["wrong"]) == ["model.layers.1.mlp.up_proj", "model.norm.weight"]
    said = " ".join(result.output.split())
    assert "model.safetensors: model.layers.1.mlp.up_proj: scales: expected finite numbers, got NaN or infinity" in said


def test_layer_error(seed: int) -> None:
    a, b = torch.randn(17, 100), torch.randn(17, 100)
    found = layer_error("x", a, b)
    exact = float((b.double() - a.double()).norm() / a.double().norm())
    assert found.relative == pytest.approx(exact, rel=1e-5) and not found.equal
    assert found.largest == pytest.approx(float((b.double() - a.double()).abs().max()), rel=1e-6)
    zeros = torch.zeros(3, 4)
    assert layer_error("x", zeros, zeros).relative == 0 and layer_error("x", zeros, zeros).equal
    assert layer_error("x", zeros, zeros + 1).relative == math.inf


class Fixed(nn.Module):
    """Answers with logits that were made beforehand."""

    def __init__(self, logits: list[Tensor]) -> None:
        super().__init__()
        self.waiting = list(logits)
        self.anchor = nn.Parameter(torch.zeros(1))

    def forward(self, tokens: Tensor, use_cache: bool) -> Any:
        class Output:
            logits = self.waiting.pop(0)[None]

        return Output


def test_answers_against_their_definition(seed: int) -> None:
    windows = [torch.randint(0, 33, (1, length)) for length in (17, 2, 100)]
    made = [[3 * torch.randn(window.shape[1], 33) for window in windows] for _ in range(2)]
    made[0][0][4, 7] = -math.inf  # Ruled out by the first: counts nothing.
    made[1][0][4, 7] = -math.inf
    found = answers(Fixed(made[0]), Fixed(made[1]), windows)
    divergences, agreed = [], []
    for a, b in zip(*made, strict=True):
        p, q = a.double().softmax(-1), b.double().softmax(-1)
        divergences += [
            float(sum(x * math.log(x / y) for x, y in zip(r, s, strict=True) if x)) for r, s in zip(p, q, strict=True)
        ]
        agreed += (a.argmax(-1) == b.argmax(-1)).tolist()
    assert found["kl_mean"] == pytest.approx(sum(divergences) / 119, rel=1e-4)
    assert found["kl_largest"] == pytest.approx(max(divergences), rel=1e-4)
    assert found["top1_agreement"] == sum(agreed) / 119 and found["tokens"] == 119
    for side, logits in zip("ab", made, strict=True):
        assert found[f"perplexity_{side}"] == pytest.approx(perplexity(Fixed(logits), windows), rel=1e-5)


def test_compare_with_the_teacher(teacher: Path, quantised: Path, tmp_path: Path) -> None:
    options = ("--text", text(teacher), "--length", 32, "--tokens", 320, "--json", tmp_path / "c.json")
    result = run("compare", teacher, quantised, *options)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "c.json").read_text())
    assert (found["a"]["format"], found["b"]["format"]) == (None, "gptq")
    exact = models.load_float(Checkpoint(teacher))
    rounded, _ = models.load(Checkpoint(quantised))
    layers = {layer["name"]: layer for layer in found["layers"]}
    # The head, tied to the embedding, has no weight of its own in the files.
    assert len(layers) == 14 and found["equal_layers"] == 0 and found["other_tensors_that_differ"] == []
    for name, layer in layers.items():
        a, b = exact.get_submodule(name).weight.detach(), rounded.get_submodule(name).weight.dequantize()
        assert layer["largest"] == pytest.approx(float((a - b).abs().max()), rel=1e-5)
        assert layer["relative"] == pytest.approx(float((a - b).norm() / a.norm()), rel=1e-4)
    message = found["answers"]
    assert (
        message["tokens"] == 320
        and 0 < message["kl_mean"] < message["kl_largest"]
        and 0.5 < message["top1_agreement"] <= 1
    )
    for folder, key in ((teacher, "perplexity_a"), (quantised, "perplexity_b")):
        assert run("eval", folder, *options[:-1], tmp_path / "e.json").exit_code == 0
        assert message[key] == pytest.approx(json.loads((tmp_path / "e.json").read_text())["perplexity"], rel=1e-5)
    assert "down_proj" in result.output and "same top-1 token" in result.output


def test_compare_finds_equal_weights(quantised: Path, tmp_path: Path) -> None:
    assert run("convert", quantised, tmp_path / "awq", "--format", "awq").exit_code == 0
    result = run("compare", quantised, tmp_path / "awq", "--json", tmp_path / "c.json")
    assert result.exit_code == 0 and "All 14 linear layers have the same weights, bit for bit" in result.output
    assert "answers" not in json.loads((tmp_path / "c.json").read_text())


def test_compare_refuses_other_models(teacher: Path, tmp_path: Path) -> None:
    save(tmp_path / "other", tiny_model(**(WIDE | {"intermediate_size": 160})))
    result = run("compare", teacher, tmp_path / "other")
    assert result.exit_code == 2 and "[128, 256] of" in " ".join(result.output.split())
    result = run("compare", teacher, tmp_path / "absent")
    assert result.exit_code == 2 and "absent: expected a model directory" in " ".join(result.output.split())


def test_perplexity_refuses_windows_of_other_shapes() -> None:
    """By name: the model cannot be blamed for them."""
    for window in (torch.zeros(8, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"perplexity: windows: expected int64 \[1, n\]"):
            perplexity(torch.nn.Identity(), [window])


def test_every_module_has_a_description() -> None:
    """Of each class that epiloq's format has, as `inspect` describes its layers."""
    from epiloq.formats.epiloq_modules import KINDS
    from epiloq.inspection import directory

    assert set(directory._VALUES) >= {name for name in KINDS if name not in ("Int8Linear", "W4A8Linear")}
    assert directory._VALUES["Fp8WeightOnlyLinear"]({"block": (-1, -1)})[2] == "tensor"
    assert directory._VALUES["Fp8WeightOnlyLinear"]({"block": (1, -1)})[2] == "channel"
    assert directory._VALUES["Fp8WeightOnlyLinear"]({"block": [64, 32]})[2] == "64x32"
