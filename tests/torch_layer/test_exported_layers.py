"""Every layer goes through torch.export, and into packages of AOTInductor, which hold no infinite numbers."""

from __future__ import annotations

import copy
import pickle
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

import every_layer
from epiloq._torch import dtype_numbers
from epiloq.nn import (
    ExpertLinears,
    Fp8Linear,
    Fp8WeightOnlyLinear,
    Int8Conv2d,
    Int8Linear,
    OnlineQuantLinear,
    QuantizedEmbedding,
    TableLinear,
    WeightOnlyConv2d,
)

CONVOLUTIONS: dict[str, Any] = {
    "conv-int8-float": lambda k, n: Int8Conv2d.from_conv2d(
        nn.Conv2d(k, n, 3), input_scale=0.02, input_zero_point=3, clamp=(0.0, float("inf"))
    ),
    "conv-w8a16-depthwise": lambda k, n: WeightOnlyConv2d.from_conv2d(nn.Conv2d(k, k, 3, groups=k), bits=8),
}
LAYERS = every_layer.LAYERS | CONVOLUTIONS


class Called(nn.Module):
    """A layer, called as the tests call it."""

    def __init__(self, name: str, k: int, n: int) -> None:
        super().__init__()
        self.name, self.layer = name, LAYERS[name](k, n)

    def forward(self, *given: Tensor) -> Tensor:
        return every_layer.run(self.name, self.layer, given)


