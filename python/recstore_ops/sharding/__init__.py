"""Tables sharded by id over the ranks of a `torch.distributed` job.

Modules take `process_group=`. A rank has the rows of the ids that `shard_of` gives it, in the store of its process. A
lookup sends each distinct id to its owner and gets its row back. Gradients go the same way. See `docs/sharding.md`.
"""

from recstore_ops.sharding.checkpoint import load, save
from recstore_ops.sharding.host_store import share_host_store
from recstore_ops.sharding.join import join
from recstore_ops.sharding.pipeline import ShardedPipeline
from recstore_ops.sharding.statistics import ExchangeStatistics, exchange_statistics
from recstore_ops.table.shard import GradReduce, Shard
from recstore_ops.table.shard_of import shard_of

__all__ = [
    "ExchangeStatistics",
    "GradReduce",
    "Shard",
    "ShardedPipeline",
    "exchange_statistics",
    "join",
    "load",
    "save",
    "shard_of",
    "share_host_store",
]
