"""Layers as bitsandbytes stores them, packed here without epiloq's code, and the configurations beside them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[dict[str, Tensor], Tensor]
# bitsandbytes.functional.get_4bit_type
_POSITIVE = (0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25)
TABLES = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": (*_POSITIVE, *(-value for value in _POSITIVE)),
}
COMMON = {
    "quant_method": "bitsandbytes",
    "llm_int8_threshold": 6.0,
    "llm_int8_skip_modules": None,
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False,
    "bnb_4bit_compute_dtype": "float32",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_use_double_quant": True,
}
INT8 = COMMON | {"load_in_8bit": True, "load_in_4bit": False, "bnb_4bit_quant_type": "fp4"}
BITS4 = COMMON | {"load_in_8bit": False, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def rows_of_int8(linear: nn.Linear) -> Made:
    q = torch.randint(-127, 128, linear.weight.shape, dtype=torch.int8)
    largest = torch.rand(linear.out_features) * 0.2 + 0.05
    format_of_rows = torch.tensor(0, dtype=torch.uint8)
    return {"weight": q, "SCB": largest, "weight_format": format_of_rows}, q * (largest / 127)[:, None]


def four_bits(kind: str, nested: bool, storage: torch.dtype = torch.uint8) -> Callable[[nn.Linear], Made]:
    def pack(linear: nn.Linear) -> Made:
        shape, count = list(linear.weight.shape), linear.weight.numel()
        blocks = count // 64
        codes = torch.randint(0, 16, (count,))
        state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": shape}
        scale = torch.rand(blocks) * 0.1 + 0.1
        parts = {"weight.absmax": scale}
        if nested:
            places, factors = torch.randint(0, 256, (blocks,), dtype=torch.uint8), torch.rand(-(-blocks // 256)) * 0.1
            own = torch.linspace(-1, 1, 256)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.15}
            scale = own[places.long()] * factors.repeat_interleave(256)[:blocks] + 0.15
            parts = {"weight.absmax": places, "weight.nested_absmax": factors, "weight.nested_quant_map": own}
        table = torch.tensor(TABLES[kind])
        described = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        packed = (codes[::2] << 4 | codes[1::2]).to(torch.uint8).view(storage)[:, None]
        values = (table[codes].view(blocks, 64) * scale[:, None]).view(shape)
        parts |= {"weight": packed, "weight.quant_map": table, f"weight.quant_state.bitsandbytes__{kind}": described}
        return parts, values

    return pack


KINDS: dict[str, tuple[Callable[[nn.Linear], Made], dict[str, Any]]] = {
    "int8": (rows_of_int8, INT8),
    "nf4": (four_bits("nf4", nested=False), BITS4),
    "nf4 nested": (four_bits("nf4", nested=True), BITS4),
    "fp4 in bfloat16": (four_bits("fp4", nested=False, storage=torch.bfloat16), BITS4 | {"bnb_4bit_quant_type": "fp4"}),
}
