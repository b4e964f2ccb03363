"""Ranks of sharded tables that have different numbers of batches, within `sharding.join`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, second_groups
from sharded_training import Group
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    HashTable,
    KeyedJaggedTensor,
    RecStoreEmbeddingBagCollection,
    SparseOptimizer,
)
from recstore_ops.sharding import ShardedPipeline, join

pytestmark = pytest.mark.tier("test")

DIM, BAGS, IDS = 4, 6, torch.arange(40)
OPTIMIZERS = {"sgd": {"kind": "sgd", "lr": 0.5}, "adam": {"kind": "adam", "lr": 0.1}}


def batch(rank: int, step: int) -> Tensor:
    """The ids of a batch, `[BAGS, 3]`."""
    return torch.randint(len(IDS), (BAGS, 3), generator=torch.Generator().manual_seed(10 * rank + step))


class Model(nn.Module):
    """A table of each kind, and a dense part over the sum of what they give."""

    def __init__(self, name: str, optimizer: str, group: Group) -> None:
        super().__init__()
        torch.manual_seed(0)
        options: dict[str, Any] = {"optimizer": OPTIMIZERS[optimizer], "process_group": group}
        if group is not None:
            options["grad_reduce"] = "sum"
        self.bag = DistEmbeddingBag(len(IDS), DIM, f"{name}/bag", "sum", padding_idx=7, **options)
        self.rows = DistEmbedding(len(IDS), DIM, f"{name}/rows", padding_idx=3, **options)
        self.hashed = HashTable(DIM, f"{name}/hashed", insert_on_lookup=True, num_workers=1, **options)
        configs = [
            {"name": f"{name}/{key}", "num_embeddings": None, "embedding_dim": DIM, "feature_names": [key]}
            for key in ("a", "b")
        ]
        self.bags = RecStoreEmbeddingBagCollection(configs, **options)
        self.frozen = DistEmbedding(len(IDS), DIM, f"{name}/frozen", **options)
        self.frozen.requires_grad_(False)
        self.top = nn.Sequential(nn.Linear(DIM, 8), nn.Tanh(), nn.Linear(8, 1))

    def tables(self) -> list[nn.Module]:
        return [self.bag, self.rows, self.hashed, self.bags, self.frozen]

    def sums(self, ids: Tensor) -> Tensor:
        lengths = torch.full((2 * len(ids),), 3)
        pooled = self.bags(KeyedJaggedTensor(["a", "b"], ids.flatten().repeat(2), lengths=lengths))
        rows = self.rows(ids) + self.hashed(ids) + self.frozen(ids)
        return self.bag(ids) + rows.sum(1) + pooled.sum(1)

    def all_rows(self) -> list[Tensor]:
        keyed = KeyedJaggedTensor(["a", "b"], IDS.repeat(2), lengths=torch.ones(2 * len(IDS), dtype=torch.int64))
        self.eval()
        with torch.no_grad():
            singles = [self.bag(IDS.unsqueeze(1)), self.rows(IDS), self.hashed(IDS), self.frozen(IDS)]
            return [*singles, *self.bags(keyed).unbind(1)]


def train(group: Group, name: str, optimizer: str, counts: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Trains where rank r has `counts[r]` batches, in one process with all of each step; returns rows and top."""
    model = Model(name, optimizer, group)
    sparse = SparseOptimizer(modules=model.tables())
    top: Any = model.top
    joined: AbstractContextManager[None] = nullcontext()
    own = [None] if group is None else [group.rank()]
    if group is not None:
        top = DistributedDataParallel(model.top, process_group=group)
        joined = join(model.tables(), [top], second_groups[group.size()])
    dense = torch.optim.SGD(model.top.parameters(), 0.1)
    schedule = lr_scheduler.StepLR(sparse, 2, 0.5)
    world = len(counts)
    with joined:
        for step in range(max(counts) if group is None else counts[group.rank()]):
            ranks = [rank for rank in range(world) if step < counts[rank] and own[0] in (None, rank)]
            sparse.zero_grad()
            dense.zero_grad()
            losses = [(top(model.sums(batch(rank, step))) - 1).square().sum() for rank in ranks]
            # DDP divides by all ranks, those without batches too; the tables sum.
            (sum(losses, torch.zeros(()))).backward()
            if group is None:
                for parameter in model.top.parameters():
                    parameter.grad.div_(world)  # type: ignore[union-attr]
            dense.step()
            sparse.step()
            schedule.step()
            if step == 3:
                with torch.no_grad():
                    model.rows(IDS[:5])  # A lookup without a backward pass.
    rows = model.all_rows()
    return rows, [each.detach().clone() for each in model.top.parameters()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("counts", [[3, 5], [5, 3], [0, 4], [4, 4], [2, 5, 0, 3]])
def test_ranks_with_different_numbers_of_batches_train_as_one_process(
    ranks: Ranks, table_name: Callable[[], str], optimizer: str, counts: list[int]
) -> None:
    name = table_name()
    rows, top = train(None, name, optimizer, counts)
    for own_rows, own_top in ranks.run(len(counts), train, name, optimizer, counts):
        # Ranks are summed in an order of their own, and each step passes the rounding on; a batch more or less moves
        # rows by more than a hundredth.
        torch.testing.assert_close(own_rows, rows, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(own_top, top, rtol=1e-4, atol=1e-4)


def train_tables_alone(group: Group, name: str, counts: list[int], skipped: int) -> Tensor:
    """Trains a table alone, of which one step is left out, for two epochs."""
    table = DistEmbedding(
        len(IDS),
        DIM,
        name,
        optimizer=OPTIMIZERS["adam"],
        process_group=group,
        **({} if group is None else {"grad_reduce": "sum"}),  # type: ignore[arg-type]
    )
    stepper = SparseOptimizer(modules=[table])
    for epoch in range(2):
        with nullcontext() if group is None else join([table], second_group=second_groups[group.size()]):
            for step in range(max(counts) if group is None else counts[group.rank()]):
                for rank, count in enumerate(counts):
                    if (step < count and group is None) or (group is not None and rank == group.rank()):
                        (table(batch(rank, 100 * epoch + step)) - 1).square().sum().backward()
                if step == skipped:
                    table.zero_grad() if epoch else stepper.zero_grad()
                stepper.step()
    with torch.no_grad():
        return table(IDS)


def test_a_step_that_is_left_out_is_so_on_ranks_without_batches(ranks: Ranks, table_name: Callable[[], str]) -> None:
    name = table_name()
    expected = train_tables_alone(None, name, [2, 5], 3)
    for rows in ranks.run(2, train_tables_alone, name, [2, 5], 3):
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-5)


def seconds_until_error(group: dist.ProcessGroup, name: str, what: str) -> tuple[str, float]:
    """What a rank says, and how long it took, when the first one of two does something the other does not."""
    table, other = (DistEmbedding(10, 2, f"{name}/{number}", process_group=group) for number in range(2))
    stepper = SparseOptimizer(modules=[table, other])
    ids, rank = torch.arange(4), group.rank()
    loss = table(ids).sum()
    started = time.monotonic()
    try:
        with join([table, other], second_group=second_groups[2]):
            if rank == 0 and what == "joins and others fail":
                pass
            elif what == "joins and others fail" or (what == "fails" and rank == 0):
                raise OSError("the disk is gone")
            elif what == "fails":
                table(ids)
            elif what == "another table":
                (table if rank == 0 else other)(ids)
            elif what == "a step":
                table(ids) if rank == 0 else stepper.step()
            elif what == "ids out of range":
                table(ids + 10 if rank == 0 else ids)
            elif what == "ids of a wrong type":
                table(ids.float() if rank == 0 else ids)
            elif what == "not finite":
                (table(ids).sum() * (torch.nan if rank == 0 else 1.0)).backward()
                stepper.step()
            elif what == "clipping":
                loss.backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    return "", time.monotonic() - started


AT_ODDS = {
    "joins and others fail": ("RuntimeError: tables .* rank 1 left sharding.join by an error", "OSError: the disk"),
    "fails": ("OSError: the disk is gone", "RuntimeError: tables .* rank 0 left sharding.join by an error of its own"),
    "another table": (
        'rank 1 is in a lookup of tables ".*/1", and rank 0 in a lookup of tables ".*/0": within sharding.join all',
        'rank 0 is in a lookup of tables ".*/0", and rank 1 in a lookup of tables ".*/1": within sharding.join all',
    ),
    "a step": (
        'rank 1 is in a step of tables ".*/0", ".*/1", and rank 0 in a lookup',
        "rank 0 is in a lookup of tables .*, and rank 1 in a step",
    ),
    "ids out of range": ('IndexError: table ".*/0": id 10', "RuntimeError: a lookup failed on rank 0"),
    "ids of a wrong type": ("TypeError: ", "RuntimeError: a lookup failed on rank 0"),
    "not finite": ("RuntimeError: emb_update: gradient of id", "RuntimeError: emb_update: gradient of id"),
}


@pytest.mark.parametrize("what", AT_ODDS)
def test_ranks_at_odds_raise_and_go_on(ranks: Ranks, table_name: Callable[[], str], what: str) -> None:
    name = table_name()
    for (said, seconds), expected in zip(ranks.run(2, seconds_until_error, name, what), AT_ODDS[what], strict=True):
        assert re.search(expected, said), said
        assert seconds < 60  # The ranks would wait for each other for half an hour.
    train_tables = ranks.run(2, train_tables_alone, table_name(), [1, 2], 9)
    assert torch.equal(*train_tables)


def refusals(group: dist.ProcessGroup, name: str) -> list[str]:
    """What is refused within a join, and as its arguments."""
    table = DistEmbedding(10, 2, name, process_group=group)
    other = DistEmbedding(10, 2, f"{name}/other", process_group=group)
    stepper = SparseOptimizer(modules=[table])
    ids, messages = torch.arange(4), []

    def note(refused: Callable[[], object]) -> None:
        with pytest.raises((RuntimeError, ValueError)) as raised:
            refused()
        messages.append(str(raised.value))

    def enter(*arguments: Any, **options: Any) -> None:
        with join(*arguments, **options):
            pass

    note(lambda: enter([]))
    note(lambda: enter([table], enable=True))
    with join([table]):
        table(ids).sum().backward()
        note(lambda: stepper.clip_grad_norm_(1.0))
        note(lambda: stepper.param_groups[0]["params"][0].grad)
        note(lambda: DistEmbedding(10, 2, f"{name}/late", process_group=group))
        note(lambda: next(iter(ShardedPipeline([ids], [table], lambda ids: ids, second_groups[4]))))
        note(lambda: enter([table]))
        note(lambda: other(ids))
        stepper.step()
    return messages


REFUSALS = [
    "join needs modules whose tables are sharded over one process_group",
    "the options ['enable'] of join are for joinables",
    "within sharding.join sharded tables take lookups, backward passes and steps only",
    "within sharding.join sharded tables take lookups, backward passes and steps only",
    "within sharding.join sharded tables take lookups, backward passes and steps only",
    "a ShardedPipeline exchanges ahead, which sharding.join does not announce",
    "a join over this process_group is under way",
    "is of no module that sharding.join was given",
]


def test_what_ranks_without_batches_would_not_do_is_refused(ranks: Ranks, table_name: Callable[[], str]) -> None:
    for messages in ranks.run(4, refusals, table_name()):
        for message, expected in zip(messages, REFUSALS, strict=True):
            assert expected in message


def test_a_group_of_one_joins_nothing(ranks: Ranks, table_name: Callable[[], str]) -> None:
    name = table_name()
    expected = train_tables_alone(None, name, [3], 9)
    assert torch.equal(ranks.run(1, train_tables_alone, name, [3], 9)[0], expected)
