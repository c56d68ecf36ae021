"""What does not fit is refused by name, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import epiloq
from epiloq import _core
from product_arguments import product
from reference import Problem, assert_within_one_ulp

Arguments = dict[str, Any]
OPERATIONS: dict[str, Callable[..., Any]] = {
    "scaled_mm": epiloq.scaled_mm,
    "scaled_mm_azp": epiloq.scaled_mm_azp,
    "quantize_int8": epiloq.quantize_int8,
}


def static_quantisation(m: int = 6, k: int = 24) -> Arguments:
    azp = torch.randint(-128, 128, (m, 1), dtype=torch.int32)
    return {"x": torch.randn(m, k), "scale": torch.rand(m, 1) + 0.1, "azp": azp}


VALID: dict[str, Callable[[], Arguments]] = {
    "scaled_mm": lambda: product(zero_point=False),
    "scaled_mm_azp": lambda: product(zero_point=True),
    "quantize_int8": static_quantisation,
}


def widened(t: Tensor) -> Tensor:
    return torch.cat([t, t[-1:]])


def spread(t: Tensor) -> Tensor:
    """The same values, two elements apart in every dimension."""
    wide = torch.zeros([2 * size for size in t.shape], dtype=t.dtype)
    view = wide[tuple(slice(None, None, 2) for _ in t.shape)]
    return view.copy_(t)


def shifted(t: Tensor) -> Tensor:
    """The same values and strides, one element past 16-byte alignment."""
    memory = torch.zeros(t.numel() + 17, dtype=t.dtype)
    return memory.as_strided(t.shape, t.stride(), 1).copy_(t)


def repeated(t: Tensor) -> Tensor:
    return t.flatten()[:1].expand(t.numel()).view_as(t) if t.ndim == 1 else t[:1, :1].expand(t.shape)


def to_dtype(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda t: t.to(dtype)


WRONG_DTYPES = (
    torch.float64,
    torch.complex64,
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float8_e4m3fn,
)
ANYWHERE: dict[str, Callable[[Tensor], Tensor]] = {
    **{str(dtype).removeprefix("torch."): to_dtype(dtype) for dtype in WRONG_DTYPES},
    "seven dimensions": lambda t: t.reshape((1,) * (7 - t.ndim) + t.shape),
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "one too many": widened,
    "one too few": lambda t: t[:-1],
    "spread": spread,
    "repeated": repeated,
}
OPERANDS = {
    "the other layout": lambda t: t.t().contiguous().t() if t.is_contiguous() else t.contiguous(),
    "shifted": shifted,
    "rank 3": lambda t: t[None],
    "rank 0": lambda t: t[0, 0],
}
VECTORS = {
    "a scalar": lambda t: t.flatten()[0],
    "a matrix": lambda t: t.flatten()[None].repeat(3, 1),
}
# What is no mistake: one value for all.
ALLOWED = {("scale_a", "a scalar"), ("scale_b", "a scalar"), ("scale", "a scalar"), ("azp", "a scalar")}


def corruptions_of(argument: str) -> dict[str, Callable[[Tensor], Tensor]]:
    if argument == "x":
        return {name: ANYWHERE[name] for name in ANYWHERE if name not in ("one too many", "one too few")}
    special = OPERANDS if argument in ("a", "b", "out") else VECTORS
    return {name: f for name, f in {**ANYWHERE, **special}.items() if (argument, name) not in ALLOWED}


CORRUPTIONS = [
    pytest.param(operation, argument, corrupt, id=f"{operation}-{argument}-{name}")
    for operation, valid in VALID.items()
    for argument in valid()
    for name, corrupt in corruptions_of(argument).items()
]


def memory_of(t: Tensor) -> Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


def assert_refused(operation: str, arguments: Arguments, *named: str) -> str:
    """The call raises ValueError naming the operation and one of `named`; inputs and `out` stay as they were."""
    before = {name: value.clone() for name, value in arguments.items() if value.layout == torch.strided}
    with pytest.raises(ValueError, match=f"^epiloq.{operation}: ({'|'.join(named)}): .*(got|beside|apart)") as error:
        OPERATIONS[operation](**arguments)
    for name, value in before.items():
        assert value.is_meta or torch.equal(memory_of(value), memory_of(arguments[name])), name
    return str(error.value)


@pytest.mark.parametrize(("operation", "argument", "corrupt"), CORRUPTIONS)
def test_one_wrong_argument(seed: int, operation: str, argument: str, corrupt: Callable[[Tensor], Tensor]) -> None:
    arguments = VALID[operation]()
    wrong = corrupt(arguments[argument])
    arguments[argument] = wrong
    # The lengths of the others follow a, b, x and scale: where one of those has the wrong one, another may be named.
    others = {"a": ["out", "b"], "b": ["out", "scale_b"], "scale": ["azp"], "x": ["scale"]}.get(argument, [])
    message = assert_refused(operation, arguments, argument, *others)
    name = str(wrong.dtype).removeprefix("torch.")
    if wrong.dtype in WRONG_DTYPES and wrong.dtype not in (torch.complex64, torch.float8_e4m3fn):
        assert f"{argument}: expected" in message and f"got {name} " in message


@pytest.mark.parametrize(
    ("operation", "argument"), [(operation, argument) for operation, valid in VALID.items() for argument in valid()]
)
def test_non_tensors_are_refused(operation: str, argument: str) -> None:
    optional = {"bias", "out", "azp", "scale"}
    for wrong in ([1, 2], "weight", 3, np.zeros(3, np.int8), *(() if argument in optional else (None,))):
        arguments = {**VALID[operation](), argument: wrong}
        if operation == "quantize_int8" and argument == "scale":
            arguments["azp"] = None
        with pytest.raises(TypeError, match=f"epiloq.{operation}: {argument}: .*{type(wrong).__name__}"):
            OPERATIONS[operation](**arguments)


@settings(max_examples=150)
@given(st.data(), st.sampled_from(sorted(VALID)), st.integers(0, 2**31))
def test_any_corruption_of_any_size(data: st.DataObject, operation: str, seed: int) -> None:
    torch.manual_seed(seed)
    m, n, k = (data.draw(st.integers(2, 40)) for _ in range(3))
    arguments = static_quantisation(m, k) if operation == "quantize_int8" else product("azp" in operation, m, n, k)
    argument = data.draw(st.sampled_from(sorted(arguments)))
    name = data.draw(st.sampled_from(sorted(corruptions_of(argument))))
    if name == "one too few" and argument in ("scale_a", "scale_b", "azp", "scale"):
        arguments[argument] = arguments[argument].flatten().repeat(3)[: arguments[argument].numel() + 1]
    else:
        arguments[argument] = corruptions_of(argument)[name](arguments[argument])
    assert_refused(operation, arguments, *arguments)


def test_layout_of_b() -> None:
    arguments = product(zero_point=False)
    arguments["b"] = arguments["b"].contiguous()
    assert "weight.t()" in assert_refused("scaled_mm", arguments, "b")


@pytest.mark.parametrize(("operation", "limit"), [("scaled_mm", 131071), ("scaled_mm_azp", 65793)])
def test_the_longest_k(operation: str, limit: int) -> None:
    for k in (limit, limit + 1):
        arguments = product(operation == "scaled_mm_azp", 2, 3, k)
        if k > limit:
            assert str(limit) in assert_refused(operation, arguments, "a")
        else:
            OPERATIONS[operation](**arguments)
            p = Problem(*(arguments.get(name) for name in ("a", "b", "scale_a", "scale_b", "bias", "azp", "azp_adj")))
            p.weight = p.weight.t()
            assert_within_one_ulp(arguments["out"], p)


@pytest.mark.parametrize("argument", ["a", "b", "scale_a", "scale_b", "bias", "azp_adj", "azp"])
def test_out_over_an_input(argument: str) -> None:
    """Memory shared wholly, and by out's last element alone."""
    for first in (0, 59):
        arguments = product(zero_point=True)
        out, overlapped = arguments["out"], arguments[argument]
        memory = torch.zeros(1024, dtype=torch.uint8)
        memory.view(torch.bfloat16)[:60].copy_(out.flatten())
        arguments["out"] = memory.view(torch.bfloat16)[:60].view(6, 10)
        start = 2 * first // overlapped.element_size() if argument not in ("a", "b") else 16 * (2 * first // 16)
        shared = memory.view(overlapped.dtype).as_strided(overlapped.shape, overlapped.stride(), start)
        arguments[argument] = shared
        assert argument in assert_refused("scaled_mm_azp", arguments, "out")


