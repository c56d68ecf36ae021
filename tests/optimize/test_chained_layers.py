"""The first norm of a decoder layer, computed with the sum that the layer before ends with."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

import epiloq
from decode_steps import PROMPT, cache_of, decoded, held
from epiloq.optimize import norms, optimize_
from epiloq.optimize.step import _PREPARED, Step
from small_models import SIZES, quantised, tokens

LAYERS = SIZES["num_hidden_layers"]


def unchained(model: nn.Module) -> nn.Module:
    """A copy whose layers know of no other."""
    result = copy.deepcopy(model)
    for block in result.model.layers:
        for step in (a for a in block.forward.args if isinstance(a, Step)):
            step.chain, step.index = [step], 0
    return result


@pytest.mark.parametrize("family", ["llama", "gemma", "gemma3", "phi3"])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_step_has_one_addition_less_for_each_layer_but_the_last(
    seed: int, monkeypatch: pytest.MonkeyPatch, family: str, kind: str
) -> None:
    model, x = quantised(family, "w4a16-g32", torch.bfloat16), tokens()
    optimize_(model)
    apart, residuals = unchained(model), Counter[bool]()
    run = norms.run_rms_norm
    with monkeypatch.context() as patched:
        patched.setattr(norms, "run_rms_norm", lambda *a: residuals.update([a[3] is not None]) or run(*a))
        with torch.no_grad():
            caches = [held(cache_of(each, kind)) for each in (model, apart)]
            for each, cache in zip((model, apart), caches, strict=True):
                each(x[:, :PROMPT], use_cache=True, **cache)
            counts = []
            for each, cache in zip((model, apart), caches, strict=True):
                residuals.clear()
                each(x[:, PROMPT : PROMPT + 1], use_cache=True, **cache)
                counts.append(residuals[True])
    assert counts[0] - counts[1] == LAYERS - 1
    assert torch.equal(decoded(model, x, kind), decoded(apart, x, kind))


@pytest.mark.parametrize("in_place", [True, False])
def test_a_hook_that_changes_what_a_layer_returns(seed: int, in_place: bool) -> None:
    """The next layer then computes its norm of what it is given."""
    model, x = quantised("llama", "w8a8-int8", torch.bfloat16), tokens()
    optimize_(model)
    apart, plain = unchained(model), decoded(model, x, "static")

    def halve(_: nn.Module, __: Any, result: Tensor) -> Tensor:
        return result.mul_(0.5) if in_place else result * 0.5

    for each in (model, apart):
        each.model.layers[0].register_forward_hook(halve)
    changed = decoded(model, x, "static")
    assert torch.equal(changed, decoded(apart, x, "static")) and not torch.equal(changed, plain)


@torch.no_grad()
def test_hidden_states_hold_nothing_more(seed: int) -> None:
    model, x = quantised("llama", "fp8-token", torch.bfloat16), tokens()
    optimize_(model)
    cache = held(cache_of(model, "static"))
    model(x[:, :PROMPT], use_cache=True, **cache)
    result = model(x[:, PROMPT : PROMPT + 1], use_cache=True, output_hidden_states=True, **cache)
    assert len(result.hidden_states) == LAYERS + 1
    assert not any(_PREPARED in vars(state) for state in result.hidden_states)


@pytest.mark.slow
def test_a_deep_model_is_copied() -> None:
    """Without one level of recursion for each layer."""
    config = transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 120, "hidden_size": 32, "intermediate_size": 32})
    model = transformers.LlamaForCausalLM(config).eval()
    epiloq.quantize_(model, "w8a16")
    optimize_(model)
    steps = [a for block in copy.deepcopy(model).model.layers for a in block.forward.args if isinstance(a, Step)]
    assert [step.index for step in steps] == [*range(120)] and all(step.chain == steps for step in steps)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a8-int8", "fp8-token"])
def test_the_graph_of_a_step_has_the_same_kernels(seed: int, scheme: str) -> None:
    """`torch.compile` sees what eager mode runs: the cache is written by the rotation, and sums are part of norms."""
    model, x = quantised("llama", scheme, torch.bfloat16), tokens()
    optimize_(model)
    found: Counter[str] = Counter()

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    results = []
    for compiles in (False, True):
        cache = held(cache_of(model, "static"))
        with torch.no_grad():
            model(x[:, :PROMPT], use_cache=True, **cache)
            torch._dynamo.reset()
            called = torch.compile(model, fullgraph=True, backend=backend) if compiles else model
            results.append(called(x[:, PROMPT : PROMPT + 1], use_cache=True, **cache).logits)
    assert torch.equal(*results)
    assert found["epiloq.rotate_and_store"] == LAYERS and not any("index_copy" in name for name in found)
    quantises = scheme != "w4a16-g32"
    # The model's last norm is no layer's.
    assert found["epiloq.rms_norm"] == (1 if quantises else 2)
    assert found["epiloq.rms_norm_add"] == (0 if quantises else 2 * LAYERS - 1)
