"""Sums over the GPUs of one host through torch's symmetric memory, without NCCL and without NVLink multicast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

LIMIT = 512 * 1024
"""Bytes up to which `SymmetricSum` sums. Every rank reads all of every other rank's tensor, so latency counts for small
tensors, and NCCL's ring reads less for large ones."""
_BUFFERS: dict[str, Tensor] = {}
"""The memory that other ranks read, by the name of the process group."""
_DTYPES = (torch.bfloat16, torch.float32)
_ALIGNMENT = 16


class SymmetricSum:
    """Sums tensors of the same shape over the ranks of a mesh in one kernel, which reads the memory of all GPUs.

    Every rank adds in the order of the ranks, in the tensors' dtype, so all ranks get the same bits. It may be captured
    in CUDA graphs. Creating it is collective.

    Raises ValueError if the mesh is not of CUDA devices, or these cannot read each other's memory.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        group = mesh.get_group()
        self.group: str = group.group_name
        expected = "epiloq.parallel: symmetric_memory: expected GPUs of one host that read each other's memory"
        if mesh.device_type != "cuda":
            raise ValueError(f"{expected}, got a mesh of {mesh.device_type}")
        if self.group not in _BUFFERS:
            # Only imported with CUDA, since builds of torch for the CPU lack parts of it.
            import torch.distributed._symmetric_memory as symmetric

            buffer = symmetric.empty(LIMIT, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device()))
            try:
                symmetric.rendezvous(buffer, group)
            except RuntimeError as error:
                raise ValueError(f"{expected}, and torch reports: {error}") from error
            _BUFFERS[self.group] = buffer

    def takes(self, y: Tensor) -> bool:
        """Whether it sums such a tensor: a small one in a supported dtype, and no gradient is needed."""
        wanted = torch.is_grad_enabled() and y.requires_grad
        return y.dtype in _DTYPES and 0 < y.nbytes <= LIMIT and y.nbytes % _ALIGNMENT == 0 and not wanted

    def __call__(self, y: Tensor) -> Tensor:
        own: Any = _BUFFERS[self.group][: y.nbytes].view(y.dtype).view(y.shape)
        result: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(own, y.contiguous(), "sum", self.group)
        return result
