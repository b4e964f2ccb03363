"""Modules of Lightning over tables or over `nn.Embedding`, and how they are trained."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
from clicks import LR, Outcome, batches, dense_optimizer, made
from lightning.pytorch.callbacks import BaseFinetuning, WeightAveraging
from torch.optim.swa_utils import get_ema_avg_fn

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

EPOCHS = 2


class Automatic(pl.LightningModule):
    """One optimizer for Lightning: the tables are stepped and saved with the dense parameters, by hooks."""

    def __init__(self, over_tables: bool) -> None:
        super().__init__()
        self.model, self.sparse = made(over_tables)
        self.losses: list[float] = []

    def training_step(self, batch: Any, number: int) -> Any:
        loss = self.model.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("validation", self.model.loss(batch))

    def configure_optimizers(self) -> Any:
        dense, sparse = dense_optimizer(self), self.sparse
        if sparse is not None:
            dense.register_step_post_hook(lambda *_: sparse.step())
            dense.register_state_dict_post_hook(lambda _, state: {**state, "tables": sparse.state_dict()})
            dense.register_load_state_dict_pre_hook(lambda _, state: sparse.load_state_dict(state.pop("tables")))
        return dense


class Manual(Automatic):
    """Two optimizers for Lightning, both stepped by hand."""

    def __init__(self, over_tables: bool) -> None:
        super().__init__(over_tables)
        self.automatic_optimization = False

    def training_step(self, batch: Any, number: int) -> None:
        loss = super().training_step(batch, number)
        optimizers = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        dense = dense_optimizer(self)
        return dense if self.sparse is None else [dense, self.sparse]


class Ema(WeightAveraging):
    def __init__(self) -> None:
        super().__init__(avg_fn=get_ema_avg_fn(0.9))


class Thawing(BaseFinetuning):
    """Users are frozen until the second epoch, and then in a group of their own."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model.user)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.user, optimizer, lr=LR)


def trainer(callbacks: Any = (), epochs: int = EPOCHS, **options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    made_callbacks = [make() for make in callbacks]
    own: Any = {"accelerator": "cpu", "max_epochs": epochs, "enable_checkpointing": False, **quiet, **options}
    return pl.Trainer(callbacks=made_callbacks, **own)


def fitted(kind: type[Any], over_tables: bool, path: Any = None, **options: Any) -> tuple[Any, pl.Trainer]:
    module, of = kind(over_tables), trainer(**options)
    of.fit(module, batches(), batches(2), ckpt_path=path)
    return module, of


def outcome(kind: type[Any], over_tables: bool, **options: Any) -> Outcome:
    module, _ = fitted(kind, over_tables, **options)
    return Outcome.of(module.model, module.losses)
