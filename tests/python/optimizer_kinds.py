"""The rules that every matrix of optimizers goes over."""

from __future__ import annotations

import json
from typing import Any

from recstore_ops import _native

REGISTRY: dict[str, dict[str, Any]] = {each["kind"]: each for each in json.loads(_native.optimizers())}
"""The optimizers of the store, as its registry describes them."""

KINDS = [*REGISTRY]

_LR = 0.1
FORMS: list[dict[str, Any]] = [
    {"kind": kind, rule["options"][0]["name"]: _LR, **form} for kind, rule in REGISTRY.items() for form in rule["forms"]
]
"""A configuration for each way to keep something of a row, or to step."""


def _may_be_narrow(form: dict[str, Any]) -> bool:
    """Whether the rule keeps something for each element, and a table can have it in fewer bits."""
    kept = [slot for slot in REGISTRY[form["kind"]]["slots"] if slot["with"] is None or slot["with"] in form]
    return any(slot["width"] is None for slot in kept) and not form.keys() & {"catch_up", "centered"}


# The options of tables of every form, those that can also with what the rule keeps in 16 and 8 bits.
TABLES: list[dict[str, Any]] = [
    *({"optimizer": form} for form in FORMS),
    *(
        {"optimizer": form, "state_dtype": dtype}
        for form in filter(_may_be_narrow, FORMS)
        for dtype in ("bfloat16", "float8")
    ),
]


def table_id(options: dict[str, Any]) -> str:
    """Returns the options' values in a line, to name a test by."""
    return "-".join(map(str, [*options["optimizer"].values(), options.get("state_dtype", "float32")]))
