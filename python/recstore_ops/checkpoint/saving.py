"""Saves and loads: `recstore_ops.checkpoint` says what a checkpoint is."""

import json
import os
from collections.abc import Collection, Mapping
from os import PathLike
from typing import Any

from recstore_ops import _native
from recstore_ops.checkpoint.arguments import (
    Compression,
    SaveKind,
    checked_directory,
    checkpoint_place,
    load_arguments,
    save_arguments,
)
from recstore_ops.checkpoint.pending import PendingSave, begin, tell_failures
from recstore_ops.checkpoint.progress import shown
from recstore_ops.checkpoint.reports import LoadReport, SaveReport, warn_of_kept
from recstore_ops.servers import store
from recstore_ops.servers.choosing import SERVERS, current_ps_backend, keep_choice_until_done
from recstore_ops.table.checks import refuse_text
from recstore_ops.table.existing import note_loaded
from recstore_ops.table.known_shards import TOGETHER, WHOLE, note_loaded_as, refuse_sharded
from recstore_ops.table.shard_of import check_shard, shard_of


def save(
    path: str | PathLike[str],
    *,
    kind: SaveKind = "full",
    keep: int = 1,
    metadata: Any = None,
    compression: Compression = None,
    replace: bool = False,
    storage_options: Mapping[str, str] | None = None,
    progress: bool | None = None,
) -> SaveReport:
    """Saves all tables, as they are at one moment, to a directory. Other threads go on reading and training them.

    If tables are sharded over ranks, this is refused: use `recstore_ops.sharding.save`.

    A URL of `s3://` or `file://` names an object store instead. Files are written to a temporary directory first (see
    `tempfile.gettempdir`) and then uploaded, the manifest last. If two saves run at once, one is refused.

    Gradients that were collected and not applied are no part of it.

    A process that has saved or loaded the newest snapshot of the directory goes on with it. One that was overtaken by
    another process's newer snapshot is refused. One that has no part in the directory saves beside the snapshots of the
    other, which stay, and a `RuntimeWarning` says how to load or drop them; a third one is refused.

    Args:
        path: the directory, made if it is not there; or a URL. `~` is the home directory, here and in all paths.
        kind: `full`: all rows; `delta`: the changes since the directory's newest snapshot, which must be the last that
            this process saved or loaded; `auto`: a delta if that is possible.
        keep: how many full snapshots stay in the directory, with their deltas.
        metadata: a value that `load` returns: any value of JSON, with ints of 64 bits and keys that are texts. Tuples
            come back as lists.
        compression: `"zstd"`, or `("zstd", level)` with a level from 1 to 19, 3 being usual: files take less room, and
            plain safetensors no longer opens them. Each takes the room of a plain file until it is compressed.
        replace: whether to drop the snapshots of other stores, which this process neither saved nor loaded. Otherwise
            they stay, with a warning, or the save is refused; see below.
        storage_options: for a URL of `s3://`: `region`, `endpoint`, `access_key_id`, `secret_access_key` and other
            options of the Rust crate `object_store`. Missing ones are taken from `AWS_REGION` and the like.
        progress: whether to show a progress bar; by default if the standard error is a terminal or a notebook. Servers
            do not report progress.

    Returns:
        The report of the save.

    Raises:
        ValueError: `kind`, `keep`, `compression`, the URL or its options are invalid, or `metadata` has NaN, infinity,
            an int of more than 64 bits, or more than 100 lists and dicts within each other.
        TypeError: JSON cannot hold `metadata`, or `replace` is no bool.
        RuntimeError: a table is sharded; or the directory cannot be written, has rows without a manifest, would have no
            rows any more, or has snapshots of other stores. The directory still holds what it held before. The message
            names the table or the file.
    """
    arguments = save_arguments(kind, keep, metadata, compression, replace)
    place = checkpoint_place(path, storage_options)
    refuse_sharded("checkpoint.save", None, TOGETHER)
    tell_failures()
    with shown("saving", progress) as native:
        report = SaveReport(**store.save_tables(place, arguments, native))
    warn_of_kept(path, report.kept, stacklevel=2)
    return report


