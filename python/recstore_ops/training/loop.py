"""The training loop: epochs over the training rows, evaluation after each or more often, early stopping.

Test rows are only ever evaluated. What decides when to stop is the logloss on validation rows,
which are held out of the training rows.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from recstore_ops.training.build import table_bytes, table_rows
from recstore_ops.training.config import TrainingConfig
from recstore_ops.training.early_stopping import EarlyStopping
from recstore_ops.training.optimizers import make_optimizers
from recstore_ops.training.process_memory import process_bytes
from recstore_ops.training.quality.evaluation import Evaluation, Scores, predict
from recstore_ops.training.report.records import EvaluationRecord, StepRecord
from recstore_ops.training.rows.batch import Batch
from recstore_ops.training.rows.batching import regroup, shuffled
from recstore_ops.training.rows.read_ahead import read_ahead
from recstore_ops.training.rows.row_source import RowSource
from recstore_ops.training.schedules import Schedule
from recstore_ops.training.stretch import Stretch
from recstore_ops.training.training_input import TrainingInput

# Evaluation has no batch size to respect: large batches are faster, and change no result.
EVALUATION_ROWS = 8192


class Observer(Protocol):
    """Whoever watches a run."""

    def on_batch(self, epoch: int, rows: int, expected_rows: int | None, loss: float) -> None:
        """Called after each step with the epoch's rows so far and the mean loss since the last evaluation."""
        ...

    def on_steps(self, record: StepRecord) -> None:
        """Called every `log_every` steps, and after the last step before an evaluation."""
        ...

    def on_evaluation(self, record: EvaluationRecord, scores: dict[str, Scores]) -> None:
        """Called after each evaluation with its scores of `validation` and `test`."""
        ...


def train(
    config: TrainingConfig,
    model: nn.Module,
    rows: TrainingInput,
    observer: Observer | None = None,
) -> list[EvaluationRecord]:
    """Trains a model and returns the record of each evaluation.

    Args:
        config: its model part is not read here: `model` may be any module over tables whose forward takes a `Batch`
            and gives logits.
        model: of `build_model`, for example.
        rows: of `open_input`, for example.
        observer: is told of what happens.

    Raises:
        ValueError: bad input, no training or validation rows, or a loss that is not finite.
    """
    if rows.test is not None:
        _read_through(rows.test)
    run = _Run(config, model, rows, observer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)  # For dropout.
        for epoch in range(1, config.epochs + 1):
            if not run.train_epoch(epoch):
                break
    return run.records


