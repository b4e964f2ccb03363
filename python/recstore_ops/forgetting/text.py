"""Ids in text: decimal numbers that stand alone."""

from __future__ import annotations

import re
from typing import BinaryIO

from recstore_ops.forgetting.id_set import Found, IdSet

# `7.0` is the 7 of a column with gaps; `7.5`, `x7` and `0.7` are others. The hyphen of `a-7` is no sign.
_NUMBER = re.compile(rb"(?<![\w.])(-?[0-9]+)(?:\.0+)?(?!\w|\.[0-9])")
_ENDS = (b"\n", b" ", b",", b";", b"\t")
_BYTES_AT_A_TIME = 1 << 20


def in_text(text: bytes, ids: IdSet) -> Found:
    """Returns how often each id is a number of a text."""
    return ids.among_texts(_NUMBER.findall(text))


def in_text_file(file: BinaryIO, ids: IdSet) -> Found:
    """The same of a file, read to its end."""
    found, rest = Found(), b""
    while part := file.read(_BYTES_AT_A_TIME):
        text = rest + part
        end = max(text.rfind(end) for end in _ENDS) + 1
        if not end and len(text) > _BYTES_AT_A_TIME:
            end = len(text)
        found += in_text(text[:end], ids)
        rest = text[end:]
    return found + in_text(rest, ids)


def is_text(beginning: bytes) -> bool:
    """Whether a file that begins so is text: UTF-8 without NUL."""
    if b"\0" in beginning:
        return False
    try:
        beginning.decode("utf-8")
    except UnicodeDecodeError as error:
        # A character may be cut off at the end.
        return error.start >= len(beginning) - 3 > 0
    return True


__all__ = ["in_text", "in_text_file", "is_text"]
