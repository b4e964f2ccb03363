"""Tables larger than their memory: the same rows as in memory, a limit that holds, and errors that name the table."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_kinds import TABLES, table_id
from torch import Tensor, nn

from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    EmbeddingTableConfig,
    HashTable,
    KeyedJaggedTensor,
    PrefetchingDataLoader,
    RecStoreClient,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
    SparseOptimizer,
    Table,
    active_config,
    checkpoint,
    memory_in_use,
    set_memory_limit,
    table_statistics,
)

pytestmark = pytest.mark.tier("test")

TableName = Callable[[], str]

DIM, ROWS, LIMIT = 16, 4_000, 300_000


@pytest.fixture(autouse=True)
def _no_store_limit() -> Iterator[None]:
    yield
    set_memory_limit(None)


def batches(count: int, size: int = 700) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids, a few of them often, and what the rows' product with it is the loss."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        ids = (torch.rand(size, generator=generator) ** 3 * ROWS).long()
        yield ids, torch.randn(size, DIM, generator=generator)


def train(module: DistEmbedding | DistEmbeddingBag, pools: bool, count: int = 20) -> Tensor:
    optimizer = SparseOptimizer(modules=[module])
    outputs = []
    for ids, factor in batches(count):
        rows = module(ids.view(-1, 7)) if pools else module(ids)
        outputs.append(rows.detach().sum(0))
        (rows * factor[: rows.shape[0]]).sum().backward()
        optimizer.step()
    return torch.stack(outputs)


@pytest.mark.parametrize(
    ("pools", "options"),
    [
        pytest.param(pools, options, id=f"{table_id(options)}-{pools}")
        for options in TABLES
        for pools in ((False,) if "state_dtype" in options else (False, True))
    ],
)
def test_a_module_trains_to_the_same_bits_as_in_memory(
    pools: bool, options: dict[str, Any], table_name: TableName, tmp_path: Path
) -> None:
    kind, name = (DistEmbeddingBag if pools else DistEmbedding), table_name()
    tiered: Any = kind(None, DIM, name, memory_limit=LIMIT, disk=tmp_path, **options)
    in_disk = train(tiered, pools), tiered.weight[torch.arange(ROWS)]
    statistics = table_statistics(name)
    RecStoreClient().drop(name)
    plain: Any = kind(None, DIM, name, **options)
    in_memory = train(plain, pools), plain.weight[torch.arange(ROWS)]
    assert all(torch.equal(one, other) for one, other in zip(in_disk, in_memory, strict=True))
    assert statistics["bytes"] <= LIMIT == statistics["memory_limit"]
    assert list(tmp_path.iterdir()) == []


def test_statistics_account_for_every_byte(table_name: TableName, tmp_path: Path) -> None:
    name = table_name()
    module = DistEmbedding(None, DIM, name, optimizer="adam", memory_limit=LIMIT, disk=tmp_path)
    train(module, False, 40)
    found = RecStoreClient().stats(name)
    parts = ("row_bytes", "slot_bytes", "index_bytes", "free_bytes")
    assert found["bytes"] == sum(found[part] for part in parts)
    assert 0 < found["resident_rows"] < found["rows"]
    assert all(found[key] > 0 for key in ("disk_bytes", "rows_spilled", "disk_nanoseconds"))
    in_use = memory_in_use()
    RecStoreClient().drop(name)
    assert memory_in_use() == in_use - found["bytes"]


def test_a_limit_is_kept_by_eviction_where_rows_may_leave(table_name: TableName) -> None:
    name = table_name()
    table = HashTable(DIM, name, optimizer="adagrad", memory_limit=LIMIT, eviction={"ttl": 1_000_000, "keep": [7]})
    optimizer = SparseOptimizer(modules=[table])
    for start in range(0, 100_000, 200):
        table(torch.arange(start, start + 200)).sum().backward()
        optimizer.step()
        assert table_statistics(name)["bytes"] <= LIMIT
    statistics = table_statistics(name)
    assert statistics["rows"] + statistics["evictions"] == 100_000
    # Those that came last, but for the one to keep.
    expected = torch.arange(100_000 - statistics["rows"] + 1, 100_000)
    torch.testing.assert_close(table.ids().sort().values, torch.cat([torch.tensor([7]), expected]))


def test_a_limit_without_a_disk_names_the_table_and_changes_nothing(table_name: TableName) -> None:
    module = DistEmbedding(None, DIM, table_name(), memory_limit=50_000)
    module.weight[torch.arange(100)] = torch.ones(100, DIM)
    with pytest.raises(RuntimeError, match=rf'table "{module.name}".* table\'s memory limit of 50000 bytes'):
        module.weight[torch.arange(10_000)] = torch.zeros(10_000, DIM)
    assert len(module.table) == 100
    assert module(torch.arange(100)).eq(1).all()
    module.weight[torch.arange(100).repeat(100)] = torch.zeros(10_000, DIM)


def test_the_limit_of_all_tables_names_the_one_that_has_no_room(table_name: TableName) -> None:
    module = DistEmbedding(None, DIM, table_name())
    set_memory_limit(memory_in_use() + 50_000)
    with pytest.raises(RuntimeError, match=rf'table "{module.name}".* store\'s memory limit'):
        module.weight[torch.arange(10_000)] = torch.zeros(10_000, DIM)
    set_memory_limit(None)
    module.weight[torch.arange(10_000)] = torch.zeros(10_000, DIM)
    with pytest.raises(ValueError, match="memory_limit must be at least 1 or None, got 0"):
        set_memory_limit(0)


def test_every_module_takes_a_limit_and_a_disk(table_name: TableName, tmp_path: Path) -> None:
    where: dict[str, Any] = {"memory_limit": LIMIT, "disk": tmp_path}
    names = [table_name() for _ in range(4)]
    HashTable(DIM, names[0], **where)
    RecStoreClient().init_embedding_table(names[1], EmbeddingTableConfig(None, DIM, **where))
    described = [{"name": name, "num_embeddings": None, "embedding_dim": DIM, **where} for name in names[2:]]
    bags = RecStoreEmbeddingBagCollection(described[:1])
    RecStoreEmbeddingCollection(described[1:])
    for name in names:
        config = Table.open(name).config
        assert (config.memory_limit, config.disk) == (LIMIT, os.fspath(tmp_path))
    with pytest.raises(ValueError, match="differs from the requested"):
        DistEmbedding(None, DIM, names[1])
    features = KeyedJaggedTensor([names[2]], torch.arange(6), lengths=torch.tensor([2, 4]))
    assert bags(features).shape == (2, 1, DIM)


def test_the_configuration_file_says_where_rows_lie(
    table_name: TableName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, path = table_name(), tmp_path / "recstore_config.json"
    path.write_text(f'{{"embedding_tables": {{"{name}": {{"memory_limit": {LIMIT}, "disk": "{tmp_path}"}}}}}}')
    monkeypatch.setenv("RECSTORE_CONFIG", str(path))
    try:
        active_config(reload=True)
        DistEmbedding(None, DIM, name)
    finally:
        monkeypatch.undo()
        active_config(reload=True)
    assert Table.open(name).config.disk == str(tmp_path)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"memory_limit": 0}, "memory_limit must be null or positive, got 0"),
        ({"disk": "/tmp"}, "disk needs memory_limit"),
        ({"memory_limit": LIMIT, "disk": ""}, "disk must name a file or directory, got "),
        ({"memory_limit": LIMIT, "disk": "/no/such/place"}, "slot file in /no/such/place: No such file"),
    ],
)
def test_what_makes_no_sense_is_refused(where: dict[str, Any], message: str, table_name: TableName) -> None:
    with pytest.raises(ValueError, match=message):
        DistEmbedding(None, DIM, table_name(), **where)


def test_a_checkpoint_of_a_table_on_disk_loads_into_one_in_memory(table_name: TableName, tmp_path: Path) -> None:
    name = table_name()
    tiered = DistEmbedding(None, DIM, name, optimizer="adagrad", memory_limit=LIMIT, disk=tmp_path)
    train(tiered, False)
    rows = tiered.weight[torch.arange(ROWS)]
    checkpoint.save(tmp_path / "checkpoint", progress=False)
    train(tiered, False, 3)
    checkpoint.load(tmp_path / "checkpoint", progress=False)
    assert torch.equal(tiered.weight[torch.arange(ROWS)], rows)
    assert table_statistics(name)["bytes"] <= LIMIT
    RecStoreClient().drop(name)
    plain = DistEmbedding(None, DIM, name, optimizer="adagrad")
    checkpoint.load(tmp_path / "checkpoint", progress=False)
    assert torch.equal(plain.weight[torch.arange(ROWS)], rows)


def test_a_forked_child_reads_rows_on_disk_too(table_name: TableName, tmp_path: Path) -> None:
    module = DistEmbedding(None, DIM, table_name(), optimizer="adagrad", memory_limit=LIMIT, disk=tmp_path)
    train(module, False, 40)
    ids = torch.arange(ROWS)
    rows = module.weight[ids].numpy().tobytes()
    child = os.fork()
    if child == 0:
        # Comparing tensors would wait for threads that a child does not have.
        os._exit(0 if module.weight[ids].numpy().tobytes() == rows else 1)
    assert os.waitpid(child, 0)[1] == 0


KILLED = """
import sys, torch
from pathlib import Path
from recstore_ops import DistEmbedding, SparseOptimizer, checkpoint
name, where = sys.argv[1], Path(sys.argv[2])
module = DistEmbedding(None, 16, name, optimizer="adagrad", memory_limit=300_000, disk=where / "disk")
optimizer = SparseOptimizer(modules=[module])
generator = torch.Generator().manual_seed(1)
for step in range(10_000):
    ids = (torch.rand(700, generator=generator) ** 2 * 4_000).long()
    module(ids).square().sum().backward()
    optimizer.step()
    if step == 20:
        checkpoint.save(where / "checkpoint", progress=False)
        torch.save(module.weight[torch.arange(4_000)], where / "rows.pt")
        print("saved", flush=True)
