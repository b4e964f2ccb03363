"""The arguments of saves and loads: checks, and the form in which the store takes them."""

import json
import os
import re
from collections.abc import Collection, Mapping
from os import PathLike
from typing import Any, Literal, get_args

from recstore_ops.config.paths import user_path

SaveKind = Literal["full", "delta", "auto"]
Compression = Literal["zstd"] | tuple[Literal["zstd"], int] | None

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")

_LEVELS = range(1, 20)
_USUAL_LEVEL = 3

_MAX_NESTED = 100
"""The most lists and dicts within each other in metadata: a manifest of more than 128 levels could not be read."""


def save_arguments(
    kind: str, keep: int, metadata: Any, compression: Any = None, replace: bool = False
) -> dict[str, Any]:
    """Checks what a save was given, and returns it as the store takes it.

    Raises:
        ValueError, TypeError: as `recstore_ops.checkpoint.save`.
    """
    if kind not in get_args(SaveKind):
        raise ValueError(f"kind must be full, delta or auto, got {kind!r}")
    if not isinstance(keep, int) or keep < 1:
        raise ValueError(f"keep must be an int of at least 1, got {keep!r}")
    if not isinstance(replace, bool):
        raise TypeError(f"replace must be a bool, got {replace!r}")
    return {
        "kind": kind,
        "keep": keep,
        "metadata": _as_json(metadata),
        "compression": _level_of(compression),
        "replace": replace,
    }


def load_arguments(
    shard: tuple[int, int] | None, tables: Collection[str] | None, snapshot: str | None, without_rules: bool
) -> dict[str, Any]:
    """Checks which snapshot a load was given, and returns what it was given as the store takes it.

    Raises:
        TypeError: `snapshot` is no text.
    """
    if snapshot is not None and not isinstance(snapshot, str):
        raise TypeError(f"snapshot must be the name of a snapshot, got {snapshot!r}")
    chosen = None if tables is None else set(tables)
    return {"shard": shard, "tables": chosen, "snapshot": snapshot, "without_rules": without_rules}


def _level_of(compression: Any) -> int | None:
    """The level of zstd; `None` for plain files."""
    if compression is None:
        return None
    kind, level = (compression, _USUAL_LEVEL) if isinstance(compression, str) else compression
    if kind != "zstd" or type(level) is not int or level not in _LEVELS:
        expected = f'None, "zstd" or ("zstd", level) with a level from {_LEVELS[0]} to {_LEVELS[-1]}'
        raise ValueError(f"compression must be {expected}, got {compression!r}")
    return level


def _as_json(metadata: Any) -> str:
    too_deep = ValueError(f"metadata holds at most {_MAX_NESTED} lists and dicts within each other")
    try:
        text = json.dumps(metadata, allow_nan=False)
        depth = _depth(json.loads(text, parse_int=_checked_int))
    except RecursionError:
        raise too_deep from None
    except (TypeError, ValueError) as error:
        kind_of_error = TypeError if isinstance(error, TypeError) else ValueError
        raise kind_of_error(f"metadata must be what JSON can hold: {error}") from None
    if depth > _MAX_NESTED:
        raise too_deep
    _check_keys(metadata, "metadata")
    return text


def _check_keys(metadata: Any, place: str) -> None:
    """Refuses keys that JSON would give back as texts; what lies within is known to end."""
    items = metadata.items() if isinstance(metadata, dict) else ()
    for key, _ in items:
        if not isinstance(key, str):
            raise TypeError(f"metadata must be what JSON can hold: keys are texts, and {place} has the key {key!r}")
    within = items if items else enumerate(metadata) if isinstance(metadata, list | tuple) else ()
    for key, value in within:
        _check_keys(value, f"{place}[{key!r}]")


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


def checkpoint_place(path: str | PathLike[str], storage_options: Mapping[str, str] | None) -> dict[str, Any]:
    """Returns where a checkpoint is as the store takes it; a directory as an absolute path.

    Raises:
        ValueError: storage options for a directory, or an empty path.
        TypeError: storage options that are no strings.
    """
    text, options = os.fspath(path), dict(storage_options or {})
    text = text if _URL.match(text) else user_path(text)
    for key, value in options.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"storage_options are strings by their names, got {key!r}: {type(value).__name__}")
    if _URL.match(text):
        return {"path": "", "url": text, "storage_options": options}
    if options:
        raise ValueError(f"storage_options are for URLs; {text} is a directory")
    return {"path": os.path.abspath(text), "url": None, "storage_options": {}}


def checked_directory(path: str | PathLike[str], operation: str) -> str:
    """Returns the directory of what can only be done in one.

    Raises:
        ValueError: the URL of an object store, or an empty path.
    """
    text = os.fspath(path)
    if _URL.match(text):
        raise ValueError(f"{operation} needs a directory, got {text}")
    return user_path(text)
