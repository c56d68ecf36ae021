"""Mixtures of GPT-OSS's and Qwen3's shape in four bits: what they generate is what their dequantised weights do."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers", minversion="5.0")

from torch import Tensor, nn

import epiloq
from biased_mixtures import gpt_oss
from epiloq.models import mixtures
from epiloq.nn import GatedExperts
from epiloq.nn.base.w4a8_layer import W4A8Layer
from epiloq.schemes import QuantisedLinear
from reference import typical_error
from tiny_mixtures import error, qwen3

pytestmark = [
    pytest.mark.usefixtures("epiloq_in_transformers"),
    pytest.mark.filterwarnings("ignore:quantize_. left in floating point"),
]
FAMILIES = {"gpt-oss": gpt_oss, "qwen3-moe": qwen3}
EIGHT_BIT_TOKENS = ("w4a8-fp8", "w4a8-mxfp4-fp8", "w4a8-nvfp4-fp8")
SCHEMES = ("w4a16-mxfp4", "w4a16-nvfp4", "w4a16-g32", *EIGHT_BIT_TOKENS)
NEW = 6


def generated(model: Any, prompt: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens, prompt included, and the logits of each step, which read the cache: ``[B, NEW, vocabulary]``."""
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(prompt, output_logits=True, return_dict_in_generate=True, **options)
    return found.sequences, torch.stack(found.logits, 1).float()


@torch.no_grad()
def dequantised(float_model: Any, quantised: Any) -> Any:
    """The float model, its experts one by one, with the quantised one's weights."""
    found = copy.deepcopy(float_model)
    mixtures.unstack_experts_(found)
    values = {
        name: module.dequantized_weight()
        for name, module in mixtures.named_layers(quantised, None)
        if isinstance(module, QuantisedLinear)
    }
    used = {name for name, module in found.named_modules() if isinstance(module, nn.Linear) and name in values}
    assert used == values.keys() and any(".experts.0." in name for name in used)
    for name in used:
        found.get_submodule(name).weight = nn.Parameter(values[name].float())
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_generates_as_its_dequantised_weights(family: str, scheme: str, seed: int, tmp_path: Path) -> None:
    model = FAMILIES[family]().eval()
    found = epiloq.quantize_(copy.deepcopy(model), scheme)
    prompt = torch.randint(1, model.config.vocab_size, (2, 7))
    tokens, logits = generated(found, prompt)
    assert tokens.shape == (2, 7 + NEW) and torch.equal(tokens[:, :7], prompt)
    assert torch.equal(logits.argmax(-1), tokens[:, 7:])
    if scheme not in EIGHT_BIT_TOKENS:  # which round activations, too
        whole = dequantised(model, found)(tokens[:, :-1]).logits[:, 6:].float()
        assert error(logits, whole) < 2e-5
    assert error(logits, model(tokens[:, :-1]).logits[:, 6:].float()) > 1e-4
    found.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto").eval()
    for one, other in zip(generated(again, prompt), (tokens, logits), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme not in EIGHT_BIT_TOKENS])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_generates_on_a_gpu_as_on_the_cpu(family: str, scheme: str, seed: int) -> None:
    """In float32, and in bfloat16 by the kernels."""
    model = FAMILIES[family]().eval()
    found = epiloq.quantize_(copy.deepcopy(model), scheme)
    prompt = torch.randint(1, model.config.vocab_size, (2, 7))
    tokens, logits = generated(found.to("cuda"), prompt.to("cuda"))
    expected = dequantised(model, found).cpu()(tokens[:, :-1].cpu()).logits[:, 6:].float()
    assert typical_error(logits.cpu(), expected) < 1e-4
    halves = found.bfloat16()(tokens[:, :-1]).logits[:, 6:].float()
    assert halves.isfinite().all() and typical_error(halves.cpu(), expected) < 0.1


@pytest.mark.parametrize("scheme", EIGHT_BIT_TOKENS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_each_layer_with_8_bit_tokens_as_on_the_cpu(
    family: str, dtype: torch.dtype, scheme: str, device: str, seed: int
) -> None:
    """On the tokens that it got: a whole model multiplies the difference of one rounded token by rounding it again."""
    model = epiloq.quantize_(FAMILIES[family]().eval(), scheme).to(dtype)
    found = copy.deepcopy(model).to(device)
    layers = {name: layer for name, layer in found.named_modules() if isinstance(layer, W4A8Layer | GatedExperts)}
    calls: list[tuple[str, tuple[Tensor, ...], Tensor]] = []
    for name, layer in layers.items():
        layer.register_forward_hook(lambda _, arguments, y, name=name: calls.append((name, arguments, y)))
    prompt = torch.randint(1, model.config.vocab_size, (2, 7), device=device)
    assert generated(found, prompt)[1].isfinite().all()
    assert {name for name, _, _ in calls} == layers.keys() and any(name.endswith("experts") for name in layers)
    # CUDA rounds scaled tokens and sums to bfloat16, each within 2^-9. So what experts quantise between their products
    # may differ by 2^-8, a sixteenth of the least step of float8 (2^-4 to 2^-3 of a value): then one value in sixteen
    # moves by a step, of at most 2^-3 of it. Of a typical token the root of the mean square is 2^-5. A single token may
    # have its largest value, which gates make much larger than others, among those that moved, and a call of one step
    # has two tokens; but no value moves by more than a step, so that no call's typical error is above 2^-3. The
    # typical error of all tokens of a layer is stable: with these roundings made on the CPU, of 112 layers it was
    # 0.006 to 0.016, where that of a call reached 0.031; a wrong scale, zero point or K made both 0.3 or more.
    found_of: dict[str, list[Tensor]] = {name: [] for name in layers}
    expected_of: dict[str, list[Tensor]] = {name: [] for name in layers}
    for name, arguments, y in calls:
        expected = model.get_submodule(name)(*(argument.cpu() for argument in arguments)).float()
        bound = 2**-8 if isinstance(layers[name], W4A8Layer) else 2**-3
        assert typical_error(y.cpu().float(), expected) < bound, name
        found_of[name].append(y.cpu().float().flatten(0, -2))
        expected_of[name].append(expected.flatten(0, -2))
    for name in layers:
        assert typical_error(torch.cat(found_of[name]), torch.cat(expected_of[name])) < 2**-5, name
