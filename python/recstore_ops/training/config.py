"""What a training run is configured by; `config.json` of a run is exactly this."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from recstore_ops.training.text_format import FileFormat

ModelName = Literal["lr", "fm"]
OptimizerName = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "ftrl"]

DEFAULT_LR: dict[OptimizerName, float] = {
    "sgd": 0.1,
    "adagrad": 0.05,
    "rowwise_adagrad": 0.05,
    "adam": 2e-3,
    "adamw": 2e-3,
    "ftrl": 0.1,
}
_FTRL_DEFAULTS = {"beta": 1.0, "l1": 0.0, "l2": 0.0}
_DECAYING = ("sgd", "adam", "adamw")


@dataclass
class TrainingConfig:
    """Configuration of `recstore_ops.training.train`.

    Attributes:
        train, test: libsvm or libffm files.
        planted: train on `planted_interactions(seed)` instead of files.
        file_format: None detects it.
        on_bad_line: "stop" or "skip" (and count).
        ignore_values: take every feature value as 1.
        model: "lr" or "fm".
        dim, init_std: columns of the FM's factors (default 8) and the standard deviation of their
            initial values (default 0.01).
        bias: whether the model has one.
        optimizer: the rule by which the store steps the tables.
        lr: learning rate, or FTRL's alpha; None takes `DEFAULT_LR`.
        beta, l1, l2: of FTRL; default 1, 0, 0.
        weight_decay: of sgd, adam and adamw; None takes the store's default.
        batch_size: rows of one step.
        epochs: passes over the training rows, at most.
        reduction: whether the gradient is the mean or the sum over a batch's rows.
        shuffle, shuffle_window: shuffle anew in each epoch, within windows of that many rows.
        seed: of the planted rows, the split, the shuffling and the initial values.
        validation_fraction: part of the training rows held out for validation.
        patience: stop after that many epochs in a row without a lower validation logloss; None
            means 2 if there are validation rows; 0 never stops early.
        cache_bytes: training rows, and test rows, are kept in memory if they need at most this.

    Raises:
        ValueError: a value is out of range, or an option has no meaning beside the others.
    """

    train: tuple[Path, ...] = ()
    test: tuple[Path, ...] = ()
    planted: bool = False
    file_format: FileFormat | None = None
    on_bad_line: Literal["stop", "skip"] = "stop"
    ignore_values: bool = False
    model: ModelName = "fm"
    dim: int | None = None
    init_std: float | None = None
    bias: bool = True
    optimizer: OptimizerName = "adam"
    lr: float | None = None
    beta: float | None = None
    l1: float | None = None
    l2: float | None = None
    weight_decay: float | None = None
    batch_size: int = 256
    epochs: int = 20
    reduction: Literal["mean", "sum"] = "mean"
    shuffle: bool = True
    shuffle_window: int = 65_536
    seed: int = 0
    validation_fraction: float = 0.1
    patience: int | None = None
    cache_bytes: int = 2**30

    def __post_init__(self) -> None:
        self._check_names()
        self._check_input()
        self._fill_model()
        self._fill_optimizer()
        self._fill_patience()
        self._check_ranges()

    def as_json(self) -> dict[str, Any]:
        """Returns the configuration with paths as text; `config.json` holds it."""
        paths = {"train": [str(p) for p in self.train], "test": [str(p) for p in self.test]}
        return {**asdict(self), **paths}

    def _check_names(self) -> None:
        _check_choice("model", self.model, get_args(ModelName))
        _check_choice("optimizer", self.optimizer, get_args(OptimizerName))
        _check_choice("reduction", self.reduction, ("mean", "sum"))
        _check_choice("on_bad_line", self.on_bad_line, ("stop", "skip"))
        if self.file_format is not None:
            _check_choice("file_format", self.file_format, get_args(FileFormat))

    def _check_input(self) -> None:
        if self.planted and (self.train or self.test or self.file_format):
            raise ValueError("planted data takes no files and no file format")
        if not self.planted and not self.train:
            raise ValueError("no training data: give files, a directory, or ask for planted data")

    def _fill_model(self) -> None:
        if self.model == "fm":
            self.dim = 8 if self.dim is None else self.dim
            self.init_std = 0.01 if self.init_std is None else self.init_std
        else:
            self._refuse(("dim", "init_std"), "model lr")

    def _fill_optimizer(self) -> None:
        self.lr = DEFAULT_LR[self.optimizer] if self.lr is None else self.lr
        if self.optimizer == "ftrl":
            for name, default in _FTRL_DEFAULTS.items():
                if getattr(self, name) is None:
                    setattr(self, name, default)
        else:
            self._refuse(tuple(_FTRL_DEFAULTS), f"optimizer {self.optimizer}")
        if self.optimizer not in _DECAYING:
            self._refuse(("weight_decay",), f"optimizer {self.optimizer}")

    def _fill_patience(self) -> None:
        if self.patience is None:
            self.patience = 2 if self.validation_fraction > 0 else 0
        if self.patience > 0 and self.validation_fraction == 0:
            raise ValueError("early stopping needs validation rows: validation_fraction is 0")

    def _refuse(self, names: tuple[str, ...], owner: str) -> None:
        given = [name for name in names if getattr(self, name) is not None]
        if given:
            raise ValueError(f"{owner} takes no {' and no '.join(given)}")

    def _check_ranges(self) -> None:
        for name in ("batch_size", "epochs", "shuffle_window", "dim"):
            _check_number(name, getattr(self, name), least=1)
        for name in ("seed", "patience", "cache_bytes", "init_std", "beta", "l1", "l2"):
            _check_number(name, getattr(self, name), least=0)
        _check_number("weight_decay", self.weight_decay, least=0)
        _check_number("validation_fraction", self.validation_fraction, least=0)
        if self.validation_fraction > 0.5:
            raise ValueError(f"validation_fraction must be at most 0.5, got {self.validation_fraction}")
        if self.lr == 0:
            raise ValueError("lr must be above 0, got 0")
        _check_number("lr", self.lr, least=0)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _check_number(name: str, value: float | None, *, least: float) -> None:
    if value is not None and not (math.isfinite(value) and value >= least):
        raise ValueError(f"{name} must be at least {least}, got {value}")
