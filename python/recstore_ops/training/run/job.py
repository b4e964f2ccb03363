"""The processes that train one model together: those of a `torchrun` job, or one alone.

All of them read the same rows. Each takes its share of every batch, so batches and steps are as in a single process.
"""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

# Imported after a group is made, which DistributedDataParallel does, it holds that group to the end of the process.
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from recstore_ops.nn.table_parameter import without_stand_ins
from recstore_ops.sharding.collective import Collective
from recstore_ops.training.data.batch import Batch


class Job(Collective):
    """A process's place among the others; without a group it is alone. The first process writes and shows results."""

    def share(self, batch: Batch) -> Batch:
        """This process's rows of a batch, as many as any other's or one less or more; none of a tiny batch."""
        start, stop = self._bounds(len(batch))
        return batch if self.group is None else batch.rows(start, stop)

    def _bounds(self, rows: int) -> tuple[int, int]:
        return rows * self.rank // self.world, rows * (self.rank + 1) // self.world

    def whole(self, values: Tensor, rows: int) -> Tensor:
        """The values of all rows of a batch, float32 `[rows]`, from those of each process's share."""
        if self.group is None:
            return values
        start, stop = self._bounds(rows)
        # A sum of shares that are zero elsewhere: shares differ in size by a row, which a gather would have to pad.
        all_values = torch.zeros(rows, dtype=torch.float32, device="cpu")
        all_values[start:stop] = values
        dist.all_reduce(all_values, group=self.group)
        return all_values

    def summed(self, *numbers: float) -> list[float]:
        """Numbers summed over the processes."""
        if self.group is None:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        dist.all_reduce(sums, group=self.group)
        return sums.tolist()

    def told_by_first(self, value: Any) -> Any:
        """Returns the first process's value, in all processes."""
        if self.group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

    def with_mean_gradients(self, model: nn.Module) -> nn.Module:
        """The model with the gradients of its parameters averaged over the processes; its tables do so themselves."""
        has_parameters = any(parameter.requires_grad for _, parameter in without_stand_ins(model.named_parameters()))
        if self.group is None or not has_parameters:
            return model
        return DistributedDataParallel(model, process_group=self.group)


class WholeBatches(nn.Module):
    """A model that gives the logits of all rows of a batch, each computed by one process.

    Args:
        model: of this process.
        job: the processes.
    """

    def __init__(self, model: nn.Module, job: Job) -> None:
        super().__init__()
        self._model = model
        self._job = job

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits, float32 [B]."""
        return self._job.whole(self._model(self._job.share(batch)), len(batch))


@contextmanager
def joined_job() -> Iterator[Job]:
    """Joins the job that `torchrun` started this process for, over gloo; a single process stays alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Job()
        return
    store, rank, world = next(rendezvous("env://"))
    # torchrun may keep its store when it starts a job anew, with the addresses of processes that are gone.
    dist.init_process_group("gloo", store=PrefixStore(f"start {restarts()}", store), rank=rank, world_size=world)
    job = Job(dist.group.WORLD)
    try:
        yield job
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        _leave(job)


def _leave(job: Job) -> None:
    """Ends the group's threads, which is what its destructor does.

    A thread that lets go of a tensor after the interpreter has begun to end aborts the process.
    """
    dist.destroy_process_group()
    job.group = None
    # Tables and modules hold the group, in cycles.
    gc.collect()


def restarts() -> int:
    """How often `torchrun` has started this job anew."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def may_restart() -> bool:
    """Whether `torchrun` would start this job anew after a failure."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
