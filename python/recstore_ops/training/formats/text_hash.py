"""The hash of strings that are ids.

    h = splitmix64(number of bytes)
    h = splitmix64(h xor word)      for each word: 8 bytes of the UTF-8 text, little-endian, the last filled with zeros

The same text has the same hash in every file, format and process.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.types as types
from numpy.typing import NDArray

from recstore_ops import _native
from recstore_ops.training.formats.field_ids import MISSING, VALUE_BITS
from recstore_ops.training.schema.arrow_functions import pc


def text_values(cells: pa.Array) -> NDArray[np.int64]:
    """Returns the lower 40 bits of the hash of each string [N], of any Arrow type of strings.

    A missing one has the value `MISSING`, and a string whose hash is that the value with its lowest bit turned over.
    """
    if not (types.is_string(cells.type) or types.is_large_string(cells.type)):
        cells = pc.cast(cells, pa.large_string())
    validity, _, characters = cells.buffers()
    places = text_places(cells)
    values = _native.hash_texts(
        places.tobytes(),
        places.itemsize,
        b"" if characters is None else characters.to_pybytes(),
        None if validity is None else validity.to_pybytes(),
        cells.offset,
        VALUE_BITS,
        MISSING,
    )
    return np.frombuffer(values, dtype=np.int64)


def text_places(cells: pa.Array) -> NDArray[np.signedinteger]:
    """Returns where each of N strings begins among the characters, and where the last ends, [N + 1]."""
    width = np.int32 if types.is_string(cells.type) else np.int64
    return np.frombuffer(cells.buffers()[1], dtype=width)[cells.offset : cells.offset + len(cells) + 1]
