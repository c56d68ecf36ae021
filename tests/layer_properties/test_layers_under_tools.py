"""Layers under torch's tools: make_fx, linearisation, ensembles by vmap, functions without gradient, dynamic shapes,
symbolic traces, counts of operations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import epiloq
from epiloq.nn.experts.expert_linears import ExpertLinears, Projections
from epiloq.ops.attention.decode_attention import decode_attention
from every_layer import LAYERS, LINEAR, SIZES, arguments, run
from every_operation import OPERATIONS

FP8 = ("fp8", "fp8-block", "w4a8-fp8")


# Experts read on the host how many rows each has.
@pytest.mark.parametrize("name", [name for name in LAYERS if not name.startswith("experts")])
def test_make_fx(name: str, seed: int) -> None:
    layer, given = LAYERS[name](*SIZES[1]), arguments(name, SIZES[1][0])
    graph = make_fx(lambda *x: run(name, layer, x))(*given)
    assert torch.equal(graph(*given), run(name, layer, given))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", [name for name in LAYERS if not name.startswith("rows")])
def test_traced_programs(name: str, size: tuple[int, int], seed: int, tmp_path: Path) -> None:
    """Also saved and loaded, and with other numbers of rows. TorchScript has no views of another type, and compares
    constants that a program has twice."""
    layer, given = LAYERS[name](*size), arguments(name, size[0])
    assert_traced(layer, given, arguments(name, size[0]), tuple(part[:1] for part in given), folder=tmp_path)


def test_traced_experts_one_by_one(seed: int, tmp_path: Path) -> None:
    """A trace must not hold for the routing alone that it was recorded with."""
    each = [{name: LAYERS["w8a16"](32, 32) for name in Projections().names} for _ in range(4)]
    layer = ExpertLinears(each, nn.SiLU())
    routed = [(torch.randn(m, 32), torch.randint(4, (m, 2)), torch.rand(m, 2)) for m in (6, 6, 1, 9)]
    first = (routed[0][0], torch.zeros_like(routed[0][1]), routed[0][2])  # the others have no rows
    assert_traced(layer, first, *routed, folder=tmp_path)


def assert_traced(layer: nn.Module, given: tuple[Any, ...], *others: tuple[Any, ...], folder: Path) -> None:
    """`torch.jit.trace` records a program that does what the layer does, also for other inputs."""
    with torch.no_grad():
        traced = torch.jit.trace(layer, given, check_trace=False)  # type: ignore[no-untyped-call]
        traced.save(str(folder / "traced.pt"))
        loaded = torch.jit.load(str(folder / "traced.pt"))  # type: ignore[no-untyped-call]
        for each in (given, *others):
            assert torch.equal(loaded(*each), layer(*each))


class _Twice(nn.Module):
    """A model that calls a layer twice, once with the result of an operation."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"layer": layer})

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner["layer"](x.flip(0)), self.inner["layer"](x)


class _RoutedTwice(_Twice):
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.inner["layer"](x.flip(0), chosen, weights), self.inner["layer"](x, chosen, weights)


@pytest.mark.parametrize("name", [name for name in LAYERS if not name.startswith("rows")])
def test_symbolic_traces_call_layers(name: str, seed: int) -> None:
    """As they call torch's: a call is one node, and the graph holds for other sizes."""
    layer, given = LAYERS[name](*SIZES[1]), arguments(name, SIZES[1][0])
    model = _Twice(layer) if len(given) == 1 else _RoutedTwice(layer)
    graph: Any = torch.fx.symbolic_trace(model)
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"] == ["inner.layer"] * 2
    for values in (given, tuple(part[:2] for part in given)):
        for found, expected in zip(graph(*values), model(*values), strict=True):
            assert torch.equal(found, expected)


