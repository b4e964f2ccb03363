"""The hash of strings that are ids.

    h = splitmix64(number of bytes)
    h = splitmix64(h xor word)      for each word: 8 bytes of the UTF-8 text, little-endian, the last filled with zeros

The same text has the same hash in every file, format and process.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recstore_ops.table.splitmix64 import splitmix64
from recstore_ops.training.schema.arrow_functions import pc

_WORD_BYTES = 8
_KEPT_BYTES = np.array([(1 << 8 * kept) - 1 for kept in range(_WORD_BYTES)] + [2**64 - 1], dtype=np.uint64)


def hash_texts(cells: pa.Array) -> NDArray[np.uint64]:
    """Returns the hash of each string [N], of any Arrow type of strings; that of a missing one is any number."""
    cells = pc.cast(cells, pa.large_string())
    _, offsets, characters = cells.buffers()
    ends = np.frombuffer(offsets, dtype=np.int64)[cells.offset : cells.offset + len(cells) + 1]
    starts, lengths = ends[:-1], np.diff(ends)
    hashes = splitmix64(lengths)
    words = _words_at_every_byte(characters)
    places = np.flatnonzero(lengths)
    done = 0
    while len(places):
        left = np.minimum(lengths[places] - done, _WORD_BYTES)
        word = words[starts[places] + done] & _KEPT_BYTES[left]
        hashes[places] = splitmix64((hashes[places] ^ word).view(np.int64))
        done += _WORD_BYTES
        places = places[lengths[places] > done]
    return hashes


def _words_at_every_byte(characters: pa.Buffer | None) -> NDArray[np.uint64]:
    """Returns the 8 bytes from each byte on, as a view of overlapping words, zeros behind the last."""
    size = 0 if characters is None else characters.size
    padded = np.zeros(size + _WORD_BYTES, dtype=np.uint8)
    if characters is not None:
        padded[:size] = np.frombuffer(characters, dtype=np.uint8)
    return np.ndarray(size + 1, dtype="<u8", buffer=padded, strides=(1,))
