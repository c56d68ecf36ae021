"""`quantize_int8(out=...)`: what does not fit is refused by name, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import epiloq

Arguments = dict[str, Any]


def quantised(rows: int = 4, columns: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.full((rows, columns), 99, dtype=torch.int8),
        torch.full((rows, 1), 5.0),
        torch.full((rows, 1), 1234, dtype=torch.int32),
    )


def shared_memory() -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    x = torch.randn(4, 16)
    q, scale, _ = quantised()
    return x, (q, scale, scale.view(torch.int32))


OUTS: dict[str, tuple[Callable[[], tuple[Tensor, Arguments]], str]] = {
    "two elements": (lambda: (torch.randn(4, 16), {"out": quantised()[:2]}), "out"),
    "azp though symmetric": (lambda: (torch.randn(4, 16), {"out": quantised()}), "out"),
    "no azp though asymmetric": (
        lambda: (torch.randn(4, 16), {"symmetric": False, "out": (*quantised()[:2], None)}),
        "out",
    ),
    "per tensor": (
        lambda: (torch.randn(4, 16), {"granularity": "tensor", "out": (*quantised()[:2], None)}),
        "granularity",
    ),
    "another static scale": (
        lambda: (torch.randn(4, 16), {"scale": torch.ones(4, 1), "out": (*quantised()[:2], None)}),
        "out",
    ),
    "too few columns": (lambda: (torch.randn(4, 17), {"out": (*quantised()[:2], None)}), "out"),
    "too many rows": (lambda: (torch.randn(3, 16), {"out": (*quantised()[:2], None)}), "out"),
    "q of another dtype": (
        lambda: (torch.randn(4, 16), {"out": (quantised()[0].to(torch.uint8), quantised()[1], None)}),
        "out",
    ),
    "one scale": (lambda: (torch.randn(4, 16), {"out": (quantised()[0], torch.ones(1), None)}), "scale"),
    "azp over scale": (lambda: (shared_memory()[0], {"symmetric": False, "out": shared_memory()[1]}), "azp"),
}


@pytest.mark.parametrize("case", OUTS)
def test_outputs_of_the_quantiser(case: str) -> None:
    make, named = OUTS[case]
    x, kwargs = make()
    before = [None if part is None else part.clone() for part in kwargs["out"]]
    with pytest.raises(ValueError, match=f"epiloq.quantize_int8: {named}: expected"):
        epiloq.quantize_int8(x, **kwargs)
    for part, old in zip(kwargs["out"], before, strict=True):
        assert old is None or torch.equal(part, old)
    ok, reason = epiloq.supports("quantize_int8", x, **kwargs)
    assert not ok and named in reason


def test_quantiser_outputs_over_x() -> None:
    x = torch.randn(4, 16)
    q, scale, _ = quantised()
    for out, named in (
        ((x.view(torch.int8)[:, :16].as_strided((4, 16), (16, 1)), scale, None), "out"),
        ((q, x.as_strided((4, 1), (1, 1)), None), "scale"),
        ((q, scale, x.view(torch.int32).as_strided((4, 1), (1, 1))), "azp"),
    ):
        before = x.clone()
        with pytest.raises(ValueError, match=f"epiloq.quantize_int8: {named}: expected memory apart"):
            epiloq.quantize_int8(x, symmetric=out[2] is None, out=out)
        assert torch.equal(x, before) and (q == 99).all() and (scale == 5).all()
