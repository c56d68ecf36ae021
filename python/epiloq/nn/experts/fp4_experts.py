"""Fp4Experts: the experts of a layer of GPT-OSS on MXFP4 weights, as its checkpoints hold them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

import epiloq
from epiloq.nn.base.quantized_layer import StoredTensors, convert_input
from epiloq.nn.experts.expert_linears import Routing, check_routing
from epiloq.weights.fp4 import FORMATS

_BLOCK = FORMATS["mxfp4"].block_size


class Fp4Experts(StoredTensors):
    """``sum_j w_j (act(x Wg_e^T + bg_e, x Wu_e^T + bu_e) Wd_e^T + bd_e)``, e = index_j, with MXFP4 weights.

    For inference, in the place of ``GptOssExperts`` of transformers and called like them: ``hidden_states`` ``[T, H]``
    (float32, float16 or bfloat16), ``router_indices`` ``[T, top_k]`` and ``routing_weights`` ``[T, top_k]``, giving
    ``[T, H]`` of the same dtype. ``act(gate, up) = (min(max(up, -limit), limit) + 1) g sigmoid(alpha g)`` with ``g =
    min(gate, limit)``. Rows are sorted by expert and multiplied one expert after the other by `epiloq.fp4_mm`; how many
    rows each has is read on the host. The experts' results are added in fp32, in a fixed order.

    Stored are the tensors of the checkpoints, without gradients (E = experts, H = hidden, I = intermediate):
        gate_up_proj_blocks  uint8 [E, 2 I, H / 32, 16]: two E2M1 codes to a byte, an even column in the low half;
                             rows of gate and up alternate
        gate_up_proj_scales  uint8 [E, 2 I, H / 32], bytes of E8M0
        gate_up_proj_bias    [E, 2 I], of the model's float dtype, as down_proj_bias [E, H]
        down_proj_blocks     uint8 [E, H, I / 32, 16]
        down_proj_scales     uint8 [E, H, I / 32]

    Raises ValueError for sizes that blocks of 32 do not fill, for other shapes of inputs, and on a CPU for numbers of
    experts that there are not.
    """

    FOLLOWS = frozenset({"gate_up_proj_bias", "down_proj_bias"})

    gate_up_proj_blocks: Tensor
    gate_up_proj_scales: Tensor
    gate_up_proj_bias: Tensor
    down_proj_blocks: Tensor
    down_proj_scales: Tensor
    down_proj_bias: Tensor

    def __init__(
        self,
        experts: int,
        hidden: int,
        intermediate: int,
        *,
        alpha: float = 1.702,
        limit: float = 7.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dtype)
        for name, size in (("hidden", hidden), ("intermediate", intermediate)):
            if size < 1 or size % _BLOCK:
                raise ValueError(f"Fp4Experts: {name}: expected a multiple of {_BLOCK}, got {size}")
        if experts < 1:
            raise ValueError(f"Fp4Experts: experts: expected at least 1, got {experts}")
        self.experts, self.hidden, self.intermediate = experts, hidden, intermediate
        self.alpha, self.limit = alpha, limit
        for name, shape in self.shapes(experts, hidden, intermediate).items():
            kind = self._dtype if name in self.FOLLOWS else torch.uint8
            self._store(name, torch.zeros(shape, dtype=kind, device=device))

    @staticmethod
    def shapes(experts: int, hidden: int, intermediate: int) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the tensors of so many experts by name."""
        found: dict[str, tuple[int, ...]] = {}
        for name, rows, columns in (("gate_up_proj", 2 * intermediate, hidden), ("down_proj", hidden, intermediate)):
            found[f"{name}_blocks"] = (experts, rows, columns // _BLOCK, _BLOCK // 2)
            found[f"{name}_scales"] = (experts, rows, columns // _BLOCK)
            found[f"{name}_bias"] = (experts, rows)
        return found

    def forward(self, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        x = convert_input(self, hidden_states)
        check_routing("Fp4Experts", x, router_indices, routing_weights, self.hidden, self.experts)
        routing = Routing.of(router_indices, self.experts)
        gate_up = self._product("gate_up_proj", x[routing.tokens], routing.ends)
        return routing.combined(self._product("down_proj", self._gated(gate_up), routing.ends), routing_weights)

    def _gated(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up[..., ::2].clamp(max=self.limit), gate_up[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))

    def _product(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        """Rows sorted by expert, by the matrices of this name, with their biases."""
        blocks, scales, biases = (self.get_parameter(f"{name}_{part}") for part in ("blocks", "scales", "bias"))
        found, begin = [], 0
        for expert, end in enumerate(ends.tolist()):
            if begin < end:
                bias = biases[expert].to(rows.dtype)
                found.append(epiloq.fp4_mm(rows[begin:end], blocks[expert].flatten(1), scales[expert], bias))
            begin = end
        return torch.cat(found) if found else rows.new_zeros((0, biases.shape[1]))

    def dequantized(self, name: str, expert: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An expert's matrix of "gate_up_proj" ``[2 I, H]`` or "down_proj" ``[H, I]``."""
        blocks, scales = self.get_parameter(f"{name}_blocks")[expert], self.get_parameter(f"{name}_scales")[expert]
        return epiloq.fp4_dequantize(blocks.flatten(1), scales, in_features=scales.shape[1] * _BLOCK, dtype=dtype)

    def extra_repr(self) -> str:
        return (
            f"experts={self.experts}, hidden={self.hidden}, intermediate={self.intermediate}, alpha={self.alpha}, "
            f"limit={self.limit}"
        )
