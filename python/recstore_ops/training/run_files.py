"""The files of a run, opened in its directory: none is a link, or something that makes readers wait."""

from __future__ import annotations

import os
from pathlib import Path

from recstore_ops.config.directory import Directory

CONFIG = "config.json"
LAST, BEST = "checkpoint", "best"
"""The directories of a run's checkpoints."""


def open_run(path: Path) -> Directory:
    """Opens the directory of a run, whose own path may be a link.

    Raises:
        OSError: it is not there, or a link or something else lies where it and its checkpoints have files.
    """
    run = Directory(path)
    try:
        run.check_plain()
        for name in (LAST, BEST):
            if run.kind(name) is not None:
                run.subdirectory(name).check_plain()
    except OSError as error:
        run.close()
        way = (
            f"{error.strerror}; a run may lie on another disk as a whole: link {path} itself, or give another runs-dir"
        )
        raise OSError(error.errno, way, os.fspath(error.filename)) from None
    return run


__all__ = ["BEST", "CONFIG", "LAST", "open_run"]
