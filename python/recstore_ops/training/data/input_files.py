"""Finds the training and test files that a user means: files, or a directory that holds both.

In a directory, a file belongs to the training part if its name has the word `train`, and to the test part if it has
the word `test`. Words end at anything but a letter: `train.libfm`, `small_test-01`. A subdirectory of such a name
belongs to that part with all of its files. A directory of `part-*` files, as Spark writes them, is one part, and so is
one that is given as a test part. Files that editors and other programs leave are ignored: `.train.txt.swp`,
`train.txt~`, `_SUCCESS`.
"""

from __future__ import annotations

import atexit
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path


def find_input_files(train: Sequence[Path], test: Sequence[Path]) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Returns the training files and the test files.

    `train` is files, or one directory; `test` is files or directories and overrides the directory's test files.
    Both lists keep the given order; a directory's files come sorted by name.

    Raises:
        ValueError: a path does not exist, a directory stands among several training paths or holds no training file,
            or a file is in both parts.
    """
    for path in (*train, *test):
        if not path.exists():
            raise ValueError(f"no such file or directory: {path}")
    train_files, found_test = _split_directory(train)
    test_files = tuple(file for path in test for file in _all_files(path)) or found_test
    both = {path.resolve() for path in train_files} & {path.resolve() for path in test_files}
    if both:
        raise ValueError(f"{min(both)} is both a training and a test file")
    return train_files, test_files


def _split_directory(paths: Sequence[Path]) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    if len(paths) != 1 or not paths[0].is_dir():
        return _only_files(paths), ()
    entries = sorted(path for path in paths[0].iterdir() if not is_left_over(path))
    train, test = (
        tuple(file for path in entries if word in _words(path) for file in _all_files(path))
        for word in ("train", "test")
    )
    parts = tuple(file for path in entries for file in _files_below(path) if file.name.startswith("part-"))
    if train or parts:
        return train or parts, test if train else ()
    names = ", ".join(path.name for path in entries) or "no files"
    raise ValueError(f"{paths[0]} has no file or directory with the word 'train' in its name, only: {names}")


def _all_files(path: Path) -> list[Path]:
    """Returns a file, or all files of a directory and of those within it.

    Raises:
        ValueError: it has none.
    """
    files = _files_below(path)
    if not files:
        raise ValueError(f"{path} has no files")
    return files


def _files_below(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    below = sorted(file for file in path.rglob("*") if file.is_file())
    return [file for file in below if not any(map(is_left_over, map(Path, file.relative_to(path).parts)))]


def is_left_over(path: Path) -> bool:
    """Whether a file is one that editors and other programs leave, by its name."""
    return path.name.startswith((".", "_", "#")) or path.name.endswith(("~", ".swp", ".bak", ".tmp", ".orig"))


def _only_files(paths: Sequence[Path]) -> tuple[Path, ...]:
    for path in paths:
        if path.is_dir():
            raise ValueError(f"{path} is a directory; give one directory alone, or files")
    return tuple(paths)


def _words(path: Path) -> set[str]:
    return set(re.split("[^a-z]+", path.name.lower()))


def kept(path: Path) -> Path:
    """Returns a path, or for a pipe the path of a copy, which is removed at the end of the process.

    Rows are read several times: to detect their format, and for each epoch.
    """
    if not path.is_fifo():
        return path
    with tempfile.NamedTemporaryFile(prefix="recstore-", delete=False) as copy:
        atexit.register(Path(copy.name).unlink, missing_ok=True)
        print(f"{path} can be read only once: copying it to {copy.name}", file=sys.stderr, flush=True)
        with open(path, "rb") as pipe:
            shutil.copyfileobj(pipe, copy)
    return Path(copy.name)
