"""Batches of Arrow columns, as their schema says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.types as types
import torch
from numpy.typing import NDArray
from torch import Tensor

from recstore_ops.table.shard_of import splitmix64
from recstore_ops.training.data.arrow_functions import pc
from recstore_ops.training.data.batch import NO_GROUP, Batch
from recstore_ops.training.data.field_ids import MISSING, VALUE_BITS, field_ids
from recstore_ops.training.data.number_keys import keys_of_numbers
from recstore_ops.training.data.sample import cell_type, is_date, is_list
from recstore_ops.training.data.schema import ColumnSchema, Schema, Unit
from recstore_ops.training.data.text_cells import read_cells, text_values

_VALUE_MASK = (1 << VALUE_BITS) - 1
# From here on doubles leave out whole numbers, and two ids would meet in one.
_MAX_EXACT = 2.0**53
_MICROSECONDS: dict[Unit, float] = {"s": 1e6, "ms": 1e3, "us": 1.0, "ns": 1e-3}
_MAX_MICROSECONDS = 3.2e18

Good = NDArray[np.bool_]
"""Marks the cells of a column that have a value; each function below returns the column's values, and these marks."""


def labels_of(cells: pa.Array, column: ColumnSchema) -> tuple[NDArray[np.float32], Good]:
    """Returns the labels [B], 0 or 1."""
    if cell_type(cells.type) == "string":
        words = pc.utf8_lower(pc.cast(_decoded(cells), pa.string())).to_numpy(zero_copy_only=False)
        positive, negative = words == column.positive, words == column.negative
        return positive.astype(np.float32), positive | negative
    numbers = _numbers(cells)
    if column.threshold is not None:
        return (numbers >= column.threshold).astype(np.float32), np.isfinite(numbers)
    assert column.positive is not None
    assert column.negative is not None
    positive, negative = numbers == float(column.positive), numbers == float(column.negative)
    return positive.astype(np.float32), positive | negative


def numbers_of(cells: pa.Array, column: ColumnSchema) -> tuple[NDArray[np.float32], Good]:
    """Returns the numbers [B] after the column's transform, 0 for a missing cell; good ones are finite."""
    numbers = _numbers(cells)
    is_missing = cells.is_null().to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = _transformed(numbers, column).astype(np.float32)
    narrow[is_missing] = 0
    return narrow, np.isfinite(narrow)


def vectors_of(cells: pa.Array, column: ColumnSchema) -> tuple[NDArray[np.float32], Good]:
    """Returns the vectors [B, D], zeros for a missing cell; good ones have D finite numbers."""
    assert column.size is not None
    lengths = pc.call_function("list_value_length", [cells]).fill_null(0).to_numpy(zero_copy_only=False)
    is_missing = cells.is_null().to_numpy(zero_copy_only=False)
    good = is_missing | (lengths == column.size)
    vectors = np.zeros((len(cells), column.size), dtype=np.float32)
    elements = _numbers(cells.filter(pa.array(good)).flatten())
    with np.errstate(over="ignore"):
        vectors[good & ~is_missing] = elements.reshape(-1, column.size)
    return vectors, good & np.isfinite(vectors).all(axis=1)


def weights_of(cells: pa.Array) -> tuple[NDArray[np.float32], Good]:
    """Returns the weights [B]; good ones are finite and not negative."""
    with np.errstate(over="ignore"):
        weights = _numbers(cells).astype(np.float32)
    return weights, np.isfinite(weights) & (weights >= 0)


def times_of(cells: pa.Array, column: ColumnSchema) -> tuple[NDArray[np.int64], Good]:
    """Returns the times [B] in microseconds since 1970; good ones are there and within 100,000 years."""
    if column.unit is not None:
        numbers = _numbers(cells) * _MICROSECONDS[column.unit]
        good = np.abs(numbers) < _MAX_MICROSECONDS
        return np.where(good, numbers, 0).astype(np.int64), good
    cells = _decoded(cells)
    if cell_type(cells.type) == "string":
        cells = read_cells(pc.cast(cells, pa.string()), "time")[0]
    if not is_date(cells.type):
        return np.zeros(len(cells), dtype=np.int64), np.zeros(len(cells), dtype=np.bool_)
    times = pc.cast(pc.cast(cells, pa.timestamp("us", getattr(cells.type, "tz", None)), safe=False), pa.int64())
    good = cells.is_valid().to_numpy(zero_copy_only=False)
    # Of Arrow's own memory nobody may write to it.
    return times.fill_null(0).to_numpy(zero_copy_only=False).copy(), good


