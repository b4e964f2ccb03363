"""Builds the model that a run trains, and reports at the end how the rows that it began with have changed."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from recstore_ops import Table
from recstore_ops.config.directory import read_file, replace_file
from recstore_ops.ops import operators
from recstore_ops.sharding.ownership import own_ids
from recstore_ops.table.shard_of import splitmix64
from recstore_ops.training.data.row_source import RowSource
from recstore_ops.training.models.tables import Vocabulary
from recstore_ops.training.run.build import Existing, build_model, tables_of
from recstore_ops.training.run.config import TrainingConfig
from recstore_ops.training.run.job import Job
from recstore_ops.training.run.warm_start import DenseStart, OtherRun

# What training changed in the rows of tables: how many came, left and moved since some moment.
#
# A moment is noted as 16 bytes a row: its id and a hash of its values. It can be written to a run's directory, so that
# a run that is resumed still knows it.
#
# Shape suffixes: N ids, D dim.

_ROWS_PER_CHUNK = 1 << 16
_NOTED = "rows_before-"
_Noted = tuple[NDArray[np.int64], NDArray[np.uint64]]


@dataclass(frozen=True)
class RowChanges:
    """The changes of a table between two moments.

    Attributes:
        table: its name.
        before, after: rows at the two moments.
        new: rows that were added.
        gone: rows that were removed.
        moved: rows that stayed and have other values.
    """

    table: str
    before: int
    after: int
    new: int
    gone: int
    moved: int

    def as_text(self) -> str:
        """Describes the changes in a line."""
        return (
            f"table {self.table}: {self.before:,} rows before, {self.new:,} new, {self.gone:,} gone, "
            f"{self.moved:,} moved, {self.after:,} now"
        )


class RowsBefore:
    """The rows of tables at one moment.

    Args:
        noted: of each table, by name, the ids, rising, and the hash of each row: int64 [N], uint64 [N].
    """

    def __init__(self, noted: Mapping[str, _Noted]) -> None:
        self._noted = dict(noted)

    @classmethod
    def of(cls, tables: Sequence[Table]) -> RowsBefore:
        """Notes the rows of this process as they are now."""
        return cls({table.name: _note(table) for table in tables})

    def write(self, directory: Path, part: int) -> None:
        """Writes what was noted as one of several parts."""
        for number, (name, (ids_N, hashes_N)) in enumerate(sorted(self._noted.items())):
            content = io.BytesIO()
            np.savez(content, table=np.array(name), ids=ids_N, hashes=hashes_N)
            replace_file(directory / f"{_NOTED}{part}-{number}.npz", content.getvalue())

    @classmethod
    def read(cls, directory: Path) -> RowsBefore:
        """Reads all parts; returns no rows if no part was written."""
        parts: dict[str, list[_Noted]] = {}
        for path in sorted(directory.glob(f"{_NOTED}*.npz")):
            with np.load(io.BytesIO(read_file(path))) as part:
                parts.setdefault(str(part["table"]), []).append((part["ids"], part["hashes"]))
        return cls({name: _merged(of_table) for name, of_table in parts.items()})

    def changes(self, tables: Sequence[Table]) -> list[RowChanges]:
        """Returns what changed since then in the rows of this process, table by table."""
        return [self._changes(table) for table in tables]

    def _changes(self, table: Table) -> RowChanges:
        empty = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint64)
        ids_N, hashes_N = self._noted.get(table.name, empty)
        is_own_N = own_ids(table, torch.from_numpy(ids_N)).numpy()
        before, hashes = ids_N[is_own_N], hashes_N[is_own_N]
        after, hashes_now = _note(table)
        stayed, places, places_now = np.intersect1d(before, after, assume_unique=True, return_indices=True)
        return RowChanges(
            table=table.name,
            before=before.size,
            after=after.size,
            new=after.size - stayed.size,
            gone=before.size - stayed.size,
            moved=int((hashes[places] != hashes_now[places_now]).sum()),
        )


def _note(table: Table) -> _Noted:
    ids_N = operators.hashtable_ids(table.handle).sort().values
    parts = [_hashes(operators.emb_read(table.handle, ids, table.dim)) for ids in ids_N.split(_ROWS_PER_CHUNK)]
    return ids_N.numpy(), np.concatenate([np.empty(0, dtype=np.uint64), *parts])


def _merged(parts: Sequence[_Noted]) -> _Noted:
    ids_N, hashes_N = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    # A part may be there twice, of a run that was killed before its first save and began again on fewer processes.
    ids_N, places = np.unique(ids_N, return_index=True)
    return ids_N, hashes_N[places]


def _hashes(rows_ND: Tensor) -> NDArray[np.uint64]:
    """A hash of the bits of each row: a sum of its words, each with an odd factor of its own, modulo 2^64."""
    words_ND = rows_ND.numpy().view(np.uint32)
    factors_D = splitmix64(np.arange(words_ND.shape[1], dtype=np.int64)) | np.uint64(1)
    return words_ND.astype(np.uint64) @ factors_D


@dataclass(frozen=True)
class InitialState:
    """How a run began.

    Attributes:
        job: the processes that train together.
        rows_before: those of this process that it began with; None if it began anew.
        start: the initial state of optimizers outside tables.
        note: the run's beginning, in a sentence.
    """

    job: Job
    rows_before: RowsBefore | None = None
    start: DenseStart | None = None
    note: str | None = None

    def changes(self, model: nn.Module) -> list[RowChanges]:
        """Returns the changes of each table, summed over all processes; all of them call it."""
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
) -> tuple[nn.Module, InitialState]:
    """Returns the configured model for training rows, with the rows of another run if so configured.

    Args:
        config: of the run.
        rows: the training rows.
        job: the processes that train together; all call it.
        run: the run's directory, which keeps the rows that the run began with.
        is_new: whether the run does not resume from a save of its own.
        replaces: whether to overwrite rows that tables of these names have already.
        vocabulary: the ids, if tables are `nn.Embedding`.

    Raises:
        ValueError, OSError: as `OtherRun` and `build_model`.
    """
    # Initial values depend on the table's name: it must not be the run's, or no run could be repeated.
    name = config.prefix
    existing: Existing = "refuse" if not replaces else "drop" if is_new else "keep"
    if config.init_from is None or not is_new:
        model = build_model(config, name, rows, vocabulary, job.group, existing=existing)
        return model, InitialState(job, None if config.init_from is None else RowsBefore.read(run))
    other = OtherRun(config, rows, job)
    model = other.build(name, rows, existing)
    before = RowsBefore.of(tables_of(model))
    before.write(run, job.rank)
    return model, InitialState(job, before, other.dense_start(), other.note())


def _of_all(job: Job, changes: RowChanges) -> RowChanges:
    counts = {name: count for name, count in asdict(changes).items() if name != "table"}
    return RowChanges(changes.table, **dict(zip(counts, map(int, job.summed(*counts.values())), strict=True)))