def test_out_beside_an_input() -> None:
    """Neighbours in one allocation are no overlap."""
    arguments = product(zero_point=False)
    expected = epiloq.scaled_mm(**{**arguments, "out": None})
    memory = torch.zeros(64, dtype=torch.bfloat16)
    arguments["out"], arguments["bias"] = memory[:60].view(6, 10), memory[60:].repeat(3)[:10].copy_(arguments["bias"])
    assert torch.equal(epiloq.scaled_mm(**arguments), expected)


@pytest.mark.parametrize("dtype", [*WRONG_DTYPES, torch.int8, None, "bfloat16"])
@pytest.mark.parametrize("operation", ["scaled_mm", "scaled_mm_azp"])
def test_out_dtype(operation: str, dtype: Any) -> None:
    arguments = {**product("azp" in operation), "out": None, "out_dtype": dtype}
    with pytest.raises(ValueError, match=f"epiloq.{operation}: out_dtype: expected .*{dtype}"):
        OPERATIONS[operation](**arguments)


def test_gradients_beside_out() -> None:
    arguments = product(zero_point=True)
    for name in ("scale_a", "scale_b", "bias", "out"):
        wrong = {**arguments, name: arguments[name].clone().requires_grad_()}
        with pytest.raises(ValueError, match=f"epiloq.scaled_mm_azp: {name}: .*requires grad"):
            epiloq.scaled_mm_azp(**wrong)
        with torch.no_grad():
            assert torch.equal(epiloq.scaled_mm_azp(**wrong), epiloq.scaled_mm_azp(**arguments))


