"""`inspect_checkpoint`: what the snapshots of a directory are and hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from os import PathLike
from os.path import isdir, join, lexists
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from recstore_ops import _native
from recstore_ops.checkpoint.arguments import checked_directory
from recstore_ops.checkpoint.saving import LoadReport, load_to_read
from recstore_ops.config.html_table import html_table, shown
from recstore_ops.inspect.table_report import RowNorms, TableReport, inspect_table
from recstore_ops.ops import operators
from recstore_ops.servers import store
from recstore_ops.servers.choosing import embedded_for
from recstore_ops.table.checks import as_ids
from recstore_ops.table.table import Table

_MANIFEST = "manifest.json"
_ROWS_PER_CHUNK = 1 << 16


@dataclass(frozen=True)
class SnapshotReport:
    """A snapshot of a directory.

    Attributes:
        id: its name.
        parent: the snapshot on which its changes build; `None` for a full one.
        created: when it was saved, UTC.
        kind: `full`, or `delta` if it has only the changes of at least one table.
        bytes: of its own files.
        metadata: the metadata given to the save.
        lineage: the snapshot with which its lineage began: another than that of the newest if another store saved it.
    """

    id: str
    parent: str | None
    created: datetime
    kind: Literal["full", "delta"]
    bytes: int
    metadata: Any
    lineage: str


@dataclass(frozen=True)
class SavedTableReport:
    """A table of the newest snapshot.

    Attributes:
        table: the table as it is once loaded; its norms are over all rows whose values are finite.
        bytes: of the files it is loaded from; for a delta, those of the snapshots before are included.
        non_finite: the rows with a value that is NaN or infinite.
    """

    table: TableReport
    bytes: int
    non_finite: int


@dataclass(frozen=True)
class CheckpointReport:
    """The report of `inspect_checkpoint`.

    Attributes:
        path: the directory.
        snapshots: all of its snapshots, the oldest first. There is none before the first checkpoint of a server whose
            start left out the end of its log.
        tables: the tables of the newest, by name; or the one that was asked for.
        left_out: the end of a server's log that a start left out, damaged or cut short by a crash; else `None`. It has
            the `file`, the `start` and the `bytes` there, a `message`, and the time in `seconds` of Unix time.
    """

    path: Path
    snapshots: list[SnapshotReport]
    tables: dict[str, SavedTableReport]
    left_out: dict[str, Any] | None = None

    def _repr_html_(self) -> str:
        snapshots = (
            (each.id, each.kind, f"{each.created:%Y-%m-%d %H:%M:%S}", f"{each.bytes:,}") for each in self.snapshots
        )
        tables = (
            (name, str(each.table.dim), shown(each.table.config.optimizer), shown(each.table.statistics["rows"]))
            for name, each in self.tables.items()
        )
        return html_table((f"snapshots of {self.path}", "kind", "saved, UTC", "bytes"), snapshots) + html_table(
            ("table", "dim", "optimizer", "rows"), tables
        )


def inspect_checkpoint(
    path: str | PathLike[str], table: str | None = None, ids: Tensor | Iterable[int] | None = None
) -> CheckpointReport:
    """Describes the snapshots of a directory, the tables of the newest and, if asked, the rows of some ids.

    The tables are loaded for that, checksums compared, and dropped again. Update rules of the program that saved them
    are not needed.

    Args:
        path: the directory of a checkpoint or of a server.
        table: the only table to describe; all by default.
        ids: int64: whose rows to show. They need `table`, unless the snapshot has only one.

    Raises:
        ValueError: a table that the snapshot does not have, ids without a table, or a process that has chosen servers,
            or has tables, which would be replaced.
        RuntimeError: as `recstore_ops.checkpoint.load`.
        TypeError, IndexError: as `recstore_ops.inspect_table`.
    """
    directory = _with_checkpoint(checked_directory(path, "inspect_checkpoint"))
    asked = None if ids is None else as_ids(ids)
    left_out = _native.left_out_of_log(directory)
    # All that there is to tell before a server's first checkpoint.
    if left_out is not None and not lexists(join(directory, _MANIFEST)):
        _chosen([], table, asked is not None)
        return CheckpointReport(Path(directory), [], {}, left_out)
    with embedded_for("inspect_checkpoint"), _loaded(directory) as (snapshots, found):
        chosen = _chosen(sorted(found.tables), table, asked is not None)
        chain = _chain(snapshots)
        tables = {name: _inspect_table(name, _parts(chain, name), asked) for name in chosen}
    return CheckpointReport(Path(directory), [_inspect_snapshot(snapshot) for snapshot in snapshots], tables, left_out)


def _with_checkpoint(path: str) -> str:
    """The directory with the checkpoint of a server that has a log; any other directory as it is."""
    within = join(path, "checkpoint")
    has_log = _native.is_server_directory(path) and not lexists(join(path, _MANIFEST)) and isdir(within)
    return within if has_log else path


@contextmanager
def _loaded(path: str) -> Iterator[tuple[list[dict[str, Any]], LoadReport]]:
    """Gives the snapshots of the manifest and the newest one loaded, as long as it is needed."""
    if existing := store.table_names():
        raise ValueError(f"a checkpoint is inspected in a process without tables, this one has {_listed(existing)}")
    try:
        found = load_to_read(path)
        # A save may come between the two.
        while (snapshots := _native.manifest(path))[-1]["id"] != found.snapshot:
            found = load_to_read(path)
        yield snapshots, found
    finally:
        for name in store.table_names():
            operators.drop_table(name)


def _chosen(names: list[str], table: str | None, has_ids: bool) -> list[str]:
    if table is not None and table not in names:
        raise ValueError(f'the checkpoint has no table "{table}"; it has {_listed(names)}')
    if has_ids and table is None and len(names) != 1:
        raise ValueError(f"ids need the table that they are of; the checkpoint has {_listed(names)}")
    return names if table is None else [table]


def _listed(names: list[str]) -> str:
    return ", ".join(f'"{name}"' for name in names) or "no tables"


def _chain(snapshots: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest snapshot and those it follows, the newest first."""
    by_id = {snapshot["id"]: snapshot for snapshot in snapshots}
    chain = [snapshots[-1]]
    while chain[-1]["parent"] is not None:
        chain.append(by_id[chain[-1]["parent"]])
    return chain


