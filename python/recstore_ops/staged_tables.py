"""Replaces tables as a whole, slots and step included, all at once or not at all.

The store takes whole tables from checkpoints only, which it checks before it changes anything. So the tables are
written as a checkpoint to a directory that is gone afterwards.
"""

import json
import os
import secrets
import shutil
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from recstore_ops import _native, checkpoint
from recstore_ops._table import Table
from recstore_ops.safetensors_file import Column, write_safetensors

_MEMORY = Path("/dev/shm")

_NO_CHECKSUM = "00000000"


@dataclass(frozen=True)
class StagedTable:
    """What a table is to become.

    Attributes:
        table: the table.
        ids: int64, `[N]`, distinct.
        rows: of the table's row type, `[N, dim]`.
        slots: all of the optimizer's slots by name, float32, `[N, width]`.
        progress: `step`, `learning_rate` and `learning_rate_was_set`, where they change.
    """

    table: Table
    ids: Tensor
    rows: Tensor
    slots: dict[str, Tensor]
    progress: dict[str, Any]

    def columns(self) -> list[Column]:
        """The tensors of the table's file."""
        tensors = {"ids": self.ids, "rows": self.rows, **{f"slot.{name}": slot for name, slot in self.slots.items()}}
        return [Column.of(name, tensor) for name, tensor in tensors.items()]


_PROGRESS = ("step", "learning_rate", "learning_rate_was_set", "inserts", "updates", "deletes", "refusals")
_COUNTS = ("rejections", "evictions")


def replace_tables(staged: list[StagedTable]) -> None:
    """Replaces tables, all at once.

    Raises:
        OSError: there is no room for a copy of the tables, in memory or among temporary files; nothing has changed.
        RuntimeError: a table of a forked child's parent, or ids that are invalid; nothing has changed.
    """
    if not staged:
        return
    size = sum(column.nbytes for entry in staged for column in entry.columns())
    with TemporaryDirectory(prefix="recstore-", dir=_place_for(size)) as directory:
        snapshot = secrets.token_hex(8)
        entries = [_write_table(Path(directory), snapshot, place, entry) for place, entry in enumerate(staged)]
        _write_manifest(Path(directory), snapshot, entries)
        checkpoint.load(directory, progress=False)


def _place_for(size: int) -> Path | None:
    """Memory where it has room twice over; else where temporary files go."""
    is_usable = _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK)
    return _MEMORY if is_usable and shutil.disk_usage(_MEMORY).free > 2 * size else None


def _write_table(directory: Path, snapshot: str, place: int, staged: StagedTable) -> dict[str, Any]:
    path = directory / f"{snapshot}-{place:03}-table.safetensors"
    checksums = write_safetensors(path, staged.columns())
    shard = {
        "file": path.name,
        "bytes": path.stat().st_size,
        "rows": staged.ids.numel(),
        "deleted": 0,
        "state": {},
        "checksums": checksums,
    }
    statistics = {**staged.table.statistics(), **staged.progress}
    return {
        "name": staged.table.name,
        "dim": staged.table.dim,
        "config": json.loads(_config_of(staged.table)),
        "progress": {**{key: statistics[key] for key in (*_PROGRESS, *_COUNTS)}, "sweep": None},
        "is_delta": False,
        "shards": [shard],
    }


def _config_of(table: Table) -> str:
    description = _native.describe_table(table.name)
    return table.config.to_json() if description is None else description[1]


def _write_manifest(directory: Path, snapshot: str, tables: list[dict[str, Any]]) -> None:
    entry = {"id": snapshot, "parent": None, "created": int(time.time()), "metadata": None, "tables": tables}
    manifest = {"format": "recstore-checkpoint", "version": 1, "snapshots": [entry], "checksum": _NO_CHECKSUM}
    unsigned = json.dumps(manifest)
    manifest["checksum"] = f"{zlib.crc32(unsigned.encode()):08x}"
    (directory / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
