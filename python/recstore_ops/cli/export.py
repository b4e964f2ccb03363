"""The command `recstore export`: the model of a finished run as a bundle, for programs that only predict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from recstore_ops.cli.finished_run import RunPath, WhichCheckpoint, rows_like_trained
from recstore_ops.config.command_options import path_option, read_user_path
from recstore_ops.serving import EncodingName
from recstore_ops.training.run.exported_run import export_run, first_rows, tensors_of
from recstore_ops.training.run.finished_run import load

Rows = Annotated[
    list[Path] | None,
    path_option("Files like those that the run was trained on; may be repeated.", shown="the run's own"),
]


def export_command(
    run: RunPath,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The directory of the bundle.", parser=read_user_path)
    ],
    *,
    encoding: Annotated[EncodingName, typer.Option(help="How rows are kept.")] = "float32",
    rows: Rows = None,
    which: WhichCheckpoint = "best",
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Also compile the program with AOTInductor; needs a C++ compiler.")
    ] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Overwrite an existing bundle.")] = False,
) -> None:
    """Write the model of a finished run as a bundle: a directory with its program and its tables, frozen.

    recstore_ops.load_bundle(DIR) runs it in a fresh process, without the run. The first 4,096 rows decide which tensors
    the bundle takes: ids [B, F] if they have one id in every field, else bags of ids with lengths. Then the bundle
    predicts these rows, and its results are compared with the model's.
    """
    loaded = load(run, which=which)
    first = first_rows(rows_like_trained(loaded, rows))
    bundle = export_run(loaded, [first], directory, encoding=encoding, compiled=compiled, replace=replace)
    name, given = next(iter(bundle(**tensors_of(first)).items()))
    with torch.no_grad():
        difference = float((given - loaded.model(first)).abs().max())
    for kind, tensors in (("takes", bundle.manifest.inputs), ("gives", bundle.manifest.outputs)):
        print(f"{kind} {', '.join(_shown(tensor) for tensor in tensors)}")
    for table in bundle.tables.values():
        print(f"table {table.name}: {table.rows:,} rows of dim {table.dim}, {table.encoding}")
    print(f"{name} of {len(first):,} rows differ from the model's by {difference:.3g} at most")
    if encoding == "float32" and not compiled and difference > 0:
        raise ValueError(f"{directory} gives other {name} than the model: a fault of the export")
    print(directory)


def _shown(tensor: dict[str, object]) -> str:
    return f"{tensor['name']} {tensor['dtype']} {tensor['shape']}"
