"""Styles of ``torch.distributed.tensor.parallel`` for quantised layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwise

from epiloq.nn import ExpertLinears, GatedExperts
from epiloq.nn.base.frozen import FrozenLinear
from epiloq.parallel.experts import expert_part
from epiloq.parallel.quantised_inputs import check_takes, gathered_products
from epiloq.parallel.ranks import ended
from epiloq.parallel.shards import install, part_of, shard_
from epiloq.parallel.symmetric import SymmetricSum

_NAME = "epiloq.parallel"


class _SumGradients(torch.autograd.Function):
    """Sums the gradients that the ranks' columns have for the same input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Sum(torch.autograd.Function):
    """Sum over ranks; each summand has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: Any) -> Tensor:
        y = y.contiguous().clone()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def summed(y: Tensor, mesh: DeviceMesh, symmetric: SymmetricSum | None = None) -> Tensor:
    """Sum the tensors of all ranks; every rank gets the result. `symmetric` sums those that it takes."""
    if symmetric is not None and symmetric.takes(y):
        return symmetric(y)
    if torch.is_grad_enabled() and y.requires_grad:
        return _Sum.apply(y, mesh.get_group())  # type: ignore[no-any-return, no-untyped-call]
    y = y.contiguous()
    with ended():
        dist.all_reduce(y, group=mesh.get_group())
    return y


def _check_mesh(mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        raise ValueError(f"{_NAME}: device_mesh: expected one dimension, such as mesh['tp'], got {mesh.ndim}")


def _own(size: int, what: str, mesh: DeviceMesh) -> range:
    own = part_of(size, mesh.get_local_rank(), mesh.size())
    if (mesh.size() - 1) * -(-size // mesh.size()) >= size:
        raise ValueError(
            f"{_NAME}: device_mesh: expected few enough ranks that each gets some of {size} {what}, got {mesh.size()}"
        )
    return own


def _changes_first_input(change: Callable[[Tensor], Any]) -> Callable[..., Any]:
    def hook(layer: nn.Module, inputs: tuple[Any, ...]) -> Any:
        return (change(inputs[0]), *inputs[1:])

    return hook


class ColwiseParallel(TorchColwise):
    """Shards output features: torch's style of the same name, which also supports epiloq's quantised linear layers.

    Each rank has the rows of the weight that ``torch.chunk`` assigns to it, and computes the corresponding columns of
    the output. With integer weights and activations these are bit-identical to a single process. Other modules are
    passed to torch.

    input_layouts, output_layouts, use_local_output
        As in torch.
    quantise_first
        With inputs sharded by tokens (``input_layouts=Shard(1)`` of a sequence), as many on each rank, which is not
        checked: each rank quantises its tokens, and sends bytes and scales instead of 16-bit numbers. The results are
        the same. For layers with a scale per token, or a static one: ``Int8Linear``, ``Fp8Linear``, ``W4A8Linear`` and
        ``W4A8Fp4Linear``; ValueError for others.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        quantise_first: bool = False,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        if quantise_first and not isinstance(input_layouts, Shard):
            raise ValueError(
                f"{_NAME}: quantise_first: expected input_layouts=Shard(dim of tokens), got {input_layouts}"
            )
        self.quantise_first = quantise_first

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, FrozenLinear):
            return super()._apply(module, device_mesh)
        _check_mesh(device_mesh)
        width = module.out_features
        if self.quantise_first:
            check_takes(module)
        shard_(module, _own(width, "output features", device_mesh), None)
        if self.quantise_first:
            gathered_products(module, self.input_layouts[0].dim, device_mesh)  # type: ignore[attr-defined]
        else:
            module.register_forward_pre_hook(_changes_first_input(partial(self._input, device_mesh)))
        install(module, pads=not self.quantise_first)
        module.register_forward_hook(lambda layer, inputs, y: self._output(device_mesh, width, y))
        return module

    def _input(self, mesh: DeviceMesh, x: Tensor | DTensor) -> Tensor:
        if not isinstance(x, DTensor):
            if self.input_layouts == (Replicate(),):
                wanted = torch.is_grad_enabled() and x.requires_grad
                return _SumGradients.apply(x, mesh.get_group()) if wanted else x  # type: ignore[no-untyped-call]
            x = DTensor.from_local(x, mesh, self.input_layouts, run_check=False)
        return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def _output(self, mesh: DeviceMesh, width: int, y: Tensor) -> Tensor:
        last = self.output_layouts in ((Shard(-1),), (Shard(y.dim() - 1),))
        if last and self.use_local_output:
            return y
        return _laid_out(_of_columns(y, mesh, width), self.output_layouts, self.use_local_output)


