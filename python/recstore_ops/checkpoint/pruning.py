"""Takes old snapshots out of a directory, and removes the files that its manifest lists for these alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike

from recstore_ops.checkpoint.manifest import (
    Manifest,
    files_of,
    locked,
    read_manifest,
    write_manifest,
)
from recstore_ops.checkpoint.place import checked_directory


@dataclass(frozen=True)
class PruneReport:
    """What is taken out of a directory.

    Attributes:
        kept: the snapshots that stay, the oldest first.
        snapshots: those that go.
        files: the bytes of each file that goes, by its name: all that the manifest lists for the snapshots that go and
            for none that stays.
    """

    kept: list[str]
    snapshots: list[str]
    files: dict[str, int]


def prune(
    path: str | PathLike[str],
    keep: int,
    *,
    dry_run: bool = False,
    on_plan: Callable[[PruneReport], None] | None = None,
) -> PruneReport:
    """Takes all but the newest snapshots out of a directory, and removes their files. It removes no other file.

    Args:
        path: the directory.
        keep: how many full snapshots stay, with the deltas that follow them, as `keep` of `save`.
        dry_run: whether nothing changes.
        on_plan: called with what will be removed, before anything is.

    Returns:
        What was removed, or would be.

    Raises:
        ValueError: `keep` is below 1, or `path` a URL.
        RuntimeError: the directory holds no checkpoint, or somebody saves to it.
        OSError: the manifest cannot be written, or a name of a file that goes is that of a link or something else;
            nothing has changed. Or a file cannot be removed, which does no harm.
    """
    directory = checked_directory(path, "prune")
    if type(keep) is not int or keep < 1:
        raise ValueError(f"keep must be an int of at least 1, got {keep!r}")
    # Without one here, no lock is made here either.
    manifest = read_manifest(directory)
    if dry_run:
        plan = _plan(manifest, keep)
        _tell(on_plan, plan)
        return plan
    with locked(directory):
        manifest = read_manifest(directory)
        plan = _plan(manifest, keep)
        _tell(on_plan, plan)
        _carry_out(manifest, plan)
    return plan


def _tell(on_plan: Callable[[PruneReport], None] | None, plan: PruneReport) -> None:
    if on_plan is not None:
        on_plan(plan)


def _plan(manifest: Manifest, keep: int) -> PruneReport:
    full = [number for number, snapshot in enumerate(manifest.snapshots) if snapshot["parent"] is None]
    first = full[-keep] if len(full) > keep else 0
    dropped, kept = manifest.snapshots[:first], manifest.snapshots[first:]
    needed = {file["file"] for snapshot in kept for file in files_of(snapshot)}
    files = {file["file"]: file["bytes"] for snapshot in dropped for file in files_of(snapshot)}
    return PruneReport(
        kept=[snapshot["id"] for snapshot in kept],
        snapshots=[snapshot["id"] for snapshot in dropped],
        files={name: size for name, size in files.items() if name not in needed},
    )


def _carry_out(manifest: Manifest, plan: PruneReport) -> None:
    if not plan.snapshots:
        return
    kept, directory = set(plan.kept), manifest.directory
    for name in plan.files:
        with suppress(FileNotFoundError):
            directory.open(name).close()  # What is no file stays, and so does all else.
    write_manifest(directory, [snapshot for snapshot in manifest.snapshots if snapshot["id"] in kept])
    for name in plan.files:
        with suppress(FileNotFoundError):
            directory.remove_file(name)
    directory.sync()


__all__ = ["PruneReport", "prune"]
