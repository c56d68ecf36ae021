"""Changes of a model after `optimize_`: hooks, replaced modules, adapters, export, copies."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from epiloq.nn import Fp4Linear, WeightOnlyLinear
from epiloq.optimize import optimize_, siblings
from epiloq.optimize.merged_layers import concatenated
from small_models import logits, quantised, relative, tokens

# Modules of a decoder layer that a fused forward passes over, or hands quantised tokens to.
PARTS = (
    "input_layernorm",
    "post_attention_layernorm",
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    "self_attn",
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj", "act_fn")),
    "mlp",
)
ROUNDED = 2e-2  # more than a changed rounding of activations, and far less than what the changes below do


def pair(family: str = "llama", scheme: str = "w8a8-int8") -> tuple[Any, Any]:
    """The same quantised model, optimised and not."""
    model = quantised(family, scheme)
    for parameter in model.parameters():  # so that attention and MLP count beside the residual
        if parameter.ndim == 2 and parameter.is_floating_point():
            parameter.data.mul_(3)
    plain = copy.deepcopy(model)
    optimize_(model)
    return model, plain


def _scaled(result: Any) -> Any:
    return (
        result * 1.5 if isinstance(result, Tensor) else tuple(_scaled(t) if i == 0 else t for i, t in enumerate(result))
    )


class Scaled(nn.Module):
    """A module that replaces another and computes something else."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        if hasattr(inner, "weight"):  # as a wrapper that looks like what it wraps
            self.weight, self.variance_epsilon = inner.weight, getattr(inner, "variance_epsilon", 0.0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _scaled(self.inner(*args, **kwargs))


def _hook(model: Any, name: str) -> None:
    model.get_submodule(name).register_forward_hook(lambda _, __, result: _scaled(result))


def _pre_hook(model: Any, name: str) -> None:
    def change(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if "hidden_states" in kwargs:
            return args, kwargs | {"hidden_states": kwargs["hidden_states"] * 1.5}
        return _scaled(args), kwargs

    model.get_submodule(name).register_forward_pre_hook(change, with_kwargs=True)


def _replaced(model: Any, name: str) -> None:
    model.set_submodule(name, Scaled(model.get_submodule(name)))


def _other_forward(model: Any, name: str) -> None:
    """As accelerate puts its own forward around a module's."""
    module = model.get_submodule(name)
    before = module.forward
    module.forward = lambda *args, **kwargs: _scaled(before(*args, **kwargs))


CHANGES: tuple[Callable[[Any, str], None], ...] = (_hook, _pre_hook, _replaced, _other_forward)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_changes_of_parts_count(seed: int, change: Callable[[Any, str], None], part: str) -> None:
    (model, plain), x = pair(), tokens()
    for which in (model, plain):
        change(which, f"model.layers.0.{part}")
    assert relative(logits(model, x), logits(plain, x)) <= ROUNDED


def test_hooks_see_the_same_tensors(seed: int) -> None:
    """Recorded inputs and results, of the model's type and not of quantised tokens."""
    x, seen = tokens(), []
    for model in pair():
        record: dict[str, tuple[torch.dtype, torch.Size]] = {}
        for name, module in model.named_modules():
            module.register_forward_hook(
                lambda _, args, result, name=name, record=record: record.update(
                    {name: (args[0].dtype if args else None, getattr(result, "shape", None))}
                )
            )
        logits(model, x)
        seen.append(record)
    assert seen[0] == seen[1]


def test_another_activation_and_norm(seed: int) -> None:
    (model, plain), x = pair(), tokens()
    for which in (model, plain):
        torch.manual_seed(1)
        which.model.layers[0].mlp.act_fn = nn.GELU()
        which.model.layers[1].input_layernorm = nn.LayerNorm(128)
    assert relative(logits(model, x), logits(plain, x)) <= ROUNDED


class Adapter(nn.Module):
    """A trained matrix of low rank beside a layer."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(base.in_features, 2, False), nn.Linear(2, base.out_features, False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


@pytest.mark.parametrize(
    ("part", "count"),  # a query has no gradient where there is one key
    [
        ("self_attn.q_proj", 7),
        *((p, n) for p in ("self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj", None) for n in (1, 7)),
    ],
)
@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a8-int8", "w4a8-fp8"])
def test_gradients_that_begin_inside(seed: int, scheme: str, part: str | None, count: int) -> None:
    """Of adapters in the second layer, or of the norms, below which nothing is trained."""
    (model, plain), x, found = pair(scheme=scheme), tokens()[:, :count], []
    for which in (model, plain):
        torch.manual_seed(1)
        for name, parameter in which.named_parameters():
            if parameter.is_floating_point() and parameter.requires_grad:
                parameter.requires_grad_(part is None and "norm" in name)
        if part is not None:
            name = f"model.layers.1.{part}"
            which.set_submodule(name, Adapter(which.get_submodule(name)))
        which(x).logits.square().mean().backward()
        found.append({n: p.grad for n, p in which.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() and found[0]
    for name, gradient in found[0].items():
        assert relative(gradient, found[1][name]) <= 5 * ROUNDED, name


def products(graph: Any) -> int:
    """Quantised products of a two-layer model in a graph: 8 where siblings are one, 14 where each layer is called."""
    return sum("epiloq" in str(node.target) and "_mm" in str(node.target) for node in graph.nodes)


@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a8-int8"])
def test_exports(seed: int, scheme: str) -> None:
    """With a product for each layer, since the merged weight is no parameter."""
    (model, plain), x = pair(scheme=scheme), tokens()
    with torch.no_grad():
        exported = torch.export.export(model, (x,), {"use_cache": False}, strict=False).module()
        assert relative(exported(x, use_cache=False).logits, logits(plain, x)) <= ROUNDED
    assert products(exported.graph) == 14


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a8-int8"])
def test_compiled_graphs_have_merged_products(seed: int, scheme: str) -> None:
    """In older versions of torch, `torch.compiler.is_exporting` is true in them."""
    (model, plain), x, found = pair(scheme=scheme), tokens(), []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        found.append(products(graph.graph))
        return graph

    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        assert relative(compiled(x, use_cache=False).logits, logits(plain, x)) <= ROUNDED
    assert found == [8]


def _loaded(model: Any, other: Any) -> Any:
    model.load_state_dict(other.state_dict())
    return model


def _assigned(model: Any, other: Any) -> Any:
    model.load_state_dict({name: tensor.clone() for name, tensor in other.state_dict().items()}, assign=True)
    return model


@torch.no_grad()
def _written(model: Any, other: Any) -> Any:
    for parameter, values in zip(model.parameters(), other.parameters(), strict=True):
        parameter.copy_(values)
    return model


def _written_through_data(model: Any, other: Any) -> Any:
    for parameter, values in zip(model.parameters(), other.parameters(), strict=True):
        parameter.data.copy_(values)
    return model


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "loaded": _loaded,
    "assigned": _assigned,
    "written": _written,
    "written through data": _written_through_data,
    "copied": lambda model, other: copy.deepcopy(_loaded(model, other)),
    "pickled": lambda model, other: pickle.loads(pickle.dumps(_loaded(model, other))),
}


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("scheme", ["w8a8-int8", "w4a16-g32"])
def test_a_compiled_graph_sees_changes(seed: int, scheme: str, change: str, warm: bool) -> None:
    """Without a call in eager mode, before the first call and after it; what is loaded, in the same graph."""
    (model, _), other, x, found = pair(scheme=scheme), quantised("llama", scheme), tokens(), []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        found.append(products(graph.graph))
        return graph

    torch._dynamo.reset()
    with torch.no_grad():
        if warm:
            torch.compile(model, backend=backend)(x, use_cache=False)
        model = CHANGES[change](model, other)
        result = torch.compile(model, backend=backend)(x, use_cache=False).logits
    assert relative(result, logits(other, x)) <= ROUNDED
    if change in ("loaded", "assigned"):
        assert found == [8]


@pytest.mark.parametrize("name", ["weight_perm", "weight_global_scale"])
def test_layers_that_no_longer_fit_together(seed: int, name: str) -> None:
    """Loaded with different values of what one product has once; and merged again when they fit."""
    model, other, x = quantised("llama", "w4a16-nvfp4"), quantised("llama", "w4a16-nvfp4"), tokens()
    for which in (model, other):
        for path, layer in list(which.named_modules()):
            if isinstance(layer, Fp4Linear) and name == "weight_perm":
                packed = _in_order_of_activations(layer)
                which.set_submodule(path, packed)
            elif isinstance(layer, Fp4Linear):
                layer.weight_global_scale.data.fill_(0.5)
    same = copy.deepcopy(other)
    assert len(optimize_(model).merged) == 4
    for path, parameter in other.named_parameters():
        if path.endswith(f"k_proj.{name}"):
            parameter.data.copy_(torch.randperm(parameter.numel()) if name == "weight_perm" else parameter * 1.5)
    for state in (other, same, other):
        model.load_state_dict(state.state_dict())
        assert relative(logits(model, x), logits(state, x)) <= 1e-5
        apart = [
            module.q_proj.forward.args[0].merged() is None for module in model.modules() if hasattr(module, "q_proj")
        ]
        assert apart == [state is other] * 2


def _in_order_of_activations(layer: nn.Linear) -> WeightOnlyLinear:
    made = WeightOnlyLinear(
        layer.in_features, layer.out_features, layer.bias is not None, group_size=32, act_order=True
    )
    fitting = WeightOnlyLinear.from_linear(nn.Linear(layer.in_features, layer.out_features, False), group_size=32)
    made.load_state_dict(fitting.state_dict() | {"weight_perm": torch.arange(layer.in_features)}, strict=False)
    return made


def test_threads_share_an_unmerged_copy(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(layers: Any) -> Any:
        made = concatenated(layers)
        time.sleep(0.005)
        return made

    monkeypatch.setattr(siblings, "concatenated", slowly)
    model, plain = pair(scheme="w4a16-g32")
    inputs = [tokens() for _ in range(6)]
    expected = [logits(plain, x) for x in inputs]
    for _ in range(3):
        copied, start = copy.deepcopy(model), Barrier(len(inputs))

        def run(x: Tensor, copied: Any = copied, start: Barrier = start) -> Tensor:
            start.wait()
            return logits(copied, x)

        with ThreadPoolExecutor(len(inputs)) as pool:
            found = list(pool.map(run, inputs))
        assert max(map(relative, found, expected)) <= 1e-5


@pytest.mark.parametrize("scheme", ["w8a8-int8", "w4a16-g32", "fp8-block"])
def test_writes_through_data_count(seed: int, scheme: str) -> None:
    """Torch does not count them, and merged products are copies."""
    (model, _), x = pair(scheme=scheme), tokens()
    other = copy.deepcopy(model)
    for name, parameter in other.named_parameters():
        if "proj" in name and parameter.is_floating_point():
            parameter.data.mul_(1.5)
    assert relative(logits(model, x), logits(other, x)) > ROUNDED
    state = other.state_dict()
    for name, parameter in model.named_parameters():
        parameter.data.copy_(state[name])
    assert torch.equal(logits(model, x), logits(other, x))


def test_a_layer_of_two_modules_is_merged_in_the_first(seed: int) -> None:
    model, x = quantised("llama", "w4a16-g32"), tokens()
    first, second = (block.self_attn for block in model.model.layers)
    second.k_proj = first.k_proj
    expected = logits(model, x)
    report = optimize_(model)
    assert list(report.left.values()) == ["a layer is merged already, with others"] and len(report.merged) == 3
    assert relative(logits(model, x), expected) <= 1e-5
