"""What a training run is configured by; `config.json` of a run is exactly this."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from recstore_ops.config.row_types import RowTypeName
from recstore_ops.training.dense_optimizers import check_dense_optimizer
from recstore_ops.training.formats import FormatName
from recstore_ops.training.generated.planted import PlantedKind
from recstore_ops.training.schedules import ScheduleName

ModelName = Literal["lr", "fm", "deepfm", "dlrm", "wide_deep"]
OptimizerName = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "ftrl"]
TablesName = Literal["store", "nn"]

DEFAULT_LR: dict[OptimizerName, float] = {
    "sgd": 0.1,
    "adagrad": 0.05,
    "rowwise_adagrad": 0.05,
    "adam": 2e-3,
    "adamw": 2e-3,
    "ftrl": 0.1,
}
# The optimizers that `torch.optim` has for the sparse gradients of `nn.Embedding`.
NN_OPTIMIZERS = ("sgd", "adagrad", "adam")
_REASONS = ("ttl", "min_norm", "capacity")
_FTRL_DEFAULTS = {"beta": 1.0, "l1": 0.0, "l2": 0.0}
_DECAYING = ("sgd", "adam", "adamw")
_CONVENTIONAL = ("adagrad", "rowwise_adagrad")

# What each model takes beside a bias, with its default.
_FACTORS = {"dim": 8, "init_std": 0.01}
_DEEP = {**_FACTORS, "hidden": (64, 32), "dropout": 0.0}
MODEL_OPTIONS: dict[ModelName, dict[str, Any]] = {
    "lr": {},
    "fm": _FACTORS,
    "deepfm": _DEEP,
    "dlrm": {**_DEEP, "bottom": (64,)},
    "wide_deep": {**_DEEP, "crosses": ()},
}


@dataclass
class TrainingConfig:
    """Configuration of `recstore_ops.training.train`.

    Attributes:
        train, test: the files; both of one format.
        planted: the kind of planted rows to train on instead of files; see `planted_rows`.
        planted_train_rows, planted_test_rows: how many; None takes the kind's own.
        file_format: None detects it.
        on_bad_line: "stop" or "skip" (and count).
        ignore_values: take every feature value as 1.
        num_fields: of libsvm and libffm rows, for models that tell fields apart; None takes it from the first rows.
        rating_threshold: the least MovieLens rating that counts as positive.
        label_column: of Parquet files; None takes `label` or `click`.
        drop_columns: columns of Parquet files that are no features.
        hash_buckets: hash ids to this many; None keeps every id as it is.
        model: one of `ModelName`.
        dim, init_std: columns of the factors (default 8) and the standard deviation of their initial values (default
            0.01); of all models but lr.
        hidden, dropout: sizes of the perceptron's hidden layers (default 64, 32) and the dropout after each (default
            0); of deepfm, dlrm and wide_deep.
        bottom: hidden layers of dlrm's perceptron of dense features (default 64).
        crosses: pairs of fields that wide_deep crosses.
        bias: whether the model has one; dlrm always has.
        tables: what holds them: "store", or "nn" for `torch.nn.Embedding(sparse=True)` to compare with.
        row_type: the type in which the store keeps rows: "float32", "bfloat16" or "float16".
        admit_after: an id gets a row with its update in that many steps; None: with the first.
        ttl, min_norm, capacity: rows that no step updated for more steps leave their table, those of a smaller norm,
            and of each table as many as it has too many; None: none do.
        eviction_policy: which rows leave for capacity, "lru" (default) or "lfu".
        eviction_interval: steps between two sweeps for rows that leave (default 1000).
        memory_limit: the most bytes of memory that each table of the store may take.
        disk: a directory for the rows that the limit leaves no room for; without it the run ends with an error there.
        optimizer: the rule by which the tables are stepped.
        lr: learning rate, or FTRL's alpha; None takes `DEFAULT_LR`.
        beta, l1, l2: of FTRL; default 1, 0, 0.
        weight_decay: of sgd, adam and adamw; None takes the store's default.
        convention: of adagrad and rowwise_adagrad, "recstore" or "torch"; None takes the first, as tables do.
        dense_optimizer: the name of an optimizer of `torch.optim` for all parameters outside the tables; None takes
            the one of the tables' rule.
        dense_lr: its learning rate; None takes `lr`.
        dense_options: its further arguments.
        schedule: of both learning rates over the run; one of `ScheduleName`.
        warmup_steps: steps in which they rise from zero.
        gamma: what exponential multiplies them with after each epoch (default 0.9), and plateau after each
            evaluation without a lower validation logloss (default 0.5).
        batch_size: rows of one step.
        epochs: passes over the training rows, at most.
        reduction: whether the gradient is the mean or the sum over a batch's rows.
        shuffle, shuffle_window: shuffle anew in each epoch, within windows of that many rows.
        seed: of the planted rows, the split, the shuffling and the initial values.
        validation_fraction: part of the training rows held out for validation.
        evaluate_every: steps between evaluations, the last of which ends the run; None evaluates after each epoch.
        patience: stop after that many evaluations in a row without a lower validation logloss; None means 2 if there
            are validation rows; 0 never stops early.
        auc_by: the name of a field: AUC and more for each of its ids.
        log_every: steps between records of loss, speed and memory.
        cache_bytes: training rows, and test rows, are kept in memory if they need at most this.

    Raises:
        ValueError: a value is out of range, or an option has no meaning beside the others.
    """

    train: tuple[Path, ...] = ()
    test: tuple[Path, ...] = ()
    planted: PlantedKind | None = None
    planted_train_rows: int | None = None
    planted_test_rows: int | None = None
    file_format: FormatName | None = None
    on_bad_line: Literal["stop", "skip"] = "stop"
    ignore_values: bool = False
    num_fields: int | None = None
    rating_threshold: float = 4.0
    label_column: str | None = None
    drop_columns: tuple[str, ...] = ()
    hash_buckets: int | None = None
    model: ModelName = "fm"
    dim: int | None = None
    init_std: float | None = None
    hidden: tuple[int, ...] | None = None
    dropout: float | None = None
    bottom: tuple[int, ...] | None = None
    crosses: tuple[tuple[int, int], ...] | None = None
    bias: bool = True
    tables: TablesName = "store"
    row_type: RowTypeName = "float32"
    admit_after: int | None = None
    ttl: int | None = None
    min_norm: float | None = None
    capacity: int | None = None
    eviction_policy: Literal["lru", "lfu"] | None = None
    eviction_interval: int | None = None
    memory_limit: int | None = None
    disk: str | None = None
    optimizer: OptimizerName = "adam"
    lr: float | None = None
    beta: float | None = None
    l1: float | None = None
    l2: float | None = None
    weight_decay: float | None = None
    convention: Literal["recstore", "torch"] | None = None
    dense_optimizer: str | None = None
    dense_lr: float | None = None
    dense_options: dict[str, Any] = field(default_factory=dict)
    schedule: ScheduleName = "constant"
    warmup_steps: int = 0
    gamma: float | None = None
    batch_size: int = 256
    epochs: int = 20
    reduction: Literal["mean", "sum"] = "mean"
    shuffle: bool = True
    shuffle_window: int = 65_536
    seed: int = 0
    validation_fraction: float = 0.1
    evaluate_every: int | None = None
    patience: int | None = None
    auc_by: str | None = None
    log_every: int = 100
    cache_bytes: int = 2**30

    def __post_init__(self) -> None:
        self._check_names()
        self._check_input()
        self._fill_model()
        self._check_eviction()
        self._fill_optimizer()
        self._fill_schedule()
        self._fill_patience()
        self._check_ranges()
        self._check_tables()

    def as_json(self) -> dict[str, Any]:
        """Returns the configuration with paths as text; `config.json` holds it."""
        paths = {"train": [str(p) for p in self.train], "test": [str(p) for p in self.test]}
        return {**asdict(self), **paths}

    def model_options(self) -> dict[str, Any]:
        """Returns the arguments of the model's own that were given or filled in."""
        options = {name: getattr(self, name) for name in MODEL_OPTIONS[self.model]}
        return options if self.model == "dlrm" else {**options, "bias": self.bias}

    def admission(self) -> dict[str, Any] | None:
        """Returns which ids get a row, as tables take it."""
        return None if self.admit_after is None else {"kind": "count", "threshold": self.admit_after}

    def eviction(self) -> dict[str, Any] | None:
        """Returns which rows leave, as tables take it."""
        reasons = {name: getattr(self, name) for name in _REASONS if getattr(self, name) is not None}
        options = {"policy": self.eviction_policy, "interval": self.eviction_interval}
        given = {name: value for name, value in options.items() if value is not None}
        return {**reasons, **given} if reasons else None

    def _check_names(self) -> None:
        _check_choice("model", self.model, get_args(ModelName))
        _check_choice("tables", self.tables, get_args(TablesName))
        _check_choice("row_type", self.row_type, get_args(RowTypeName))
        _check_choice("optimizer", self.optimizer, get_args(OptimizerName))
        _check_choice("schedule", self.schedule, get_args(ScheduleName))
        _check_choice("reduction", self.reduction, ("mean", "sum"))
        _check_choice("on_bad_line", self.on_bad_line, ("stop", "skip"))
        for name, kind in (("file_format", FormatName), ("planted", PlantedKind)):
            if getattr(self, name) is not None:
                _check_choice(name, getattr(self, name), get_args(kind))

    def _check_input(self) -> None:
        if self.planted and (self.train or self.test or self.file_format):
            raise ValueError("planted data takes no files and no file format")
        if not self.planted and not self.train:
            raise ValueError("no training data: give files, a directory, or generated rows, as --planted pairs")
        if not self.planted:
            self._refuse(("planted_train_rows", "planted_test_rows"), "a run on files")

    def _fill_model(self) -> None:
        own = MODEL_OPTIONS[self.model]
        every = {name for options in MODEL_OPTIONS.values() for name in options}
        self._refuse(tuple(sorted(every - own.keys())), f"model {self.model}")
        self._fill(own)
        if self.model == "dlrm" and not self.bias:
            raise ValueError("model dlrm always has a bias: its perceptrons have them")

    def _check_eviction(self) -> None:
        if self.eviction_policy is not None:
            _check_choice("eviction_policy", self.eviction_policy, ("lru", "lfu"))
        if self.capacity is None:
            self._refuse(("eviction_policy",), "a run without capacity")
        if self.eviction() is None:
            self._refuse(("eviction_interval",), "a run that no rows leave")

    def _fill_optimizer(self) -> None:
        self._fill({"lr": DEFAULT_LR[self.optimizer]})
        if self.optimizer == "ftrl":
            self._fill(_FTRL_DEFAULTS)
        else:
            self._refuse(tuple(_FTRL_DEFAULTS), f"optimizer {self.optimizer}")
        if self.optimizer not in _DECAYING:
            self._refuse(("weight_decay",), f"optimizer {self.optimizer}")
        if self.optimizer not in _CONVENTIONAL:
            self._refuse(("convention",), f"optimizer {self.optimizer}")
        if self.dense_optimizer is None and self.dense_options:
            raise ValueError("dense_options need a dense_optimizer")
        if self.dense_optimizer is not None:
            check_dense_optimizer(self.dense_optimizer, self.dense_options)

    def _fill_schedule(self) -> None:
        gammas = {"exponential": 0.9, "plateau": 0.5}
        if self.schedule in gammas:
            self._fill({"gamma": gammas[self.schedule]})
        else:
            self._refuse(("gamma",), f"schedule {self.schedule}")
        if self.schedule == "plateau" and self.validation_fraction == 0:
            raise ValueError("schedule plateau needs validation rows: validation_fraction is 0")

    def _fill_patience(self) -> None:
        if self.patience is None:
            self.patience = 2 if self.validation_fraction > 0 else 0
        if self.patience > 0 and self.validation_fraction == 0:
            raise ValueError("early stopping needs validation rows: validation_fraction is 0")

    def _check_tables(self) -> None:
        if self.disk is not None and self.memory_limit is None:
            raise ValueError("disk needs a memory_limit: without one no row would ever go there")
        if self.tables == "store":
            return
        self._refuse(("admit_after", *_REASONS, "memory_limit", "disk"), "a run with tables nn")
        if self.row_type != "float32":
            raise ValueError(f"nn.Embedding is trained in float32 only: tables nn take no row_type {self.row_type}")
        if self.optimizer not in NN_OPTIMIZERS:
            known = ", ".join(NN_OPTIMIZERS)
            raise ValueError(
                f"nn.Embedding(sparse=True) has no optimizer {self.optimizer} in torch.optim; choose one of {known}"
            )
        if self.optimizer == "adagrad" and self.convention != "torch":
            raise ValueError('adagrad compares with torch.optim.Adagrad only with convention "torch"')
        if self.weight_decay:
            raise ValueError("torch.optim has no weight decay for sparse gradients")
        if self.crosses:
            raise ValueError("nn.Embedding has no row for crossed ids that are not in its vocabulary")

    def _fill(self, defaults: dict[str, Any]) -> None:
        for name, default in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, default)

    def _refuse(self, names: tuple[str, ...], owner: str) -> None:
        given = [name for name in names if getattr(self, name) is not None]
        if given:
            raise ValueError(f"{owner} takes no {' and no '.join(given)}")

    def _check_ranges(self) -> None:
        for name in ("admit_after", "ttl", "capacity", "eviction_interval"):
            _check_number(name, getattr(self, name), least=1)
        at_least_one = ("batch_size", "epochs", "shuffle_window", "dim", "evaluate_every", "log_every", "num_fields")
        for name in (*at_least_one, "planted_train_rows", "planted_test_rows", "hash_buckets", "memory_limit"):
            _check_number(name, getattr(self, name), least=1)
        for name in ("seed", "patience", "cache_bytes", "init_std", "beta", "l1", "l2", "warmup_steps", "dropout"):
            _check_number(name, getattr(self, name), least=0)
        for name in ("weight_decay", "validation_fraction"):
            _check_number(name, getattr(self, name), least=0)
        for name in ("lr", "dense_lr", "gamma", "min_norm"):
            _check_above_zero(name, getattr(self, name))
        for name in ("hidden", "bottom"):
            for size in getattr(self, name) or ():
                _check_number(name, size, least=1)
        _check_at_most("validation_fraction", self.validation_fraction, 0.5)
        _check_at_most("gamma", self.gamma, 1)
        if self.dropout is not None and self.dropout >= 1:
            raise ValueError(f"dropout must be below 1, got {self.dropout}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _check_number(name: str, value: float | None, *, least: float) -> None:
    if value is not None and not (math.isfinite(value) and value >= least):
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _check_above_zero(name: str, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be above 0, got {value}")


def _check_at_most(name: str, value: float | None, most: float) -> None:
    if value is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")
