"""The rows of one table of a loaded run as vectors: all of them, or those of one field's ids.

Shape suffixes: N ids, D dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import torch
from numpy.typing import NDArray

from recstore_ops import Table
from recstore_ops.config.paths import check_output_file, replacing
from recstore_ops.ops import operators
from recstore_ops.training.data.field_ids import VALUE_BITS
from recstore_ops.training.run.build import all_sequences
from recstore_ops.training.run.finished_run import LoadedRun

_BYTES_PER_CHUNK = 16 << 20
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
        """The name of an id in messages: the id itself without a field, else the value of the field."""
        if self._field_name is None:
            return f"id {id}"
        return f"{self._field_name} {values_of_ids(np.array([id], dtype=np.int64))[0]}, id {id}"

    def parts(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Yields ids and vectors, some at a time."""
        count = max(1, _BYTES_PER_CHUNK // (4 * self.dim))
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


# A file of vectors with their ids: Parquet, or two of numpy.
#
# A Parquet file has the columns `id`, int64, rising, and `vector`, a list of D float32. `NAME.npy` has the vectors,
# float32 [N, D], and `NAME.ids.npy` beside it their ids, int64 [N].


def check_output(path: Path, *, replaces: bool) -> None:
    """Checks the places of files of vectors before the work on them; arguments and errors as `check_output_file`."""
    for file in _files(path):
        check_output_file(file, _WRITERS, replaces=replaces)


def write_vectors(path: Path, vectors: Vectors, on_rows: Callable[[int], object]) -> list[Path]:
    """Writes vectors in parts to a temporary file, which moves to its place once all are written.

    Args:
        path: ends in .parquet or .npy, which selects the format; checked by `check_output`.
        vectors: the vectors.
        on_rows: called after each part with its number of vectors.

    Returns:
        The files.

    Raises:
        OSError: it cannot be written.
    """
    files = _files(path)
    with replacing(files) as beside:
        _WRITERS[path.suffix](beside, vectors, on_rows)
    return files


def _files(path: Path) -> list[Path]:
    return [path.with_suffix(".ids.npy"), path] if path.suffix == ".npy" else [path]


def _write_parquet(beside: list[Path], vectors: Vectors, on_rows: Callable[[int], object]) -> None:
    vector_type = pa.list_(pa.float32(), vectors.dim)
    schema = pa.schema([("id", pa.int64()), ("vector", vector_type)])
    with parquet.ParquetWriter(beside[0], schema, use_dictionary=False) as writer:
        for ids_N, rows_ND in vectors.parts():
            rows = pa.FixedSizeListArray.from_arrays(pa.array(rows_ND.reshape(-1)), type=vector_type)
            writer.write_batch(pa.record_batch([pa.array(ids_N), rows], schema=schema))
            on_rows(ids_N.size)


def _write_numpy(beside: list[Path], vectors: Vectors, on_rows: Callable[[int], object]) -> None:
    with open(beside[0], "wb") as ids:
        np.save(ids, vectors.ids)
    with open(beside[1], "wb") as file:
        header = {"descr": np.dtype(np.float32).str, "fortran_order": False, "shape": (len(vectors), vectors.dim)}
        np.lib.format.write_array_header_1_0(file, header)
        for ids_N, rows_ND in vectors.parts():
            file.write(np.ascontiguousarray(rows_ND).data)
            on_rows(ids_N.size)


_WRITERS: dict[str, Callable[[list[Path], Vectors, Callable[[int], object]], None]] = {
    ".parquet": _write_parquet,
    ".npy": _write_numpy,
}


# The nearest vectors of a vector: searched through all of them, or by an index of faiss or hnswlib.
#
# Shape suffixes: N ids, D dim, K neighbours.

Metric = Literal["dot", "cosine"]
IndexName = Literal["exact", "faiss", "hnswlib"]
Found = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Ids and scores of neighbours, the nearest first: int64 [K], float64 [K]."""

_PACKAGES = {"faiss": "faiss-cpu", "hnswlib": "hnswlib"}
# Usual for hnswlib: links of each vector, and vectors looked at while it is built.
_LINKS, _BUILD_WIDTH = 32, 200


def nearest(vectors: Vectors, id: int, count: int, metric: Metric = "cosine", index: IndexName = "exact") -> Found:
    """Returns the nearest other ids, at most `count` of them; of equal scores the lower id first.

    Args:
        vectors: among which it is searched.
        id: one of theirs.
        count: K, from 1.
        metric: dot product or cosine; higher is nearer. A vector of zeros has the cosine 0.
        index: "exact" reads all vectors, some at a time. "faiss" and "hnswlib" put all of them in an index in memory;
            hnswlib's finds nearly all of the nearest.

    Raises:
        ValueError: the id has no row, or is one of zeros, which has no cosine; or an argument is out of range.
        ImportError: the package of the index is not installed.
    """
    if count < 1:
        raise ValueError(f"expected at least 1 neighbour, got {count}")
    for word, value, known in (("metric", metric, get_args(Metric)), ("index", index, get_args(IndexName))):
        if value not in known:
            raise ValueError(f"expected {word} to be one of {', '.join(known)}, got {value!r}")
    query_D = vectors.row(id).astype(np.float64)
    if metric == "cosine" and not query_D.any():
        raise ValueError(f"the row of id {id} is zero, which has no cosine with others; take the metric dot")
    # One more than asked for, since the id itself is among its nearest.
    ids_K, scores_K = _SEARCHES[index](vectors, query_D, count + 1, metric)
    is_other_K = ids_K != id
    return ids_K[is_other_K][:count], scores_K[is_other_K][:count]


def _exact(vectors: Vectors, query_D: NDArray[np.float64], count: int, metric: Metric) -> Found:
    best: Found = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float64)
    for ids_N, rows_ND in vectors.parts():
        scores_N = _scores(rows_ND, query_D, metric)
        best = _first(np.concatenate([best[0], ids_N]), np.concatenate([best[1], scores_N]), count)
    return best


def _scores(rows_ND: NDArray[np.float32], query_D: NDArray[np.float64], metric: Metric) -> NDArray[np.float64]:
    rows = rows_ND.astype(np.float64)
    scores_N = rows @ query_D
    if metric == "dot":
        return scores_N
    lengths_N = np.linalg.norm(rows, axis=1) * np.linalg.norm(query_D)
    return np.divide(scores_N, lengths_N, out=np.zeros_like(scores_N), where=lengths_N > 0)


def _first(ids: NDArray[np.int64], scores: NDArray[np.float64], count: int) -> Found:
    order = np.lexsort((ids, -scores))[:count]
    return ids[order], scores[order]


def _by_faiss(vectors: Vectors, query_D: NDArray[np.float64], count: int, metric: Metric) -> Found:
    faiss = _imported("faiss")
    index = faiss.IndexFlatIP(vectors.dim)
    for _, rows_ND in vectors.parts():
        index.add(_scaled(rows_ND, metric))
    scores, places = index.search(_scaled(query_D[None].astype(np.float32), metric), min(count, len(vectors)))
    return _first(vectors.ids[places[0]], scores[0].astype(np.float64), count)


def _by_hnswlib(vectors: Vectors, query_D: NDArray[np.float64], count: int, metric: Metric) -> Found:
    hnswlib = _imported("hnswlib")
    index, found = hnswlib.Index(space="ip", dim=vectors.dim), min(count, len(vectors))
    index.init_index(max_elements=len(vectors), ef_construction=_BUILD_WIDTH, M=_LINKS)
    for ids_N, rows_ND in vectors.parts():
        index.add_items(_scaled(rows_ND, metric), np.searchsorted(vectors.ids, ids_N))
    index.set_ef(max(_BUILD_WIDTH, found))
    places, distances = index.knn_query(_scaled(query_D[None].astype(np.float32), metric), k=found)
    # The distance is 1 less the product.
    return _first(vectors.ids[places[0].astype(np.int64)], 1 - distances[0].astype(np.float64), count)


def _scaled(rows_ND: NDArray[np.float32], metric: Metric) -> NDArray[np.float32]:
    """For cosines, vectors of length 1; those of zeros stay."""
    if metric == "dot":
        return rows_ND
    lengths_N1 = np.linalg.norm(rows_ND, axis=1, keepdims=True)
    return np.divide(rows_ND, lengths_N1, out=np.zeros_like(rows_ND), where=lengths_N1 > 0)


def _imported(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError:
        raise ImportError(
            f"the index {name} needs a package that is not installed: run `pip install {_PACKAGES[name]}`"
        ) from None


_SEARCHES: dict[IndexName, Callable[[Vectors, NDArray[np.float64], int, Metric], Found]] = {
    "exact": _exact,
    "faiss": _by_faiss,
    "hnswlib": _by_hnswlib,
}
