"""JSON that says its format, its version and its own checksum."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any


def checked_json(fields: Mapping[str, Any], file_format: str, version: int, *, indent: int | None = None) -> str:
    """Returns fields as text."""
    named = {"format": file_format, "version": version, **fields}
    return json.dumps({**named, "crc32": _sum_of(named)}, indent=indent)


def parse_checked_json(text: str, whose: object, file_format: str, version: int) -> dict[str, Any]:
    """Returns the fields of a text.

    Args:
        text: of `checked_json`.
        whose: what messages call it.
        file_format: the one that is expected; its last word is what it is of.
        version: the only one that is read.

    Raises:
        ValueError: it has another format or version.
        OSError: it is damaged.
    """
    try:
        fields = json.loads(text)
        is_whole = fields.pop("crc32") == _sum_of(fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OSError(f"{whose} is damaged: {error!r}") from error
    if not is_whole:
        raise OSError(f"{whose} is damaged: its checksum is another")
    if fields.pop("format") != file_format:
        raise ValueError(f"{whose} is of no {file_format.split()[-1]}")
    if (found := fields.pop("version")) != version:
        raise ValueError(f"{whose} has version {found} of the format, this program reads {version}")
    return fields


def _sum_of(fields: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())
