"""OnlineQuantLinear: 8- or 4-bit weights in blocks, and activations quantised in the same blocks."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

import epiloq
from epiloq.nn.dense_rows import dense_rows
from epiloq.nn.direct_call import direct_parts
from epiloq.nn.kept_dtypes import KeptDtypes
from epiloq.nn.prepared_linear import check_linear
from epiloq.ops.online_quant_mm import run
from epiloq.weights.block_quant_weight import RANGES, BlockQuantWeight, pack_pairs, prepare

_NAME = "OnlineQuantLinear"
_SMALLEST = torch.finfo(torch.float32).tiny


def quantise_weight(
    weight: Tensor, group_size: int, bits: int, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``(q, scale, offset)`` of a float weight [N, K] by blocks: int8 [N, K] and float32 [N, ceil(K / group_size)].

    With [low, high] = [-2^(bits-1), 2^(bits-1) - 1] and lo, hi of a block: ``scale = (hi - lo) / (high - low)`` and
    ``offset = hi - high scale``; symmetric: ``scale = amax / high``, no offset. ``q = round((w - offset) / scale)``.
    """
    if bits == 8:
        q, scale, offset, _ = epiloq.quantize_blockwise_int8(weight.contiguous(), group_size, symmetric=symmetric)
        return q, scale, offset
    low, high = RANGES[bits]
    n, k = weight.shape
    # The last block repeats its last value, which leaves its range as it is.
    blocks = -(-k // group_size)
    columns = torch.arange(blocks * group_size, device=weight.device).clamp_max(k - 1)
    by_block = weight.float()[:, columns].view(n, blocks, group_size)
    lo, hi = by_block.aminmax(dim=2, keepdim=True)
    reach = torch.maximum(-lo, hi) if symmetric else hi - lo
    scale = (reach / (high if symmetric else high - low)).clamp_min(_SMALLEST)
    scale = torch.where(reach == 0, torch.ones_like(scale), scale)
    offset = torch.where(reach == 0, hi, hi - high * scale)
    steps = by_block / scale if symmetric else (by_block - offset) / scale
    # A block that is not finite has parameters that are not; what its q are does not matter.
    q = steps.round().nan_to_num().clamp(low, high).to(torch.int8).view(n, -1)[:, :k]
    return q.contiguous(), scale.squeeze(2), None if symmetric else offset.squeeze(2)


class OnlineQuantLinear(KeptDtypes):
    """``y = x W^T + bias`` with W in blocks of `group_size` along K, and x quantised in the same blocks on the way in.

    For inference. `x` is ``[.., in_features]`` (any rank from 1) in float32, float16 or bfloat16, and `y` has the dtype
    of `x`: see ``epiloq.online_quant_mm``, which also takes the weight as `prepared` gives it.

    State dict, with N = out_features, K = in_features, G = ceil(K / group_size):
        weight         int8 [N, K]; at 4 bits int8 [N, ceil(K / 2)], value 2i in the low half of byte i
        weight_scale   float32 [N, G]
        weight_offset  float32 [N, G], unless `symmetric`: W is about weight_scale * weight + weight_offset
        bias           [N], of the layer's float dtype; the only one that ``.to(dtype)`` converts
    In memory the weight lies as the kernels want it, in `values` and `parameters` (see ``epiloq.BlockQuantWeight``).
    """

    values: Tensor
    parameters_of_blocks: Tensor
    bias: Tensor | None

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
        super().__init__()
        for name, value in (("in_features", in_features), ("out_features", out_features), ("group_size", group_size)):
            if value < 1:
                raise ValueError(f"{_NAME}: {name}: expected at least 1, got {value}")
        if bits not in RANGES:
            raise ValueError(f"{_NAME}: bits: expected 4 or 8, got {bits}")
        self.in_features, self.out_features = in_features, out_features
        self.bits, self.group_size, self.symmetric = bits, group_size, symmetric
        blocks = -(-in_features // group_size)
        q = torch.zeros((out_features, in_features), dtype=torch.int8, device=device)
        zeros = torch.zeros((out_features, blocks), dtype=torch.float32, device=device)
        weight = prepare(q, zeros, None if symmetric else zeros, group_size, bits)
        self.register_buffer("values", weight.values, persistent=False)
        self.register_buffer("parameters_of_blocks", weight.parameters, persistent=False)
        self.register_buffer("bias", torch.zeros(out_features, device=device, dtype=dtype) if bias else None)

    @classmethod
    @torch.no_grad()
    def from_prepared(cls, weight: BlockQuantWeight, bias: Tensor | None = None) -> OnlineQuantLinear:
        """The layer of a prepared weight ``[out_features, in_features]``, whose tensors it shares, and its bias."""
        device = weight.values.device
        if bias is not None and (bias.shape != (weight.out_features,) or bias.device != device):
            raise ValueError(
                f"{_NAME}: bias: expected [{weight.out_features}] on {device}, got {list(bias.shape)} on {bias.device}"
            )
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
        layer._set(weight, assign=True)
        if layer.bias is not None and bias is not None:
            layer.bias.copy_(bias)
        return layer

    @classmethod
    @torch.no_grad()
    def from_linear(
        cls, linear: nn.Linear, *, bits: int = 8, group_size: int = 128, symmetric: bool = True
    ) -> OnlineQuantLinear:
        """Quantise `linear` (left as it is) to the nearest values, on its device; "meta" gives "meta".

        Raises ValueError for what is not a float32, float16 or bfloat16 ``nn.Linear``.
        """
        cls.check_convertible(linear)
        layer = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            bits=bits,
            group_size=group_size,
            symmetric=symmetric,
            device=linear.weight.device,
            dtype=linear.weight.dtype,
        ).train(linear.training)
        if not linear.weight.is_meta:
            q, scale, offset = quantise_weight(linear.weight.detach(), group_size, bits, symmetric)
            layer._set(prepare(q, scale, offset, group_size, bits), assign=True)
            if layer.bias is not None:
                layer.bias.copy_(linear.bias)
        return layer

    @staticmethod
    def check_convertible(linear: nn.Module, **options: Any) -> None:
        """Raise ValueError unless ``from_linear`` can take `linear` as it is."""
        check_linear(_NAME, linear)

    @property
    def prepared(self) -> BlockQuantWeight:
        """The weight as ``epiloq.online_quant_mm`` takes it."""
        return BlockQuantWeight(
            self.values, self.parameters_of_blocks, self.out_features, self.in_features, self.group_size, self.bits
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = direct_parts(self, x, self.in_features, ("values", "bias", "parameters_of_blocks"))
        if parts is not None:
            values, bias, parameters = parts
            numbers = (self.in_features, self.group_size, self.bits)
            return run(x, values, parameters, bias, *numbers, -inf, inf, False)
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"{_NAME}: x: expected shape [.., {self.in_features}], got {list(x.shape)}")
        y = epiloq.online_quant_mm(
            dense_rows(x.reshape(-1, self.in_features)),
            self.prepared,
            bias=None if self.bias is None else self.bias.to(x.dtype),
        )
        return y.view(*x.shape[:-1], self.out_features)

    @property
    def weight_bytes(self) -> int:
        """Bytes that stand for the float weight in memory: values with padding, parameters of blocks."""
        return self.values.nbytes + self.parameters_of_blocks.nbytes

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"bits={self.bits}, group_size={self.group_size}, symmetric={self.symmetric}"
        )

    def _set(self, weight: BlockQuantWeight, *, assign: bool) -> None:
        """In place, for captured CUDA graphs keep its address, unless the memory is to be the new weight's."""
        if assign:
            self.values, self.parameters_of_blocks = weight.values, weight.parameters
        else:
            self.values.copy_(weight.values)
            self.parameters_of_blocks.copy_(weight.parameters)

    def _stored_shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, int]]]:
        """What the state dict holds beside the bias, by name."""
        n, k = self.out_features, self.in_features
        parameter = (torch.float32, (n, -(-k // self.group_size)))
        shapes = {"weight": (torch.int8, (n, k if self.bits == 8 else (k + 1) // 2)), "weight_scale": parameter}
        return shapes if self.symmetric else shapes | {"weight_offset": parameter}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        q, scale, offset = self.prepared.unpack()
        tensors = (q if self.bits == 8 else pack_pairs(q), scale, offset)
        destination.update({prefix + name: t for name, t in zip(self._stored_shapes(), tensors, strict=False)})

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        given: dict[str, Tensor] = {}
        for name, (dtype, shape) in self._stored_shapes().items():
            tensor = state_dict.pop(prefix + name, None)  # load_state_dict's own copy of the dict.
            if tensor is None:
                missing_keys.append(prefix + name)
            elif tensor.shape != shape or tensor.dtype != dtype:
                error_msgs.append(
                    f"{_NAME}: {prefix}{name}: expected {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}"
                )
            else:
                given[name] = tensor
        if len(given) == len(self._stored_shapes()) and not error_msgs:
            weight = epiloq.online_quant_weight(
                given["weight"],
                given["weight_scale"],
                given.get("weight_offset"),
                group_size=self.group_size,
                bits=self.bits,
                in_features=self.in_features,
            )
            self._set(weight, assign=bool(local_metadata.get("assign_to_params_buffers", False)))
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
