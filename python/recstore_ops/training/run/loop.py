"""The training loop: epochs over the training rows, evaluation after each or more often, early stopping.

Test rows are only ever evaluated. The logloss on validation rows, which are held out of the training rows, decides
when to stop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from recstore_ops import DistEmbedding, SparseOptimizer
from recstore_ops.training.data.batch import Batch, field_number, regroup, shuffled
from recstore_ops.training.data.read_ahead import read_ahead
from recstore_ops.training.data.row_source import RowSource
from recstore_ops.training.metrics.evaluation import Evaluation, Scores, predict
from recstore_ops.training.metrics.retrieval import RankedPart, Retriever, evaluate_retrieval
from recstore_ops.training.report.html_page import Evaluations
from recstore_ops.training.report.records import EvaluationRecord, StepRecord, best_record
from recstore_ops.training.run.build import table_bytes, table_rows, tables_of
from recstore_ops.training.run.checkpoints import RunCheckpoints
from recstore_ops.training.run.config import TrainingConfig
from recstore_ops.training.run.dense_parameters import dense_parameters, load_dense_parameters
from recstore_ops.training.run.event_times import TimeToLive
from recstore_ops.training.run.job import Job, WholeBatches
from recstore_ops.training.run.optimizers import make_optimizers
from recstore_ops.training.run.phases import Phases, Window, process_bytes
from recstore_ops.training.run.schedules import Schedule
from recstore_ops.training.run.stopping import EarlyStopping
from recstore_ops.training.run.training_input import TrainingInput, file_sizes
from recstore_ops.training.run.warm_start import DenseStart

# Evaluation has no batch size to respect: large batches are faster, and change no result.
EVALUATION_ROWS = 8192


class Observer(Protocol):
    """An observer of a run."""

    def on_batch(self, epoch: int, rows: int, expected_rows: int | None, loss: float) -> None:
        """Called after each step with the epoch's rows so far and the mean loss since the last evaluation."""
        ...

    def on_steps(self, record: StepRecord) -> None:
        """Called every `log_every` steps, and after the last step before an evaluation."""
        ...

    def on_evaluation(self, record: EvaluationRecord, scores: dict[str, Scores]) -> None:
        """Called after each evaluation with its scores of `validation` and `test`."""
        ...


BatchAndEstimate = tuple[Batch, int | None]
"""A batch, and the rows that an epoch is estimated to have."""


