"""The first call of a program, before it has made a module: it means the servers that its configuration file names.

Each call is made in a process of its own whose file names servers, and in one that has called `set_ps_servers`; both
must give the same.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from served_tables import ServerProcesses
from warm_programs import output_of

import recstore_ops
from recstore_ops import RecStoreClient, checkpoint, sharding, transfer
from recstore_ops.ops import operators
from recstore_ops.servers import first_call, store

pytestmark = pytest.mark.tier("test")

PACKAGE = Path(recstore_ops.__file__).parent

SETUP = """
for name in table_names():
    RecStoreClient().drop(name)
client = RecStoreClient()
for name in ("user", "item", "gone"):
    client.init_embedding_table(name, EmbeddingTableConfig(None, 2, optimizer="adagrad", eviction={"ttl": 5}))
    client.push(name, torch.arange(6), torch.arange(12.0).reshape(6, 2))
    client.update(name, torch.arange(4), torch.ones(4, 2))
default_table(2).handle
torch.ops.recstore.emb_write(torch.arange(3), torch.ones(3, 2))
KVWorker("worker", 2).close()
checkpoint.save("saved")
torch.save(Table.open("user").handle, "handle.pt")
torch.save(DistEmbedding(None, 2, "user", optimizer="adagrad", eviction={"ttl": 5}), "module.pt")
"""

GROUP = """
import torch.distributed as dist, uuid
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/{uuid.uuid4()}", rank=0, world_size=1)
"""

# What a program calls first: lines before the last, and a last one whose value is compared.
CALLS: dict[str, str] = {
    "table_names": "table_names()",
    "table_statistics": "table_statistics('user')",
    "current_ps_backend": "current_ps_backend()",
    "default_table": "default_table(2)",
    "embedding": "embedding(torch.arange(3), 2)",
    "embedding_bag": "embedding_bag(torch.arange(4), 2, torch.tensor([0, 2]))",
    "inspect_table": "inspect_table('user', [1])",
    "memory_in_use": "memory_in_use()",
    "set_memory_limit": "set_memory_limit(10**9)",
    "set_memory_limit(None)": "set_memory_limit(None)",
    "ps_workers": "ps_workers()",
    "ps_barrier": "ps_barrier('end', 0.1)",
    "leave_ps_workers": "leave_ps_workers()",
    "Table": "len(Table('user', 2, Table.open('user').config))",
    "Table.open": "len(Table.open('user'))",
    "DistTensor": "DistTensor((6, 2), torch.float32, 'of the file', persistent=True)[[1]], table_names()",
    "DistTensor over one": "DistTensor((7, 2), torch.float32, 'user')",
    "DistEmbedding": "DistEmbedding(None, 2, 'user', optimizer='adagrad', eviction={'ttl': 5}).weight[[1]]",
    "DistEmbedding that must be new": "DistEmbedding(None, 2, 'user', on_existing='error')",
    "DistEmbeddingBag": "DistEmbeddingBag(None, 2, 'user', optimizer='adagrad', eviction={'ttl': 5})"
    "(torch.tensor([[1, 2]]))",
    "RecStoreEmbeddingBagCollection": "RecStoreEmbeddingBagCollection([EmbeddingBagConfig(name='bags', "
    "num_embeddings=None, embedding_dim=2, feature_names=['a'])]) and table_names()",
    "RecStoreEmbeddingCollection": "RecStoreEmbeddingCollection([EmbeddingConfig(name='rows', num_embeddings=None, "
    "embedding_dim=2, feature_names=['a'])]) and table_names()",
    "NGramMemory": "NGramMemory(2, 3, 2, 'ngrams') and table_names()",
    "HashTable": "HashTable(2, name='hashed') and table_names()",
    "HashTableRegister": "HashTableRegister() and table_names()",
    "KVWorker": "len(Table.open(KVWorker('worker', 2).name))",
    "SparseOptimizer": "len(SparseOptimizer().state_dict()['param_groups'])",
    "opening_empty_tables": "with opening_empty_tables(): module = torch.load('module.pt', weights_only=False)\n"
    "module.weight[[1]]",
    "torch.load": "torch.load('module.pt', weights_only=False).weight[[1]]",
    "EmbeddingTableConfig": "EmbeddingTableConfig(None, 2).table_config('user')",
    # The client.
    "client.init_embedding_table": "client.init_embedding_table('user', EmbeddingTableConfig(None, 2)) ",
    "client.init_data": "client.init_data('data', (3, 2), torch.float32)\ntable_names()",
    "client.pull": "client.pull('user', torch.arange(3))",
    "client.push": "client.push('item', torch.arange(2), torch.ones(2, 2))\nclient.pull('item', torch.arange(2))",
    "client.update": "client.update('item', torch.tensor([9]), torch.ones(1, 2))",
    "client.prefetch": "client.wait_and_get(client.prefetch(torch.arange(3), 'user'), 2)",
    "client.prefetch of a dim": "client.wait_and_get(client.prefetch(torch.arange(3), None, 2), 2)",
    "client.wait_and_get": "client.wait_and_get(7, 2)",
    "client.update_async": "client.wait(client.update_async('item', torch.tensor([9]), torch.ones(1, 2)))",
    "client.push_async": "client.wait(client.push_async('item', torch.tensor([9]), torch.ones(1, 2)))",
    "client.wait": "client.wait(7)",
    "client.delete": "client.delete('item', torch.tensor([5]))\nlen(Table.open('item'))",
    "client.evict": "client.evict('user', dry_run=True)",
    "client.drop": "client.drop('gone')",
    "client.drop of none": "client.drop('none')",
    "client.set_learning_rate": "client.set_learning_rate('item', 0.5)",
    "client.save": "client.save('saved by the client').rows",
    "client.save_async": "client.save_async('saved by the client').result().rows",
    "client.load": "client.load('saved').tables",
    "client.stats": "client.stats()",
    "client.stats of one": "client.stats('user')",
    "client.get_data_meta": "client.get_data_meta('user')",
    "client.data_name_list": "client.data_name_list()",
    "client.gdata_name_list": "client.gdata_name_list()",
    "client.barrier": "client.barrier()",
    "client.apply_grads": "client.apply_grads([Table.open('user')])",
    # Checkpoints.
    "checkpoint.save": "checkpoint.save('again').rows",
    "checkpoint.save_async": "checkpoint.save_async('again').result().rows",
    "checkpoint.load": "checkpoint.load('saved').tables",
    "checkpoint.load of a shard": "checkpoint.load('saved', shard=(0, 2)).tables",
    "checkpoint.save_part": "checkpoint.save_part('parts', checkpoint.new_snapshot_name(), 0, 1)",
    "checkpoint.compact": "checkpoint.compact('saved')",
    "sharding.save": GROUP + "sharding.save('of ranks', dist.group.WORLD)",
    "sharding.load": GROUP + "sharding.load('saved', dist.group.WORLD).tables",
    # Rows from and to files.
    "transfer.export_safetensors": "transfer.export_safetensors('rows.safetensors')\n"
    "sorted(transfer.safetensors_file.SafetensorsFile('rows.safetensors').names())",
    "transfer.export_parquet": "transfer.export_parquet('rows.parquet', 'user')",
    "transfer.import_rows": "transfer.import_rows('item', torch.tensor([3]), torch.ones(1, 2))\n"
    "len(Table.open('item'))",
    "transfer.import_safetensors": "transfer.import_safetensors('rows.safetensors')\ntable_statistics('item')['rows']",
    "transfer.from_embedding": "transfer.from_embedding(torch.nn.Embedding(3, 2), 'user')",
    "replace_embeddings": "replace_embeddings(torch.nn.ModuleDict({'user': torch.nn.Embedding(3, 2)}))",
    "transfer.replace_embeddings": "transfer.replace_embeddings(torch.nn.ModuleDict({'new': torch.nn.Embedding(3, 2)}))"
    " and table_names()",
    # Operators, by name and by handle.
    "make_hashtable": "ops.make_hashtable('made', 2)\ntable_names()",
    "init_embedding_table": "ops.init_embedding_table('opened', 3, 2)\ntable_names()",
    "drop_table": "ops.drop_table('made')\ntable_names()",
    "emb_read": "ops.emb_read(torch.arange(3), 2)",
    "emb_read.default": "ops.emb_read.default(torch.arange(3), 2)",
    "emb_write": "ops.emb_write(torch.arange(2), torch.zeros(2, 2))\nops.emb_read(torch.arange(3), 2)",
    "emb_update": "ops.emb_update(torch.arange(2), torch.zeros(2, 2))",
    "emb_prefetch": "ops.emb_wait_result(ops.emb_prefetch(torch.arange(3), 2), 2)",
    "emb_read of a handle": "ops.emb_read(torch.load('handle.pt'), torch.arange(3), 2)",
    "set_learning_rate": "ops.set_learning_rate(torch.load('handle.pt'), 0.5)",
    "hashtable_size": "ops.hashtable_size(torch.load('handle.pt'))",
    "hashtable_ids": "ops.hashtable_ids(torch.load('handle.pt'))",
}

# What asks no store, and so cannot mean another.
WITHOUT_STORE = {
    *("EmbeddingBagConfig", "EmbeddingConfig", "JaggedTensor", "KVResponse", "KeyedJaggedTensor", "KeyedTensor", "Tls"),
    *("TableConfig", "TableOptions", "__version__", "active_config", "load_config_file", "merge_gradients"),
    *("bucket_ids", "cross_ids", "hash_strings", "ngram_ids", "prefix_ids"),
    *("NGramScheme", "DeepSeekNGrams", "LongCatNGrams", "QwenNGrams", "SaltedNGrams", "XorNGrams", "compress_tokens"),
    *("set_merge", "set_ps_backend", "set_ps_config", "set_ps_servers", "client.set_ps_config"),
    "sharding.share_host_store",
    *("checkpoint.Compression", "checkpoint.LoadReport", "checkpoint.SaveKind", "checkpoint.SaveReport"),
    *("checkpoint.FileFinding", "checkpoint.PendingSave", "checkpoint.PruneReport", "checkpoint.VerifyReport"),
    *("checkpoint.verify", "checkpoint.prune"),
    *("checkpoint.new_snapshot_name", "checkpoint.shard_of", "checkpoint.commit", "checkpoint"),
    # They mean the process, whatever the file says.
    *("inspect_checkpoint", "register_rule", "UpdateRule"),
    # They are given what has been opened before.
    *("PrefetchingDataLoader", "StagedRows", "StagingDataLoader"),
    *("transfer.import_torchrec", "transfer.export_torchrec", "export", "freeze", "publish", "averaged"),
    *("restore_embeddings", "transfer.restore_embeddings", "ReplacedEmbeddings", "transfer.ReplacedEmbeddings"),
    # Their tables are files, whatever store was chosen.
    *("Bundle", "FollowingBundle", "ForgetReport", "FrozenTable", "Publisher", "PublisherAddress"),
    *("forget", "load_bundle"),
    # Classes whose methods are listed, and second names.
    *("RecStoreClient", "KVClient", "get_kv_client", "client.delete_data"),
}

PROGRAM = """
import json, os, sys, warnings
import torch
import torch.distributed
import torch._dynamo
from recstore_ops import *
from recstore_ops import checkpoint, sharding, transfer
from recstore_ops.transfer import safetensors_file
warnings.simplefilter("ignore")
torch.set_num_threads(1)
ops, client = torch.ops.recstore, RecStoreClient()
FILE, calls, setup, addresses = json.load(open(sys.argv[1]))

