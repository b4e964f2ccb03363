"""Ids in files of any format: eight bytes, little-endian, wherever they begin."""

from __future__ import annotations

from typing import BinaryIO

from recstore_ops.forgetting.id_set import Found, IdSet

_ID_BYTES = 8
_BYTES_AT_A_TIME = 1 << 20


def in_binary_file(file: BinaryIO, ids: IdSet) -> Found:
    """Returns how often each id is in a file, which is read to its end."""
    found, rest = Found(), b""
    while part := file.read(_BYTES_AT_A_TIME):
        data = rest + part
        found += ids.within(data)
        rest = data[-(_ID_BYTES - 1) :]
    return found


__all__ = ["in_binary_file"]