def test_supports_agrees_with_the_call() -> None:
    for operation, valid in VALID.items():
        assert epiloq.supports(operation, **valid())[0]
        for argument in valid():
            for corrupt in corruptions_of(argument).values():
                arguments = valid()
                arguments[argument] = corrupt(arguments[argument])
                ok, reason = epiloq.supports(operation, **arguments)
                assert not ok and reason.startswith(f"epiloq.{operation}: ")
    for kwargs, named in (
        ({"granularity": "row"}, "granularity"),
        ({"pad_to": 0}, "pad_to"),
        ({"symmetric": False, "scale": torch.ones(1)}, "azp"),
    ):
        ok, reason = epiloq.supports("quantize_int8", torch.randn(3, 4), **kwargs)
        assert not ok and reason.startswith(f"epiloq.quantize_int8: {named}: ")


def test_config_and_names() -> None:
    for call in (
        lambda: epiloq.explain("matmul"),
        lambda: epiloq.explain("scaled_mm", m=1, n=8, k=16, arch="sm99"),
        lambda: epiloq.config(arch="sm99").__enter__(),
    ):
        with pytest.raises(ValueError, match=r"epiloq(\.explain)?: (name|arch): expected one of"):
            call()
    with pytest.raises(RuntimeError, match="inside"), epiloq.config(arch="sm80"):
        assert _core.forced_arch() == "sm80"
        raise RuntimeError("inside")
    assert _core.forced_arch() == "auto"
