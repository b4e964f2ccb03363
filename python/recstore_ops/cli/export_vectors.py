"""The command `recstore export-vectors`: writes the rows of a finished run's table to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recstore_ops.cli.finished_run import FieldName, RunPath, TableName, WhichCheckpoint
from recstore_ops.config.command_options import path_option
from recstore_ops.config.progress_bars import progress_bar
from recstore_ops.training.run.finished_run import load
from recstore_ops.training.run.vectors import Vectors, check_output, write_vectors

_Output = Annotated[Path, path_option("A file to write; ends in .parquet or .npy.", "--output", "-o")]
_Replace = Annotated[bool, typer.Option("--replace", help="Replace the output if it is there.")]


def export_vectors_command(
    run: RunPath,
    *,
    table: TableName,
    output: _Output,
    field: FieldName = None,
    which: WhichCheckpoint = "best",
    replace: _Replace = False,
) -> None:
    """Write the vectors that a finished run has learnt, with their ids, rising.

    A .parquet file has the columns id and vector. For NAME.npy the ids are in NAME.ids.npy.
    """
    check_output(output, replaces=replace)
    vectors = Vectors(load(run, which=which), table, field)
    with progress_bar(None, total=len(vectors), desc="exporting", unit="row", unit_scale=True) as bar:
        files = write_vectors(output, vectors, bar.update)
    print(f"{' and '.join(map(str, files))}: {len(vectors):,} vectors of dim {vectors.dim}")
