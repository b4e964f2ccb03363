"""A second directory with the files of a checkpoint, which stay when the first goes on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

MANIFEST = "manifest.json"


def mirror_checkpoint(source: Path, target: Path) -> None:
    """Makes `target` hold what the checkpoint directory `source` does, by hard links where the file system has them.

    Files of a checkpoint never change, and the manifest is replaced in one move: `target` holds its old checkpoint or
    the new one, whenever this ends. Nobody else may write to either meanwhile.
    """
    target.mkdir(exist_ok=True)
    names = _files(source)
    for name in names - _files(target):
        _link(source / name, target / name)
    beside = target / f"{MANIFEST}.new"
    shutil.copyfile(source / MANIFEST, beside)
    beside.replace(target / MANIFEST)
    for name in _files(target) - names:
        (target / name).unlink()


def _files(directory: Path) -> set[str]:
    """The names of all files but the manifest, and those, like the lock, whose name begins with a dot."""
    names = {path.name for path in directory.iterdir()}
    return {name for name in names if not name.startswith((".", MANIFEST))}


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        # A file system without hard links. The name appears with all of the content, as a link's does.
        beside = target.with_name(f"{MANIFEST}.copy")
        shutil.copyfile(source, beside)
        beside.replace(target)