class RowwiseParallel(TorchRowwise):
    """Shards input features: torch's style of the same name, which also supports epiloq's quantised linear layers.

    Each rank has the columns of the weight that ``torch.chunk`` assigns to it and multiplies them by its part of the
    input. The outputs are summed in the dtype of the output, and the bias is added once. Dynamic scales of tokens are
    computed from the rank's part, and never larger than the whole token's.

    input_layouts, output_layouts, use_local_output
        As in torch.
    symmetric_memory
        Sum small outputs (bfloat16 or float32, up to 512 KiB: the decode steps of a language model) in one kernel that
        reads the memory of all GPUs, instead of NCCL's all-reduce, whose latency is longer. For quantised layers with
        replicated outputs, on GPUs of one host that read each other's memory; ValueError elsewhere.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        symmetric_memory: bool = False,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        if symmetric_memory and not (self.output_layouts == (Replicate(),) and use_local_output):
            raise ValueError(
                f"{_NAME}: symmetric_memory: expected replicated local outputs, got output_layouts={output_layouts}, "
                f"use_local_output={use_local_output}"
            )
        self.symmetric_memory = symmetric_memory

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, FrozenLinear):
            return super()._apply(module, device_mesh)
        _check_mesh(device_mesh)
        width = module.in_features
        own = _own(width, "input features", device_mesh)
        symmetric = SymmetricSum(device_mesh) if self.symmetric_memory else None
        shard_(module, None, own)
        module.register_forward_pre_hook(_changes_first_input(partial(self._input, device_mesh, width, own)))
        install(module)
        module.register_forward_hook(lambda layer, inputs, y: self._output(device_mesh, symmetric, layer, y))
        return module

    def _input(self, mesh: DeviceMesh, width: int, own: range, x: Tensor | DTensor) -> Tensor:
        if not isinstance(x, DTensor):
            if self.input_layouts in ((Shard(-1),), (Shard(x.dim() - 1),)):
                return x
            if self.input_layouts == (Replicate(),) and not (torch.is_grad_enabled() and x.requires_grad):
                return x[..., own.start : own.stop]
            x = DTensor.from_local(x, mesh, self.input_layouts, run_check=False)
        return x.redistribute(placements=[Shard(x.dim() - 1)]).to_local()

    def _output(self, mesh: DeviceMesh, symmetric: SymmetricSum | None, layer: Any, y: Tensor) -> Tensor:
        bias = layer.bias_of_sum
        if self.output_layouts == (Replicate(),) and self.use_local_output:
            y = summed(y, mesh, symmetric)
            return y if bias is None else y + bias.to(y.dtype)
        # One rank adds the bias before the sum, because after a reduce-scatter each rank has only a part of it.
        if bias is not None and mesh.get_local_rank() == 0:
            y = y + bias.to(y.dtype)
        return _laid_out(
            DTensor.from_local(y, mesh, [Partial()], run_check=False), self.output_layouts, self.use_local_output
        )


class ExpertParallel(ParallelStyle):
    """Shards experts: for ``GatedExperts`` and ``ExpertLinears``; every rank has all tokens and the routing.

    Each rank computes the contribution of its experts to each token, and these are summed in the dtype of the tokens.
    Any number of experts with at least one per rank is supported. Raises ValueError for other modules.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, (ExpertLinears, GatedExperts)):
            raise ValueError(
                f"{_NAME}: ExpertParallel: expected GatedExperts or ExpertLinears, got {type(module).__name__}"
            )
        _check_mesh(device_mesh)
        expert_part(module, _own(module.experts, "experts", device_mesh))
        return sum_experts(module, device_mesh)


def sum_experts(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Sum the outputs of the ranks, each of which has some of a layer's experts."""
    module.register_forward_hook(lambda layer, inputs, y: summed(y, mesh))
    return module


def _of_columns(y: Tensor, mesh: DeviceMesh, width: int) -> DTensor:
    shape = torch.Size((*y.shape[:-1], width))
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(y, mesh, [Shard(y.dim() - 1)], run_check=False, shape=shape, stride=strides)


def _laid_out(y: DTensor, layouts: tuple[Placement, ...], local: bool) -> Tensor:
    y = y.redistribute(placements=layouts)
    return y.to_local() if local else y
