"""Looking through files for ids: by their format where it is known, else number by number or byte by byte."""

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
from pathlib import Path
from typing import Any

from recstore_ops.config.extras import imported
from recstore_ops.config.progress_bars import progress_bar
from recstore_ops.forgetting.binary import in_binary_file
from recstore_ops.forgetting.columns import in_parquet
from recstore_ops.forgetting.id_set import IdSet
from recstore_ops.forgetting.place import held_perhaps
from recstore_ops.forgetting.report import Held
from recstore_ops.forgetting.safetensors_columns import NoSafetensors, in_safetensors
from recstore_ops.forgetting.text import in_text_file, is_text

_BEGINNING_BYTES = 1 << 16
_PARQUET, _ZIP = b"PAR1", b"PK\3\4"


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
    """Returns how a file holds ids, if it does; one that cannot be read may hold them."""
    try:
        return _by_format(path, tables, ids)
    except OSError as error:
        return [Held(path, f"it cannot be read: {error.strerror or error}", (), 0, is_certain=False)]


def _by_format(path: Path, tables: frozenset[str], ids: IdSet) -> list[Held]:
    with path.open("rb") as file:  # by path: it is only read
        beginning = file.read(_BEGINNING_BYTES)
    if beginning.startswith(_PARQUET) and (found := _in_parquet(path, ids)) is not None:
        return found
    if beginning.startswith(_ZIP) and zipfile.is_zipfile(path):
        return _in_zip(path, tables, ids)
    for magic, opened in _COMPRESSED.items():
        if beginning.startswith(magic) and (found := _in_compressed(path, opened, tables, ids)) is not None:
            return found
    return _in_stream(path, _plain(path), tables, ids)


Opened = Callable[[], Any]
"""Opens a file, or what is within, from its beginning."""


def _plain(path: Path) -> Opened:
    return lambda: path.open("rb")  # by path: it is only read


def _in_stream(shown: Path, opened: Opened, tables: frozenset[str], ids: IdSet) -> list[Held]:
    """Looks through plain contents: tensors, text, or any bytes."""
    with closing(opened()) as file:
        beginning = file.read(_BEGINNING_BYTES)
    if is_text(beginning):
        with closing(opened()) as file:
            return held_perhaps(shown, "text", in_text_file(file, ids))
    try:
        with closing(opened()) as file:
            return held_perhaps(shown, "a tensor", in_safetensors(file, ids, tables))
    except NoSafetensors:
        with closing(opened()) as file:
            return held_perhaps(shown, "bytes", in_binary_file(file, ids))


def _in_parquet(path: Path, ids: IdSet) -> list[Held] | None:
    """Looks through columns; None where the file is damaged."""
    try:
        columns = in_parquet(path, ids)
    except (ValueError, OSError):
        return None
    return [held for name, found in columns.items() for held in held_perhaps(path, f"the column {name}", found)]


def _in_zip(path: Path, tables: frozenset[str], ids: IdSet) -> list[Held]:
    """Looks through the members of a zip archive, as files of torch and numpy are, or the bytes of a damaged one."""
    found: list[Held] = []
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                found += _in_stream(path, lambda name=member: archive.open(name), tables, ids)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError):
        return _in_stream(path, _plain(path), tables, ids)
    return found


def _in_compressed(path: Path, opened: Opener, tables: frozenset[str], ids: IdSet) -> list[Held] | None:
    """Looks through what is compressed; None where it is damaged."""
    try:
        return _in_stream(path, lambda: opened(path), tables, ids)
    except (EOFError, lzma.LZMAError, zlib.error, OSError):
        return None


__all__ = ["look_into", "scan"]
