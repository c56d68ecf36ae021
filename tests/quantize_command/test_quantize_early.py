"""What is refused before a model's weights are opened: requests, models, texts, and what functions are asked for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

for needed in ("typer", "rich", "safetensors", "transformers"):
    pytest.importorskip(needed, reason="the command needs the extra hf")

import transformers

from command_line import ROUND, quantize, run, text
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.quantize import Grid, gptq
from epiloq.quantize import job as jobs
from epiloq.quantize.settings import Settings
from epiloq.weights.codebooks import Float8Grid, OffsetGrid
from rounded_models import INT4, ordered, unchanged, written
from tiny_teacher import save, tiny_model


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weights may be opened, by us or by transformers."""

    def opened(*arguments: Any, **options: Any) -> Any:
        pytest.fail(f"opened with {arguments[1:]} {options}")

    monkeypatch.setattr(Checkpoint, "tensor", opened)
    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", opened)


W4 = ("--scheme", "w4a16-g32")
STATIC = ("--scheme", "w8a8-int8-static")
REQUESTS: dict[str, tuple[tuple[object, ...], str]] = {
    "a scheme that there is not": (("--scheme", "w3a16"), "w4a16-g64"),
    "an algorithm that there is not": ((*W4, "--algorithm", "magic"), "smoothquant"),
    "a format that there is not": ((*W4, "--format", "gguf"), "compressed-tensors"),
    "a format that cannot represent activations": (("--scheme", "w8a8-int8", "--format", "gptq"), "activations"),
    "a format that cannot represent float8": (("--scheme", "fp8-token", "--format", "awq"), "can be written as"),
    "sizes that the format cannot hold": (
        ("--scheme", "w4a16-g128", "--format", "compressed-tensors"),
        "in_features: expected a multiple of 128, got 64; type --format gptq or --format epiloq or "
        "--scheme w4a16-g32 --format compressed-tensors",
    ),
    "sizes that blocks do not fill": (
        ("--scheme", "fp8-block", "--format", "compressed-tensors"),
        "type --format deepseek-fp8 or --format epiloq or --scheme fp8 --format compressed-tensors or",
    ),
    "a text that is not there": ((*W4, "--calibration", "absent.txt"), "found neither"),
    "layers that are not dynamic anyway": ((*W4, "--keep-dynamic", "auto"), "expected a scheme with static scales"),
    "layers that are not there": ((*STATIC, "--keep-dynamic", "*.wide_proj"), "no layer matches '*.wide_proj'"),
    "blocks that are not there": ((*W4, "--blocks", "model.norm"), "ModuleList"),
    "windows beyond the positions": ((*W4, "--length", "1200"), "at most 1024 tokens"),
    "an alpha without use": ((*W4, "--algorithm", "awq", "--alpha", "0.3"), "--alpha: expected an algorithm with"),
    "an alpha that is searched for": (
        (*STATIC, "--algorithm", "smoothquant-search", "--alpha", "0.3"),
        "--alpha: expected an algorithm with one alpha (smoothquant, smoothquant+gptq), got smoothquant-search; leave "
        "the option out",
    ),
    "slices without a guided algorithm": (
        (*W4, "--algorithm", "gptq+refine", "--slices", "2"),
        "--slices: expected an algorithm with guided Hessians (gptq-guided, awq+gptq-guided), got gptq+refine; leave "
        "the option out",
    ),
    "slices of rows that share scales": (
        ("--scheme", "fp8-block", "--algorithm", "gptq-guided", "--slices", "2"),
        "--slices: expected a scheme whose rows have scales of their own, got fp8-block; leave the option out",
    ),
    "too many slices": ((*W4, "--algorithm", "gptq-guided", "--slices", "5"), "Invalid value for '--slices'"),
    "no slices": ((*W4, "--algorithm", "awq+gptq-guided", "--slices", "0"), "Invalid value for '--slices'"),
    "zero points that are not there": (
        ("--scheme", "fp8", "--symmetric"),
        "expected a scheme of integers with zero points",
    ),
    "a device that is not there": ((*W4, "--device", "quantum"), "expected auto, cpu"),
    "figures into a folder that is not there": ((*W4, "--json", "absent/figures.json"), "does not exist"),
}


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("request_", REQUESTS)
def test_requests(tmp_path: Path, teacher: Path, request_: str) -> None:
    options, message = REQUESTS[request_]
    shutil.copytree(teacher, tmp_path / "model")
    changed = json.loads((teacher / "config.json").read_text()) | {"max_position_embeddings": 1024}
    (tmp_path / "model" / "config.json").write_text(json.dumps(changed))
    (tmp_path / "text.txt").write_text(text(teacher).read_text())
    before = sorted(tmp_path.rglob("*"))
    result = quantize(tmp_path / "model", tmp_path / "out", *options)
    assert result.exit_code == 2 and message in " ".join(result.output.replace("│", " ").split()), result.output
    assert sorted(tmp_path.rglob("*")) == before


def bert(folder: Path) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    config = transformers.BertConfig(vocab_size=256, num_hidden_layers=1, **sizes)
    return save(folder, transformers.BertForMaskedLM(config))


def without_blocks(folder: Path) -> Path:
    return save(folder, transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=0, n_embd=24, n_head=2)))


def with_another_config(folder: Path) -> Path:
    save(folder, tiny_model(**ROUND))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    return folder


def quantised(folder: Path) -> Path:
    return written(save(folder.with_name("float"), tiny_model(**ROUND)), folder, "gptq", INT4, unchanged)


