"""Quantised layers on several processes, with ``torch.distributed``.

    from torch.distributed.tensor.parallel import parallelize_module
    from epiloq.parallel import ColwiseParallel, RowwiseParallel
    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

`shard_rows`, `shard_columns` and `join` split and merge single layers, without processes. transformers models are
sharded by ``from_pretrained(…, tp_plan="auto")`` after ``import epiloq.integrations.transformers``.
"""

from epiloq.parallel.shards import Shard, join, shard_columns, shard_rows
from epiloq.parallel.styles import ColwiseParallel, ExpertParallel, RowwiseParallel

__all__ = ["ColwiseParallel", "ExpertParallel", "RowwiseParallel", "Shard", "join", "shard_columns", "shard_rows"]
