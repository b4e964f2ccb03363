"""Lookups: the rows of a batch of ids, one id after the other."""

from __future__ import annotations

import torch

from benches import ids
from benches.cells.one_table import OURS, YARDSTICK, OneTable, present
from benches.cells.setting import Setting
from benches.competitors import fbgemm
from benches.ids import Batch, turn_of
from benches.measured import Case, Competitor
from benches.scale import Scale

CELL = "lookup"
MISSING, EMBEDDING = "recstore, no row", "F.embedding"


def lookup_case(table: OneTable, setting: Setting, scale: Scale) -> Case:
    """The yardstick's gather, our operator for ids with and without rows, FBGEMM's forward, `F.embedding`."""
    size = scale.of(setting.batch)
    batches = ids.batches(table.rows, size, setting.drawn, kind=setting.ids)
    batch, without_row = turn_of(batches), turn_of(ids.missing(table.rows, size, kind=setting.ids))
    output = table.output(size)
    competitors = present(
        Competitor(YARDSTICK, lambda turn: table.yardstick.lookup(batch(turn).index), output=output),
        Competitor(OURS, lambda turn: table.ours.lookup(batch(turn).ids), YARDSTICK, output),
        Competitor(MISSING, lambda turn: table.ours.lookup(without_row(turn)), YARDSTICK, output),
        _fbgemm(table, batches),
        Competitor(EMBEDDING, lambda turn: table.torch.lookup(batch(turn).index), OURS, output),
    )
    return Case(
        CELL,
        setting.axes(),
        competitors,
        scale.lookups,
        setting.output,
        setting.threads,
        setting.calls,
        absent=fbgemm.absent(),
    )


def _fbgemm(table: OneTable, batches: list[Batch]) -> Competitor | None:
    theirs = table.fbgemm
    if theirs is None:
        return None
    size, batch = len(batches[0].index), turn_of(batches)
    offsets_B = torch.arange(size + 1)
    return Competitor(fbgemm.NAME, lambda turn: theirs.lookup(batch(turn).index, offsets_B), OURS, table.output(size))
