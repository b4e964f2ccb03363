"""What ranks send each other, and what they do when one of them fails."""

import gc
import math
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, groups
from sharded_training import VOCABULARY, Group, Trained, global_batch, share, train
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    HashTable,
    KeyedJaggedTensor,
    NGramMemory,
    RecStoreEmbeddingBagCollection,
    SparseOptimizer,
    Table,
    table_names,
)
from recstore_ops.sharding import ShardedPipeline, exchange_statistics, pending, shard_of

pytestmark = pytest.mark.tier("test")


def test_the_owner_of_an_id_is_the_same_everywhere_and_none_owns_much_more() -> None:
    assert shard_of(torch.tensor([[0, 1], [2, -1]]), 3).tolist() == [[1, 2], [1, 2]]
    for world in (2, 3, 4, 7):
        counts = torch.bincount(shard_of(torch.arange(70_000), world), minlength=world)
        assert counts.sum() == 70_000
        assert counts.max() < 1.03 * 70_000 / world
    with pytest.raises(TypeError, match=r"ids must be of torch\.int64, got torch\.int32"):
        shard_of(torch.arange(2, dtype=torch.int32), 2)
    with pytest.raises(ValueError, match="a shard is a number from 0 on below the number of shards, got 0 of 0"):
        shard_of(torch.arange(2), 0)


def sent_bytes(group: Group, name: str) -> dict[str, float]:
    """What one step of a batch with duplicates on and across ranks sends."""
    table = DistEmbedding(None, 16, name, process_group=group)
    ids, _ = global_batch(0, 4096)
    exchange_statistics(reset=True)
    table(ids[share(4096, group)]).sum().backward()
    return exchange_statistics()


@pytest.mark.parametrize("world", [2, 4])
def test_no_duplicate_id_or_row_is_sent(ranks: Ranks, table_name: Callable[[], str], world: int) -> None:
    found = ranks.run(world, sent_bytes, table_name())
    parts = [ids.unique() for ids in global_batch(0, 4096)[0].chunk(world)]
    owners = [shard_of(part, world) for part in parts]
    asked = sum(int((owner != rank).sum()) for rank, owner in enumerate(owners))
    sums = {key: sum(each[key] for each in found) for key in ("id_bytes", "row_bytes", "gradient_bytes", "count_bytes")}
    assert sums["id_bytes"] == 8 * asked
    assert sum(sums.values()) <= 1.05 * asked * (8 + 2 * 16 * 4)


def test_a_wire_of_bfloat16_rounds_rows_and_gradients_to_eight_bits(
    ranks: Ranks, table_name: Callable[[], str]
) -> None:
    name, wide = table_name(), table_name()
    found = ranks.run(2, train_narrow, name)
    alone = train(None, name, {"kind": "sgd", "lr": 0.5})
    for each in found:
        torch.testing.assert_close(each.rows, alone.rows, rtol=2**-6, atol=2e-2)
        assert not torch.equal(each.rows, alone.rows)
    assert (
        ranks.run(2, sent_bytes_of, wide, torch.float32)[0]
        > 1.9 * ranks.run(2, sent_bytes_of, name + "b", torch.bfloat16)[0]
    )


def train_narrow(group: Group, name: str) -> Trained:
    """Trains with bfloat16 on the wire."""
    return train(group, name, {"kind": "sgd", "lr": 0.5}, wire_dtype=torch.bfloat16)


def sent_bytes_of(group: Group, name: str, wire_dtype: torch.dtype) -> float:
    """The bytes of rows of one lookup."""
    table = DistEmbedding(None, 16, name, process_group=group, wire_dtype=wire_dtype)
    exchange_statistics(reset=True)
    table(VOCABULARY)
    return exchange_statistics()["row_bytes"]


def fail_on_last(group: dist.ProcessGroup, name: str, what: str) -> None:
    """Does something that fails on the last rank only, and then something that no rank fails at."""
    is_last = group.rank() == group.size() - 1
    table = DistEmbedding(10, 2, name, process_group=group)
    try:
        _fail(table, what, is_last)
    except Exception:
        assert table(torch.arange(10)).shape == (10, 2), "the ranks are still in step"
        raise


