"""JSON that says its format, its version and its own checksum."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

from recstore_ops.serving.closed_json import parse_json, shown, typed


def checked_json(fields: Mapping[str, Any], file_format: str, version: int, *, indent: int | None = None) -> str:
    """Returns fields as text."""
    named = {"format": file_format, "version": version, **fields}
    return json.dumps({**named, "crc32": _sum_of(named)}, indent=indent)


def parse_checked_json(
    text: str | bytes, whose: object, file_format: str, *versions: int
) -> tuple[dict[str, Any], int]:
    """Returns the fields of a text, and its version. It does not check their names.

    Args:
        text: of `checked_json`.
        whose: what messages call it.
        file_format: the expected format; its last word names the object that the text describes.
        versions: those that are read, the newest first.

    Raises:
        ValueError: it has another format or version.
        OSError: it is damaged.
    """
    try:
        fields = typed(parse_json(text), dict, "its text")
        if "crc32" not in fields:
            raise ValueError("it has no checksum")
        # Before format and version, which may be what was damaged.
        expected, found = fields.pop("crc32"), _sum_of(fields)
    except ValueError as error:
        raise OSError(f"{whose} is damaged: {error}") from error
    if expected != found:
        raise OSError(f"{whose} is damaged: its checksum is another")
    if fields.pop("format", None) != file_format:
        raise ValueError(f"{whose} is of no {file_format.split()[-1]}")
    if type(number := fields.pop("version", None)) is not int or number not in versions:
        raise ValueError(f"{whose} has version {shown(number)} of the format, this program reads {versions[0]}")
    return fields, number


def _sum_of(fields: Mapping[str, Any]) -> int:
    try:
        return zlib.crc32(json.dumps(fields, sort_keys=True).encode())
    except RecursionError:
        raise ValueError("its values lie too deep in one another") from None
