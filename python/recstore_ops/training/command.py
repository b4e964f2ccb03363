"""The command `recstore train`: from options to a configuration, and a run in its directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from recstore_ops.training.config import ModelName, OptimizerName, TrainingConfig
from recstore_ops.training.display import Display
from recstore_ops.training.input_files import find_input_files
from recstore_ops.training.loop import build_model, train
from recstore_ops.training.records import EpochRecord, best_record
from recstore_ops.training.run_directory import RunDirectory
from recstore_ops.training.text_format import FileFormat
from recstore_ops.training.training_input import TrainingInput, open_input

_INPUT = "Input"
_MODEL = "Model"
_OPTIMIZER = "Optimizer"
_LOOP = "Training"
_OUTPUT = "Output"

_MEBIBYTE = 2**20


def train_command(
    data: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="DATA",
            help="Training files, or one directory with files named train* and test* in it.",
            show_default=False,
        ),
    ] = None,
    test: Annotated[
        list[Path] | None,
        typer.Option(help="A test file; may be repeated.", rich_help_panel=_INPUT),
    ] = None,
    planted: Annotated[
        bool,
        typer.Option(
            "--planted",
            help="Train on generated rows with planted interactions.",
            rich_help_panel=_INPUT,
        ),
    ] = False,
    file_format: Annotated[
        FileFormat | None,
        typer.Option(
            "--format",
            help="Format of all files.",
            show_default="detected",
            rich_help_panel=_INPUT,
        ),
    ] = None,
    on_bad_line: Annotated[
        Literal["stop", "skip"],
        typer.Option(help="Stop at a bad line, or skip and count it.", rich_help_panel=_INPUT),
    ] = "stop",
    ignore_values: Annotated[
        bool,
        typer.Option("--ignore-values", help="Take every value as 1.", rich_help_panel=_INPUT),
    ] = False,
    cache_mb: Annotated[
        int,
        typer.Option(
            help="Keep training rows, and test rows, in memory if they need at most this many MiB.",
            min=0,
            rich_help_panel=_INPUT,
        ),
    ] = 1024,
    model: Annotated[
        ModelName,
        typer.Option(help="Logistic regression or factorization machine.", rich_help_panel=_MODEL),
    ] = "fm",
    dim: Annotated[
        int | None,
        typer.Option(help="Columns of the FM's factors.", show_default="8", rich_help_panel=_MODEL),
    ] = None,
    init_std: Annotated[
        float | None,
        typer.Option(
            help="Standard deviation of the FM's initial factors.",
            show_default="0.01",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    no_bias: Annotated[bool, typer.Option("--no-bias", help="A model without bias.", rich_help_panel=_MODEL)] = False,
    optimizer: Annotated[
        OptimizerName,
        typer.Option(
            help="Steps the tables; the bias follows the same rule in torch.optim, or Adagrad for ftrl.",
            rich_help_panel=_OPTIMIZER,
        ),
    ] = "adam",
    lr: Annotated[
        float | None,
        typer.Option(
            help="Learning rate.",
            show_default="0.002 adam, adamw; 0.05 adagrad, rowwise_adagrad; 0.1 sgd, ftrl",
            rich_help_panel=_OPTIMIZER,
        ),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(help="FTRL's name for --lr.", rich_help_panel=_OPTIMIZER),
    ] = None,
    beta: Annotated[
        float | None,
        typer.Option(help="FTRL only.", show_default="1", rich_help_panel=_OPTIMIZER),
    ] = None,
    l1: Annotated[
        float | None,
        typer.Option(help="FTRL only.", show_default="0", rich_help_panel=_OPTIMIZER),
    ] = None,
    l2: Annotated[
        float | None,
        typer.Option(help="FTRL only.", show_default="0", rich_help_panel=_OPTIMIZER),
    ] = None,
    weight_decay: Annotated[
        float | None,
        typer.Option(help="For sgd, adam and adamw; tables only.", rich_help_panel=_OPTIMIZER),
    ] = None,
    reduction: Annotated[
        Literal["mean", "sum"],
        typer.Option(
            help="Gradient over the rows of a batch; ftrl usually needs sum.",
            rich_help_panel=_OPTIMIZER,
        ),
    ] = "mean",
    batch_size: Annotated[int, typer.Option(help="Rows of one step.", rich_help_panel=_LOOP)] = 256,
    epochs: Annotated[int, typer.Option(help="Passes over the training rows, at most.", rich_help_panel=_LOOP)] = 20,
    no_shuffle: Annotated[
        bool,
        typer.Option("--no-shuffle", help="Keep the order of the file.", rich_help_panel=_LOOP),
    ] = False,
    shuffle_window: Annotated[
        int, typer.Option(help="Rows held in memory to shuffle.", rich_help_panel=_LOOP)
    ] = 65_536,
    validation_fraction: Annotated[
        float,
        typer.Option(help="Part of the training rows held out to decide when to stop.", rich_help_panel=_LOOP),
    ] = 0.1,
    patience: Annotated[
        int | None,
        typer.Option(
            help="Stop after this many epochs without a lower validation logloss; 0 never stops early.",
            show_default="2, or 0 without validation rows",
            rich_help_panel=_LOOP,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            help="Of initial values, shuffling, held-out rows and planted rows.",
            rich_help_panel=_LOOP,
        ),
    ] = 0,
    run_name: Annotated[
        str | None,
        typer.Option(
            help="Name of a new directory for the results.",
            show_default="model and time",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    runs_dir: Annotated[Path, typer.Option(help="Where runs are kept.", rich_help_panel=_OUTPUT)] = Path("runs"),
) -> None:
    """Train a click model on libsvm (libfm) or libffm files; reports AUC and logloss per epoch.

    Results go to RUNS_DIR/RUN_NAME: config.json, metrics.jsonl and learning_curve.png.
    """
    train_files, test_files = find_input_files(data or [], test or [])
    config = TrainingConfig(
        train=train_files,
        test=test_files,
        planted=planted,
        file_format=file_format,
        on_bad_line=on_bad_line,
        ignore_values=ignore_values,
        cache_bytes=cache_mb * _MEBIBYTE,
        model=model,
        dim=dim,
        init_std=init_std,
        bias=not no_bias,
        optimizer=optimizer,
        lr=_learning_rate(optimizer, lr, alpha),
        beta=beta,
        l1=l1,
        l2=l2,
        weight_decay=weight_decay,
        reduction=reduction,
        batch_size=batch_size,
        epochs=epochs,
        shuffle=not no_shuffle,
        shuffle_window=shuffle_window,
        validation_fraction=validation_fraction,
        patience=patience,
        seed=seed,
    )
    _run(config, runs_dir, run_name)


class _RunObserver:
    """Hands each epoch to the run's directory and to the display."""

    def __init__(self, run: RunDirectory, display: Display, rows: TrainingInput) -> None:
        self._run = run
        self._rows = rows
        self._display = display
        self.on_batch = display.on_batch

    def on_epoch(self, record: EpochRecord) -> None:
        self._run.record(record)
        self._display.on_epoch(record)
        if record.epoch == 1:
            for file in self._rows.files:
                if file.skipped_lines > 0:
                    self._display.note(f"bad lines skipped: {file.skipped_lines}; the first: {file.first_skipped}")


