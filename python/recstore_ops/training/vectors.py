"""The rows of one table of a loaded run as vectors: all of them, or those of one field's ids.

Shape suffixes: N ids, D dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from recstore_ops import Table
from recstore_ops.ops import operators
from recstore_ops.training.build import all_sequences
from recstore_ops.training.finished_run import LoadedRun
from recstore_ops.training.formats.field_ids import VALUE_BITS

_BYTES_AT_A_TIME = 16 << 20
_WITHOUT_FIELDS = ("libsvm", "libffm", None)
"""The formats whose ids do not carry their field; None for planted rows."""


class Vectors:
    """Vectors by id, in the order of the ids.

    Args:
        run: whose table it is; the model is not changed.
        table: its name, as models call it: `v`.
        field: only ids of this field; None takes all.

    Attributes:
        ids: int64 [N], rising.
        dim: D.

    Raises:
        ValueError: there is no such table or field, ids do not carry their field, or none has a row.
    """

    def __init__(self, run: LoadedRun, table: str, field: str | None = None) -> None:
        self._table = run.table(table)
        self._name = table
        self._field_name = field
        self._field = None if field is None else _field_number(run, table, field)
        ids_N = operators.hashtable_ids(self._table.handle).sort().values.numpy()
        if self._field is not None:
            ids_N = ids_N[ids_N >> VALUE_BITS == self._field]
        if ids_N.size == 0:
            raise ValueError(f"table {table} has no row" + ("" if field is None else f" of field {field}"))
        self.ids = ids_N
        self.dim = self._table.dim

    def __len__(self) -> int:
        return self.ids.size

    def id_of(self, value: int) -> int:
        """Returns the id of a value of the field; without a field the value is the id."""
        if self._field is None:
            return value
        return self._field << VALUE_BITS | value & ((1 << VALUE_BITS) - 1)

    def row(self, id: int) -> NDArray[np.float32]:
        """Returns the vector of an id, float32 [D].

        Raises:
            ValueError: it has no row.
        """
        place = np.searchsorted(self.ids, id)
        if place == self.ids.size or self.ids[place] != id:
            raise ValueError(f"table {self._name} has no row of {self._called(id)}")
        return self._read(self._table, self.ids[place : place + 1])[0]

    def _called(self, id: int) -> str:
        """What a user calls an id: without a field by itself, else by the value of the field."""
        if self._field_name is None:
            return f"id {id}"
        return f"{self._field_name} {values_of_ids(np.array([id], dtype=np.int64))[0]}, id {id}"

    def parts(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Yields ids and vectors, some at a time."""
        count = max(1, _BYTES_AT_A_TIME // (4 * self.dim))
        for start in range(0, self.ids.size, count):
            ids_N = self.ids[start : start + count]
            yield ids_N, self._read(self._table, ids_N)

    @staticmethod
    def _read(table: Table, ids_N: NDArray[np.int64]) -> NDArray[np.float32]:
        return operators.emb_read(table.handle, torch.from_numpy(ids_N), table.dim).numpy()


def values_of_ids(ids_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the values of ids that carry their field: the lower 40 bits as numbers with a sign."""
    above = 64 - VALUE_BITS
    return ids_N << above >> above


def _field_number(run: LoadedRun, table: str, field: str) -> int:
    form, buckets = run.form, run.config.hash_buckets
    if buckets is not None:
        raise ValueError(f"ids of the run are hashed to {buckets} buckets, which have no field")
    if form.file_format in _WITHOUT_FIELDS or table == "crosses":
        what = "of table crosses" if table == "crosses" else f"of {form.file_format or 'planted'} rows"
        raise ValueError(f"ids {what} do not carry their field, so that {field!r} cannot be told from others")
    if field not in form.fields:
        raise ValueError(f"the run has no field {field!r}; it has {', '.join(form.fields)}")
    # A history has no ids of its own.
    return form.fields.index(dict(all_sequences(run.config, form.sequences)).get(field, field))
