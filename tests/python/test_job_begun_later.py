"""A job of several processes that begins when modules are made already, as trainers do that are given a model.

Each process would train a copy of its own: every module and operator refuses the rows of such a table, in compiled
graphs too, until the job has ended.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_ops import DIM, EAGER_ONLY, IDS, MAKERS_OF_IDS, OFFSETS, all_overloads, arguments, overload
from torch import Tensor, nn
from warm_processes import side_by_side

from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    DistTensor,
    EmbeddingBagConfig,
    EmbeddingConfig,
    EmbeddingTableConfig,
    HashTable,
    KeyedJaggedTensor,
    KVWorker,
    NGramMemory,
    RecStoreClient,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
    SparseOptimizer,
    _native,
    embedding,
    table_statistics,
)
from recstore_ops.table.table import Table

pytestmark = [pytest.mark.tier("test"), pytest.mark.embedded_only("the processes of a job share the tables of servers")]

ops = torch.ops.recstore

MADE_BEFORE = r'table "[^"]+" is embedded in each of 2 processes, and the copies would drift apart; give its module a '
MADE_AFTER = r'table "[^"]+" would be embedded in each of 2 processes'
TOUCH_NO_ROWS = {"clear_grads", "unique", "merge_gradients", *MAKERS_OF_IDS}
"""Traced operators that read no row and take no step."""
BY_NAME = {"make_hashtable", "hashtable_release", "drop_table", "init_embedding_table"}
OF_COLLECTORS = {"make_collector", "collector_release", "collected_tables"}
OF_RANKS = {"rank_requests", "pool_rank_rows", "spread_rank_grads", "_panic"}
"""Operators on what ranks exchange, which comes from their tables."""


def batch(*keys: str) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(list(keys), torch.arange(2 * len(keys)), lengths=torch.tensor([1, 1] * len(keys)))


def trained(module: nn.Module, *inputs: Any, pooled: Callable[[Any], Tensor] = lambda rows: rows) -> None:
    pooled(module(*inputs)).sum().backward()
    SparseOptimizer(lr=0.1, modules=[module]).step()


class Uses:
    """What programs do with rows: by name how it is opened, and then a lookup or a step of it."""

    def dist_embedding(self) -> Callable[[], Any]:
        module = DistEmbedding(None, 4, "embedding")
        return lambda: trained(module, IDS)

    def without_gradients(self) -> Callable[[], Any]:
        module = DistEmbedding(None, 4, "evaluated").eval()
        return lambda: torch.no_grad()(module)(IDS)

    def several_paddings(self) -> Callable[[], Any]:
        module = DistEmbedding(None, 4, "padded", padding_idx=[0, 2])
        return lambda: trained(module, IDS)

    def compiled(self) -> Callable[[], Any]:
        module = DistEmbedding(None, 4, "compiled")
        lookup: Any = torch.compile(module, backend="aot_eager")
        trained(lookup, IDS)
        return lambda: lookup(IDS)

    def in_a_model(self) -> Callable[[], Any]:
        model = nn.Sequential(DistEmbedding(None, 4, "in_a_model"), nn.Linear(4, 1))
        return lambda: nn.parallel.DistributedDataParallel(model)(IDS)

    def step_alone(self) -> Callable[[], Any]:
        module = DistEmbedding(None, 4, "stepped")
        module(IDS).sum().backward()
        return lambda: SparseOptimizer(lr=0.1, modules=[module]).step()

    def backward_alone(self) -> Callable[[], Any]:
        module = DistEmbedding(None, 4, "backward")
        rows = module(IDS)
        return lambda: (rows.sum().backward(), module)

    def bag(self) -> Callable[[], Any]:
        module = DistEmbeddingBag(None, 4, "bag", mode="sum")
        return lambda: trained(module, IDS, OFFSETS[:3])

    def bag_collection(self) -> Callable[[], Any]:
        configs = [EmbeddingBagConfig(name, 4, 100, [name]) for name in ("first", "second")]
        module = RecStoreEmbeddingBagCollection(configs)
        return lambda: trained(module, batch("first", "second"))

    def prefetched(self) -> Callable[[], Any]:
        module = RecStoreEmbeddingBagCollection([EmbeddingBagConfig("ahead", 4, 100, ["ahead"])])
        module.issue_fused_prefetch(batch("ahead"))
        return lambda: module(batch("ahead"))

    def collection(self) -> Callable[[], Any]:
        module = RecStoreEmbeddingCollection([EmbeddingConfig("sequence", 4, 100, ["sequence"])])
        return lambda: trained(module, batch("sequence"), pooled=lambda found: found["sequence"].values())

    def hashtable(self) -> Callable[[], Any]:
        module = HashTable(4, name="hashtable")
        return lambda: trained(module, IDS)

    def ngram_memory(self) -> Callable[[], Any]:
        module = NGramMemory(2, 100, 4, "ngrams")
        return lambda: module(torch.ones(1, 3, 2), torch.tensor([[1, 2, 3]]))

    def functional(self) -> Callable[[], Any]:
        table = Table("functional", 4)
        return lambda: embedding(IDS, table)

    def dist_tensor_read(self) -> Callable[[], Any]:
        tensor = DistTensor((10, 4), torch.float32, "tensor")
        return lambda: tensor[[1, 2]]

    def dist_tensor_write(self) -> Callable[[], Any]:
        tensor = DistTensor((10, 4), torch.float32, "written")
        return lambda: tensor.__setitem__([1], torch.ones(1, 4))

    def worker_push(self) -> Callable[[], Any]:
        worker = KVWorker("pushed")
        return lambda: worker.wait(worker.push([1], [1.0]))

    def worker_pull(self) -> Callable[[], Any]:
        worker = KVWorker("pulled")
        return lambda: worker.wait_rows(worker.pull([1]))

    def client(self) -> Callable[[], Any]:
        client = RecStoreClient()
        client.init_embedding_table("by name", EmbeddingTableConfig(100, 4))
        return lambda: client.pull("by name", IDS[:1])


USES = [name for name in vars(Uses) if not name.startswith("_")]


def operator_calls() -> dict[str, list[Callable[[], Any]]]:
    """A call of each operator that touches rows, with the arguments that its checks take."""
    table, other, collector = ops.make_hashtable("t", DIM), ops.make_hashtable("u", DIM), ops.make_collector()
    ops.accept_grad(collector, table, IDS, torch.ones(4, DIM))
    calls = {
        name: [lambda name=name, given=given: overload(name)(*given) for given in all_given]
        for name, all_given in arguments(table, other, collector).items()
        if name not in TOUCH_NO_ROWS
    }
    issued, issued_default = ops.emb_prefetch.table(table, IDS), ops.emb_prefetch(IDS, DIM + 1)
    several = ops.emb_prefetch.tables([table, other], IDS, torch.tensor([0, 2, 4]))
    return {
        **calls,
        "emb_prefetch": [lambda: ops.emb_prefetch(IDS, DIM)],
        "emb_prefetch.table": [lambda: ops.emb_prefetch.table(table, IDS)],
        "emb_prefetch.tables": [lambda: ops.emb_prefetch.tables([table, other], IDS, torch.tensor([0, 2, 4]))],
        "emb_wait_result": [
            lambda: ops.emb_wait_result(issued, DIM),
            lambda: ops.emb_wait_result(issued_default, DIM + 1),
        ],
        "emb_wait_tables": [lambda: ops.emb_wait_tables(several)],
        "emb_read.ranks": [lambda: ops.emb_read.ranks([table], IDS, [4], [DIM])],
        "accept_rank_grads": [
            lambda: ops.accept_rank_grads([collector], [table], IDS, [4], torch.ones(4 * DIM), [DIM], [], [])
        ],
        "hashtable_ids": [lambda: ops.hashtable_ids(table)],
        "hashtable_size": [lambda: ops.hashtable_size(table)],
        "hashtable_slot": [lambda: ops.hashtable_slot(table, IDS, "none")],
        "collected_grads": [lambda: ops.collected_grads(collector, table)],
    }


def refusal(call: Callable[[], Any]) -> str:
    """The message of a call that is refused, else nothing."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def made_before(rank: int, store: Path) -> dict[str, str]:
    torch.set_num_threads(1)
    uses = {name: getattr(Uses(), name)() for name in USES}
    operators = {
        f"{name} {place}": call for name, calls in operator_calls().items() for place, call in enumerate(calls)
    }
    sharded_after = DistEmbedding(None, 4, "whole")
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    told = {name: refusal(call) for name, call in {**uses, **operators}.items()}
    sharded = DistEmbedding(None, 4, "sharded", process_group=dist.group.WORLD)
    trained(sharded, IDS)
    assert table_statistics("whole")["rows"] == 0
    dist.barrier()
    dist.destroy_process_group()
    trained(sharded_after, IDS)
    assert table_statistics("whole")["rows"] == 3
    return told


