"""The hash of strings that are ids.

    h = splitmix64(number of bytes)
    h = splitmix64(h xor word)      for each word: 8 bytes of the UTF-8 text, little-endian, the last filled with zeros

The same text has the same hash in every file, format and process.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recstore_ops import _native
from recstore_ops.training.schema.arrow_functions import pc


def hash_texts(cells: pa.Array) -> NDArray[np.uint64]:
    """Returns the hash of each string [N], of any Arrow type of strings; that of a missing one is any number."""
    cells = pc.cast(cells, pa.large_string())
    _, offsets, characters = cells.buffers()
    places = np.frombuffer(offsets, dtype=np.int64)[cells.offset : cells.offset + len(cells) + 1]
    hashes = _native.hash_texts(places.tobytes(), b"" if characters is None else characters.to_pybytes())
    return np.frombuffer(hashes, dtype=np.uint64)
