"""What `recstore_config.json` says of parameter servers, in RecStore's keys.

`cache_ps` has what `recstore serve` starts: `servers`, one `{"host", "port", "shard"}` a shard, and `num_shards`.
`distributed_client` has where a program opens its tables: `servers` of the same form and `hash_method`, `city_hash` or
`simple_mod`; without `servers` those of `cache_ps`. `client` is a single server, where neither has any. `cache_ps` and
`distributed_client` may have `tls` and a `token_file` each. What else `cache_ps` may say of its servers is in
`recstore_ops.serve_settings`; their ports of metrics are `metrics_port`, of a server or of them all.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

from recstore_ops.config.config_file import ConfigFile

HASH_METHODS = ("city_hash", "simple_mod")


@dataclass(frozen=True)
class ServerAddress:
    """Where one shard is served.

    Attributes:
        host: a name or an address.
        port: the bulk port.
        shard: the number of the shard, from 0.
        metrics_port: where its metrics are, if anywhere.
    """

    host: str
    port: int
    shard: int
    metrics_port: int | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True)
class Tls:
    """How connections are encrypted: files of certificates and keys, as PEM.

    Attributes:
        certificate: the own certificate, and those between it and one that others trust; a server needs one.
        key: the key of the certificate.
        ca: the certificates that are trusted. A client needs them; a server that has them asks clients for theirs.
        server_name: for clients: what servers' certificates are of; the host by which each is called by default.
    """

    certificate: str | PathLike[str] | None = None
    key: str | PathLike[str] | None = None
    ca: str | PathLike[str] | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("tls needs both certificate and key, or neither")


@dataclass(frozen=True)
class ServerList:
    """The servers of all shards, in their order, how ids are spread over them, and how to be let in."""

    servers: tuple[ServerAddress, ...]
    hash_method: str = "city_hash"
    tls: Tls | None = None
    token: str | None = None


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
    tls, token = _tls(config, "distributed_client", client), _token(config, "distributed_client", client)
    for name, section in (("distributed_client", client), ("cache_ps", cache_ps)):
        if "servers" in section:
            return ServerList(_addresses(config, name, section), hash_method, tls, token)
    single = _section(config, "client")
    if "host" in single or "port" in single:
        return ServerList((_address(config, "client", {**single, "shard": 0}),), hash_method, tls, token)
    return None


def served_shards(config: ConfigFile) -> ServerList:
    """The shards that `recstore serve` starts, and how it lets others in: those of `cache_ps`.

    Raises:
        ValueError: `cache_ps` names no servers, or is not what it should be.
    """
    cache_ps = _section(config, "cache_ps")
    if "servers" not in cache_ps:
        raise ValueError(f"{config.path}: cache_ps.servers is missing: there is nothing to serve")
    servers = _addresses(config, "cache_ps", cache_ps)
    tls, token = _tls(config, "cache_ps", cache_ps), _token(config, "cache_ps", cache_ps)
    return ServerList(servers, tls=tls, token=token)


def _section(config: ConfigFile, name: str) -> dict[str, Any]:
    section = config.recstore.get(name, {})
    if not isinstance(section, dict):
        raise _wrong(config, name, "must be an object", section)
    return section


def _tls(config: ConfigFile, name: str, section: dict[str, Any]) -> Tls | None:
    """Reads how connections are encrypted; files are sought from where the configuration file is."""
    if "tls" not in section:
        return None
    entry = section["tls"]
    keys = {field.name for field in fields(Tls)}
    if not isinstance(entry, dict) or not keys.issuperset(entry) or not all(isinstance(v, str) for v in entry.values()):
        raise _wrong(config, f"{name}.tls", f"must be an object of texts with keys of {sorted(keys)}", entry)
    try:
        return Tls(**{key: value if key == "server_name" else _beside(config, value) for key, value in entry.items()})
    except ValueError as error:
        raise ValueError(f"{config.path}: {name}: {error}") from None


def _token(config: ConfigFile, name: str, section: dict[str, Any]) -> str | None:
    path = section.get("token_file")
    if path is None:
        return None
    if not isinstance(path, str):
        raise _wrong(config, f"{name}.token_file", "must be a path", path)
    return read_token(Path(_beside(config, path)))


def read_token(path: Path) -> str:
    """Reads what clients must know to be let in.

    Raises:
        ValueError: the file is empty.
    """
    token = path.read_text("utf-8").strip()
    if not token:
        raise ValueError(f"{path}: the token is empty")
    return token


def _beside(config: ConfigFile, path: str) -> str:
    return str(Path(config.path).parent / path)


def _addresses(config: ConfigFile, name: str, section: dict[str, Any]) -> tuple[ServerAddress, ...]:
    """Reads the servers of a section, which are those of the shards 0, 1, ... in any order."""
    entries = section["servers"]
    if not isinstance(entries, list) or not entries:
        raise _wrong(config, f"{name}.servers", "must be a list of at least one server", entries)
    servers = [_address(config, f"{name}.servers[{place}]", entry) for place, entry in enumerate(entries)]
    servers = [_with_metrics(config, name, section, server) for server in servers]
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
    port = _port(config, f"{path}.port", port)
    metrics_port = entry.get("metrics_port")
    if metrics_port is not None:
        metrics_port = _port(config, f"{path}.metrics_port", metrics_port)
    if type(shard) is not int or shard < 0:
        raise _wrong(config, f"{path}.shard", "must be a number from 0", shard)
    return ServerAddress(host, port, shard, metrics_port)


def _with_metrics(config: ConfigFile, name: str, section: dict[str, Any], server: ServerAddress) -> ServerAddress:
    """Gives a server that says nothing of metrics the port that its section says for all."""
    port = section.get("metrics_port")
    if port is None or server.metrics_port is not None:
        return server
    return replace(server, metrics_port=_port(config, f"{name}.metrics_port", port))


def _port(config: ConfigFile, path: str, port: Any) -> int:
    if type(port) is not int or not 0 <= port <= 65535:
        raise _wrong(config, path, "must be a port from 0 to 65535", port)
    return port


def _wrong(config: ConfigFile, path: str, expected: str, actual: Any) -> ValueError:
    return ValueError(f"{config.path}: {path} {expected}, got {actual!r}")


__all__ = [
    "HASH_METHODS",
    "ServerAddress",
    "ServerList",
    "Tls",
    "chosen_servers",
    "known_servers",
    "read_token",
    "served_shards",
]