def _fail(table: DistEmbedding, what: str, is_last: bool) -> None:
    if what == "id":
        table(torch.tensor([3, 10 if is_last else 4]))
    elif what == "dtype":
        table(torch.tensor([3.0]) if is_last else torch.tensor([3]))
    elif what == "gradient":
        before = table(torch.arange(10)).detach()
        rows = table(torch.arange(10))
        (rows * (torch.nan if is_last else 1.0)).sum().backward()
        try:
            SparseOptimizer(modules=[table]).step()
        finally:
            assert torch.equal(table(torch.arange(10)).detach(), before), "no rank has taken the step"
    elif what in ("features", "features without fusion"):
        group = table.table.shard.group  # type: ignore[union-attr]
        configs = [
            {"name": f"{table.name}/{key}", "num_embeddings": 9, "embedding_dim": 2, "feature_names": [key]}
            for key in "ab"
        ]
        fuses = what == "features"
        collection = RecStoreEmbeddingBagCollection(configs, enable_fusion=fuses, process_group=group)
        keys = ["a", "c" if is_last else "b"]
        collection(KeyedJaggedTensor(keys, torch.tensor([1, 2]), lengths=torch.tensor([1, 1])))
    elif what == "tokens":
        memory = NGramMemory(2, 5, 2, f"{table.name}/memory", process_group=table.table.shard.group)  # type: ignore[union-attr]
        tokens = torch.tensor([1, 2])
        memory(torch.ones(2, 2), tokens.float() if is_last else tokens)
    elif what == "offsets":
        bag = DistEmbeddingBag(10, 2, table.name, process_group=table.table.shard.group)  # type: ignore[union-attr]
        bag(torch.tensor([1, 2]), torch.tensor([0, 3 if is_last else 1]))


OWN = {
    "id": r'^IndexError: table "one fails: id": id 10 at position 1 is outside \[0, 10\)$',
    "dtype": "^TypeError: ids must be int64, uint64, int32, int16, int8 or uint8, got torch.float32$",
    "tokens": "^RuntimeError: ngram_ids: tokens must be int64",
    "features": "^ValueError: the batch must hold the features",
    "features without fusion": "^ValueError: the batch must hold the features",
    "offsets": "^ValueError: .*: offsets must not exceed the number of ids, 2, got 3 at position 1$",
    "gradient": "^RuntimeError: .*one fails: gradient.*(nan|NaN)",
}
OTHERS = dict.fromkeys(OWN, "^RuntimeError: a lookup failed on rank 2; its own error tells why$") | {
    "gradient": "^RuntimeError: rank [012] refuses the step, for gradients that are not finite; its own error tells"
}


@pytest.mark.parametrize("what", ["id", "dtype", "tokens", "features", "features without fusion", "offsets"])
def test_an_error_of_one_rank_is_one_of_all(ranks: Ranks, what: str) -> None:
    *others, own = ranks.errors(3, fail_on_last, f"one fails: {what}", what)
    assert re.search(OWN[what], str(own)), own.trace
    for error in others:
        assert re.search(OTHERS[what], str(error)), error.trace


def test_a_gradient_that_is_not_finite_stops_the_step_of_all(ranks: Ranks) -> None:
    errors = ranks.errors(3, fail_on_last, "one fails: gradient", "gradient")
    own = [error for error in errors if re.search(OWN["gradient"], str(error))]
    others = [error for error in errors if re.search(OTHERS["gradient"], str(error))]
    assert (len(own), len(others)) in ((1, 2), (2, 1), (3, 0)), [str(error) for error in errors]


def open_differently(group: dist.ProcessGroup, name: str, what: str) -> None:
    """Opens a table that is another one, or invalid, on the last rank."""
    try:
        _open_differently(group, name, what)
    finally:
        assert not table_names(), "nothing was made"


