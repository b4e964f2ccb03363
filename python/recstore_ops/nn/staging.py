"""Rows of a batch on their way to a device and gradients on their way back, beside what the device computes.

Tables lie in the memory of the host. A lookup of ids that lie on a device waits for these, reads, and waits for its
rows' copy; its backward waits for the gradients. `StagingDataLoader` knows the ids of the batches to come, which
depend on the batch alone. The store reads their rows ahead; a forward copies them to pinned memory and begins their
way to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.autograd import Variable

from recstore_ops.autograd import shares_of_ids
from recstore_ops.nn.copies import Copies, CudaCopies
from recstore_ops.nn.functional import needs_backward
from recstore_ops.nn.padding import PaddingIdx, with_one_padding, with_rows_of_padding
from recstore_ops.ops import operators
from recstore_ops.ops.collecting import collect
from recstore_ops.ops.operators import eager_only
from recstore_ops.ops.traced_regions import CollectingFunction
from recstore_ops.sparse.prefetch_iterator import check_prefetch_count, prefetch
from recstore_ops.sparse.transforms import is_transformed
from recstore_ops.table.checks import check_ids
from recstore_ops.table.table import Table


class StagedRows:
    """The rows of some ids, read ahead for one forward of the module that staged them.

    Results equal a lookup of the ids in that forward: they include changes that the process makes until then.

    Args:
        table: the table.
        ids: `[...]`, on the CPU.
        padding_idx: an id whose row gets no gradient, or several.
        copies: the way to the device.

    Raises:
        TypeError: ids of another type.
        ValueError: ids on another device.
        RuntimeError: a sharded table.
    """

    __module__ = "recstore_ops"

    def __init__(self, table: Table, ids: Tensor, padding_idx: PaddingIdx, copies: Copies) -> None:
        if table.is_sharded:
            raise RuntimeError(
                f'table "{table.name}" is sharded, and rows of one process are staged: '
                "recstore_ops.sharding.ShardedPipeline reads ahead there"
            )
        if check_ids(ids).device.type != "cpu":
            raise ValueError(f'table "{table.name}": rows are staged by ids on the CPU, got ids on {ids.device}')
        self._ids = check_ids(ids).clone()  # The batch may be filled anew before its forward.
        self._asked, self._padding = with_one_padding(self._ids, padding_idx)
        self._padding_idx, self._copies = padding_idx, copies
        self._table_id, self._name = table.table_id, table.name
        self._handle: int | None = operators.emb_prefetch(table.handle, self._asked)

    @eager_only
    def rows_for(self, table: Table, dtype: torch.dtype, scale_grad_by_freq: bool) -> Tensor:
        """The rows on the device, `[..., D]`, once.

        The gradients that `backward` finds are collected as it ends, when all of it is under way.

        Args:
            table: the table that they are looked up in.
            dtype: that of the rows.
            scale_grad_by_freq: as in `recstore_ops.embedding`.

        Raises:
            ValueError: another table, or rows that a forward has had already.
            RuntimeError: a transform of `torch.func`; or the table was dropped.
        """
        if table.table_id != self._table_id:
            raise ValueError(f'the rows were staged for table "{self._name}", got a lookup in table "{table.name}"')
        if is_transformed():
            raise RuntimeError(f'table "{table.name}": torch.func takes no staged rows; give the module the ids')
        host = self._on_host(table, dtype)
        if not needs_backward(table, None):
            return _on_device(host, self._copies)
        handles = (table.collector, table.handle)
        lookup = _Lookup(*handles, self._asked, self._padding, scale_grad_by_freq, self._copies)
        return _StagedRowsFunction.apply(table.anchor, host, lookup)  # type: ignore[return-value]

    def _on_host(self, table: Table, dtype: torch.dtype) -> Tensor:
        """The rows as they are now, in pinned memory."""
        if self._handle is None:
            raise ValueError(f'the staged rows of table "{self._name}" were taken by a forward before')
        # The store gives out a handle's rows once, so it counts as taken even if the wait fails.
        handle, self._handle = self._handle, None
        try:
            rows = operators.emb_wait_result(handle, table.dim).view(*self._ids.shape, table.dim)
        except RuntimeError:  # The store drops what waits too long.
            rows = operators.emb_read(table.handle, self._asked, table.dim)
        if self._asked is not self._ids:
            rows = with_rows_of_padding(rows, self._ids, table, self._padding_idx)
        return self._copies.pinned(rows.shape, dtype).copy_(rows)


class _Lookup(NamedTuple):
    """The parts of a lookup that its backward needs; without the `Table`, which may end before."""

    collector: Tensor
    table: Tensor
    ids: Tensor
    padding_idx: int | None
    scale_grad_by_freq: bool
    copies: Copies

    def collect(self, grads: Tensor, event: Any) -> None:
        """Waits for gradients and collects them."""
        self.copies.synchronize(event)
        if self.scale_grad_by_freq:
            grads = grads.to(torch.float32) * shares_of_ids(self.ids).unsqueeze(-1)
        collect(self.collector, self.table, self.ids, grads, self.padding_idx)


class _StagedRowsFunction(CollectingFunction):
    """Rows in pinned memory, on the device: `[..., D] -> [..., D]`."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, host: Tensor, lookup: _Lookup) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(anchor)
        ctx.lookup, ctx.tables = lookup, (lookup.table,)
        return _on_device(host, lookup.copies)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, ...]:
        (anchor,) = ctx.saved_tensors
        lookup: _Lookup = ctx.lookup
        if anchor.requires_grad:  # It may be frozen since the lookup.
            grads, event = lookup.copies.to_host(grad_outputs[0].detach().contiguous())
            # To wait here would hold up the engine, which still has work to give to the device. The callback runs when
            # the pass ends.
            engine: Any = Variable._execution_engine  # type: ignore[attr-defined]
            engine.queue_callback(lambda: lookup.collect(grads, event))
        return (None,) * 3


