"""The cost of keeping the rows of a finished run with fewer bits: errors by table, and the change of the figures."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from recstore_ops.ops import operators
from recstore_ops.serving import Bundle, EncodingName, FrozenTable, freeze
from recstore_ops.table.table import Table
from recstore_ops.training.data.batch import Batch
from recstore_ops.training.metrics.evaluation import Evaluation, evaluate
from recstore_ops.training.run.build import tables_of
from recstore_ops.training.run.choices import RETRIEVAL
from recstore_ops.training.run.exported_run import export_run, tensors_of
from recstore_ops.training.run.finished_run import LoadedRun
from recstore_ops.training.run.saved_run import short_name

_ROWS_PER_CHUNK = 65_536


@dataclass(frozen=True)
class TableError:
    """How far the rows of a frozen table are from those that were trained.

    Attributes:
        table: as the model calls it.
        rows, dim: of the table.
        bytes: of the file, ids included.
        rms: root of the mean square difference of all elements.
        rms_of_rows: root of the mean square of all elements, to compare `rms` with.
        largest: the largest absolute difference of an element.
    """

    table: str
    rows: int
    dim: int
    bytes: int
    rms: float
    rms_of_rows: float
    largest: float


@dataclass(frozen=True)
class Quantization:
    """A run with its rows in one encoding.

    Attributes:
        encoding: of all tables.
        tables: the errors of each.
        evaluation: figures of the given rows; None for a model that retrieves, or without rows.
    """

    encoding: EncodingName
    tables: tuple[TableError, ...]
    evaluation: Evaluation | None


def quantize_run(run: LoadedRun, rows: Iterable[Batch] | None, encodings: Sequence[EncodingName]) -> list[Quantization]:
    """Returns the errors of the run's tables, and its figures, in each encoding.

    Args:
        run: of `load`; unchanged by this.
        rows: with labels; read once for each encoding. None examines the tables only.
        encodings: as in `freeze`.

    Raises:
        ValueError: an unknown encoding, or the rows hold fewer than two.
        OSError: a row has a value that an encoding has no number for.
    """
    with tempfile.TemporaryDirectory(prefix="recstore-") as directory:
        return [_quantized(run, rows, encoding, Path(directory)) for encoding in encodings]


def _quantized(run: LoadedRun, rows: Iterable[Batch] | None, encoding: EncodingName, directory: Path) -> Quantization:
    tables = tuple(_error_of(table, encoding, directory / "table") for table in tables_of(run.model))
    if rows is None or run.config.model in RETRIEVAL:
        return Quantization(encoding, tables, None)
    bundle = export_run(run, rows, directory / encoding, encoding=encoding)
    return Quantization(encoding, tables, evaluate(_OverBatches(bundle).eval(), rows))


def _error_of(table: Table, encoding: EncodingName, path: Path) -> TableError:
    size = freeze(table, path, encoding)
    frozen, ids = FrozenTable(path), operators.hashtable_ids(table.handle)
    squares = squares_of_rows = largest = 0.0
    for some in ids.split(_ROWS_PER_CHUNK):
        trained = operators.emb_read(table.handle, some, table.dim).double()
        difference = frozen.read(some).double() - trained
        squares += float(difference.square().sum())
        squares_of_rows += float(trained.square().sum())
        largest = max(largest, float(difference.abs().max()))
    count = max(ids.numel() * table.dim, 1)
    rms, rms_of_rows = (squares / count) ** 0.5, (squares_of_rows / count) ** 0.5
    return TableError(short_name(table.name), ids.numel(), table.dim, size, rms, rms_of_rows, largest)


class _OverBatches(nn.Module):
    """A bundle of `export_run` that takes batches and gives logits, as the model that it was made of."""

    def __init__(self, bundle: Bundle) -> None:
        super().__init__()
        self._bundle = bundle
        self._names = [described["name"] for described in bundle.manifest.inputs]

    def forward(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            return self._bundle(**tensors_of(batch, self._names))["logits"]
