"""Training that is the same in one process and on several ranks: what ranks run, and the global batches they share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recstore_ops import DistEmbedding, SparseOptimizer, table_statistics

Group = dist.ProcessGroup | None

VOCABULARY = torch.cat([torch.arange(200), torch.tensor([-(2**63), 2**63 - 1, -1])])


@dataclass(frozen=True)
class Trained:
    """What training came to.

    Attributes:
        rows: of `VOCABULARY`.
        first: the rows of the first batch's share, before any step.
        step: the table's.
        num_rows: this rank's.
    """

    rows: Tensor
    first: Tensor
    step: int
    num_rows: int


def global_batch(step: int, size: int = 64) -> tuple[Tensor, Tensor]:
    """Ids with many duplicates, `[size]`, and what their rows should be, `[size, 6]`."""
    generator = torch.Generator().manual_seed(step)
    places = (torch.rand(size, generator=generator) ** 2 * len(VOCABULARY)).long()
    return VOCABULARY[places], torch.randn(size, 6, generator=generator)


def share(rows: int, group: Group, weights: Sequence[int] | None = None) -> slice:
    """The rows of a batch that are this rank's: as many as its weight says."""
    if group is None:
        return slice(0, rows)
    weights = weights or [1] * dist.get_world_size(group)
    ends = [rows * sum(weights[: rank + 1]) // sum(weights) for rank in range(len(weights))]
    rank = dist.get_rank(group)
    return slice(ends[rank - 1] if rank else 0, ends[rank])


def train(
    group: Group,
    name: str,
    optimizer: str | dict[str, Any],
    weights: Sequence[int] | None = None,
    steps: int = 50,
    **options: Any,
) -> Trained:
    """Trains a table for some steps towards targets, on this rank's share of each batch."""
    table = DistEmbedding(None, 6, name, optimizer=optimizer, process_group=group, **options)
    stepper = SparseOptimizer(modules=[table])
    first = torch.empty(0)
    # Losses are summed over the ranks, so a mean over them has to be undone.
    factor = dist.get_world_size(group) if group is not None and table.table.shard.grad_reduce == "mean" else 1  # type: ignore[union-attr]
    for step in range(steps):
        ids, targets = global_batch(step)
        own = share(len(ids), group, weights)
        rows = table(ids[own])
        if step == 0:
            first = rows.detach()
        (factor * ((rows - targets[own]) ** 2).sum() / 64).backward()
        stepper.step()
    with torch.no_grad():
        final = table(VOCABULARY)
    return Trained(final, first, table_statistics(name)["step"], len(table.table))
