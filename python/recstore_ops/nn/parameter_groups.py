"""The parameter groups of `SparseOptimizer`: what may stand in them beside a learning rate."""

from collections.abc import Iterable
from typing import Any

_FIXED = frozenset(
    """
    adjust_lr_fn alpha amsgrad beta beta2_decay betas bias_correction capturable catch_up centered convention d
    dampening decoupled_weight_decay differentiable eps etas foreach fused history_size initial_accumulator_value kind
    l1 l2 lambd line_search_fn lr_decay max_eval max_iter maximize momentum momentum_decay nesterov ns_coefficients
    ns_steps rho step_sizes t0 tolerance_change tolerance_grad weight_decay
    """.split()  # noqa: SIM905 (a list would be one line a word)
)
"""Hyper-parameters of tables and of `torch.optim`. Other keys are notes of schedulers and programs."""


def check_keys(groups: Iterable[dict[str, Any]]) -> None:
    """Checks that groups have no hyper-parameter but their learning rate.

    Raises:
        ValueError: one has another, which no step would read.
    """
    for group in groups:
        for key in _FIXED.intersection(group):
            table = group.get("table")
            where = "" if table is None else f'table "{table}": '
            raise ValueError(
                f"{where}a parameter group of SparseOptimizer has {key}={group[key]!r}, and only its lr can be set: "
                'all else is fixed when a table is opened, by optimizer={"kind": ..., ...}; remove the key'
            )