@pytest.mark.parametrize("size", every_layer.SIZES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_exported(name: str, size: tuple[int, int], seed: int) -> None:
    module, given = Called(name, *size).eval(), every_layer.arguments(name, size[0])
    with torch.no_grad():
        exported = torch.export.export(module, given)
        other = every_layer.arguments(name, size[0])
        assert torch.equal(exported.module()(*other), module(*other))
    texts = [str(node.target) for node in exported.graph.nodes]
    by_torch = isinstance(module.layer, (Fp8WeightOnlyLinear, TableLinear))  # they dequantise and multiply in torch
    assert any("epiloq" in text for text in texts) or by_torch
    assert not any(isinstance(a, float) and abs(a) == float("inf") for node in exported.graph.nodes for a in node.args)


def embedding(zeros: str) -> nn.Module:
    table = nn.Embedding(40, 32)
    return QuantizedEmbedding.from_embedding(table, bits=4, group_size=16, zeros=zeros)


EMBEDDINGS: dict[str, Any] = {f"embedding-{zeros}": partial(embedding, zeros) for zeros in ("none", "zero")}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", [*LAYERS, *EMBEDDINGS])
def test_exported_for_any_number_of_tokens(name: str, strict: bool, seed: int) -> None:
    """Or of images, or of pixels of a table: a traced size must not become a constant."""
    if name in EMBEDDINGS:
        module, given = EMBEDDINGS[name](), (torch.randint(40, (6,)),)
        other: tuple[Tensor, ...] = (torch.randint(40, (9,)),)
    else:
        module, given = Called(name, 32, 16).eval(), every_layer.arguments(name, 32)
        other = tuple(torch.cat([t, t[:1]]) for t in every_layer.arguments(name, 32))
    tokens = torch.export.Dim("tokens")
    each = tuple({0: tokens} for _ in given)
    with torch.no_grad():
        shapes = each if name in EMBEDDINGS else (each,)
        exported = torch.export.export(module, given, dynamic_shapes=shapes, strict=strict)
        rows = 6 if name.startswith("rows") else None  # those that `every_layer.run` gives to experts
        assert torch.equal(exported.module()(*other)[:rows], module(*other)[:rows])


def one_by_one(make: Any, **options: Any) -> ExpertLinears:
    """Three experts of separate layers."""

    def layer(k: int, n: int) -> nn.Module:
        found: nn.Module = make(nn.Linear(k, n, bias=False))
        return found

    each = [{"gate_proj": layer(32, 16), "up_proj": layer(32, 16), "down_proj": layer(16, 32)} for _ in range(3)]
    return ExpertLinears(each, nn.SiLU(), **options)


ONE_BY_ONE: dict[str, Any] = {
    "w8a8-block": lambda: one_by_one(partial(OnlineQuantLinear.from_linear, group_size=16)),
    # One scale for all rows, which are those of one expert.
    "fp8": lambda: one_by_one(partial(Fp8Linear.from_linear, activation="tensor", weight="tensor")),
    "w8a8-int8-azp": lambda: one_by_one(partial(Int8Linear.from_linear, symmetric=False), identities=1),
    "float": lambda: one_by_one(nn.Identity(), post_expert_norm=nn.LayerNorm(32)),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_exported_experts_one_by_one(name: str, strict: bool, seed: int) -> None:
    """A program has no numbers of rows on the host; what is measured over rows is that of each expert's."""
    module = ONE_BY_ONE[name]().eval()
    experts = module.experts + module.identities

    def given(tokens: int) -> tuple[Tensor, ...]:
        # Of very different sizes, so that another token's would change an expert's scale.
        x = torch.randn(tokens, 32) * torch.tensor([1.0, 30.0]).repeat(tokens)[:tokens, None]
        return x, torch.randint(experts, (tokens, 2)), torch.rand(tokens, 2)

    tokens = torch.export.Dim("tokens")
    with torch.no_grad():
        exported = torch.export.export(module, given(6), dynamic_shapes=({0: tokens},) * 3, strict=strict).module()
        for other in (given(9), (given(4)[0], torch.full((4, 2), 1), torch.rand(4, 2))):
            torch.testing.assert_close(exported(*other), module(*other), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_copies_that_were_never_called(name: str, seed: int) -> None:
    """A graph finds what kernels read from numbers, such as zero points, derived already."""
    module, given = Called(name, *every_layer.SIZES[1]).eval(), every_layer.arguments(name, every_layer.SIZES[1][0])
    with torch.no_grad():
        expected = module(*given)
        assert torch.equal(torch.export.export(copy.deepcopy(module), given).module()(*given), expected)
        torch._dynamo.reset()
        compiled = torch.compile(pickle.loads(pickle.dumps(module)), backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(*given), expected)


class Several(nn.Module):
    """Layers side by side, each with inputs of its own."""

    def __init__(self, names: list[str], k: int, n: int) -> None:
        super().__init__()
        self.each = nn.ModuleList(Called(name, k, n) for name in names)
        self.counts = [len(every_layer.arguments(name, k)) for name in names]

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        results, begin = [], 0
        for layer, count in zip(self.each, self.counts, strict=True):
            results.append(layer(*given[begin : begin + count]))
            begin += count
        return tuple(results)


# One of each kind of arguments that a schema holds; building a package takes a while.
FEW = ["w4a16", "w8a8-block", "conv-w4a16", "conv-int8-float"]
# On a CPU, inductor before torch 2.13 writes C++ that does not declare float8, where it pads activations or weights.
PADDED_FLOAT8 = [name for name in LAYERS if "fp8" in name or name == "rows-w4a8"]
PACKAGED = [name for name in LAYERS if name not in PADDED_FLOAT8 or TorchVersion(torch.__version__) >= (2, 13)]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="AOTInductor needs a C++ compiler")
@pytest.mark.parametrize("names", [FEW, pytest.param(PACKAGED, marks=pytest.mark.slow)], ids=["few", "all"])
def test_packaged(names: list[str], seed: int, tmp_path: Path) -> None:
    """All in one package."""
    k, n = every_layer.SIZES[1]
    module = Several(names, k, n).eval()
    given = tuple(t for name in names for t in every_layer.arguments(name, k))
    with torch.no_grad():
        program = torch.export.export(module, given)
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layers.pt2"))
        loaded = torch._inductor.aoti_load_package(path)
        other = tuple(t for name in names for t in every_layer.arguments(name, k))
        for name, found, expected in zip(names, loaded(*other), module(*other), strict=True):
            if name.startswith(
                ("table-4", "fp8-weight-only", "experts")
            ):  # partly torch's own floating point, which inductor may reorder
                torch.testing.assert_close(found, expected)
            else:
                assert torch.equal(found, expected), name


@pytest.mark.parametrize("dtype", dtype_numbers.DTYPES.values(), ids=str)
def test_numbers_of_dtypes(dtype: torch.dtype) -> None:
    """Where schemas have integers for data types (torch before 2.12), functions get the type that was passed."""
    passed: list[object] = []

    def function(x: Tensor, place: int, by_place: torch.dtype, *, first: int, by_name: torch.dtype) -> Tensor:
        passed.extend([place, by_place, first, by_name])
        return x.clone()

    library = torch.library.Library("epiloq_test", "FRAGMENT")
    arguments = "Tensor x, int place, ScalarType by_place, *, int first, ScalarType by_name"
    schema, (implementation,) = dtype_numbers.with_numbers(f"numbers({arguments}) -> Tensor", function)
    assert "ScalarType" not in schema
    library.define(schema)
    library.impl("numbers", implementation, "CPU")
    torch.ops.epiloq_test.numbers(torch.zeros(1), 7, dtype, first=15, by_name=dtype)
    assert passed == [7, dtype, 15, dtype]
    library._destroy()


def test_schema_without_dtypes() -> None:
    schema = "plain(Tensor x, int n) -> Tensor"
    assert dtype_numbers.with_numbers(schema, torch.relu) == (schema, [torch.relu])
