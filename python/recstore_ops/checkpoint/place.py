"""Where a checkpoint is: a directory, or the URL of an object store."""

import os
import re
from collections.abc import Mapping
from os import PathLike
from typing import Any

from recstore_ops.config.paths import user_path

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


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
