"""Tensors that are not what their memory says: freed storage, no storage, and signs that are turned lazily."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epiloq
import every_layer
from operator_calls import operator_calls


def freed(tensor: Tensor) -> Tensor:
    """A copy whose storage is gone, as FSDP leaves parameters."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    copy.untyped_storage().resize_(0)
    return copy


def test_freed_storage_is_refused_by_name() -> None:
    """Every tensor of every operator; none is read, nor written."""
    refused = 0
    for operator, args, kwargs in operator_calls(8, 16, 128, "cpu"):
        names = [argument.name for argument in operator.default._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        for name, value in given.items():
            # An activation order, and what it permutes, torch reads.
            if isinstance(value, Tensor) and (given.get("perm") is None or name not in ("x", "x_q", "perm")):
                # Views that torch is asked for first it refuses itself.
                with pytest.raises((ValueError, RuntimeError), match=r"expected memory, got .* without any|setStorage"):
                    operator(**{**given, name: freed(value)})
                refused += 1
    assert refused > 200


def test_an_absent_bias_is_not_a_freed_one() -> None:
    weight = epiloq.pack_weight(torch.ones(16, 256, dtype=torch.int8), torch.ones(16, 1), bits=4, group_size=-1)
    x, bias = torch.ones(1, 256), torch.full((16,), 1000.0)
    assert epiloq.weight_only_mm(x, weight, bias)[0, 0] == 1256
    with pytest.raises(ValueError, match=r"epiloq\.weight_only_mm: bias: expected memory"):
        epiloq.weight_only_mm(x, weight, freed(bias))
    with pytest.raises(ValueError, match=r"epiloq\.weight_only_mm: x: expected memory"):
        epiloq.weight_only_mm(torch._efficientzerotensor((3, 256)), weight)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("name", every_layer.LAYERS)
def test_a_layer_of_which_a_part_is_on_the_meta_device(name: str, gradient: bool, seed: int) -> None:
    """As a checkpoint without that part leaves it. torch itself would add or select by what has no values."""
    layer, given = every_layer.LAYERS[name](64, 48), every_layer.arguments(name, 64)
    if gradient and given[0].is_floating_point():
        given[0].requires_grad_()
    every_layer.run(name, layer, given)
    for key, tensor in list(layer.state_dict().items()):
        path, _, leaf = key.rpartition(".")
        owner = layer.get_submodule(path)
        before, without = getattr(owner, leaf), tensor.to("meta")
        setattr(owner, leaf, nn.Parameter(without, False) if isinstance(before, nn.Parameter) else without)
        with pytest.raises((ValueError, NotImplementedError)):
            every_layer.run(name, layer, given)
        setattr(owner, leaf, before)
    every_layer.run(name, layer, given)


def lazily_negated(tensor: Tensor) -> Tensor:
    """A view of -x; ``z.conj().imag`` is one."""
    return torch._neg_view(tensor.clone())


CALLS: dict[str, Callable[[Any], Any]] = {
    "quantize_int8": lambda turn: epiloq.quantize_int8(turn(torch.randn(5, 64))),
    "quantize_fp8": lambda turn: epiloq.quantize_fp8(turn(torch.randn(5, 64)), granularity="token"),
    "rms_norm_quant": lambda turn: epiloq.rms_norm_quant(torch.randn(5, 64), turn(torch.randn(64))),
    "rms_norm": lambda turn: epiloq.rms_norm(turn(torch.randn(5, 64)), torch.randn(64)),
    "silu_and_mul": lambda turn: epiloq.silu_and_mul(turn(torch.randn(5, 64))),
    "scaled_mm": lambda turn: epiloq.scaled_mm(
        torch.ones(3, 64, dtype=torch.int8),
        torch.ones(16, 64, dtype=torch.int8).t(),
        turn(torch.rand(1)),
        torch.ones(1),
    ),
    "weight_only_mm": lambda turn: epiloq.weight_only_mm(
        turn(torch.randn(3, 64)),
        epiloq.pack_weight(torch.ones(16, 64, dtype=torch.int8), torch.rand(16, 1), bits=4, group_size=-1),
        turn(torch.randn(16)),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_lazy_signs_count(seed: int, name: str) -> None:
    torch.manual_seed(seed)
    found = CALLS[name](lazily_negated)
    torch.manual_seed(seed)
    expected = CALLS[name](torch.neg)
    for got, wanted in zip(*((r,) if isinstance(r, Tensor) else r for r in (found, expected)), strict=True):
        assert (got is None and wanted is None) or torch.equal(got.float(), wanted.float())


def test_the_imaginary_part_of_a_conjugate(seed: int) -> None:
    part = torch.randn(5, 1, dtype=torch.complex64).conj().imag
    assert part.is_neg()
    got, expected = epiloq.quantize_fp8(part), epiloq.quantize_fp8(part.clone())
    assert torch.equal(got[0].float(), expected[0].float()) and torch.equal(got[1], expected[1])


def test_lazy_signs_of_what_is_written_are_refused_by_name(seed: int) -> None:
    """torch computes into a copy, and says "Expected Tensor but got None" when it wants to write it back."""
    x, q = torch.randn(4, 64), torch.empty(4, 64, dtype=torch.int8)
    scale = lazily_negated(-torch.rand(4, 1) - 0.1)
    for call in (
        lambda: epiloq.quantize_int8(x, out=(q, scale, None)),
        lambda: epiloq.quantize_int8(x, scale=scale, out=(q, scale, None)),
        lambda: epiloq.rms_norm_quant(x, torch.ones(64), out=(q, scale)),
        lambda: epiloq.silu_and_mul_quant(torch.randn(4, 128), out=(q, scale)),
    ):
        with pytest.raises(ValueError, match=r"scale: expected no lazily negated tensor with out, got one; .*resolve"):
            call()
    assert torch.equal(epiloq.quantize_int8(x, scale=scale)[0], epiloq.quantize_int8(x, scale=scale.clone())[0])
