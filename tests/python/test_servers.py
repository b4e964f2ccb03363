"""The same modules over parameter servers: equal to the bit to tables in this process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from optimizer_kinds import TABLES, table_id
from served_tables import ServerProcesses
from torch import Tensor
from warm_programs import output_of
from warm_recstore import run_recstore

import recstore_ops
from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    DistTensor,
    EmbeddingBagConfig,
    EmbeddingTableConfig,
    HashTable,
    KeyedJaggedTensor,
    RecStoreClient,
    RecStoreEmbeddingBagCollection,
    SparseOptimizer,
    Table,
    TableConfig,
    current_ps_backend,
    inspect_checkpoint,
    load_config_file,
    servers,
)
from recstore_ops.config.config_file import ConfigFile
from recstore_ops.servers.server_config import ServerAddress, chosen_servers, known_servers, served_shards

pytestmark = pytest.mark.tier("test")

TableName = Callable[[], str]


@pytest.fixture(scope="module", params=[1, 3], ids=["one_server", "three_shards"])
def processes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcesses]:
    with ServerProcesses(tmp_path_factory.mktemp("servers"), request.param) as processes:
        yield processes


@pytest.fixture(autouse=True)
def _embedded_again() -> Iterator[None]:
    yield
    servers.set_ps_backend("embedded")


def on_both(processes: ServerProcesses, scenario: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Runs a scenario in this process and on servers, and returns what both gave."""
    servers.set_ps_backend("embedded")
    embedded = scenario()
    servers.set_ps_servers(processes.addresses)
    assert servers.current_ps_backend() == "servers"
    served = scenario()
    assert len(served) == len(embedded)
    for here, there in zip(embedded, served, strict=True):
        assert torch.equal(here, there)
    return served


@pytest.mark.parametrize("options", TABLES, ids=table_id)
def test_an_embedding_is_trained(processes: ServerProcesses, table_name: TableName, options: dict[str, Any]) -> None:
    name, batches = table_name(), torch.randint(-50, 50, (6, 4, 5), generator=torch.Generator().manual_seed(1))

    # Rows that catch up cannot be of 16 bits.
    dtype = torch.float32 if "catch_up" in options["optimizer"] else torch.bfloat16

    def scenario() -> list[Tensor]:
        module = DistEmbedding(None, 8, name, dtype=dtype, **options)
        steps, seen = SparseOptimizer(modules=[module]), []
        for batch in batches:
            rows = module(batch)
            seen.append(rows.detach().clone())
            (rows * rows.sum(0)).sum().backward()
            steps.step()
        return [*seen, module(torch.arange(-50, 50)).detach()]

    on_both(processes, scenario)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_are_pooled_and_trained(
    processes: ServerProcesses, table_name: TableName, mode: Literal["sum", "mean", "max"]
) -> None:
    name = table_name()
    ids, offsets = torch.tensor([5, -7, 5, 2**62, 1, 1, 9]), torch.tensor([0, 3, 3, 5])
    weights = torch.linspace(-1, 1, 7)

    def scenario() -> list[Tensor]:
        module = DistEmbeddingBag(None, 4, name, mode, padding_idx=9, optimizer="adagrad", lr=0.5)
        steps, seen = SparseOptimizer(modules=[module]), []
        for _ in range(3):
            pooled = module(ids, offsets, None if mode != "sum" else weights)
            seen.append(pooled.detach().clone())
            (pooled**2).sum().backward()
            steps.step()
        return seen

    on_both(processes, scenario)


def test_a_collection_is_trained_with_a_prefetch(processes: ServerProcesses, table_name: TableName) -> None:
    names = [table_name(), table_name()]
    values = torch.tensor([-7, 2**40, 1, 2, 3, 1, 1, 4])
    batch = KeyedJaggedTensor(["a", "b", "c"], values, lengths=torch.tensor([1, 2, 2, 0, 0, 3]))
    configs = [
        EmbeddingBagConfig(name=names[0], num_embeddings=None, embedding_dim=4, feature_names=["a", "b"]),
        EmbeddingBagConfig(name=names[1], num_embeddings=None, embedding_dim=4, feature_names=["c"]),
    ]

    def scenario() -> list[Tensor]:
        module = RecStoreEmbeddingBagCollection(configs, lr=0.1, optimizer="adam")
        steps, seen = SparseOptimizer(modules=[module]), []
        for _ in range(3):
            module.issue_fused_prefetch(batch)
            pooled = module(batch)
            seen.append(pooled.detach().clone())
            (pooled**3).sum().backward()
            steps.step()
        return seen

    on_both(processes, scenario)