def _open_differently(group: dist.ProcessGroup, name: str, what: str) -> None:
    is_last = group.rank() == group.size() - 1
    if what == "name":
        DistEmbedding(10, 2, f"{name}/{is_last}", process_group=group)
    elif what == "configuration":
        DistEmbedding(10, 2, name, process_group=group, seed=int(is_last))
    elif what == "invalid":
        DistEmbedding(10, 2, name, process_group=group, optimizer="none" if is_last else "sgd")
    else:
        collection = [{"name": name, "num_embeddings": 1, "embedding_dim": 0 if is_last else 1, "feature_names": ["x"]}]
        RecStoreEmbeddingBagCollection(collection, process_group=group)


@pytest.mark.parametrize("what", ["name", "configuration", "invalid", "collection"])
def test_ranks_that_open_different_tables_raise_everywhere(
    ranks: Ranks, table_name: Callable[[], str], what: str
) -> None:
    for error in ranks.errors(3, open_differently, table_name(), what)[:-1]:
        expected = "another name or configuration" if what in ("name", "configuration") else "rank 2 could not open"
        assert expected in error.message, error.trace


def use_alone(group: dist.ProcessGroup, name: str) -> dict[str, str]:
    """What each use that makes no sense on a shard says."""
    table = DistEmbedding(None, 2, name, process_group=group)
    foreign = next(number for number in range(100) if int(shard_of(torch.tensor([number]), 2)) != group.rank())
    collection = RecStoreEmbeddingBagCollection(
        [{"name": f"{name}/c", "num_embeddings": None, "embedding_dim": 2, "feature_names": ["x"]}], process_group=group
    )
    hashed = HashTable(2, f"{name}/h", process_group=group)
    hashed.table.shard = replace(hashed.table.shard, group=groups[4])  # type: ignore[type-var]
    uses: dict[str, Callable[[], Any]] = {
        "read": lambda: table.weight[[foreign]],
        "write": lambda: table.weight.__setitem__([foreign], torch.ones(1, 2)),
        "state": lambda: table.load_state_dict({"ids": torch.tensor([foreign]), "rows": torch.ones(1, 2)}),
        "pickle": lambda: pickle.dumps(table),
        "replica": lambda: DistEmbedding(None, 2, f"{name}/replica"),
        "open": lambda: Table.open(name),
        "prefetch": lambda: collection.issue_fused_prefetch(None),
        "reduce": lambda: DistEmbedding(None, 2, name, process_group=group, grad_reduce="max"),  # type: ignore[arg-type]
        "wire": lambda: DistEmbedding(None, 2, name, process_group=group, wire_dtype=torch.float64),
        "pipeline": lambda: ShardedPipeline([], [collection]),
        "second group": lambda: ShardedPipeline([], [collection], second_group=group),
        "groups": lambda: ShardedPipeline([], [collection, hashed]),
        "handles": lambda: collection.set_prefetch_handles({"x": 1}),
        "slot": lambda: hashed.slot("embedding", torch.tensor([foreign])),
        "gradient": lambda: hashed.accept_grad(torch.tensor([foreign]), torch.ones(1, 2)),
        "stranger": lambda: DistEmbedding(None, 2, f"{name}/s", process_group=groups[1]) if group.rank() else None,
        "shard": lambda: None if group.rank() else DistEmbedding(None, 2, name, process_group=groups[1]),
        "no modules": lambda: ShardedPipeline([], []),
    }
    said = {}
    for what, use in uses.items():
        try:
            use()
        except Exception as error:
            said[what] = f"{type(error).__name__}: {error}"
    return said


