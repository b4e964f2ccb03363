"""What `recstore doctor --config` says of servers: what each of them and each program would do.

It calls what `recstore serve` and programs call when they start, and tells what that refuses.
"""

from __future__ import annotations

from pathlib import Path

from recstore_ops.config.config_file import ConfigFile
from recstore_ops.doctor.finding import Finding
from recstore_ops.servers.serve_settings import ServeSettings, serve_settings, shard_directory
from recstore_ops.servers.server_config import (
    ServerAddress,
    ServerList,
    Tls,
    chosen_servers,
    known_servers,
    served_shards,
)


def examine_servers(config: ConfigFile) -> list[Finding]:
    """Says what the servers and the programs of a file that was found valid do, or why they would not start."""
    findings: list[Finding] = []
    if "servers" in config.recstore.get("cache_ps", {}):
        findings += _served(config)
    if config.recstore:
        findings.append(_programs(config))
    return findings


def _served(config: ConfigFile) -> list[Finding]:
    try:
        settings, served = serve_settings(config, {}), served_shards(config)
        _check_files(served.tls)
    except (ValueError, OSError) as error:
        return [Finding("recstore serve", str(error), "error")]
    return [_shard(settings, served, server) for server in served.servers]


def _shard(settings: ServeSettings, served: ServerList, server: ServerAddress) -> Finding:
    number = len(served.servers)
    said = [f"listens on {server}"]
    if settings.data is None:
        said.append("keeps its tables in memory alone")
    else:
        directory = shard_directory(settings.data, server.shard, number)
        said.append(f"keeps its tables in {directory}, durability {settings.durability.value}")
    if server.metrics_port is not None:
        said.append(f"metrics at port {server.metrics_port}")
    said += [name for name, asked in (("TLS", served.tls), ("a token", served.token)) if asked is not None]
    return Finding(f"recstore serve --shard {server.shard}", f"shard {server.shard} of {number}: {', '.join(said)}")


def _programs(config: ConfigFile) -> Finding:
    topic = "programs"
    try:
        chosen, known = chosen_servers(config), known_servers(config)
        _check_files(None if known is None else known.tls)
    except (ValueError, OSError) as error:
        return Finding(topic, str(error), "error")
    if chosen is not None:
        return Finding(topic, f"open their tables on {_named(chosen)}")
    if known is not None:
        advice = "name them in distributed_client.servers to open tables there from the start"
        return Finding(topic, f'keep their tables; set_ps_backend("servers") means {_named(known)}', advice=advice)
    return Finding(topic, "keep their tables: no servers are named")


def _named(servers: ServerList) -> str:
    return f"{', '.join(map(str, servers.servers))}, ids by {servers.hash_method}"


def _check_files(tls: Tls | None) -> None:
    """Opens the files of TLS.

    Raises:
        OSError: one cannot be read.
    """
    for path in () if tls is None else (tls.certificate, tls.key, tls.ca):
        if path is not None:
            Path(path).read_bytes()
