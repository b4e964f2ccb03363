"""Looking through files for ids: by their format, or the numbers of a text. Files of other formats are left out."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from recstore_ops import _native
from recstore_ops.config.extras import imported
from recstore_ops.config.progress_bars import progress_bar
from recstore_ops.forgetting.id_set import IdSet, Match
from recstore_ops.forgetting.report import Occurrence, held_perhaps

_BEGINNING_BYTES = 1 << 16
_BYTES_PER_CHUNK = 1 << 20
_ROWS_PER_CHUNK = 1 << 16
_ENDS = (b"\n", b" ", b",", b";", b"\t")
_PARQUET, _ZIP = b"PAR1", b"PK\3\4"
_OWN = {b"RECSTORELOG\0": "log", b"recstore update ": "update"}
"""How files of servers and publications begin, whose ids are eight bytes anywhere, and what holds ids there."""


Opener = Callable[[Path], Any]


def _zstd(path: Path) -> Any:
    return imported("pyarrow", "train", "a file of zstd").input_stream(str(path), compression="zstd")


_COMPRESSED: dict[bytes, Opener] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
    b"\x28\xb5\x2f\xfd": _zstd,
}
"""How files begin that are compressed, and what reads them."""

_UNREADABLE = (OSError, EOFError, ValueError, RuntimeError, lzma.LZMAError, zlib.error, zipfile.BadZipFile)
"""Errors that readers raise about a file: the system's errors, and those of damaged or encrypted contents."""


def scan(
    directories: Iterable[Path], known: set[Path], tables: frozenset[str], ids: IdSet, progress: bool | None
) -> list[Occurrence]:
    """Returns the files that hold ids, or may.

    Args:
        directories: with all that is below; links to directories are not followed.
        known: files that are left out, as resolved paths.
        tables: whose ids they are.
        ids: which.
        progress: whether to show a bar; by default if the standard error is a terminal or a notebook.
    """
    files = sorted({file for directory in directories for file in _files_below(directory)} - known)
    sizes = {file: file.stat().st_size for file in files}
    found: list[Occurrence] = []
    with progress_bar(
        progress, total=sum(sizes.values()), desc="looking through files", unit="B", unit_scale=True
    ) as bar:
        for file, size in sizes.items():
            found.extend(look_into(file, tables, ids))
            bar.update(size)
    return found


def _files_below(directory: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(directory):
        for name in names:
            path = (Path(folder) / name).resolve()
            if path.exists() and stat.S_ISREG(path.stat().st_mode):  # Opening a FIFO would wait for ever.
                yield path


def look_into(path: Path, tables: frozenset[str], ids: IdSet) -> list[Occurrence]:
    """Returns how a file holds ids, if it does; one that cannot be read, or is damaged, may hold them."""
    try:
        return _by_format(path, tables, ids)
    except _UNREADABLE as error:
        reason = getattr(error, "strerror", None) or error
        return [Occurrence(path, f"it cannot be read: {reason}", (), 0, is_certain=False)]


def _by_format(path: Path, tables: frozenset[str], ids: IdSet) -> list[Occurrence]:
    with path.open("rb") as file:  # by path: it is only read
        beginning = file.read(_BEGINNING_BYTES)
    if beginning.startswith(_PARQUET):
        columns = _columns_of(path, ids)
        return [held for name, found in columns.items() for held in held_perhaps(path, f"the column {name}", found)]
    if beginning.startswith(_ZIP):
        with zipfile.ZipFile(path) as archive:
            members = [partial(archive.open, member) for member in archive.infolist()]
            return [held for opened in members for held in _in_stream(path, opened, tables, ids)]
    openers = (opener for magic, opener in _COMPRESSED.items() if beginning.startswith(magic))
    return _in_stream(path, partial(next(openers, _plain), path), tables, ids)


def _plain(path: Path) -> Any:
    return path.open("rb")  # by path: it is only read


def _in_stream(shown: Path, opened: Callable[[], Any], tables: frozenset[str], ids: IdSet) -> list[Occurrence]:
    """Looks through plain contents, which are opened from their beginning."""
    with closing(opened()) as file:
        beginning = file.read(_BEGINNING_BYTES)
    own = next((what for magic, what in _OWN.items() if beginning.startswith(magic)), None)
    with closing(opened()) as file:
        if own is not None:
            return held_perhaps(shown, own, Match(dict(_native.ids_in_bytes(file, list(ids)))))
        if _is_text(beginning):
            return held_perhaps(shown, "text", _in_text_file(file, ids))
        tensors = _native.ids_in_tensors(file, list(tables), list(ids))
        return [] if tensors is None else held_perhaps(shown, "a tensor", Match(dict(tensors)))


def _in_text_file(file: BinaryIO, ids: IdSet) -> Match:
    """Returns how often each id is a number of a file, which is read to its end."""
    found, rest = Match(), b""
    while part := file.read(_BYTES_PER_CHUNK):
        text = rest + part
        # Up to the last separator: a number must not be cut in two.
        end = max(text.rfind(end) for end in _ENDS) + 1
        # A text without separators must not grow to the size of its file.
        if not end and len(text) > _BYTES_PER_CHUNK:
            end = len(text)
        found += ids.in_text(text[:end])
        rest = text[end:]
    return found + ids.in_text(rest)


def _is_text(beginning: bytes) -> bool:
    """Whether a file that begins so is text: UTF-8 without NUL."""
    if b"\0" in beginning:
        return False
    try:
        beginning.decode("utf-8")
    except UnicodeDecodeError as error:
        # A character may be cut off at the end.
        return error.start >= len(beginning) - 3 > 0
    return True


def _columns_of(path: Path, ids: IdSet) -> dict[str, Match]:
    """Returns how often each id is in each column of a file, of the columns that have any.

    Raises:
        ValueError, OSError: the file is damaged.
    """
    # Not with the package: it takes a tenth of a second.
    pa, pc, pq = (imported(f"pyarrow{part}", "train", "a Parquet file") for part in ("", ".compute", ".parquet"))
    texts = pa.array(ids.texts())
    found: dict[str, Match] = {}
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(_ROWS_PER_CHUNK):
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                for values in _leaves(pa, column):
                    found[name] = found.get(name, Match()) + _among(pa, pc, values, texts, ids)
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


def _among(pa: Any, pc: Any, values: Any, texts: Any, ids: IdSet) -> Match:
    type = values.type
    if pa.types.is_integer(type):
        numbers = values.drop_null().to_numpy(zero_copy_only=False)
        return ids.among(numbers.view(np.int64) if type == pa.uint64() else numbers.astype(np.int64))
    if pa.types.is_string(type) or pa.types.is_large_string(type):
        own = values.filter(pc.is_in(values, texts.cast(type))).to_pylist()
        return Match(ids.of_text(text) for text in own if text is not None)
    return Match()


__all__ = ["look_into", "scan"]