def test_a_client_reads_writes_updates_and_deletes(processes: ServerProcesses, table_name: TableName) -> None:
    name, ids = table_name(), torch.tensor([3, -3, 2**50, 3])

    def scenario() -> list[Tensor]:
        client, other = RecStoreClient(), table_name()
        client.init_embedding_table(name, EmbeddingTableConfig(None, 2, optimizer="adagrad", learning_rate=0.5))
        client.push(name, ids, torch.arange(8.0).reshape(4, 2))
        client.update(name, ids, torch.ones(4, 2))
        client.wait(client.update_async(name, ids, torch.ones(4, 2)))
        prefetched = client.wait_and_get(client.prefetch(ids, name), 2)
        client.set_learning_rate(name, 0.25)
        client.update(name, ids[:0], torch.ones(0, 2))
        client.delete(name, ids[1:2])
        statistics = recstore_ops.table_statistics(name)
        counts = [statistics[key] for key in ("rows", "inserts", "updates", "deletes", "step", "learning_rate")]
        tensor = DistTensor((5, 2), torch.float32, other, lambda shape, dtype: torch.full(shape, 7.0, dtype=dtype))
        rows = [prefetched, client.pull(name, ids), torch.tensor(counts, dtype=torch.float64), tensor[torch.arange(5)]]
        client.drop(name)
        assert name not in recstore_ops.table_names()
        with pytest.raises(KeyError, match="there is no table"):
            client.pull(name, ids)
        return rows

    on_both(processes, scenario)


def test_ops_without_a_table_and_hash_tables_go_to_the_servers(
    processes: ServerProcesses, table_name: TableName
) -> None:
    ops, name, ids = torch.ops.recstore, table_name(), torch.tensor([1, 2, 300])
    dim = 61

    def scenario() -> list[Tensor]:
        before = ops.emb_read(ids, dim)
        ops.emb_write(ids, torch.ones(3, dim))
        ops.emb_update(ids, torch.ones(3, dim))
        table = HashTable([4], name=name, insert_on_lookup=True)
        rows = table(ids).detach().clone()
        assert len(Table.open(name)) == 3
        after = ops.emb_read(ids, dim)
        ops.drop_table(f"default/{dim}")
        return [before, after, rows]

    on_both(processes, scenario)


def test_errors_are_those_of_tables_in_this_process(processes: ServerProcesses, table_name: TableName) -> None:
    name = table_name()

    def messages() -> list[str]:
        table = Table(name, 2, TableConfig(num_embeddings=10))
        ops, found = torch.ops.recstore, []
        for call in (
            lambda: ops.emb_read(table.handle, torch.tensor([3, 10]), 2),
            lambda: ops.emb_write(table.handle, torch.tensor([3]), torch.full((1, 2), torch.nan)),
            lambda: ops.emb_update(table.handle, torch.tensor([3, 4]), torch.tensor([[1.0, 1.0], [torch.inf, 1.0]])),
            lambda: Table(name, 3),
        ):
            with pytest.raises((RuntimeError, IndexError, ValueError)) as raised:
                call()
            found.append(f"{raised.type} {raised.value}")
        return found

    servers.set_ps_backend("embedded")
    embedded = messages()
    servers.set_ps_servers(processes.addresses)
    assert messages() == embedded


def test_tables_stay_where_they_were_opened(processes: ServerProcesses, table_name: TableName) -> None:
    here = DistEmbedding(None, 2, table_name(), lr=1.0)
    servers.set_ps_servers(processes.addresses)
    there = DistEmbedding(None, 2, table_name(), lr=1.0)
    ids = torch.tensor([1, 2])
    before = [module(ids).detach().clone() for module in (here, there)]
    (here(ids).sum() + there(ids).sum()).backward()
    SparseOptimizer(modules=[here, there]).step()
    for module, rows in zip((here, there), before, strict=True):
        assert torch.equal(module(ids), rows - 1)
    assert here.table.name not in recstore_ops.table_names()