@runtime_checkable
class HasLosses(Protocol):
    """A model with a loss of its own in place of the logloss of its logits."""

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns each row's loss in nats and its weight in the batch's mean, [B] each."""
        ...


def train(
    config: TrainingConfig,
    model: nn.Module,
    rows: TrainingInput,
    observer: Observer | None = None,
    checkpoints: RunCheckpoints | None = None,
    job: Job | None = None,
    start: DenseStart | None = None,
    phases: Phases | None = None,
) -> Evaluations:
    """Trains a model and returns the record of each evaluation.

    Args:
        config: its model part is not read here: `model` may be any module over tables whose forward takes a `Batch`
            and gives logits. One with `losses`, see `HasLosses`, is trained by these instead, and a `Retriever` is
            evaluated by ranking the distinct items of all rows.
        model: of `build_model`, for example.
        rows: of `open_input`, for example.
        observer: its methods are called as the run proceeds.
        checkpoints: saves the run, and resumes it from an earlier save. With them the model ends in the state of the
            best evaluation, without them in the state after the last step.
        job: the processes that train together, over which the model's tables are sharded; this one alone by default.
            All call it with the same rows, and all or none with an observer and checkpoints.
        start: the initial state of optimizers outside the tables, unless the run resumes from a save; new by default.
        phases: measures the time of each phase.

    Raises:
        ValueError: bad input, no training or validation rows, or a loss that is not finite.
        OSError: the run cannot be saved, or what was saved is damaged.
        RunStopped: the run was asked to end, and was saved.
    """
    if rows.test is not None:
        _read_through(rows.test)
    _check_parts(rows, config.validation_fraction)
    return Run(config, model, rows, observer, checkpoints, job or Job(), phases).to_its_end(start)


class Run:
    """The state of a run between its steps; arguments as in `train`."""

    def __init__(
        self,
        config: TrainingConfig,
        model: nn.Module,
        rows: TrainingInput,
        observer: Observer | None,
        checkpoints: RunCheckpoints | None,
        job: Job,
        phases: Phases | None = None,
    ) -> None:
        self.records = Evaluations()
        self.finished = False
        self._file: str | None = None
        self._checkpoints = checkpoints
        self._config = config
        self._model = model
        self._job = job
        self._epochs = config.epochs or 1
        self._trained_model = job.with_mean_gradients(model)
        self._input = rows.with_candidates(model.sides) if isinstance(model, Retriever) else rows
        # By name, of those that were evaluated once.
        self._ranked: dict[str, RankedPart] = {}
        self._observer = observer
        self._optimizers = make_optimizers(config, model)
        self._phases = phases or Phases()
        if phases is not None:
            phases.watch_lookups(
                module for module in model.modules() if isinstance(module, (DistEmbedding, nn.Embedding))
            )
        self._schedule = Schedule(
            self._optimizers,
            config.schedule,
            epochs=self._epochs,
            warmup_steps=config.warmup_steps,
            gamma=config.gamma,
        )
        self._stopping = EarlyStopping(config.patience or 0)
        self._time_to_live = TimeToLive.of(config, model)
        names = rows.train.field_names
        # Where rows have groups they are the segments.
        by_field = config.auc_by is not None and rows.train.group_name is None
        self._segment_field = field_number("auc_by", config.auc_by or "", names) if by_field else None
        self._step = 0
        self._rows = 0
        self._epoch = 1
        self._epoch_steps = 0
        self._epoch_rows = 0
        # Of one epoch. Estimated once and not anew with each block read, which would depend on how far the reader is
        # ahead of the steps.
        self._expected_rows: int | None = None
        self._since_log = Window()
        self._since_evaluation = Window()

    def to_its_end(self, start: DenseStart | None) -> Evaluations:
        """Trains until the run is finished, and returns its records; arguments and errors as in `train`."""
        self._phases.begin()
        # A run must not depend on random numbers that the program drew before, nor change those that it draws after.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._config.seed)  # For dropout.
            self.restore(start)
            while not self.finished:
                self.train_epoch()
        self.take_best()
        return self.records

    def restore(self, start: DenseStart | None) -> None:
        """Resumes from the last save, if there is one; else begins as `start` says."""
        state = None if self._checkpoints is None else self._checkpoints.last_state()
        if self._checkpoints is not None and state is not None:
            self._checkpoints.load_last_tables(self._table_names())
            self._load_state_dict(state)
        elif start is not None:
            self._begin_with(start)

    def train_epoch(self) -> None:
        """Passes over the training rows once, without those of the epoch that were used before a save."""
        batches = _training_batches(self._config, self._input.train, self._epoch, self._epoch_steps)
        with closing(batches):
            for batch, estimated_rows in self._awaited(batches):
                if not self._expected_rows:
                    # Of one process for all: the learning rate may depend on it.
                    self._expected_rows = self._job.told_by_first(estimated_rows)
                self._train_on(batch)
                self._report(estimated_rows)
                if self._after_step():
                    return
        if self._epoch_rows == 0:
            raise ValueError("no training rows are left beside the validation rows")
        self._end_epoch()

    def _awaited(self, batches: Iterator[BatchAndEstimate]) -> Iterator[BatchAndEstimate]:
        """Yields the batches, and measures the time in which the steps wait for them."""
        while True:
            with self._phases("input"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def take_best(self) -> None:
        """Loads the tables and parameters of the best evaluation into the model, if the run is saved."""
        if self._checkpoints is None:
            return
        self._checkpoints.settle()
        if best_record(self.records) is not self.records[-1]:
            state = self._checkpoints.best_state()
            assert state is not None, "every best evaluation is saved"
            self._checkpoints.load_best_tables(self._table_names())
            load_dense_parameters(self._model, state["model"])

    def _table_names(self) -> list[str]:
        return [table.name for table in tables_of(self._model)]

    def _train_on(self, batch: Batch) -> None:
        self._schedule.before_step(self._step + 1, self._epochs_done())
        model, optimizers, reduction = self._trained_model, self._optimizers, self._config.reduction
        loss_sum = _take_step(model, optimizers, batch, reduction, self._job, self._checkpoints, self._phases)
        self._step += 1
        self._epoch_steps += 1
        self._rows += len(batch)
        self._epoch_rows += len(batch)
        self._time_to_live.after_step(self._step, batch)
        self._since_log.add(len(batch), loss_sum)
        self._since_evaluation.add(len(batch), loss_sum)

    def _after_step(self) -> bool:
        """Evaluates and saves when that is due; returns whether the run is finished."""
        every = self._config.evaluate_every
        is_evaluated = every is not None and self._step % every == 0
        if is_evaluated:
            self._evaluate(self._epochs_done())
        # Without validation rows the best evaluation is the last one, which the end of the epoch saves.
        is_new_best = is_evaluated and self._is_best() and self._input.validation is not None
        if self._checkpoints is not None and (is_new_best or self.finished or self._checkpoints.is_due(self._step)):
            self._save()
        return self.finished

    def _end_epoch(self) -> None:
        is_due = self._config.evaluate_every is None or self._epoch == self._epochs
        if is_due and not self._is_evaluated():
            self._evaluate(float(self._epoch))
        # Known exactly now, and no estimate any more.
        self._expected_rows = self._epoch_rows
        self._epoch += 1
        self._epoch_steps = self._epoch_rows = 0
        self.finished = self.finished or self._is_after_last_epoch()
        self._save()

    def _is_after_last_epoch(self) -> bool:
        return self._epoch > self._epochs

    def _epochs_done(self) -> float:
        expected = self._expected_rows
        return self._epoch - 1 + (min(1.0, self._epoch_rows / expected) if expected else 0.0)

    def _report(self, estimated_rows: int | None) -> None:
        if self._observer is not None:
            self._observer.on_batch(self._epoch, self._epoch_rows, estimated_rows, self._since_evaluation.loss)
        if self._step % self._config.log_every == 0:
            self._record_steps()

    def _record_steps(self) -> None:
        if self._observer is not None and self._since_log.rows > 0:
            rows_of_all, bytes_of_all, process_bytes_of_all = map(
                int,
                self._job.summed(table_rows(self._model), table_bytes(self._model, self._optimizers), process_bytes()),
            )
            self._observer.on_steps(
                StepRecord(
                    step=self._step,
                    epoch=self._epoch,
                    rows=self._rows,
                    loss=self._since_log.loss,
                    rows_per_second=self._since_log.rows / self._since_log.seconds,
                    lr=self._optimizers[0].param_groups[0]["lr"],
                    table_rows=rows_of_all,
                    table_bytes=bytes_of_all,
                    process_bytes=process_bytes_of_all,
                )
            )
        self._since_log.restart()

    def _evaluate(self, epochs_done: float) -> None:
        """Evaluates, records the result, and decides whether the run is finished."""
        self._record_steps()
        seconds = self._since_evaluation.seconds
        with self._phases("evaluation"):
            evaluations, scores = self._evaluations()
        record = EvaluationRecord(
            number=len(self.records) + 1,
            epoch=epochs_done,
            step=self._step,
            rows=self._rows,
            train_loss=self._since_evaluation.loss,
            train_rows=self._since_evaluation.rows,
            seconds=seconds,
            validation=evaluations.get("validation"),
            test=evaluations.get("test"),
            table_rows=int(self._job.summed(table_rows(self._model))[0]),
            file=self._file,
        )
        self.records.append(record)
        if self._observer is not None:
            with self._phases("report"):
                self._observer.on_evaluation(record, scores)
        self._since_log.restart()
        self._since_evaluation.restart()
        if record.validation is not None:
            self._schedule.after_evaluation(record.validation.logloss)
            self.finished = self._stopping.should_stop(record.validation.logloss)

    def _is_evaluated(self) -> bool:
        """Whether there was an evaluation since the last step."""
        return bool(self.records) and self.records[-1].step == self._step

    def _is_best(self) -> bool:
        """Whether it was the best one."""
        return self._is_evaluated() and best_record(self.records) is self.records[-1]

    def _save(self) -> None:
        """Saves the run if so configured, and ends it then if it is asked to end."""
        if self._checkpoints is None:
            return
        started = time.perf_counter()
        with self._phases("checkpoint"):
            self._checkpoints.save(self._state_dict(), is_best=self._is_best())
        if not self.finished:
            self._checkpoints.raise_if_stopped(self._step)
        for stretch in (self._since_log, self._since_evaluation):
            stretch.leave_out(time.perf_counter() - started)

    def _state_dict(self) -> dict[str, Any]:
        return {
            "finished": self.finished,
            "step": self._step,
            "rows": self._rows,
            "epoch": self._epoch,
            "epoch_steps": self._epoch_steps,
            "epoch_rows": self._epoch_rows,
            "expected_rows": self._expected_rows,
            "records": [asdict(record) for record in self.records],
            "since_log": self._since_log.state_dict(),
            "since_evaluation": self._since_evaluation.state_dict(),
            "schedule": self._schedule.state_dict(),
            "stopping": self._stopping.state_dict(),
            "event_times": self._time_to_live.state_dict(),
            "random": torch.get_rng_state(),
            "model": dict(dense_parameters(self._model)),
            "optimizers": [optimizer.state_dict() for optimizer in self._dense_optimizers()],
            "file_sizes": file_sizes(self._config),
        }

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        self.finished = state["finished"]
        self._step, self._rows = state["step"], state["rows"]
        self._epoch, self._epoch_steps, self._epoch_rows = state["epoch"], state["epoch_steps"], state["epoch_rows"]
        self._expected_rows = state["expected_rows"]
        self.records = Evaluations(EvaluationRecord.of(fields) for fields in state["records"])
        self._since_log.load_state_dict(state["since_log"])
        self._since_evaluation.load_state_dict(state["since_evaluation"])
        self._schedule.load_state_dict(state["schedule"])
        self._stopping.load_state_dict(state["stopping"])
        self._time_to_live.load_state_dict(state.get("event_times"))
        torch.set_rng_state(state["random"])
        load_dense_parameters(self._model, state["model"])
        for optimizer, saved in zip(self._dense_optimizers(), state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def _begin_with(self, start: DenseStart) -> None:
        for optimizer, state in zip(self._dense_optimizers(), start.optimizers or [], strict=False):
            # Its options, such as its learning rate, are this run's own.
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state["state"]})
        self._time_to_live.load_state_dict(start.event_times)
        if start.random is not None:
            torch.set_rng_state(start.random)

    def _dense_optimizers(self) -> list[torch.optim.Optimizer]:
        # The store keeps what its optimizers know, and its schedule sets their rates anew before each step.
        return [optimizer for optimizer in self._optimizers if not isinstance(optimizer, SparseOptimizer)]

    def _evaluations(self) -> tuple[dict[str, Evaluation], dict[str, Scores]]:
        """The figures of each part that there is, and its scores if the model gives logits."""
        if isinstance(self._model, Retriever):
            return {part: self._ranking(self._model, part, rows) for part, rows in self._parts()}, {}
        scores = self._scores()
        return {part: Evaluation.of(each) for part, each in scores.items()}, scores

    def _scores(self) -> dict[str, Scores]:
        return {
            part: predict(
                WholeBatches(self._model, self._job), regroup(rows, EVALUATION_ROWS), segment_field=self._segment_field
            ).with_texts(rows.group_texts)
            for part, rows in self._parts()
        }

    def _parts(self) -> Iterator[tuple[str, RowSource]]:
        """The rows that are evaluated."""
        for part, rows in (("validation", self._input.validation), ("test", self._input.test)):
            if rows is not None:
                yield part, rows

    def _ranking(self, model: Retriever, part: str, rows: RowSource) -> Evaluation:
        candidates = self._input.candidates
        assert candidates is not None, "found before training"
        if part not in self._ranked:
            self._ranked[part] = RankedPart.of(model.sides, rows, candidates)
        return evaluate_retrieval(model, candidates, self._ranked[part])


def _take_step(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    batch: Batch,
    reduction: Literal["mean", "sum"],
    job: Job,
    checkpoints: RunCheckpoints | None,
    phase: Phases,
) -> float:
    """Returns the loss of a batch summed over its rows, before the step, in nats; all processes stop if one is to.

    For a model with losses of its own, the result is their weighted mean times the number of rows.
    """
    with phase("forward"):
        loss_sum, weight = _loss_sum_and_weight(model, batch, job)
    is_stopped = checkpoints is not None and checkpoints.is_stopped
    # One exchange for both, so that no step needs a second one to ask whether a process is to end.
    loss_of_all, stopped = job.summed(loss_sum.item(), is_stopped)
    if stopped and checkpoints is not None:
        checkpoints.stop()
    # Before the backward pass: no table has changed when this is raised.
    if not math.isfinite(loss_of_all):
        raise ValueError(f"the training loss became {loss_of_all}; lower the learning rate")
    with phase("backward"):
        for optimizer in optimizers:
            optimizer.zero_grad()
        # Gradients are averaged over the processes.
        (loss_sum * (job.world / (weight if reduction == "mean" else 1))).backward()
    for number, optimizer in enumerate(optimizers):
        with phase("dense" if number else "step"):
            optimizer.step()
    return loss_of_all * (len(batch) / weight) if isinstance(model, HasLosses) else loss_of_all


def _loss_sum_and_weight(model: nn.Module, batch: Batch, job: Job) -> tuple[Tensor, float]:
    """The sum of the losses of this process's rows, and the divisor of the sum over all processes for the mean."""
    if isinstance(model, HasLosses):
        losses, weights = model.losses(batch)
        return (losses * weights).sum(), weights.sum().item() or 1
    own = job.share(batch)
    return _loss_sum(model(own), own), _weight(batch)


