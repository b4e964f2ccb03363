"""Fields by name, as options name them."""

from __future__ import annotations

from collections.abc import Sequence


def field_number(option: str, name: str, field_names: Sequence[str]) -> int:
    """Returns the number of the field of that name, from 0.

    Args:
        option: what named the field, for the error.
        name: of the field.
        field_names: of the rows.

    Raises:
        ValueError: there is no such field.
    """
    if name not in field_names:
        raise ValueError(f"{option} must name a field, one of {', '.join(field_names)}; got {name!r}")
    return field_names.index(name)