def test_a_server_that_was_killed_is_named(tmp_path: Path, table_name: TableName) -> None:
    with ServerProcesses(tmp_path, 2) as processes:
        servers.set_ps_servers(processes.addresses, "simple_mod", timeout=1.0)
        module = DistEmbedding(None, 2, table_name())
        module(torch.tensor([0, 1]))
        processes.processes[1].kill()
        processes.processes[1].wait()
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=f"emb_read: shard 1 at {processes.addresses[1]} is unavailable"):
            module(torch.tensor([0, 1]))
        assert time.monotonic() - began < 25, "its own timeout counts, not the default of 30 seconds"
        module(torch.tensor([0, 2]))
        with pytest.raises(ConnectionError, match="connect: shard 1 at"):
            servers.set_ps_servers(processes.addresses, "simple_mod", timeout=0.5)


def test_tables_are_saved_at_the_end_and_loaded_at_the_start(tmp_path: Path, table_name: TableName) -> None:
    name, ids = table_name(), torch.arange(100)
    data = tmp_path / "data"
    with ServerProcesses(tmp_path, 2, "--data", str(data)) as processes:
        servers.set_ps_servers(processes.addresses)
        client = RecStoreClient()
        client.init_embedding_table(name, EmbeddingTableConfig(None, 3, optimizer="adam"))
        client.update(name, ids, torch.ones(100, 3))
        rows, report = client.pull(name, ids), client.save(tmp_path / "checkpoint")
        assert report.rows == 100
        printed = processes.stop()
        assert all(f"rows to {data}/shard-{shard}-of-2" in printed[shard] for shard in range(2))
    with ServerProcesses(tmp_path, 2, "--data", str(data)) as processes:
        servers.set_ps_servers(processes.addresses)
        assert Table.open(name).name == name
        assert torch.equal(RecStoreClient().pull(name, ids), rows)
    with ServerProcesses(tmp_path, 3) as processes:
        servers.set_ps_servers(processes.addresses)
        client = RecStoreClient()
        client.load(tmp_path / "checkpoint")
        assert torch.equal(client.pull(name, ids), rows)
        assert recstore_ops.table_statistics(name)["step"] == 1


def test_a_program_with_servers_inspects_no_checkpoint(tmp_path: Path, table_name: TableName) -> None:
    with ServerProcesses(tmp_path, 1) as processes:
        servers.set_ps_servers(processes.addresses)
        with pytest.raises(ValueError, match="inspect_checkpoint needs a process that keeps its tables itself"):
            inspect_checkpoint(tmp_path)
        assert current_ps_backend() == "servers"


def test_a_constructor_and_the_client_choose_a_server(tmp_path: Path, table_name: TableName) -> None:
    config = EmbeddingBagConfig(name=table_name(), num_embeddings=None, embedding_dim=2, feature_names=["a"])
    with ServerProcesses(tmp_path, 1) as processes:
        host, port = processes.addresses[0].split(":")
        RecStoreEmbeddingBagCollection([config], ps_host=host, ps_port=int(port))
        assert servers.current_ps_backend() == "servers"
        assert config.name in recstore_ops.table_names()
        servers.set_ps_backend("embedded")
        assert config.name not in recstore_ops.table_names()
        RecStoreClient().set_ps_config(host, int(port))
        assert config.name in recstore_ops.table_names()


PROGRAM = """
import torch
from recstore_ops import DistEmbedding, current_ps_backend, table_names
DistEmbedding(None, 2, "from_file")
print(current_ps_backend(), table_names())
"""


def test_a_configuration_file_chooses_servers(tmp_path: Path) -> None:
    with ServerProcesses(tmp_path, 2) as processes:
        parts = [address.split(":") for address in processes.addresses]
        entries = [{"host": host, "port": int(port), "shard": shard} for shard, (host, port) in enumerate(parts)]
        document = {"distributed_client": {"servers": entries, "num_shards": 2, "hash_method": "simple_mod"}}
        (tmp_path / "recstore_config.json").write_text(json.dumps(document))
        assert output_of(PROGRAM, cwd=tmp_path, warns="error") == "servers ['from_file']\n"


