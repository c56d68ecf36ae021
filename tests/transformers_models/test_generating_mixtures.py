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
from epiloq.schemes import QuantisedLinear
from reference import typical_error
from tiny_mixtures import error, qwen3

pytestmark = [
    pytest.mark.usefixtures("epiloq_in_transformers"),
    pytest.mark.filterwarnings("ignore:quantize_. left in floating point"),
]
FAMILIES = {"gpt-oss": gpt_oss, "qwen3-moe": qwen3}
SCHEMES = ("w4a16-mxfp4", "w4a16-nvfp4", "w4a16-g32", "w4a8-fp8")
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
    if scheme != "w4a8-fp8":  # which rounds activations, too
        whole = dequantised(model, found)(tokens[:, :-1]).logits[:, 6:].float()
        assert error(logits, whole) < 2e-5
    assert error(logits, model(tokens[:, :-1]).logits[:, 6:].float()) > 1e-4
    found.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto").eval()
    for one, other in zip(generated(again, prompt), (tokens, logits), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_generates_on_a_gpu_as_on_the_cpu(family: str, scheme: str, seed: int) -> None:
    """In float32, and in bfloat16 by the kernels."""
    model = FAMILIES[family]().eval()
    found = epiloq.quantize_(copy.deepcopy(model), scheme)
    prompt = torch.randint(1, model.config.vocab_size, (2, 7))
    tokens, logits = generated(found.to("cuda"), prompt.to("cuda"))
    reference = epiloq.quantize_(copy.deepcopy(model), scheme) if scheme == "w4a8-fp8" else dequantised(model, found)
    expected = reference.cpu()(tokens[:, :-1].cpu()).logits[:, 6:].float()
    # An 8-bit activation on a tie may be rounded to either side.
    assert typical_error(logits.cpu(), expected) < (0.05 if scheme == "w4a8-fp8" else 1e-4)
    halves = found.bfloat16()(tokens[:, :-1]).logits[:, 6:].float()
    assert halves.isfinite().all() and typical_error(halves.cpu(), expected) < 0.1