def without_tokenizer(folder: Path) -> Path:
    save(folder, tiny_model(**ROUND))
    for file in folder.glob("tokenizer*"):
        file.unlink()
    return folder


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (bert, "expected a causal language model, got BertForMaskedLM"),
        (without_blocks, "found none"),
        (with_another_config, "up_proj.weight: config.json disagrees|gate_proj.weight: config.json disagrees"),
        (quantised, "quantised already"),
        (without_tokenizer, "no tokenizer"),
    ],
)
def test_models(
    request: pytest.FixtureRequest, tmp_path: Path, teacher: Path, make: Callable[[Path], Path], message: str
) -> None:
    folder = make(tmp_path / "model")
    request.getfixturevalue("unread")
    settings = Settings(folder, tmp_path / "out", "w4a16-g32", calibration=text(teacher), evaluation=text(teacher))
    with pytest.raises(ValueError, match=message):
        jobs.prepare(settings)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layout": "awq", "scheme": "w8a16"}, "4 bits"),
        ({"alpha": 1.5}, "alpha: expected 0 to 1"),
        ({"algorithm": "gptq-guided", "slices": 0}, "--slices: expected 1 to 4, got 0"),
        ({"algorithm": "gptq-guided", "slices": 5}, "--slices: expected 1 to 4, got 5"),
        ({"algorithm": "gptq-guided", "slices": 1.5}, "--slices: expected 1 to 4, got 1.5"),
        ({"slices": 2}, "--slices: expected an algorithm with guided Hessians"),
        ({"calibration": None}, "gptq needs calibration text .*FILE.; --algorithm rtn needs none"),
        ({"calibration": None, "algorithm": "rtn", "tune": 4}, "--tune needs calibration text"),
        ({"calibration": None, "algorithm": "rtn", "scheme": "w8a8-int8-static"}, "needs calibration text .*FILE.$"),
        ({"output": "text.txt/out"}, "is a file"),
        ({"output": "model"}, "exists already"),
    ],
)
def test_settings(teacher: Path, changed: dict[str, Any], message: str) -> None:
    usual = {"output": "out", "scheme": "w4a16-g32", "calibration": text(teacher)}
    options = usual | changed
    with pytest.raises(ValueError, match=message):
        jobs.prepare(Settings(teacher, **(options | {"output": teacher.parent / str(options["output"])})))


def test_invalid_texts(tmp_path: Path, teacher: Path, unread: None) -> None:
    (tmp_path / "short").write_text("a")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for name, message in (("short", "at least two tokens"), ("bytes", "expected UTF-8")):
        result = quantize(teacher, tmp_path / "out", *W4, "--calibration", tmp_path / name)
        assert result.exit_code == 2 and message in result.output, result.output


def test_another_run_that_was_interrupted(tmp_path: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(jobs.Store, "write", stopped)
        assert quantize(teacher, tmp_path / "out", *W4).exit_code == 130
    monkeypatch.setattr(jobs, "opened", lambda *_: pytest.fail("loaded"))
    result = quantize(teacher, tmp_path / "out", *W4, "--algorithm", "awq", "--windows", 9)
    assert result.exit_code == 2 and "other settings (algorithm, tokens)" in result.output


def test_unsupported_activation_orders(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPTQ directory the orders alone are read, and `epiloq inspect` knows as much."""
    written(save(tmp_path / "float", tiny_model(**ROUND)), tmp_path / "in", "gptq", INT4, ordered)
    read = Checkpoint.tensor

    def order(checkpoint: Checkpoint, name: str) -> torch.Tensor:
        assert name.endswith(".g_idx")
        return read(checkpoint, name)

    monkeypatch.setattr(Checkpoint, "tensor", order)
    for target in ("awq", "compressed-tensors"):
        result = run("convert", tmp_path / "in", tmp_path / "no", "--format", target)
        assert result.exit_code == 2 and "activation order" in result.output, result.output
    assert run("inspect", tmp_path / "in", "--json", tmp_path / "i.json").exit_code == 0
    formats = json.loads((tmp_path / "i.json").read_text())["formats"]
    assert {name for name, reason in formats.items() if reason is None} == {"gptq", "epiloq"}


@pytest.mark.parametrize(
    "grid", [Float8Grid(group_size=32), Float8Grid(128, 128), OffsetGrid(8, 64), OffsetGrid(4, 32)]
)
def test_gptq_of_groups_that_cannot_be_reordered(grid: Float8Grid | OffsetGrid) -> None:
    """Said before anything is looked at: neither weight nor Hessian has values."""
    weight, hessian = torch.empty(6, 256, device="meta"), torch.empty(256, 256, device="meta")
    with pytest.raises(ValueError, match=r"gptq: static_groups: expected True with act_order, or act_order=False"):
        gptq(weight, hessian, grid, static_groups=False)


def test_gptq_of_one_group_has_no_order(seed: int) -> None:
    """Nothing to reorder: the same as with static groups."""
    weight, x = torch.randn(6, 64), torch.randn(200, 64) * torch.rand(64)
    for grid in (Float8Grid(), OffsetGrid(8, 64), Grid(4, -1)):
        found = gptq(weight, x.t() @ x, grid, static_groups=False)
        assert torch.equal(found.dequantize(), gptq(weight, x.t() @ x, grid).dequantize())


def test_missing_directory_is_reported_before_missing_text(tmp_path: Path) -> None:
    result = run("quantize", "facebook/opt-125m", "--scheme", "w4a16-g32", "--output", tmp_path / "out")
    assert result.exit_code == 2
    assert "facebook/opt-125m: expected a model directory, found nothing there" in result.output