"""


def test_after_a_kill_the_checkpoint_loads_and_the_disk_is_empty(table_name: TableName, tmp_path: Path) -> None:
    name = table_name()
    (tmp_path / "disk").mkdir()
    command = [sys.executable, "-c", KILLED, name, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "saved\n"
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert list((tmp_path / "disk").iterdir()) == []
    module = DistEmbedding(None, DIM, name, optimizer="adagrad", memory_limit=LIMIT, disk=tmp_path / "disk")
    checkpoint.load(tmp_path / "checkpoint", progress=False)
    assert torch.equal(module.weight[torch.arange(ROWS)], torch.load(tmp_path / "rows.pt"))
    assert table_statistics(name)["bytes"] <= LIMIT


def test_rows_read_ahead_train_to_the_same_bits(table_name: TableName, tmp_path: Path) -> None:
    where: dict[str, Any] = {"memory_limit": LIMIT, "disk": tmp_path}
    name, trained = table_name(), []
    for options, count in (({}, 0), (where, 0), (where, 1), (where, 3)):
        described = [{"name": name, "num_embeddings": None, "embedding_dim": DIM, "feature_names": ["seen"], **options}]
        bags = RecStoreEmbeddingBagCollection(described, optimizer="adagrad")
        optimizer = SparseOptimizer(modules=[bags])
        features = [KeyedJaggedTensor(["seen"], ids, lengths=torch.ones_like(ids)) for ids, _ in batches(20)]
        outputs = []
        for batch in PrefetchingDataLoader(features, bags, count) if count else features:
            rows = bags(batch)
            outputs.append(rows.detach().sum(0))
            rows.square().sum().backward()
            optimizer.step()
        assert bags.report_prefetch_stats()["used"] == (20 if count else 0)
        assert options == {} or table_statistics(name)["rows_fetched"] > 0
        trained.append((torch.stack(outputs), bags.embedding_bags[name].weight[torch.arange(ROWS)]))
        RecStoreClient().drop(name)
    for outputs, weights in trained[1:]:
        assert torch.equal(outputs, trained[0][0])
        assert torch.equal(weights, trained[0][1])


def test_a_limit_is_part_of_a_module_that_is_copied(table_name: TableName, tmp_path: Path) -> None:
    module = nn.Sequential(DistEmbedding(None, DIM, table_name(), memory_limit=LIMIT, disk=tmp_path))
    module.load_state_dict(module.state_dict())
    assert len(module(torch.arange(3))) == 3
