"""Makes the model that a run trains, as it begins, and says in the end what became of the rows that it began with."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from torch import nn

from recstore_ops.training.build import Existing, build_model, tables_of
from recstore_ops.training.config import TrainingConfig
from recstore_ops.training.job import Job
from recstore_ops.training.other_run import DenseStart, OtherRun
from recstore_ops.training.row_changes import RowChanges, RowsBefore
from recstore_ops.training.rows.row_source import RowSource
from recstore_ops.training.tables import Vocabulary


@dataclass(frozen=True)
class Begun:
    """How a run began.

    Attributes:
        job: the processes that train together.
        rows_before: those of this process that it began with; None if it began anew.
        start: what optimizers outside tables begin with.
        note: what it began with, in a sentence.
    """

    job: Job
    rows_before: RowsBefore | None = None
    start: DenseStart | None = None
    note: str | None = None

    def changes(self, model: nn.Module) -> list[RowChanges]:
        """Returns what became of the rows of each table, those of all processes together; all of them call it."""
        if self.rows_before is None:
            return []
        return [_of_all(self.job, changes) for changes in self.rows_before.changes(tables_of(model))]


def begin(
    config: TrainingConfig,
    rows: RowSource,
    job: Job,
    run: Path,
    *,
    is_new: bool,
    replaces: bool = False,
    vocabulary: Vocabulary | None = None,
) -> tuple[nn.Module, Begun]:
    """Returns the configured model for training rows, with the rows of another run if so configured.

    Args:
        config: of the run.
        rows: the training rows.
        job: the processes that train together; all call it.
        run: the run's directory, which keeps what it began with.
        is_new: whether the run does not go on from a save of its own.
        replaces: whether rows that tables of these names have already are given up.
        vocabulary: the ids, where tables are `nn.Embedding`.

    Raises:
        ValueError, OSError: as `OtherRun` and `build_model`.
    """
    # Initial values depend on the table's name: it must not be the run's, or no run could be repeated.
    name = config.prefix
    existing: Existing = "refuse" if not replaces else "drop" if is_new else "keep"
    if config.init_from is None or not is_new:
        model = build_model(config, name, rows, vocabulary, job.group, existing=existing)
        return model, Begun(job, None if config.init_from is None else RowsBefore.read(run))
    other = OtherRun(config, rows, job)
    model = other.build(name, rows, existing)
    before = RowsBefore.of(tables_of(model))
    before.write(run, job.rank)
    return model, Begun(job, before, other.dense_start(), other.note())


def _of_all(job: Job, changes: RowChanges) -> RowChanges:
    counts = {name: count for name, count in asdict(changes).items() if name != "table"}
    return RowChanges(changes.table, **dict(zip(counts, map(int, job.summed(*counts.values())), strict=True)))
