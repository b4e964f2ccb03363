"""Every public call that names tables, or means all of the process, where these are sharded over ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from safetensors.torch import save_file

import recstore_ops
from recstore_ops import (
    DistEmbedding,
    DistTensor,
    EmbeddingTableConfig,
    RecStoreClient,
    RecStoreEmbeddingBagCollection,
    SparseOptimizer,
    Table,
    checkpoint,
    sharding,
    transfer,
)
from recstore_ops.ops import operators
from recstore_ops.table.known_shards import refuse_other_parts

pytestmark = pytest.mark.tier("test")

IDS = torch.arange(10)

OF_THIS_RANK = {
    *("RecStoreClient.stats", "RecStoreClient.evict", "RecStoreClient.drop", "RecStoreClient.delete_data"),
    *("table_statistics", "checkpoint.save_part", "default_table"),
    # They tell of no rows.
    *("RecStoreClient.data_name_list", "RecStoreClient.gdata_name_list", "table_names"),
}
"""Documented to be about the rows of this rank."""

OF_NO_TABLE = {
    *(f"RecStoreClient.{name}" for name in ("wait", "wait_and_get", "barrier", "set_ps_config", "apply_grads")),
    *("checkpoint.commit", "checkpoint.compact", "checkpoint.new_snapshot_name", "checkpoint.prune"),
    *("checkpoint.shard_of", "checkpoint.verify"),
    # They make new tables, of which each rank takes its rows, or go through modules.
    *("transfer.from_embedding", "transfer.replace_embeddings"),
}
"""About directories, handles, what is given as objects, or tables that are not there yet."""


def refused_calls(name: str, module: Any, collection: Any, path: Path) -> dict[str, Callable[[], Any]]:
    """Every call that refuses sharded tables, by its name."""
    client, ones = RecStoreClient(), torch.ones(10, 2)
    state = {f"embedding_bags.{name}/c.weight": torch.ones(10, 2)}
    return {
        "checkpoint.save": lambda: checkpoint.save(path / "new"),
        "checkpoint.save_async": lambda: checkpoint.save_async(path / "new"),
        "checkpoint.load": lambda: checkpoint.load(path / "saved"),
        "checkpoint.load, a table": lambda: checkpoint.load(path / "saved", tables=[name]),
        "checkpoint.load, another shard": lambda: checkpoint.load(path / "saved", shard=(0, 3)),
        "checkpoint.save_part, another shard": lambda: checkpoint.save_part(
            path / "new", checkpoint.new_snapshot_name(), 0, 3
        ),
        "RecStoreClient.save": lambda: client.save(path / "new"),
        "RecStoreClient.save_async": lambda: client.save_async(path / "new"),
        "RecStoreClient.load": lambda: client.load(path / "saved"),
        "RecStoreClient.init_embedding_table": lambda: client.init_embedding_table(name, EmbeddingTableConfig(10, 2)),
        "RecStoreClient.init_data": lambda: client.init_data(name, (10, 2), torch.float32),
        "RecStoreClient.pull": lambda: client.pull(name, IDS),
        "RecStoreClient.push": lambda: client.push(name, IDS, ones),
        "RecStoreClient.push_async": lambda: client.wait(client.push_async(name, IDS, ones)),
        "RecStoreClient.update": lambda: client.update(name, IDS, ones),
        "RecStoreClient.update_async": lambda: client.wait(client.update_async(name, IDS, ones)),
        "RecStoreClient.prefetch": lambda: client.prefetch(IDS, name),
        "RecStoreClient.delete": lambda: client.delete(name, IDS),
        "RecStoreClient.set_learning_rate": lambda: client.set_learning_rate(name, 0.1),
        "RecStoreClient.get_data_meta": lambda: client.get_data_meta(name),
        "DistTensor": lambda: DistTensor((10, 2), torch.float32, name),
        "Table.open": lambda: Table.open(name),
        "inspect_table": lambda: recstore_ops.inspect_table(name),
        "transfer.import_rows": lambda: transfer.import_rows(module, IDS, ones),
        "transfer.import_rows, by name": lambda: transfer.import_rows(name, IDS, ones),
        "transfer.import_safetensors": lambda: transfer.import_safetensors(path / "matrix", {"m": module}),
        "transfer.import_torchrec": lambda: transfer.import_torchrec(state, collection),
        "transfer.export_safetensors": lambda: transfer.export_safetensors(path / "rows"),
        "transfer.export_safetensors, a module": lambda: transfer.export_safetensors(path / "rows", [module]),
        "transfer.export_safetensors, matrices": lambda: transfer.export_safetensors(
            path / "rows", [module], as_matrices=True
        ),
        "transfer.export_parquet": lambda: transfer.export_parquet(path / "rows", module),
        "transfer.export_torchrec": lambda: transfer.export_torchrec(collection),
        "transfer.restore_embeddings": lambda: transfer.restore_embeddings(torch.nn.Sequential(module)),
    }


def call_all(group: dist.ProcessGroup, name: str, path: Path) -> tuple[dict[str, str], bool]:
    """What each call raises, and whether rows and files are as they were."""
    module = DistEmbedding(10, 2, name, process_group=group)
    tables = [{"name": f"{name}/c", "num_embeddings": 10, "embedding_dim": 2, "feature_names": ["x"]}]
    collection = RecStoreEmbeddingBagCollection(tables, process_group=group)
    optimizer = SparseOptimizer(modules=[module], lr=0.5)
    module(IDS).sum().backward()
    optimizer.step()
    sharding.save(path / "saved", group)
    before, said = module(IDS).detach(), {}
    for call, use in refused_calls(name, module, collection, path).items():
        try:
            use()
        except Exception as error:
            said[call] = f"{type(error).__name__}: {error}"
        else:
            said[call] = "nothing"
    is_same = torch.equal(module(IDS), before) and not any((path / new).exists() for new in ("new", "rows"))
    statistics = RecStoreClient().stats()[name]
    assert statistics["rows"] == recstore_ops.table_statistics(name)["rows"] == len(module.table)
    sharding.load(path / "saved", group)
    checkpoint.load(path / "saved", shard=(group.rank(), group.size()))
    return said, is_same and torch.equal(module(IDS), before)


def test_every_call_by_name_refuses_sharded_tables(ranks: Ranks, table_name: Callable[[], str], tmp_path: Path) -> None:
    name = table_name()
    save_file({"m": torch.ones(10, 2)}, tmp_path / "matrix")
    for rank, (said, is_same) in enumerate(ranks.run(2, call_all, name, tmp_path)):
        assert is_same
        for call, message in said.items():
            # A model's error tells the path of the module within.
            named = '"0": its table' if call == "transfer.restore_embeddings" else f'"{name}'
            assert "Error: " in message, (rank, call, message)
            assert named in message, (rank, call, message)
            if call.startswith(("checkpoint.", "RecStoreClient.save", "RecStoreClient.load")):
                assert "sharding.save and sharding.load, which all ranks call together" in message, (call, message)


def test_every_public_call_is_one_or_the_other() -> None:
    refused = {call.partition(",")[0] for call in refused_calls("t", None, None, Path("."))}
    methods = {f"RecStoreClient.{name}" for name in vars(RecStoreClient) if not name.startswith("_")}
    functions = {f"checkpoint.{name}" for name in checkpoint.__all__ if name[0].islower()}
    functions |= {f"transfer.{name}" for name in transfer.__all__ if name[0].islower()}
    for call in methods | functions:
        assert sum(call in kind for kind in (refused, OF_THIS_RANK, OF_NO_TABLE)) >= 1, call


def save_what_is_not_sharded_alike(group: dist.ProcessGroup, name: str, path: Path) -> str:
    DistEmbedding(10, 2, name, process_group=group)
    operators.make_hashtable(f"{name}/own", 2, "{}")
    with pytest.raises(RuntimeError, match="must be sharded over it") as caught:
        sharding.save(path, group)
    return str(caught.value)


def test_all_ranks_save_tables_of_their_group_only(ranks: Ranks, table_name: Callable[[], str], tmp_path: Path) -> None:
    name = table_name()
    for rank, message in enumerate(ranks.run(2, save_what_is_not_sharded_alike, name, tmp_path)):
        assert f'sharding.save: this process has shard 0 of 1 of table "{name}/own", and is rank {rank} of 2' in message
    assert list(tmp_path.iterdir()) == []


def open_what_was_loaded_whole(group: dist.ProcessGroup, name: str, path: Path) -> None:
    checkpoint.load(path)
    DistEmbedding(10, 2, name, process_group=group)


def open_what_was_loaded_by_all(group: dist.ProcessGroup, name: str, path: Path) -> list[int]:
    sharding.load(path, group)
    return [len(DistEmbedding(10, 2, name, process_group=group).table)]


def test_a_table_is_opened_as_it_was_loaded(ranks: Ranks, table_name: Callable[[], str], tmp_path: Path) -> None:
    name = table_name()
    module = DistEmbedding(10, 2, name)
    module.reset_parameters()
    checkpoint.save(tmp_path)
    for error in ranks.errors(2, open_what_was_loaded_whole, name, tmp_path):
        assert "is open as shard 0 of 1, and cannot be shard" in error.message or "could not open" in error.message
    assert sum(sum(rows) for rows in ranks.run(2, open_what_was_loaded_by_all, name, tmp_path)) == len(module.table)


def test_a_table_of_this_process_alone_is_of_no_group(table_name: Callable[[], str]) -> None:
    name = table_name()
    DistEmbedding(10, 2, name)
    refuse_other_parts("sharding.save", [name], (0, 1))
    with pytest.raises(RuntimeError, match="is rank 1 of 2 of the group"):
        refuse_other_parts("sharding.save", [name], (1, 2))
