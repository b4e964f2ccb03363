"""The optimizers of a run: one for the tables, one for all other parameters.

Without a choice of its own, the second follows the rule of the first with the same learning rate. FTRL has no
counterpart in `torch.optim`, so the second is Adagrad: its step sizes alpha / sqrt(sum of squares) equal FTRL's with
beta = l1 = l2 = 0. LAMB and Lion have none either, so the second is Adam.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from recstore_ops import DistEmbedding, SparseOptimizer
from recstore_ops.config.optimizers import OPTIMIZERS
from recstore_ops.training.run.config import TrainingConfig
from recstore_ops.training.run.dense_parameters import make_dense_optimizer


def table_optimizer(config: TrainingConfig) -> dict[str, Any]:
    """Returns the optimizer of the tables, as `DistEmbedding` takes it."""
    if config.optimizer == "ftrl":
        own: dict[str, Any] = {"alpha": config.lr, "beta": config.beta, "l1": config.l1, "l2": config.l2}
    else:
        own = {"lr": config.lr, "weight_decay": config.weight_decay, "convention": config.convention}
    chosen = {name: value for name, value in own.items() if value is not None}
    return {"kind": config.optimizer, **chosen, **config.optimizer_options}


def dense_optimizer_name(config: TrainingConfig) -> str:
    """Returns the name of the optimizer of all parameters outside the tables."""
    return config.dense_optimizer or OPTIMIZERS[config.optimizer].dense


def make_optimizers(config: TrainingConfig, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Returns the optimizer of the tables, and that of all other parameters if there are any."""
    tables = [module for module in model.modules() if isinstance(module, DistEmbedding | nn.Embedding)]
    in_tables = {id(parameter) for table in tables for parameter in table.parameters()}
    dense = [parameter for parameter in model.parameters() if id(parameter) not in in_tables]
    optimizers = [_of_tables(config, tables)]
    if dense:
        lr = config.dense_lr or config.lr
        assert lr is not None, "TrainingConfig fills it in"
        optimizers.append(
            make_dense_optimizer(dense_optimizer_name(config), dense, lr=lr, options=config.dense_options)
        )
    return optimizers


def _of_tables(config: TrainingConfig, tables: Sequence[nn.Module]) -> torch.optim.Optimizer:
    if config.tables == "store":
        return SparseOptimizer(modules=tables)
    weights = [parameter for table in tables for parameter in table.parameters()]
    assert config.lr is not None, "TrainingConfig fills it in"
    match config.optimizer:
        case "sgd":
            return torch.optim.SGD(weights, lr=config.lr)
        case "adagrad":
            return torch.optim.Adagrad(weights, lr=config.lr)
        case "adam":
            return torch.optim.SparseAdam(weights, lr=config.lr)
        case _:
            raise AssertionError("TrainingConfig refuses it")
