"""The operations inside torch: dispatcher, tracing, compilation, fakes, modes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import epiloq
from epiloq._torch.calls import direct
from operator_calls import operator_calls
from reference import Problem, make_problem

Call = Callable[[Tensor], Any]
OPS = torch.ops.epiloq
OP_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield


def linear(p: Problem, x: Tensor) -> tuple[Tensor, ...]:
    """Every public path: measured per token with and without zero points, per tensor, and static."""
    assert p.azp_adj is not None
    q, scale, _ = epiloq.quantize_int8(x)
    plain = epiloq.scaled_mm(q, p.b, scale, p.scale_b, p.bias, out_dtype=torch.float16)
    q, scale, azp = epiloq.quantize_int8(x, symmetric=False)
    with_azp = epiloq.scaled_mm_azp(q, p.b, scale, p.scale_b, p.azp_adj, azp, p.bias, out_dtype=torch.float16)
    q, scale, azp = epiloq.quantize_int8(x, symmetric=False, granularity="tensor")
    per_tensor = epiloq.scaled_mm_azp(q, p.b, scale, p.scale_b, p.azp_adj, azp, out_dtype=torch.bfloat16)
    q, scale, _ = epiloq.quantize_int8(x, scale=p.scale_b[:1], pad_to=8)
    return plain, with_azp, per_tensor, q


def into(p: Problem, x: Tensor) -> tuple[Tensor, ...]:
    """The same through out=."""
    rows = x.shape[0]
    q, scale = torch.empty_like(x, dtype=torch.int8), x.new_empty((rows, 1))
    azp = x.new_empty((rows, 1), dtype=torch.int32)
    out, out_azp = (x.new_empty((rows, p.weight.shape[0]), dtype=torch.float16) for _ in range(2))
    epiloq.quantize_int8(x, symmetric=False, out=(q, scale, azp))
    epiloq.scaled_mm(q, p.b, scale, p.scale_b, p.bias, out=out)
    epiloq.scaled_mm_azp(q, p.b, scale, p.scale_b, p.azp_adj, azp, p.bias, out=out_azp)
    return q, scale, azp, out, out_azp


def problem(m: int = 5, n: int = 7, k: int = 17, device: str = "cpu") -> tuple[Problem, Tensor]:
    p = make_problem(m, n, k, bias=True, zero_point="token", dtype=torch.float16, device=device)
    return p, torch.randn(m, k, device=device)


def same(results: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [(5, 7, 17), *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((0, 8, 16), (1, 8, 16), (3, 0, 16)))],
    ids=str,
)
def test_opcheck(seed: int, device: str, shape: tuple[int, int, int]) -> None:
    """Schema, fake, autograd registration and AOT dispatch of every operator, with each optional argument."""
    checked = set()
    for op, args, kwargs in operator_calls(*shape, device):
        # The check of the schema compares inputs with allclose, which torch lacks for FP8 on the CPU.
        takes_fp8 = any(isinstance(a, Tensor) and a.dtype == torch.float8_e4m3fn for a in args)
        torch.library.opcheck(op.default, args, kwargs, test_utils=OP_CHECKS[1:] if takes_fp8 else OP_CHECKS)
        checked.add(op.default.name())
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("epiloq::")}
    assert checked == registered - {"epiloq::refused_gradient"}  # which only raises


@pytest.mark.parametrize("f", [linear, into])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(seed: int, device: str, f: Callable[..., tuple[Tensor, ...]], dynamic: bool) -> None:
    p, x = problem(device=device)
    compiled = torch.compile(partial(f, p), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for m in (5, 9, 1, 64):
        x = torch.randn(m, 17, device=device)
        assert same(compiled(x), f(p, x))


@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_inductor(seed: int) -> None:
    p, x = problem()
    assert same(torch.compile(partial(linear, p), fullgraph=True)(x), linear(p, x))


@pytest.mark.gpu
def test_inductor_with_cuda_graphs(seed: int) -> None:
    p, x = problem(device="cuda")
    compiled = torch.compile(partial(linear, p), fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        x = torch.randn_like(x)
        assert same(tuple(part.clone() for part in compiled(x)), linear(p, x))


def test_compile_reports_bad_arguments(seed: int) -> None:
    """Shapes and dtypes while tracing, layouts and pointers when the graph runs."""
    p, _ = problem()
    for wrong, text in ((p.weight[:, :-1].t(), r"scaled_mm: b: expected \[17, N\]"), (p.b.contiguous(), "weight.t()")):
        compiled = torch.compile(
            lambda b: epiloq.scaled_mm(p.a, b, p.scale_a, p.scale_b), fullgraph=True, backend="eager"
        )
        with pytest.raises(Exception, match=text):
            compiled(wrong)


@pytest.mark.parametrize("strict", [False, True])
def test_export(seed: int, strict: bool) -> None:
    p, x = problem()

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return linear(p, x)

    rows = torch.export.Dim("rows", min=2, max=4096)
    exported = torch.export.export(Model(), (x,), dynamic_shapes={"x": {0: rows}}, strict=strict)
    targets = [str(node.target) for node in exported.graph.nodes if "epiloq" in str(node.target)]
    assert len(targets) == 8, targets
    for m in (2, 33):
        x = torch.randn(m, 17)
        assert same(exported.module()(x), linear(p, x))


@pytest.mark.parametrize(
    "trace",
    [
        lambda f, x: torch.fx.symbolic_trace(f),
        lambda f, x: make_fx(f)(x),
        lambda f, x: torch.jit.trace(f, (x,)),
        lambda f, x: torch.func.functionalize(f),
    ],
    ids=["fx", "make_fx", "jit", "functionalize"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tracers(seed: int, trace: Callable[[Call, Tensor], Call]) -> None:
    """What is traced is the operation and not one outcome: it holds for another input."""
    p, _ = problem()

    def f(a: Tensor) -> Tensor:
        return epiloq.scaled_mm_azp(a, p.b, p.scale_a, p.scale_b, p.azp_adj, p.azp, p.bias, out_dtype=torch.float16)

    traced, other = trace(f, p.a), p.a.flip(1).clone()
    assert "scaled_mm_azp" in str(getattr(traced, "graph", "scaled_mm_azp"))
    assert torch.equal(traced(other), f(other)) and not torch.equal(traced(other), f(p.a))


def shapes(results: tuple[Tensor, ...]) -> list[tuple[Any, ...]]:
    return [(part.shape, part.stride(), part.dtype) for part in results]


def moved(p: Problem, to: Callable[[Tensor], Tensor]) -> Problem:
    return Problem(**{name: None if value is None else to(value) for name, value in vars(p).items()})


@pytest.mark.parametrize("shape", [(5, 7, 17), (1, 8, 16), (0, 8, 16)], ids=str)
def test_fake_and_meta_tensors(seed: int, shape: tuple[int, int, int]) -> None:
    """Shapes, strides and dtypes without memory, of every path."""
    p, x = problem(*shape)
    calls = [linear, into] if shape[0] else [into]  # nothing can be measured in an empty tensor
    for f in calls:
        expected = shapes(f(p, x))
        assert shapes(f(moved(p, lambda t: t.to("meta")), x.to("meta"))) == expected
        with FakeTensorMode() as mode:
            assert shapes(f(moved(p, mode.from_tensor), mode.from_tensor(x))) == expected


def test_fake_tensors_keep_leading_dimensions() -> None:
    a, b, scale = (torch.empty(shape, device="meta") for shape in ((2, 3, 17), (7, 17), (1,)))
    out = epiloq.scaled_mm(a.to(torch.int8), b.to(torch.int8).t(), scale, scale)
    assert out.shape == (2, 3, 7) and out.is_meta


@pytest.mark.parametrize("name", ["a", "b", "scale_a", "scale_b", "bias"])
def test_one_tensor_on_meta(seed: int, name: str) -> None:
    """Neither a result without values nor one of values that were never computed, by either way in."""
    p, _ = problem()
    arguments = {key: getattr(p, key) for key in ("a", "b", "scale_a", "scale_b", "bias")}
    arguments[name] = arguments[name].to("meta")
    named = "b" if name == "a" else name
    for call in (epiloq.scaled_mm, OPS.scaled_mm):
        with pytest.raises(ValueError, match=f"epiloq.scaled_mm: {named}: expected"):
            call(**arguments, out_dtype=torch.float16)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(f))
        return f(*args, **(kwargs or {}))


class SeenAbove(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(f))
        return f(*args, **(kwargs or {}))


class Scaled(Tensor):
    """A subclass without behaviour of its own."""


@pytest.mark.parametrize("mode", [Seen, SeenAbove])
@pytest.mark.parametrize("f", [linear, into])
def test_modes_see_the_operations(seed: int, mode: type, f: Callable[..., tuple[Tensor, ...]]) -> None:
    p, x = problem()
    with mode() as seen:
        results = f(p, x)
    assert sum("epiloq" in name for name in seen.names) == (8 if f is linear else 3), seen.names
    assert same(results, f(p, x))


def test_subclasses_take_the_dispatcher(seed: int) -> None:
    p, _ = problem()
    expected = epiloq.scaled_mm(p.a, p.b, p.scale_a, p.scale_b, p.bias, out_dtype=torch.float16)
    for name in ("a", "weight", "scale_a", "scale_b", "bias"):
        q = moved(p, lambda t: t)
        setattr(q, name, getattr(p, name).as_subclass(Scaled))
        out = epiloq.scaled_mm(q.a, q.b, q.scale_a, q.scale_b, q.bias, out_dtype=torch.float16)
        assert type(out) is Scaled and torch.equal(out.as_subclass(Tensor), expected)


def test_parameters_are_plain_tensors(seed: int) -> None:
    p, x = problem()
    q = moved(p, lambda t: torch.nn.Parameter(t, requires_grad=False))
    assert direct((q.a, q.scale_a), (q.bias, None)) and same(linear(q, x), linear(p, x))


@pytest.mark.parametrize("f", [linear, into])
def test_inference_and_no_grad(seed: int, device: str, f: Callable[..., tuple[Tensor, ...]]) -> None:
    """A bias that requires grad does not matter where gradients are off."""
    p, x = problem(device=device)
    expected = f(p, x)
    p.bias = torch.nn.Parameter(p.bias)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            results = f(p, x)
            assert same(results, expected) and not any(part.requires_grad for part in results)
            assert same(f(p, x.clone()), expected)


def test_results_do_not_depend_on_global_torch_state(seed: int) -> None:
    """Autocast, default devices and default dtypes are for the caller's own tensors."""
    p, x = problem(6, 9, 1100)
    expected, empty = linear(p, x), epiloq.quantize_int8(torch.empty(3, 0))
    for context in (torch.autocast("cpu", torch.bfloat16), torch.device("meta")):
        with context:
            assert same(linear(p, x), expected)
            assert same(epiloq.quantize_int8(torch.empty(3, 0, device="cpu"))[:2], empty[:2])
    torch.set_default_dtype(torch.float64)
    try:
        assert same(linear(p, x), expected)
    finally:
        torch.set_default_dtype(torch.float32)
