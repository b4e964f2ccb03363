"""A file of vectors with their ids: Parquet, or two of numpy.

A Parquet file has the columns `id`, int64, rising, and `vector`, a list of D float32. `NAME.npy` has the vectors,
float32 [N, D], and `NAME.ids.npy` beside it their ids, int64 [N].
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from recstore_ops.config.output_files import check_output_file, replacing
from recstore_ops.training.vectors import Vectors


def check_output(path: Path, *, replaces: bool) -> None:
    """Checks the places of files of vectors before the work on them; arguments and errors as `check_output_file`."""
    for file in _files(path):
        check_output_file(file, _WRITERS, replaces=replaces)


def write_vectors(path: Path, vectors: Vectors, on_rows: Callable[[int], object]) -> list[Path]:
    """Writes vectors beside the file's place, some at a time; they appear there once all are written.

    Args:
        path: ends in .parquet or .npy, which says what is written; `check_output` has seen it.
        vectors: what is written.
        on_rows: is told of each number of vectors written.

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
