"""nn.QuantizedEmbedding: rows of a packed weight, looked up; alone and tied to the head that multiplies by them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from epiloq import pack_weight
from epiloq.nn import QuantizedEmbedding, WeightOnlyLinear
from epiloq.weights.packed.rows import rows_of

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GRIDS = ((8, -1, "none"), (8, 32, "zero"), (4, 32, "zero"), (4, 128, "none"), (4, -1, "zero"))


def embedding(rows: int = 37, columns: int = 75, dtype: torch.dtype = torch.float32) -> nn.Embedding:
    return nn.Embedding(rows, columns, padding_idx=3).to(dtype)


def ids_of(rows: int, *shape: int) -> Tensor:
    return torch.randint(rows, shape)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("zeros", ["none", "zero", "offset"])
@pytest.mark.parametrize(
    ("n", "k", "group_size"), [(1, 1, -1), (37, 75, 32), (16, 128, 128), (50, 300, 7), (33, 64, -1)]
)
def test_rows_are_those_of_the_weight(bits: int, zeros: str, n: int, k: int, group_size: int, seed: int) -> None:
    groups = 1 if group_size == -1 else -(-k // group_size)
    low = -(1 << (bits - 1)) if zeros == "none" else 0
    q = torch.randint(low, low + (1 << bits), (n, k))
    scale = torch.rand(n, groups, dtype=torch.float32)
    zero = torch.randint(0, 1 << bits, (n, groups)) if zeros == "zero" else None
    offset = torch.randn(n, groups) if zeros == "offset" else None
    packed = pack_weight(q, scale, zero, offset, bits=bits, group_size=group_size)
    rows = torch.randint(n, (23,))
    column = torch.arange(k) // (k if group_size == -1 else group_size)
    exact = q.double() - (0 if zero is None else zero[:, column])
    exact = exact * scale.double()[:, column] + (0 if offset is None else offset.double()[:, column])
    found = rows_of(packed, rows)
    assert torch.equal(found, packed.dequantize()[rows])
    torch.testing.assert_close(found.double(), exact[rows], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "group_size", "zeros"), GRIDS)
def test_rounds_to_nearest_and_looks_up(
    bits: int, group_size: int, zeros: str, dtype: torch.dtype, device: str, seed: int
) -> None:
    given = embedding(dtype=dtype).to(device)
    before = given.weight.clone()
    layer = QuantizedEmbedding.from_embedding(given, bits=bits, group_size=group_size, zeros=zeros)
    assert torch.equal(given.weight, before) and (layer.bits, layer.group_size, layer.zeros) == (
        bits,
        group_size,
        zeros,
    )
    ids = ids_of(37, 2, 5).to(device)
    y = layer(ids)
    assert y.dtype == dtype and y.shape == (2, 5, 75) and y.is_contiguous() and not y.requires_grad
    assert torch.equal(y, layer.packed.dequantize(dtype)[ids])
    assert torch.equal(y, nn.functional.embedding(ids, layer.weight.clone()))
    linear = nn.Linear(75, 37, bias=False, device=device, dtype=dtype)
    linear.weight = given.weight
    same = WeightOnlyLinear.from_linear(linear, bits=bits, group_size=group_size, zeros=zeros)
    assert all(torch.equal(tensor, same.state_dict()[name]) for name, tensor in layer.state_dict().items())
    steps = layer.packed.unpack()[1].float().repeat_interleave(75 if group_size == -1 else group_size, 1)[:, :75]
    error = (layer.packed.dequantize() - before.float()).abs()
    # Half a step, and at the ends what rounding the scale to the type took away from 128 or fewer steps.
    assert bool((error <= (0.5 + 130 * torch.finfo(dtype).eps) * steps + 1e-6).all())


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (4,), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_any_shape(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
    layer = QuantizedEmbedding.from_embedding(embedding())
    ids = torch.randint(37, shape, dtype=dtype)
    assert layer(ids).shape == (*shape, 75)
    assert torch.equal(layer(ids), layer.packed.dequantize()[ids.long()])
    strided = torch.randint(37, (6, 8), dtype=dtype)[::2, 1::3]
    assert torch.equal(layer(strided), layer.packed.dequantize()[strided.long()])


def test_bad_ids() -> None:
    layer = QuantizedEmbedding(30, 8)
    for bad in (-1, 30, 31):
        with pytest.raises(IndexError, match=r"ids: expected 0 to 29, got"):
            layer(torch.tensor([0, bad]))
        # In compiled code, and where padding would have been read.
        with pytest.raises(IndexError, match="out of bounds"):
            rows_of(layer.packed, torch.tensor([bad]))
    with pytest.raises(TypeError, match=r"expected a tensor of int32 or int64, got torch\.float32"):
        layer(torch.zeros(2))
    with pytest.raises(TypeError, match="got list"):
        layer([1, 2])


def test_compiles_whole(seed: int) -> None:
    layer = QuantizedEmbedding.from_embedding(embedding(), bits=4, group_size=32, zeros="zero")
    head = layer.tied_linear()
    compiled = torch.compile(lambda ids: head(layer(ids)), fullgraph=True)
    ids = ids_of(37, 3)
    torch.testing.assert_close(compiled(ids), head(layer(ids)))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_tied_head_multiplies_by_the_same_tensors(bits: int, device: str, seed: int) -> None:
    layer = QuantizedEmbedding.from_embedding(embedding().to(device), bits=bits, group_size=32)
    head = layer.tied_linear()
    assert all(head._parameters[name] is tensor for name, tensor in layer.state_dict(keep_vars=True).items())
    x = torch.randn(5, 75, device=device)
    exact = x.double() @ layer.packed.dequantize().double().t()
    torch.testing.assert_close(head(x).double(), exact, rtol=1e-3, atol=1e-3)
    pair = nn.ModuleDict({"embedding": layer, "head": head})
    again = copy.deepcopy(pair)
    moved = copy.deepcopy(pair).to(torch.bfloat16)
    for pair_of in (again, moved, pickle.loads(pickle.dumps(pair))):
        assert pair_of["head"].weight_q.data_ptr() == pair_of["embedding"].weight_q.data_ptr()
        assert sum(p.nbytes for p in pair_of.parameters()) == layer.weight_bytes
    assert moved["embedding"](torch.tensor([1], device=device)).dtype == torch.bfloat16
    assert layer.weight_scale.dtype == torch.float32 == moved["embedding"].weight_scale.dtype


def test_state_dict_and_loading(seed: int) -> None:
    layer = QuantizedEmbedding.from_embedding(embedding(), bits=4, group_size=32, zeros="zero")
    assert list(layer.state_dict()) == ["weight_q", "weight_scale", "weight_zero"]
    other = QuantizedEmbedding(37, 75, bits=4, group_size=32, zeros="zero", device="meta")
    other.load_state_dict(layer.state_dict(), assign=True)
    ids = ids_of(37, 9)
    assert torch.equal(other(ids), layer(ids))
    half = {name: t.half() if t.is_floating_point() else t for name, t in layer.state_dict().items()}
    third = QuantizedEmbedding(37, 75, bits=4, group_size=32, zeros="zero")
    third.load_state_dict(half)
    assert third.weight_scale.dtype == torch.float16
    assert not any(p.requires_grad for p in layer.requires_grad_(True).parameters())
    with pytest.raises(RuntimeError, match=r"weight_q: expected torch.uint8 .*, got"):
        QuantizedEmbedding(37, 75, bits=8).load_state_dict(layer.state_dict(), strict=False)


class Scaled(nn.Embedding):
    """As Bart's."""

    embed_scale = 27.7

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.embed_scale


