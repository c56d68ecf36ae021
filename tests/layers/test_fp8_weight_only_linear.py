"""FP8 weights with floating-point activations: the layer, and FP8 layers on GPUs without FP8 tensor cores."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epiloq
from epiloq.nn import Fp8BlockLinear, Fp8Linear, Fp8WeightOnlyLinear

BLOCKS = [(1, -1), (-1, -1), (128, 128)]


def reference(layer: Any, x: Tensor) -> Tensor:
    bias = 0 if layer.bias is None else layer.bias.double()
    found: Tensor = x.double() @ layer.dequantized_weight().double().t() + bias
    return found


def assert_weights_alone_are_rounded(found: Tensor, layer: Any, x: Tensor) -> None:
    """Within the result's rounding, and from 65 tokens on the weight's."""
    assert found.dtype == x.dtype and found.is_contiguous()
    eps = torch.finfo(x.dtype).eps
    size = x.double().abs() @ layer.dequantized_weight().double().abs().t()
    assert ((found.double() - reference(layer, x)).abs() <= 2 * eps * (reference(layer, x).abs() + size) + 1e-6).all()


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_layer(block: tuple[int, int], dtype: torch.dtype, device: str, seed: int) -> None:
    for k, n, tokens in ((256, 144, 3), (37, 21, 5), (200, 130, 80)):
        linear = nn.Linear(k, n, device=device, dtype=dtype)
        layer = Fp8WeightOnlyLinear.from_linear(linear, block=block)
        x = torch.randn(2, tokens, k, device=device, dtype=dtype)
        assert_weights_alone_are_rounded(layer(x), layer, x)
        assert (layer.dequantized_weight() - linear.weight).abs().max() <= linear.weight.abs().max() / 15


def test_gradients_reach_the_input(device: str, seed: int) -> None:
    layer = Fp8WeightOnlyLinear.from_linear(nn.Linear(40, 24, device=device), block=(128, 128))
    x, dy = torch.randn(5, 40, device=device, requires_grad=True), torch.randn(5, 24, device=device)
    layer(x).backward(dy)
    torch.testing.assert_close(x.grad, dy @ layer.dequantized_weight())


@pytest.mark.parametrize(
    "make",
    [
        Fp8Linear.from_linear,
        lambda linear: Fp8Linear.from_linear(linear, activation="tensor", weight="tensor"),
        lambda linear: Fp8Linear.from_linear(linear, activation="static", input_scale=0.01),
        Fp8BlockLinear.from_linear,
    ],
    ids=["token", "tensor", "static", "block"],
)
def test_without_fp8_tensor_cores_activations_stay_as_they_are(
    make: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an A100 or a T4: nothing is refused, and x is not quantised. Odd sizes take the padded copies."""
    for module in ("fp8_linear", "fp8_block_linear"):
        monkeypatch.setattr(sys.modules[f"epiloq.nn.{module}"], "multiplies_float8", lambda device: False)
        monkeypatch.setattr(epiloq._core, module, lambda *_: None)  # as the C++ side answers on such devices
    for k, n, tokens in ((256, 144, 3), (37, 21, 70)):
        layer = make(nn.Linear(k, n, dtype=torch.bfloat16))
        x = torch.randn(tokens, k, dtype=torch.bfloat16)
        assert_weights_alone_are_rounded(layer(x), layer, x)
        layer = make(nn.Linear(k, n))
        x = torch.randn(tokens, k, requires_grad=True)
        y = layer(x)
        assert (y - reference(layer, x)).abs().max() < 1e-4
        y.sum().backward()
        assert x.grad is not None
        with pytest.raises(ValueError, match=rf"x: expected shape \[…, {k}\]"):
            layer(torch.randn(2, k + 1))


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ["sm75", "sm80"])
def test_fp8_layers_on_older_kernels(arch: str, seed: int) -> None:
    for make in (Fp8Linear.from_linear, Fp8BlockLinear.from_linear):
        layer = make(nn.Linear(512, 272, dtype=torch.float16, device="cuda"))
        for tokens in (1, 16, 64, 65):
            x = torch.randn(tokens, 512, dtype=torch.float16, device="cuda")
            with epiloq.config(arch=arch):
                assert_weights_alone_are_rounded(layer(x), layer, x)


@pytest.mark.parametrize("block", [(1,), (0, 1), (1, 128), "rows"])
def test_other_blocks_are_refused(block: Any) -> None:
    with pytest.raises(ValueError, match="Fp8WeightOnlyLinear: block: expected"):
        Fp8WeightOnlyLinear.from_linear(nn.Linear(16, 16), block=block)


@pytest.mark.parametrize("scheme", ["w8a16-fp8", "w8a16-fp8-block"])
def test_compressed_tensors_reads_what_is_written(scheme: str, tmp_path: Path, seed: int) -> None:
    """The stock package decompresses the files to the same weights, and epiloq opens them as the same layers."""
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    from command_line import WIDE, quantize, teacher_and_text
    from epiloq.formats.io import model as models
    from epiloq.formats.io.checkpoint import Checkpoint

    out = tmp_path / "out"
    found = quantize(teacher_and_text(tmp_path, WIDE), out, "--scheme", scheme, "--format", "compressed-tensors")
    assert found.exit_code == 0, found.output
    model, _ = models.load(Checkpoint(out))
    layers = {name: m for name, m in model.named_modules() if isinstance(m, Fp8WeightOnlyLinear)}
    decompressed = transformers.CompressedTensorsConfig(run_compressed=False)
    stock = transformers.AutoModelForCausalLM.from_pretrained(out, quantization_config=decompressed)
    assert layers and {m.block for m in layers.values()} == {(128, 128) if scheme.endswith("block") else (1, -1)}
    for name, layer in layers.items():
        theirs = stock.get_submodule(name).weight.float()
        torch.testing.assert_close(theirs, layer.dequantized_weight(), rtol=2**-7, atol=1e-6)