def save_async(
    path: str | PathLike[str],
    *,
    kind: SaveKind = "full",
    keep: int = 1,
    metadata: Any = None,
    compression: Compression = None,
    replace: bool = False,
    storage_options: Mapping[str, str] | None = None,
) -> PendingSave:
    """Saves as `save` does, in a thread of its own: the tables as they are when this returns.

    It waits for a save or load that is under way, and until the moment of the save has come: what is done afterwards is
    not in the snapshot. A process does not end before the save has. A save that began cannot be cancelled.

    On parameter servers reads go on, and changes of this process wait for the end of the save; so do calls that choose
    other servers. Changes of other processes that come before each server's moment are in the snapshot.

    A failure that the caller does not get from the handle is reported by a `RuntimeWarning`: when the handle is gone,
    at the next save, or at the end of the process.

    Args:
        path: as in `save`, and so are `kind`, `keep`, `metadata`, `compression`, `replace` and `storage_options`.

    Returns:
        A handle: a `Future` whose `result()` waits for the report and raises the `RuntimeError` that `save` would.

    Raises:
        ValueError, TypeError: as `save`.
        RuntimeError: a table is sharded.
    """
    arguments = save_arguments(kind, keep, metadata, compression, replace)
    place = checkpoint_place(path, storage_options)
    refuse_sharded("checkpoint.save_async", None, TOGETHER)
    tell_failures()
    native = _native.CheckpointProgress()
    saving = PendingSave(os.fspath(path))
    # Before the thread starts: other servers chosen in between would be the ones that it saves.
    if current_ps_backend() == SERVERS:
        keep_choice_until_done(saving)

    def work() -> SaveReport:
        report = SaveReport(**store.save_tables(place, arguments, native))
        warn_of_kept(path, report.kept, stacklevel=1)
        return report

    return begin(saving, work, native.has_begun)


def load(
    path: str | PathLike[str],
    *,
    shard: tuple[int, int] | None = None,
    tables: Collection[str] | None = None,
    snapshot: str | None = None,
    storage_options: Mapping[str, str] | None = None,
    progress: bool | None = None,
) -> LoadReport:
    """Replaces tables by those of a directory's newest snapshot, and makes those that are not there.

    Tables that the snapshot does not hold, and those that are not asked for, stay as they are. Modules and handles keep
    on working: they see the loaded rows, steps and learning rates. Modules made after the load open the tables as they
    find them, if they have the configuration that was saved; a table's learning rate and weight decay are not compared,
    and those it has stay.

    Work in progress goes on with the loaded rows. Prefetches return them. Gradients collected before stay collected and
    go into the next step, and so do those of a backward pass whose forward pass came before. The indices of a
    `HashTable` are given out anew.

    A `SparseOptimizer` made with modules keeps a learning rate for each table in its parameter groups. One made before
    the load gives its rate to the table with its next step; only a loaded rate that was set by hand wins, and shows up
    in the group. To go on with the loaded rates, make the optimizer after the load, without `lr`. One made without
    modules leaves the loaded rate of a table that it has stepped before alone, until its own rate is changed.

    Args:
        path: the directory, or the URL of an object store, from which the files of the snapshot are downloaded to a
            temporary directory.
        shard: `(number, of)`: only the rows whose ids `shard_of` gives to shard `number` of `of`, however many
            processes saved them. A table's counts of inserts, updates, deletes and refusals then begin at 0. Of tables
            that are sharded over ranks it must be this rank's, as `recstore_ops.sharding.load` has it.
        tables: the names of the only tables to load; all of the snapshot's by default.
        snapshot: the name of the snapshot to load; the newest by default. After a load of an older one a save to the
            directory needs `replace=True`, which drops the newer ones.
        storage_options: as in `save`.
        progress: whether to show a progress bar; by default if the standard error is a terminal or a notebook.

    Returns:
        The report of the load.

    Raises:
        TypeError: `tables` is a text, or `snapshot` is none.
        ValueError: `shard` is no shard, or the URL or its options are invalid.
        RuntimeError: the directory holds no checkpoint, or not the snapshot or a table that is asked for, or a file is
            not what it should be. Or a table is there with another configuration, or as another shard. The message
            names the file or table; nothing has changed.
    """
    checked, place = None if shard is None else check_shard(*shard), checkpoint_place(path, storage_options)
    refuse_text("tables", tables)
    return _load(place, load_arguments(checked, tables, snapshot, without_rules=False), progress)


def load_to_read(path: str | PathLike[str]) -> LoadReport:
    """Loads the newest snapshot of a directory as `load` does, but needs no update rules of the program that saved it.

    The next step of a table with such a rule is refused.

    Raises:
        ValueError, RuntimeError: as `load`.
    """
    return _load(checkpoint_place(path, None), load_arguments(None, None, None, without_rules=True), None)