def _run(config: TrainingConfig, runs_dir: Path, run_name: str | None) -> None:
    console = Console()
    rows = open_input(config)
    with (
        RunDirectory(runs_dir, run_name, config) as run,
        Display(console, config.epochs) as display,
    ):
        if rows.note:
            display.note(rows.note)
        observer = _RunObserver(run, display, rows)
        # Initial values depend on the table's name: it must not be the run's, or no run could be repeated.
        model = build_model(config, name=config.model)
        records = train(config, model, rows=rows, observer=observer)
    console.print(_summary(records), highlight=False, soft_wrap=True)
    console.print(f"results: {run.path}", markup=False, highlight=False, soft_wrap=True)


def _learning_rate(optimizer: OptimizerName, lr: float | None, alpha: float | None) -> float | None:
    if alpha is None:
        return lr
    if optimizer != "ftrl":
        raise ValueError(f"optimizer {optimizer} takes no alpha; give lr")
    if lr is not None:
        raise ValueError("alpha and lr are the same for ftrl; give one of them")
    return alpha


def _summary(records: list[EpochRecord]) -> str:
    best = best_record(records)
    reason = "lowest validation logloss" if best.validation else "the last"
    if best.test is None:
        return f"epoch {best.epoch} ({reason})"
    test_auc = "undefined" if best.test.has_one_class else f"{best.test.auc:.4f}"
    return f"epoch {best.epoch} ({reason}): test AUC {test_auc}, logloss {best.test.logloss:.4f} nats"
