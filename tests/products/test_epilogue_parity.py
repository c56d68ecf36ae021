"""One expression, three evaluations: the host's (C++), torch's on the CPU, and the kernels'; all beside float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epiloq import _core, config, explain, scaled_mm, scaled_mm_azp
from reference import assert_within_one_ulp, make_problem

PROBLEMS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**31),
        "m": st.integers(1, 40),
        "n": st.integers(1, 70),
        "k": st.integers(1, 200),
        "per_token": st.booleans(),
        "per_channel": st.booleans(),
        "bias": st.booleans(),
        "zero_point": st.sampled_from(["none", "static", "token"]),
    }
)


def check(options: dict[str, object], device: str, dtype: torch.dtype) -> None:
    sizes = dict(options)
    torch.manual_seed(sizes.pop("seed"))  # type: ignore[arg-type]
    p = make_problem(**sizes, dtype=dtype)  # type: ignore[arg-type]
    acc = (p.a.double() @ p.weight.double().t()).to(torch.int32)
    host = torch.full(acc.shape, float("nan"))
    bias = None if p.bias is None else p.bias.float()
    _core.evaluate_epilogue(host, acc, p.scale_a, p.scale_b, bias, p.azp_adj, p.azp)
    as_float = make_problem(1, 1, 1, dtype=torch.float32)
    as_float.__dict__.update(p.__dict__, bias=bias)
    assert_within_one_ulp(host, as_float)

    parts = (p.a, p.b, p.scale_a, p.scale_b)
    operands = [None if t is None else t.to(device) for t in (*parts, p.bias, p.azp_adj, p.azp)]
    a, b, scale_a, scale_b, out_bias, azp_adj, azp = operands
    if azp_adj is None:
        out = scaled_mm(a, b, scale_a, scale_b, out_bias, out_dtype=dtype)  # type: ignore[arg-type]
    else:
        out = scaled_mm_azp(a, b, scale_a, scale_b, azp_adj, azp, out_bias, out_dtype=dtype)  # type: ignore[arg-type]
    assert_within_one_ulp(out.cpu(), p)
    rounded = host.to(dtype)
    if device == "cuda":
        assert torch.equal(out.cpu(), rounded), "the kernel and the host evaluate one expression: same bits"
    else:
        torch.testing.assert_close(out, rounded, rtol=torch.finfo(dtype).eps, atol=1e-5)


@given(PROBLEMS, st.sampled_from([torch.float16, torch.bfloat16]))
@settings(max_examples=150)
def test_host_and_cpu(options: dict[str, object], dtype: torch.dtype) -> None:
    check(options, "cpu", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ["sm75", "sm80", "sm90"])
def test_host_and_gpu(arch: str) -> None:
    import epiloq

    if arch not in _core.built_archs():
        pytest.skip(f"built without {arch}")

    @given(PROBLEMS, st.sampled_from([torch.float16, torch.bfloat16]), st.booleans())
    @settings(max_examples=100)
    def run(options: dict[str, object], dtype: torch.dtype, whole: bool) -> None:
        if whole:  # sizes that the fast kernels take, those of many tokens among them
            options = options | {key: int(str(options[key])) * by for key, by in (("m", 8), ("n", 8), ("k", 16))}
        with epiloq.config(arch=arch):
            check(options, "cuda", dtype)

    run()


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n"), [(128, 4616), (384, 4616)])
@pytest.mark.parametrize("zero_point", ["none", "token"])
def test_host_and_cutlass_on_sm90(seed: int, m: int, n: int, zero_point: str) -> None:
    """Visitor trees, which smaller problems do not reach there; operands in their order, and exchanged."""
    if "sm90" not in _core.built_archs():
        pytest.skip("built without sm90")
    k = 528
    with config(arch="sm90"):
        assert "cluster" in explain("scaled_mm", m=m, n=n, k=k, arch="sm90", sm_count=132)
        for vectors in (False, True):
            options = {"seed": seed, "m": m, "n": n, "k": k, "bias": vectors, "zero_point": zero_point}
            for dtype in (torch.float16, torch.bfloat16):
                check(options | {"per_token": vectors, "per_channel": vectors}, "cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n"), [(3, 576), (128, 4616)])
def test_formats_in_turn_through_the_same_memory(seed: int, m: int, n: int) -> None:
    """A kernel writes either 16-bit format: calls that differ in nothing else must not share what is kept of one."""
    p = make_problem(m, n, 528, device="cuda", dtype=torch.float16, bias=True)
    assert p.bias is not None
    out = torch.empty(m, n, dtype=torch.float16, device="cuda")
    acc = (p.a.double() @ p.weight.double().t()).to(torch.int32).cpu()
    for dtype in (torch.float16, torch.bfloat16, torch.float16, torch.bfloat16):
        bias = p.bias.view(dtype)
        host = torch.full((m, n), float("nan"))
        _core.evaluate_epilogue(host, acc, p.scale_a.cpu(), p.scale_b.cpu(), bias.float().cpu())
        out.view(torch.int16).fill_(-1)
        scaled_mm(p.a, p.b, p.scale_a, p.scale_b, bias, out=out.view(dtype))
        assert torch.equal(out.view(dtype).cpu(), host.to(dtype))
