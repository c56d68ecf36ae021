"""Experts without gates, with gates of their own, in transposed stacks; and what runs between their two products."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import epiloq
from epiloq.models import mixtures
from epiloq.nn import ExpertLinears, GatedExperts
from epiloq.nn.experts import expert_linears
from epiloq.nn.experts.gating import OwnGate, gate_of
from gated_problems import EXPERTS, KINDS, TOP_K, floats, quantised, routed, together, weight_of
from other_mixtures import FAMILIES, deepseek_v4, logits, minimax_m3, nemotron_h
from reference import typical_error
from tiny_mixtures import error

BOUNDS = {"w8a8-int8": 0.04, "fp8-block": 0.09, "w4a16-g32": 0.25, "w4a16-nvfp4": 0.25, "w4a8-int8": 0.4}


@pytest.mark.usefixtures("epiloq_in_transformers")
@pytest.mark.parametrize("scheme", BOUNDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_saved_and_opened(family: str, scheme: str, seed: int, tmp_path: Path) -> None:
    model = FAMILIES[family]()
    with pytest.warns(UserWarning) if family == "deepseek_v4" else nullcontext():
        found = epiloq.quantize_(copy.deepcopy(model), scheme)
    names = [name for name, module in found.named_modules() if isinstance(module, GatedExperts)]
    assert names == list(mixtures.stacked(model)) != []
    x, index, weights = torch.randn(30, 64), torch.randint(0, 4, (30, 2)), torch.rand(30, 2)
    with torch.no_grad():
        exact = model.get_submodule(names[-1])(x, index, weights)
        assert 1e-4 < error(found.get_submodule(names[-1])(x, index, weights), exact) < BOUNDS[scheme]
    y = logits(found)
    assert typical_error(y, logits(model)) < 1
    found.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved")
    assert all(isinstance(again.get_submodule(name), GatedExperts) for name in names)
    assert torch.equal(logits(again), y)


class Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x).square()


@pytest.mark.parametrize("family", FAMILIES)
def test_apart_and_together(family: str, seed: int) -> None:
    """The same numbers, one memory, and a changed matrix is where it was taken from."""
    model = FAMILIES[family]()
    before, parameters = logits(model), dict(model.named_parameters())
    with mixtures.unstacked_experts(model):
        (name, experts), *_ = [(n, m) for n, m in model.named_modules() if isinstance(m, ExpertLinears)]
        assert len(experts.layers(0)) == (2 if family == "nemotron_h" else 3)
        torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)
        storages = {parameter.untyped_storage().data_ptr() for parameter in parameters.values()}
        assert all(layer.weight.untyped_storage().data_ptr() in storages for layer in experts.layers(3))
    assert {name: id(p) for name, p in model.named_parameters()} == {n: id(p) for n, p in parameters.items()}
    with mixtures.unstacked_experts(model):
        last = model.get_submodule(name).layers(2)[-1]
        last.weight = nn.Parameter(last.weight * 2)
    found, old = (tensors.get(f"{name}.down_proj") for tensors in (dict(model.named_parameters()), parameters))
    assert found is not None and old is not None and found.is_contiguous() and found.shape == old.shape
    assert torch.equal(found[2], 2 * old[2]) and torch.equal(found[3], old[3])


@pytest.mark.parametrize("kind", KINDS)
def test_without_gates_against_float64(kind: str, seed: int) -> None:
    """Experts with two matrices, of squared ReLUs, from the first products on."""
    make, module, grid = KINDS[kind]

    gated = floats(72, 40)
    layers: Any = [dict(zip(("up_proj", "down_proj"), gated.layers(e)[1:], strict=True)) for e in range(EXPERTS)]
    apart = quantised(ExpertLinears(layers, Squared()), make)
    whole = together(apart)
    assert type(whole.down) is module and whole.gate_up.out_features == whole.up_begins
    x, index, weights = routed(9, 72, torch.float32)
    y = whole(x, index, weights)
    assert torch.equal(y, pickle.loads(pickle.dumps(whole))(x, index, weights))
    expected = torch.zeros(9, 72, dtype=torch.float64)
    for token in range(9):
        for j in range(TOP_K):
            up, down = (weight_of(layer) for layer in apart.layers(int(index[token, j])))
            inner = functional.relu(x[token].double() @ up.double().t()).square()
            expected[token] += weights[token, j].double() * (inner @ down.double().t())
    largest, _ = grid
    assert error(y, expected) < (1e-5 if not largest else 0.03 if largest == 127 else 0.08)


def test_gates_are_found(seed: int) -> None:
    """DeepSeek-V4's and MiniMax-M3's, which are then fused."""
    plain = {"alpha": 1.0, "limit": math.inf, "offset": 0.0}
    limited, other = plain | {"limit": 0.7}, {"alpha": 1.702, "limit": 7.0, "offset": 1.0}
    gate, up = torch.randn(2, 5, 8).mul(3).unbind()
    for model, wanted in ((deepseek_v4(), limited), (minimax_m3(), other)):
        module = model.model.layers[1].mlp.experts
        own = OwnGate(module)
        assert torch.equal(own(gate, up), module._apply_gate(torch.cat((gate, up), -1)))
        assert gate_of(own) == wanted and not list(own.modules())[1:]
    assert gate_of(nn.SiLU()) == plain and gate_of(nn.GELU()) is None and gate_of(nn.ReLU()) is None


class Gated(nn.Module):
    """Experts with a gate, and numbers that it may use or not."""

    def __init__(self, gate: Callable[[Tensor, Tensor], Tensor], **numbers: float) -> None:
        super().__init__()
        self.__dict__.update(numbers, gate=gate)

    def _apply_gate(self, both: Tensor) -> Tensor:
        result: Tensor = self.__dict__["gate"](*both.chunk(2, -1))
        return result


def gate_with(function: Callable[[Tensor, Tensor], Tensor], **numbers: float) -> Any:
    return gate_of(OwnGate(Gated(function, hidden_dim=2048, num_experts=128, **numbers)))


@pytest.mark.parametrize("limit", [0.1, 7, 25.5, 30, 100, 1e4, math.inf])
@pytest.mark.parametrize(("alpha", "offset"), [(1.0, 0.0), (1.702, 1.0), (0.5, 1.0), (500.0, 0.0)])
def test_gates_of_any_numbers_are_found(alpha: float, offset: float, limit: float) -> None:
    def gate(gates: Tensor, ups: Tensor) -> Tensor:
        gates = gates.clamp(max=limit)
        return gates * torch.sigmoid(alpha * gates) * (ups.clamp(-limit, limit) + offset)

    assert gate_with(gate, alpha=alpha, limit=limit) == {"alpha": alpha, "limit": limit, "offset": offset}


silu = functional.silu
OTHER_GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda g, u: functional.relu(g) * u,
    "relu with a limit": lambda g, u: functional.relu(g.clamp(max=20)) * u.clamp(-20, 20),
    "threshold": lambda g, u: functional.threshold(g, 0.3, 0) * u,
    "nothing for small gates": lambda g, u: torch.where(g.abs() > 0.4, silu(g), 0) * u,
    "limit of ups": lambda g, u: silu(g) * u.clamp(-20, 20),
    "limit of gates": lambda g, u: silu(g.clamp(max=20)) * u,
    "upper limit of ups": lambda g, u: silu(g) * u.clamp(max=20),
    "lower limit of ups": lambda g, u: silu(g) * u.clamp(min=-20),
    "limit after the offset": lambda g, u: silu(g) * (u + 1).clamp(-20, 20),
    "limit that is no attribute": lambda g, u: silu(g.clamp(max=33)) * u.clamp(-33, 33),
    "gelu": lambda g, u: functional.gelu(g) * u,
    "another dtype": lambda g, u: (silu(g) * u).double(),
}


@pytest.mark.parametrize("name", OTHER_GATES)
def test_other_gates_are_not_taken_for_these(name: str) -> None:
    for number in (20.0, math.inf, 10**400):
        assert gate_with(OTHER_GATES[name], limit=number) is None


@pytest.mark.parametrize("trained", [True, False])
def test_gates_that_may_change_are_not_recognised(trained: bool) -> None:
    class Swish(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.beta = nn.Parameter(torch.ones(())) if trained else nn.Buffer(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(self.beta * x)

    assert gate_of(Swish()) is None


@pytest.mark.parametrize(
    ("gate", "reason"),
    [
        (lambda self, x: x[..., ::2] * x[..., 1::2], "their gate is not elementwise"),
        (lambda self, x: x.chunk(2, -1)[0].softmax(-1), "their gate is not elementwise"),
        (lambda self, x: self.nothing(x), "their gate is not elementwise"),
    ],
)
def test_other_gates_are_left(gate: Any, reason: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = deepseek_v4()
    monkeypatch.setattr(type(model.model.layers[0].mlp.experts), "_apply_gate", gate)
    assert set(mixtures.experts_left_stacked(model).values()) == {reason}


def test_gates_with_parameters_are_left(seed: int) -> None:
    model = minimax_m3()
    for layer in model.model.layers:
        layer.mlp.experts.act_fn = nn.PReLU()
    assert set(mixtures.experts_left_stacked(model).values()) == {"their gate has parameters"}


class Launches(TorchDispatchMode):
    """Counts operations that launch a kernel on a GPU, but for checks of a CPU's own."""

    VIEWS: ClassVar = {
        "view",
        "slice",
        "chunk",
        "split",
        "t",
        "transpose",
        "select",
        "unsqueeze",
        "expand",
        "detach",
        "alias",
    }
    FREE: ClassVar = VIEWS | {"empty", "new_empty", "empty_strided", "new_empty_strided", "empty_like"}
    CHECKS: ClassVar = {"aminmax", "_local_scalar_dense"}

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name not in self.FREE | self.CHECKS:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_passes_between_the_products(kind: str, seed: int) -> None:
    """Gate, product and quantiser are one, and rows that stay in floating point have no scales to gather."""
    whole = together(quantised(floats(128, 64, torch.bfloat16), KINDS[kind][0]))
    x, index, weights = routed(9, 128, torch.bfloat16)
    index = index.contiguous()
    with torch.no_grad(), Launches() as seen:
        whole(x, index, weights)
    first, second = (i for i, name in enumerate(seen.seen) if name.endswith("_mm"))
    between = seen.seen[first + 1 : second]
    assert between == (["silu_and_mul_quant"] if whole.down.quantize_options else ["silu", "mul"])
    # Of FP8 blocks, scales of tokens are padded to be gathered; a scale a token is gathered beside the tokens.
    assert len(seen.seen) == (17 if kind == "fp8-block" else 16 if whole.down.quantize_options else 15), seen.seen


