"""Full steps of every rule beside AdaGrad's, and of rules whose state is of 16 or 8 bits."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benches import ids
from benches.cells.setting import Setting
from benches.cells.stage import Stage
from benches.cells.step import gradients
from benches.competitors.recstore import RecStoreTable
from benches.ids import Batch, turn_of
from benches.measured import Case, Competitor
from benches.scale import Scale
from benches.yardstick import LR
from recstore_ops import _native

CELL = "rules"
ADAGRAD, RULE = "AdaGrad", "the rule"


@dataclass(frozen=True)
class Rule:
    """A rule, and the elements that it keeps beside each of a row's, and beside the row."""

    name: str
    kept: float
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    state_dtype: str = "float32"
    kept_a_row: int = 0

    def bytes_over_adagrad(self, dim: int) -> float:
        """Returns the bytes of its record over those of AdaGrad's, with an element beside each; at least 1."""
        return max(1.0, (dim * (1 + self.kept) + self.kept_a_row) / (2 * dim))

    def table(self, rows: int, dim: int) -> RecStoreTable:
        """Returns a table of this rule."""
        optimizer = {"kind": self.kind, "lr": LR, **self.options}
        return RecStoreTable(rows, dim, optimizer, state_dtype=self.state_dtype)


# What the results call a rule, if not by its kind.
TITLES = {
    "sgd": "SGD",
    "rowwise_adagrad": "row-wise AdaGrad",
    "rmsprop": "RMSprop",
    "rowwise_adam": "row-wise Adam",
    "adadelta": "Adadelta",
    "adam": "Adam",
    "adamw": "AdamW",
    "lamb": "LAMB",
    "lion": "Lion",
    "ftrl": "FTRL",
}


def _rule(optimizer: dict[str, Any]) -> Rule:
    """A rule of the registry with its default options."""
    widths = [slot["width"] for slot in optimizer["slots"] if slot["with"] is None]
    kind: str = optimizer["kind"]
    kept_a_row = sum(width or 0 for width in widths)
    return Rule(TITLES.get(kind, kind), widths.count(None), kind, kept_a_row=kept_a_row)


RULES = (
    *sorted(
        (_rule(each) for each in json.loads(_native.optimizers()) if each["kind"] != "adagrad"),
        key=lambda rule: (rule.kept, rule.kept_a_row),
    ),
    Rule("SGD with momentum", 1, "sgd", {"momentum": 0.9}),
    Rule("SGD with Nesterov's momentum", 1, "sgd", {"momentum": 0.9, "nesterov": True}),
    Rule("AMSGrad", 3, "adam", {"amsgrad": True}),
    Rule("Adam, state in bfloat16", 1, "adam", state_dtype="bfloat16"),
    Rule("Adam, state in 8 bits", 0.5, "adam", state_dtype="float8", kept_a_row=2),
    Rule("AdaGrad, state in bfloat16", 0.5, "adagrad", state_dtype="bfloat16"),
    Rule("AdaGrad, state in 8 bits", 0.25, "adagrad", state_dtype="float8", kept_a_row=1),
)
"""All rules of the registry, those with the smallest records first; behind them options, and state of fewer bits."""

SETTINGS = [Setting(dim=dim) for dim in (16, 64)]


def stages(scale: Scale, chosen: Collection[str]) -> list[Stage]:
    """One stage a dim."""
    if CELL not in chosen:
        return []
    rounds = len(RULES) * scale.steps.rounds
    return [Stage(CELL, f"rules in rows of {each.dim}", rounds, partial(_cases, scale, each)) for each in SETTINGS]


def _cases(scale: Scale, setting: Setting) -> Iterator[Case]:
    rows, dim = scale.of(setting.rows), setting.dim
    batches = ids.batches(rows, scale.of(setting.batch), setting.drawn)
    grad_ND = gradients(len(batches[0].ids), dim)
    with RecStoreTable(rows, dim) as adagrad:
        for rule in RULES:
            with rule.table(rows, dim) as table:
                axes = {"rule": rule.name, **setting.axes()}
                competitors = [
                    _steps(ADAGRAD, adagrad, batches, grad_ND),
                    _steps(RULE, table, batches, grad_ND, ADAGRAD),
                ]
                yield Case(CELL, axes, competitors, scale.steps, read_first=[grad_ND])


def _steps(
    name: str, table: RecStoreTable, batches: list[Batch], grad_ND: Tensor, against: str | None = None
) -> Competitor:
    batch, output = turn_of(batches), (tuple(grad_ND.shape), torch.float32)
    return Competitor(name, lambda turn: table.step(batch(turn).ids, grad_ND), against, output)
