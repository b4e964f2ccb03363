"""The optimizers of a run: the store steps the tables, torch the dense parameter (the bias).

Both follow the same rule with the same learning rate. FTRL has no counterpart in `torch.optim`;
there the bias is stepped by Adagrad, whose step sizes alpha / sqrt(sum of squares) are those of
FTRL with beta = l1 = l2 = 0. The bias is never decayed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from recstore_ops.training.config import TrainingConfig


def table_optimizer(config: TrainingConfig) -> dict[str, Any]:
    """Returns the optimizer of the tables, as `DistEmbedding` takes it."""
    if config.optimizer == "ftrl":
        return {
            "kind": "ftrl",
            "alpha": config.lr,
            "beta": config.beta,
            "l1": config.l1,
            "l2": config.l2,
        }
    optimizer: dict[str, Any] = {"kind": config.optimizer, "lr": config.lr}
    if config.weight_decay is not None:
        optimizer["weight_decay"] = config.weight_decay
    return optimizer


def dense_optimizer(config: TrainingConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer | None:
    """Returns the optimizer of the dense parameters, None if there are none."""
    if not parameters:
        return None
    lr = config.lr
    assert lr is not None, "TrainingConfig fills it in"
    match config.optimizer:
        case "sgd":
            return torch.optim.SGD(parameters, lr=lr)
        case "adam" | "adamw":
            return torch.optim.Adam(parameters, lr=lr)
        case "adagrad" | "rowwise_adagrad" | "ftrl":
            return torch.optim.Adagrad(parameters, lr=lr)
