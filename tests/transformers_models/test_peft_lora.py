"""LoRA adapters of PEFT are trained on quantised models as on the float model."""

from __future__ import annotations

import copy
import pydoc_data.topics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

import epiloq
import epiloq.integrations.peft as integration
import epiloq.integrations.transformers
import tiny_teacher
from epiloq.formats import epiloq_modules

SCHEMES = ["w4a16-g32", "w8a8-int8", "fp8-block", "w4a8-block-g32"]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    integration.register()
    yield
    integration.unregister()


def lora(model: nn.Module, targets: list[str] | None = None, **more: Any) -> Any:
    torch.manual_seed(0)
    found = integration.linear_names(model) or ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    targets = found if targets is None else targets
    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, **more))


def trained(model: Any, tokens: Tensor, steps: int, rate: float = 1e-2) -> list[float]:
    """The losses of some steps on the same batches."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate)
    losses = []
    for step in range(steps):
        batch = tokens[step % len(tokens)]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def tiny() -> Any:
    """A model with weights large enough for adapters of a few steps."""
    model = tiny_teacher.tiny_model(hidden_size=64, intermediate_size=96, num_attention_heads=4, head_dim=16)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    nn.init.normal_(model.model.embed_tokens.weight, std=0.3)
    return model


def sequences() -> Tensor:
    """Two batches of few words over and over, which an adapter can learn."""
    words = torch.randint(0, 256, (2, 4, 6))
    return words.repeat(1, 1, 5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_loss_falls_as_on_the_float_model(scheme: str, device: str, seed: int) -> None:
    base, tokens = tiny().to(device), sequences().to(device)
    quantised = epiloq.quantize_(copy.deepcopy(base), scheme)
    frozen = {name: t.clone() for name, t in quantised.state_dict().items()}
    exact = trained(lora(base), tokens, 40)
    adapted = lora(quantised)
    found = trained(adapted, tokens, 40)
    assert abs(found[0] - exact[0]) < 0.1 * exact[0]
    assert exact[-1] < 0.2 * exact[0]
    # The fall is that of the float model within a fifth of it.
    assert abs((found[0] - found[-1]) - (exact[0] - exact[-1])) < 0.2 * (exact[0] - exact[-1])
    now = adapted.state_dict()
    for name, before in frozen.items():
        after = now[next(key for key in now if key.replace(".base_layer", "") == f"base_model.model.{name}")]
        assert torch.equal(before.view(torch.uint8), after.view(torch.uint8)), name


def test_adapters_are_saved_and_opened(seed: int, tmp_path: Path) -> None:
    base = epiloq.quantize_(tiny(), "w4a16-g32")
    tokens = sequences()
    adapted = lora(copy.deepcopy(base))
    trained(adapted, tokens, 3)
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    with torch.no_grad():
        assert torch.equal(again(tokens[0]).logits, adapted(tokens[0]).logits)
        assert not torch.equal(again(tokens[0]).logits, base(tokens[0]).logits)
        with again.disable_adapter():
            assert torch.equal(again(tokens[0]).logits, base(tokens[0]).logits)
        created_empty = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path, low_cpu_mem_usage=True)
        assert torch.equal(created_empty(tokens[0]).logits, adapted(tokens[0]).logits)


def test_an_opened_checkpoint_is_trained(seed: int, tmp_path: Path, epiloq_in_transformers: None) -> None:
    import transformers

    path = tiny_teacher.save(tmp_path / "float", tiny())
    how = epiloq.integrations.transformers.EpiloqConfig("w4a16-g32")
    transformers.AutoModelForCausalLM.from_pretrained(path, quantization_config=how).save_pretrained(tmp_path / "4bit")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "4bit")
    assert integration.linear_names(model)
    adapted = lora(model)
    adapted.enable_input_require_grads()
    adapted.gradient_checkpointing_enable()
    losses = trained(adapted.train(), sequences(), 30)
    assert losses[-1] < 0.2 * losses[0]


def test_operations_that_need_a_float_weight_are_refused(seed: int) -> None:
    model = epiloq.quantize_(tiny(), "w4a16-g32")
    for options in ({"use_dora": True}, {"init_lora_weights": "pissa"}):
        with pytest.raises(NotImplementedError, match=next(iter(options))):
            lora(copy.deepcopy(model), **options)
    with pytest.raises(NotImplementedError, match="merge it into the floating-point model and quantise that"):
        lora(model).merge_and_unload()


@pytest.mark.parametrize("merge", ["merge_and_unload", "merge_adapter"])
def test_merging_is_refused_before_anything_changes(merge: str, seed: int) -> None:
    """PEFT merges layer by layer: the embedding's adapter would be merged already."""
    adapted = lora(epiloq.quantize_(tiny(), "w4a16-g32"), ["embed_tokens", "q_proj"], init_lora_weights=False)
    before = {name: tensor.clone() for name, tensor in adapted.state_dict().items()}
    with pytest.raises(NotImplementedError, match="merge it into the floating-point model and quantise that"):
        getattr(adapted, merge)()
    after = adapted.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert not any(getattr(module, "merged", False) for module in adapted.modules())


def test_adapters_of_float_layers_are_merged(seed: int) -> None:
    """Beside quantised layers that have none."""
    model, ids = tiny(), sequences()
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    adapted = lora(epiloq.quantize_(model, "w4a16-g32"), ["embed_tokens"], init_lora_weights=False)
    with torch.no_grad():
        expected = adapted(ids[0]).logits
        merged = adapted.merge_and_unload()
        torch.testing.assert_close(merged(ids[0]).logits, expected, rtol=1e-3, atol=1e-3)
    assert not any("lora" in name for name in merged.state_dict())


