"""The norm of gradients that several ranks have parts of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from recstore_ops.table.shard import Shard
    from recstore_ops.table.table import Table


def clip_sharded_norm(
    tables: Sequence[Sequence[Table]],
    parameters: Sequence[Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Clips the gradients of sharded tables by their norm over all ranks; see `SparseOptimizer.clip_grad_norm_`.

    Args:
        tables: those of each name.
        parameters: one of each name; their `.grad` is what was collected.
        max_norm: the greatest norm that is kept.
        norm_type: the order of the norm.
        error_if_nonfinite: whether a norm that is not finite is an error.

    Raises:
        RuntimeError: a norm that is not finite, with `error_if_nonfinite`; then nothing is scaled on any rank.
    """
    norms = [_norm(parameter, same[0], norm_type) for parameter, same in zip(parameters, tables, strict=True)]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"the norm of order {norm_type} of the gradients of all ranks is {float(total)}")
    nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total


def _norm(parameter: Tensor, table: Table, norm_type: float) -> Tensor:
    """The norm of one table's gradients, over all ranks if it is sharded."""
    grads = parameter.grad
    norm = (
        torch.zeros((), dtype=torch.float32, device="cpu")
        if grads is None or grads.numel() == 0
        else torch.linalg.vector_norm(grads, norm_type)
    )
    return norm if table.shard is None else _over_ranks(norm, table.shard, norm_type)


def _over_ranks(norm: Tensor, shard: Shard, norm_type: float) -> Tensor:
    if math.isinf(norm_type):
        return shard.reduced(norm, dist.ReduceOp.MAX)
    # Norms do not add up, their powers do.
    return shard.reduced(norm**norm_type, dist.ReduceOp.SUM) ** (1 / norm_type)