class _Run:
    """The state of a run between its steps."""

    def __init__(
        self, config: TrainingConfig, model: nn.Module, rows: TrainingInput, observer: Observer | None
    ) -> None:
        self.records: list[EvaluationRecord] = []
        self._config = config
        self._model = model
        self._input = rows
        self._observer = observer
        self._optimizers = make_optimizers(config, model)
        self._schedule = Schedule(
            self._optimizers,
            config.schedule,
            epochs=config.epochs,
            warmup_steps=config.warmup_steps,
            gamma=config.gamma,
        )
        self._stopping = EarlyStopping(config.patience or 0)
        self._segment_field = _field_number(config.auc_by, rows.train)
        self._step = 0
        self._rows = 0
        self._since_log = Stretch()
        self._since_evaluation = Stretch()

    def train_epoch(self, epoch: int) -> bool:
        """Passes over the training rows once; returns whether to go on."""
        every = self._config.evaluate_every
        epoch_rows, evaluated = 0, False
        with closing(_training_batches(self._config, self._input.train, epoch)) as batches:
            for batch in batches:
                self._train_on(batch, self._epochs_done(epoch, epoch_rows))
                epoch_rows += len(batch)
                self._report(epoch, epoch_rows)
                evaluated = every is not None and self._step % every == 0
                if evaluated and not self._evaluate(epoch, self._epochs_done(epoch, epoch_rows)):
                    return False
        if epoch_rows == 0:
            raise ValueError("no training rows are left beside the validation rows")
        is_due = every is None or epoch == self._config.epochs
        return evaluated or not is_due or self._evaluate(epoch, float(epoch))

    def _train_on(self, batch: Batch, epochs_done: float) -> None:
        self._schedule.before_step(self._step + 1, epochs_done)
        loss_sum = _take_step(self._model, self._optimizers, batch, self._config.reduction)
        self._step += 1
        self._rows += len(batch)
        self._since_log.add(len(batch), loss_sum)
        self._since_evaluation.add(len(batch), loss_sum)

    def _epochs_done(self, epoch: int, epoch_rows: int) -> float:
        expected = self._input.train.estimated_rows
        return epoch - 1 + (min(1.0, epoch_rows / expected) if expected else 0.0)

    def _report(self, epoch: int, epoch_rows: int) -> None:
        if self._observer is not None:
            self._observer.on_batch(epoch, epoch_rows, self._input.train.estimated_rows, self._since_evaluation.loss)
        if self._step % self._config.log_every == 0:
            self._record_steps(epoch)

    def _record_steps(self, epoch: int) -> None:
        if self._observer is not None and self._since_log.rows > 0:
            self._observer.on_steps(
                StepRecord(
                    step=self._step,
                    epoch=epoch,
                    rows=self._rows,
                    loss=self._since_log.loss,
                    rows_per_second=self._since_log.rows / self._since_log.seconds,
                    lr=self._optimizers[0].param_groups[0]["lr"],
                    table_rows=table_rows(self._model),
                    table_bytes=table_bytes(self._model, self._optimizers),
                    process_bytes=process_bytes(),
                )
            )
        self._since_log.restart()

    def _evaluate(self, epoch: int, epochs_done: float) -> bool:
        """Evaluates, records it, and returns whether to go on."""
        self._record_steps(epoch)
        seconds = self._since_evaluation.seconds
        scores = self._scores()
        validation, test = (Evaluation.of(scores[part]) if part in scores else None for part in ("validation", "test"))
        record = EvaluationRecord(
            number=len(self.records) + 1,
            epoch=epochs_done,
            step=self._step,
            rows=self._rows,
            train_loss=self._since_evaluation.loss,
            train_rows=self._since_evaluation.rows,
            seconds=seconds,
            validation=validation,
            test=test,
            table_rows=table_rows(self._model),
        )
        self.records.append(record)
        if self._observer is not None:
            self._observer.on_evaluation(record, scores)
        self._since_log.restart()
        self._since_evaluation.restart()
        if validation is None:
            return True
        self._schedule.after_evaluation(validation.logloss)
        return not self._stopping.should_stop(validation.logloss)

    def _scores(self) -> dict[str, Scores]:
        parts = {"validation": self._input.validation, "test": self._input.test}
        return {
            part: predict(self._model, regroup(rows, EVALUATION_ROWS), segment_field=self._segment_field)
            for part, rows in parts.items()
            if rows is not None
        }


def _take_step(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    batch: Batch,
    reduction: Literal["mean", "sum"],
) -> float:
    """Returns the batch's loss summed over its rows, before the step; in nats."""
    loss = _logloss(model(batch), batch.labels, reduction)
    loss_value = loss.item()
    if not math.isfinite(loss_value):
        raise ValueError(f"the training loss became {loss_value}; lower the learning rate")
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss_value * (len(batch) if reduction == "mean" else 1)


def _logloss(logits: Tensor, labels: Tensor, reduction: Literal["mean", "sum"]) -> Tensor:
    # binary_cross_entropy_with_logits computes the same, but wakes all threads for a batch of any
    # size, which on a busy machine takes far longer than the step.
    losses = softplus(logits) - labels * logits
    return losses.mean() if reduction == "mean" else losses.sum()


def _read_through(rows: RowSource) -> None:
    # A bad line among the test rows must not surface only after an epoch's work.
    for _ in rows:
        pass


def _training_batches(config: TrainingConfig, rows: RowSource, epoch: int) -> Generator[Batch, None, None]:
    """The batches of an epoch, read ahead of the steps on a thread of their own."""
    blocks: Iterator[Batch] = iter(rows)
    if config.shuffle:
        blocks = shuffled(blocks, config.shuffle_window, np.random.default_rng([config.seed, epoch]))
    return read_ahead(regroup(blocks, config.batch_size))


def _field_number(name: str | None, rows: RowSource) -> int | None:
    if name is None:
        return None
    if name not in rows.field_names:
        raise ValueError(f"auc_by must name a field, one of {', '.join(rows.field_names)}; got {name!r}")
    return rows.field_names.index(name)
