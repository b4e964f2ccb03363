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
# Below this part of all strings it costs less to pick those that go on.
_FEW = 0.5
_KEPT_BYTES = np.array([(1 << 8 * kept) - 1 for kept in range(_WORD_BYTES)] + [2**64 - 1], dtype=np.uint64)


def hash_texts(cells: pa.Array) -> NDArray[np.uint64]:
    """Returns the hash of each string [N], of any Arrow type of strings; that of a missing one is any number."""
    cells = pc.cast(cells, pa.large_string())
    _, offsets, characters = cells.buffers()
    ends = np.frombuffer(offsets, dtype=np.int64)[cells.offset : cells.offset + len(cells) + 1]
    starts, lengths = ends[:-1], np.diff(ends)
    words = _words_at_every_byte(characters)
    hashes = splitmix64(lengths)
    for done in range(0, int(lengths.max(initial=0)), _WORD_BYTES):
        goes_on = lengths > done
        if done > 0 and np.count_nonzero(goes_on) < _FEW * len(lengths):
            _hash_rest(hashes, words, starts, lengths, done)
            break
        next_hashes = _with_word(hashes, words, np.minimum(starts + done, len(words) - 1), lengths - done)
        hashes = next_hashes if goes_on.all() else np.where(goes_on, next_hashes, hashes)
    return hashes


def _hash_rest(
    hashes: NDArray[np.uint64],
    words: NDArray[np.uint64],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    done: int,
) -> None:
    """Adds the words behind the first `done` bytes, where few strings have any."""
    places = np.flatnonzero(lengths > done)
    while len(places):
        hashes[places] = _with_word(hashes[places], words, starts[places] + done, lengths[places] - done)
        done += _WORD_BYTES
        places = places[lengths[places] > done]


def _with_word(
    hashes: NDArray[np.uint64], words: NDArray[np.uint64], places: NDArray[np.int64], left: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """Returns hashes with the word at each place, of which so many bytes are left of the string; none may be."""
    word = words[places] & _KEPT_BYTES[np.clip(left, 0, _WORD_BYTES)]
    return splitmix64((hashes ^ word).view(np.int64))


def _words_at_every_byte(characters: pa.Buffer | None) -> NDArray[np.uint64]:
    """Returns the 8 bytes from each byte on, as a view of overlapping words, zeros behind the last."""
    size = 0 if characters is None else characters.size
    padded = np.zeros(size + _WORD_BYTES, dtype=np.uint8)
    if characters is not None:
        padded[:size] = np.frombuffer(characters, dtype=np.uint8)
    return np.ndarray(size + 1, dtype="<u8", buffer=padded, strides=(1,))
