"""The rules that every matrix of optimizers goes over."""

from __future__ import annotations

from typing import Any

KINDS = [
    "sgd",
    "adagrad",
    "rowwise_adagrad",
    "rmsprop",
    "adadelta",
    "adam",
    "adamw",
    "rowwise_adam",
    "lamb",
    "lion",
    "ftrl",
]

# The rules whose options change what they keep of a row, or how they step.
FORMS: list[dict[str, Any]] = [
    {"kind": "sgd", "lr": 0.1, "weight_decay": 0.01},
    {"kind": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True},
    {"kind": "adagrad", "lr": 0.1},
    {"kind": "adagrad", "lr": 0.1, "lr_decay": 0.1, "convention": "torch"},
    {"kind": "rowwise_adagrad", "lr": 0.1},
    {"kind": "rowwise_adagrad", "lr": 0.1, "convention": "torch"},
    {"kind": "rmsprop", "lr": 0.1},
    {"kind": "rmsprop", "lr": 0.1, "momentum": 0.9, "centered": True},
    {"kind": "adadelta", "lr": 0.1},
    {"kind": "adam", "lr": 0.1},
    {"kind": "adam", "lr": 0.1, "bias_correction": "row"},
    {"kind": "adam", "lr": 0.1, "amsgrad": True},
    {"kind": "adamw", "lr": 0.1, "weight_decay": 0.1},
    {"kind": "rowwise_adam", "lr": 0.1, "bias_correction": "row"},
    {"kind": "lamb", "lr": 0.1},
    {"kind": "lion", "lr": 0.1, "weight_decay": 0.1},
    {"kind": "sgd", "lr": 0.1, "weight_decay": 0.1, "catch_up": True},
    {"kind": "sgd", "lr": 0.1, "momentum": 0.9, "catch_up": True},
    {"kind": "ftrl", "alpha": 0.1, "l1": 0.01, "l2": 0.1},
]


def _may_be_narrow(form: dict[str, Any]) -> bool:
    """Whether the rule keeps something for each element, and a table can have it in fewer bits."""
    keeps = form["kind"] != "rowwise_adagrad" and (form["kind"] != "sgd" or "momentum" in form)
    return keeps and not form.keys() & {"catch_up", "centered"}


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
