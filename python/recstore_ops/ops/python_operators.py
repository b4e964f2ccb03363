"""Operators written in Python, under `torch.ops.recstore_python`."""

from collections.abc import Callable
from typing import Any

import torch

from recstore_ops.ops import operators

_library = torch.library.Library("recstore_python", "DEF")


def define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Defines an operator that touches the store, and so has an ordered effect."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_library.ns}::{name}", operators.refusing_meta(name, fake), lib=_library)
    operators.register_ordered_effect(f"{_library.ns}::{name}")
    return getattr(torch.ops.recstore_python, name).default


def returns_nothing(*args: object, **kwargs: object) -> None:
    """The fake kernel of an operator without a result."""
    return None
