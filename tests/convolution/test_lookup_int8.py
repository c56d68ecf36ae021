"""lookup_int8 against indexing; its memory, its errors, compilation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import epiloq


def operands(shape: tuple[int, ...], device: str = "cpu") -> tuple[Tensor, Tensor]:
    x, table = torch.randint(-128, 128, shape, dtype=torch.int8), torch.randint(-128, 128, (256,), dtype=torch.int8)
    return x.to(device), table.to(device)


@pytest.mark.parametrize(
    "shape", [(1,), (63,), (64,), (65,), (17, 100), (3, 576), (2, 5, 7, 9), (4095,), (3, 0, 4), (0,)]
)
def test_every_value(seed: int, device: str, shape: tuple[int, ...]) -> None:
    x, table = operands(shape, device)
    out = epiloq.lookup_int8(x, table)
    assert out.dtype == torch.int8 and torch.equal(out, table[x.long() + 128])
    every = torch.arange(-128, 128, dtype=torch.int8, device=device)
    assert torch.equal(epiloq.lookup_int8(every, table), table)


def test_memory(seed: int, device: str) -> None:
    """Orders of dimensions are kept where memory is dense; slices are read as they are, and written beside guards."""
    x, table = operands((2, 6, 5, 8), device)
    for view in (
        x.transpose(0, 3),
        x.to(memory_format=torch.channels_last),
        x[:, ::2],
        x[..., 1:4],
        x.expand(3, 2, 6, 5, 8),
    ):
        out = epiloq.lookup_int8(view, table)
        assert torch.equal(out, table[view.long() + 128])
    last = x.to(memory_format=torch.channels_last)
    assert epiloq.lookup_int8(last, table).is_contiguous(memory_format=torch.channels_last)
    wide = torch.full((2, 6, 5, 12), 99, dtype=torch.int8, device=device)
    assert epiloq.lookup_int8(last, table, out=wide[..., 2:10]).data_ptr() == wide[..., 2:].data_ptr()
    assert torch.equal(wide[..., 2:10], table[x.long() + 128])
    assert (wide[..., :2] == 99).all() and (wide[..., 10:] == 99).all()


def test_errors(device: str) -> None:
    x, table = operands((4, 6), device)
    for arguments, name in (
        ((x.float(), table, None), "x"),
        ((x, table[:255], None), "table"),
        ((x, table.int(), None), "table"),
        ((x, table, torch.empty(4, 7, dtype=torch.int8, device=device)), "out"),
        ((x, table, torch.empty(4, 6, device=device)), "out"),
        ((x, table, torch.empty(1, 4, 6, dtype=torch.int8, device=device)), "out"),
        ((x, table, torch.empty(2, 2, 6, dtype=torch.int8, device=device)), "out"),
    ):
        with pytest.raises(ValueError, match=rf"epiloq\.lookup_int8: {name}: expected"):
            epiloq.lookup_int8(arguments[0], arguments[1], out=arguments[2])
        assert not epiloq.supports("lookup_int8", *arguments[:2], out=arguments[2])[0]
    with pytest.raises(TypeError, match=r"epiloq\.lookup_int8: table: expected a tensor"):
        epiloq.lookup_int8(x, [0] * 256)  # type: ignore[arg-type]
    assert epiloq.supports("lookup_int8", x, table)[0]


def test_an_output_that_is_the_input_is_refused() -> None:
    x, table = operands((4, 6))
    with pytest.raises(ValueError, match=r"epiloq\.lookup_int8: out: "):
        epiloq.lookup_int8(x, table, out=x)


def test_compiles(seed: int, device: str) -> None:
    x, table = operands((3, 40), device)
    compiled = torch.compile(lambda x, table: epiloq.lookup_int8(x, table) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, table), table[x.long() + 128] + 1)
