"""Writes the rows that tables have now to files, as those of frozen tables."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

import torch.distributed as dist

from recstore_ops import _native
from recstore_ops.config.paths import user_path
from recstore_ops.serving.frozen_table import EncodingName
from recstore_ops.sharding.collective import Collective
from recstore_ops.table.table import Table


def freeze(table: Table, path: str | os.PathLike[str], encoding: EncodingName = "float32") -> int:
    """Writes the rows of a table to a file, which replaces one that is there, and returns its bytes.

    The file has the rows of one moment, while other threads go on; servers give each as it is when it is read. If a
    table is sharded over processes, all of them call this together. Each writes its rows beside the file, and the first
    one joins them.

    Args:
        table: as `DistEmbedding.table`.
        path: the file; of a sharded table in a directory that all processes see.
        encoding: how rows are kept. "int8" and "int4" keep a float16 scale and bias for each row, in the layout of
            FBGEMM's `FloatToFusedNBitRowwiseQuantizedSBHalf`.

    Raises:
        ValueError: an unknown encoding, or processes that give another path or encoding than the first one.
        OSError: the file cannot be written, or a row has a value that the encoding has no number for.
        RuntimeError: another process of a sharded table failed.
    """
    if encoding not in get_args(EncodingName):
        raise ValueError(f"encoding must be one of {', '.join(get_args(EncodingName))}, got {encoding!r}")
    target, together = Path(user_path(path, "path")), Collective(group_of([table]))
    together.check_same("freeze", path=str(target), encoding=encoding)
    return _frozen(table, target, encoding, together)


def freeze_tables(
    directory: Path, tables: Sequence[Table], encodings: Mapping[str, EncodingName], together: Collective
) -> list[Path]:
    """Freezes tables to files of a new directory, which it returns; all processes of sharded ones call it together.

    Args:
        directory: in which `tables` is made.
        tables: of any number of names.
        encodings: theirs, by name.
        together: the processes that have the tables.

    Raises:
        OSError, RuntimeError: as `freeze`.
    """
    together.of_first(f"make {directory}", lambda: (directory / "tables").mkdir(parents=True))
    paths = [directory / "tables" / f"{number}.safetensors" for number in range(len(tables))]
    for table, path in zip(tables, paths, strict=True):
        _frozen(table, path, encodings[table.name], together)
    return paths


def _frozen(table: Table, path: Path, encoding: EncodingName, together: Collective) -> int:
    if _ranks(group_of([table])) != _ranks(together.group):
        raise ValueError(f"table {table.name!r} is sharded over processes, and in no module of the model")
    if together.group is None:
        return _native.freeze_table(table.table_id, str(path), encoding)
    parts = [path.with_name(f".{path.name}.part-{rank}") for rank in range(together.world)]
    own = parts[together.rank]
    try:
        together.all_or_none(
            f"freeze its part of table {table.name!r}",
            lambda: _native.freeze_table(table.table_id, str(own), encoding),
        )
        return together.of_first(
            f"freeze table {table.name!r}", lambda: _native.merge_frozen([str(part) for part in parts], str(path))
        )
    finally:
        # Each process removes its own part, once the first one has joined them or failed.
        own.unlink(missing_ok=True)  # by path: a new directory


def _ranks(group: dist.ProcessGroup | None) -> list[int] | None:
    return None if group is None else dist.get_process_group_ranks(group)


def group_of(tables: Sequence[Table]) -> dist.ProcessGroup | None:
    """The processes that tables are sharded over; None: this one has all rows, or they lie on servers.

    Raises:
        ValueError: they are sharded over several groups.
    """
    groups = {table.shard.group: table for table in tables if table.shard is not None and table.is_sharded}
    if len(groups) > 1:
        first, other = (table.name for table in list(groups.values())[:2])
        raise ValueError(f"tables {first!r} and {other!r} are sharded over different process groups")
    return next(iter(groups), None)