def _loss_sum(logits: Tensor, batch: Batch) -> Tensor:
    losses = _losses(logits, batch.labels)
    return losses.sum() if batch.weights is None else (losses * batch.weights).sum()


def _weight(batch: Batch) -> float:
    """The number of rows of a batch, or the sum of their weights; 1 if all weights are 0, and so is the loss."""
    return len(batch) if batch.weights is None else batch.weights.sum().item() or 1


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    # binary_cross_entropy_with_logits computes the same, but wakes all threads for a batch of any
    # size, which on a busy machine takes far longer than the step.
    return softplus(logits) - labels * logits


def _read_through(rows: RowSource) -> None:
    # A bad line among the test rows must not surface only after an epoch's work.
    for _ in rows:
        pass


def _check_parts(rows: TrainingInput, fraction: float | None) -> None:
    """Refuses, before an epoch's work, rows of which none are left to train on, or none are held out."""
    if rows.validation is None:
        return
    if not _has_rows(rows.validation):
        count = sum(map(len, rows.train))
        raise ValueError(
            f"no rows to evaluate: validation_fraction {fraction} holds none out of {count:,} rows; 0 trains without"
        )
    if not _has_rows(rows.train):
        count = sum(map(len, rows.validation))
        raise ValueError(
            f"no training rows are left: validation_fraction {fraction} holds out all of {count:,} rows; 0 holds none"
        )


def _has_rows(rows: RowSource) -> bool:
    return any(map(len, rows))


def _training_batches(
    config: TrainingConfig, rows: RowSource, epoch: int, used: int
) -> Generator[BatchAndEstimate, None, None]:
    """The batches of an epoch without the first `used`, each with the current estimate of the epoch's rows.

    They are read ahead of the steps on a thread of their own.
    """
    blocks: Iterator[Batch] = iter(rows)
    if config.shuffle:
        # By epoch, so that a resumed run shuffles its epoch without a pass through those before it.
        rng = np.random.default_rng([config.seed, epoch])
        blocks = shuffled(blocks, config.shuffle_window, config.batch_size, rng)
    # Batches that were used before a save are made again and left out: shuffling then goes on as it would have.
    return read_ahead(_estimated(islice(regroup(blocks, config.batch_size), used, None), rows))


def _estimated(batches: Iterable[Batch], rows: RowSource) -> Iterator[BatchAndEstimate]:
    for batch in batches:
        yield batch, rows.estimated_rows