def _on_device(host: Tensor, copies: Copies) -> Tensor:
    rows, event = copies.to_device(host)
    copies.wait(rows, event)
    return rows


class Stageable(Protocol):
    """A module whose rows `StagingDataLoader` can read ahead."""

    def stage(self, features: Tensor, copies: Copies) -> StagedRows:
        """Begins to read the rows that a forward of these features takes."""
        ...


class StagingDataLoader:
    """Goes through a DataLoader and gives each batch with its rows, read ahead for a device.

    The module's forward takes the rows in the place of ids or tokens, and gives the same to the bit, gradients
    included: rows that a step changes after they were read ahead are read again. `backward` collects gradients as it
    ends. Call the dense optimizer's step before that of the `SparseOptimizer`: the device then works meanwhile.

    An error of the DataLoader, or of a batch whose rows cannot be read ahead, is raised in place of that batch.

    Args:
        dataloader: any iterable of batches.
        module: a `DistEmbedding` or an `NGramMemory`; its tables are not sharded.
        device: the CUDA device that computes.
        prefetch_count: how many batches it looks ahead, at least 1.
        features: takes ids or tokens, on the CPU, out of a batch. By default the batch itself.

    Raises:
        TypeError: a module whose rows cannot be staged, or a `prefetch_count` that is no int.
        ValueError: a `prefetch_count` below 1, or another device than CUDA: on the CPU lookups read rows in place.
        RuntimeError: there is no CUDA here.

    Examples:
        >>> for tokens, rows in StagingDataLoader(loader, memory, "cuda"):  # doctest: +SKIP
        ...     hidden = memory(embedding(tokens.to("cuda")), rows)
    """

    __module__ = "recstore_ops"

    def __init__(
        self,
        dataloader: Iterable[Any],
        module: Stageable,
        device: str | torch.device | Copies,
        prefetch_count: int = 2,
        features: Callable[[Any], Tensor] | None = None,
    ) -> None:
        check_prefetch_count(prefetch_count)
        if not callable(getattr(module, "stage", None)):
            raise TypeError(
                f"StagingDataLoader needs a DistEmbedding or an NGramMemory, whose rows are staged, "
                f"got {type(module).__name__}"
            )
        self.dataloader = dataloader
        self.module = module
        self.prefetch_count = prefetch_count
        self._copies = CudaCopies(device) if isinstance(device, str | torch.device) else device
        self._features = features

    def __len__(self) -> int:
        """The number of batches, if the DataLoader knows it."""
        return len(cast("Sized", self.dataloader))

    def __iter__(self) -> Iterator[tuple[Any, StagedRows]]:
        return prefetch(self.dataloader, self._stage, self.prefetch_count)

    def _stage(self, batch: Any) -> StagedRows:
        return self.module.stage(batch if self._features is None else self._features(batch), self._copies)
