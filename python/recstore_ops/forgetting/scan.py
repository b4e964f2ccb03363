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
from typing import Any

from recstore_ops.config.extras import imported
from recstore_ops.config.progress_bars import progress_bar
from recstore_ops.forgetting.columns import in_parquet
from recstore_ops.forgetting.id_set import IdSet
from recstore_ops.forgetting.place import held_perhaps
from recstore_ops.forgetting.report import Held
from recstore_ops.forgetting.safetensors_columns import NoSafetensors, in_safetensors
from recstore_ops.forgetting.text import in_text_file, is_text

_BEGINNING_BYTES = 1 << 16
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
"""What readers raise about a file: the system's errors, and those of damaged or encrypted contents."""


def scan(
    directories: Iterable[Path], known: set[Path], tables: frozenset[str], ids: IdSet, progress: bool | None
) -> list[Held]:
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
    found: list[Held] = []
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


def look_into(path: Path, tables: frozenset[str], ids: IdSet) -> list[Held]:
    """Returns how a file holds ids, if it does; one that cannot be read, or is damaged, may hold them."""
    try:
        return _by_format(path, tables, ids)
    except _UNREADABLE as error:
        reason = getattr(error, "strerror", None) or error
        return [Held(path, f"it cannot be read: {reason}", (), 0, is_certain=False)]


def _by_format(path: Path, tables: frozenset[str], ids: IdSet) -> list[Held]:
    with path.open("rb") as file:  # by path: it is only read
        beginning = file.read(_BEGINNING_BYTES)
    if beginning.startswith(_PARQUET):
        columns = in_parquet(path, ids)
        return [held for name, found in columns.items() for held in held_perhaps(path, f"the column {name}", found)]
    if beginning.startswith(_ZIP):
        with zipfile.ZipFile(path) as archive:
            members = [partial(archive.open, member) for member in archive.infolist()]
            return [held for opened in members for held in _in_stream(path, opened, tables, ids)]
    openers = (opener for magic, opener in _COMPRESSED.items() if beginning.startswith(magic))
    return _in_stream(path, partial(next(openers, _plain), path), tables, ids)


def _plain(path: Path) -> Any:
    return path.open("rb")  # by path: it is only read


def _in_stream(shown: Path, opened: Callable[[], Any], tables: frozenset[str], ids: IdSet) -> list[Held]:
    """Looks through plain contents, which are opened from their beginning."""
    with closing(opened()) as file:
        beginning = file.read(_BEGINNING_BYTES)
    own = next((what for magic, what in _OWN.items() if beginning.startswith(magic)), None)
    with closing(opened()) as file:
        if own is not None:
            return held_perhaps(shown, own, ids.within(file))
        if is_text(beginning):
            return held_perhaps(shown, "text", in_text_file(file, ids))
        try:
            return held_perhaps(shown, "a tensor", in_safetensors(file, ids, tables))
        except NoSafetensors:
            return []


__all__ = ["look_into", "scan"]
