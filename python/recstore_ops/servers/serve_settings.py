"""How `recstore serve` serves its shards: what the command line says counts before `cache_ps` of the file."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

from recstore_ops.config.config_file import ConfigFile, load_config_file
from recstore_ops.servers.workers import Combine, Consistency, Teamwork


class Durability(str, Enum):
    """What a crash of a server may lose: what came since its last checkpoint, or nothing that was acknowledged."""

    CHECKPOINT = "checkpoint"
    WAL = "wal"


class LogLevel(str, Enum):
    """Which lines servers write to the error stream: those of a level and all above it."""

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
        data: where tables are loaded from at the start and saved, a directory a shard in it.
        durability: what a crash may lose.
        checkpoint_every: seconds between checkpoints.
        metrics_host: where metrics are told.
        max_connections: the most connections of each port.
        log_level: what is written to the error stream.
        workers, consistency, combine, staleness, worker_timeout, heartbeat_timeout: as in `Teamwork`.
    """

    data: Path | None = None
    durability: Durability = Durability.CHECKPOINT
    checkpoint_every: float = 600.0
    metrics_host: str = "127.0.0.1"
    max_connections: int = 1024
    log_level: LogLevel = LogLevel.WARN
    workers: int | None = None
    consistency: Consistency = Consistency.ASYNCHRONOUS
    combine: Combine = Combine.SUM
    staleness: int = 0
    worker_timeout: float = 60.0
    heartbeat_timeout: float = 10.0

    def __post_init__(self) -> None:
        if self.durability is Durability.WAL and self.data is None:
            raise ValueError("--durability wal needs --data, a directory for tables and log")

    @property
    def teamwork(self) -> Teamwork:
        """How workers train together."""
        return Teamwork(**{field.name: getattr(self, field.name) for field in fields(Teamwork)})


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
    """What counts of the command line's options, `None` where not given, a file that was found valid, and the defaults.

    Raises:
        ValueError: `wal` without `data`.
    """
    chosen = {} if config is None else _of_file(config)
    chosen.update({key: value for key, value in given.items() if value is not None})
    return ServeSettings(**chosen)


def _of_file(config: ConfigFile) -> dict[str, Any]:
    """Reads the keys of `cache_ps`; a directory is sought from where the file is."""
    readings: dict[str, Any] = {
        "data": lambda path: Path(config.path).parent / path,
        "durability": Durability,
        "max_connections": int,
        "log_level": LogLevel,
        "workers": int,
        "consistency": Consistency,
        "combine": Combine,
        "staleness": int,
    }
    section = config.recstore.get("cache_ps", {})
    keys = [field.name for field in fields(ServeSettings) if field.name in section]
    return {key: readings.get(key, lambda value: value)(section[key]) for key in keys}
