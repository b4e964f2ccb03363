"""The command `recstore serve`: parameter servers, one or all shards in this process."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from recstore_ops import _native
from recstore_ops.cli.access_options import Insecure, TlsCertificate, TlsClientCa, TlsKey, TokenFile
from recstore_ops.config.command_options import path_option, takes_options_of
from recstore_ops.config.config_file import ConfigFile
from recstore_ops.servers.addresses import is_address
from recstore_ops.servers.resharding import has_other_shards, reshard_directory
from recstore_ops.servers.serve_settings import (
    Durability,
    ServeSettings,
    load_served_file,
    serve_settings,
    shard_directory,
)
from recstore_ops.servers.server_config import ServerAddress, ServerList, Tls, read_token, served_shards

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class EndSignals:
    """Hears SIGTERM, SIGINT and SIGHUP from its making on until the process ends, on the main thread."""

    def __init__(self) -> None:
        # A handler in Python runs between two instructions: one that comes as a wait begins would end no wait. The
        # interpreter itself writes to this pipe, at once and on whichever thread the signal finds.
        self._reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)

    def came(self, timeout: float) -> bool:
        """Whether one has come, or comes within `timeout` seconds."""
        return bool(select.select([self._reading], [], [], timeout)[0])


_Config = Annotated[Path | None, path_option("Serve the shards of `cache_ps.servers` in this file.")]
_Shard = Annotated[int | None, typer.Option(help="Serve this shard only.", min=0, show_default="all")]
_Host = Annotated[str | None, typer.Option(help="Listen here instead of what the file says.", show_default="127.0.0.1")]
_Port = Annotated[
    int | None,
    typer.Option(help="The bulk port of one shard; 0 for any that is free.", min=0, max=65535, show_default="15000"),
]
_Unix = Annotated[
    Path | None,
    path_option("Listen on this Unix socket in place of a port; large requests of clients go through shared memory."),
]
_ExitWhenUnused = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="End when no client has been connected for this long, or none in the first minute.",
        min=0.1,
        show_default="never",
    ),
]
_GrpcPort = Annotated[
    int | None,
    typer.Option(help="Serve gRPC too, at this port (of one shard).", min=0, max=65535, show_default="off"),
]
_HealthPort = Annotated[
    int | None,
    typer.Option(
        help="Serve the gRPC health check alone, without encryption and token, at this port (of one shard).",
        min=0,
        max=65535,
        show_default="off",
    ),
]
_MetricsPort = Annotated[
    int | None,
    typer.Option(
        help="Serve metrics over HTTP at this port (of one shard), for Prometheus and `recstore top`.",
        min=0,
        max=65535,
        show_default="off",
    ),
]
_Reshard = Annotated[
    bool,
    typer.Option("--reshard", help="Reshard the rows in --data if the number of shards has changed."),
]
_Follow = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Replicate the server of this shard there, with each change as it comes, until `recstore promote`.",
        show_default="none",
    ),
]
_Synchronous = Annotated[
    bool,
    typer.Option("--synchronous", help="With --follow: acknowledge a change only when it is on the disk here too."),
]


# An option that is not given is None, for the file may say it.
@takes_options_of(ServeSettings, unset=True)
def serve_command(
    config: _Config = None,
    shard: _Shard = None,
    host: _Host = None,
    port: _Port = None,
    unix: _Unix = None,
    exit_when_unused: _ExitWhenUnused = None,
    grpc_port: _GrpcPort = None,
    health_port: _HealthPort = None,
    metrics_port: _MetricsPort = None,
    token_file: TokenFile = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    insecure: Insecure = False,
    reshard: _Reshard = False,
    follow: _Follow = None,
    synchronous: _Synchronous = False,
    **given: Any,
) -> None:
    """Serve tables to other processes until SIGTERM, SIGINT or SIGHUP.

    With `--data` each shard has a directory of its own there, `shard-N-of-M`. Another number of shards is refused
    without `--reshard`. Options that are not given come from `cache_ps` of the file: `data`, `durability`,
    `checkpoint_every`, `metrics_port`, `metrics_host`, `max_connections`, `log_level`, `tls`, `token_file`, and those
    about workers.
    """
    file = None if config is None else load_served_file(config)
    settings = serve_settings(file, given)
    served = _served(file, tls_certificate, tls_key, tls_client_ca, token_file)
    shards = _shards(served, shard, host, port, metrics_port)
    _check_ports(shards, {"--grpc-port": grpc_port, "--health-port": health_port, "--unix": unix})
    if unix is not None and port is not None:
        raise ValueError(f"--unix {unix} takes the place of --port {port}: give one of them")
    life = _Life(settings.checkpoint_every, exit_when_unused)
    followed = _followed(follow, synchronous, shards, settings)
    if reshard:
        _reshard(settings, len(served.servers))
    log = _native.log_to_stderr(settings.log_level.value)
    try:
        _native.raise_descriptor_limit()
        places = _Places(unix, grpc_port, health_port)
        failures = _serve(served, shards, places, insecure, settings, followed, life)
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    finally:
        log.end()
    if failures:
        raise ValueError("; ".join(failures))


def _reshard(settings: ServeSettings, shards: int) -> None:
    """Spreads the rows in the directory over as many shards as are to be served, if they are spread otherwise."""
    if settings.data is None:
        raise ValueError("--reshard needs --data, the directory of the shards")
    if has_other_shards(settings.data, shards):
        print(reshard_directory(settings.data, settings.data, shards), flush=True)


@dataclass(frozen=True)
class _Followed:
    """The server that is followed, if one is."""

    leader: str | None
    synchronous: bool


def _followed(leader: str | None, synchronous: bool, shards: list[ServerAddress], settings: ServeSettings) -> _Followed:
    """Checks which server is to be followed, and how."""
    if leader is None:
        if synchronous:
            raise ValueError("--synchronous goes with --follow, the server that waits for this one")
        return _Followed(None, False)
    if not is_address(leader):
        raise ValueError(f'--follow takes "host:port", the bulk port of a server, got "{leader}"')
    if settings.durability is not Durability.WAL:
        raise ValueError("--follow needs --durability wal and --data: changes come one by one, and none may be lost")
    _check_ports(shards, {"--follow": shards[0].port})
    return _Followed(leader, synchronous)


@dataclass(frozen=True)
class _Places:
    """The endpoints of a shard other than its bulk port: a socket in its place, and further ports."""

    unix: Path | None
    grpc_port: int | None
    health_port: int | None


@dataclass(frozen=True)
class _Life:
    """How often a server checks whether to end or save, and what ends it."""

    checkpoint_every: float
    exit_when_unused: float | None

    def is_over(self, signals: EndSignals, running: list[_Running]) -> bool:
        """Waits until the end, which it returns True for, or until it is time to save."""
        due = time.monotonic() + self.checkpoint_every
        while (left := due - time.monotonic()) > 0:
            if signals.came(left if self.exit_when_unused is None else min(left, self.exit_when_unused / 4)):
                return True
            limit = self.exit_when_unused
            if limit is not None and all(one.is_unused_for(limit) for one in running):
                return True
        return False


def _serve(
    served: ServerList,
    shards: list[ServerAddress],
    places: _Places,
    insecure: bool,
    settings: ServeSettings,
    followed: _Followed,
    life: _Life,
) -> list[str]:
    """Serves shards until the end, and returns which of them could not be saved at the end, and why."""
    signals = EndSignals()
    running: list[_Running] = []
    try:
        for address in shards:
            directory = (
                None if settings.data is None else shard_directory(settings.data, address.shard, len(served.servers))
            )
            server = _start(served, address, places, insecure, directory, settings, followed)
            running.append(_Running(address.shard, server, directory, settings.durability))
        while not life.is_over(signals, running):
            for one in running:
                one.checkpoint()
    finally:
        failures = [failure for one in running if (failure := one.stop()) is not None]
    return failures + [failure for one in running if (failure := one.save()) is not None]


@dataclass(frozen=True)
class _Running:
    """A shard that is being served."""

    shard: int
    server: _native.Server
    directory: Path | None
    durability: Durability

    def is_unused_for(self, seconds: float) -> bool:
        """Whether no client has been connected for so long."""
        unused = self.server.unused_for()
        return unused is not None and unused >= seconds

    def checkpoint(self) -> None:
        """Saves while requests go on. Prints an error if that fails; the next checkpoint tries again."""
        if self.directory is None:
            return
        try:
            self.server.checkpoint()
        except RuntimeError as error:
            print(f"shard {self.shard}: no checkpoint: {error}", file=sys.stderr, flush=True)

    def stop(self) -> str | None:
        """Answers the requests under way, and returns why the shard could not be saved, if so. With a log, changes
        after its last checkpoint are in the log."""
        # With a log a checkpoint before the end spares the next start the log. Without one it comes after the last
        # request.
        failure = self._save() if self.durability is Durability.WAL else None
        self.server.stop()
        return failure

    def save(self) -> str | None:
        """Saves the tables of a server that was stopped, if that has not been done, and returns why it could not."""
        is_to_be_saved = self.directory is not None and self.durability is not Durability.WAL
        return self._save() if is_to_be_saved else None

    def _save(self) -> str | None:
        try:
            rows = self.server.checkpoint()
        except RuntimeError as error:
            return f"shard {self.shard} was not saved: {error}"
        print(f"shard {self.shard}: saved {rows} rows to {self.directory}", flush=True)
        return None


def _served(
    file: ConfigFile | None, certificate: Path | None, key: Path | None, client_ca: Path | None, token_file: Path | None
) -> ServerList:
    """Returns all shards, and how others are let in: what the command line says counts before the file."""
    served = ServerList((ServerAddress("127.0.0.1", 15000, 0),)) if file is None else served_shards(file)
    if token_file is not None:
        served = replace(served, token=read_token(token_file))
    if certificate is None and key is None and client_ca is None:
        return served
    return replace(served, tls=Tls(certificate, key, client_ca))


def _shards(
    served: ServerList, shard: int | None, host: str | None, port: int | None, metrics_port: int | None
) -> list[ServerAddress]:
    """Returns the shards to serve."""
    if shard is not None and shard >= len(served.servers):
        raise ValueError(f"there is no shard {shard} of {len(served.servers)}")
    shards = [address for address in served.servers if shard in (None, address.shard)]
    _check_ports(shards, {"--port": port, "--metrics-port": metrics_port})
    shards = [replace(address, host=host or address.host) for address in shards]
    if metrics_port is not None:
        shards = [replace(address, metrics_port=metrics_port) for address in shards]
    return [replace(address, port=address.port if port is None else port) for address in shards]


def _check_ports(shards: list[ServerAddress], ports: Mapping[str, int | Path | None]) -> None:
    """Refuses a port, or a socket, that more shards than one would have."""
    for option, port in ports.items():
        if port is not None and len(shards) > 1:
            raise ValueError(f"{option} is of one shard: choose one with --shard")


def _start(
    served: ServerList,
    address: ServerAddress,
    places: _Places,
    insecure: bool,
    directory: Path | None,
    settings: ServeSettings,
    followed: _Followed,
) -> _native.Server:
    server = _native.Server(
        host=address.host,
        port=address.port,
        shard=address.shard,
        num_shards=len(served.servers),
        unix_socket=None if places.unix is None else str(places.unix),
        grpc_port=places.grpc_port,
        health_port=places.health_port,
        metrics_host=settings.metrics_host,
        metrics_port=address.metrics_port,
        max_connections=settings.max_connections,
        token=served.token,
        tls=served.tls,
        insecure=insecure,
        directory=None if directory is None else str(directory),
        durability=settings.durability.value,
        workers=settings.worker_sync,
        follow=followed.leader,
        synchronous=followed.synchronous,
    )
    grpc = "" if server.grpc_address is None else f", gRPC at {server.grpc_address}"
    health = "" if server.health_address is None else f", health at {server.health_address}"
    metrics = "" if server.metrics_address is None else f", metrics at http://{server.metrics_address}/metrics"
    follows = "" if followed.leader is None else f", follows {followed.leader}"
    others = f"{grpc}{health}{metrics}{follows}"
    print(f"shard {address.shard} of {len(served.servers)} at {server.address}{others}", flush=True)
    return server
