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
