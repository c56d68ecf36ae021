"""epiloq.nn.PackedFp4Experts against the format's definition in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from epiloq.nn import PackedFp4Experts
from epiloq.weights.fp4 import FORMATS
from fp4_reference import dequantized

EXPERTS, K = 4, 80


def filled(form: str, n: int, matrices: int, same: bool = False) -> tuple[PackedFp4Experts, Tensor]:
    """Experts of random codes and scales, and their weights, float64 ``[E, N, K]``."""
    layer = PackedFp4Experts(EXPERTS, K, n, format=form, matrices=matrices)
    rows, parts, kind = n // matrices, [], FORMATS[form]
    divisors = (torch.rand(EXPERTS, matrices) + 0.5) * 8
    if same:
        divisors = divisors[:, :1].expand(EXPERTS, matrices)
    for expert in range(EXPERTS):
        for matrix in range(matrices):
            codes = torch.randint(0, 256, (rows, K // 2), dtype=torch.uint8)
            blocks = (rows, -(-K // kind.block_size))
            scale = (
                (torch.rand(blocks) * 3 + 0.05).to(kind.scale_dtype)
                if kind.has_global_scale
                else torch.randint(119, 130, blocks, dtype=torch.uint8)
            )
            divisor = divisors[expert, matrix].reshape(1)
            given = {"weight_q": codes, "weight_scale": scale, "weight_global_scale": divisor}
            for name, place in layer.places(expert, matrix * rows, rows).items():
                found = layer.fitting(name, given[name], place, rows)
                assert isinstance(found, Tensor)
                place.copy_(found)
            parts.append(dequantized(codes, scale, divisor.reciprocal() if kind.has_global_scale else None, K))
    layer._settle()
    return layer, torch.cat(parts).view(EXPERTS, n, K)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("n", "matrices", "same"), [(23, 1, False), (32, 2, False), (64, 2, True), (96, 3, False)])
def test_rows_by_offsets_and_masks(form: str, n: int, matrices: int, same: bool, seed: int, device: str) -> None:
    """Also where the matrices of an expert have scales of their own, an expert has no rows, and rows no expert."""
    layer, weight = filled(form, n, matrices, same)
    torch.testing.assert_close(layer.dequantized_weight(), weight.float(), rtol=2**-23, atol=0)
    layer, dtype = layer.to(device), torch.float32 if device == "cpu" else torch.bfloat16
    counts = [3, 0, 5, 1]
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    x = torch.randn(11, K).to(dtype)
    y = layer(x.to(device), offs=ends.to(device)).cpu()
    assert (y.shape, y.dtype) == ((11, n), dtype)
    boxes = torch.randn(EXPERTS, 6, K).to(dtype)
    masked = layer(boxes.to(device), masked_m=torch.tensor(counts, dtype=torch.int32, device=device)).cpu()
    bound = 1e-6 if dtype == torch.float32 else 2**-7
    for expert, count in enumerate(counts):
        rows = slice(int(ends[expert]) - count, int(ends[expert]))
        for found, inputs in ((y[rows], x[rows]), (masked[expert, :count], boxes[expert, :count])):
            terms = inputs.double().abs() @ weight[expert].abs().t()
            assert ((found.double() - inputs.double() @ weight[expert].t()).abs() <= bound * terms).all()


def test_rounded_weights(seed: int) -> None:
    """Each matrix by its own largest number."""
    weight = torch.randn(EXPERTS, 32, K) * torch.tensor([1.0, 30.0]).repeat_interleave(16)[:, None]
    for form in FORMATS:
        layer = PackedFp4Experts.from_weight(weight, format=form, matrices=2)
        found = layer.dequantized_weight()
        assert 0.05 < float((found - weight).norm() / weight.norm()) < 0.2
        if form == "nvfp4":
            divisors = layer.weight_global_scale
            assert divisors is not None
            expected = 6 * 448 / weight.view(EXPERTS, 2, -1).abs().amax(-1)
            torch.testing.assert_close(divisors.view(EXPERTS, 2), expected)


def test_gradient_of_the_input(seed: int) -> None:
    layer, weight = filled("nvfp4", 32, 2)
    x = torch.randn(6, K, requires_grad=True)
    ends = torch.tensor([1, 1, 4, 6], dtype=torch.int32)
    dy = torch.randn(6, 32)
    (layer(x, offs=ends) * dy).sum().backward()  # type: ignore[no-untyped-call]
    expert = torch.tensor([0, 2, 2, 2, 3, 3])
    assert x.grad is not None
    expected = torch.einsum("mn,mnk->mk", dy.double(), weight[expert])
    assert float((x.grad.double() - expected).norm() / expected.norm()) < 1e-6


def test_refused() -> None:
    for matrices in (0, 2):
        with pytest.raises(ValueError, match=r"PackedFp4Experts: matrices: expected 1, or as many .*, got"):
            PackedFp4Experts(2, 32, 40, matrices=matrices)
    with pytest.raises(ValueError, match="PackedFp4Experts: format: expected one of mxfp4, nvfp4, got 'fp4'"):
        PackedFp4Experts(2, 32, 48, format="fp4")