def value_of(code):
    *lines, last = code.strip().split("\\n")
    names = dict(globals())
    exec("\\n".join(lines), names)
    return eval(last.strip(), names)

def outcome(work):
    try:
        return "gave", repr(work())
    except Exception as error:
        return type(error).__name__, str(error)

def in_child(code, chooses):
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            if chooses:
                set_ps_servers(addresses)
            os.write(writing, json.dumps(outcome(lambda: value_of(code))).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.wait()
    return json.loads(text) if text else ("died", "")

assert in_child(setup + "1", True) == ["gave", "1"], in_child(setup + "1", True)
print(json.dumps({name: in_child(code, not FILE) for name, code in calls.items()}))
"""


def outcomes(folder: Path, processes: ServerProcesses, by_file: bool) -> dict[str, tuple[str, str]]:
    """What each call gives or raises, in a process whose file chooses servers or that chooses them itself."""
    folder.mkdir()
    if by_file:
        parts = [address.split(":") for address in processes.addresses]
        entries = [{"host": host, "port": int(port), "shard": shard} for shard, (host, port) in enumerate(parts)]
        (folder / "recstore_config.json").write_text(json.dumps({"distributed_client": {"servers": entries}}))
    given = folder / "given.json"
    given.write_text(json.dumps([by_file, CALLS, SETUP, processes.addresses]))
    return {name: tuple(found) for name, found in json.loads(output_of(PROGRAM, given, cwd=folder)).items()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, tuple[str, str]], ...]]:
    folder = tmp_path_factory.mktemp("first_calls")
    with ServerProcesses(folder, 2) as processes:
        yield tuple(outcomes(folder / str(by_file), processes, by_file) for by_file in (False, True))


@pytest.mark.parametrize("name", CALLS)
def test_a_first_call_means_the_servers_of_the_file(found: tuple[dict[str, tuple[str, str]], ...], name: str) -> None:
    chosen, of_file = found
    assert of_file[name] == chosen[name]
    assert chosen[name][0] != "died"


def public_names() -> set[str]:
    """What a program can call, by the names of `CALLS`."""
    names = {name for name in recstore_ops.__all__ if name != "checkpoint"}
    names |= {f"client.{name}" for name in vars(RecStoreClient) if not name.startswith("_")}
    names |= {f"checkpoint.{name}" for name in checkpoint.__all__}
    names |= {f"transfer.{name}" for name in transfer.__all__}
    asking = {"sharding.save", "sharding.load", "sharding.share_host_store"}
    names |= asking & {f"sharding.{name}" for name in sharding.__all__}
    return names


def test_every_public_name_is_called_first_or_asks_no_store() -> None:
    assert public_names() - WITHOUT_STORE - CALLS.keys() == set()
    assert WITHOUT_STORE & CALLS.keys() == set()


def test_every_operator_chooses_first_or_finds_no_table() -> None:
    operators_here = {name.partition(".")[0] for name in operators.NAMES}
    assert set(first_call._OF_ANY_STORE) <= operators_here
    by_name = {"make_hashtable", "init_embedding_table", "drop_table", "emb_read", "emb_write", "emb_update"}
    assert by_name | {"emb_prefetch"} <= operators_here & CALLS.keys()
    registered = {
        schema.name.partition("::")[2] for schema in torch._C._jit_get_all_schemas() if "recstore::" in schema.name
    }
    assert registered - {"_panic"} == operators_here


def test_nothing_but_the_stores_own_room_asks_the_native_store() -> None:
    """Whoever called it would mean the store of the process, where the file's servers were not chosen yet."""
    asking = {*store.__all__, "store_memory", "use_servers", "use_embedded"}
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name == "servers" and path.stem in ("store", "choosing"):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "_native":
                assert node.attr not in asking, f"{path}:{node.lineno}: _native.{node.attr}; use servers.store"
            if isinstance(node, ast.ImportFrom) and node.module == "recstore_ops._native":
                assert not asking & {alias.name for alias in node.names}, f"{path}:{node.lineno}"


def run(folder: Path, code: str) -> str:
    """What a program that begins in `folder` prints."""
    lines = "import torch\nfrom recstore_ops import *\nfrom recstore_ops import checkpoint, servers\n"
    return output_of(lines + code, cwd=folder)


def write_file(folder: Path, port: int) -> None:
    document = {"distributed_client": {"servers": [{"port": port, "shard": 0}]}}
    (folder / "recstore_config.json").write_text(json.dumps(document))


def test_servers_that_do_not_answer_are_named_by_each_first_call(tmp_path: Path) -> None:
    write_file(tmp_path, 1)
    code = """
servers.choosing.ServerChoice.__init__.__defaults__ = ("city_hash", None, None, 0.1, None)
servers.choosing.set_ps_servers.__kwdefaults__["timeout"] = 0.1
for call in (table_names, lambda: checkpoint.save("saved"), lambda: torch.ops.recstore.emb_read(torch.arange(1), 2)):
    for _ in range(2):
        try:
            print(call())
        except ConnectionError as error:
            print(str(error).partition(" is ")[0])
"""
    assert (
        run(tmp_path, code).splitlines()
        == [f"{tmp_path}/recstore_config.json names servers: connect: shard 0 at 127.0.0.1:1"] * 6
    )
    assert not (tmp_path / "saved").exists()


def test_a_program_that_chose_itself_is_not_overruled(tmp_path: Path) -> None:
    write_file(tmp_path, 1)
    code = "set_ps_backend('embedded')\nprint(table_names(), torch.ops.recstore.emb_read(torch.arange(1), 2))"
    assert run(tmp_path, code) == "[] tensor([[0., 0.]])\n"


def test_what_keeps_tables_in_the_process_puts_the_choice_off(tmp_path: Path) -> None:
    run(tmp_path, "RecStoreClient().init_data('user', (3, 2), torch.float32)\ncheckpoint.save('saved')")
    write_file(tmp_path, 1)
    code = """
print(inspect_checkpoint("saved").tables.keys(), servers.choosing.was_chosen())
with servers.embedded_for("a test"):
    print(torch.ops.recstore.emb_read(torch.arange(1), 2))
print(len(servers.first_call._waiting) > 0)
"""
    assert run(tmp_path, code) == "dict_keys(['user']) False\ntensor([[0., 0.]])\nTrue\n"


def test_operators_cost_nothing_once_a_store_was_chosen(tmp_path: Path) -> None:
    code = """
waiting = dict(servers.first_call._waiting)
print(torch.ops.recstore.emb_read._op is waiting[torch.ops.recstore.emb_read])
table_names()
torch.ops.recstore.emb_read(torch.arange(1), 2)
print(all(called._op is operator for called, operator in waiting.items()), servers.first_call._waiting)
"""
    assert run(tmp_path, code) == "False\nTrue []\n"
