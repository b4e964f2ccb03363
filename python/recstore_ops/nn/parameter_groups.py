"""The parameter groups of `SparseOptimizer`: their learning rates, and what may stand beside them."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from recstore_ops.config.table_config import check_learning_rate
from recstore_ops.table.table import Table

_FIXED = frozenset(
    """
    adjust_lr_fn alpha amsgrad beta beta2_decay betas bias_correction capturable catch_up centered convention d
    dampening decoupled_weight_decay differentiable eps etas foreach fused history_size initial_accumulator_value kind
    l1 l2 lambd line_search_fn lr_decay max_eval max_iter maximize momentum momentum_decay nesterov ns_coefficients
    ns_steps rho step_sizes t0 tolerance_change tolerance_grad weight_decay
    """.split()  # noqa: SIM905 (a list would be one line a word)
)
"""Hyper-parameters of tables and of `torch.optim`. Other keys are notes of schedulers and programs."""


def rate_of(group: dict[str, Any]) -> float:
    """The learning rate of a group; a scheduler changes one that is a tensor in its place.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative or not finite, or the group has another hyper-parameter, which no step would read.
    """
    if not _FIXED.isdisjoint(group):
        _refuse_key(group, next(key for key in group if key in _FIXED))
    lr = group.get("lr")
    # Every step asks for the rate of every table.
    return lr if type(lr) is float and 0 < lr < 1 else check_learning_rate(lr, group["table"])


def rates_of(groups: Iterable[dict[str, Any]]) -> list[float]:
    """The learning rates of groups; raises as `rate_of`."""
    return [rate_of(group) for group in groups]


def check_rate_of_rule(table: Table, lr: float) -> None:
    """Checks that a table's rule can take a rate that is a learning rate.

    Raises:
        ValueError: it is zero, by which FTRL divides.
    """
    if table.config.optimizer.get("kind") == "ftrl" and np.float32(lr) == 0:
        raise ValueError(f'table "{table.name}": the learning rate must be above 0 for ftrl, got {lr}')


def _refuse_key(group: dict[str, Any], key: str) -> None:
    where = "" if group["table"] is None else f'table "{group["table"]}": '
    raise ValueError(
        f"{where}a parameter group of SparseOptimizer has {key}={group[key]!r}, and only its lr can be set: "
        'all else is fixed when a table is opened, by optimizer={"kind": ..., ...}; remove the key'
    )