def test_rows_of_experts_in_a_symbolic_trace(seed: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = LAYERS["rows-int8"](*SIZES[1])

        def forward(self, x: Tensor, offs: Tensor) -> Tensor:
            y: Tensor = self.experts(x, offs=offs)
            return y

    model, x, offs = Model(), torch.randn(6, SIZES[1][0]), torch.tensor([2, 6], dtype=torch.int32)
    assert torch.equal(torch.fx.symbolic_trace(model)(x, offs), model(x, offs))


@pytest.mark.parametrize("name", ["int8", "w4a16-scaled", "conv-int8", "table"])
def test_what_a_symbolic_trace_cannot_hold_is_refused(name: str, seed: int) -> None:
    layer, given = LAYERS[name](*SIZES[1]), arguments(name, SIZES[1][0])
    with pytest.raises(TypeError, match=r"expected to be part of the model that torch.fx traces.*Sequential"):
        torch.fx.symbolic_trace(layer)
    model = nn.Sequential(layer)
    layer.register_forward_pre_hook(lambda _, x: (x[0] + 1,))
    with pytest.raises(TypeError, match=r"without hooks.*is_leaf_module"):
        torch.fx.symbolic_trace(model)

    class Leaves(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return m is layer

    graph = torch.fx.GraphModule(model, Leaves().trace(model))
    assert torch.equal(graph(*given), model(*given))


@pytest.mark.parametrize("name", LINEAR)
def test_linearised(name: str, seed: int) -> None:
    layer: Any = LAYERS[name](*SIZES[1])
    x, dx = torch.randn(2, 4, SIZES[1][0])
    y, push = torch.func.linearize(layer, x)
    assert torch.equal(y, layer(x))
    torch.testing.assert_close(push(dx), dx @ layer.dequantized_weight().T, rtol=1e-5, atol=1e-5)


# The scale of an int8 convolution's input is a number on the host, and so the same for all.
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "conv-int8"])
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_ensembles(name: str, size: tuple[int, int], seed: int) -> None:
    layers, given = [LAYERS[name](*size) for _ in range(2)], arguments(name, size[0])
    offs = {"offs": torch.tensor([2, 6], dtype=torch.int32)} if name.startswith("rows") else {}
    parameters, buffers = torch.func.stack_module_state(layers)

    def one(*state: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layers[0], state, given, offs)  # type: ignore[no-any-return]

    together = torch.func.vmap(one)(parameters, buffers)
    for y, layer in zip(together, layers, strict=True):
        torch.testing.assert_close(y, run(name, layer, given), rtol=1e-5, atol=1e-6)


def test_embeddings_of_mapped_ids(seed: int) -> None:
    embedding = epiloq.nn.QuantizedEmbedding.from_embedding(nn.Embedding(20, 32))
    ids = torch.randint(20, (3, 4))
    assert torch.equal(torch.func.vmap(embedding)(ids), embedding(ids))


class _Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> None:
        return None


@pytest.mark.parametrize("name", [*LINEAR, "conv-w4a16", "rows-int8"])
def test_a_function_without_gradient_may_follow(name: str, seed: int) -> None:
    layer, (x, *rest) = LAYERS[name](*SIZES[1]), arguments(name, SIZES[1][0])
    _Stop.apply(run(name, layer, (x.requires_grad_(), *rest))).sum().backward()
    assert x.grad is None


@pytest.mark.parametrize("name", FP8)
def test_gradients_through_two_layers_in_a_dynamic_graph(name: str, seed: int) -> None:
    model = nn.Sequential(LAYERS[name](32, 48), LAYERS[name](48, 16))
    x = torch.randn(5, 32, requires_grad=True)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    (found,), (expected,) = (torch.autograd.grad(f(x).square().sum(), x) for f in (compiled, model))
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["experts-w4a8-nvfp4"])
def test_experts_in_a_dynamic_graph(name: str, seed: int) -> None:
    layer, (x, *rest) = LAYERS[name](*SIZES[1]), arguments(name, SIZES[1][0])
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(x, *rest), layer(x, *rest))
    x.requires_grad_()
    (found,), (expected,) = (torch.autograd.grad(f(x, *rest).square().sum(), x) for f in (compiled, layer))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [*LINEAR, "conv-int8", "conv-w4a16"])
