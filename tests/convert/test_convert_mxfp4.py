"""MXFP4 as FP8 blocks: the same numbers, exactly where FP8 represents them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
pytest.importorskip("transformers")

from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

import epiloq
from command_line import WIDE, run
from epiloq.formats.deepseek_fp8 import blocks_of_mxfp4
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.weights import ModuleWeight
from epiloq.nn import Fp8BlockLinear
from rounded_models import same, weights
from tiny_teacher import save, tiny_model


def of(codes: Tensor, scale: Tensor, k: int) -> ModuleWeight:
    def values() -> Tensor:
        return epiloq.fp4_dequantize(codes, scale, in_features=k)

    return ModuleWeight("Fp4Linear", {"format": "mxfp4"}, {}, values)


def representable(values: Tensor) -> bool:
    """Whether some power of two makes float8_e4m3fn numbers of all values: by trying all."""
    for exponent in range(-149, 128):
        scale = 2.0**exponent
        quotients = values.double() / scale
        q = quotients.float().to(torch.float8_e4m3fn)
        if torch.equal(q.double(), quotients):
            return True
    return False


@given(
    base=st.integers(0, 254), reach=st.integers(0, 30), n=st.integers(1, 5), k=st.integers(1, 70), seed=st.integers(0)
)
@settings(max_examples=60, deadline=None)
def test_exactly_where_float8_represents_a_block(base: int, reach: int, n: int, k: int, seed: int) -> None:
    torch.manual_seed(seed % 2**63)
    codes = torch.randint(0, 256, (n, -(-k // 2)), dtype=torch.uint8)
    scale = (base + torch.randint(0, reach + 1, (n, -(-k // 32)))).clamp(0, 252).to(torch.uint8)
    weight = of(codes, scale, k)
    if representable(weight.dequantize()):
        found = blocks_of_mxfp4(weight)
        assert torch.equal(found.dequantize(), weight.dequantize()) and found.scale.shape == (1, 1)
    else:
        with pytest.raises(ValueError, match=r"deepseek-fp8: cannot represent this MXFP4 weight: block \[0, 0\]"):
            blocks_of_mxfp4(weight)


@pytest.mark.parametrize("shape", [(128, 128), (130, 257), (300, 64)])
def test_several_scale_blocks(shape: tuple[int, int], seed: int) -> None:
    """Scales of blocks differ though one span would not hold all; zeros need none."""
    # No numbers near 0: the last column's are blocks of their own, whose scales may differ by at most 2^14.
    weight = (torch.rand(shape) + 0.01) * torch.where(torch.rand(shape) < 0.5, -1, 1)
    weight *= torch.logspace(-12, 12, shape[0])[:, None].repeat_interleave(128, 0)[: shape[0]]
    weight[:2] = 0
    codes, scale, _ = epiloq.fp4_quantize(weight, "mxfp4")
    found = blocks_of_mxfp4(of(codes, scale, shape[1]))
    assert torch.equal(found.dequantize(), epiloq.fp4_dequantize(codes, scale, in_features=shape[1]))
    assert found.scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))


def test_nan_is_refused() -> None:
    codes, scale, _ = epiloq.fp4_quantize(torch.full((3, 32), torch.nan), "mxfp4")
    with pytest.raises(ValueError, match="NaN or infinite"):
        blocks_of_mxfp4(of(codes, scale, 32))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp4")
    torch.manual_seed(0)
    save(folder / "model", tiny_model(**WIDE))
    for form in ("mxfp4", "nvfp4"):
        options = ("--scheme", f"w4a16-{form}", "--algorithm", "rtn", "--output", folder / form)
        assert run("quantize", folder / "model", *options).exit_code == 0
    return folder


@pytest.mark.parametrize("source", ["compressed-tensors", "epiloq"])
def test_convert(folders: Path, tmp_path: Path, source: str) -> None:
    folder = folders / "mxfp4"
    if source == "epiloq":
        assert run("convert", folder, tmp_path / "in", "--format", source).exit_code == 0
        folder = tmp_path / "in"
    with pytest.warns(UserWarning, match="the same numbers, but activations, .* will be quantised to FP8"):
        result = run("convert", folder, tmp_path / "out", "--format", "deepseek-fp8")
    assert result.exit_code == 0, result.output
    assert same(weights(tmp_path / "out"), weights(folder))
    model, _ = models.load(Checkpoint(tmp_path / "out"))
    assert isinstance(model.get_submodule("model.layers.0.mlp.down_proj"), Fp8BlockLinear)


def test_refused(folders: Path, tmp_path: Path) -> None:
    result = run("convert", folders / "nvfp4", tmp_path / "out", "--format", "deepseek-fp8")
    assert result.exit_code == 2 and "cannot represent Fp4Linear(format='nvfp4')" in " ".join(result.output.split())
    wide = tmp_path / "wide"
    wide.mkdir()
    for file in (folders / "mxfp4").iterdir():
        (wide / file.name).write_bytes(file.read_bytes())
    tensors = load_file(wide / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight_scale"][0, 0] -= 40
    save_file(tensors, wide / "model.safetensors", metadata={"format": "pt"})
    result = run("convert", wide, tmp_path / "out", "--format", "deepseek-fp8")
    message = " ".join(result.output.split())
    assert result.exit_code == 2 and "layers.1.mlp.down_proj" in message and "more than 2^17" in message, message
    assert not (tmp_path / "out").exists()
