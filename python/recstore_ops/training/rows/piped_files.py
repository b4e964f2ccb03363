"""Files that can be read only once, as the pipe that a shell makes of `<(zcat rows.gz)`."""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
from pathlib import Path


def kept(path: Path) -> Path:
    """Returns a path, or for a pipe that of a copy, which goes at the end of the process.

    Rows are read several times: to tell their format, for each epoch.
    """
    if not path.is_fifo():
        return path
    with tempfile.NamedTemporaryFile(prefix="recstore-", delete=False) as copy:
        atexit.register(Path(copy.name).unlink, missing_ok=True)
        print(f"{path} can be read only once: copying it to {copy.name}", file=sys.stderr, flush=True)
        with open(path, "rb") as pipe:
            shutil.copyfileobj(pipe, copy)
    return Path(copy.name)
