"""Quantised layers on several processes, with ``torch.distributed``.

    from torch.distributed.tensor.parallel import parallelize_module
    from epiloq.parallel import ColwiseParallel, RowwiseParallel
    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

`shard_rows`, `shard_columns` and `join` split and merge single layers, without processes. `watch_ranks` ends ranks
that wait for one that hangs. transformers models are sharded by ``from_pretrained(…, distributed_config=…)`` after
``import epiloq.integrations.transformers``.
"""

from epiloq.parallel.shards import Shard, join, shard_columns, shard_rows
from epiloq.parallel.styles import ColwiseParallel, ExpertParallel, RowwiseParallel
from epiloq.parallel.watch import watch_ranks

__all__ = [
    "ColwiseParallel",
    "ExpertParallel",
    "RowwiseParallel",
    "Shard",
    "join",
    "shard_columns",
    "shard_rows",
    "watch_ranks",
]