class ScaledInType(nn.Embedding):
    """As Gemma's."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(rows, columns)
        self.scalar_embed_scale = 27.7
        self.register_buffer("embed_scale", torch.tensor(27.7), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.embed_scale.to(self.weight.dtype)


class Shifted(nn.Embedding):
    """No lookup alone."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + 1


@pytest.mark.parametrize("kind", [Scaled, ScaledInType])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_rows(kind: type[nn.Embedding], dtype: torch.dtype, seed: int) -> None:
    given = kind(20, 40).to(dtype)
    layer = QuantizedEmbedding.from_embedding(given)
    assert layer.embed_scale == pytest.approx(float(given.embed_scale))
    rounded = copy.deepcopy(given)
    rounded.weight.data = layer.packed.dequantize(dtype)
    ids = ids_of(20, 30)
    assert torch.equal(layer(ids), rounded(ids))
    # The head knows nothing of the factor.
    x = torch.randn(2, 40, dtype=dtype)
    exact = x.double() @ layer.packed.dequantize().double().t()
    torch.testing.assert_close(layer.tied_linear()(x).double(), exact, rtol=1e-2, atol=0.1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (nn.Embedding(4, 4, max_norm=1.0), "max_norm: expected None"),
        (nn.Embedding(4, 4, scale_grad_by_freq=True), "scale_grad_by_freq: expected False"),
        (nn.Embedding(4, 4, sparse=True), "sparse: expected False"),
        (nn.Embedding(4, 4, dtype=torch.float64), "expected one of torch.float32, torch.float16, torch.bfloat16"),
        (Shifted(4, 4), "Shifted: expected an embedding that returns its rows"),
        (nn.Linear(4, 4), "expected a torch.nn.Embedding, got Linear"),
    ],
)
def test_refused(given: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantizedEmbedding.from_embedding(given)


def test_refused_options() -> None:
    with pytest.raises(ValueError, match="zeros: expected none or zero, got 'offset'"):
        QuantizedEmbedding.from_embedding(embedding(), zeros="offset")
    with pytest.raises(ValueError, match="num_embeddings: expected at least 1, got 0"):
        QuantizedEmbedding(0, 4)
    ordered = pack_weight(
        torch.zeros(4, 4, dtype=torch.int8), torch.ones(4, 1), bits=8, group_size=-1, perm=torch.arange(4)
    )
    with pytest.raises(ValueError, match="activation order"):
        QuantizedEmbedding.from_packed(ordered)
