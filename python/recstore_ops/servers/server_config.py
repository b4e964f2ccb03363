"""The keys of `recstore_config.json` about parameter servers, as RecStore names them.

`cache_ps` has the servers that `recstore serve` starts: `servers`, one `{"host", "port", "shard"}` a shard, and
`num_shards`. `distributed_client` has the servers on which a program opens its tables: `servers` of the same form and
`hash_method`, `city_hash` or `simple_mod`. Without `servers` it uses those of `cache_ps`. `client` is a single server,
used if neither has any. `cache_ps` and `distributed_client` may have `tls` and a `token_file` each. Servers of either
may name `replicas`, the other servers of their shard. The other settings of servers in `cache_ps` are in
`recstore_ops.serve_settings`. `metrics_port`, of a server or of all of them, is the port of metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from recstore_ops.config.config_file import ConfigFile
from recstore_ops.config.paths import user_path
from recstore_ops.config.tokens import MAX_TOKEN_BYTES, check_token
from recstore_ops.servers.addresses import REPLICA_SEPARATOR

HASH_METHODS = ("city_hash", "simple_mod")


@dataclass(frozen=True)
class ServerAddress:
    """The address of one shard.

    Attributes:
        host: a name or an address.
        port: the bulk port.
        shard: the number of the shard, from 0.
        metrics_port: the port of its metrics, if it has one.
        replicas: `host:port` of the shard's other servers, which follow this one or take its place.
    """

    host: str
    port: int
    shard: int
    metrics_port: int | None = None
    replicas: tuple[str, ...] = ()

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def all_servers(self) -> str:
        """`host:port` of all servers of the shard, with a bar between them."""
        return REPLICA_SEPARATOR.join([str(self), *self.replicas])


@dataclass(frozen=True)
class Tls:
    """How connections are encrypted: files of certificates and keys, as PEM.

    Attributes:
        certificate: the own certificate, and those between it and one that others trust; a server needs one.
        key: the key of the certificate.
        ca: the certificates that are trusted. A client needs them; a server that has them asks clients for theirs.
        server_name: for clients: the name in the servers' certificates; by default the host by which each is called.
    """

    __module__ = "recstore_ops"

    certificate: str | PathLike[str] | None = None
    key: str | PathLike[str] | None = None
    ca: str | PathLike[str] | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("tls needs both certificate and key, or neither")
        for name in ("certificate", "key", "ca"):
            path = getattr(self, name)
            if path is not None:
                object.__setattr__(self, name, user_path(path, name))


@dataclass(frozen=True)
class ServerList:
    """The servers of all shards, in their order, how ids are spread over them, and how to be let in."""

    servers: tuple[ServerAddress, ...]
    hash_method: str = "city_hash"
    tls: Tls | None = None
    token: str | None = None

    @property
    def addresses(self) -> list[str]:
        """The addresses of all servers of each shard."""
        return [server.all_servers for server in self.servers]


def chosen_servers(config: ConfigFile) -> ServerList | None:
    """The servers that the file chooses for the tables of a program: those of `distributed_client`, if it names any.

    Raises:
        ValueError: no client can call one of them, or the token is empty.
        OSError: the file of the token cannot be read.
    """
    return known_servers(config) if "servers" in _section(config, "distributed_client") else None


def known_servers(config: ConfigFile) -> ServerList | None:
    """The servers that the file knows of, wherever it names them.

    Raises:
        ValueError: no client can call one of them, or the token is empty.
        OSError: the file of the token cannot be read.
    """
    client, cache_ps, single = (_section(config, name) for name in ("distributed_client", "cache_ps", "client"))
    for section in (client, cache_ps):
        if "servers" in section:
            servers = _addresses(section)
            break
    else:
        if not single:
            return None
        servers = (_address({**single, "shard": 0}, None),)
    for server in servers:
        if server.port == 0:
            raise ValueError(f"{config.path}: shard {server.shard} has the port 0, any that is free: none to call")
    hash_method = client.get("hash_method", ServerList.hash_method)
    return ServerList(servers, hash_method, _tls(config, client), _token(config, client))


def served_shards(config: ConfigFile) -> ServerList:
    """The shards that `recstore serve` starts, and how it lets others in: those of `cache_ps`.

    Raises:
        ValueError: `cache_ps` names no servers, or the token is empty.
        OSError: the file of the token cannot be read.
    """
    cache_ps = _section(config, "cache_ps")
    if "servers" not in cache_ps:
        raise ValueError(f"{config.path}: cache_ps.servers is missing: there is nothing to serve")
    return ServerList(_addresses(cache_ps), tls=_tls(config, cache_ps), token=_token(config, cache_ps))


def _section(config: ConfigFile, name: str) -> dict[str, Any]:
    return config.recstore.get(name, {})


def _tls(config: ConfigFile, section: dict[str, Any]) -> Tls | None:
    """Reads how connections are encrypted; files are sought from where the configuration file is."""
    if "tls" not in section:
        return None
    paths = {key: value if key == "server_name" else _beside(config, value) for key, value in section["tls"].items()}
    return Tls(**paths)


def _token(config: ConfigFile, section: dict[str, Any]) -> str | None:
    path = section.get("token_file")
    return None if path is None else read_token(Path(_beside(config, path)))


def read_token(path: Path) -> str:
    """Reads what clients must know to be let in.

    Raises:
        ValueError: it holds no token: nothing, too much, or more than a line of text.
        OSError: it cannot be read.
    """
    with Path(user_path(path, "token_file")).open("rb") as file:
        content = file.read(_MAX_TOKEN_FILE_BYTES).strip()
    if len(content) > MAX_TOKEN_BYTES:
        raise ValueError(f"{path}: a token must have at most {MAX_TOKEN_BYTES} bytes, the file has more")
    try:
        token = content.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: a token must be text in UTF-8: {error.reason} at byte {error.start}") from None
    check_token(token, str(path))
    return token


# Room for white space around the longest token; a device is not read for ever.
_MAX_TOKEN_FILE_BYTES = 4 * MAX_TOKEN_BYTES


def _beside(config: ConfigFile, path: str) -> str:
    return str(Path(config.path).parent / user_path(path))


def _addresses(section: dict[str, Any]) -> tuple[ServerAddress, ...]:
    """The servers of a section, in the order of their shards; those that say nothing of metrics have its port."""
    servers = [_address(entry, section.get("metrics_port")) for entry in section["servers"]]
    return tuple(sorted(servers, key=lambda server: server.shard))


def _address(entry: dict[str, Any], metrics_port: int | None) -> ServerAddress:
    # JSON Schema takes 1.0 for an integer.
    metrics = entry.get("metrics_port", metrics_port)
    port, shard = int(entry["port"]), int(entry["shard"])
    metrics = None if metrics is None else int(metrics)
    return ServerAddress(entry.get("host", "127.0.0.1"), port, shard, metrics, tuple(entry.get("replicas", ())))


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