def test_a_program_that_chooses_nothing_that_there_is_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='must be "embedded" or "servers", got "brpc"'):
        servers.set_ps_backend("brpc")
    with pytest.raises(ValueError, match="needs at least one server"):
        servers.set_ps_servers([])
    with pytest.raises(ValueError, match="hash_method must be city_hash or simple_mod"):
        servers.set_ps_servers(["127.0.0.1:1"], "md5")
    with pytest.raises(ConnectionError, match=r"connect: shard 0 at 127\.0\.0\.1:1 is unavailable"):
        servers.set_ps_servers(["127.0.0.1:1"], timeout=0.1)
    assert servers.current_ps_backend() == "embedded"


def serve(*options: str) -> str:
    done = run_recstore("serve", *options)
    assert done.returncode == 2, done.stdout
    return done.stderr


def test_serving_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"cache_ps": {"servers": [{"port": 0, "shard": 0}, {"port": 0, "shard": 1}]}}))
    assert "can be reached from other machines" in serve("--host", "0.0.0.0", "--port", "0")
    assert "there is no shard 2 of 2" in serve("--config", str(config), "--shard", "2")
    assert "--durability wal needs --data" in serve("--config", str(config), "--durability", "wal")
    assert "--port is of one shard" in serve("--config", str(config), "--port", "0")
    config.write_text("{}")
    assert "cache_ps.servers is missing" in serve("--config", str(config))


def read(tmp_path: Path, document: object) -> ConfigFile:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(document))
    return load_config_file(path)


@pytest.mark.filterwarnings("ignore:.*without effect here")
def test_a_configuration_file_names_servers_in_three_places(tmp_path: Path) -> None:
    first, second = {"host": "a", "port": 1, "shard": 0}, {"port": 2, "shard": 1}
    config = read(
        tmp_path, {"cache_ps": {"servers": [second, first]}, "distributed_client": {"hash_method": "simple_mod"}}
    )
    addresses = (ServerAddress("a", 1, 0), ServerAddress("127.0.0.1", 2, 1))
    assert chosen_servers(config) is None
    found = known_servers(config)
    assert found is not None
    assert (found.servers, found.hash_method) == (addresses, "simple_mod")
    assert served_shards(config).servers == addresses
    config = read(tmp_path, {"distributed_client": {"servers": [first]}, "cache_ps": {"servers": [first, second]}})
    assert chosen_servers(config) == known_servers(config)
    config = read(tmp_path, {"client": {"host": "::1", "port": 15000, "shard": 0}})
    found = known_servers(config)
    assert found is not None
    assert [str(server) for server in found.servers] == ["[::1]:15000"]
    assert known_servers(read(tmp_path, {})) is None


@pytest.mark.filterwarnings("ignore:.*without effect here")
@pytest.mark.parametrize(
    ("section", "message"),
    [
        ([], "cache_ps: must be object, got an array"),
        ({"servers": []}, "cache_ps.servers: must have at least 1 elements, got 0"),
        ({"servers": [3]}, r"cache_ps.servers.0: must be object, got 3"),
        ({"servers": [{"host": "", "port": 1, "shard": 0}]}, r"servers.0.host: must not be empty"),
        ({"servers": [{"port": 65536, "shard": 0}]}, r"servers.0.port: must be at most 65535, got 65536"),
        ({"servers": [{"port": 1, "shard": -1}]}, r"servers.0.shard: must be at least 0, got -1"),
        ({"servers": [{"port": 1, "shard": 1}]}, r"servers: must have each shard from 0 to 0 once, got \[1\]"),
        ({"servers": [{"port": 1, "shard": 0}], "num_shards": 2}, "num_shards: must be the number of servers, 1"),
    ],
)
def test_servers_that_are_none_are_refused_by_their_path(tmp_path: Path, section: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, {"cache_ps": section})
    with pytest.raises(ValueError, match="hash_method: must be one of"):
        read(tmp_path, {"distributed_client": {"hash_method": "md5"}})
    with pytest.raises(ValueError, match="shard 0 has the port 0, any that is free: none to call"):
        known_servers(read(tmp_path, {"distributed_client": {"servers": [{"port": 0, "shard": 0}]}}))
    with pytest.raises(ValueError, match=r"cache_ps\.servers is missing: there is nothing to serve"):
        served_shards(read(tmp_path, {"cache_ps": {}}))


