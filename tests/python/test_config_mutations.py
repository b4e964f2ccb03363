"""Every key of a configuration file, misspelt, of another type or given twice: refused by all who read the file."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from recstore_ops import active_config, load_config_file, servers
from recstore_ops.cli import serve
from recstore_ops.doctor import examine_config

pytestmark = pytest.mark.tier("test")

Keys = tuple[str | int, ...]

DOCUMENT: dict[str, Any] = {
    "$schema": "recstore_config.schema.json",
    "embedding_tables": {
        "user": {
            "num_embeddings": 100,
            "embedding_dim": 4,
            "learning_rate": 0.25,
            "optimizer": {"kind": "adam", "lr": 0.1, "betas": [0.9, 0.99], "eps": 1e-6, "weight_decay": 0.0},
            "initializer": {"kind": "uniform", "a": -0.5, "b": 0.5},
            "dtype": "float32",
            "seed": 7,
            "block_size": 128,
            "max_grad_norm": 2.5,
            "state_dtype": "bfloat16",
            "ema_decay": 0.5,
            "nan_policy": "skip",
            "admission": {"kind": "sketch", "threshold": 2, "epsilon": 0.1, "delta": 0.1},
            "eviction": {"ttl": 10, "capacity": 9, "policy": "lru", "interval": 2},
        }
    },
    "cache_ps": {
        "servers": [
            {"host": "127.0.0.1", "port": 15000, "shard": 0, "metrics_port": 9100},
            {"host": "127.0.0.1", "port": 15001, "shard": 1},
        ],
        "num_shards": 2,
        "data": "tables",
        "durability": "wal",
        "checkpoint_every": 600,
        "metrics_host": "127.0.0.1",
        "max_connections": 9,
        "log_level": "info",
        "workers": 3,
        "consistency": "synchronous",
        "combine": "mean",
        "worker_timeout": 60,
        "heartbeat_timeout": 10,
        "tls": {"certificate": "server.pem", "key": "server.key", "ca": "ca.pem"},
        "token_file": "token",
        "ps_type": "GRPC",
        "max_batch_keys_size": 65536,
        "num_threads": 32,
        "base_kv_config": {
            "capacity": 1000,
            "index": {"type": "DRAM_EXTENDIBLE_HASH"},
            "value": {"type": "DRAM_VALUE_STORE", "path": "/dev/shm/value", "dram_allocator": {"type": "R2_SLAB"}},
        },
    },
    "distributed_client": {
        "servers": [{"host": "127.0.0.1", "port": 15000, "shard": 0}, {"port": 15001, "shard": 1}],
        "num_shards": 2,
        "hash_method": "city_hash",
        "max_keys_per_request": 500,
        "tls": {"ca": "ca.pem", "certificate": "client.pem", "key": "client.key", "server_name": "recstore"},
        "token_file": "token",
    },
    "client": {"host": "127.0.0.1", "port": 15000, "shard": 0},
    "hierkv": {"max_capacity": 1024, "dim": 16},
    "hugectr": {"backend": "recstore"},
    "local_shm": {"region_name": "recstore_local_ps", "slot_count": 64},
    "report_API": "http://127.0.0.1:8081/report",
}

FREE_NAMES: set[Keys] = {("embedding_tables", "user")}
"""Keys that are names of the user's own."""

OF_ANY_TYPE = ("base_kv_config", "hierkv", "hugectr", "local_shm")
"""Sections of RecStore's whose values have no effect here, whatever they are."""


