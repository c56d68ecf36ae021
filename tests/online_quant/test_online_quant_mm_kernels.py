"""online_quant_mm on a GPU: every kernel of the tables, the staged reference, graphs, streams, overlapping launches."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import epiloq
from blockwise_kernels import ROWS, SIZES_M, SIZES_N, kernel, some, term_magnitude
from blockwise_reference import assert_close, make_weight
from reference import poisoned, ulp


def shapes_of_every_kernel(group: int, bits: int, arch: str) -> list[tuple[int, int]]:
    """A few shapes for each kernel, in random order."""
    shapes = list(itertools.product(SIZES_M, SIZES_N))
    of_kernel: dict[str, list[tuple[int, int]]] = {}
    for i in torch.randperm(len(shapes)).tolist():
        of_kernel.setdefault(kernel(*shapes[i], 4096, group, bits, arch), []).append(shapes[i])
    return [shape for chosen in of_kernel.values() for shape in chosen[:4]]


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ROWS)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_kernel(seed: int, arch: str, group: int, bits: int) -> None:
    """Odd M and N leave ragged tiles; K is ragged in the last block and step, once with more steps than stages."""
    if arch not in epiloq._core.built_archs():
        pytest.skip(f"built without {arch}")
    for i, (m, n) in enumerate(shapes_of_every_kernel(group, bits, arch)):
        k, offset = ((2300, False), (304, True), (100, True), (2312, True))[i % 4]
        x = (torch.randn(m, k) * torch.rand(m, 1) + 0.2).to("cuda", torch.bfloat16)
        weight = make_weight(n, k, group, bits=bits, offset=offset, device="cuda")
        bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
        out = poisoned((m, n), torch.bfloat16, "cuda")
        with epiloq.config(arch=arch):
            epiloq.online_quant_mm(x, weight.prepared(), bias=bias, out=out)
        assert not out.isnan().any(), (m, n, k)
        rows, columns = some(m, 40).cuda(), some(n, 60).cuda()
        chosen = replace(
            weight,
            q=weight.q[columns],
            scale=weight.scale[columns],
            offset=None if weight.offset is None else weight.offset[columns],
        )
        assert_close(out[rows][:, columns], x[rows], chosen, bias[columns])


def integers(m: int, k: int, group: int) -> Tensor:
    """float32 values that are quantised exactly: each block spans -128 to 127, so its scale is 1 and its offset 0."""
    x = torch.randint(-128, 128, (m, k), device="cuda")
    for first in range(0, k, group):
        x[:, first], x[:, min(first + group, k) - 1] = -128, 127
    return x.float()


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ROWS)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_integers_are_exact(seed: int, arch: str, group: int, bits: int) -> None:
    """In every kernel and the staged pipeline, with sums of at most 2^23; also with several bands of tokens
    (tile_bands.cuh)."""
    if arch not in epiloq._core.built_archs():
        pytest.skip(f"built without {arch}")
    for m, n in (*shapes_of_every_kernel(group, bits, arch), (2 * 1024 + 300, 700)):
        k = (504, 130, 34)[m % 3]
        x, weight = integers(m, k, group), make_weight(n, k, group, bits=bits, offset=False, device="cuda")
        weight = replace(weight, scale=torch.ones_like(weight.scale))
        expected = (x.double() @ weight.q.double().t()).float()
        prepared = weight.prepared()
        with epiloq.config(arch=arch):
            for staged in (False, True):
                assert torch.equal(epiloq.online_quant_mm(x, prepared, staged=staged), expected), (m, n, k)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_sm75_has_the_bits_of_sm80(seed: int, group: int, bits: int) -> None:
    """With one K group, which sums all of K, the roundings are the same."""
    if not {"sm75", "sm80"} <= set(epiloq._core.built_archs()):
        pytest.skip("built without sm75 or sm80")
    for m, n, k in ((300, 520, 2048), (200, 100, 1000), (1030, 2600, 300)):
        x = torch.randn(m, k, device="cuda").half()
        weight = make_weight(n, k, group, bits=bits, device="cuda").prepared()
        results = []
        for arch in ("sm75", "sm80"):
            assert "K groups 1" in kernel(m, n, k, group, bits, arch)
            with epiloq.config(arch=arch):
                results.append(epiloq.online_quant_mm(x, weight, bias=x[0, :1].expand(n).contiguous(), clamp=(-9, 9)))
        assert torch.equal(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ROWS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_k_of_one_vector(seed: int, group: int, bits: int, arch: str) -> None:
    """Blocks of padding follow the first one where a step has several."""
    if arch not in epiloq._core.built_archs():
        pytest.skip(f"built without {arch}")
    for m, n in ((1, 16), (9, 300), (300, 4100)):
        x = torch.randn(m, 8, device="cuda", dtype=torch.bfloat16)
        weight = make_weight(n, 8, group, bits=bits, device="cuda")
        with epiloq.config(arch=arch):
            assert_close(epiloq.online_quant_mm(x, weight.prepared()), x, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ROWS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_fused_and_staged_agree(seed: int, group: int, bits: int, arch: str) -> None:
    """Equal integers, so that only the float32 roundings of the sums differ."""
    if arch not in epiloq._core.built_archs():
        pytest.skip(f"built without {arch}")
    for m, n, k in ((1, 300, 4096), (40, 520, 1000), (300, 520, 2048)):
        x = torch.randn(m, k, device="cuda")
        weight = make_weight(n, k, group, bits=bits, device="cuda")
        with epiloq.config(arch=arch):
            fused = epiloq.online_quant_mm(x, weight.prepared())
            staged = epiloq.online_quant_mm(x, weight.prepared(), staged=True)
            again = epiloq.online_quant_mm(x, weight.prepared())
        limit = ulp(staged.double(), torch.float32) + 2.0**-20 * term_magnitude(x, weight)
        assert ((fused.double() - staged.double()).abs() <= limit).all()
        assert torch.equal(fused, again), "the same call twice"


@pytest.mark.gpu
@pytest.mark.parametrize(("group", "bits"), [(48, 8), (16, 4), (256, 8), (1, 4)])
def test_other_group_sizes_are_staged(seed: int, group: int, bits: int) -> None:
    x, weight = torch.randn(20, 300, device="cuda"), make_weight(50, 300, group, bits=bits, device="cuda")
    assert_close(epiloq.online_quant_mm(x, weight.prepared()), x, weight)
    assert epiloq.explain("online_quant_mm", x, weight.prepared()).startswith("staged")


@pytest.mark.gpu
@pytest.mark.parametrize("m", [5, 200])
def test_graph_capture_and_streams(seed: int, m: int) -> None:
    x, weight = torch.randn(m, 512, device="cuda").half(), make_weight(256, 512, 128, device="cuda").prepared()
    expected = epiloq.online_quant_mm(x, weight)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = epiloq.online_quant_mm(x, weight)
    stream.synchronize()
    assert torch.equal(out, expected)
    graph, captured = torch.cuda.CUDAGraph(), torch.zeros_like(expected)
    with torch.cuda.graph(graph):
        epiloq.online_quant_mm(x, weight, out=captured)
    for _ in range(3):
        captured.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ["auto", "sm75"])
@pytest.mark.parametrize("m", [4, 48, 160])
@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.alone
def test_a_chain_of_dependent_launches(seed: int, m: int, group: int, arch: str) -> None:
    """Kernels that overlap must see what those before them wrote: activations, and weights written just before."""
    if arch != "auto" and arch not in epiloq._core.built_archs():
        pytest.skip(f"built without {arch}")
    weights = [make_weight(512, 512, group, device="cuda", offset=False).prepared() for _ in range(4)]
    x0 = torch.randn(m, 512, device="cuda", dtype=torch.bfloat16)
    scratch = make_weight(512, 512, group, device="cuda", offset=False).prepared()

    def chain(synchronise: bool) -> Tensor:
        x = x0
        for step in range(40):
            scratch.values.copy_(weights[step % 4].values)
            scratch.parameters.copy_(weights[step % 4].parameters)
            if synchronise:
                torch.cuda.synchronize()
            x = epiloq.online_quant_mm(epiloq.online_quant_mm(x, scratch), weights[step % 4])
            x = x / x.abs().amax()
            if synchronise:
                torch.cuda.synchronize()
        return x

    with epiloq.config(arch=arch):
        expected = chain(True)
        for _ in range(10):
            assert torch.equal(chain(False), expected)


@pytest.mark.gpu
def test_tensors_on_a_device_that_is_not_current(seed: int) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    x, weight = torch.randn(33, 512, device="cuda:1"), make_weight(256, 512, 128, device="cuda:1")
    for rows in (5, 33):
        with torch.cuda.device(0):
            out = epiloq.online_quant_mm(x[:rows], weight.prepared())
        assert out.device.index == 1
        assert_close(out, x[:rows], weight)
