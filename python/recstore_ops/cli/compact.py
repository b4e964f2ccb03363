"""The command `recstore compact`: makes one full snapshot of a chain of deltas."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recstore_ops import checkpoint
from recstore_ops.config.command_options import read_user_path


def compact_command(
    path: Annotated[Path, typer.Argument(help="The directory of a checkpoint.", parser=read_user_path)],
) -> None:
    """Replace the newest full snapshot and its deltas by one full snapshot.

    This needs as much memory as the tables need in training. No process may save to the directory meanwhile.
    """
    try:
        report = checkpoint.compact(path)
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    if report is None:
        print(f"{path}: the newest snapshot is a full one; there is nothing to compact")
    else:
        print(f"{path}: snapshot {report.snapshot} is full now: {report.rows:,} rows, {report.bytes:,} bytes")
