"""The exchange of one batch: which ids every rank asks of every other, and the way of rows and gradients.

Shape suffixes: N ids, U distinct ids, W ranks, T tables.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from recstore_ops.ops import operators
from recstore_ops.sharding.statistics import count
from recstore_ops.table.shard import Shard
from recstore_ops.table.shard_of import shard_of

_INT64_BYTES = 8


class Status(IntEnum):
    """How a rank fares, as it tells the others."""

    FINE = 0
    FAILED = 1
    UNWANTED = 2
    """It has no use for a lookup that was begun ahead."""


@dataclass(frozen=True)
class Asked:
    """What a rank asks of one table.

    Attributes:
        ids: int64, `[U]`, distinct, those of the first rank first, rising for each.
        counts: of each rank, `[W]`.
        places: the place of each id of the batch in `ids`, int64, `[N]`.
    """

    ids: Tensor
    counts: list[int]
    places: Tensor

    @classmethod
    def of(cls, ids_N: Tensor, world: int) -> "Asked":
        """What a batch's ids, int64 `[N]` on the CPU, ask of `world` ranks."""
        unique_U, inverse_N = operators.unique(ids_N)
        owner_U = shard_of(unique_U, world)
        order_U = owner_U.argsort(stable=True)
        place_U = torch.empty_like(order_U).scatter_(
            0, order_U, torch.arange(order_U.numel(), dtype=torch.int64, device="cpu")
        )
        return cls(unique_U[order_U], torch.bincount(owner_U, minlength=world).tolist(), place_U[inverse_N])


class Exchange:
    """What all ranks ask of each other in one batch; rows and gradients then take the same way.

    All ranks make it together, each with the same number of tables.

    Args:
        shard: of the tables.
        ask: gives what this rank asks of each table. It may raise: then the others raise too.
        num_tables: how many tables there are.

    Attributes:
        asked: what this rank asks of each table.
        ids: what is asked of this rank, int64 `[U]` for each table, those of the first rank first.

    Raises:
        RuntimeError: another rank failed.
    """

    def __init__(self, shard: Shard, ask: Callable[[], list[Asked]], num_tables: int) -> None:
        self._shard = shard
        try:
            self.asked = ask()
        except Exception:
            exchange_counts(shard, [[0] * num_tables] * shard.world, Status.FAILED)
            raise
        self._sent_WT = [[asked.counts[rank] for asked in self.asked] for rank in range(shard.world)]
        self._received_WT, statuses = exchange_counts(shard, self._sent_WT, Status.FINE)
        raise_if_failed(statuses, "a lookup")
        sent_ids = [asked.ids.unsqueeze(1) for asked in self.asked]
        parts = move(shard, sent_ids, self._sent_WT, self._received_WT, "id_bytes")
        self.ids = [part.squeeze(1) for part in parts]
        count(exchanges=1)

    def go_on_over(self, shard: Shard) -> None:
        """Lets gradients go over the group of another shard of the same ranks."""
        self._shard = shard

    def asked_by_each(self, table: int) -> list[int]:
        """How many ids each rank asks of a table of this one, `[W]`."""
        return [counts[table] for counts in self._received_WT]

    def rows(self, read: Callable[[], list[Tensor]], dims: Sequence[int]) -> list[Tensor]:
        """Sends the rows asked of this rank and returns those it asked for, in the order of `asked`.

        Args:
            read: gives the rows of `ids`, float32 `[U, dim]` for each table. It may raise: then the others raise too.
            dims: of the tables.

        Returns:
            float32, `[U, dim]` for each table.

        Raises:
            RuntimeError: another rank failed.
        """
        try:
            rows = read()
        except Exception:
            empty = [
                ids.new_zeros((ids.numel(), dim), dtype=torch.float32) for ids, dim in zip(self.ids, dims, strict=True)
            ]
            self._move_values(empty, self._received_WT, self._sent_WT, "row_bytes", failed=True)
            raise
        return self._move_values(rows, self._received_WT, self._sent_WT, "row_bytes")

    def gradients(self, gradients: list[Tensor], tables: Sequence[int]) -> list[Tensor]:
        """Sends gradients of `asked`, float32 `[U, dim]` for each of some tables, and returns those of `ids`."""
        sent_WT, received_WT = (
            [[counts[table] for table in tables] for counts in each] for each in (self._sent_WT, self._received_WT)
        )
        return self._move_values(gradients, sent_WT, received_WT, "gradient_bytes")

    def _move_values(
        self,
        values: list[Tensor],
        sent_WT: list[list[int]],
        received_WT: list[list[int]],
        counted_as: str,
        failed: bool = False,
    ) -> list[Tensor]:
        """Moves values in the type of the wire, with a flag behind those for each rank that tells of a failure."""
        shard = self._shard
        flags = torch.full((shard.world, 1), float(failed), dtype=torch.float32, device="cpu")
        sent = [value.to(shard.wire_dtype) for value in (*values, flags)]
        sent_with_flag, received_with_flag = ([[*counts, 1] for counts in each] for each in (sent_WT, received_WT))
        *moved, flags = move(shard, sent, sent_with_flag, received_with_flag, counted_as)
        if not failed:
            raise_if_failed(flags.flatten().int().tolist(), "reading rows")
        return [value.to(torch.float32) for value in moved]


