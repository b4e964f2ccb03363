"""The command `recstore generate`: files to try training and measure it with, of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from recstore_ops.config.command_options import read_user_path
from recstore_ops.config.progress_bars import progress_bar
from recstore_ops.training.synthetic.criteo import write_criteo


def generate_command(
    path: Annotated[
        Path,
        typer.Argument(help="The file to write; one that ends in .gz is compressed.", parser=read_user_path),
    ],
    rows: Annotated[int, typer.Option(help="Lines to write.")] = 1_000_000,
    seed: Annotated[int, typer.Option(help="Seed of the rows; use another one for test files.", min=0)] = 0,
    model_seed: Annotated[
        int, typer.Option(help="Seed of the labels' model; use the same one for test files.", min=0)
    ] = 0,
) -> None:
    """Write generated rows in the format of Criteo's display-advertising data.

    Integers, categories, gaps and popularity are like the real ones; labels depend on categories and pairs of them.
    """
    console = Console()
    with progress_bar(None, total=rows, desc="writing", unit="row", unit_scale=True, leave=False) as bar:
        written = write_criteo(path, rows, seed=seed, model_seed=model_seed, on_rows=bar.update)
    console.print(
        f"{path}: {written.num_rows:,} rows, {written.num_positives / written.num_rows:.1%} positive; the true model "
        f"has AUC {written.bayes_auc:.4f}, logloss {written.bayes_logloss:.4f} nats",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
