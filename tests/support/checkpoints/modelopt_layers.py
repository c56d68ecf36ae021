"""Linear layers as NVIDIA's ModelOpt exports them, and the weights that they stand for."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import foreign_checkpoints as foreign
import foreign_layers

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def unpacked(codes: Tensor) -> Tensor:
    """As ``NVFP4QTensor.dequantize`` and ``MXFP4QTensor.dequantize`` have it: even columns in the low halves."""
    found = torch.empty(codes.shape[0], 2 * codes.shape[1])
    found[:, 0::2], found[:, 1::2] = E2M1[(codes & 15).long()], E2M1[(codes >> 4).long()]
    return found


def nvfp4(linear: nn.Linear, inputs: float | None = 0.003) -> foreign.Layer:
    n, k = linear.weight.shape
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scale = (torch.rand(n, k // 16) * 3 + 0.05).to(torch.float8_e4m3fn)
    whole = torch.rand(()) / 300 + 0.001
    exact = unpacked(codes).view(n, -1, 16) * (scale.float() * whole).unsqueeze(2)
    more = {} if inputs is None else {"input_scale": torch.tensor(inputs)}
    return {"weight": codes, "weight_scale": scale, "weight_scale_2": whole, **more}, exact.view(n, k)


def mxfp4(linear: nn.Linear) -> foreign.Layer:
    n, k = linear.weight.shape
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scale = torch.randint(116, 123, (n, k // 32), dtype=torch.uint8)
    exact = unpacked(codes).view(n, -1, 32) * torch.exp2(scale.float() - 127).unsqueeze(2)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.003)}, exact.view(n, k)


def fp8(linear: nn.Linear) -> foreign.Layer:
    scale = linear.weight.abs().max().detach() / 448
    q = (linear.weight.detach() / scale).to(torch.float8_e4m3fn)
    return {"weight": q, "weight_scale": scale, "input_scale": torch.tensor(0.02)}, q.float() * scale


def fp8_rows(linear: nn.Linear) -> foreign.Layer:
    scale = linear.weight.abs().amax(1).detach() / 448
    q = (linear.weight.detach() / scale[:, None]).to(torch.float8_e4m3fn)
    return {"weight": q, "weight_scale": scale}, q.float() * scale[:, None]


def fp8_blocks(linear: nn.Linear, squeezed: bool = False) -> foreign.Layer:
    """As ``FP8QTensor.quantize`` has them: ``[rows of blocks, 1, columns of blocks, 1]`` scales."""
    n, k = linear.weight.shape
    scale = torch.rand(-(-n // 128), -(-k // 128)) / 100 + 0.001
    wide = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    q = (linear.weight.detach() / wide).to(torch.float8_e4m3fn)
    return {"weight": q, "weight_scale": scale if squeezed else scale[:, None, :, None]}, q.float() * wide


def mxfp8(linear: nn.Linear) -> foreign.Layer:
    return foreign_layers.mxfp8_of_compressed_tensors("", linear)


def int4(linear: nn.Linear, group_size: int = 32) -> foreign.Layer:
    """Two rows to a byte, in two's complement, as ``pack_int4_in_uint8`` has them."""
    n, k = linear.weight.shape
    q = torch.randint(-8, 8, (n, k))
    scale = torch.rand(n, k // group_size) / 50 + 0.001
    codes = torch.empty(n // 2, k, dtype=torch.uint8)
    for row in range(n // 2):
        codes[row] = ((q[2 * row] % 16) + 16 * (q[2 * row + 1] % 16)).to(torch.uint8)
    return {"weight": codes, "weight_scale": scale}, q.float() * scale.repeat_interleave(group_size, 1)


def scaled(packed: foreign.Layer, dtype: torch.dtype = torch.float32) -> foreign.Layer:
    """The same layer with a vector by which inputs are multiplied first, as AWQ leaves where it folds into none."""
    tensors, exact = packed
    scale = (torch.rand(exact.shape[1]) * 2 + 0.25).to(dtype)
    return tensors | {"pre_quant_scale": scale}, exact * scale.float()


def int4_fp8(linear: nn.Linear) -> foreign.Layer:
    """With the scales by which weights and inputs are rounded to FP8."""
    tensors, exact = int4(linear)
    return tensors | {"weight_scale_2": torch.tensor(0.004), "input_scale": torch.tensor(0.02)}, exact