def exchange_counts(shard: Shard, counts_WT: list[list[int]], status: Status) -> tuple[list[list[int]], list[int]]:
    """Tells every rank how many rows of each table come to it, and how this rank fares.

    Returns:
        How many rows of each table come from each rank, and how each rank fares.
    """
    sent = torch.tensor([[*counts, status] for counts in counts_WT], dtype=torch.int64, device="cpu")
    size = sent.shape[1] * _INT64_BYTES
    received = shard.all_to_all(sent.flatten().view(torch.uint8), [size] * shard.world, [size] * shard.world)
    count(count_bytes=size * (shard.world - 1))
    received_WT = received.view(torch.int64).view(shard.world, -1).tolist()
    return [counts[:-1] for counts in received_WT], [counts[-1] for counts in received_WT]


def raise_if_failed(statuses: list[int], what: str) -> None:
    """Raises RuntimeError if a rank failed; names it."""
    if Status.FAILED in statuses:
        raise RuntimeError(f"{what} failed on rank {statuses.index(Status.FAILED)}; its own error tells why")


def move(
    shard: Shard,
    parts: list[Tensor],
    sent_WT: list[list[int]],
    received_WT: list[list[int]],
    counted_as: str,
) -> list[Tensor]:
    """Sends rows of several tensors to their ranks in one all-to-all.

    Args:
        shard: whose ranks.
        parts: T tensors of one type, each `[rows, width]`, those for the first rank first.
        sent_WT: the rows of each for each rank.
        received_WT: the rows of each from each rank.
        counted_as: what the bytes are counted as.

    Returns:
        T tensors of the rows received, `[rows, width]`, those of the first rank first.
    """
    dtype, widths = parts[0].dtype, [part.shape[1] for part in parts]
    by_table = [part.split([counts[table] for counts in sent_WT]) for table, part in enumerate(parts)]
    sent = torch.cat([by_table[table][rank].reshape(-1) for rank in range(shard.world) for table in range(len(parts))])
    sent_sizes, received_sizes = (_sizes(counts, widths, dtype.itemsize) for counts in (sent_WT, received_WT))
    received = shard.all_to_all(sent.view(torch.uint8), sent_sizes, received_sizes).view(dtype)
    count(**{counted_as: sum(sent_sizes) - sent_sizes[shard.rank]})
    pieces = received.split([n * width for counts in received_WT for n, width in zip(counts, widths, strict=True)])
    return [torch.cat(pieces[table :: len(parts)]).view(-1, width) for table, width in enumerate(widths)]


def _sizes(counts_WT: list[list[int]], widths: list[int], itemsize: int) -> list[int]:
    """The bytes for each rank."""
    return [itemsize * sum(n * width for n, width in zip(counts, widths, strict=True)) for counts in counts_WT]