@pytest.mark.parametrize("kind", KINDS)
def test_passes_where_a_kernel_gathers(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: one pass sorts, gathers and quantises, with the same result."""
    whole = together(quantised(floats(128, 64, torch.bfloat16), KINDS[kind][0]))
    x, index, weights = routed(9, 128, torch.bfloat16)
    index = index.contiguous()
    with torch.no_grad():
        expected = whole(x, index, weights)
        monkeypatch.setattr(expert_linears, "_by_kernel", lambda index, experts: True)
        with Launches() as seen:
            y = whole(x, index, weights)
    assert seen.seen[0] == "gather_expert_rows" and seen.seen[1].endswith("_mm"), seen.seen
    assert torch.equal(y, expected)


@pytest.mark.parametrize("make", [deepseek_v4, minimax_m3])
def test_passes_with_another_gate(make: Any, seed: int) -> None:
    """None more than with SiLU, and the same numbers as by its own module."""
    model = epiloq.quantize_(make().bfloat16(), "fp8-block")
    experts = model.model.layers[1].mlp.experts
    arguments = routed(9, 64, torch.bfloat16)
    arguments = (arguments[0], arguments[1] % 4, arguments[2])
    with torch.no_grad(), Launches() as seen:
        y = experts(*arguments)
    first, second = (i for i, name in enumerate(seen.seen) if name == "grouped_mm")
    assert seen.seen[first + 1 : second] == ["silu_and_mul_quant"]
    experts._gate = None
    assert error(experts(*arguments), y) < 0.02


@pytest.mark.slow
def test_compiled(seed: int) -> None:
    for make in (deepseek_v4, nemotron_h, minimax_m3):
        model = epiloq.quantize_(make(), "w8a8-int8")
        (experts,) = [m for m in model.modules() if isinstance(m, GatedExperts)][:1]
        x, index, weights = torch.randn(7, 64), torch.randint(0, 4, (7, 2)), torch.rand(7, 2)
        compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            assert torch.equal(compiled(x, index, weights), experts(x, index, weights))


def test_experts_whose_matrices_share_rows(seed: int) -> None:
    """DBRX's stay in floating point, with a reason, and so do their routers."""
    attention, routed = (
        {"kv_n_heads": 2, "rope_theta": 1e4},
        {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    )
    sizes = {"d_model": 64, "n_heads": 4, "n_layers": 1, "max_seq_len": 64, "vocab_size": 96}
    config = transformers.DbrxConfig(attn_config=attention, ffn_config=routed, **sizes)
    model = transformers.DbrxForCausalLM(config).eval()
    assert list(mixtures.routers(model)) == ["transformer.blocks.0.ffn.router.layer"]
    assert list(mixtures.experts_left_stacked(model)) == ["transformer.blocks.0.ffn.experts.mlp"]
    epiloq.quantize_(model, "w4a16-g32")
    router = model.get_submodule("transformer.blocks.0.ffn.router.layer")
    assert type(router) is nn.Linear and router.weight.is_floating_point()
    assert type(model.get_submodule("transformer.blocks.0.norm_attn_norm.attn.Wqkv")).__name__ == "WeightOnlyLinear"
