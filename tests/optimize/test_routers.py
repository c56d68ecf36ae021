"""Routers of mixtures of experts whose scores, choice and weights `optimize_` computes in one kernel on a GPU."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import epiloq
import tiny_mixtures
from epiloq.optimize import routers
from epiloq.optimize.routers import fused_router, route

SIZES = {"hidden_size": 48, "num_experts_per_tok": 3}
GROUPED = SIZES | {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
ROUTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeTopKRouter", SIZES | {"num_experts": 40, "norm_topk_prob": True}),
    "olmoe": ("OlmoeTopKRouter", SIZES | {"num_experts": 8, "norm_topk_prob": False}),
    "qwen3_5_moe_text": ("Qwen3_5MoeTopKRouter", SIZES | {"num_experts": 8}),
    "mixtral": ("MixtralTopKRouter", SIZES | {"num_local_experts": 8}),
    "gpt_oss": ("GptOssTopKRouter", SIZES | {"num_local_experts": 8}),
    "deepseek_v3": ("DeepseekV3TopkRouter", GROUPED),
    "glm4_moe": ("Glm4MoeTopkRouter", GROUPED | {"norm_topk_prob": True}),
}


def made(family: str, dtype: torch.dtype, device: str = "cpu") -> Any:
    """A router with random weights."""
    name, options = ROUTERS[family]
    config = transformers.AutoConfig.for_model(family, **options)
    module = __import__(type(config).__module__.replace("configuration_", "modeling_"), fromlist=[name])
    router = getattr(module, name)(config).to(dtype)
    for tensor in (*router.parameters(), *router.buffers()):
        tensor.data.copy_(torch.randn(tensor.shape))
    return router.to(device).requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ROUTERS)
def test_same_choice(family: str, dtype: torch.dtype, device: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    router = made(family, dtype, device)
    forward = fused_router(router)
    assert forward is not None
    monkeypatch.setattr(routers, "_has_kernel", lambda *_: True)  # on a CPU, too
    x = torch.randn(2, 7, 48, device=device).to(dtype).flatten(0, 1)
    logits, weights, experts = forward(x)
    expected = type(router).forward(router, x)
    assert torch.equal(logits, expected[0]) and weights.dtype == expected[1].dtype
    # Of equal logits, which 16 bits often have, torch may choose another one.
    assert torch.equal(*(logits.gather(1, chosen).sort().values for chosen in (experts, expected[2])))
    torch.testing.assert_close(weights.sort().values, expected[1].sort().values)
    if dtype is torch.float32:
        order, expected_order = experts.argsort(-1), expected[2].argsort(-1)
        assert torch.equal(experts.gather(1, order), expected[2].gather(1, expected_order))
        torch.testing.assert_close(weights.gather(1, order), expected[1].gather(1, expected_order))


def test_its_own_forward_runs_for_gradients_and_on_a_cpu(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    router = made("qwen3_moe", torch.float32)
    forward, x = fused_router(router), torch.randn(5, 48)
    assert forward is not None
    calls: list[str] = []
    monkeypatch.setattr(routers, "select_experts", lambda *_, **__: calls.append("kernel"))
    assert all(map(torch.equal, forward(x), type(router).forward(router, x)))
    monkeypatch.setattr(routers, "_has_kernel", lambda *_: True)
    assert forward(x.requires_grad_())[1].requires_grad and not calls


def test_other_routers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    router = made("mixtral", torch.float32)
    router.forward = router.forward
    assert fused_router(router) is None

    class Noisy(type(made("mixtral", torch.float32))):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor) -> Any:
            return super().forward(hidden_states + torch.randn_like(hidden_states))

    assert fused_router(made("mixtral", torch.float32)) is not None
    changed = made("mixtral", torch.float32)
    changed.__class__ = Noisy
    assert fused_router(changed) is None and fused_router(torch.nn.Linear(4, 4)) is None


def test_a_whole_model(device: str, seed: int) -> None:
    """The report names routers; tokens, copies and pickles are right, in eager mode and in a graph."""
    model = tiny_mixtures.qwen3().to(device).eval()
    epiloq.quantize_(model, "w8a16")
    ids = torch.randint(model.config.vocab_size, (2, 6), device=device)
    with torch.no_grad():
        before = model(ids).logits
        report = epiloq.optimize_(model)
        names = [name for name, module in model.named_modules() if is_routed(module)]
        assert names and set(names) <= set(report.fused)
        for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert [name for name, module in each.named_modules() if is_routed(module)] == names
            torch.testing.assert_close(each(ids).logits, before, rtol=1e-3, atol=1e-3)
        compiled = torch.compile(model, fullgraph=True)
        torch.testing.assert_close(compiled(ids).logits, before, rtol=1e-3, atol=1e-3)


def is_routed(module: torch.nn.Module) -> bool:
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func is route
