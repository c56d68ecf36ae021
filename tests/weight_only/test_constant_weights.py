"""Products told that `b` is constant read it early: the same bits, whatever runs before them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import epiloq
from epiloq.nn import Fp8BlockLinear, Fp8Linear, Int8Linear
from reference import poisoned

E4M3 = torch.float8_e4m3fn
Product = Callable[..., Tensor]


def values(rows: int, columns: int, device: str, kind: torch.dtype) -> Tensor:
    if kind == torch.int8:
        return torch.randint(-128, 128, (rows, columns), dtype=torch.int8, device=device)
    return torch.randn(rows, columns, device=device).to(kind)


def scales(rows: int, columns: int, device: str) -> Tensor:
    return torch.rand(rows, columns, device=device) * 0.02 + 1e-3


def whole_rows(m: int, n: int, k: int, device: str, kind: torch.dtype = torch.int8, **kwargs: bool) -> Product:
    a, b = values(m, k, device, kind), values(n, k, device, kind).t()
    return partial(epiloq.scaled_mm, a, b, scales(m, 1, device), scales(1, n, device), **kwargs)


def zero_points(m: int, n: int, k: int, device: str) -> Product:
    a, b = values(m, k, device, torch.int8), values(n, k, device, torch.int8).t()
    sums, azp = b.sum(0, dtype=torch.int32), torch.randint(-128, 128, (m, 1), dtype=torch.int32, device=device)
    return partial(epiloq.scaled_mm_azp, a, b, scales(m, 1, device), scales(1, n, device), sums, azp)


def groups(m: int, n: int, k: int, device: str, columns: bool = False) -> Product:
    depth = -(-k // 128)
    a, b = values(m, k, device, E4M3), values(n, k, device, E4M3).t()
    scale_a = scales(depth, -(-m // 4) * 4, device)[:, :m].t() if columns else scales(m, depth, device)
    return partial(epiloq.groupwise_mm, a, b, scale_a, scales(-(-n // 128), depth, device).t())


PRODUCTS: dict[str, Callable[..., Product]] = {
    "int8": whole_rows,
    "int8, zero points": zero_points,
    "float8": partial(whole_rows, kind=E4M3),
    "float8, fast sums": partial(whole_rows, kind=E4M3, fast_accum=True),
    "groups, scales in rows": groups,
    "groups, scales in columns": partial(groups, columns=True),
}


def assert_same_bits(product: Product, m: int, n: int, device: str) -> None:
    expected = product()
    for dtype in (torch.bfloat16, torch.float16):
        out = poisoned((m, n), dtype, device)
        assert product(out=out, constant_b=True) is out
        assert torch.equal(out, product(out_dtype=dtype))
    assert torch.equal(product(constant_b=True), expected)


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 16, 128), (17, 104, 96), (64, 24, 576), (65, 40, 1040), (3, 8, 16), (0, 8, 16), (5, 16, 0)]
)
def test_same_bits(seed: int, device: str, kind: str, m: int, n: int, k: int) -> None:
    assert_same_bits(PRODUCTS[kind](m, n, k, device), m, n, device)


def test_compiles(seed: int, device: str) -> None:
    for make in (whole_rows, zero_points, groups):
        product = make(5, 32, 256, device)
        compiled = torch.compile(partial(product, constant_b=True), fullgraph=True)
        assert torch.equal(compiled(), product())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", PRODUCTS)
def test_every_tile_for_small_m(seed: int, kind: str) -> None:
    """Widths that suit each tile, one wave and several, and K that fills the stages in part, exactly, or often."""
    for n in (2112, 4096, 5000, 6144, 7168, 8192, 14336, 28672):
        for m, k in ((1, 128), (1, 1040), (7, 4096), (64, 640), (64, 2304)):
            product = PRODUCTS[kind](m, n, k, "cuda")
            expected = product()
            outs = [poisoned((m, n), torch.bfloat16, "cuda") for _ in range(3)]
            torch.cuda.synchronize()
            for out in outs:  # two of them behind one that still runs
                product(out=out, constant_b=True)
            assert all(torch.equal(out, expected) for out in outs)


LAYERS: dict[str, tuple[Callable[[nn.Linear], nn.Module], Callable[..., object], dict[str, object], str]] = {
    "int8": (Int8Linear.from_linear, epiloq.quantize_int8, {}, "weight_scale"),
    "float8": (Fp8Linear.from_linear, epiloq.quantize_fp8, {"granularity": "token"}, "weight_scale"),
    "float8 in groups": (
        Fp8BlockLinear.from_linear,
        epiloq.quantize_fp8,
        {"granularity": "block"},
        "weight_scale_inv",
    ),
}


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("m", [1, 16, 100])
def test_a_weight_quantised_right_before_its_layer(seed: int, kind: str, m: int) -> None:
    """A layer's product need not wait for its weight, as the quantiser of its tokens did before it let it start."""
    make, quantise, how, scale_name = LAYERS[kind]
    linears = [nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    x = torch.randn(m, 4096, device="cuda").bfloat16()
    with torch.no_grad():
        expected = [make(linear)(x) for linear in linears]
        layer = make(linears[0])
        scale = getattr(layer, scale_name)
        stored = layer.weight_q if kind == "int8" else layer.weight_q.view(E4M3)
        outputs = (stored, scale if kind == "float8 in groups" else scale.unsqueeze(1))
        out = (*outputs, None) if kind == "int8" else outputs
        torch.cuda.synchronize()
        for turn in range(60):
            which = turn % 2
            quantise(linears[which].weight, out=out, **how)
            assert torch.equal(layer(x), expected[which]), turn


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("m", [1, 16, 64, 130])
def test_layers_in_a_row(seed: int, kind: str, m: int) -> None:
    """Each layer's tokens are what the one before it wrote, in eager torch and in a graph."""
    make = LAYERS[kind][0]
    sizes = [1024, 4096, 1536, 6144, 1024]
    layers = [make(nn.Linear(k, n, dtype=torch.bfloat16, device="cuda")) for k, n in itertools.pairwise(sizes)]
    x = torch.randn(m, 1024, device="cuda").bfloat16()
    y = torch.empty_like(x)

    def run(synchronise: bool = False) -> Tensor:
        state = x
        for layer in layers * 4:
            state = layer(state)
            if synchronise:
                torch.cuda.synchronize()
        return state

    with torch.no_grad():
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y.copy_(run())
        for _ in range(8):
            x.normal_()
            expected = run(synchronise=True)
            assert torch.equal(run(), expected)
            graph.replay()
            assert torch.equal(y, expected)
