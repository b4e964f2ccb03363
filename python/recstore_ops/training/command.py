"""The command `recstore train`: from options to a configuration, and a run in its directory."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from recstore_ops.config.row_types import RowTypeName
from recstore_ops.training.config import ModelName, OptimizerName, TablesName, TrainingConfig
from recstore_ops.training.formats import FormatName
from recstore_ops.training.generated.planted import PlantedKind
from recstore_ops.training.rows.input_files import find_input_files
from recstore_ops.training.run import run_comparison, run_training
from recstore_ops.training.run_checkpoints import SaveOptions
from recstore_ops.training.schedules import ScheduleName
from recstore_ops.training.stop_request import RunStopped

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
            help="Training files, or one directory with files named train* and test* in it. Compressed ones "
            "(gzip, bz2, xz, zstd, lz4) are recognised.",
            show_default=False,
        ),
    ] = None,
    test: Annotated[
        list[Path] | None,
        typer.Option(help="A test file; may be repeated.", rich_help_panel=_INPUT),
    ] = None,
    planted: Annotated[
        PlantedKind | None,
        typer.Option(
            help="Train on generated rows with planted interactions instead: pairs of rank 4, pairs of rank 8, or "
            "triples of fields.",
            show_default=False,
            rich_help_panel=_INPUT,
        ),
    ] = None,
    planted_rows: Annotated[
        int | None,
        typer.Option(help="Training rows to generate.", show_default="by the kind", rich_help_panel=_INPUT),
    ] = None,
    file_format: Annotated[
        FormatName | None,
        typer.Option("--format", help="Format of all files.", show_default="detected", rich_help_panel=_INPUT),
    ] = None,
    on_bad_line: Annotated[
        Literal["stop", "skip"],
        typer.Option(help="Stop at a bad line, or skip and count it.", rich_help_panel=_INPUT),
    ] = "stop",
    ignore_values: Annotated[
        bool,
        typer.Option("--ignore-values", help="Take every value of libsvm and libffm as 1.", rich_help_panel=_INPUT),
    ] = False,
    num_fields: Annotated[
        int | None,
        typer.Option(
            help="Fields of a libsvm or libffm row, for models that tell them apart.",
            show_default="from the first rows",
            rich_help_panel=_INPUT,
        ),
    ] = None,
    rating_threshold: Annotated[
        float,
        typer.Option(help="The least MovieLens rating that counts as positive.", rich_help_panel=_INPUT),
    ] = 4.0,
    label_column: Annotated[
        str | None,
        typer.Option(
            help="The column of Parquet files with labels 0 and 1.",
            show_default="label or click",
            rich_help_panel=_INPUT,
        ),
    ] = None,
    drop_column: Annotated[
        list[str] | None,
        typer.Option(help="A column of Parquet files that is no feature; may be repeated.", rich_help_panel=_INPUT),
    ] = None,
    hash_buckets: Annotated[
        int | None,
        typer.Option(
            help="Hash all ids to this many. Without it every id has a row of its own, and no pass over the data is "
            "needed to know them beforehand.",
            show_default="raw ids",
            rich_help_panel=_INPUT,
        ),
    ] = None,
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
        typer.Option(
            help="Logistic regression, factorization machine, DeepFM, DLRM, Wide & Deep.", rich_help_panel=_MODEL
        ),
    ] = "fm",
    dim: Annotated[
        int | None,
        typer.Option(help="Columns of an id's factors; not lr.", show_default="8", rich_help_panel=_MODEL),
    ] = None,
    init_std: Annotated[
        float | None,
        typer.Option(
            help="Standard deviation of initial factors; not lr.", show_default="0.01", rich_help_panel=_MODEL
        ),
    ] = None,
    hidden: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Sizes of the perceptron's hidden layers; deepfm, dlrm, wide_deep.",
            show_default="64,32",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    dropout: Annotated[
        float | None,
        typer.Option(help="After each hidden layer.", show_default="0", rich_help_panel=_MODEL),
    ] = None,
    bottom: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Hidden layers of dlrm's perceptron of dense features.",
            show_default="64",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    cross: Annotated[
        list[str] | None,
        typer.Option(
            metavar="I,J",
            help="Two fields, by number from 0, whose pairs of ids get a weight each in wide_deep; may be repeated.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    no_bias: Annotated[bool, typer.Option("--no-bias", help="A model without bias.", rich_help_panel=_MODEL)] = False,
    tables: Annotated[
        TablesName,
        typer.Option(
            help="What holds the tables: the store, or torch.nn.Embedding(sparse=True), which needs a pass over the "
            "data for its vocabulary.",
            rich_help_panel=_MODEL,
        ),
    ] = "store",
    row_type: Annotated[
        RowTypeName,
        typer.Option(
            help="The type in which the store keeps rows; those of 16 bits take half the memory.",
            rich_help_panel=_MODEL,
        ),
    ] = "float32",
    admit_after: Annotated[
        int | None,
        typer.Option(
            metavar="STEPS",
            help="Give an id a row with its update in that many steps; rarer ids cost no memory.",
            show_default="1",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    ttl: Annotated[
        int | None,
        typer.Option(
            metavar="STEPS",
            help="Rows without an update for longer leave.",
            show_default="never",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    min_norm: Annotated[
        float | None,
        typer.Option(help="Rows of a smaller L2 norm leave.", show_default="none", rich_help_panel=_MODEL),
    ] = None,
    capacity: Annotated[
        int | None,
        typer.Option(
            metavar="ROWS", help="Of more rows in a table some leave.", show_default="none", rich_help_panel=_MODEL
        ),
    ] = None,
    eviction_policy: Annotated[
        Literal["lru", "lfu"] | None,
        typer.Option(
            help="Which rows leave for --capacity: the least recently, or least frequently updated.",
            show_default="lru",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    eviction_interval: Annotated[
        int | None,
        typer.Option(
            metavar="STEPS", help="Between two sweeps for rows that leave.", show_default="1000", rich_help_panel=_MODEL
        ),
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            help="The most memory of each of the model's tables, as 4GB or 512MiB. Without --disk the run ends where "
            "rows would exceed it.",
            show_default=False,
            rich_help_panel=_MODEL,
        ),
    ] = None,
    disk: Annotated[
        Path | None,
        typer.Option(
            help="A directory for the rows that --memory-limit leaves no room for.",
            show_default=False,
            rich_help_panel=_MODEL,
        ),
    ] = None,
    baseline: Annotated[
        Literal["nn"] | None,
        typer.Option(
            help="Train with the store and with nn.Embedding(sparse=True), equal models and seeds, and report quality, "
            "time and memory side by side.",
            show_default=False,
            rich_help_panel=_MODEL,
        ),
    ] = None,
    optimizer: Annotated[
        OptimizerName,
        typer.Option(help="Steps the tables.", rich_help_panel=_OPTIMIZER),
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
    convention: Annotated[
        Literal["recstore", "torch"] | None,
        typer.Option(
            help="How adagrad and rowwise_adagrad divide.", show_default="recstore", rich_help_panel=_OPTIMIZER
        ),
    ] = None,
    dense_optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="An optimizer of torch.optim, for all parameters outside the tables.",
            show_default="the tables' rule; adagrad for ftrl",
            rich_help_panel=_OPTIMIZER,
        ),
    ] = None,
    dense_lr: Annotated[
        float | None,
        typer.Option(help="Its learning rate.", show_default="--lr", rich_help_panel=_OPTIMIZER),
    ] = None,
    dense_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A further argument of it, as weight_decay=0.01; may be repeated.",
            rich_help_panel=_OPTIMIZER,
        ),
    ] = None,
    schedule: Annotated[
        ScheduleName,
        typer.Option(
            help="Of the learning rates: linear and cosine fall towards 0 over the run, exponential after each epoch, "
            "plateau whenever the validation logloss does not fall.",
            rich_help_panel=_OPTIMIZER,
        ),
    ] = "constant",
    gamma: Annotated[
        float | None,
        typer.Option(
            help="What exponential and plateau multiply with.", show_default="0.9, 0.5", rich_help_panel=_OPTIMIZER
        ),
    ] = None,
    warmup_steps: Annotated[
        int,
        typer.Option(help="Steps in which the learning rates rise from 0.", rich_help_panel=_OPTIMIZER),
    ] = 0,
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
    evaluate_every: Annotated[
        int | None,
        typer.Option(help="Steps between evaluations.", show_default="each epoch", rich_help_panel=_LOOP),
    ] = None,
    patience: Annotated[
        int | None,
        typer.Option(
            help="Stop after this many evaluations without a lower validation logloss; 0 never stops early.",
            show_default="2, or 0 without validation rows",
            rich_help_panel=_LOOP,
        ),
    ] = None,
    auc_by: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD",
            help="Also report the AUC within each id of this field: user of MovieLens, C1 of Criteo, field_0 of "
            "libsvm, a column of Parquet.",
            rich_help_panel=_LOOP,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            help="Of initial values, shuffling, held-out rows, dropout and planted rows.",
            rich_help_panel=_LOOP,
        ),
    ] = 0,
    log_every: Annotated[
        int, typer.Option(help="Steps between records of loss, speed and memory.", rich_help_panel=_OUTPUT)
    ] = 100,
    run_name: Annotated[
        str | None,
        typer.Option(
            help="Name of a new directory for the results.",
            show_default="model and time",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    runs_dir: Annotated[Path, typer.Option(help="Where runs are kept.", rich_help_panel=_OUTPUT)] = Path("runs"),
    save_every: Annotated[
        int | None,
        typer.Option(
            metavar="STEPS",
            help="Steps between saves, beside those at the end of each epoch.",
            show_default="each epoch",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(help="Full snapshots that stay of a run.", show_default="1", rich_help_panel=_OUTPUT),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the run of that name from its last save, with the options that it began with.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
) -> None:
    """Train a click model on Criteo, Avazu, MovieLens, libsvm, libffm or Parquet files.

    Tables grow by id while rows stream in: no vocabulary, no preprocessing.

    Reports logloss, AUC and calibration on rows held out and on test rows.

    RUNS_DIR/RUN_NAME gets configuration, metrics, TensorBoard events, plots, and checkpoints: the last save and the
    best evaluation's. Ctrl-C and SIGTERM save and end the run; --resume goes on.
    """
    train_files, test_files = find_input_files(data or [], test or [])
    config = TrainingConfig(
        train=train_files,
        test=test_files,
        planted=planted,
        planted_train_rows=planted_rows,
        file_format=file_format,
        on_bad_line=on_bad_line,
        ignore_values=ignore_values,
        num_fields=num_fields,
        rating_threshold=rating_threshold,
        label_column=label_column,
        drop_columns=tuple(drop_column or ()),
        hash_buckets=hash_buckets,
        cache_bytes=cache_mb * _MEBIBYTE,
        model=model,
        dim=dim,
        init_std=init_std,
        hidden=_integers("hidden", hidden),
        dropout=dropout,
        bottom=_integers("bottom", bottom),
        crosses=_crosses(cross),
        bias=not no_bias,
        tables=tables,
        row_type=row_type,
        admit_after=admit_after,
        ttl=ttl,
        min_norm=min_norm,
        capacity=capacity,
        eviction_policy=eviction_policy,
        eviction_interval=eviction_interval,
        memory_limit=_bytes("memory-limit", memory_limit),
        disk=None if disk is None else str(disk),
        optimizer=optimizer,
        lr=_learning_rate(optimizer, lr, alpha),
        beta=beta,
        l1=l1,
        l2=l2,
        weight_decay=weight_decay,
        convention=convention,
        dense_optimizer=dense_optimizer,
        dense_lr=dense_lr,
        dense_options=dict(map(_dense_option, dense_option or ())),
        schedule=schedule,
        gamma=gamma,
        warmup_steps=warmup_steps,
        reduction=reduction,
        batch_size=batch_size,
        epochs=epochs,
        shuffle=not no_shuffle,
        shuffle_window=shuffle_window,
        validation_fraction=validation_fraction,
        evaluate_every=evaluate_every,
        patience=patience,
        auc_by=auc_by,
        seed=seed,
        log_every=log_every,
    )
    if baseline is not None:
        _refuse_saving(save_every, keep, resume)
        run_comparison(config, runs_dir, run_name)
        return
    saving = SaveOptions(save_every, 1 if keep is None else keep, resume)
    try:
        run_training(config, runs_dir, run_name, saving)
    except RunStopped as stopped:
        typer.echo(f"recstore: {stopped}", err=True)
        raise typer.Exit(stopped.exit_code) from None
    except RuntimeError as error:
        # A step that was refused, for want of memory or of the disk.
        if not str(error).startswith("emb_update: "):
            raise
        raise ValueError(str(error)) from None


def _refuse_saving(save_every: int | None, keep: int | None, resume: bool) -> None:
    given = {"save-every": save_every is not None, "keep": keep is not None, "resume": resume}
    names = [name for name, is_given in given.items() if is_given]
    if names:
        raise ValueError(f"a comparison with a baseline is not saved: it takes no {' and no '.join(names)}")


def _integers(name: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"{name} takes whole numbers separated by commas, got {text!r}") from None


_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def _bytes(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    number = text.rstrip(string.ascii_letters + " ")
    unit = text[len(number) :].strip().upper()
    try:
        return int(float(number) * _BYTES[unit])
    except (ValueError, KeyError, OverflowError):
        raise ValueError(f"{name} takes bytes, as 4GB or 512MiB, got {text!r}") from None


def _crosses(texts: list[str] | None) -> tuple[tuple[int, int], ...] | None:
    return None if not texts else tuple(map(_cross, texts))


def _cross(text: str) -> tuple[int, int]:
    numbers = _integers("cross", text) or ()
    if len(numbers) != 2:
        raise ValueError(f"cross takes two fields separated by a comma, got {text!r}")
    return numbers[0], numbers[1]


def _dense_option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"dense-option takes name=value, got {text!r}")
    return name.strip(), _literal(value.strip())


def _literal(text: str) -> Any:
    """Reads a number, a truth value or a list of them; anything else is text."""
    try:
        value = json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text
    return tuple(value) if isinstance(value, list) else value


def _learning_rate(optimizer: OptimizerName, lr: float | None, alpha: float | None) -> float | None:
    if alpha is None:
        return lr
    if optimizer != "ftrl":
        raise ValueError(f"optimizer {optimizer} takes no alpha; give lr")
    if lr is not None:
        raise ValueError("alpha and lr are the same for ftrl; give one of them")
    return alpha
