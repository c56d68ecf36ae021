"""rms_norm and silu_and_mul in layers that do not quantise activations: where they run, and what they change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import epiloq
from epiloq.models.cache_argument import cache_argument
from epiloq.optimize import norms, optimize_, tokens
from small_models import logits, quantised, relative
from small_models import tokens as made_tokens

LAYERS = 2
# Calls in a layer: norms without and with the residual's addition, and gated activations. The last norm of a model is
# one more. Query and key heads of Qwen3 and Gemma 3 are normed where they are rotated. Gemma 3 has two more norms a
# layer, before a plain addition; in a prefill its own forward adds.
PREFILL = {
    ("llama", "w4a16-g32"): (1, 1, 1),
    ("llama", "w8a8-int8"): (0, 0, 0),
    ("phi3", "w4a16-g32"): (1, 1, 1),
    ("gemma", "w8a16"): (1, 1, 0),
    ("gemma3", "w4a16-g32"): (4, 0, 0),
}
STEP = {
    ("llama", "w4a16-g32"): (1, 1, 1),
    ("llama", "w8a8-int8"): (0, 0, 0),
    ("phi3", "w4a16-g32"): (1, 1, 1),
    ("qwen3", "w4a16-g32"): (1, 1, 1),
    ("gemma", "w8a16"): (1, 1, 0),
    ("gemma3", "w4a16-g32"): (3, 1, 0),
}


class Calls:
    """Counts what the operations' functions are called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.norms = self.sums = self.gates = 0
        norm, gate = norms.run_rms_norm, tokens.run_silu_and_mul

        def counted_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Any:
            self.norms, self.sums = self.norms + (residual is None), self.sums + (residual is not None)
            return norm(x, weight, eps, residual)

        def counted_gate(x: Tensor) -> Tensor:
            self.gates += 1
            return gate(x)

        monkeypatch.setattr(norms, "run_rms_norm", counted_norm)
        monkeypatch.setattr(tokens, "run_silu_and_mul", counted_gate)

    def taken(self) -> tuple[int, int, int]:
        found = self.norms, self.sums, self.gates
        self.norms = self.sums = self.gates = 0
        return found


def expected(in_layer: tuple[int, int, int]) -> tuple[int, int, int]:
    return LAYERS * in_layer[0] + 1, LAYERS * in_layer[1], LAYERS * in_layer[2]


@pytest.mark.parametrize(("family", "scheme"), PREFILL)
@torch.no_grad()
def test_prefill(seed: int, monkeypatch: pytest.MonkeyPatch, family: str, scheme: str) -> None:
    model, x = quantised(family, scheme, torch.bfloat16), made_tokens()
    optimize_(model)
    calls = Calls(monkeypatch)
    model(x)
    assert calls.taken() == expected(PREFILL[family, scheme])


@pytest.mark.parametrize(("family", "scheme"), STEP)
@torch.no_grad()
def test_decode_step(seed: int, monkeypatch: pytest.MonkeyPatch, family: str, scheme: str) -> None:
    model, x = quantised(family, scheme, torch.bfloat16), made_tokens()[:1]
    optimize_(model)
    name = cache_argument(model)
    cache = model(x[:, :-1], use_cache=True)[name]
    calls = Calls(monkeypatch)
    model(x[:, -1:], **{name: cache})
    norms_alone, sums, gates = expected(STEP[family, scheme])
    # The first norm of each layer but the first is that of the sum at the end of the layer before.
    handed = LAYERS - 1 if sums else 0
    assert calls.taken() == (norms_alone - handed, sums + handed, gates)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_logits_are_those_of_torch(seed: int, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """A model of two layers differs by less than the rounding of activations to its dtype."""
    model, x = quantised("llama", "w4a16-g32", dtype), made_tokens()
    optimize_(model)
    result = logits(model, x)
    monkeypatch.setattr(norms, "in_rows", lambda *_: False)
    monkeypatch.setattr(tokens, "in_rows", lambda *_: False)
    calls = Calls(monkeypatch)
    assert relative(result, logits(model, x)) <= (1e-5 if dtype == torch.float32 else 2e-2)
    assert calls.taken() == (0, 0, 0)


def test_what_torch_must_see(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients, hooks and other layouts take torch's operations or the modules' own; each result is the same."""
    model, x = quantised("llama", "w4a16-g32"), made_tokens()
    optimize_(model)
    with torch.no_grad():
        plain = logits(model, x)
    calls = Calls(monkeypatch)
    hidden = model.model.embed_tokens(x).detach().requires_grad_()
    result = model(inputs_embeds=hidden).logits
    assert calls.taken() == (0, 0, 0) and relative(result, plain) <= 1e-5
    result.square().mean().backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all() and hidden.grad.abs().max() > 0
    seen: list[Tensor] = []
    norm = model.model.layers[0].post_attention_layernorm
    handle = norm.register_forward_hook(lambda _, given, y: seen.append(y))
    with torch.no_grad():
        assert relative(model(x).logits, plain) <= 1e-5
    assert len(seen) == 1 and calls.taken() == (LAYERS + 2, LAYERS - 1, LAYERS)
    handle.remove()
    wide = torch.randn(3, 7, 128)
    with torch.no_grad():
        y = norm(wide.transpose(0, 1))  # whose rows are not one after another
        assert calls.taken() == (0, 0, 0)
        assert relative(y, norm(wide).transpose(0, 1)) <= 1e-6
        assert calls.taken() == (1, 0, 0)


@torch.no_grad()
def test_a_compiled_graph_has_torch_norms(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which inductor fuses; so does it with SiLU."""
    model, x = quantised("llama", "w4a16-g32"), made_tokens()
    optimize_(model)
    plain = logits(model, x)
    targets: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    calls = Calls(monkeypatch)
    compiled = torch.compile(model.model.layers[0].input_layernorm, backend=backend, fullgraph=True)
    hidden = torch.randn(2, 5, 128)
    y = compiled(hidden)
    assert calls.taken() == (0, 0, 0) and any("rms_norm" in target and "epiloq" not in target for target in targets)
    assert relative(y, model.model.layers[0].input_layernorm(hidden)) <= 1e-6
    assert torch.equal(logits(model, x), plain)


@torch.no_grad()
def test_batch_invariant_norms(seed: int) -> None:
    """A norm of a layer gives a row the same bits whatever the others are."""
    model = quantised("llama", "w4a16-g32", torch.bfloat16)
    optimize_(model)
    norm, x = model.model.norm, torch.randn(40, 128).bfloat16()
    with epiloq.config(batch_invariant=True):
        assert torch.equal(norm(x)[3:5], norm(x[3:5].clone()))
