"""How `recstore serve` serves its shards: what the command line says counts before `cache_ps` of the file."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

from recstore_ops.config.config_file import ConfigFile, load_config_file
from recstore_ops.config.option import Option, option_fields
from recstore_ops.config.paths import user_path
from recstore_ops.servers.workers import Combine, Consistency, WorkerSync


class Durability(str, Enum):
    """The changes that a crash of a server may lose: all since its last checkpoint, or none that was acknowledged."""

    CHECKPOINT = "checkpoint"
    WAL = "wal"


class LogLevel(str, Enum):
    """The lines that servers write to the error stream: those of a level and all above it."""

    OFF = "off"
    ERROR = "error"
    WARN = "warn"
    INFO = "info"
    DEBUG = "debug"
    TRACE = "trace"


@dataclass(frozen=True)
class ServeSettings:
    """How shards are served; each is a key of `cache_ps` and an option of the command line.

    Attributes:
        data: the directory from which tables are loaded at the start, and to which they are saved. It has a directory
            for each shard.
        durability: what a crash may lose.
        checkpoint_every: seconds between checkpoints.
        metrics_host: the host that serves metrics.
        max_connections: the most connections of each port.
        log_level: what is written to the error stream.
        worker_sync: how workers train together.
    """

    data: Annotated[Path | None, Option("Load the tables from here at the start, and save them here at the end.")] = (
        None
    )
    durability: Annotated[
        Durability,
        Option("With `wal`, no acknowledged change is lost: `--data` has a log of them beside the tables."),
    ] = Durability.CHECKPOINT
    checkpoint_every: Annotated[
        float, Option("Seconds between checkpoints to `--data`, after which a log begins anew.", least=1.0)
    ] = 600.0
    metrics_host: Annotated[str, Option("Serve Prometheus metrics on this address, to all who can reach it.")] = (
        "127.0.0.1"
    )
    max_connections: Annotated[int, Option("The most connections of each port.", least=1)] = 1024
    log_level: Annotated[LogLevel, Option("Write what servers do to the error stream.")] = LogLevel.WARN
    worker_sync: WorkerSync = field(default_factory=WorkerSync)

    def __post_init__(self) -> None:
        if self.durability is Durability.WAL and self.data is None:
            raise ValueError("--durability wal needs --data, a directory for tables and log")


def shard_directory(data: Path, shard: int, num_shards: int) -> Path:
    """The directory in `data` that has the tables of one shard."""
    return data / f"shard-{shard}-of-{num_shards}"


def load_served_file(path: Path) -> ConfigFile:
    """Reads a configuration file for what it says of servers.

    Raises:
        ValueError: as `load_config_file`.
        OSError: the file cannot be read.
    """
    with warnings.catch_warnings():
        # What is without effect for tables of a program is what is served here.
        warnings.simplefilter("ignore")
        return load_config_file(path)


def serve_settings(config: ConfigFile | None, given: Mapping[str, Any]) -> ServeSettings:
    """Merges the command line's options, `None` if not given, with a file that was found valid and the defaults.

    Raises:
        ValueError: `wal` without `data`.
    """
    chosen = {} if config is None else _of_file(config)
    chosen.update({key: value for key, value in given.items() if value is not None})
    worker_sync = {field.name: chosen.pop(field.name) for field in fields(WorkerSync) if field.name in chosen}
    return ServeSettings(**chosen, worker_sync=WorkerSync(**worker_sync))


def _of_file(config: ConfigFile) -> dict[str, Any]:
    """Reads the keys of `cache_ps`; a directory is sought from where the file is."""
    readings: dict[str, Any] = {
        "data": lambda path: Path(config.path).parent / user_path(path, "data"),
        "durability": Durability,
        "max_connections": int,
        "log_level": LogLevel,
        "workers": int,
        "consistency": Consistency,
        "combine": Combine,
        "staleness": int,
    }
    section = config.recstore.get("cache_ps", {})
    keys = [field.name for field in option_fields(ServeSettings) if field.name in section]
    return {key: readings.get(key, lambda value: value)(section[key]) for key in keys}
