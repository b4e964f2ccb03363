"""The optimizers of the store, as its registry has them. `.ci/optimizers.py` writes this file."""

from typing import Literal, NamedTuple

OptimizerName = Literal[
    "sgd", "adagrad", "rowwise_adagrad", "rmsprop", "adadelta", "adam", "adamw", "rowwise_adam", "lamb", "lion", "ftrl"
]


class Optimizer(NamedTuple):
    """An optimizer of tables.

    Attributes:
        options: the keys of its configuration, the learning rate's first.
        lr: the learning rate of `recstore train`, unless another is chosen.
        weight_decay: whether `recstore train --weight-decay` goes with it.
        dense: the optimizer of `torch.optim` for the parameters beside the tables, unless another is chosen.
    """

    options: tuple[str, ...]
    lr: float
    weight_decay: bool
    dense: str


OPTIMIZERS: dict[OptimizerName, Optimizer] = {
    "sgd": Optimizer(("lr", "weight_decay", "momentum", "nesterov", "catch_up"), 0.1, True, "sgd"),
    "adagrad": Optimizer(("lr", "eps", "weight_decay", "lr_decay", "convention"), 0.05, False, "adagrad"),
    "rowwise_adagrad": Optimizer(("lr", "eps", "weight_decay", "lr_decay", "convention"), 0.05, False, "adagrad"),
    "rmsprop": Optimizer(("lr", "alpha", "eps", "weight_decay", "momentum", "centered"), 0.002, True, "rmsprop"),
    "adadelta": Optimizer(("lr", "rho", "eps", "weight_decay"), 1.0, True, "adadelta"),
    "adam": Optimizer(("lr", "betas", "eps", "weight_decay", "bias_correction", "amsgrad"), 0.002, True, "adam"),
    "adamw": Optimizer(
        ("lr", "betas", "eps", "weight_decay", "bias_correction", "amsgrad", "catch_up"), 0.002, True, "adam"
    ),
    "rowwise_adam": Optimizer(("lr", "betas", "eps", "weight_decay", "bias_correction"), 0.002, True, "adam"),
    "lamb": Optimizer(("lr", "betas", "eps", "weight_decay", "bias_correction"), 0.01, True, "adam"),
    "lion": Optimizer(("lr", "betas", "weight_decay", "catch_up"), 0.0005, True, "adam"),
    "ftrl": Optimizer(("alpha", "beta", "l1", "l2"), 0.1, False, "adagrad"),
}
