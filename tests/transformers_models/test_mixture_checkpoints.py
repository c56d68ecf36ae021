"""FP8 checkpoints of mixtures of experts, as DeepSeek publishes them: opened, saved again, refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from torch import Tensor

from command_line import run
from epiloq.formats import deepseek_fp8, epiloq_modules
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.layers import Layers
from epiloq.formats.layouts.base import FormatError
from epiloq.nn import ExpertLinears, Fp8BlockExperts, Fp8BlockLinear, GatedExperts
from reference import typical_error
from tiny_mixtures import TOKENS, deepseek, dequantised, error, logits, mixtral, opened, published, qwen3, restored

EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(int(torch.randint(1 << 30, ()).item()))
    return published(deepseek(), tmp_path_factory.mktemp("fp8") / "model")


@torch.no_grad()
def called_with(model: Any, names: list[str]) -> dict[str, tuple[tuple[Tensor, ...], Tensor]]:
    """Inputs and output of modules when the model runs."""
    seen: dict[str, Any] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda module, args, out: seen.__setitem__(name, (args, out))

    handles = [model.get_submodule(name).register_forward_hook(note(name)) for name in names]
    model(TOKENS, use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


def test_published_layers_agree(fp8: Path) -> None:
    """With the weights that transformers dequantises, up to the rounding of activations, layer by layer."""
    exact, model = dequantised(fp8), models.load(Checkpoint(fp8))[0]
    experts = model.get_submodule(EXPERTS)
    assert isinstance(experts, GatedExperts)
    assert isinstance(experts.gate_up, Fp8BlockExperts) and isinstance(experts.down, Fp8BlockExperts)
    tensors, stack = load_file(fp8 / "model.safetensors"), exact.get_submodule(EXPERTS)
    for expert in range(8):
        gate, up, down = (
            restored(tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"])
            for name in (f"{EXPERTS}.{expert}.{part}_proj" for part in ("gate", "up", "down"))
        )
        assert torch.equal(stack.gate_up_proj[expert], torch.cat([gate, up]))
        assert torch.equal(stack.down_proj[expert], down)
    layers = [name for name, module in model.named_modules() if isinstance(module, Fp8BlockLinear)]
    assert len(layers) == 2 * 5 + 3 + 3
    for name, (arguments, output) in called_with(exact, [*layers, EXPERTS]).items():
        with torch.no_grad():
            assert 1e-4 < error(model.get_submodule(name)(*arguments), output) < 0.06, name
    assert torch.equal(model.model.layers[1].mlp.gate.weight, exact.model.layers[1].mlp.gate.weight)
    assert typical_error(logits(model), logits(exact)) < 0.5


def test_published_opened_by_both(fp8: Path, epiloq_in_transformers: None, tmp_path: Path) -> None:
    """By epiloq alone and through transformers alike, and saved as it was, but for the further prediction."""
    model, inside = deepseek_fp8.load(fp8), opened(fp8)
    assert isinstance(inside.get_submodule(EXPERTS), GatedExperts)
    assert torch.equal(logits(inside), logits(model))
    inside.save_pretrained(tmp_path / "again")
    deepseek_fp8.save(model, tmp_path / "own")
    before = load_file(fp8 / "model.safetensors")
    kept = {name for name in before if not name.startswith("model.layers.61.")}
    for folder in (tmp_path / "again", tmp_path / "own"):
        after = load_file(folder / "model.safetensors")
        assert after.keys() == kept
        assert all(torch.equal(after[name].view(torch.uint8), before[name].view(torch.uint8)) for name in kept)
    assert torch.equal(logits(opened(tmp_path / "again")), logits(model))
    epiloq_modules.save(model, tmp_path / "epiloq")
    assert torch.equal(logits(opened(tmp_path / "epiloq")), logits(model))
    assert torch.equal(logits(models.load(Checkpoint(tmp_path / "epiloq"))[0]), logits(model))


def test_experts_in_floating_point(epiloq_in_transformers: None, seed: int, tmp_path: Path) -> None:
    """They are stacked again, and the directory says so."""
    folder = published(deepseek(), tmp_path / "model", experts=False)
    inside, own = opened(folder), models.load(Checkpoint(folder))[0]
    for model in (inside, own):
        stack = model.get_submodule(EXPERTS)
        assert type(stack).__name__ == "DeepseekV3Experts" and not stack.down_proj.is_meta
        expected = load_file(folder / "model.safetensors")[f"{EXPERTS}.5.down_proj.weight"]
        assert torch.equal(stack.down_proj[5], expected)
    assert torch.equal(logits(inside), logits(own))
    result = run("inspect", folder, "--json", tmp_path / "facts.json")
    assert f"Experts in floating point: {EXPERTS}: in floating point in the files" in result.output
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["not_quantised"]["experts"] == {EXPERTS: "in floating point in the files"}
    deepseek_fp8.save(own, tmp_path / "out")
    assert (
        EXPERTS
        in json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    )


def fp8_of(block: tuple[int, int]) -> Callable[[Tensor], dict[str, Tensor]]:
    """FP8 weights with a scale for each block of rows and columns (-1: all)."""

    def pack(weight: Tensor) -> dict[str, Tensor]:
        rows, columns = (size if span == -1 else span for span, size in zip(block, weight.shape, strict=True))
        counts = [-(-size // span) for size, span in zip(weight.shape, (rows, columns), strict=True)]
        scale = torch.rand(*counts) / 400 + 1e-3
        wide = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: weight.shape[0], : weight.shape[1]]
        return {"weight": (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn), "weight_scale_inv": scale}

    return pack


@pytest.mark.parametrize("rows", [32, 64])
@pytest.mark.parametrize("make", [qwen3, mixtral])
def test_experts_in_blocks_of_fewer_rows(
    rows: int, make: Callable[[], Any], epiloq_in_transformers: None, seed: int, tmp_path: Path
) -> None:
    """No grouped product has them, so that experts run one after the other."""
    pack, folder = fp8_of((rows, 128)), tmp_path / "model"
    make().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    packed = [name for name in tensors if ".experts." in name]
    for name in packed:
        parts = pack(tensors.pop(name))
        tensors |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [rows, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    inside, own = opened(folder), models.load(Checkpoint(folder))[0]
    kinds = {type(module) for name, module in inside.named_modules() if name.endswith(".experts")}
    assert kinds == {ExpertLinears}
    assert torch.equal(logits(inside), logits(own))
    inside.save_pretrained(tmp_path / "again")
    after = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(after[name].view(torch.uint8), tensors[name].view(torch.uint8)) for name in tensors)


@torch.no_grad()
def test_the_base_model_alone(fp8: Path, epiloq_in_transformers: None, tmp_path: Path) -> None:
    """Its layers' names have no prefix; saved, they have none in the files, either."""
    whole, base = opened(fp8), transformers.AutoModel.from_pretrained(fp8)
    assert isinstance(base.get_submodule(EXPERTS.removeprefix("model.")), GatedExperts)
    expected = whole.model(TOKENS).last_hidden_state
    assert torch.equal(base(TOKENS).last_hidden_state, expected)
    base.save_pretrained(tmp_path / "base")
    again = transformers.AutoModel.from_pretrained(tmp_path / "base")
    assert torch.equal(again(TOKENS).last_hidden_state, expected)