def _parts(chain: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The entries that a table is loaded from, the newest first: back to the last snapshot that has all of its rows."""
    parts: list[dict[str, Any]] = []
    for snapshot in chain:
        parts.append(next(entry for entry in snapshot["tables"] if entry["name"] == name))
        if not parts[-1]["is_delta"]:
            break
    return parts


def _bytes_of(entry: dict[str, Any]) -> int:
    return sum(shard["bytes"] for shard in entry["shards"])


def _inspect_snapshot(snapshot: dict[str, Any]) -> SnapshotReport:
    return SnapshotReport(
        id=snapshot["id"],
        parent=snapshot["parent"],
        created=datetime.fromtimestamp(snapshot["created"], timezone.utc),
        kind="delta" if any(entry["is_delta"] for entry in snapshot["tables"]) else "full",
        bytes=sum(map(_bytes_of, snapshot["tables"])),
        metadata=snapshot["metadata"],
        lineage=snapshot["lineage"]["id"],
    )


def _inspect_table(name: str, parts: list[dict[str, Any]], ids: Tensor | None) -> SavedTableReport:
    table = Table.open(name)
    # Servers or ranks that saved the table share a capacity. A delta has no file of one without changes.
    _native.set_shards(table.table_id, max((len(entry["shards"]) for entry in parts), default=1) or 1)
    # The norms of a single row: those over all rows take their place.
    norms, non_finite = _norms(table)
    report = replace(inspect_table(name, ids, sample=1), norms=norms)
    return SavedTableReport(report, sum(map(_bytes_of, parts)), non_finite)


def _norms(table: Table) -> tuple[RowNorms | None, int]:
    """The norms of the rows that are finite, and the number of those that are not."""
    parts: list[Tensor] = []
    non_finite = 0
    for ids in operators.hashtable_ids(table.handle).split(_ROWS_PER_CHUNK):
        rows = operators.emb_read(table.handle, ids, table.dim)
        finite = rows.isfinite().all(dim=1)
        non_finite += int((~finite).sum())
        # In float64, where no square of a float32 overflows.
        parts.append(torch.linalg.vector_norm(rows[finite].double(), dim=1))
    norms = torch.cat(parts) if parts else torch.empty(0, dtype=torch.float32, device="cpu")
    if norms.numel() == 0:
        return None, non_finite
    return RowNorms(norms.numel(), norms.min().item(), norms.mean().item(), norms.max().item()), non_finite