def test_what_makes_no_sense_on_a_shard_raises(ranks: Ranks, table_name: Callable[[], str]) -> None:
    expected = {
        "read": "ValueError: .* at position 0 is not of rank 0 of 2, and only a lookup by its module reaches",
        "write": "ValueError: .* is not of rank 0 of 2",
        "state": "ValueError: .* is not of rank 0 of 2",
        "pickle": "TypeError: a table sharded over a process_group cannot be pickled",
        "replica": "RuntimeError: .* would be embedded in each of 4 processes",
        "open": "RuntimeError: .* is sharded, and this process has the rows of shard [01] of 2 only",
        "prefetch": "RuntimeError: issue_fused_prefetch reads this process's rows only",
        "reduce": 'ValueError: grad_reduce must be "mean" or "sum", got \'max\'',
        "wire": "ValueError: wire_dtype must be torch.float32 or torch.bfloat16, got torch.float64",
        "pipeline": r"ValueError: the tables are sharded over the ranks \[0, 1\] only: give second_group",
        "second group": r"ValueError: second_group must be another group of the ranks \[0, 1\]",
        "groups": "ValueError: the modules of a ShardedPipeline must have the same process_group",
        "handles": "RuntimeError: set_prefetch_handles reads this process's rows only",
        "slot": "ValueError: .* is not of rank 0 of 2",
        "gradient": "ValueError: .* is not of rank 0 of 2",
        "shard": "ValueError: .* is open as shard 0 of 2, and cannot be shard 0 of 1",
        "no modules": "ValueError: a ShardedPipeline needs modules with a process_group",
    }
    said, others = ranks.run(2, use_alone, table_name())
    assert said.keys() == expected.keys()
    assert others["stranger"] == "ValueError: this process is no part of the process_group of its table"
    for what, message in said.items():
        assert re.match(expected[what], message), (what, message)


def test_options_of_the_exchange_need_a_group(table_name: Callable[[], str]) -> None:
    with pytest.raises(ValueError, match="grad_reduce and wire_dtype are about the ranks of a process_group"):
        DistEmbedding(None, 2, table_name(), grad_reduce="sum")
    with pytest.raises(ValueError, match="a ShardedPipeline needs modules with a process_group"):
        ShardedPipeline([], [DistEmbedding(None, 2, table_name())])


def clip(group: Group, name: str, norm_type: float) -> tuple[float, Tensor]:
    """Clips one step's gradients; returns their norm and the rows after the step."""
    table = DistEmbedding(None, 6, name, optimizer={"kind": "sgd", "lr": 1.0}, process_group=group)
    stepper = SparseOptimizer(modules=[table])
    ids, targets = global_batch(0)
    own = share(len(ids), group)
    world = 1 if group is None else group.size()
    (world * ((table(ids[own]) - targets[own]) ** 2).sum()).backward()
    norm = stepper.clip_grad_norm_(0.5, norm_type)
    assert group is None or math.isclose(float(stepper.clip_grad_norm_(0.5, norm_type)), 0.5, rel_tol=1e-4)
    stepper.step()
    with torch.no_grad():
        return float(norm), table(VOCABULARY)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_the_norm_to_clip_by_is_over_all_ranks(ranks: Ranks, table_name: Callable[[], str], norm_type: float) -> None:
    name = table_name()
    norm, rows = clip(None, name, norm_type)
    for found_norm, found_rows in ranks.run(3, clip, name, norm_type):
        assert found_norm == pytest.approx(norm, rel=1e-5)
        torch.testing.assert_close(found_rows, rows, rtol=0, atol=1e-5)


def clip_infinite(group: dist.ProcessGroup, name: str) -> None:
    """Clips gradients that are infinite on one rank."""
    table = DistEmbedding(None, 2, name, process_group=group)
    (table(VOCABULARY[:9]) * (math.inf if group.rank() == 0 else 1.0)).sum().backward()
    SparseOptimizer(modules=[table]).clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_a_norm_that_is_not_finite_is_an_error_of_all_ranks(ranks: Ranks, table_name: Callable[[], str]) -> None:
    for error in ranks.errors(3, clip_infinite, table_name()):
        assert re.search("the norm of order 2.0 of the gradients of all ranks is (inf|nan)", str(error)), error.trace


