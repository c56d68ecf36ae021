"""scaled_bmm against float64: kinds, scales, strides without copies, int8 outputs; on the CPU and on a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import epiloq
from bmm_reference import E4M3, INT8, KINDS, Problem, assert_close, defined_int8, exact, make, values
from reference import poisoned

HALVES = [torch.float16, torch.bfloat16]
SHAPES = [(1, 17, 24, 32), (3, 1, 128, 64), (5, 100, 40, 576), (2, 130, 136, 80), (4, 17, 33, 100), (2, 65, 1, 17)]


def call(p: Problem, **kwargs: object) -> Tensor:
    return epiloq.scaled_bmm(p.a, p.b, p.scale_a, p.scale_b, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("scales", ["one", "product", "rows"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64(
    seed: int, device: str, shape: tuple[int, int, int, int], scales: str, kind: tuple[torch.dtype, torch.dtype]
) -> None:
    p = make(*shape, kind=kind, scales=scales, device=device)
    for dtype in HALVES:
        out = poisoned(shape[:3], dtype, device)
        assert call(p, out=out) is out
        assert_close(out, p)


@pytest.mark.parametrize("scales", ["one", "product", "rows"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int8_output(seed: int, device: str, shape: tuple[int, int, int, int], scales: str) -> None:
    p = make(*shape, scales=scales, device=device)
    for scale in (float(exact(p)[0].abs().max()) / 120, 1e-3):  # in range, and mostly saturated
        scale_out = torch.tensor([scale], device=device)
        assert torch.equal(call(p, out_dtype=INT8, scale_out=scale_out), defined_int8(p, scale_out))


def test_int8_output_ties_and_nan(device: str) -> None:
    """Halves go to the even neighbour; NaN, which a scale brought, becomes 0."""
    ones = torch.ones(1, 24, 16, dtype=INT8, device=device)
    a = torch.zeros(1, 24, 16, dtype=INT8, device=device)
    a[0, :, 0] = torch.arange(-12, 12)
    one, two = torch.ones(1, device=device), torch.full((1,), 2.0, device=device)
    out = epiloq.scaled_bmm(a, ones.mT, one, one, out_dtype=INT8, scale_out=two)
    expected = [round(i / 2) for i in range(-12, 12)]  # Python's round takes ties to even
    assert out[0].t().tolist() == [expected] * 24
    nan = epiloq.scaled_bmm(a, ones.mT, one * float("nan"), one, out_dtype=INT8, scale_out=two)
    assert (nan == 0).all()


def heads(x: Tensor, count: int) -> Tensor:
    """[tokens, heads * width] as [heads, tokens, width], a view."""
    return x.view(x.shape[0], count, -1).transpose(0, 1)


@pytest.mark.parametrize("kind", KINDS[:2], ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(40, 64), (200, 128), (33, 20)])
def test_attention_views(
    seed: int, device: str, tokens: int, width: int, kind: tuple[torch.dtype, torch.dtype]
) -> None:
    """Heads that interleave in memory; keys shared by several; the output in place among others."""
    count = 4
    q, k = (values(tokens, count * width, dtype=d).to(device) for d in kind)
    dense = make(count, tokens, tokens, width, kind=kind, device=device)
    view = Problem(heads(q, count), heads(k, count), dense.scale_a, dense.scale_b)
    assert not view.a.is_contiguous()
    copy = Problem(view.a.contiguous(), view.weight.contiguous(), dense.scale_a, dense.scale_b)
    assert torch.equal(call(view), call(copy))
    shared = Problem(view.a, view.weight[:1].expand(count, -1, -1), dense.scale_a, dense.scale_b)
    assert_close(call(shared), shared)
    wide = torch.full((tokens, count, tokens + 24), 7.0, dtype=torch.bfloat16, device=device)
    call(view, out=wide[..., 16 : tokens + 16].transpose(0, 1))
    assert torch.equal(wide[..., 16 : tokens + 16].transpose(0, 1), call(copy))
    assert (wide[..., :16] == 7).all() and (wide[..., tokens + 16 :] == 7).all()


def test_a_batch_of_one_is_scaled_mm(seed: int, device: str) -> None:
    p = make(3, 100, 96, 64, device=device)
    for i in range(3):
        part = Problem(p.a[i : i + 1], p.weight[i : i + 1], p.scale_a[i : i + 1], p.scale_b[i : i + 1])
        plain = epiloq.scaled_mm(p.a[i], p.b[i], p.scale_a[i], p.scale_b[i])
        assert torch.equal(call(part)[0], plain)
        assert torch.equal(call(p)[i], plain)


def test_scales_of_a_strided_batch(seed: int, device: str) -> None:
    p = make(3, 40, 48, 64, device=device)
    wide = torch.rand(6, 64, 1, device=device)
    p.scale_a = wide[::2, :40]
    p.scale_b = p.scale_b[:1].expand(3, 1, 48)
    assert_close(call(p), p)


@pytest.mark.parametrize("shape", [(0, 8, 16, 32), (2, 0, 16, 32), (2, 8, 0, 32), (2, 8, 16, 0)], ids=str)
def test_empty(device: str, shape: tuple[int, int, int, int]) -> None:
    for scales in ("product", "rows"):
        out = call(make(*shape, scales=scales, device=device))
        assert out.shape == shape[:3] and (out == 0).all()


@settings(max_examples=60)
@given(data=st.data())
def test_any_shape_and_stride(data: st.DataObject) -> None:
    """Every order of the dimensions in memory, with gaps."""
    sizes = st.integers(1, 9)
    batches, m, n, k = (data.draw(sizes) for _ in range(4))

    def view(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        batches_inside, gap = data.draw(st.booleans()), data.draw(st.integers(0, 3))
        if batches_inside:
            return torch.zeros(rows, batches, columns + gap, dtype=dtype)[..., :columns].transpose(0, 1)
        return torch.zeros(batches, rows + gap, columns, dtype=dtype)[:, :rows]

    p = make(
        batches, m, n, k, kind=data.draw(st.sampled_from(KINDS)), scales=data.draw(st.sampled_from(["one", "rows"]))
    )
    p.a, p.weight = view(m, k, p.a.dtype).copy_(p.a), view(n, k, p.weight.dtype).copy_(p.weight)
    out = view(m, n, torch.float32)
    assert_close(call(p, out=out), p)


def test_long_sums_are_exact(seed: int) -> None:
    p = make(2, 3, 8, 131071, scales="one")
    p.a.fill_(-128), p.weight.fill_(-128)
    p.scale_a.fill_(2.0**-7), p.scale_b.fill_(2.0**-9)  # Powers of two, which round nothing.
    assert (call(p, out_dtype=torch.float32) == exact(p)[0].float()).all()
    with pytest.raises(ValueError, match="a: expected K of at most 131071"):
        call(make(1, 1, 1, 131072))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles(seed: int, device: str, dynamic: bool) -> None:
    def attention(p: Problem, scale_out: Tensor) -> tuple[Tensor, Tensor]:
        return call(p, out_dtype=torch.float16), call(p, out_dtype=INT8, scale_out=scale_out)

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for shape in ((2, 8, 16, 32), (3, 9, 24, 32)):
        p = make(*shape, device=device)
        scale_out = torch.full((1,), 5.0, device=device)
        for got, expected in zip(compiled(p, scale_out), attention(p, scale_out), strict=True):
            assert torch.equal(got, expected)


BAD = {
    "a: expected 3 dimensions": {"a": torch.zeros(8, 32, dtype=INT8)},
    r"b: expected \[2, 32, N\]": {"b": torch.zeros(3, 16, 32, dtype=INT8).mT},
    "b: expected int8, got float8": {"b": torch.zeros(2, 16, 32).to(E4M3).mT},
    "b: expected stride 1 along K": {"b": torch.zeros(2, 32, 16, dtype=INT8)},
    "a: expected stride 1 along K": {"a": torch.zeros(2, 32, 8, dtype=INT8).mT},
    "a: expected rows that do not overlap": {"a": torch.zeros(2, 1, 32, dtype=INT8).expand(2, 8, 32)},
    r"scale_a: expected one element, \[B, 1, 1\] or \[B, M, 1\]": {"scale_a": torch.ones(8)},
    r"scale_b: expected one element, \[B, 1, 1\] or \[B, 1, N\]": {"scale_b": torch.ones(2, 16, 1)},
    "scale_a: expected neighbours in memory": {"scale_a": torch.ones(8, 2, 1).transpose(0, 1)},
    "scale_a: expected float32": {"scale_a": torch.ones(1).double()},
    "out_dtype: expected": {"out_dtype": torch.int32},
    "scale_out: expected a scale": {"out_dtype": INT8},
    "scale_out: expected none": {"scale_out": torch.ones(1)},
    "scale_out: expected one element": {"scale_out": torch.ones(2), "out_dtype": INT8},
    "out: expected int8": {"scale_out": torch.ones(1), "out": torch.zeros(2, 8, 16)},
    r"out: expected \[2, 8, 16\]": {"out": torch.zeros(2, 8, 24)},
    "out: expected batches that do not overlap": {"out": torch.zeros(1, 8, 16).expand(2, 8, 16)},
    "out: expected stride 1 along N": {"out": torch.zeros(2, 16, 8).mT},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message: str) -> None:
    p = make(2, 8, 16, 32)
    good = {"a": p.a, "b": p.b, "scale_a": p.scale_a, "scale_b": p.scale_b}
    with pytest.raises(ValueError, match=f"epiloq.scaled_bmm: {message}"):
        epiloq.scaled_bmm(**{**good, **BAD[message]})
    supported, reason = epiloq.supports("scaled_bmm", **{**good, **BAD[message]})
    assert not supported and "scaled_bmm" in reason


def test_overlaps_and_kinds_are_refused() -> None:
    p = make(2, 8, 32, 32)
    memory = torch.zeros(4 * 8 * 32, dtype=INT8)
    p.a = memory[: 2 * 8 * 32].view(2, 8, 32)
    with pytest.raises(ValueError, match="out: expected memory apart from a's"):
        call(p, scale_out=torch.ones(1), out=memory[256:768].view(2, 8, 32))
    rows = torch.zeros(2 * 8 * 32 + 8)
    with pytest.raises(ValueError, match="out: expected batches that do not overlap"):
        call(p, out=rows.as_strided((2, 8, 32), (8, 32, 1)))
    float8 = make(2, 8, 32, 32, kind=(E4M3, E4M3))
    with pytest.raises(ValueError, match="a: expected int8 with scale_out"):
        call(float8, out_dtype=INT8, scale_out=torch.ones(1))


def test_explain() -> None:
    p = make(2, 8, 16, 32)
    assert "cpu, int8 products" in epiloq.explain("scaled_bmm", p.a, p.b, p.scale_a, p.scale_b)
    with epiloq.config(arch="sm90"):
        assert "sm90 wgmma" in epiloq.explain("scaled_bmm", p.a, p.b, p.scale_a, p.scale_b)
        int8 = {"out_dtype": INT8, "scale_out": torch.ones(1)}
        assert "to int8" in epiloq.explain("scaled_bmm", p.a, p.b, p.scale_a, p.scale_b, **int8)
    sizes = list(itertools.product((1, 33, 64, 65, 512, 1024), (8, 40, 64, 72, 512, 1024)))
    problem = {"k": 64, "batches": 32}
    for arch, dtype, tiles in (("sm90", INT8, 4), ("sm90", E4M3, 4), ("sm80", INT8, 3), ("sm89", E4M3, 3)):
        seen = {epiloq.explain("scaled_bmm", m=m, n=n, **problem, arch=arch, dtype=dtype) for m, n in sizes}
        assert len(seen) == tiles, seen
    to_int8 = {epiloq.explain("scaled_bmm", m=m, n=n, **problem, int8_out=True) for m, n in sizes}
    assert len(to_int8) == 3 and all("sm80" in kernel for kernel in to_int8)
    assert "slow" in epiloq.explain("scaled_bmm", m=64, n=64, k=100, batches=2, aligned=False)
    assert "slow" in epiloq.explain("scaled_bmm", m=64, n=64, k=64, batches=2, int8_out=True, arch="sm75")
    with pytest.raises(ValueError, match="batches: expected at least 1"):
        epiloq.explain("scaled_bmm", m=64, n=64, k=64, batches=0)


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ["sm75", "sm80", "sm89", "sm90"])
def test_every_tile_on_a_gpu(seed: int, arch: str) -> None:
    """Tiles of every table, with products enough to fill the SMs and one more."""
    kinds = KINDS[1:] if arch == "sm89" else KINDS[:1] if arch in ("sm75", "sm80") else KINDS
    with epiloq.config(arch=arch):
        for kind, m, n in itertools.product(kinds, (1, 33, 64, 200, 600), (16, 64, 136, 600)):
            p = make(133 if m < 600 else 3, m, n, 144, kind=kind, device="cuda")
            arguments = (p.a, p.b, p.scale_a, p.scale_b)
            supported, reason = epiloq.supports("scaled_bmm", *arguments)
            if not supported:
                pytest.skip(reason)
            for dtype in HALVES:
                out = poisoned((*p.a.shape[:2], n), dtype, "cuda")
                assert_close(call(p, out=out), p)
            if kind == KINDS[0]:
                scale_out = (exact(p)[0].abs().max() / 100).float().reshape(1)
                assert torch.equal(call(p, out_dtype=INT8, scale_out=scale_out), defined_int8(p, scale_out))


@pytest.mark.gpu
def test_graphs_and_repeats_give_the_same_bits(seed: int) -> None:
    p = make(64, 257, 264, 64, device="cuda")
    expected, out = call(p), torch.empty(64, 257, 264, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call(p, out=out)
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)
