"""Weights of 2 and 3 bits: the same integers in other numbers of bits, kernels of a GPU, layers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import epiloq
from epiloq.inspection.gguf import how
from epiloq.nn import QuantizedEmbedding, WeightOnlyLinear
from epiloq.nn.base.packed_linear import few_bits_note
from epiloq.weights.packed_weight import pack_weight
from weight_reference import KINDS, assert_close, make_weight


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize(
    ("n", "k", "group_size"), [(33, 100, 32), (1100, 130, -1), (16, 256, 128), (0, 64, 32), (5, 0, 32)]
)
def test_the_same_weight_in_more_bits(seed: int, n: int, k: int, group_size: int, bits: int, kind: str) -> None:
    weight = make_weight(n, k, bits, group_size, kind, act_order=k > 0)
    wide = weight.packed.in_bits(4)
    wide.check()
    assert wide.bits == 4 and torch.equal(wide.dequantize(), weight.packed.dequantize())
    again = pack_weight(
        weight.q, weight.scale, weight.zero, weight.offset, bits=4, group_size=group_size, perm=weight.perm
    )
    assert all(torch.equal(wide.state_dict()[name], tensor) for name, tensor in again.state_dict().items())
    back = wide.in_bits(bits)
    assert all(torch.equal(back.state_dict()[name], tensor) for name, tensor in weight.packed.state_dict().items())
    assert weight.packed.in_bits(bits) is weight.packed


def test_fewer_bits_than_the_integers_need_are_refused(seed: int) -> None:
    scale, zero = torch.ones(4, 1), torch.zeros(4, 1, dtype=torch.int32)
    for q, points in ((8, 0), (0, 9)):
        codes = torch.zeros(4, 32, dtype=torch.int32)
        codes[2, 5] = q
        weight = pack_weight(codes, scale, zero + points, bits=4, group_size=-1)
        with pytest.raises(ValueError, match=r"PackedWeight\.in_bits: bits: expected enough for the weight's integers"):
            weight.in_bits(3)
    signed = torch.full((4, 32), -5)
    with pytest.raises(ValueError, match="expected enough"):
        pack_weight(signed, scale, bits=4, group_size=-1).in_bits(3)
    with pytest.raises(ValueError, match=r"in_bits: bits: expected one of \(2, 3, 4, 8\), got 5"):
        pack_weight(signed, scale, bits=4, group_size=-1).in_bits(5)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_state_dicts_of_the_former_order_are_refused(seed: int, bits: int) -> None:
    layer = WeightOnlyLinear.from_linear(torch.nn.Linear(64, 16), bits=bits, group_size=32)
    other = WeightOnlyLinear.from_linear(torch.nn.Linear(64, 16), bits=bits, group_size=32)
    state: Any = layer.state_dict()
    other.load_state_dict(state)
    assert torch.equal(other.weight_q, layer.weight_q)
    state._metadata[""]["version"] = 1
    if bits == 4:
        other.load_state_dict(state)
    else:
        with pytest.raises(
            RuntimeError, match=f"expected a state dict of version 2, got 1, whose values of {bits} bits"
        ):
            other.load_state_dict(state)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [2, 3])
def test_values_have_every_place(seed: int, bits: int, kind: str) -> None:
    """Packed by torch, read by C++: rows, columns and values one at a time, and by the lookup of rows."""
    n, k = 48, 256
    q = torch.zeros(n, k, dtype=torch.int32)
    places = torch.randperm(n * k)[:512]
    q.view(-1)[places] = torch.randint(1, 1 << bits, (512,), dtype=torch.int32)
    zero = torch.zeros(n, 1, dtype=torch.int32)
    packed = pack_weight(q, torch.ones(n, 1), zero, bits=bits, group_size=-1)
    assert torch.equal(packed.dequantize().int(), q)
    rows = torch.randint(0, n, (70,))
    table = QuantizedEmbedding.from_packed(packed)
    assert torch.equal(table(rows).int(), q[rows])


@pytest.mark.parametrize("arch", ["sm75", "sm80", "sm90"])
@pytest.mark.parametrize("bits", [2, 3])
def test_kernels_of_a_gpu(bits: int, arch: str) -> None:
    """GEMV, then mma.sync tiles, then a dense product of the dequantised weight."""
    numbers: dict[str, Any] = {"n": 4096, "k": 4096, "bits": bits, "arch": arch}
    for group_size in (16, 32, 64, 128, 1024, -1):
        for m, family in ((1, "gemv"), (8, "gemv"), (9, "mma.sync"), (191, "mma.sync"), (192, "dequantise")):
            answer = epiloq.explain("weight_only_mm", m=m, group_size=group_size, **numbers)
            assert answer.startswith(family), answer
            assert "digits" not in answer
    assert "group size" in epiloq.explain("weight_only_mm", m=1, group_size=48, **numbers)
    assert "group size" in epiloq.explain("weight_only_mm", m=1, group_size=16, **numbers | {"bits": 4})


def test_every_kernel_of_few_bits_is_chosen() -> None:
    """kNarrowGemvRows and kNarrowTiledRows: no other row of the tables, and each of these."""
    chosen: set[str] = set()
    for arch, bits, m, n in itertools.product(
        ("sm75", "sm80", "sm90"), (2, 3), (1, 8, 16, 30, 100), (512, 4096, 28672)
    ):
        answer = epiloq.explain("weight_only_mm", m=m, n=n, k=4096, bits=bits, group_size=64, arch=arch)
        chosen.add(answer.partition(", K over")[0])
    assert chosen == {
        "gemv 2 panels of 16 weight rows, 4 warps along K, stages 3",
        "gemv 1 panels of 16 weight rows, 4 warps along K, stages 2",
        "mma.sync 256 weight rows x 16 tokens, 8 warps, stages 4",
        "mma.sync 256 weight rows x 64 tokens, 8 warps, stages 4",
        "mma.sync 128 weight rows x 32 tokens, 4 warps, stages 2",
    }


@pytest.mark.parametrize("bits", [2, 3])
def test_batch_invariance_has_kernels(bits: int) -> None:
    with epiloq.config(arch="sm90"):
        epiloq.set_batch_invariant(True)
        try:
            answers = {
                epiloq.explain("weight_only_mm", m=m, n=4096, k=4096, bits=bits, group_size=128)
                for m in (1, 8, 64, 500)
            }
        finally:
            epiloq.set_batch_invariant(False)
    assert all(answer.startswith("mma.sync") for answer in answers), answers


def test_inspection_says_how_few_bits_run() -> None:
    assert all("CUDA" not in how(kind, True) for kind in ("Q2_K", "Q3_K", "Q4_K"))
    assert few_bits_note(3, 4096, 128) is None
    assert few_bits_note(3, 4096, 48) == "on CUDA each call dequantises the weight: no kernel supports groups of 48"
    assert few_bits_note(4, 4096, 48) is None


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [2, 3])
def test_layer_on_a_gpu(seed: int, bits: int, kind: str) -> None:
    weight = make_weight(64, 512, bits, 128, kind)
    x = torch.randn(3, 512).half()
    layer = WeightOnlyLinear.from_packed(weight.packed).cuda()
    assert layer.bits == bits
    assert "dense" not in epiloq.explain("weight_only_mm", x.cuda(), layer.packed)
    assert_close(layer(x.cuda()).cpu(), x, weight)
