"""online_quant_mm on a GPU: every kernel of the tables, the staged reference, graphs, streams, overlapping launches."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import epiloq
from blockwise_reference import RawWeight, assert_close, exact, make_weight
from reference import poisoned, ulp

ROWS = {"sm75": 6, "sm80": 8, "sm90": 13}
SIZES_M = (1, 7, 9, 16, 17, 32, 33, 64, 65, 100, 128, 200, 256, 300, 513, 2050)
SIZES_N = (16, 100, 2560, 2576, 4096, 4100, 8192, 8208, 16384)


def kernel(m: int, n: int, k: int, group: int, bits: int, arch: str) -> str:
    return epiloq.explain("online_quant_mm", m=m, n=n, k=k, group_size=group, bits=bits, arch=arch, sm_count=132)


def tile(name: str) -> str:
    return name.split(", K over")[0]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("arch", ROWS)
def test_every_row_is_reached(arch: str, bits: int) -> None:
    kernels = {tile(kernel(m, n, 4096, 128, bits, arch)) for m, n in itertools.product(SIZES_M, SIZES_N)}
    kernels |= {
        kernel(m, n, 4096, 64, bits, arch).replace("of 64", "of 128") for m, n in itertools.product(SIZES_M, SIZES_N)
    }
    assert len(kernels) == ROWS[arch], sorted(kernels)
    families = {"sm75": ("sm75 mma.sync",), "sm80": ("sm80 mma.sync",)}.get(arch, ("sm80 mma.sync", "sm90 wgmma"))
    assert all(name.startswith(tuple(f"{family} w{bits}a8" for family in families)) for name in kernels)


@pytest.mark.parametrize("bits", [4, 8])
def test_few_tiles_share_k_and_many_do_not(bits: int) -> None:
    shapes = list(itertools.product(SIZES_M, SIZES_N))
    names = {shape: kernel(*shape, 4096, 128, bits, "sm90") for shape in shapes}
    shared = {shape for shape, name in names.items() if "K over clusters" in name}
    assert (64, 4096) in shared and (2050, 16384) not in shared
    assert {tile(names[shape]) for shape in shared} == {tile(name) for name in names.values() if "wgmma" in name}


def test_what_has_no_fused_kernel_is_staged_and_says_so() -> None:
    for arch in ROWS:
        assert kernel(64, 64, 64, 48, 8, arch).startswith("staged")
        assert not any(kernel(64, 64, 64, group, 8, arch).startswith("staged") for group in (32, 64, 128))
    with pytest.raises(ValueError, match="arch"):
        epiloq.explain("online_quant_mm", m=1, n=1, k=1, arch="sm91")


def test_explain_takes_the_calls_own_arguments(seed: int) -> None:
    x, weight = torch.randn(3, 100), make_weight(24, 100, 32)
    for arguments in ((x, weight.prepared()), (x, weight.q, weight.scale, weight.offset)):
        group = {} if len(arguments) == 2 else {"group_size": 32}
        assert epiloq.explain("online_quant_mm", *arguments, **group).startswith("cpu")
        for arch in ("sm75", "sm80"):
            with epiloq.config(arch=arch):
                answer = epiloq.explain("online_quant_mm", *arguments, **group)
                assert answer.startswith(f"{arch} mma.sync w8a8 blocks of 32")
                assert epiloq.explain("online_quant_mm", *arguments, **group, staged=True).startswith("staged")
                assert epiloq.supports("online_quant_mm", *arguments, **group) == (True, answer)
    assert epiloq.supports("online_quant_mm", x) == (
        False,
        "epiloq.online_quant_mm: missing a required argument: 'w_q'",
    )


def some(size: int, count: int) -> Tensor:
    """The first, the last and random indices below `size`."""
    return torch.cat((torch.tensor([0, size - 1]), torch.randint(size, (count,)))).unique()


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
        k, offset = ((2300, False), (304, True), (100, True), (2312, True), (8, False))[i % 5]
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
    """float32 that blocks take as they are: from -128 to 127 in each, so that the scale is 1 and the offset 0."""
    x = torch.randint(-128, 128, (m, k), device="cuda")
    for first in range(0, k, group):
        x[:, first], x[:, min(first + group, k) - 1] = -128, 127
    return x.float()


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ROWS)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_integers_are_exact(seed: int, arch: str, group: int, bits: int) -> None:
    """Every kernel's and the staged pipeline's, with sums of at most 2^23."""
    if arch not in epiloq._core.built_archs():
        pytest.skip(f"built without {arch}")
    for m, n in shapes_of_every_kernel(group, bits, arch):
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
    """Where one team adds up all of K, the same roundings follow one another."""
    if not {"sm75", "sm80"} <= set(epiloq._core.built_archs()):
        pytest.skip("built without sm75 or sm80")
    for m, n, k in ((300, 520, 2048), (200, 100, 1000), (1030, 2600, 300)):
        x = torch.randn(m, k, device="cuda").half()
        weight = make_weight(n, k, group, bits=bits, device="cuda").prepared()
        results = []
        for arch in ("sm75", "sm80"):
            assert "teams 1" in kernel(m, n, k, group, bits, arch)
            with epiloq.config(arch=arch):
                results.append(epiloq.online_quant_mm(x, weight, bias=x[0, :1].expand(n).contiguous(), clamp=(-9, 9)))
        assert torch.equal(*results)


def term_magnitude(x: Tensor, weight: RawWeight) -> Tensor:
    return x.double().abs() @ weight.prepared().dequantize(torch.float64).abs().t()


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
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_float32_sums_of_wgmma_kernels(seed: int, bits: int, offset: bool) -> None:
    """Scales and offsets' parts pass tensor cores in two tf32 parts, and are added there with their last bit cut off:
    terms of one sign, where that adds up with every block, stay within what docs/numerics.md says."""
    if "sm90" not in epiloq._core.built_archs():
        pytest.skip("built without sm90")
    for m, n, k in ((65, 200, 1000), (200, 4100, 4096), (130, 300, 16400), (300, 5000, 2048)):
        assert kernel(m, n, k, 128, bits, "sm90").startswith("sm90 wgmma")
        x = torch.rand(m, k, device="cuda") + 3
        weight = make_weight(n, k, 128, bits=bits, offset=offset, device="cuda")
        weight = replace(weight, q=weight.q.clamp(min=0), offset=weight.offset.abs() if offset else None)
        rows, columns = some(m, 40).cuda(), some(n, 60).cuda()
        with epiloq.config(arch="sm90"):
            out = epiloq.online_quant_mm(x, weight.prepared())[rows][:, columns]
        chosen = replace(
            weight,
            q=weight.q[columns],
            scale=weight.scale[columns],
            offset=weight.offset[columns] if offset else None,
        )
        result, magnitude = exact(x[rows], chosen, None)
        limit = ulp(result, torch.float32) + (2.0**-20 + -(-k // 128) * 2.0**-23) * magnitude
        assert ((out.double() - result).abs() <= limit).all(), (m, n, k)


# Of SM90: each tile, more of them than there are SMs or shared by a cluster, and odd numbers of blocks along K.
WGMMA_SHAPES = (
    (300, 300, 600),
    (70, 200, 2300),
    (300, 8200, 600),
    (1100, 4100, 600),
    (220, 8200, 600),
    (560, 6144, 600),
    (1000, 8200, 600),
    (514, 8192, 128),
)


@pytest.mark.parametrize("bits", [4, 8])
def test_shapes_of_wgmma_reach_every_tile(bits: int) -> None:
    names = [kernel(*shape, 128, bits, "sm90") for shape in WGMMA_SHAPES]
    assert {tile(name).split()[-1] for name in names} == {f"128x{n}x128" for n in (64, 80, 96, 112, 128)}
    assert any("clusters" in name for name in names)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(40, 300, 700), *WGMMA_SHAPES])
def test_what_is_not_finite_stays_in_its_row(
    seed: int, m: int, n: int, k: int, offset: bool, bits: int, dtype: torch.dtype
) -> None:
    """Also where shared memory that held such a token's parameters comes again, in another block of K or tile."""
    x = torch.randn(m, k, device="cuda").to(dtype)
    weight = make_weight(n, k, 128, bits=bits, offset=offset, device="cuda")
    expected = epiloq.online_quant_mm(x, weight.prepared())
    x[3, k - 1], x[m - 1, 0] = float("nan"), float("inf")
    out = epiloq.online_quant_mm(x, weight.prepared())
    spoiled = torch.tensor([3, m - 1], device="cuda")
    assert out[spoiled].isnan().all()
    rest = torch.ones(m, dtype=torch.bool, device="cuda").index_fill(0, spoiled, False)
    assert torch.equal(out[rest], expected[rest])


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_leave_as_floats_do(seed: int, dtype: torch.dtype, bits: int) -> None:
    """16-bit outputs leave by other ways than float32, by TMA while the next tile is multiplied; where K is short that
    is soon done. Their values are those of float32, rounded."""
    for m, n, k in WGMMA_SHAPES:
        weight = make_weight(n, k, 128, bits=bits, offset=False, device="cuda").prepared()
        for _ in range(5):
            x = torch.randn(m, k, device="cuda").to(dtype)
            expected = epiloq.online_quant_mm(x.float(), weight).to(dtype)
            assert torch.equal(epiloq.online_quant_mm(x, weight), expected), (m, n, k)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_around_an_output_nothing_is_written(seed: int, dtype: torch.dtype, bits: int) -> None:
    """Views whose rows TMA can write and others, whose columns may be no multiple of 16 bytes, with the same bits."""
    for m, n, k in (*WGMMA_SHAPES, (129, 2050, 640)):
        x = torch.randn(m, k, device="cuda").to(dtype)
        weight = make_weight(n, k, 128, bits=bits, offset=False, device="cuda").prepared()
        bias = torch.randn(n, device="cuda").to(dtype)
        expected = epiloq.online_quant_mm(x, weight, bias=bias, clamp=(-20, 20))
        for first in (16, 5):
            memory = torch.full((m + 9, (n + 47) // 8 * 8), 99.0, device="cuda", dtype=dtype)
            inside = torch.zeros_like(memory, dtype=torch.bool)
            inside[4 : 4 + m, first : first + n] = True
            epiloq.online_quant_mm(x, weight, bias=bias, clamp=(-20, 20), out=memory[4 : 4 + m, first : first + n])
            assert torch.equal(memory[inside].view(m, n), expected), (m, n, k, first)
            assert (memory[~inside] == 99).all(), (m, n, k, first)


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
def test_a_device_that_is_not_current(seed: int) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    x, weight = torch.randn(33, 512, device="cuda:1"), make_weight(256, 512, 128, device="cuda:1")
    for rows in (5, 33):
        with torch.cuda.device(0):
            out = epiloq.online_quant_mm(x[:rows], weight.prepared())
        assert out.device.index == 1
        assert_close(out, x[:rows], weight)
