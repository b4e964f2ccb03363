"""Looks after the directory of a checkpoint: compares its files, and takes old snapshots out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Literal

from recstore_ops import _native
from recstore_ops.checkpoint.arguments import checked_directory


@dataclass(frozen=True)
class FileFinding:
    """A file that is not as the manifest says.

    Attributes:
        kind: `damaged`: its content is another; `missing`; `unexplained`: the manifest does not list it.
        file: its name.
        message: what is wrong with it.
    """

    kind: Literal["damaged", "missing", "unexplained"]
    file: str
    message: str


@dataclass(frozen=True)
class VerifyReport:
    """The result of `verify`.

    Attributes:
        snapshots: how many snapshots the directory has.
        files: how many files they have.
        bytes: of these files.
        findings: what is not as it should be. Files that are unexplained harm no load.
    """

    snapshots: int
    files: int
    bytes: int
    findings: list[FileFinding] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Whether no file is damaged or missing."""
        return all(finding.kind == "unexplained" for finding in self.findings)


def verify(path: str | PathLike[str]) -> VerifyReport:
    """Reads every file of every snapshot of a directory, and compares lengths, headers and checksums.

    The tables of this process have no part in it. If a save runs meanwhile, the check begins anew.

    Args:
        path: the directory.

    Returns:
        The report, with the files that are damaged, missing or not explained by the manifest.

    Raises:
        ValueError: `path` is a URL.
        RuntimeError: the directory holds no checkpoint, or its manifest is damaged.
    """
    found = _native.verify(checked_directory(path, "verify"))
    return VerifyReport(**{**found, "findings": [FileFinding(**finding) for finding in found["findings"]]})


@dataclass(frozen=True)
class PruneReport:
    """The snapshots and files that `prune` takes out of a directory.

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
        keep: how many full snapshots stay, with the deltas that follow them, as `keep` of `save`. Those of another
            store stay too.
        dry_run: whether nothing changes.
        on_plan: called with what will be removed, before anything is.

    Returns:
        The snapshots and files that were removed, or would be.

    Raises:
        ValueError: `keep` is below 1, or `path` a URL.
        RuntimeError: the directory holds no checkpoint, or a save to it is in progress.
        OSError: the manifest cannot be written, or the name of a file that goes belongs to a link or something else;
            nothing has changed. Or a file cannot be removed, which does no harm.
    """
    directory = checked_directory(path, "prune")
    if type(keep) is not int or keep < 1:
        raise ValueError(f"keep must be an int of at least 1, got {keep!r}")
    plans: list[PruneReport] = []

    def tell(pruned: dict[str, Any]) -> None:
        plans.append(PruneReport(**pruned))
        if on_plan is not None:
            on_plan(plans[0])

    _native.prune(directory, min(keep, sys.maxsize), dry_run, tell)
    return plans[0]


__all__ = ["FileFinding", "PruneReport", "VerifyReport", "prune", "verify"]