def made_after(rank: int, store: Path) -> dict[str, str]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    told = {name: refusal(getattr(Uses(), name)) for name in USES}
    handle = ops.make_hashtable("by operator", DIM)
    told["emb_read"] = refusal(lambda: ops.emb_read(handle, IDS, DIM))
    dist.barrier()
    dist.destroy_process_group()
    return told


def on_both(function: Callable[..., Any], directory: Path) -> list[Any]:
    return side_by_side(function, [(rank, directory / "store") for rank in range(2)])


def test_all_that_reads_or_steps_refuses_what_was_made_before_the_job(tmp_path: Path) -> None:
    for told in on_both(made_before, tmp_path):
        assert {name: text for name, text in told.items() if not re.search(MADE_BEFORE, text)} == {}


def test_all_that_opens_tables_refuses_them_within_the_job(tmp_path: Path) -> None:
    for told in on_both(made_after, tmp_path):
        by_operator = told.pop("emb_read")
        assert {name: text for name, text in told.items() if not re.search(MADE_AFTER, text)} == {}
        assert re.search(MADE_BEFORE, by_operator)


def test_every_operator_is_called_or_touches_no_rows() -> None:
    left_out = TOUCH_NO_ROWS | BY_NAME | OF_COLLECTORS | OF_RANKS
    assert set(operator_calls()) | left_out == all_overloads()
    assert left_out - TOUCH_NO_ROWS <= EAGER_ONLY


def test_a_job_of_one_process_refuses_nothing(tmp_path: Path) -> None:
    module = DistEmbedding(None, 4, "alone")
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    trained(module, IDS)
    dist.destroy_process_group()
    trained(module, IDS)


def test_the_size_of_a_job_is_noted_wherever_it_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    noted: list[int] = []
    monkeypatch.setattr(_native, "set_job_size", noted.append)
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    dist.destroy_process_group()
    assert noted == [1, 1]
