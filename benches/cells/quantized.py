"""Sums of bags over frozen tables, mapped and copied, beside the live table and FBGEMM's of as few bits.

Ours look ids up, FBGEMM's take row numbers. The rows are uniform draws of tables that no cache holds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benches import ids
from benches.cells.stage import Stage
from benches.competitors import fbgemm
from benches.competitors.recstore import RecStoreTable
from benches.ids import KINDS, IdKind, turn_of
from benches.measured import Axis, Case, Competitor
from benches.scale import Scale
from recstore_ops import FrozenTable, freeze
from recstore_ops.ops import operators
from recstore_ops.serving import EncodingName, FrozenMemory

CELL = "quantized"
LIVE = "live, float32"

_ROWS, _BAGS, _LENGTH = 2_000_000, 512, 20
_DIMS = (16, 64, 128)
_ENCODINGS: tuple[EncodingName, ...] = ("float32", "int8", "int4")
QUANTIZED: tuple[EncodingName, ...] = ("int8", "int4")
_MEMORIES: tuple[FrozenMemory, ...] = ("mapped", "copied")


def frozen_name(encoding: EncodingName, memory: FrozenMemory) -> str:
    """How the report calls a frozen table."""
    return f"{encoding}, {memory}"


def fbgemm_name(encoding: EncodingName) -> str:
    """How the report calls FBGEMM's table of as many bits."""
    return f"{fbgemm.NAME}, {encoding}"


def stages(scale: Scale, chosen: Collection[str]) -> list[Stage]:
    """One stage a dim and kind of ids."""
    if CELL not in chosen:
        return []
    return [
        Stage(CELL, f"frozen tables of dim {dim}, ids {kind}", scale.lookups.rounds, partial(_cases, scale, dim, kind))
        for dim in _DIMS
        for kind in KINDS
    ]


def _cases(scale: Scale, dim: int, kind: IdKind) -> Iterator[Case]:
    rows, bags = scale.of(_ROWS), scale.of(_BAGS)
    batches = ids.batches(rows, bags * _LENGTH, "uniform", kind=kind)
    batch, offsets = turn_of(batches), torch.arange(bags + 1) * _LENGTH
    with RecStoreTable(rows, dim, kind=kind) as live, tempfile.TemporaryDirectory() as directory:

        def pooled(handle: Tensor, turn: int) -> object:
            return operators.emb_bag(handle, batch(turn).ids, offsets, dim, 0)

        handle = live.module.table.handle
        competitors = [Competitor(LIVE, lambda turn: pooled(handle, turn))]
        tables = _frozen(live, Path(directory), ids.ids_of(torch.arange(rows), kind))
        competitors += [
            Competitor(name, lambda turn, handle=table.handle: pooled(handle, turn), LIVE)
            for name, table in tables.items()
        ]
        if fbgemm.is_installed():
            for encoding in QUANTIZED:
                theirs = fbgemm.QuantizedTable(rows, dim, encoding)
                against = frozen_name(encoding, "copied")
                competitors.append(
                    Competitor(
                        fbgemm_name(encoding),
                        lambda turn, theirs=theirs: theirs.lookup(batch(turn).index, offsets),
                        against,
                    )
                )
        axes: dict[str, Axis] = {
            "rows": rows,
            "dim": dim,
            "bags": bags,
            "ids a bag": _LENGTH,
            "threads": 1,
            "ids": kind,
        }
        absent = () if fbgemm.is_installed() else tuple(map(fbgemm_name, QUANTIZED))
        yield Case(CELL, axes, competitors, scale.lookups, output="as it is", threads=1, absent=absent)


def _frozen(live: RecStoreTable, directory: Path, ids_N: Tensor) -> dict[str, FrozenTable]:
    """The table in each encoding, each read once: its pages are there, and were compared with their checksums."""
    tables = {}
    for encoding in _ENCODINGS:
        path = directory / encoding
        freeze(live.module.table, path, encoding)
        for memory in _MEMORIES:
            table = tables[frozen_name(encoding, memory)] = FrozenTable(path, memory)
            for some in ids_N.split(100_000):
                table.read(some)
    return tables
