"""One table in the hands of each competitor, for lookups and steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benches.competitors import fbgemm
from benches.competitors.fbgemm import FbgemmTables
from benches.competitors.recstore import ADAGRAD, RecStoreTable
from benches.competitors.torch_modules import TorchTable
from benches.ids import SPREAD, IdKind
from benches.measured import Competitor
from benches.scale import Scale
from benches.yardstick import LR, Yardstick

YARDSTICK, OURS = "yardstick", "recstore"

_OPTIMIZERS: dict[str, dict[str, Any]] = {"adagrad": ADAGRAD, "sgd": {"kind": "sgd", "lr": LR}}


@dataclass(frozen=True)
class OneTable:
    """Equally many rows of equal dim; `fbgemm` is None where it is not installed."""

    rows: int
    dim: int
    yardstick: Yardstick
    ours: RecStoreTable
    torch: TorchTable
    fbgemm: FbgemmTables | None

    def output(self, batch: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type of what a batch reads."""
        return (batch, self.dim), torch.float32


@contextmanager
def open_table(
    scale: Scale, rows: int, dim: int, optimizer: str = "adagrad", kind: IdKind = SPREAD
) -> Iterator[OneTable]:
    """Fills the table for everyone: `rows` as in a full run, optimizer `adagrad` or `sgd`, the kind of our ids."""
    rows = scale.of(rows)
    with RecStoreTable(rows, dim, _OPTIMIZERS[optimizer], kind=kind) as ours:
        theirs = FbgemmTables([rows], dim, optimizer) if fbgemm.is_installed() else None
        yield OneTable(rows, dim, Yardstick(rows, dim, optimizer), ours, TorchTable(rows, dim, optimizer), theirs)


def present(*competitors: Competitor | None) -> list[Competitor]:
    """Leaves out who is not installed."""
    return [competitor for competitor in competitors if competitor is not None]
