"""The command `recstore train`: from options to a configuration, and a run in its directory.

The options of the configuration are in its fields, `recstore_ops.training.run.config`; here are all others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from recstore_ops import _native
from recstore_ops.config.command_options import path_option, read_user_path, takes_options_of
from recstore_ops.config.option import errors_name_options, field_values
from recstore_ops.training.data.input_files import find_input_files, kept
from recstore_ops.training.run.checkpoints import SaveOptions
from recstore_ops.training.run.config import TrainingConfig
from recstore_ops.training.run.input_config import FollowOptions
from recstore_ops.training.run.stopping import RunStopped
from recstore_ops.training.run.training_run import run_comparison, run_training

_Data = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="DATA",
        parser=read_user_path,
        help="Training files, or one directory with train* and test* or part-* in it. Compressed ones (gzip, bz2, xz, "
        "zstd, lz4, zip) are recognised.",
        show_default=False,
    ),
]
_FollowEvery = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Polling interval for new files.",
        show_default="1",
        rich_help_panel="Input",
    ),
]
_FollowUntilIdle = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="End the run when no file came for this long.",
        show_default="never",
        rich_help_panel="Input",
    ),
]
_FollowUntil = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="End the run when a file of this name exists.",
        show_default="never",
        rich_help_panel="Input",
    ),
]
_Test = Annotated[
    list[Path] | None,
    path_option("A test file; may be repeated.", shown=True, panel="Input"),
]
_Alpha = Annotated[float | None, typer.Option(help="FTRL's name for --lr.", rich_help_panel="Optimizer")]
_Baseline = Annotated[
    Literal["nn"] | None,
    typer.Option(
        help="Train with nn.Embedding(sparse=True) too, and compare quality, time and memory.",
        show_default=False,
        rich_help_panel="Model",
    ),
]
_RunName = Annotated[
    str | None,
    typer.Option(
        help="Name of a new directory for the results.", show_default="model and time", rich_help_panel="Output"
    ),
]
_RunsDir = Annotated[Path, path_option("Where runs are kept.", shown=True, panel="Output")]
_SaveEvery = Annotated[
    int | None,
    typer.Option(
        metavar="STEPS",
        help="Steps between saves within an epoch.",
        show_default="each epoch",
        rich_help_panel="Output",
    ),
]
_Keep = Annotated[
    int | None, typer.Option(help="Full snapshots of the run to keep.", show_default="1", rich_help_panel="Output")
]
_Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Resume the run of that name from its last save, with its options.",
        rich_help_panel="Output",
    ),
]
_ReplaceTables = Annotated[
    bool,
    typer.Option(
        "--replace-tables",
        help="Overwrite rows that its tables have already.",
        rich_help_panel="Output",
    ),
]
_Profile = Annotated[
    bool,
    typer.Option("--profile", help="Show the time of each phase at the end.", rich_help_panel="Output"),
]


@takes_options_of(TrainingConfig)
def train_command(
    data: _Data = None,
    test: _Test = None,
    *,
    follow_every: _FollowEvery = None,
    follow_until_idle: _FollowUntilIdle = None,
    follow_until: _FollowUntil = None,
    alpha: _Alpha = None,
    baseline: _Baseline = None,
    run_name: _RunName = None,
    runs_dir: _RunsDir = Path("runs"),
    save_every: _SaveEvery = None,
    keep: _Keep = None,
    resume: _Resume = False,
    replace_tables: _ReplaceTables = False,
    profile: _Profile = False,
    **given: Any,
) -> None:
    """Train a model of clicks, or for retrieval, on CSV, Parquet, Criteo, Avazu, MovieLens, libsvm or libffm files.

    Tables grow by id while rows stream in: no vocabulary, no preprocessing. The roles found for columns of CSV and
    Parquet files are shown before training; --column and --schema change them.

    Reports logloss, AUC and calibration on held-out rows and on test rows; for two towers recall@10 and NDCG@10.
    With --follow-files there is no DATA: the run waits for files. It takes each file once, when the file has stopped
    growing, and evaluates it before it trains on it.

    RUNS_DIR/RUN_NAME gets configuration, metrics, TensorBoard events, plots, and checkpoints: the last save and the
    best evaluation's. Ctrl-C and SIGTERM save and end the run; --resume continues.
    """
    with errors_name_options(TrainingConfig):
        config = _configuration(data, test, alpha, given)
        following = _following(config, follow_every, follow_until_idle, follow_until)
        if baseline is not None:
            _refuse_saving(save_every, keep, resume, replace_tables)
            _refuse("a comparison with a baseline takes", {"profile": profile or None})
            run_comparison(config, runs_dir, run_name)
        else:
            saving = SaveOptions(save_every, 1 if keep is None else keep, resume, replace_tables)
            _run(config, runs_dir, run_name, saving, following, profile)


def _configuration(
    data: list[Path] | None, test: list[Path] | None, alpha: float | None, given: dict[str, Any]
) -> TrainingConfig:
    train_files, test_files = find_input_files([kept(path) for path in data or []], [kept(path) for path in test or []])
    values = field_values(TrainingConfig, given)
    values["lr"] = _learning_rate(given["optimizer"], given["lr"], alpha)
    return TrainingConfig(train=train_files, test=test_files, **values)


def _following(
    config: TrainingConfig, every: float | None, until_idle: float | None, until: str | None
) -> FollowOptions:
    if config.follow_files is None:
        given = {"follow-every": every, "follow-until-idle": until_idle, "follow-until": until}
        _refuse("a run without follow-files takes", given)
    return FollowOptions(FollowOptions.every if every is None else every, until_idle, until)


def _run(
    config: TrainingConfig,
    runs_dir: Path,
    run_name: str | None,
    saving: SaveOptions,
    following: FollowOptions,
    profile: bool,
) -> None:
    try:
        run_training(config, runs_dir, run_name, saving, following, profile=profile)
    except RunStopped as stopped:
        typer.echo(f"recstore: {stopped}", err=True)
        raise typer.Exit(stopped.exit_code) from None
    except RuntimeError as error:
        # A step that was refused, for want of memory or of the disk.
        if _native.failed_operator(str(error)) != "emb_update":
            raise
        raise ValueError(str(error)) from None


def _refuse_saving(save_every: int | None, keep: int | None, resume: bool, replace_tables: bool) -> None:
    # None alone counts as not given: `keep` gets its default later, so that even `--keep 1` is refused here.
    given = {"save-every": save_every, "keep": keep, "resume": resume or None}
    _refuse("a comparison with a baseline is not saved: it takes", given)
    _refuse("a comparison with a baseline takes", {"replace-tables": replace_tables or None})


def _refuse(who_takes: str, options: dict[str, Any]) -> None:
    """Raises ValueError if one of the options is given."""
    if names := [name for name, value in options.items() if value is not None]:
        raise ValueError(f"{who_takes} no {' and no '.join(names)}")


def _learning_rate(optimizer: str, lr: float | None, alpha: float | None) -> float | None:
    if alpha is None:
        return lr
    if optimizer != "ftrl":
        raise ValueError(f"optimizer {optimizer} takes no alpha; give lr")
    if lr is not None:
        raise ValueError("alpha and lr are the same for ftrl; give one of them")
    return alpha
