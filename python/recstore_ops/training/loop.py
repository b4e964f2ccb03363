"""The training loop: epochs over the training rows, evaluation after each, early stopping.

Test rows are only ever evaluated. What decides when to stop is the logloss on validation rows,
which are held out of the training rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from recstore_ops import DistEmbedding, SparseOptimizer, table_statistics
from recstore_ops.training.batch import Batch
from recstore_ops.training.config import TrainingConfig
from recstore_ops.training.dataset import RowSource, regroup, shuffled
from recstore_ops.training.evaluation import Evaluation, evaluate
from recstore_ops.training.factorization_machine import FactorizationMachine
from recstore_ops.training.logistic_regression import LogisticRegression
from recstore_ops.training.optimizers import dense_optimizer, table_optimizer
from recstore_ops.training.records import EpochRecord
from recstore_ops.training.training_input import TrainingInput, open_input

# Evaluation has no batch size to respect: large batches are faster, and change no result.
EVALUATION_ROWS = 8192


class Observer(Protocol):
    """Whoever watches a run."""

    def on_batch(self, epoch: int, rows: int, expected_rows: int | None, loss: float) -> None:
        """Called after each step with the epoch's rows and mean loss so far."""
        ...

    def on_epoch(self, record: EpochRecord) -> None:
        """Called after each epoch."""
        ...


def build_model(config: TrainingConfig, name: str) -> nn.Module:
    """Returns the configured model with fresh tables `<name>/...`.

    Initial values depend on the configured seed and on the name.

    Raises:
        ValueError: such a table has rows already, so that training would not start anew.
    """
    optimizer = table_optimizer(config)
    if config.model == "lr":
        model: nn.Module = LogisticRegression(name, optimizer, bias=config.bias)
    else:
        assert config.dim is not None, "TrainingConfig fills it in"
        assert config.init_std is not None, "TrainingConfig fills it in"
        model = FactorizationMachine(
            name,
            config.dim,
            optimizer,
            init_std=config.init_std,
            bias=config.bias,
            seed=config.seed,
        )
    num_rows = table_rows(model)
    if num_rows > 0:
        raise ValueError(f"the tables {name}/... have {num_rows} rows already; use another name")
    return model


def table_rows(model: nn.Module) -> int:
    """Returns the number of rows in all tables of a model."""
    tables = [module for module in model.modules() if isinstance(module, DistEmbedding)]
    return sum(table_statistics(table.name)["rows"] for table in tables)


def train(
    config: TrainingConfig,
    model: nn.Module,
    *,
    rows: TrainingInput | None = None,
    observer: Observer | None = None,
) -> list[EpochRecord]:
    """Trains a model and returns one record an epoch.

    Args:
        config: its model part is not read here: `model` may be any module with tables whose forward
            takes ids, values and offsets.
        model: of `build_model`, for example.
        rows: None opens what the configuration names.
        observer: is told of each batch and epoch.

    Raises:
        ValueError: bad input, no training or validation rows, or a loss that is not finite.
    """
    rows = rows or open_input(config)
    stepper = _Stepper(config, model)
    if rows.test is not None:
        _read_through(rows.test)
    stopping = EarlyStopping(config.patience or 0)
    records: list[EpochRecord] = []
    for epoch in range(1, config.epochs + 1):
        record = _run_epoch(config, stepper, rows, observer, epoch)
        records.append(record)
        if observer is not None:
            observer.on_epoch(record)
        if record.validation and stopping.should_stop(record.validation.logloss):
            break
    return records


class EarlyStopping:
    """Stops after `patience` epochs in a row without a new lowest logloss; 0 never stops."""

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._lowest = math.inf
        self._epochs_since = 0

    def should_stop(self, logloss: float) -> bool:
        """Takes an epoch's validation logloss."""
        if logloss < self._lowest:
            self._lowest, self._epochs_since = logloss, 0
        else:
            self._epochs_since += 1
        return 0 < self._patience <= self._epochs_since


class _Stepper:
    """One optimizer step a batch, of tables and dense parameters together."""

    def __init__(self, config: TrainingConfig, model: nn.Module) -> None:
        self.model = model
        self._reduction: Literal["mean", "sum"] = config.reduction
        self._optimizers: list[torch.optim.Optimizer] = [SparseOptimizer(modules=[model])]
        dense = dense_optimizer(config, list(model.parameters()))
        if dense is not None:
            self._optimizers.append(dense)

    def step(self, batch: Batch) -> float:
        """Returns the batch's loss summed over its rows, before the step; in nats."""
        logits = self.model(batch.ids, batch.values, batch.offsets)
        loss = _logloss(logits, batch.labels, self._reduction)
        loss_value = loss.item()
        if not math.isfinite(loss_value):
            raise ValueError(f"the training loss became {loss_value}; lower the learning rate")
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self._optimizers:
            optimizer.step()
        return loss_value * (len(batch) if self._reduction == "mean" else 1)


def _logloss(logits: Tensor, labels: Tensor, reduction: Literal["mean", "sum"]) -> Tensor:
    # binary_cross_entropy_with_logits computes the same, but wakes all threads for a batch of any
    # size, which on a busy machine takes far longer than the step.
    losses = softplus(logits) - labels * logits
    return losses.mean() if reduction == "mean" else losses.sum()


def _read_through(rows: RowSource) -> None:
    # A bad line among the test rows must not surface only after an epoch's work.
    for _ in rows:
        pass


def _run_epoch(
    config: TrainingConfig,
    stepper: _Stepper,
    rows: TrainingInput,
    observer: Observer | None,
    epoch: int,
) -> EpochRecord:
    started = time.perf_counter()
    train_loss, train_rows = _train_epoch(config, stepper, rows.train, observer, epoch)
    return EpochRecord(
        epoch=epoch,
        train_loss=train_loss,
        train_rows=train_rows,
        seconds=time.perf_counter() - started,
        validation=_evaluate_part(stepper.model, rows.validation),
        test=_evaluate_part(stepper.model, rows.test),
        table_rows=table_rows(stepper.model),
    )


def _train_epoch(
    config: TrainingConfig,
    stepper: _Stepper,
    rows: RowSource,
    observer: Observer | None,
    epoch: int,
) -> tuple[float, int]:
    loss_sum, num_rows = 0.0, 0
    for batch in _training_batches(config, rows, epoch):
        loss_sum += stepper.step(batch)
        num_rows += len(batch)
        if observer is not None:
            observer.on_batch(epoch, num_rows, rows.estimated_rows, loss_sum / num_rows)
    if num_rows == 0:
        raise ValueError("no training rows are left beside the validation rows")
    return loss_sum / num_rows, num_rows


def _training_batches(config: TrainingConfig, rows: RowSource, epoch: int) -> Iterator[Batch]:
    if not config.shuffle:
        return regroup(rows, config.batch_size)
    rng = np.random.default_rng([config.seed, epoch])
    return regroup(shuffled(rows, config.shuffle_window, rng), config.batch_size)


def _evaluate_part(model: nn.Module, rows: RowSource | None) -> Evaluation | None:
    return None if rows is None else evaluate(model, regroup(rows, EVALUATION_ROWS))
