"""The hash of strings that are ids: the lower 40 bits of `recstore_ops.hash_strings`.

The same text has the same hash in every file, format and process.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.types as types
from numpy.typing import NDArray

from recstore_ops.ops.made_ids import hash_strings
from recstore_ops.training.formats.field_ids import MISSING, VALUE_BITS
from recstore_ops.training.schema.arrow_functions import pc

_VALUE_MASK = (1 << VALUE_BITS) - 1


def text_values(cells: pa.Array) -> NDArray[np.int64]:
    """Returns the lower 40 bits of the hash of each string [N], of any Arrow type of strings.

    A missing one has the value `MISSING`, and a string whose hash is that the value with its lowest bit turned over.
    """
    if not (types.is_string(cells.type) or types.is_large_string(cells.type)):
        cells = pc.cast(cells, pa.large_string())
    values = values_of_hashes(hash_strings(cells, missing=0).numpy())
    if cells.null_count > 0:
        values[cells.is_null().to_numpy(zero_copy_only=False)] = MISSING
    return values


def values_of_hashes(hashes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the lower 40 bits of hashes, of none of which `MISSING` is the value."""
    values = hashes & _VALUE_MASK
    values[values == MISSING] ^= 1
    return values


def text_places(cells: pa.Array) -> NDArray[np.signedinteger]:
    """Returns where each of N strings begins among the characters, and where the last ends, [N + 1]."""
    width = np.int32 if types.is_string(cells.type) else np.int64
    return np.frombuffer(cells.buffers()[1], dtype=width)[cells.offset : cells.offset + len(cells) + 1]