@pytest.mark.parametrize("quantised", [True, False])
def test_experts_under_two_names(quantised: bool, epiloq_in_transformers: None, seed: int, tmp_path: Path) -> None:
    """A second matrix of an expert, without the prefix of the base model, is refused by each way in."""
    folder = published(deepseek(), tmp_path / "model", experts=quantised)
    file, name = folder / "model.safetensors", f"{EXPERTS}.3.up_proj.weight"
    tensors = load_file(file)
    tensors[name.removeprefix("model.")] = torch.zeros_like(tensors[name])
    save_file(tensors, file, metadata={"format": "pt"})
    for read in (opened, lambda path: models.load(Checkpoint(path))):
        with pytest.raises(ValueError, match=r"3\.up_proj\.weight: is renamed to model\.layers\.1.*, and so is"):
            read(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop(f"{EXPERTS}.3.up_proj.weight_scale_inv"),
            r"experts.3.up_proj.weight: expected .*, got F8_E4M3",
        ),
        (lambda t: t.pop(f"{EXPERTS}.3.up_proj.weight"), r"experts.3.up_proj"),
        (
            lambda t: t.update({f"{EXPERTS}.3.up_proj.weight_scale_inv": torch.ones(2, 1)}),
            r"experts.3.up_proj.*expected.*\[1, 1\], got.*\[2, 1\]",
        ),
        (lambda t: t.update({f"{EXPERTS}.8.up_proj.weight": torch.ones(64, 128)}), r"experts.8.up_proj"),
    ],
)
def test_bad_experts(change: Callable[[dict[str, Tensor]], object], message: str, fp8: Path, tmp_path: Path) -> None:
    tensors = load_file(fp8 / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((fp8 / "config.json").read_text())
    with pytest.raises(FormatError, match=message):
        deepseek_fp8.load(tmp_path)


def test_experts_that_cannot_be_taken_apart(
    fp8: Path, epiloq_in_transformers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantised in files, but stacked in the model: refused with the reason, by each way in."""
    kind = transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Experts
    monkeypatch.setattr(kind, "_apply_gate", lambda self, gate_up: gate_up)
    for way in (deepseek_fp8.load, opened, lambda folder: Layers(Checkpoint(folder))):
        with pytest.raises(FormatError, match=f"for {EXPERTS} cannot be taken apart: their gate is not elementwise"):
            way(fp8)
