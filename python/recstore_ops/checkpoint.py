"""Checkpoints: all tables of this process in a directory, written while they are trained on.

A directory holds snapshots: full ones, and deltas that tell what changed since the snapshot before. Whatever happens
during a save, the directory holds the old snapshots or the new ones, never a mixture. `docs/checkpoint_format.md` tells
the format.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from threading import Event, Thread
from typing import Any, Literal, get_args

from tqdm import tqdm

from recstore_ops import _native

SaveKind = Literal["full", "delta", "auto"]

_SECONDS_BETWEEN_LOOKS = 0.1
_SECONDS_BETWEEN_LOOKS_AT_THE_MOMENT = 0.0005

_MOST_NESTED = 100
"""Of lists and dicts in metadata: a manifest nested more than 128 deep could not be read again."""


@dataclass(frozen=True)
class SaveReport:
    """What a save wrote.

    Attributes:
        snapshot: the snapshot's name.
        is_delta: whether it tells changes only.
        rows: the rows written.
        deleted: the ids told to be deleted.
        bytes: the bytes written.
    """

    snapshot: str
    is_delta: bool
    rows: int
    deleted: int
    bytes: int


@dataclass(frozen=True)
class LoadReport:
    """What a load read.

    Attributes:
        snapshot: the snapshot's name.
        metadata: what its save was given along.
        tables: the rows of each table, by name.
    """

    snapshot: str
    metadata: Any
    tables: dict[str, int]


def save(
    path: str | PathLike[str],
    *,
    kind: SaveKind = "full",
    keep: int = 1,
    metadata: Any = None,
    progress: bool | None = None,
) -> SaveReport:
    """Saves all tables, as they are at one moment, to a directory. Other threads go on reading and training them.

    Gradients that were collected and not applied are no part of it.

    Args:
        path: the directory; made if it is not there.
        kind: `full`: all rows; `delta`: what changed since the directory's newest snapshot, which must be the last that
            this process saved or loaded; `auto`: a delta where that is possible.
        keep: how many full snapshots stay in the directory, with their deltas.
        metadata: what `load` gives back: what JSON can hold, with ints of 64 bits. Tuples come back as lists.
        progress: whether to show a progress bar; by default if the standard error is a terminal.

    Returns:
        What was written.

    Raises:
        ValueError: `kind` or `keep` is invalid, or `metadata` has NaN, infinity, an int of more than 64 bits, or more
            than 100 lists and dicts within each other.
        TypeError: JSON cannot hold `metadata`.
        RuntimeError: the directory cannot be written; it holds what it held before. The message names the file.
    """
    text = _checked(kind, keep, metadata)
    with _shown("saving", progress) as native:
        return SaveReport(**_native.save_tables(os.fspath(path), kind, keep, text, native))


def save_async(
    path: str | PathLike[str],
    *,
    kind: SaveKind = "full",
    keep: int = 1,
    metadata: Any = None,
) -> "Future[SaveReport]":
    """Saves as `save` does, in a thread of its own. What is saved are the tables as they are when this returns.

    It waits for a save or load that is under way, and until the moment of the save has come: what is done afterwards is
    not in the snapshot. A process does not end before the save has. A save that began cannot be cancelled.

    Args:
        path: as in `save`, and so are `kind`, `keep` and `metadata`.

    Returns:
        The report to come; its `result()` raises the `RuntimeError` that `save` would.

    Raises:
        ValueError, TypeError: as `save`.
    """
    text, directory = _checked(kind, keep, metadata), os.path.abspath(path)
    native = _native.CheckpointProgress()
    report: Future[SaveReport] = Future()
    report.set_running_or_notify_cancel()

    def run() -> None:
        try:
            report.set_result(SaveReport(**_native.save_tables(directory, kind, keep, text, native)))
        except BaseException as error:
            report.set_exception(error)

    Thread(target=run, name="recstore-save").start()
    # The bytes in all are known once the moment of the save has come; there are none if no table has rows.
    while native.bytes() == (0, 0) and not report.done():
        time.sleep(_SECONDS_BETWEEN_LOOKS_AT_THE_MOMENT)
    return report


def load(path: str | PathLike[str], *, progress: bool | None = None) -> LoadReport:
    """Replaces tables by those of a directory's newest snapshot, and makes those that are not there.

    Tables that the snapshot does not hold stay as they are. Modules and handles keep on working: they see the loaded
    rows, steps and learning rates. Modules made after the load open the tables as they find them, if they have the
    configuration that was saved; a table's learning rate and weight decay are not compared, and those it has stay.

    What was under way goes on with the loaded rows: prefetches give them, gradients collected before stay collected and
    go into the next step, and so do those of a backward pass whose forward pass came before. The indices of a
    `HashTable` are given out anew.

    A `SparseOptimizer` made with modules keeps a learning rate for each table in its parameter groups. One made before
    the load gives its rate to the table with its next step; only a loaded rate that was set by hand wins, and shows up
    in the group. To go on with the loaded rates, make the optimizer after the load, without `lr`. One made without
    modules leaves the loaded rate of a table that it has stepped before alone, until its own rate is changed.

    Args:
        path: the directory.
        progress: whether to show a progress bar; by default if the standard error is a terminal.

    Returns:
        What was read.

    Raises:
        RuntimeError: the directory holds no checkpoint, or a file is not what it should be, or a table is there with
            another configuration. The message names the file or table; nothing has changed.
    """
    with _shown("loading", progress) as native:
        found = _native.load_tables(os.fspath(path), native)
    return LoadReport(found["snapshot"], json.loads(found["metadata"]), dict(found["tables"]))


def _checked(kind: str, keep: int, metadata: Any) -> str:
    """Checks what a save was given, and returns the metadata as JSON."""
    if kind not in get_args(SaveKind):
        raise ValueError(f"kind must be full, delta or auto, got {kind!r}")
    if not isinstance(keep, int) or keep < 1:
        raise ValueError(f"keep must be an int of at least 1, got {keep!r}")
    return _as_json(metadata)


def _as_json(metadata: Any) -> str:
    too_deep = ValueError(f"metadata holds at most {_MOST_NESTED} lists and dicts within each other")
    try:
        text = json.dumps(metadata, allow_nan=False)
        depth = _depth(json.loads(text, parse_int=_checked_int))
    except RecursionError:
        raise too_deep from None
    except (TypeError, ValueError) as error:
        kind_of_error = TypeError if isinstance(error, TypeError) else ValueError
        raise kind_of_error(f"metadata must be what JSON can hold: {error}") from None
    if depth > _MOST_NESTED:
        raise too_deep
    return text


def _checked_int(digits: str) -> int:
    value = int(digits)
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"ints of up to 64 bits, got {value}")
    return value


def _depth(metadata: Any) -> int:
    """How many lists and dicts lie within each other."""
    if not isinstance(metadata, dict | list):
        return 0
    items = metadata.values() if isinstance(metadata, dict) else metadata
    return 1 + max(map(_depth, items), default=0)


@contextmanager
def _shown(what: str, progress: bool | None) -> Iterator[_native.CheckpointProgress]:
    """Shows how far the work within is, if asked for."""
    native = _native.CheckpointProgress()
    if not (sys.stderr.isatty() if progress is None else progress):
        yield native
        return
    ended = Event()
    bar = tqdm(desc=what, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr)

    def look() -> None:
        done, bar.total = native.bytes()
        bar.update(done - bar.n)

    def watch() -> None:
        while not ended.wait(_SECONDS_BETWEEN_LOOKS):
            look()

    watcher = Thread(target=watch, name=f"recstore-{what}-progress", daemon=True)
    watcher.start()
    try:
        yield native
    finally:
        ended.set()
        watcher.join()
        look()
        bar.close()


__all__ = ["LoadReport", "SaveKind", "SaveReport", "load", "save", "save_async"]
