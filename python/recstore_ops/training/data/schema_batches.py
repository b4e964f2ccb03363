"""Batches of Arrow columns, as their schema says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from recstore_ops.training.data.arrow_functions import pc
from recstore_ops.training.data.batch import Batch
from recstore_ops.training.data.column_cells import (
    Good,
    categories_of,
    groups_of,
    ids_of,
    labels_of,
    numbers_of,
    times_of,
    vectors_of,
    weights_of,
)
from recstore_ops.training.data.field_ids import field_ids
from recstore_ops.training.data.schema import ColumnSchema, Schema
from recstore_ops.training.data.text_cells import text_values

# The ids of one field and how many of them each row has, int64 [B]; None for one each.
FieldColumn = tuple[NDArray[np.int64], NDArray[np.int64] | None]


def interleave_fields(columns: Sequence[FieldColumn]) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Returns the ids [N] of F fields and their offsets [B * F + 1], None if every field has one id."""
    if all(lengths is None for _, lengths in columns):
        return np.stack([ids for ids, _ in columns], axis=1).reshape(-1), None
    lengths_BF = np.stack([np.ones_like(ids) if lengths is None else lengths for ids, lengths in columns], axis=1)
    offsets = np.concatenate([np.zeros(1, np.int64), lengths_BF.reshape(-1).cumsum()])
    joined = np.empty(offsets[-1], dtype=np.int64)
    starts_BF = offsets[:-1].reshape(lengths_BF.shape)
    for field, (ids, _) in enumerate(columns):
        joined[_places(starts_BF[:, field], lengths_BF[:, field])] = ids
    return joined, offsets


def _places(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers from each start on, as many as its length."""
    shifts = starts - (lengths.cumsum() - lengths)
    return np.arange(lengths.sum()) + np.repeat(shifts, lengths)


# Of more groups the reports name only some by their text.
_MAX_TEXTS = 1 << 20


class BatchMaker:
    """Makes batches of records.

    Args:
        schema: of the records, which may have further columns.

    Attributes:
        group_texts: the texts of the groups of the records so far, if groups are text.
    """

    def __init__(self, schema: Schema) -> None:
        self.group_texts: dict[int, str] = {}
        self._schema = schema
        self._fields = schema.fields
        self._dense = schema.of_role("number", "vector")

    def to_batch(self, records: pa.RecordBatch) -> tuple[Batch, Good]:
        """Returns all B rows, and which of them are good [B]; rows without labels have NaN."""
        good = np.ones(records.num_rows, dtype=np.bool_)
        ids, offsets = interleave_fields(self._field_columns(records, good))
        dense = self._dense_columns(records, good)
        batch = Batch(
            ids=torch.from_numpy(ids),
            labels=torch.from_numpy(self._labels(records, good)),
            num_fields=len(self._fields),
            offsets=None if offsets is None else torch.from_numpy(offsets),
            dense=torch.from_numpy(np.concatenate(dense, axis=1)) if dense else None,
            weights=self._weights(records, good),
            times=self._times(records, good),
            groups=self._groups(records, good),
        )
        return batch, good

    def explain(self, records: pa.RecordBatch, row: int) -> str:
        """Explains why a row is not good: the expected content and the actual one."""
        for column in self._schema.read:
            cells = records.column(column.name)[row : row + 1]
            if not self._is_good(cells, column):
                return f"expected {self._expected(column)} in column {column.name!r}, got {cells[0].as_py()}"
        raise AssertionError("every cell is good")

    def _labels(self, records: pa.RecordBatch, good: Good) -> NDArray[np.float32]:
        label = self._schema.label
        if label is None:
            return np.full(records.num_rows, np.nan, dtype=np.float32)
        return _noting(good, labels_of(records.column(label.name), label))

    def _weights(self, records: pa.RecordBatch, good: Good) -> Tensor | None:
        weight = self._schema.weight
        return None if weight is None else torch.from_numpy(_noting(good, weights_of(records.column(weight.name))))

    def _times(self, records: pa.RecordBatch, good: Good) -> Tensor | None:
        time = self._schema.time
        return None if time is None else torch.from_numpy(_noting(good, times_of(records.column(time.name), time)))

    def _groups(self, records: pa.RecordBatch, good: Good) -> Tensor | None:
        if (group := self._schema.group) is None:
            return None
        cells = records.column(group.name)
        if group.type == "string":
            self._note_texts(cells)
        return torch.from_numpy(_noting(good, groups_of(cells, group)))

    def _note_texts(self, cells: pa.Array) -> None:
        texts = pc.unique(cells.dictionary_decode() if isinstance(cells, pa.DictionaryArray) else cells).drop_null()
        if len(self.group_texts) < _MAX_TEXTS:
            known = self.group_texts
            for place, value in enumerate(text_values(texts).tolist()):
                if value not in known:
                    known[value] = texts[place].as_py()

    def _field_columns(self, records: pa.RecordBatch, good: Good) -> list[FieldColumn]:
        fields: list[FieldColumn] = []
        for number, column in enumerate(self._fields):
            cells = records.column(column.name)
            if column.role == "categorical":
                values, lengths = _noting(good, categories_of(cells)), None
            else:
                values, lengths, is_good = ids_of(cells, column, self._element_type(column))
                good &= is_good
            space = number if column.of is None else self._schema.field_names.index(column.of)
            fields.append((field_ids(values[:, None], space)[:, 0], lengths))
        return fields

    def _element_type(self, column: ColumnSchema) -> str:
        """The type of the ids in a column of text: the type of the column whose ids it has, else string."""
        target = None if column.of is None else self._schema.column(column.of)
        return "string" if target is None else target.type

    def _dense_columns(self, records: pa.RecordBatch, good: Good) -> list[NDArray[np.float32]]:
        made = []
        for column in self._dense:
            cells = records.column(column.name)
            if column.role == "vector":
                made.append(_noting(good, vectors_of(cells, column)))
            else:
                made.append(_noting(good, numbers_of(cells, column))[:, None])
        return made

    def _is_good(self, cells: pa.Array, column: ColumnSchema) -> bool:
        if column is self._schema.group and not groups_of(cells, column)[1].all():
            return False
        checks = {
            "label": lambda: labels_of(cells, column)[1],
            "categorical": lambda: categories_of(cells)[1],
            "ids": lambda: ids_of(cells, column)[2],
            "sequence": lambda: ids_of(cells, column, self._element_type(column))[2],
            "number": lambda: numbers_of(cells, column)[1],
            "vector": lambda: vectors_of(cells, column)[1],
            "time": lambda: times_of(cells, column)[1],
            "weight": lambda: weights_of(cells)[1],
        }
        return column.role not in checks or bool(checks[column.role]().all())

    def _expected(self, column: ColumnSchema) -> str:
        if column.role == "label":
            return "a finite number" if column.threshold is not None else f"{column.negative} or {column.positive}"
        if column.role == "sequence":
            return f"ids as {column.of!r} has, {self._element_type(column)},"
        if column.role == "time":
            return "a time"
        if column.role == "weight":
            return "a weight of 0 or more"
        if column.role == "vector":
            return f"{column.size} finite 32-bit numbers"
        return "a finite 32-bit number" if column.role == "number" else "a whole number"


def _noting(good: Good, made: tuple[NDArray, Good]) -> NDArray:
    """Returns what was made of a column, and notes which rows are good."""
    good &= made[1]
    return made[0]
