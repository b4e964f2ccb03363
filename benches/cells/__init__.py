"""The cells: what is measured. A cell is one table of the report and one name for `--only`."""

from __future__ import annotations

from collections.abc import Callable, Collection

from benches.cells import (
    checkpoint,
    collection,
    disk_tier,
    frozen,
    id_map,
    ids,
    lookup,
    many_rows,
    memory,
    merge,
    neighbours,
    new_ids,
    ngram_memory,
    one_id,
    optimizers,
    peers,
    quantized,
    replicas,
    row_types,
    rules,
    served_step,
    servers,
    sharding,
    step,
    tables,
)
from benches.cells.stage import Stage
from benches.scale import Scale

TITLES = {
    lookup.CELL: "Lookup",
    step.CELL: "Full step: lookup, backward, AdaGrad",
    neighbours.CELL: "Lookups and steps between those",
    new_ids.CELL: "Full step of new ids",
    optimizers.CELL: "Full step of other optimizers",
    rules.CELL: "Full step of every rule",
    many_rows.CELL: "Full step of SGD in 50 million rows",
    collection.CELL: "Collections of 26 tables",
    peers.CELL: "Full steps of 26 tables of everyone",
    frozen.CELL: "Frozen tables under a perceptron that trains",
    quantized.CELL: "Frozen tables of fewer bits",
    ngram_memory.CELL: "A small GPT with a memory of 10 million rows",
    row_types.CELL: "Types of rows",
    one_id.CELL: "A single id",
    merge.CELL: "Gradients of duplicate ids",
    ids.CELL: "Ids of strings and n-grams",
    memory.CELL: "Memory",
    checkpoint.CELL: "Checkpoints",
    disk_tier.CELL: "A table of four times its memory",
    servers.CELL: "A server",
    served_step.CELL: "A training step on servers",
    replicas.CELL: "A server that is followed",
    sharding.CELL: "Tables sharded over two ranks",
    id_map.CELL: "The id map alone",
}
"""The title of each cell's table, in the order of the report."""

SLOW_TO_PREPARE = (id_map.CELL,)
"""Cells that a quick run leaves out unless they are asked for: they compile a program first."""

_STAGES: tuple[Callable[[Scale, Collection[str]], list[Stage]], ...] = (
    one_id.stages,
    merge.stages,
    ids.stages,
    tables.stages,
    neighbours.stages,
    new_ids.stages,
    optimizers.stages,
    rules.stages,
    row_types.stages,
    collection.stages,
    peers.stages,
    frozen.stages,
    quantized.stages,
    ngram_memory.stages,
    many_rows.stages,
    memory.stages,
    checkpoint.stages,
    disk_tier.stages,
    servers.stages,
    served_step.stages,
    replicas.stages,
    sharding.stages,
    id_map.stages,
)


def stages(scale: Scale, chosen: Collection[str]) -> list[Stage]:
    """All stages of the chosen cells, in the order in which they run."""
    return [stage for make in _STAGES for stage in make(scale, chosen)]
