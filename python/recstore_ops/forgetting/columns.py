"""Ids in Parquet files: columns of integers and of text, also within lists and structs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from recstore_ops.config.extras import imported
from recstore_ops.forgetting.id_set import Found, IdSet

_ROWS_AT_A_TIME = 1 << 16


def in_parquet(path: Path, ids: IdSet) -> dict[str, Found]:
    """Returns how often each id is in each column of a file, of the columns that have any.

    Raises:
        ValueError, OSError: the file is damaged.
    """
    # Not with the package: it takes a tenth of a second.
    pa, pc, pq = (imported(f"pyarrow{part}", "train", "a Parquet file") for part in ("", ".compute", ".parquet"))
    texts = pa.array(ids.texts())
    found: dict[str, Found] = {}
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(_ROWS_AT_A_TIME):
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                for values in _leaves(pa, column):
                    found[name] = found.get(name, Found()) + _among(pa, pc, values, texts, ids)
    return {name: own for name, own in found.items() if own}


def _leaves(pa: Any, column: Any) -> Iterator[Any]:
    """The plain columns that a column is made of."""
    type = column.type
    if pa.types.is_dictionary(type):
        yield from _leaves(pa, column.dictionary_decode())
    elif pa.types.is_map(type):
        yield from _leaves(pa, column.keys)
        yield from _leaves(pa, column.items)
    elif pa.types.is_list(type) or pa.types.is_large_list(type) or pa.types.is_fixed_size_list(type):
        yield from _leaves(pa, column.flatten())
    elif pa.types.is_struct(type):
        for field in column.flatten():
            yield from _leaves(pa, field)
    else:
        yield column


def _among(pa: Any, pc: Any, values: Any, texts: Any, ids: IdSet) -> Found:
    type = values.type
    if pa.types.is_integer(type):
        numbers = values.drop_null().to_numpy(zero_copy_only=False)
        return ids.among(numbers.view(np.int64) if type == pa.uint64() else numbers.astype(np.int64))
    if pa.types.is_string(type) or pa.types.is_large_string(type):
        own = values.filter(pc.is_in(values, texts.cast(type))).to_pylist()
        return Found(ids.of_text(text) for text in own if text is not None)
    return Found()


__all__ = ["in_parquet"]
