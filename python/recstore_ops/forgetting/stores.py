"""Checkpoints, and directories of servers that do not run: what they have of ids, and taking it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recstore_ops import _native
from recstore_ops.checkpoint.progress import shown
from recstore_ops.config.directory import Directory
from recstore_ops.forgetting.id_set import IdSet, Match, are_certain
from recstore_ops.forgetting.location import Scan, held, held_perhaps
from recstore_ops.forgetting.report import SKETCHED, Kind


@dataclass(frozen=True)
class StorePlace:
    """A directory of snapshots, or of one server, with or without a log.

    The snapshots that have ids go; a full one without them takes the place of the newest, and of the log.

    Attributes:
        path: the directory.
        kind: which of the two.
    """

    path: Path
    kind: Kind

    def tables(self) -> set[str]:
        """Returns the names of the tables of all snapshots, and of those that a log has opened since.

        Raises:
            ValueError: a server uses the directory, or it has not been its leader's.
            OSError: something in a server's directory is a link, or neither file nor directory.
            RuntimeError: a file is damaged.
        """
        if self.kind == "server":
            with Directory(self.path) as directory:
                directory.check_plain(below=True)
        return set(_native.tables_in(str(self.path))["tables"])

    def look(self, tables: Sequence[str], ids: IdSet) -> Scan:
        """Returns what snapshots and log have of ids; raises RuntimeError if a file is damaged."""
        native = _native.ids_in(str(self.path), list(tables), list(ids))
        look = Scan(snapshots=native["holding"], seen=native["snapshots"], is_unfinished=native["unfinished"])
        for each in native["held"]:
            found = Match(dict(each["ids"]))
            # The counters of a sketch may be those of other ids, and what is in a log is searched byte by byte.
            is_certain = are_certain(found) if each["what"] == "log" else each["what"] != SKETCHED
            look.held.extend(held(self.path / each["file"], each["what"], found, is_certain=is_certain))
        for snapshot, metadata in native["metadata"]:
            found, where = ids.in_text(metadata.encode()), f"metadata of snapshot {snapshot}"
            look.stays.extend(held_perhaps(self.path / native["manifest"], where, found))
        return look

    def forget(self, tables: Sequence[str], ids: IdSet, look: Scan, progress: bool | None) -> tuple[int, int]:
        """Removes the ids that `look` found, and the remains of a save that was cut off."""
        if not look.held and not look.is_unfinished:
            return 0, 0
        left = {"tables": list(tables), "ids": list(ids), "snapshots": look.seen, "holding": look.snapshots}
        with shown("forgetting", progress) as native:
            return _native.delete_ids(str(self.path), left, native)

    def explained(self) -> set[Path]:
        """Returns the files of snapshots and log, and those that cannot have ids."""
        return {self.path / file for file in _native.tables_in(str(self.path))["files"]}


__all__ = ["StorePlace"]
