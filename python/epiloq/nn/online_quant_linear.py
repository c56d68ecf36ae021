"""OnlineQuantLinear: 8- or 4-bit weights in blocks, and activations quantised in the same blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

import epiloq
from epiloq import _core
from epiloq.nn.base.dense_rows import dense_rows
from epiloq.nn.base.frozen import FrozenLinear
from epiloq.nn.base.leaf import as_leaf, is_symbolic
from epiloq.nn.base.quantized_layer import check_positive, convert_input
from epiloq.ops.online_quant_weight import MAX_GROUP
from epiloq.weights.block_quant_weight import (
    K_MULTIPLE,
    N_MULTIPLE,
    RANGES,
    BlockQuantWeight,
    pack_pairs,
    padded_blocks,
    prepare,
    round_up,
    unpack_pairs,
)
from epiloq.weights.computed import check_bias

_NAME = "OnlineQuantLinear"
_STORED = ("weight_q", "bias", "weight_parameters")
_SMALLEST = torch.finfo(torch.float32).tiny


def quantise_weight(
    weight: Tensor, group_size: int, bits: int, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantise a float weight [N, K] blockwise to ``(q, scale, offset)``: int8 [N, K] and float32 [N, ceil(K /
    group_size)].

    With [low, high] = [-2^(bits-1), 2^(bits-1) - 1] and lo, hi of a block: ``scale = (hi - lo) / (high - low)`` and
    ``offset = hi - high scale``; symmetric: ``scale = amax / high``, no offset. ``q = round((w - offset) / scale)``.
    """
    if bits == 8:
        q, scale, offset, _ = epiloq.quantize_blockwise_int8(weight.contiguous(), group_size, symmetric=symmetric)
        return q, scale, offset
    low, high = RANGES[bits]
    n, k = weight.shape
    # The last block is padded with its last value, which does not change its range.
    blocks = -(-k // group_size)
    columns = torch.arange(blocks * group_size, device=weight.device).clamp_max(k - 1)
    by_block = weight.float()[:, columns].view(n, blocks, group_size)
    lo, hi = by_block.aminmax(dim=2, keepdim=True)
    reach = torch.maximum(-lo, hi) if symmetric else hi - lo
    steps = reach.new_tensor(high if symmetric else high - low)  # a tensor as divisor: see weights.grid.Grid
    scale = (reach / steps).clamp_min(_SMALLEST)
    scale = torch.where(reach == 0, torch.ones_like(scale), scale)
    offset = torch.where(reach == 0, hi, hi - high * scale)
    steps = by_block / scale if symmetric else (by_block - offset) / scale
    # A non-finite block has non-finite parameters, so its q may be anything.
    q = steps.round().nan_to_num().clamp(low, high).to(torch.int8).view(n, -1)[:, :k]
    return q.contiguous(), scale.squeeze(2), None if symmetric else offset.squeeze(2)


class OnlineQuantLinear(FrozenLinear):
    """``y = x W^T + bias`` with weights in blocks of `group_size` along K, and x quantised in the same blocks.

    `x` is ``[…, in_features]`` (any rank from 1) in float32, float16 or bfloat16, and `y` has the dtype of `x`; see
    ``epiloq.online_quant_mm``, which also accepts `prepared` as its weight.

    Parameters without gradients, which form the state dict: `weight_q` and `weight_parameters`, in the kernels'
    order, as described for ``epiloq.BlockQuantWeight``, and `bias` ``[out_features]`` of the layer's float dtype, the
    only parameter that ``.to(dtype)`` converts. `prepared` is the first two as a value, `weight` the dequantised
    weight, computed on access.

    Files store the weight unpacked, which loading also accepts, with N = out_features, K = in_features,
    G = ceil(K / group_size):
        weight         int8 [N, K]; for 4 bits int8 [N, ceil(K / 2)], value 2i in the low half of byte i
        weight_scale   float32 [N, G]
        weight_offset  float32 [N, G], unless `symmetric`: W is about weight_scale * weight + weight_offset
    """

    weight_parameters: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        bits: int = 8,
        group_size: int = 128,
        symmetric: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dtype)
        check_positive(_NAME, in_features=in_features, out_features=out_features, group_size=group_size)
        if group_size > MAX_GROUP:
            raise ValueError(f"{_NAME}: group_size: expected at most {MAX_GROUP}, got {group_size}")
        if bits not in RANGES:
            raise ValueError(f"{_NAME}: bits: expected 4 or 8, got {bits}")
        self.in_features, self.out_features = in_features, out_features
        self.bits, self.group_size, self.symmetric = bits, group_size, symmetric
        blocks = -(-in_features // group_size)
        q = torch.zeros((out_features, in_features), dtype=torch.int8, device=device)
        zeros = torch.zeros((out_features, blocks), dtype=torch.float32, device=device)
        weight = prepare(q, zeros, None if symmetric else zeros, group_size, bits)
        self._take(weight, torch.zeros(out_features, device=device, dtype=dtype) if bias else None)

    def _take(self, weight: BlockQuantWeight, bias: Tensor | None) -> None:
        self._store("weight_q", weight.values)
        self._store("weight_parameters", weight.parameters)
        self._store("bias", bias)

    @classmethod
    @torch.no_grad()
    def from_prepared(cls, weight: BlockQuantWeight, bias: Tensor | None = None) -> OnlineQuantLinear:
        """Create a layer that shares the tensors of a prepared weight ``[out_features, in_features]``, and its bias."""
        device = weight.values.device
        check_bias(f"{_NAME}: bias", bias, weight.out_features, device)
        layer = cls(
            weight.in_features,
            weight.out_features,
            bias is not None,
            bits=weight.bits,
            group_size=weight.group_size,
            symmetric=weight.offset is None,
            device=device,
            dtype=None if bias is None else bias.dtype,
        )
        layer._take(weight, None if bias is None else bias.detach().clone())
        return layer

    @classmethod
    @torch.no_grad()
    def from_linear(
        cls, linear: nn.Linear, *, bits: int = 8, group_size: int = 128, symmetric: bool = True
    ) -> OnlineQuantLinear:
        """Quantise `linear` (which is not changed) to the nearest values, on its device (including "meta").

        Raises ValueError unless `linear` is a float32, float16 or bfloat16 ``nn.Linear``.
        """
        cls.check_convertible(linear)
        layer = cls._like(linear, bits=bits, group_size=group_size, symmetric=symmetric)
        if not linear.weight.is_meta:
            q, scale, offset = quantise_weight(linear.weight.detach(), group_size, bits, symmetric)
            bias = None if linear.bias is None else linear.bias.detach().clone()
            layer._take(prepare(q, scale, offset, group_size, bits), bias)
        return layer

    @property
    def prepared(self) -> BlockQuantWeight:
        """The weight for ``epiloq.online_quant_mm``."""
        return BlockQuantWeight(
            self.weight_q, self.weight_parameters, self.out_features, self.in_features, self.group_size, self.bits
        )

    def forward(self, input: Tensor) -> Tensor:
        if is_dynamo_compiling():
            return self._converted(input)
        try:
            y = _core.online_quant_linear(self, input)
            return self._converted(input) if y is None else y
        except ValueError:
            self._check_stored()
            raise

    def _converted(self, input: Tensor) -> Tensor:
        if is_symbolic(input):
            return as_leaf(self, input)
        x = convert_input(self, input)
        self._check_width(x)
        return self._call(x, self._parts())

    def _check_stored(self) -> None:
        """Raise ValueError for a stored tensor of another shape, by its name here, unknown to the operation."""
        kinds, blocks = 2 if self.symmetric else 3, padded_blocks(self.in_features, self.group_size)
        shapes = {
            "weight_q": (torch.int8, (self.out_features, round_up(self.in_features, K_MULTIPLE) * self.bits // 8)),
            "weight_parameters": (torch.float32, (blocks, kinds, round_up(self.out_features, N_MULTIPLE))),
        }
        for name, (dtype, shape) in shapes.items():
            given = self._stored(name)
            if given is not None and (given.dtype, given.shape) != (dtype, shape):
                got = f"{given.dtype} {list(given.shape)}"
                raise ValueError(f"{_NAME}: {name}: expected {dtype} {list(shape)}, got {got}")

    def _parts(self) -> Sequence[Any]:
        return self._all_stored(_STORED)

    def _run(self, x: Tensor, *tensors: Any) -> Tensor:
        values, bias, parameters = tensors
        sizes = (self.out_features, self.in_features, self.group_size, self.bits)
        weight = BlockQuantWeight(values, parameters, *sizes)
        bias = None if bias is None else bias.to(x.dtype)
        y = epiloq.online_quant_mm(dense_rows(x.reshape(-1, self.in_features)), weight, bias=bias)
        return y.view(*x.shape[:-1], self.out_features)

    def _rows(self, first: int, last: int, *tensors: Any) -> Tensor:
        values, _, parameters = tensors
        sizes = (last - first, self.in_features, self.group_size, self.bits)
        return BlockQuantWeight(values[first:last], parameters[..., first:last], *sizes).dequantize()

    @property
    def weight_bytes(self) -> int:
        """Size of the quantised weight in memory, in bytes: values with padding, parameters of blocks."""
        return self.weight_q.nbytes + self.weight_parameters.nbytes

    def extra_repr(self) -> str:
        own = f"bits={self.bits}, group_size={self.group_size}, symmetric={self.symmetric}"
        return f"{super().extra_repr()}, {own}"

    def file_state(self) -> dict[str, Tensor]:
        q, scale, offset = self.prepared.unpack()
        tensors = (q if self.bits == 8 else pack_pairs(q), scale, offset)
        found = {name: t for name, t in zip(self._unpacked_shapes(), tensors, strict=False) if t is not None}
        return found if self.bias is None else found | {"bias": self.bias.detach()}

    def _unpacked_shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, int]]]:
        """Shapes of the tensors in files, and in state dicts of earlier versions, without the bias."""
        n, k = self.out_features, self.in_features
        parameter = (torch.float32, (n, -(-k // self.group_size)))
        shapes = {"weight": (torch.int8, (n, k if self.bits == 8 else (k + 1) // 2)), "weight_scale": parameter}
        return shapes if self.symmetric else shapes | {"weight_offset": parameter}

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any], *rest: Any
    ) -> None:
        strict, missing_keys, unexpected_keys, error_msgs = rest
        shapes = self._unpacked_shapes()
        names = {name.removeprefix(prefix) for name in state_dict}
        given = {name: state_dict.pop(prefix + name) for name in shapes if name in names}
        for name, tensor in given.items():
            dtype, shape = shapes[name]
            if tensor.shape != shape or tensor.dtype != dtype:
                error_msgs.append(
                    f"{_NAME}: {prefix}{name}: expected {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}"
                )
                return
        if given:
            state_dict.update({prefix + name: tensor for name, tensor in self._packed(given).items()})
        missing: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs)
        if given:  # missing tensors are reported by their names in files
            missing = [key for key in missing if key not in (f"{prefix}weight_q", f"{prefix}weight_parameters")]
            missing += [prefix + name for name in shapes if name not in given]
        missing_keys += missing

    @torch.no_grad()
    def _packed(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Packed parameters from unpacked tensors; those that are not given are taken from the layer."""
        device = next(iter(given.values())).device
        parts: dict[str, Tensor | None] = {"weight": None, "weight_scale": None, "weight_offset": None}
        if not self.weight_q.is_meta:
            parts["weight"], *_ = self.prepared.unpack()
        if not self.weight_parameters.is_meta:
            parts["weight_scale"], parts["weight_offset"] = self.prepared.scale, self.prepared.offset
        scaled = parts["weight_scale"] is not None or len(given.keys() - {"weight"}) > 0
        parts |= given
        if "weight" in given and self.bits == 4:
            parts["weight"] = unpack_pairs(given["weight"], self.in_features)
        q, scale, offset = (
            torch.zeros(shape, dtype=dtype, device=device) if part is None else part.to(device)
            for part, (dtype, shape) in zip(parts.values(), self._whole_shapes(), strict=True)
        )
        weight = prepare(q.contiguous(), scale, None if self.symmetric else offset, self.group_size, self.bits)
        found = {"weight_q": weight.values} if "weight" in given else {}
        return found | {"weight_parameters": weight.parameters} if scaled else found

    def _whole_shapes(self) -> list[tuple[torch.dtype, tuple[int, int]]]:
        n, k = self.out_features, self.in_features
        return [(torch.int8, (n, k)), *2 * [(torch.float32, (n, -(-k // self.group_size)))]]
