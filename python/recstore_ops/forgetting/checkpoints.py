"""The directory of a checkpoint: which snapshots have ids, and taking these out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recstore_ops import _native
from recstore_ops.checkpoint.id_columns import SKETCH, id_columns
from recstore_ops.checkpoint.manifest import LOCK, MANIFEST, Manifest, read_manifest
from recstore_ops.checkpoint.progress import shown
from recstore_ops.config.directory import Directory
from recstore_ops.forgetting.id_set import Found, IdSet
from recstore_ops.forgetting.place import Look, held, held_perhaps
from recstore_ops.forgetting.report import Held, Kind
from recstore_ops.forgetting.text import in_text
from recstore_ops.table.shard_of import splitmix64

_WHAT = {
    "ids": "rows",
    "deleted_ids": "deleted ids",
    "admission.ids": "counts",
    "eviction.ids": "rows chosen to leave",
}


SKETCHED = "a sketch"
"""As what ids are held whose counters are above zero, be it for others."""


@dataclass(frozen=True)
class CheckpointPlace:
    """A directory of snapshots. Those that have ids go; a full one without them takes the place of the newest.

    Attributes:
        path: the directory.
    """

    path: Path
    kind: Kind = "checkpoint"

    def tables(self) -> set[str]:
        """Returns the names of the tables of all snapshots; raises RuntimeError where the manifest is damaged."""
        return {table["name"] for snapshot in self._manifest().snapshots for table in snapshot["tables"]}

    def look(self, tables: Sequence[str], ids: IdSet) -> Look:
        """Returns what the snapshots have of ids; raises RuntimeError where a file is damaged."""
        return look_at_checkpoint(self._manifest(), tables, ids)

    def forget(self, tables: Sequence[str], ids: IdSet, look: Look, progress: bool | None) -> tuple[int, int]:
        """Takes the snapshots of `look` out, and writes the newest state without the ids."""
        if not look.snapshots and not unfinished(self.path):
            return 0, 0
        with shown("forgetting", progress) as native:
            return _native.forget_in_directory(str(self.path), left_out(tables, ids, look), native)

    def explained(self) -> set[Path]:
        """Returns the files of all snapshots, and the manifest."""
        return explained_by(self._manifest())

    def _manifest(self) -> Manifest:
        return read_manifest(str(self.path))


def unfinished(directory: Path) -> bool:
    """Whether a save was cut off there, which may have left files of snapshots that are gone."""
    return any(directory.glob("*-unfinished.json"))


def left_out(tables: Sequence[str], ids: IdSet, look: Look) -> dict[str, Any]:
    """Returns what is to be left out as the store takes it."""
    return {"tables": list(tables), "ids": list(ids), "snapshots": look.seen, "holding": look.snapshots}


def explained_by(manifest: Manifest) -> set[Path]:
    """Returns the files that a manifest tells of."""
    return {manifest.directory.path / name for name in (MANIFEST, LOCK, *manifest.files())}


def look_at_checkpoint(manifest: Manifest, tables: Sequence[str], ids: IdSet) -> Look:
    """Returns what the snapshots of a directory have of ids.

    Raises:
        RuntimeError: a file is missing or damaged.
    """
    look = Look(seen=[snapshot["id"] for snapshot in manifest.snapshots])
    for snapshot in manifest.snapshots:
        own = [found for table in snapshot["tables"] if table["name"] in tables for found in _of(manifest, table, ids)]
        look.held.extend(own)
        # What follows a snapshot that goes cannot be read without it.
        if own or snapshot["parent"] in look.snapshots:
            look.snapshots.append(snapshot["id"])
        text = json.dumps(_told_by(snapshot["metadata"]))
        where = f"metadata of snapshot {snapshot['id']}"
        look.stays.extend(held_perhaps(manifest.directory.path / MANIFEST, where, in_text(text.encode(), ids)))
    return look


def _of(manifest: Manifest, table: dict[str, Any], ids: IdSet) -> Iterator[Held]:
    for entry in table["shards"]:
        path = manifest.directory.path / entry["file"]
        found = {name: Found() for name in _WHAT}
        for name, values in id_columns(manifest.directory, entry):
            found[name] += ids.among(values)
        for name, what in _WHAT.items():
            yield from held(path, what, found[name])
        yield from held(path, SKETCHED, _in_sketch(manifest.directory, table, entry, ids), is_certain=False)


def _in_sketch(directory: Directory, table: dict[str, Any], entry: dict[str, Any], ids: IdSet) -> Found:
    """The ids that a sketch estimates above zero: counted, or only others were."""
    admission = table["config"].get("admission") or {}
    if admission.get("kind") != "sketch":
        return Found()
    counters = np.concatenate([values for _, values in id_columns(directory, entry, [SKETCH])])
    estimates = _estimates(counters, admission["epsilon"], admission["delta"], ids.values)
    return Found({id: 1 for id, estimate in zip(ids, estimates.tolist(), strict=True) if estimate})


def _estimates(
    counters: NDArray[np.uint32], epsilon: float, delta: float, ids: NDArray[np.int64]
) -> NDArray[np.uint32]:
    """The least counter of each id, as `rust/recstore/src/lifecycle/sketch.rs` finds them."""
    width, depth = math.ceil(math.e / epsilon), max(math.ceil(math.log(1 / delta)), 1)
    first = splitmix64(ids)
    second = splitmix64(first.view(np.int64)) | np.uint64(1)
    rows = counters.reshape(depth, width)
    places = [_high_product(first + second * np.uint64(row), width) for row in range(depth)]
    return np.min([rows[row][place] for row, place in enumerate(places)], axis=0)


def _high_product(hashes: NDArray[np.uint64], width: int) -> NDArray[np.int64]:
    """The upper 64 bits of each product with a number below 2^32."""
    low, high = hashes & np.uint64(0xFFFFFFFF), hashes >> np.uint64(32)
    carried = (low * np.uint64(width)) >> np.uint64(32)
    return ((high * np.uint64(width) + carried) >> np.uint64(32)).astype(np.int64)


def _told_by(metadata: Any) -> Any:
    """What a caller gave along; of a server what its clients were answered, for the rest counts its changes."""
    if isinstance(metadata, dict) and metadata.keys() == {"last", "tables", "clients", "workers"}:
        return [client["outcome"] for client in metadata["clients"]]
    return metadata


__all__ = ["SKETCHED", "CheckpointPlace", "explained_by", "left_out", "look_at_checkpoint", "unfinished"]