def categories_of(cells: pa.Array) -> tuple[NDArray[np.int64], Good]:
    """Returns the values of 40 bits [B], `MISSING` for a missing cell; good numbers have no fraction."""
    cells = _decoded(cells)
    if types.is_floating(cells.type) or types.is_decimal(cells.type):
        return _whole_values(cells)
    values = text_values(cells) if cell_type(cells.type) == "string" else _integer_values(cells)
    return values, np.ones(len(values), dtype=np.bool_)


def groups_of(cells: pa.Array, column: ColumnSchema) -> tuple[NDArray[np.int64], Good]:
    """Returns the groups [B], `NO_GROUP` for a missing cell: keys of amounts, else values; good ones are whole.

    Args:
        cells: of the column.
        column: by which rows are grouped, whatever its role.
    """
    if column.has_amounts:
        return keys_of_numbers(_numbers(cells)), np.ones(len(cells), dtype=np.bool_)
    values, good = categories_of(cells)
    return np.where(values == MISSING, NO_GROUP, values), good


def ids_of(
    cells: pa.Array, column: ColumnSchema, element_type: str = "string"
) -> tuple[NDArray[np.int64], NDArray[np.int64], Good]:
    """Returns the values of 40 bits [N] of the ids of all rows, how many each row has [B], and which rows are good [B].

    A missing element becomes `MISSING`. Missing lists and empty text have no ids.

    Args:
        cells: lists or text.
        column: of them.
        element_type: what is in text, "integer" for example.
    """
    elements_are_text = not is_list(cells.type)
    if not is_list(cells.type):
        texts = pc.cast(_decoded(cells), pa.large_string())
        # Arrow splits an empty text into one empty id.
        texts = pc.if_else(pc.equal(texts, ""), None, texts)
        cells = pc.split_pattern(texts, column.separator)
    lengths = pc.call_function("list_value_length", [cells]).fill_null(0).to_numpy(zero_copy_only=False)
    elements, bad = cells.flatten(), {}
    if elements_are_text and element_type != "string":
        elements, bad = read_cells(pc.cast(elements, pa.string()), element_type)
    values, good_N = categories_of(elements)
    good_N[list(bad)] = False
    good = np.ones(len(lengths), dtype=np.bool_)
    if not good_N.all():
        good[np.repeat(np.arange(len(lengths)), lengths)[~good_N]] = False
    return values, lengths.astype(np.int64), good


def _transformed(numbers: NDArray[np.float64], column: ColumnSchema) -> NDArray[np.float64]:
    if column.transform == "log":
        return np.copysign(np.log1p(np.abs(numbers)), numbers)
    if column.transform == "standard":
        assert column.mean is not None
        assert column.deviation is not None
        return (numbers - column.mean) / column.deviation
    return numbers


def _numbers(cells: pa.Array) -> NDArray[np.float64]:
    """The numbers [B] in double precision; NaN for a missing cell."""
    return pc.cast(cells, pa.float64(), safe=False).fill_null(np.nan).to_numpy(zero_copy_only=False)


def _decoded(cells: pa.Array) -> pa.Array:
    return cells.dictionary_decode() if types.is_dictionary(cells.type) else cells


def _whole_values(cells: pa.Array) -> tuple[NDArray[np.int64], Good]:
    numbers = _numbers(cells)
    is_missing = np.isnan(numbers)
    good = is_missing | ((numbers == np.floor(numbers)) & (np.abs(numbers) < _MAX_EXACT))
    values = np.where(good & ~is_missing, numbers, 0).astype(np.int64)
    return _integer_values(pa.array(values, mask=is_missing)), good


def _integer_values(cells: pa.Array) -> NDArray[np.int64]:
    """Returns integers of 40 bits as they are, and mixes larger ones to 40 bits: truncated, they would collide.

    The integer that stands for a missing cell is mixed too.
    """
    wide_type = pa.uint64() if types.is_unsigned_integer(cells.type) else pa.int64()
    numbers = pc.cast(cells, wide_type).fill_null(0).to_numpy(zero_copy_only=False)
    half = 1 << (VALUE_BITS - 1)
    stays = (numbers >= -half) & (numbers < half) & (numbers != MISSING)
    values = numbers.view(np.int64).copy()
    if not stays.all():
        values[~stays] = splitmix64(values[~stays]).view(np.int64) & _VALUE_MASK
        # The mix may hit the value that stands for a missing cell.
        values[values == MISSING] ^= 1
    if cells.null_count > 0:
        values[cells.is_null().to_numpy(zero_copy_only=False)] = MISSING
    return values


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