def test_all_linear_layers_are_those_of_the_float_model(seed: int) -> None:
    base = tiny()
    names = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(target_modules="all-linear"))
    expected = set(names.peft_config["default"].target_modules)
    assert len(expected) == 14
    for options in ({}, {"ignore": ["*.0.mlp"]}, {"head": "w8a16", "embedding": "w8a16"}):
        model = epiloq.quantize_(copy.deepcopy(base), "w4a16-g32", **options)  # type: ignore[arg-type]
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
        assert set(adapted.peft_config["default"].target_modules) == expected, options
        adapted.add_adapter("second", peft.LoraConfig(target_modules="all-linear"))
        second = adapted.peft_config["second"].target_modules
        assert {name.removeprefix("base_model.model.") for name in second} == expected, options
        assert len(integration.linear_names(adapted)) == len(integration.linear_names(model)) > 0


@pytest.mark.parametrize("name", ["down_proj", "mlp", "embed_tokens"])
def test_modules_that_cannot_be_trained_are_not_saved(name: str, seed: int) -> None:
    """Silently training nothing would be wrong."""
    model = epiloq.quantize_(tiny(), "w4a16-g32", embedding="w8a16")
    with pytest.raises(
        TypeError, match=r"modules_to_save: expected modules that can be trained, got a frozen .*ignore="
    ):
        lora(model, ["q_proj"], modules_to_save=[name])
    trainable = epiloq.quantize_(tiny(), "w4a16-g32", ignore=[f"*{name}*"])
    adapted = lora(trainable, ["q_proj"], modules_to_save=[name])
    assert any(f"{name}.modules_to_save" in n for n, p in adapted.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_adapters_stay_in_floating_point(scheme: str, seed: int, tmp_path: Path) -> None:
    """A model that has adapters already is quantised as if it had none."""
    base, tokens = tiny(), sequences()
    adapted = lora(base, ["q_proj", "v_proj", "down_proj"], init_lora_weights=False, modules_to_save=["up_proj"])
    trained_before = {name: p.clone() for name, p in adapted.named_parameters() if p.requires_grad}
    epiloq.quantize_(adapted, scheme)
    now = dict(adapted.named_parameters())
    for name, before in trained_before.items():
        assert now[name].requires_grad and torch.equal(now[name], before), name
    layers = [name for name, module in adapted.named_modules() if isinstance(module, integration.FrozenLinear)]
    assert len(layers) == 14 and not any("lora_" in name or "modules_to_save" in name for name in layers)
    losses = trained(adapted, tokens, 3)
    assert losses[-1] < losses[0]
    adapted.save_pretrained(tmp_path)
    assert peft.utils.load_peft_weights(tmp_path, device="cpu").keys() == peft.get_peft_model_state_dict(adapted).keys()


def test_adapters_of_convolutions_stay_in_floating_point(seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 1))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["0", "2"]))
    epiloq.quantize_(adapted, "conv-w8a16")
    kinds = {name: type(module) for name, module in adapted.named_modules() if "Conv2d" in type(module).__name__}
    assert {kind is nn.Conv2d for name, kind in kinds.items() if ".lora_" in name} == {True}
    assert sum(kind is epiloq.nn.WeightOnlyConv2d for kind in kinds.values()) == 2


@pytest.mark.slow
def test_a_trained_model_in_4_bits(tmp_path: Path) -> None:
    """SmolLM2-135M learns a text by an adapter on 4 bits as on its float weights."""
    from epiloq.demo import DemoError, teacher

    try:
        teacher.prepare(tmp_path / "teacher")
    except DemoError as error:
        pytest.skip(str(error))
    model, tokenizer = teacher.load(tmp_path / "teacher")
    text = pydoc_data.topics.topics["class"]
    ids = tokenizer(text, return_tensors="pt").input_ids[0, : 4 * 96].view(4, 1, 96)
    quantised = epiloq.quantize_(copy.deepcopy(model), "w4a16-g32")
    names = [name for name in integration.linear_names(quantised) if name.endswith(("q_proj", "v_proj"))]
    exact = trained(lora(model, names), ids, 20, 1e-3)
    found = trained(lora(quantised, names), ids, 20, 1e-3)
    print(exact, found)
    falls = [sum(losses[:4]) - sum(losses[-4:]) for losses in (exact, found)]
    assert falls[0] > 0.5 and abs(falls[1] - falls[0]) < 0.25 * falls[0]


def test_a_script_that_imports_peft_first_needs_no_further_import(tmp_path: Path, seed: int) -> None:
    """PEFT's own error would not say which import is missing."""
    epiloq_modules.save(epiloq.quantize_(tiny(), "w4a16-g32"), tmp_path / "in")
    code = (
        "import peft, sys, epiloq.integrations.transformers; from transformers import AutoModelForCausalLM;"
        "assert 'epiloq.integrations.peft' not in sys.modules;"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1]);"
        "model = peft.get_peft_model(model, peft.LoraConfig(target_modules=['q_proj']));"
        "print(type(model.base_model.model.model.layers[0].self_attn.q_proj).__name__)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "in")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert found.stdout.split() == ["LoraLinear"], found.stderr