def keys_of(value: Any, path: Keys = ()) -> Iterator[Keys]:
    """The paths of all keys of objects."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if isinstance(key, str):
            yield (*path, key)
        yield from keys_of(item, (*path, key))


KEYS = [keys for keys in keys_of(DOCUMENT) if keys not in FREE_NAMES]


def named(keys: Keys) -> str:
    return ".".join(map(str, keys))


def parent_of(document: Any, keys: Keys) -> Any:
    for key in keys[:-1]:
        document = document[key]
    return document


def misspelt(key: str) -> str:
    """The key with two of its letters exchanged."""
    return key[:-2] + key[-1] + key[-2] if len(set(key[-2:])) == 2 else key + "x"


def refused_everywhere(path: Path, monkeypatch: pytest.MonkeyPatch, recstore: Callable[..., int]) -> list[str]:
    """What a server, a program and the doctor say of a file that all of them refuse."""
    monkeypatch.setattr(serve, "_serve", lambda *_: pytest.fail("it serves"))
    assert recstore("serve", "--config", path) == 2
    with pytest.raises(ValueError, match=path.name) as by_program:
        load_config_file(path)
    monkeypatch.setenv("RECSTORE_CONFIG", str(path))
    with pytest.raises(ValueError, match=path.name):
        active_config(reload=True)
    monkeypatch.delenv("RECSTORE_CONFIG")
    active_config(reload=True)
    errors = [finding for finding in examine_config(path) if finding.state == "error"]
    assert errors
    return [str(by_program.value), "; ".join(f"{error.topic}: {error.found}" for error in errors)]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "recstore_config.json"
        path.write_text(text)
        return path

    return write


Write = Callable[[str], Path]
Recstore = Callable[..., int]


def test_the_document_is_valid_and_has_every_key(write: Write) -> None:
    for name in ("token", "server.pem", "server.key", "ca.pem", "client.pem", "client.key"):
        (write("{}").parent / name).write_text("x")
    path = write(json.dumps(DOCUMENT))
    with pytest.warns(UserWarning, match="without effect here"):
        config = load_config_file(path)
    assert config.without_effect == (
        *("hierkv", "hugectr", "local_shm", "report_API"),
        *("cache_ps.ps_type", "cache_ps.max_batch_keys_size", "cache_ps.num_threads", "cache_ps.base_kv_config"),
        "distributed_client.max_keys_per_request",
    )
    assert not [finding for finding in examine_config(path) if finding.state == "error"]
    assert len(KEYS) > 80


@pytest.mark.parametrize("keys", KEYS, ids=named)
def test_a_misspelt_key_is_refused_with_its_path_and_the_nearest_name(
    keys: Keys, write: Write, monkeypatch: pytest.MonkeyPatch, recstore: Recstore, capsys: pytest.CaptureFixture[str]
) -> None:
    document = copy.deepcopy(DOCUMENT)
    key, parent = str(keys[-1]), parent_of(document, keys)
    wrong = misspelt(key)
    entries = [(wrong if each == key else each, value) for each, value in parent.items()]
    parent.clear()
    parent.update(entries)
    told = refused_everywhere(write(json.dumps(document)), monkeypatch, recstore)
    for each in (*told, capsys.readouterr().err):
        assert f"{named((*keys[:-1], wrong))}: unknown key" in each
        # No name is near a very short one.
        assert f'did you mean "{key}"?' in each or (len(key) < 3 and "the known ones are" in each)


@pytest.mark.parametrize("keys", [keys for keys in KEYS if not set(OF_ANY_TYPE) & set(keys[:-1])], ids=named)
@pytest.mark.parametrize("value", [[{}], {"nothing": 1}], ids=["list", "object"])
def test_a_value_of_another_type_is_refused_with_its_path(
    keys: Keys, value: Any, write: Write, monkeypatch: pytest.MonkeyPatch, recstore: Recstore
) -> None:
    document = copy.deepcopy(DOCUMENT)
    parent_of(document, keys)[keys[-1]] = value
    for told in refused_everywhere(write(json.dumps(document)), monkeypatch, recstore):
        assert named(keys) in told


@pytest.mark.parametrize("keys", KEYS, ids=named)
def test_a_key_that_is_given_twice_is_refused(
    keys: Keys, write: Write, monkeypatch: pytest.MonkeyPatch, recstore: Recstore
) -> None:
    document, mark = copy.deepcopy(DOCUMENT), "given twice"
    key, parent = str(keys[-1]), parent_of(document, keys)
    parent[mark] = parent[key]
    text = json.dumps(document).replace(json.dumps(mark), json.dumps(key))
    for told in refused_everywhere(write(text), monkeypatch, recstore):
        assert f'the key "{key}" is given twice' in told


A, B = {"port": 1, "shard": 0}, {"port": 2, "shard": 1}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"cache_ps": {"servers": [A, {**B, "shard": 2}]}}, "cache_ps.servers: must have each shard from 0 to 1 once"),
        ({"cache_ps": {"servers": [A, {**B, "shard": 0}]}}, "must have each shard from 0 to 1 once, got [0, 0]"),
        ({"cache_ps": {"servers": [A, {**B, "port": 1}]}}, "cache_ps.servers: 2 ports have the address 127.0.0.1:1"),
        (
            {"cache_ps": {"servers": [A, {**B, "host": "127.0.0.1", "port": 1}]}},
            "cache_ps.servers: 2 ports have the address 127.0.0.1:1",
        ),
        (
            {"cache_ps": {"servers": [A, B], "metrics_port": 7}},
            "servers: 2 ports have the address 127.0.0.1:7",
        ),
        (
            {"cache_ps": {"servers": [A, {**B, "metrics_port": 1}]}},
            "cache_ps.servers: 2 ports have the address 127.0.0.1:1",
        ),
        (
            {"cache_ps": {"servers": [A], "num_shards": 2}},
            "cache_ps.num_shards: must be the number of servers, 1, got 2",
        ),
        ({"cache_ps": {"servers": []}}, "cache_ps.servers: must have at least 1 elements, got 0"),
        ({"cache_ps": {"servers": [{"port": "1", "shard": 0}]}}, 'cache_ps.servers.0.port: must be integer, got "1"'),
        ({"cache_ps": {"servers": [{"shard": 0}]}}, 'cache_ps.servers.0: needs "port"'),
        ({"cache_ps": {"servers": [{"port": 1}]}}, 'cache_ps.servers.0: needs "shard"'),
        ({"cache_ps": {"tls": {"certificate": "a"}}}, 'cache_ps.tls: needs "key"'),
        ({"distributed_client": {"server": [A]}}, 'distributed_client.server: unknown key; did you mean "servers"?'),
        ({"distributed_client": {"servers": [A, A]}}, "distributed_client.servers: must have each shard"),
        ({"distributed_client": {"servers": [{**A, "metrics_port": 3}]}}, "servers.0.metrics_port: unknown key"),
        ({"distributed_client": {"num_shards": 2}, "cache_ps": {"servers": [A]}}, "must be the number of servers, 1"),
        ({"distributed_client": {"num_shards": 2}, "client": {"port": 1}}, "must be the number of servers, 1, got 2"),
        (
            {"distributed_client": {"tls": {"ca": "a", "key": "b"}}},
            "distributed_client.tls: needs both certificate and key",
        ),
        ({"distributed_client": {"tls": {}}}, 'distributed_client.tls: needs "ca"'),
        ({"client": {"port": 1, "shard": 1}}, "client.shard: must be at most 0, got 1"),
    ],
)
def test_servers_that_do_not_go_together_are_refused(
    sections: dict[str, Any], message: str, write: Write, monkeypatch: pytest.MonkeyPatch, recstore: Recstore
) -> None:
    for told in refused_everywhere(write(json.dumps(sections)), monkeypatch, recstore):
        assert message in told


@pytest.mark.parametrize(
    ("servers_given", "error", "message"),
    [
        ("127.0.0.1:1", TypeError, r'must be a list of "host:port", got the text "127.0.0.1:1"'),
        (["127.0.0.1"], ValueError, r'server 0 must be "host:port"'),
        (["127.0.0.1:1", "127.0.0.1:"], ValueError, r'server 1 must be "host:port"'),
        (["[::1]"], ValueError, r'server 0 must be "host:port"'),
        (["::1:15000"], ValueError, r"an IPv6 address in brackets"),
        (["a:0"], ValueError, r"a port from 1 to 65535"),
        (["a:65536"], ValueError, r"a port from 1 to 65535"),
        (["http://a:1"], ValueError, r'must be "host:port"'),
        ([15000], TypeError, r'server 0 must be a text "host:port", got 15000'),
    ],
)
def test_addresses_that_are_none_are_refused_at_once(servers_given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        servers.set_ps_servers(servers_given)
    assert servers.current_ps_backend() == "embedded"
