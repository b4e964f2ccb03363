"""What `recstore_config.json` says of parameter servers, in RecStore's keys.

`cache_ps` has what `recstore serve` starts: `servers`, one `{"host", "port", "shard"}` a shard, and `num_shards`.
`distributed_client` has where a program opens its tables: `servers` of the same form and `hash_method`, `city_hash` or
`simple_mod`; without `servers` those of `cache_ps`. `client` is a single server, where neither has any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recstore_ops.config_file import ConfigFile

HASH_METHODS = ("city_hash", "simple_mod")


@dataclass(frozen=True)
class ServerAddress:
    """Where one shard is served.

    Attributes:
        host: a name or an address.
        port: the bulk port.
        shard: the number of the shard, from 0.
    """

    host: str
    port: int
    shard: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True)
class ServerList:
    """The servers of all shards, in their order, and how ids are spread over them."""

    servers: tuple[ServerAddress, ...]
    hash_method: str = "city_hash"


def chosen_servers(config: ConfigFile) -> ServerList | None:
    """The servers that the file chooses for the tables of a program: those of `distributed_client`, if it names any.

    Raises:
        ValueError: the entry is not what it should be.
    """
    client = _section(config, "distributed_client")
    return known_servers(config) if "servers" in client else None


def known_servers(config: ConfigFile) -> ServerList | None:
    """The servers that the file knows of, wherever it names them.

    Raises:
        ValueError: the entry is not what it should be.
    """
    client, cache_ps = _section(config, "distributed_client"), _section(config, "cache_ps")
    hash_method = client.get("hash_method", "city_hash")
    if hash_method not in HASH_METHODS:
        raise _wrong(config, "distributed_client.hash_method", f"must be one of {HASH_METHODS}", hash_method)
    for name, section in (("distributed_client", client), ("cache_ps", cache_ps)):
        if "servers" in section:
            return ServerList(_addresses(config, name, section), hash_method)
    single = _section(config, "client")
    if "host" in single or "port" in single:
        return ServerList((_address(config, "client", {**single, "shard": 0}),), hash_method)
    return None


def served_shards(config: ConfigFile) -> tuple[ServerAddress, ...]:
    """The shards that `recstore serve` starts: those of `cache_ps`.

    Raises:
        ValueError: `cache_ps` names no servers, or is not what it should be.
    """
    cache_ps = _section(config, "cache_ps")
    if "servers" not in cache_ps:
        raise ValueError(f"{config.path}: cache_ps.servers is missing: there is nothing to serve")
    return _addresses(config, "cache_ps", cache_ps)


def _section(config: ConfigFile, name: str) -> dict[str, Any]:
    section = config.recstore.get(name, {})
    if not isinstance(section, dict):
        raise _wrong(config, name, "must be an object", section)
    return section


def _addresses(config: ConfigFile, name: str, section: dict[str, Any]) -> tuple[ServerAddress, ...]:
    """Reads the servers of a section, which are those of the shards 0, 1, ... in any order."""
    entries = section["servers"]
    if not isinstance(entries, list) or not entries:
        raise _wrong(config, f"{name}.servers", "must be a list of at least one server", entries)
    servers = [_address(config, f"{name}.servers[{place}]", entry) for place, entry in enumerate(entries)]
    servers.sort(key=lambda server: server.shard)
    if [server.shard for server in servers] != list(range(len(servers))):
        shards = [server.shard for server in servers]
        raise _wrong(config, f"{name}.servers", f"must have each shard from 0 to {len(servers) - 1} once", shards)
    num_shards = section.get("num_shards", len(servers))
    if num_shards != len(servers):
        raise _wrong(config, f"{name}.num_shards", f"must be the number of servers, {len(servers)}", num_shards)
    return tuple(servers)


def _address(config: ConfigFile, path: str, entry: Any) -> ServerAddress:
    if not isinstance(entry, dict):
        raise _wrong(config, path, "must be an object", entry)
    host, port, shard = entry.get("host", "127.0.0.1"), entry.get("port"), entry.get("shard")
    if not isinstance(host, str) or not host:
        raise _wrong(config, f"{path}.host", "must be a name or an address", host)
    if type(port) is not int or not 0 <= port <= 65535:
        raise _wrong(config, f"{path}.port", "must be a port from 0 to 65535", port)
    if type(shard) is not int or shard < 0:
        raise _wrong(config, f"{path}.shard", "must be a number from 0", shard)
    return ServerAddress(host, port, shard)


def _wrong(config: ConfigFile, path: str, expected: str, actual: Any) -> ValueError:
    return ValueError(f"{config.path}: {path} {expected}, got {actual!r}")