def _load(place: dict[str, Any], arguments: dict[str, Any], progress: bool | None) -> LoadReport:
    shard, chosen = arguments["shard"], arguments["tables"]
    asked = None if chosen is None else sorted(chosen)
    refuse_sharded("checkpoint.load", asked, TOGETHER, but=WHOLE if shard is None else shard)
    with shown("loading", progress) as native:
        found = store.load_tables(place, arguments, native)
    note_loaded([name for name, _ in found["tables"]])
    if shard is None:
        note_loaded_as([name for name, _ in found["tables"]], WHOLE)
    return LoadReport(found["snapshot"], json.loads(found["metadata"]), dict(found["tables"]))


def compact(path: str | PathLike[str], *, progress: bool | None = None) -> SaveReport | None:
    """Puts one full snapshot in the place of a directory's newest one and the deltas that it is made of.

    It keeps its name and its metadata, its files are compressed if they were, and deltas can follow it as before. The
    tables of this process have no part in it, but it takes as much memory as those of the snapshot. On the command line
    it is `recstore compact`.

    Args:
        path: the directory.
        progress: whether to show a progress bar; by default if the standard error is a terminal or a notebook.

    Returns:
        The report of the new snapshot, or `None` if the newest snapshot follows no other and stays as it is.

    Raises:
        ValueError: `path` is a URL.
        RuntimeError: the directory holds no checkpoint, or a file is damaged, or a save to the directory is in
            progress. The message names the file; the directory holds what it held before.
    """
    directory = checked_directory(path, "compact")
    with shown("compacting", progress) as native:
        compacted = _native.compact_directory(directory, native)
    return None if compacted is None else SaveReport(**compacted)


def new_snapshot_name() -> str:
    """A name that no snapshot has, for all processes that save one together."""
    return _native.new_snapshot_name()


def save_part(
    path: str | PathLike[str],
    snapshot: str,
    shard: int,
    num_shards: int,
    *,
    kind: SaveKind = "full",
    compression: Compression = None,
    replace: bool = False,
    progress: bool | None = None,
) -> SaveReport:
    """Saves all tables of this process as the part that it has in a snapshot, which counts once it was committed.

    No other snapshot may be saved to the directory until then, and the shards must not be trained between their saves:
    all are saved at the same step. After a failure, or to save again, all begin anew with another name.

    Args:
        path: the directory; made if it is not there.
        snapshot: the name that all shards were given, from `new_snapshot_name`.
        shard: the number of this process's part, from 0.
        num_shards: how many parts there are.
        kind: as in `save`, and so are `compression` and `replace`; the same for all shards, and `replace` for `commit`.
        progress: whether to show a progress bar; by default if the standard error is a terminal or a notebook.

    Returns:
        The report of this process's part.

    Raises:
        ValueError: `kind`, `compression` or `shard` is invalid, or `path` a URL.
        RuntimeError: the directory cannot be written, or has snapshots of other stores, as in `save`; or the name is
            none, or a table is sharded over ranks otherwise. What the directory holds still counts.
    """
    place, arguments = check_shard(shard, num_shards), save_arguments(kind, 1, None, compression, replace)
    directory = checked_directory(path, "save_part")
    refuse_sharded("checkpoint.save_part", None, TOGETHER, but=place)
    tell_failures()
    with shown("saving", progress) as native:
        return SaveReport(**store.save_part_of_tables(directory, snapshot, place, arguments, native))


def commit(
    path: str | PathLike[str],
    snapshot: str,
    num_shards: int,
    *,
    keep: int = 1,
    metadata: Any = None,
    replace: bool = False,
) -> None:
    """Makes what all shards saved the newest snapshot of a directory. One process calls it, when all parts are there.

    Args:
        path: the directory.
        snapshot: the name that the shards saved under.
        num_shards: how many parts there are.
        keep: as in `save`, and so are `metadata` and `replace`.

    Raises:
        ValueError, TypeError: `keep` or `metadata` is invalid, as in `save`, or `path` a URL.
        RuntimeError: a part is missing, or the parts do not fit together: their tables, configurations, steps or
            parents differ; or another store has saved since the parts were. The directory's newest snapshot is what it
            was.
    """
    arguments = save_arguments("full", keep, metadata, replace=replace)
    check_shard(0, num_shards)
    kept = _native.commit_parts(checked_directory(path, "commit"), snapshot, num_shards, arguments)
    warn_of_kept(path, kept, stacklevel=2)


__all__ = [
    "Compression",
    "LoadReport",
    "PendingSave",
    "SaveKind",
    "SaveReport",
    "commit",
    "compact",
    "load",
    "new_snapshot_name",
    "save",
    "save_async",
    "save_part",
    "shard_of",
]