def test_the_input_has_the_name_that_torch_gives_it(name: str, seed: int) -> None:
    layer, (x,) = LAYERS[name](*SIZES[1]), arguments(name, SIZES[1][0])
    assert torch.equal(layer(input=x), layer(x))


@pytest.mark.parametrize("name", ["conv-int8", "conv-w4a16"])
def test_images_without_a_batch(name: str, seed: int) -> None:
    layer, (x,) = LAYERS[name](*SIZES[1]), arguments(name, SIZES[1][0])
    image = x[0].requires_grad_()
    y = layer(image)
    assert torch.equal(y, layer(x[:1])[0])
    if y.is_floating_point():
        (found,) = torch.autograd.grad(y.square().sum(), image)
        assert found.shape == image.shape and found.any()
    with pytest.raises(ValueError, match=r"x: expected \[B, 37, H, W\] or \[37, H, W\], got"):
        layer(x[0, 0])


def operations_of(f: Any, *given: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        f(*given)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("table", "quantize")])
def test_torch_counts_the_operations_of_a_layer(name: str, seed: int) -> None:
    """As many as the float layer's; forward, and of the input's gradient where a layer has one."""
    k, n = SIZES[0]
    layer, (x, *rest) = LAYERS[name](k, n), arguments(name, k)
    rows = x.numel() // k  # pixels of a convolution that keeps the size of an image
    expected = 2 * rows * k * n * {"conv": 9, "expe": 2 * 3}.get(name[:4], 1)
    found = operations_of(lambda: run(name, layer, (x, *rest)))
    # Gate and up are each padded to a block of 128 rows, which are multiplied.
    assert found > expected if name == "experts-fp8-block" else found == expected
    if name in (*LINEAR, "conv-w4a16"):
        x.requires_grad_()
        assert operations_of(lambda: run(name, layer, (x,)).sum().backward()) == 2 * expected


def test_torch_counts_the_operations_of_products(seed: int) -> None:
    """Also of those that are written into `out`, and of attention as of torch's."""
    for operation in OPERATIONS:
        arguments = operation.arguments()
        if not ("_mm" in operation.name or "bmm" in operation.name or "conv" in operation.name):
            assert operations_of(lambda: operation.call(**arguments)) == 0  # noqa: B023
        elif "out" in arguments:
            total = operations_of(lambda: operation.call(**arguments))  # noqa: B023
            without = arguments | {"out": None} | ({"scale_out": None} if "scale_out" in arguments else {})
            assert total > 0 and total == operations_of(lambda: operation.call(**without))  # noqa: B023
    query, key, value = torch.randn(2, 8, 16), *torch.randn(2, 2, 4, 7, 16)
    keys, values = (part.repeat_interleave(2, 1) for part in (key, value))
    in_full = operations_of(lambda: torch.softmax(query[:, :, None] @ keys.mT, -1) @ values)
    assert operations_of(decode_attention, query, key, value) == in_full


LOOKED_FOR = "import epiloq; from importlib.util import find_spec; assert find_spec('torch.utils.flop_counter')"


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import epiloq", "import torch.utils.flop_counter", LOOKED_FOR])
def test_operations_are_counted_whichever_is_imported_first(first: str) -> None:
    code = f"""
import sys, torch
assert "torch.utils.flop_counter" not in sys.modules
{first}
import epiloq
from torch.utils.flop_counter import FlopCounterMode
a, one = torch.ones(3, 32, dtype=torch.int8), torch.ones(1)
with FlopCounterMode(display=False) as counter:
    epiloq.scaled_mm(a, a.t(), one, one)
print(counter.get_total_flops(), *(f for f in sys.meta_path if "epiloq" in type(f).__module__))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == str(2 * 3 * 3 * 32), done.stderr