def scale(group: dist.ProcessGroup, name: str) -> tuple[list[float], list[bool]]:
    """Trains with a GradScaler; in the second step one rank's loss overflows; returns scales, whether rows changed."""
    table = DistEmbedding(None, 6, name, process_group=group)
    stepper, scaler = SparseOptimizer(modules=[table]), GradScaler("cpu", init_scale=1024.0)
    scales, changes = [], []
    ids, _ = global_batch(0)
    for step in range(3):
        before = table(VOCABULARY).detach()
        # The last rank has no ids at all, and so perhaps no rows of its own in the step.
        own = ids[:40] if group.rank() < group.size() - 1 else ids[:0]
        loss = table(own).sum() * (math.inf if step == 1 and group.rank() == 0 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(stepper)
        scaler.update()
        stepper.zero_grad()
        scales.append(scaler.get_scale())
        changes.append(not torch.equal(table(VOCABULARY).detach(), before))
    return scales, changes


def test_a_scaler_leaves_out_the_step_on_all_ranks(ranks: Ranks, table_name: Callable[[], str]) -> None:
    for found in ranks.run(3, scale, table_name()):
        assert found == ([1024.0, 512.0, 512.0], [True, False, True])


def train_ahead(group: dist.ProcessGroup, name: str, is_ahead: bool) -> tuple[Tensor, Tensor]:
    """Trains with an evaluation of another batch in the midst; returns all outputs and the rows."""
    table = DistEmbedding(None, 6, name, optimizer={"kind": "adam", "lr": 0.1}, process_group=group)
    stepper = SparseOptimizer(modules=[table])
    batches = [global_batch(step)[0][share(64, group, [3, 1, 0, 2])] for step in range(12)]
    loader = ShardedPipeline(batches, [table], features=lambda ids: ids) if is_ahead else batches
    outputs = []
    for step, ids in enumerate(loader):
        if step == 5:
            outputs.append(table(VOCABULARY[:9]).detach())
        outputs.append(table(ids))
        (outputs[-1] - 1).square().sum().backward()
        stepper.step()
    return torch.cat([each.detach() for each in outputs]), table(VOCABULARY).detach()


def test_rows_that_come_ahead_are_those_of_their_moment_to_the_bit(ranks: Ranks) -> None:
    plain, ahead = (ranks.run(4, train_ahead, "ahead", is_ahead) for is_ahead in (False, True))
    for (outputs, rows), (outputs_ahead, rows_ahead) in zip(plain, ahead, strict=True):
        assert torch.equal(outputs, outputs_ahead)
        assert torch.equal(rows, rows_ahead)


def test_a_loader_that_fails_or_is_left_leaves_nothing_behind(ranks: Ranks) -> None:
    assert ranks.run(4, leave_a_loader) == [(2, 0)] * 4


def test_a_loader_that_fails_gives_the_batches_before(ranks: Ranks) -> None:
    assert ranks.run(4, fail_in_a_loader) == [(3, "the disk is gone", 0)] * 4


def fail_in_a_loader(group: dist.ProcessGroup) -> tuple[int, str, int]:
    """How many batches a pipeline gives of a loader that fails after three, its error, and lookups still pending."""

    def batches() -> Iterator[torch.Tensor]:
        yield from [torch.arange(5)] * 3
        raise OSError("the disk is gone")

    table, seen = DistEmbedding(None, 2, "failing", process_group=group), 0
    try:
        for ids in ShardedPipeline(batches(), [table], features=lambda ids: ids):
            table(ids)
            seen += 1
    except OSError as error:
        return seen, str(error), len(pending._pending)
    raise AssertionError("the error of the loader is lost")


def leave_a_loader(group: dist.ProcessGroup) -> tuple[int, int]:
    """Leaves a pipeline after two batches; returns these and the lookups that are still pending."""
    table = DistEmbedding(None, 2, "left", process_group=group)
    seen = 0
    for ids in ShardedPipeline([torch.arange(5)] * 9, [table], features=lambda ids: ids):
        table(ids)
        seen += 1
        if seen == 2:
            break
    gc.collect()
    return seen, len(pending._pending)
