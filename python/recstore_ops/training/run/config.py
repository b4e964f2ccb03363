"""The configuration of a training run, which `config.json` of a run holds.

The type of each field has its option of `recstore train` and its bounds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from recstore_ops.config.config_file import optimizer_problems
from recstore_ops.config.optimizers import OPTIMIZERS, OptimizerName
from recstore_ops.config.option import Option
from recstore_ops.training.data.schema import check_column_choices
from recstore_ops.training.run.choices import (
    ALWAYS_WITH_BIAS,
    FTRL_DEFAULTS,
    MODEL_OPTIONS,
    NN_OPTIMIZERS,
    OF_NAMED_COLUMNS,
    REASONS,
    RETRIEVAL,
    WITH_OPTIONS,
    InitWhat,
)
from recstore_ops.training.run.dense_parameters import check_dense_optimizer
from recstore_ops.training.run.input_config import INPUT, InputConfig, check_following
from recstore_ops.training.run.model_config import ModelConfig
from recstore_ops.training.run.option_values import (
    Bounds,
    check_bounds,
    check_choices,
    check_numbers,
    read_arguments,
    read_mebibytes,
    read_names,
    read_negated,
    read_path,
)
from recstore_ops.training.run.schedules import ScheduleName

_OPTIMIZER = "Optimizer"
_LOOP = "Training"
_OUTPUT = "Output"
_BEGINNING = "Beginning"

_AT_LEAST_ONE = Bounds(least=1)
_NOT_NEGATIVE = Bounds(least=0)
_NEVER = 2**62
_SHUFFLE_WINDOW = 65_536
_WHOLE_FILES = {"epochs": 20, "validation_fraction": 0.1}
_FILES_THAT_ARRIVE = {"epochs": 1, "validation_fraction": 0.0}
_ABOVE_ZERO = Bounds(above=0)


def _names(**properties: Any) -> str:
    """The optimizers that have these properties, in a line."""
    found = [name for name, each in OPTIMIZERS.items() if properties.items() <= each._asdict().items()]
    return ", ".join(found)


_RATES = "; ".join(f"{lr:g} {_names(lr=lr)}" for lr in dict.fromkeys(each.lr for each in OPTIMIZERS.values()))
_UNDECAYED = _names(weight_decay=False)


@dataclass
class TrainingConfig(ModelConfig, InputConfig):
    """Configuration of `recstore_ops.training.train`.

    Those of its input are the attributes of `InputConfig`, those of its model and tables the ones of `ModelConfig`.

    Attributes:
        optimizer: the optimizer of the tables.
        lr: learning rate, or FTRL's alpha; None takes the optimizer's default.
        beta, l1, l2: of FTRL; default 1, 0, 0.
        weight_decay: for all optimizers except AdaGrad's and FTRL's rules; None takes the store's default.
        convention: of adagrad and rowwise_adagrad, "recstore" or "torch"; None takes the first, as tables do.
        optimizer_options: further arguments of the rule, as `{"momentum": 0.9}`.
        dense_optimizer: the name of an optimizer of `torch.optim` for all parameters outside the tables; None takes
            the one of the tables' rule.
        dense_lr: its learning rate; None takes `lr`.
        dense_options: its further arguments.
        schedule: of both learning rates over the run; one of `ScheduleName`.
        warmup_steps: steps in which they rise from zero.
        gamma: what exponential multiplies them with after each epoch (default 0.9), and plateau after each
            evaluation without a lower validation logloss (default 0.5).
        batch_size: rows of one step.
        epochs: passes over the training rows, at most; None takes 20, or 1 over files that are followed.
        reduction: whether the gradient is the mean or the sum over a batch's rows.
        shuffle, shuffle_window: shuffle anew in each epoch, within windows of that many rows.
        seed: of the planted rows, the split, the shuffling and the initial values.
        validation_fraction: part of the training rows held out for validation; None takes 0.1, or 0 of files that are
            followed.
        evaluate_every: steps between evaluations, the last of which ends the run; None evaluates after each epoch.
        patience: stop after that many evaluations in a row without a lower validation logloss; None means 2 if there
            are validation rows; 0 never stops early.
        auc_by: the name of a field, a column, or `qid` of libsvm: AUC and more for each of its ids; None takes the
            column of the role group, or `qid`, if there is one.
        log_every: steps between records of loss, speed and memory.
        cache_bytes: training rows, and test rows, are kept in memory if they need at most this.
        init_from: the directory of a run whose last save this one begins with: rows, parameters outside the tables,
            and perhaps optimizer state.
        init_what: "rows" begins with new optimizer state; None takes the other run's state if both runs have the same
            optimizer.
        init_tables: the tables that begin with its rows; empty for all.

    Raises:
        ValueError: a value is out of range, or an option has no meaning beside the others.
    """

    optimizer: Annotated[OptimizerName, Option("Steps the tables.", _OPTIMIZER)] = "adam"
    lr: Annotated[
        float | None,
        Option(
            "Learning rate.",
            _OPTIMIZER,
            shown=_RATES,
        ),
        _ABOVE_ZERO,
    ] = None
    beta: Annotated[float | None, Option("FTRL only.", _OPTIMIZER, shown="1"), _NOT_NEGATIVE] = None
    l1: Annotated[float | None, Option("FTRL only.", _OPTIMIZER, shown="0"), _NOT_NEGATIVE] = None
    l2: Annotated[float | None, Option("FTRL only.", _OPTIMIZER, shown="0"), _NOT_NEGATIVE] = None
    weight_decay: Annotated[
        float | None,
        Option(f"Of the tables; not {_UNDECAYED}.", _OPTIMIZER),
        _NOT_NEGATIVE,
    ] = None
    convention: Annotated[
        Literal["recstore", "torch"] | None,
        Option("How adagrad and rowwise_adagrad divide.", _OPTIMIZER, shown="recstore"),
    ] = None
    optimizer_options: Annotated[
        dict[str, Any],
        Option(
            "Its further argument, as momentum=0.9; may be repeated.",
            _OPTIMIZER,
            name="optimizer-option",
            metavar="NAME=VALUE",
            type=list[str],
            read=read_arguments,
        ),
    ] = field(default_factory=dict)
    dense_optimizer: Annotated[
        str | None,
        Option(
            "Optimizer of torch.optim for all other parameters.",
            _OPTIMIZER,
            shown="as tables",
            metavar="NAME",
        ),
    ] = None
    dense_lr: Annotated[float | None, Option("Its learning rate.", _OPTIMIZER, shown="--lr"), _ABOVE_ZERO] = None
    dense_options: Annotated[
        dict[str, Any],
        Option(
            "A further argument of it, as weight_decay=0.01; may be repeated.",
            _OPTIMIZER,
            name="dense-option",
            metavar="NAME=VALUE",
            type=list[str],
            read=read_arguments,
        ),
    ] = field(default_factory=dict)
    schedule: Annotated[
        ScheduleName,
        Option(
            "Schedule of the learning rates: linear and cosine fall towards 0 over the run, exponential by epoch, "
            "plateau when the validation logloss is no lower.",
            _OPTIMIZER,
        ),
    ] = "constant"
    warmup_steps: Annotated[
        int, Option("Steps in which the learning rates rise from 0.", _OPTIMIZER), _NOT_NEGATIVE
    ] = 0
    gamma: Annotated[
        float | None,
        Option("Factor of exponential and plateau.", _OPTIMIZER, shown="0.9, 0.5"),
        Bounds(above=0, most=1),
    ] = None
    batch_size: Annotated[int, Option("Rows of one step.", _LOOP), _AT_LEAST_ONE] = 256
    epochs: Annotated[
        int | None,
        Option("The most passes over the rows.", _LOOP, shown="20; 1 over followed files"),
        _AT_LEAST_ONE,
    ] = None
    reduction: Annotated[Literal["mean", "sum"], Option("Gradient over a batch; ftrl needs sum.", _OPTIMIZER)] = "mean"
    shuffle: Annotated[
        bool,
        Option("Keep the order of the file.", _LOOP, name="no-shuffle", type=bool, default=False, read=read_negated),
    ] = True
    shuffle_window: Annotated[int, Option("Rows held in memory to shuffle.", _LOOP), _AT_LEAST_ONE] = _SHUFFLE_WINDOW
    seed: Annotated[int, Option("Seed of initial values, shuffling, splits and dropout.", _LOOP), _NOT_NEGATIVE] = 0
    validation_fraction: Annotated[
        float | None,
        Option(
            "Training rows held out.",
            _LOOP,
            shown="0.1; 0 of followed files",
        ),
        Bounds(least=0, most=0.5),
    ] = None
    evaluate_every: Annotated[
        int | None, Option("Steps between evaluations.", _LOOP, shown="each epoch"), _AT_LEAST_ONE
    ] = None
    patience: Annotated[
        int | None,
        Option(
            "Stop after so many evaluations without a lower validation logloss; 0 never stops early.",
            _LOOP,
            shown="2; 0 without validation",
        ),
        _NOT_NEGATIVE,
    ] = None
    auc_by: Annotated[
        str | None,
        Option(
            "Also report AUC and NDCG within each id of this field or column: user of MovieLens, C1 of Criteo, field_0 "
            "or qid of libsvm.",
            _LOOP,
            metavar="FIELD",
            shown="role group; qid",
        ),
    ] = None
    log_every: Annotated[int, Option("Steps between records of loss, speed and memory.", _OUTPUT), _AT_LEAST_ONE] = 100
    cache_bytes: Annotated[
        int,
        Option(
            "Keep rows of at most so many MiB in memory.",
            INPUT,
            name="cache-mb",
            least=0,
            type=int,
            default=1024,
            read=read_mebibytes,
        ),
        _NOT_NEGATIVE,
    ] = 2**30
    init_from: Annotated[
        str | None,
        Option(
            "Begin with the last save of this run.",
            _BEGINNING,
            shown="new rows",
            type=Path,
            read=read_path,
        ),
    ] = None
    init_what: Annotated[
        InitWhat | None,
        Option(
            "The part of it to take.",
            _BEGINNING,
            shown="both of one optimizer, else rows",
        ),
    ] = None
    init_tables: Annotated[
        tuple[str, ...],
        Option(
            "A table to take from it, as v; may be repeated.",
            _BEGINNING,
            name="init-table",
            shown="all",
            type=list[str],
            read=read_names,
        ),
    ] = ()

    def __post_init__(self) -> None:
        # Choices and numbers come first, since the checks below compare them. Bounds come after the defaults, which
        # they hold for too.
        check_choices(self)
        check_numbers(self)
        self._check_input()
        if self.follow_files is not None:
            check_following(self)
        self._fill(_WHOLE_FILES if self.follow_files is None else _FILES_THAT_ARRIVE)
        self._fill_model()
        self._check_eviction()
        self._fill_optimizer()
        self._fill_schedule()
        self._fill_patience()
        check_bounds(self)
        self._check_tables()
        self._check_beginning()

    def as_json(self) -> dict[str, Any]:
        """Returns the configuration with paths as text; `config.json` holds it."""
        paths = {"train": [str(p) for p in self.train], "test": [str(p) for p in self.test]}
        return {**asdict(self), **paths}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrainingConfig:
        """Returns the configuration that `as_json` described.

        Raises:
            ValueError: it has an option of another name; further as the class.
        """
        unknown = sorted(values.keys() - {each.name for each in fields(cls)})
        if unknown:
            raise ValueError(f"unknown option {', '.join(unknown)}; it was written by another version")
        read = {name: _as_tuples(value) for name, value in values.items()}
        return cls(**{**read, **{name: tuple(map(Path, read[name])) for name in ("train", "test") if name in read}})

    @property
    def prefix(self) -> str:
        """How the names of the tables begin."""
        return self.table_prefix or self.model

    def model_options(self) -> dict[str, Any]:
        """Returns the arguments of the model's own that were given or filled in."""
        options = {name: getattr(self, name) for name in MODEL_OPTIONS[self.model]}
        return options if self.model in ALWAYS_WITH_BIAS else {**options, "bias": self.bias}

    def admission(self) -> dict[str, Any] | None:
        """Returns which ids get a row, as tables take it."""
        if self.admit_after is None:
            return None
        shared = {} if self.shared_rows is None else {"shared_rows": self.shared_rows}
        return {"kind": "count", "threshold": self.admit_after, **shared}

    def eviction(self) -> dict[str, Any] | None:
        """Returns which rows leave, as tables take it."""
        reasons = {name: getattr(self, name) for name in REASONS if getattr(self, name) is not None}
        options = {"policy": self.eviction_policy, "interval": self.eviction_interval}
        if self.ttl_time is not None:
            # The table notes when its rows are updated; `TimeToLive` says which leave.
            options["interval"] = self.eviction_interval if reasons else _NEVER
            reasons = {"ttl": _NEVER, **reasons}
        given = {name: value for name, value in options.items() if value is not None}
        return {**reasons, **given} if reasons else None

    def _check_input(self) -> None:
        if self.planted and (self.train or self.test or self.file_format):
            raise ValueError("planted data takes no files and no file format")
        if self.planted:
            self._refuse(("num_fields", "rating_threshold", "hash_buckets"), "planted data")
        if self.planted and (self.ignore_values or self.on_bad_line != "stop"):
            raise ValueError(f"planted data takes no {'ignore_values' if self.ignore_values else 'on_bad_line'}")
        if self.planted and self.ttl_time is not None:
            raise ValueError("planted rows have no event times: they take no ttl_time")
        if self.planted and (given := [name for name in OF_NAMED_COLUMNS if getattr(self, name)]):
            raise ValueError(f"planted data takes no {' and no '.join(given)}")
        if not self.planted and not self.train and self.follow_files is None:
            raise ValueError("no training data: give files, a directory, or generated rows, as --planted pairs")
        if not self.planted:
            self._refuse(("planted_train_rows", "planted_test_rows"), "a run on files")
        if not self.shuffle and self.shuffle_window != _SHUFFLE_WINDOW:
            raise ValueError(f"a run that does not shuffle takes no shuffle_window {self.shuffle_window}")
        check_column_choices(self.label_column, self.drop_columns, self.column_roles)

    def _fill_model(self) -> None:
        own = MODEL_OPTIONS[self.model]
        every = {name for options in MODEL_OPTIONS.values() for name in options}
        self._refuse(tuple(sorted(every - own.keys())), f"model {self.model}")
        self._fill(own)
        if self.model in ALWAYS_WITH_BIAS and not self.bias:
            raise ValueError(f"model {self.model} always has a bias: its perceptrons have them")
        if self.model == "din" and not self.sequences and not self._may_say_sequences():
            raise ValueError("model din needs sequences: name at least one history and its target")
        if self.model == "two_tower" and not self.item_fields:
            raise ValueError("model two_tower needs item_fields: name at least one field of the item")
        if self.model in RETRIEVAL and self.auc_by is not None:
            raise ValueError(f"model {self.model} takes no auc_by: it ranks items for queries, which has no AUC")

    def _may_say_sequences(self) -> bool:
        """Whether columns may say which of them are sequences."""
        by_column = any(role.startswith("sequence") for role in self.column_roles.values())
        return by_column or self.schema is not None or self.init_from is not None

    def _check_eviction(self) -> None:
        if self.capacity is None:
            self._refuse(("eviction_policy",), "a run without capacity")
        if self.eviction() is None:
            self._refuse(("eviction_interval",), "a run that no rows leave")

    def _fill_optimizer(self) -> None:
        rule = OPTIMIZERS[self.optimizer]
        self._fill({"lr": rule.lr})
        if self.optimizer == "ftrl":
            self._fill(FTRL_DEFAULTS)
        else:
            self._refuse(tuple(FTRL_DEFAULTS), f"optimizer {self.optimizer}")
        if not rule.weight_decay:
            self._refuse(("weight_decay",), f"optimizer {self.optimizer}")
        if "convention" not in rule.options:
            self._refuse(("convention",), f"optimizer {self.optimizer}")
        self._check_optimizer_options()
        if self.dense_optimizer is None and self.dense_options:
            raise ValueError("dense_options need a dense_optimizer")
        if self.dense_optimizer is not None:
            check_dense_optimizer(self.dense_optimizer, self.dense_options)

    def _check_optimizer_options(self) -> None:
        own = [name for name in self.optimizer_options if name in WITH_OPTIONS]
        if own:
            raise ValueError(f"optimizer_options take no {' and no '.join(own)}, which are options of their own")
        arguments = {name: list(v) if isinstance(v, tuple) else v for name, v in self.optimizer_options.items()}
        problems = optimizer_problems({"kind": self.optimizer, **arguments})
        if problems:
            raise ValueError("; ".join(f"optimizer_options of {self.optimizer}: {each}" for each in problems))

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
            self.patience = 2 if self.validation_fraction else 0
        if self.patience > 0 and self.validation_fraction == 0:
            raise ValueError("early stopping needs validation rows: validation_fraction is 0")

    def _check_tables(self) -> None:
        if self.table_prefix == "":
            raise ValueError("table_prefix must not be empty")
        if self.disk is not None and self.memory_limit is None:
            raise ValueError("disk needs a memory_limit: without one no row would ever go there")
        if self.admit_after is None:
            self._refuse(("shared_rows",), "a run without admit_after")
        if self.tables == "store":
            return
        self._refuse(("admit_after", *REASONS, "ttl_time", "memory_limit", "disk"), "a run with tables nn")
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
        if self.optimizer_options:
            raise ValueError("a run with tables nn takes no optimizer_options")
        if self.crosses:
            raise ValueError("nn.Embedding has no row for crossed ids that are not in its vocabulary")

    def _check_beginning(self) -> None:
        if self.init_from is None:
            self._refuse(("init_what",), "a run without init_from")
            if self.init_tables:
                raise ValueError("a run without init_from takes no init_tables")
        elif self.tables == "nn":
            raise ValueError("a run with tables nn takes no init_from")

    def _fill(self, defaults: dict[str, Any]) -> None:
        for name, default in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, default)

    def _refuse(self, names: tuple[str, ...], owner: str) -> None:
        given = [name for name in names if getattr(self, name) is not None]
        if given:
            raise ValueError(f"{owner} takes no {' and no '.join(given)}")


def _as_tuples(value: Any) -> Any:
    """Turns the lists of JSON into the tuples of the configuration."""
    if isinstance(value, dict):
        return {name: _as_tuples(each) for name, each in value.items()}
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
