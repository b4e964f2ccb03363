"""A saved run, read from its directory to continue from it: configuration, schema and one of its checkpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from recstore_ops import checkpoint, sharding
from recstore_ops.training.report.recorded_run import CONFIG, open_run
from recstore_ops.training.run.checkpoints import State, as_os_error, read_state, saved_tables
from recstore_ops.training.run.config import TrainingConfig
from recstore_ops.training.run.row_form import RowForm

Which = Literal["best", "last"]
CHECKPOINTS: dict[Which, str] = {"best": "best", "last": "checkpoint"}


@dataclass(frozen=True)
class SavedRun:
    """The saved state of a run.

    Attributes:
        path: the run's directory.
        config: its configuration.
        form: of its rows.
        checkpoint: the directory of the checkpoint.
        tables: the names of its tables in that checkpoint, which may have those of other programs on the same servers.
        state: the state of the run besides its tables.
    """

    path: Path
    config: TrainingConfig
    form: RowForm
    checkpoint: Path
    tables: tuple[str, ...]
    state: State

    @classmethod
    def read(cls, path: Path, which: Which) -> SavedRun:
        """Reads the directory of a run.

        Args:
            path: the directory.
            which: the checkpoint of the best evaluation or the last one.

        Raises:
            ValueError: there is no such run or no such checkpoint, the run's tables were `nn.Embedding`, or `which` is
                neither of its values.
            OSError: a file is damaged.
        """
        if which not in CHECKPOINTS:
            raise ValueError(f"expected one of {', '.join(CHECKPOINTS)} as checkpoint of a run, got {which!r}")
        config = read_config(path)
        if config.tables == "nn":
            raise ValueError(f"run {path} was trained with tables nn: its rows are not in tables of the store")
        directory = path / CHECKPOINTS[which]
        state = read_state(directory)
        if state is None:
            raise ValueError(f"run {path} has no checkpoint {directory.name}: nothing of it was saved")
        return cls(path, config, RowForm.read(path), directory, _own_tables(config, directory), state)

    def load_tables(self, group: dist.ProcessGroup | None = None) -> None:
        """Loads the tables of the checkpoint into this process, or the shards of them into each process of a group.

        Raises:
            OSError: a file is damaged, or the run continued and was saved since it was read here.
        """
        with as_os_error(f"run {self.path} cannot be loaded"):
            report = (
                checkpoint.load(self.checkpoint, tables=self.tables, progress=False)
                if group is None
                else sharding.load(self.checkpoint, group)
            )
        step = report.metadata["step"]
        if step != self.state["step"]:
            raise OSError(
                f"run {self.path} was saved after step {step:,} while what it knew after step "
                f"{self.state['step']:,} was read: read it once more"
            )


def _own_tables(config: TrainingConfig, directory: Path) -> tuple[str, ...]:
    prefix, saved = config.prefix, saved_tables(directory)
    own = tuple(table for table in saved if table.rpartition("/")[0] == prefix)
    if saved and not own:
        raise OSError(f"{directory} has no tables {prefix}/..., as the run is configured, but {', '.join(saved)}")
    return own


def short_name(table: str) -> str:
    """Returns a table's name without the model's: `v` of `fm/v`."""
    return table.rpartition("/")[2]


def read_config(run: Path) -> TrainingConfig:
    """Reads a run's `config.json`.

    Raises:
        ValueError: there is no such run, or it has an option that this version does not know.
        OSError: the file is damaged, or something in the directory is a link.
    """
    path = run / CONFIG
    try:
        with open_run(run) as files:
            values = json.loads(files.read(CONFIG))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"there is no run {run}: it has no config.json") from None
    except (ValueError, RecursionError) as error:
        raise OSError(f"{path} is damaged: {error}") from None
    if not isinstance(values, dict):
        raise OSError(f"{path} is damaged: expected an object, got {type(values).__name__}")
    try:
        return TrainingConfig.from_json(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
