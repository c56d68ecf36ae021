"""Weights of 2 and 3 bits where kernels read 4 and not fewer: held in 4 bits, the same integers, saved as they came.

The path of a GPU, taken on a CPU by naming it among the devices that widen.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import epiloq
from epiloq.inspection.gguf import how
from epiloq.nn import QuantizedEmbedding, WeightOnlyLinear
from epiloq.nn.base import packed_linear
from epiloq.weights.packed_weight import pack_weight
from weight_reference import KINDS, assert_close, make_weight


@pytest.fixture
def widening(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(packed_linear, "WIDENING", ("cpu",))
    yield


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


@pytest.mark.usefixtures("widening")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [2, 3])
def test_layer_stores_4_bits_and_saves_original_bits(seed: int, bits: int, kind: str) -> None:
    weight = make_weight(37, 200, bits, 64, kind, act_order=True)
    bias, x = torch.randn(37).half(), torch.randn(6, 200).half()
    zeros = "none" if kind == "symmetric" else kind
    made = WeightOnlyLinear.from_packed(weight.packed, bias)
    loaded = WeightOnlyLinear(200, 37, bits=bits, group_size=64, zeros=zeros, act_order=True, dtype=torch.float16)
    loaded.load_state_dict({f"weight_{name}": t for name, t in weight.packed.state_dict().items()} | {"bias": bias})
    moved = WeightOnlyLinear(200, 37, bits=bits, group_size=64, zeros=zeros, act_order=True, device="meta")
    moved.to_empty(device="cpu").load_state_dict(made.file_state())
    for layer in (made, loaded, moved):
        assert (layer.bits, layer.stored_bits) == (4, bits)
        assert f"bits=4 (stored: {bits})" in repr(layer)
        assert_close(layer(x), x, weight, bias)
        assert torch.equal(layer.weight.dequantize(), weight.packed.dequantize())
        files = layer.file_state()
        assert all(torch.equal(files[f"weight_{name}"], t) for name, t in weight.packed.state_dict().items())
        layer.load_state_dict(layer.state_dict())  # In either form.
        layer.load_state_dict(files)
        assert torch.equal(layer.weight.dequantize(), weight.packed.dequantize())


@pytest.mark.usefixtures("widening")
@pytest.mark.parametrize(("bits", "group_size"), [(3, 16), (2, 48), (4, 64), (8, -1)])
def test_weights_are_widened_only_if_that_enables_a_kernel(seed: int, bits: int, group_size: int) -> None:
    weight = make_weight(17, 96, bits, group_size, "zero")
    layer = WeightOnlyLinear.from_packed(weight.packed)
    assert layer.bits == layer.stored_bits == bits
    assert layer.weight_q.shape == weight.packed.q.shape


@pytest.mark.usefixtures("widening")
def test_a_head_that_shares_an_embedding_stays(seed: int) -> None:
    table = QuantizedEmbedding(40, 64, bits=3, group_size=32)
    head = table.tied_linear().to(torch.float32)
    assert head.bits == 3 and head.weight_q is table.weight_q


def test_inspection_says_how_few_bits_run() -> None:
    assert "on CUDA each call dequantises the weight" in how("Q3_K", True)
    assert "CUDA" not in how("Q4_K", True)
    note = packed_linear.few_bits_note(3, 4096, 128)
    assert note is not None and "the same integers are stored in 4 bits" in note


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(seed: int, kind: str) -> None:
    weight = make_weight(64, 512, 3, 128, kind)
    x = torch.randn(3, 512).half()
    layer = WeightOnlyLinear.from_packed(weight.packed).cuda()
    assert layer.bits == 4
    assert "dense" not in epiloq.explain("weight_only_mm", x.cuda(), layer.packed)
    assert "weight.in_bits(4)" in epiloq.explain("weight_only_mm", x.cuda(), weight.packed.to("cuda"))
    assert_close(layer(x.cuda()).cpu(), x, weight)


@pytest.mark.usefixtures("widening", "epiloq_in_transformers")
def test_transformers_saves_three_bits_again(seed: int, tmp_path: Path) -> None:
    """A directory of 3 bits in groups of 32, opened with 4 in memory and saved: the files' tensors, bit for bit."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("typer", reason="the command needs the extra hf")
    from safetensors.torch import load_file

    from command_line import ROUND, quantize, run, teacher_and_text

    teacher = teacher_and_text(tmp_path, ROUND)
    result = quantize(teacher, tmp_path / "three", "--bits", 5, "--candidates", "w3a16-g32", "--algorithm", "rtn")
    assert result.exit_code == 0, result.output
    inspected = " ".join(run("inspect", tmp_path / "three").output.split())
    assert "3 bits: on CUDA the same integers are stored in 4 bits" in inspected
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "three", dtype=torch.float32)
    layers = [module for module in model.modules() if isinstance(module, WeightOnlyLinear)]
    assert layers and all((layer.bits, layer.stored_bits) == (4, 3) for layer in layers)
    model.save_pretrained(tmp_path / "again")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("again", "three"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
