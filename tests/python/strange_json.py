"""Documents of JSON with one value in the place of which others are put."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_MARK = "a value that is changed"

STRANGE = [
    *("null", "true", "-1", "0.5", "1e400", "18446744073709551616", '""', '"\\ud800"', '"\\u0000"', "[]", "{}", "[[]]"),
    *('{"a":1,"a":2}', "NaN", "-Infinity", "", "9" * 5_000, '"' + "x" * 100_000 + '"'),
    *("[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000),
    *("[" + f"{item}," * 20_000 + item + "]" for item in ("0", "[]", "{}", '""')),
]
"""Values of other types, sizes and depths, as text."""


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values of a document, its own among them."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from paths(item, (*path, key))


def changed(document: Any, path: tuple[Any, ...], text: str) -> str:
    """The text of a document with another value at a path."""
    if not path:
        return text
    copy = json.loads(json.dumps(document))
    place = copy
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = _MARK
    return json.dumps(copy).replace(json.dumps(_MARK), text)
