"""Fp4Experts: the experts of a GPT-OSS layer with MXFP4 weights."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

import epiloq
from epiloq.nn.base.frozen import wants_gradient
from epiloq.nn.base.leaf import as_leaf, is_symbolic
from epiloq.nn.base.quantized_layer import check_positive, convert_input
from epiloq.nn.base.stored_tensors import StoredTensors
from epiloq.nn.experts.expert_linears import Routing, check_routing
from epiloq.weights.fp4 import FORMATS, NAN
from epiloq.weights.packed_fp4_weight import PackedFp4Weight, shapes_of_parts

_FORMAT = "mxfp4"
_BLOCK = FORMATS[_FORMAT].block_size
_PROJECTIONS = ("gate_up_proj", "down_proj")


class Fp4Experts(StoredTensors):
    """``sum_j w_j (act(x Wg_e^T + bg_e, x Wu_e^T + bu_e) Wd_e^T + bd_e)``, e = index_j, with MXFP4 weights.

    Replaces transformers' ``GptOssExperts``, with the same interface: ``hidden_states`` ``[T, H]`` (float32,
    float16 or bfloat16), ``router_indices`` ``[T, top_k]`` and ``routing_weights`` ``[T, top_k]`` give ``[T, H]``
    of the same dtype. ``act(gate, up) = (min(max(up, -limit), limit) + 1) g sigmoid(alpha g)`` with ``g = min(gate,
    limit)``. Rows are sorted by expert and multiplied by two `epiloq.packed_fp4_mm`. The experts' results are added
    in fp32, in a fixed order.

    Parameters without gradients, which form the state dict (E = experts, H = hidden, I = intermediate):
        gate_up_proj_q, gate_up_proj_scale  uint8, the tensors of an ``epiloq.PackedFp4Weight`` ``[2 E I, H]``: the
                                            stacked matrices of the experts, with alternating rows of gate and up
        gate_up_proj_bias                   [E, 2 I], in the model's float dtype, like down_proj_bias [E, H]
        down_proj_q, down_proj_scale        likewise for ``[E H, I]``
    `file_state` returns, and `from_blocks` takes, the tensors of checkpoints (`shapes`).

    part, whole
        The range of experts in this process and their total number, under expert parallelism: see
        ``epiloq.parallel``.

    Raises ValueError for sizes that are not multiples of 32, an `alpha` or `limit` that is not positive, other shapes
    of inputs, and on a CPU for invalid expert indices.
    """

    FOLLOWS = frozenset({"gate_up_proj_bias", "down_proj_bias"})
    part: range | None = None
    whole: int | None = None

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
        check_positive("Fp4Experts", experts=experts)
        for name, number in (("alpha", alpha), ("limit", limit)):
            if type(number) not in (int, float) or not number > 0 or (name == "alpha" and number == math.inf):
                raise ValueError(f"Fp4Experts: {name}: expected a positive number, got {number!r}")
        self.experts, self.hidden, self.intermediate = experts, hidden, intermediate
        self.alpha, self.limit = alpha, limit
        for name in _PROJECTIONS:
            rows, columns = self._sizes(name)
            for part, shape in shapes_of_parts(_FORMAT, experts * rows, columns).items():
                self._store(f"{name}_{part}", torch.zeros(shape, dtype=torch.uint8, device=device))
            self._store(f"{name}_bias", torch.zeros((experts, rows), dtype=self._dtype, device=device))

    def _sizes(self, name: str) -> tuple[int, int]:
        """Rows and columns of an expert's matrix."""
        return (2 * self.intermediate, self.hidden) if name == _PROJECTIONS[0] else (self.hidden, self.intermediate)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the checkpoints' tensors by name.

        ``gate_up_proj_blocks`` uint8 ``[E, 2 I, H / 32, 16]`` has two E2M1 codes per byte, with an even column in the
        low half; ``gate_up_proj_scales`` uint8 ``[E, 2 I, H / 32]`` are E8M0 bytes; down_proj likewise.
        """
        found: dict[str, tuple[int, ...]] = {}
        for name in _PROJECTIONS:
            rows, columns = self._sizes(name)
            found[f"{name}_blocks"] = (self.experts, rows, columns // _BLOCK, _BLOCK // 2)
            found[f"{name}_scales"] = (self.experts, rows, columns // _BLOCK)
            found[f"{name}_bias"] = (self.experts, rows)
        return found

    @torch.no_grad()
    def from_blocks(self, tensors: Mapping[str, Tensor]) -> Fp4Experts:
        """Create experts like these from the checkpoints' tensors by name (`shapes`), on their device.

        Raises ValueError, which names the tensor, for one that is missing or of another shape or type.
        """
        for part, shape in self.shapes().items():
            given, is_bias = tensors.get(part), part.endswith("_bias")
            right = given is not None and (given.is_floating_point() if is_bias else given.dtype == torch.uint8)
            if given is None or not right or given.shape != shape:
                wanted = "floating point" if is_bias else "torch.uint8"
                got = "none" if given is None else f"{given.dtype} {list(given.shape)}"
                raise ValueError(f"Fp4Experts: {part}: expected {wanted} {list(shape)}, got {got}")
        sizes = (self.experts, self.hidden, self.intermediate)
        made = Fp4Experts(*sizes, alpha=self.alpha, limit=self.limit, device="meta", dtype=self._dtype)
        for name in _PROJECTIONS:
            codes, scales = tensors[f"{name}_blocks"].flatten(2), tensors[f"{name}_scales"]
            if not scales.is_meta and bool((scales == NAN).any()):
                raise ValueError(f"Fp4Experts: {name}_scales: expected powers of two, got NaN ({NAN})")
            columns = self._sizes(name)[1]
            weight = epiloq.pack_fp4_weight(
                codes.flatten(0, 1).contiguous(), scales.flatten(0, 1).contiguous(), in_features=columns
            )
            made._store(f"{name}_q", weight.q)
            made._store(f"{name}_scale", weight.scale)
            made._store(f"{name}_bias", tensors[f"{name}_bias"])
        return made.train(self.training)

    def some(self, part: range, tensors: Mapping[str, Tensor]) -> Fp4Experts:
        """Create only the experts of `part`, from their tensors; they compute their part of each token's sum."""
        sizes = (len(part), self.hidden, self.intermediate)
        outline = Fp4Experts(*sizes, alpha=self.alpha, limit=self.limit, device="meta", dtype=self._dtype)
        made = outline.train(self.training).from_blocks(tensors)
        made.part, made.whole = part, self.experts
        return made

    def packed(self, name: str) -> PackedFp4Weight:
        """The matrices "gate_up_proj" or "down_proj" of all experts, sharing the parameters' memory."""
        rows, columns = self._sizes(name)
        q, scale = self.get_parameter(f"{name}_q"), self.get_parameter(f"{name}_scale")
        return PackedFp4Weight(q, scale, None, _FORMAT, self.experts * rows, columns)

    def file_state(self) -> dict[str, Tensor]:
        """The checkpoints' tensors by name."""
        shapes, found = self.shapes(), dict[str, Tensor]()
        for name in _PROJECTIONS:
            codes, scales, _ = self.packed(name).unpack()
            found[f"{name}_blocks"] = codes.view(shapes[f"{name}_blocks"])
            found[f"{name}_scales"] = scales.view(shapes[f"{name}_scales"])
            found[f"{name}_bias"] = self.get_parameter(f"{name}_bias").detach()
        return found

    def forward(self, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        if is_symbolic(hidden_states):
            return as_leaf(self, hidden_states, router_indices, routing_weights)
        x = convert_input(self, hidden_states)
        check_routing("Fp4Experts", x, router_indices, routing_weights, self.hidden, self.whole or self.experts)
        routing, rows, _ = Routing.gather(x, router_indices, self.experts, self.part)
        gate_up = self._product(_PROJECTIONS[0], rows, routing.ends)
        return routing.combined(self._product(_PROJECTIONS[1], self._gated(gate_up), routing.ends), routing_weights)

    def _gated(self, gate_up: Tensor) -> Tensor:
        if not wants_gradient(gate_up):
            return epiloq.silu_and_mul(gate_up, alpha=self.alpha, limit=self.limit, offset=1.0, interleaved=True)
        gate, up = gate_up[..., ::2].clamp(max=self.limit), gate_up[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))

    def _product(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        """Product of rows sorted by expert with the matrices of this name, with biases."""
        bias = self.get_parameter(f"{name}_bias").to(rows.dtype)
        return epiloq.packed_fp4_mm(rows, self.packed(name), bias, offs=ends)

    def extra_repr(self) -> str:
        return (
            f"experts={self.experts}, hidden={self.hidden}, intermediate={self.intermediate}, alpha={self.alpha}, "
            f"limit={self.limit}"
        )