def test_a_server_with_a_log_that_is_killed_loses_nothing(tmp_path: Path, table_name: TableName) -> None:
    name = table_name()

    def trained(between: Callable[[], object]) -> Tensor:
        module = DistEmbedding(None, 4, name, optimizer="adam", lr=0.1)
        optimizer = SparseOptimizer(modules=[module])
        for step in range(12):
            module(torch.arange(step, step + 50)).square().sum().backward()
            optimizer.step()
            if step % 4 == 1:
                between()
        return module(torch.arange(70)).detach()

    expected = trained(lambda: None)
    options = ("--data", str(tmp_path / "tables"), "--durability", "wal", "--checkpoint-every", "1")
    with ServerProcesses(tmp_path, 2, *options) as processes:
        servers.set_ps_servers(processes.addresses)
        assert torch.equal(trained(lambda: [processes.kill_and_start_again(shard) for shard in range(2)]), expected)


def test_steps_that_missed_a_killed_server_are_taken_once_when_they_are_repeated(
    tmp_path: Path, table_name: TableName
) -> None:
    options = ("--data", str(tmp_path / "tables"), "--durability", "wal")
    with ServerProcesses(tmp_path, 2, *options) as processes:
        servers.set_ps_servers(processes.addresses, timeout=2)
        counting = {"optimizer": {"kind": "sgd", "lr": 1.0}, "initializer": "zeros"}
        modules = [DistEmbedding(None, 2, table_name(), **counting) for _ in range(3)]
        steps = [SparseOptimizer(modules=[module]).step for module in modules]
        ids = torch.arange(12)
        for module in modules:
            (-module(ids)).sum().backward()
        processes.processes[1].kill()
        processes.processes[1].communicate(timeout=60)
        for step in steps[:2]:
            with pytest.raises(RuntimeError, match=r"shard 1 at .* is unavailable"):
                step()
        processes.kill_and_start_again(1)
        for step in (steps[2], steps[0], steps[1]):
            step()
        assert [module(ids).unique().tolist() for module in modules] == [[1.0]] * 3


def test_a_server_that_is_started_again_elsewhere_is_called_there(tmp_path: Path, table_name: TableName) -> None:
    name, options = table_name(), ("--data", str(tmp_path / "tables"), "--durability", "wal")
    with ServerProcesses(tmp_path, 1, *options) as processes:
        number = servers.use_servers(servers.ServerChoice(tuple(processes.addresses)))
        module = DistEmbedding(None, 4, name)
        module(torch.arange(9)).sum().backward()
        SparseOptimizer(modules=[module]).step()
        rows = module(torch.arange(9)).detach()
    with ServerProcesses(tmp_path, 1, *options) as processes:
        servers.move_servers(number, processes.addresses)
        assert torch.equal(module(torch.arange(9)), rows)
        with pytest.raises(ValueError, match="the store has 1 shards, got 2 addresses"):
            servers.move_servers(number, processes.addresses * 2)
        with pytest.raises(ValueError, match="no servers were chosen under the number 99999"):
            servers.move_servers(99999, processes.addresses)


def test_rows_and_gradients_go_as_bfloat16_where_that_is_chosen(
    processes: ServerProcesses, table_name: TableName
) -> None:
    names, ids_N = [table_name() for _ in range(3)], torch.arange(300) * 7 - 900
    grad_ND = torch.sin(torch.arange(900.0)).view(300, 3)
    options: dict[str, Any] = {"optimizer": {"kind": "sgd", "lr": 0.3}, "initializer": {"kind": "zeros"}}

    def stepped(name: str, gradient_ND: Tensor) -> DistEmbedding:
        module = DistEmbedding(None, 3, name, **options)
        module(ids_N).backward(gradient_ND)
        SparseOptimizer(modules=[module]).step()
        return module

    expected = stepped(names[0], grad_ND.bfloat16().float())(ids_N)
    servers.set_ps_servers(processes.addresses, wire_dtype="bfloat16")
    rounded = stepped(names[1], grad_ND)
    assert torch.equal(rounded(ids_N), expected.bfloat16().float())
    assert not torch.equal(rounded(ids_N), expected)
    servers.set_ps_servers(processes.addresses)
    assert torch.equal(DistEmbedding(None, 3, names[1], **options)(ids_N), expected)
    assert torch.equal(stepped(names[2], grad_ND.bfloat16().float())(ids_N), expected)
    with pytest.raises(ValueError, match='wire_dtype must be float32 or bfloat16, got "float16"'):
        servers.set_ps_servers(processes.addresses, wire_dtype="float16")  # type: ignore[arg-type]
