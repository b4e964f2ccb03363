"""`averaged`: a copy of a model whose rows are the moving averages of its rows."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn

from recstore_ops.nn.optimizer import tables_of
from recstore_ops.ops import operators
from recstore_ops.table.refusals import refuse_shared_rows
from recstore_ops.table.table import Table

_ROWS_AT_ONCE = 2**17
Model = TypeVar("Model", bound=nn.Module)


def averaged(model: Model) -> Model:
    """Returns a copy of a model whose tables hold the moving averages of their rows, to evaluate, save or export.

    Its tables must have been opened with `ema_decay`. The values of a row are averaged over all steps of the table,
    including steps that left the row alone. Parameters outside tables are copied as they are: average those with
    `torch.optim.swa_utils.AveragedModel`. The copy owns its tables, as every deep copy does, and they are dropped with
    it.

    Raises:
        ValueError: a table without `ema_decay`, or with shared rows; or a model without tables.
        RuntimeError: the tables lie on servers.
    """
    tables = _tables_of(model)
    if not tables:
        raise ValueError(f"{type(model).__name__} has no tables whose rows were averaged")
    for table in tables:
        if table.config.ema_decay is None:
            raise ValueError(f'table "{table.name}" keeps no averages: it was opened without ema_decay')
        refuse_shared_rows(table.name, table.config.admission, "a copy that has averages as its rows")
    twin = copy.deepcopy(model)
    for table, of_twin in zip(tables, _tables_of(twin), strict=True):
        _write_averages(table, of_twin)
    return twin


def _tables_of(model: nn.Module) -> list[Table]:
    """Returns the tables of a model in the order of its modules, each once whatever modules share it."""
    return list({table.table_id: table for table in tables_of([model])}.values())


@torch.no_grad()
def _write_averages(table: Table, target: Table) -> None:
    step, decay = table.statistics()["step"], table.config.ema_decay
    for ids_N in operators.hashtable_ids(table.handle).split(_ROWS_AT_ONCE):
        rows_ND = operators.emb_read(table.handle, ids_N, table.dim)
        average_ND = operators.hashtable_slot(table.handle, ids_N, "ema")
        # Steps that leave a row alone do not touch its average: they count here, all at once.
        idle_N1 = (step - operators.hashtable_slot(table.handle, ids_N, "ema_step").double()).clamp(min=0)
        share_N1 = (decay**idle_N1).float()
        operators.emb_write(target.handle, ids_N, rows_ND + share_N1 * (average_ND - rows_ND))
