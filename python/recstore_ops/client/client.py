"""`RecStoreClient`: tables by name, for code that calls the store itself."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from recstore_ops import checkpoint, servers
from recstore_ops.checkpoint.saving import Compression, LoadReport, PendingSave, SaveKind, SaveReport
from recstore_ops.client.dist_tensor import DistTensor, global_names
from recstore_ops.client.update_queue import UpdateQueue
from recstore_ops.config.config_file import configure_table
from recstore_ops.config.html_table import Figures
from recstore_ops.config.row_types import ROW_TYPES
from recstore_ops.config.table_config import TableConfig, check_learning_rate
from recstore_ops.config.table_options import DEFAULT_LR, options_of
from recstore_ops.ops import operators
from recstore_ops.servers import store
from recstore_ops.table.checks import check_ids
from recstore_ops.table.owners import keep
from recstore_ops.table.table import Table


@dataclass(frozen=True)
class EmbeddingTableConfig:
    """The configuration of a table that `RecStoreClient.init_embedding_table` opens.

    Fields that are left out are taken from the configuration file's entry for the table, if there is one; see
    `recstore_ops.load_config_file`.

    Attributes:
        num_embeddings: the number of ids; `None` for an open vocabulary.
        embedding_dim: elements a row.
        optimizer: this and all others as in `recstore_ops.TableOptions`.
        learning_rate: the learning rate, if neither `optimizer` nor the configuration file has one.
    """

    __module__ = "recstore_ops"

    num_embeddings: int | None
    embedding_dim: int
    optimizer: str | dict[str, Any] | None = None
    initializer: str | dict[str, Any] | None = None
    learning_rate: float = DEFAULT_LR
    dtype: torch.dtype | None = None
    admission: dict[str, Any] | None = None
    eviction: dict[str, Any] | None = None
    memory_limit: int | None = None
    disk: str | PathLike[str] | None = None

    def table_config(self, name: str) -> TableConfig:
        """The configuration of the table `name`.

        Raises:
            ValueError: the configuration file is invalid or says another `embedding_dim`.
        """
        return configure_table(name, self.embedding_dim, self.num_embeddings, lr=self.learning_rate, **options_of(self))


class RecStoreClient:
    """Reads, writes and updates the tables of this process by name.

    Every method that takes a table's name raises `KeyError` for a table that does not exist. All but `stats`, `evict`
    and `drop` refuse tables that are sharded over ranks, and so do `save`, `save_async` and `load`.
    """

    __module__ = "recstore_ops"

    def __init__(self) -> None:
        self._tables: dict[str, tuple[int, Table]] = {}
        self._updates = UpdateQueue()

    def init_embedding_table(self, name: str, config: EmbeddingTableConfig) -> bool:
        """Creates the table, or opens it if its configuration agrees.

        Returns:
            True.

        Raises:
            ValueError: the configuration is invalid, or the table exists with another one.
        """
        table = self._remember(name, Table(name, config.embedding_dim, config.table_config(name)))
        keep(table.table_id)
        return True

    def init_data(
        self,
        name: str,
        shape: tuple[int, int],
        dtype: torch.dtype,
        init_func: Callable[[tuple[int, int], torch.dtype], Tensor] | None = None,
        is_gdata: bool = True,
    ) -> None:
        """Creates a table of a given size that stays until it is dropped; see `DistTensor`.

        Args:
            name: the table's name; a table of this name and shape is left as it is.
            shape: `(num_embeddings, dim)`.
            dtype: the type rows are kept in: `torch.float32`, `torch.bfloat16`, `torch.float16`, `torch.int8` or
                `torch.float8_e4m3fn`.
            init_func: gives the rows that a new table starts with; zeros without it.
            is_gdata: whether `gdata_name_list` names the table.
        """
        DistTensor(shape, dtype, name, init_func, persistent=True, is_gdata=is_gdata)

    def pull(self, name: str, ids: Tensor) -> Tensor:
        """Reads rows: ids `[...]` -> float32 `[..., dim]`, on the ids' device."""
        table = self._table(name)
        return operators.emb_read(table.handle, check_ids(ids), table.dim)

    def push(self, name: str, ids: Tensor, data: Tensor) -> None:
        """Overwrites the rows of ids `[...]` with `data`, `[..., dim]`; of duplicates the last one wins."""
        operators.emb_write(self._table(name).handle, check_ids(ids), data)

    def update(self, name: str, ids: Tensor, grads: Tensor) -> None:
        """Takes one optimizer step with the gradients `[..., dim]` of ids `[...]`, duplicates summed first."""
        operators.emb_update(self._table(name).handle, check_ids(ids), grads)

    def prefetch(self, ids: Tensor, name: str | None = None, embedding_dim: int | None = None) -> int:
        """Issues a read of rows and returns its handle for `wait_and_get`.

        Args:
            ids: int64, `[...]`.
            name: the table; without it `embedding_dim` names the table `default/<dim>`.
            embedding_dim: elements a row, if no table is named.

        Raises:
            ValueError: neither or both of `name` and `embedding_dim`.
        """
        if (name is None) == (embedding_dim is None):
            raise ValueError("prefetch needs either name or embedding_dim")
        if name is not None:
            return operators.emb_prefetch(self._table(name).handle, check_ids(ids))
        return operators.emb_prefetch_default(check_ids(ids), embedding_dim)

    def wait_and_get(self, prefetch_id: int, embedding_dim: int, device: torch.device | str = "cpu") -> Tensor:
        """Waits for the rows of a prefetch, float32 `[ids, embedding_dim]` in the order of the ids, and consumes it.

        Raises:
            RuntimeError: a handle that is unknown, was consumed or dropped, or rows of another dim.
        """
        return operators.emb_wait_result(prefetch_id, embedding_dim).to(device)

    def update_async(self, name: str, ids: Tensor, grads: Tensor) -> int:
        """Takes one optimizer step on a thread of its own, after those issued before; returns a handle for `wait`.

        The tensors are copied: the caller may change them at once.
        """
        return self._updates.issue(self.update, name, *_copies(ids, grads, "grads"))

    def push_async(self, name: str, ids: Tensor, data: Tensor) -> int:
        """Overwrites rows as `push` does, on the thread of `update_async` and after what was issued before.

        Returns:
            A handle for `wait`. The tensors are copied.
        """
        return self._updates.issue(self.push, name, *_copies(ids, data, "data"))

    def wait(self, handle: int) -> None:
        """Waits for an update of `update_async`, or a write of `push_async`, and raises what it raised.

        Raises:
            ValueError: a handle that is unknown or was waited for.
        """
        self._updates.wait(handle)

    def set_ps_config(self, host: str, port: int) -> None:
        """Opens tables on a server from now on; see `recstore_ops.servers.set_ps_config`."""
        servers.set_ps_config(host, port)

    def delete(self, name: str, ids: Tensor) -> None:
        """Deletes the rows of ids; an id without a row is no error."""
        operators.hashtable_delete(self._table(name).handle, check_ids(ids))

    def evict(self, name: str, dry_run: bool = False, *, ttl: int | None = None) -> Tensor:
        """Removes the rows that the table's `eviction` chooses from it as it is now.

        Training does so by itself. This call is for the time in between, or to see which rows would leave. If the table
        is sharded over ranks, it chooses from the rows of this rank.

        Args:
            name: the table's name.
            dry_run: whether nothing changes.
            ttl: replaces the table's own: rows leave if they have not been updated for more than so many steps.

        Returns:
            The ids of the rows that left or would, ascending: int64, `[rows]`.

        Raises:
            KeyError: there is no such table.
            ValueError: no row of the table ever leaves, or `ttl` is negative or above an int64.
        """
        _check_there(name)
        return evict(name, dry_run, ttl)

    def drop(self, name: str) -> None:
        """Deletes a table and its rows. If it is sharded over ranks, these are the rows of this rank.

        Raises:
            KeyError: there is no such table.
        """
        _check_there(name)
        operators.drop_table(name)
        self._tables.pop(name, None)

    delete_data = drop

    def set_learning_rate(self, name: str, lr: float) -> None:
        """Sets the table's learning rate from the next step on. It takes precedence over an optimizer's `lr`.

        Raises:
            ValueError: a negative or non-finite rate.
            RuntimeError: a rate of zero for FTRL, or a table of a forked child's parent.
        """
        check_learning_rate(lr, name)
        operators.set_learning_rate(self._table(name).handle, lr)

    def save(
        self,
        path: str | PathLike[str],
        *,
        kind: SaveKind = "full",
        keep: int = 1,
        metadata: Any = None,
        compression: Compression = None,
        replace: bool = False,
        storage_options: Mapping[str, str] | None = None,
        progress: bool | None = None,
    ) -> SaveReport:
        """Saves all tables to a directory; see `recstore_ops.checkpoint.save`."""
        return checkpoint.save(
            path,
            kind=kind,
            keep=keep,
            metadata=metadata,
            compression=compression,
            replace=replace,
            storage_options=storage_options,
            progress=progress,
        )

    def save_async(
        self,
        path: str | PathLike[str],
        *,
        kind: SaveKind = "full",
        keep: int = 1,
        metadata: Any = None,
        compression: Compression = None,
        replace: bool = False,
        storage_options: Mapping[str, str] | None = None,
    ) -> PendingSave:
        """Saves all tables to a directory in a thread of its own; see `recstore_ops.checkpoint.save_async`."""
        return checkpoint.save_async(
            path,
            kind=kind,
            keep=keep,
            metadata=metadata,
            compression=compression,
            replace=replace,
            storage_options=storage_options,
        )

    def load(
        self,
        path: str | PathLike[str],
        *,
        shard: tuple[int, int] | None = None,
        tables: Collection[str] | None = None,
        snapshot: str | None = None,
        storage_options: Mapping[str, str] | None = None,
        progress: bool | None = None,
    ) -> LoadReport:
        """Replaces tables by those of a directory's newest snapshot; see `recstore_ops.checkpoint.load`."""
        return checkpoint.load(
            path, shard=shard, tables=tables, snapshot=snapshot, storage_options=storage_options, progress=progress
        )

    def stats(self, name: str | None = None) -> dict[str, Any]:
        """The statistics of one table, or of all by name; see `table_statistics`."""
        if name is not None:
            return table_statistics(name)
        found = {table: store.table_statistics(table) for table in store.table_names()}
        return {table: statistics for table, statistics in found.items() if statistics is not None}

    def get_data_meta(self, name: str) -> tuple[torch.dtype, tuple[int | None, int]]:
        """The type of the rows and the shape `(num_embeddings, dim)` of a table; without a bound `(None, dim)`."""
        table = self._table(name)
        return ROW_TYPES[table.config.dtype], (table.config.num_embeddings, table.dim)

    def data_name_list(self) -> list[str]:
        """The names of all tables."""
        return store.table_names()

    def gdata_name_list(self) -> list[str]:
        """The names of the tables declared as global data."""
        return global_names()

    def barrier(self) -> None:
        """Waits for the other processes of a `torch.distributed` job; alone it returns at once."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.barrier()

    def apply_grads(self, tables: list[Table]) -> None:
        """Takes one optimizer step with what was collected through `tables`: one per distinct id and table."""
        # Gradients that were lent come back as clipping and scaling left them.
        for table in tables:
            table.take_back()
        operators.apply_grads([table.collector for table in tables])

    def _table(self, name: str) -> Table:
        """The open table, opened again if another table took over the name."""
        number = store.find_table(name)
        kept = self._tables.get(name)
        # Numbers are never given out twice: another one means that the name was dropped and made again.
        if kept is not None and kept[0] == number:
            return kept[1]
        return self._remember(name, Table.open(name))

    def _remember(self, name: str, table: Table) -> Table:
        table.is_looked_up = True
        self._tables[name] = (table.table_id, table)
        return table


def _check_there(name: str) -> None:
    if store.find_table(name) is None:
        raise KeyError(f'there is no table "{name}"')


KVClient = RecStoreClient

_client: RecStoreClient | None = None


def get_kv_client() -> RecStoreClient:
    """The client that modules and optimizers of this process share."""
    global _client
    _client = _client or RecStoreClient()
    return _client


def evict(name: str, dry_run: bool, ttl: int | None) -> Tensor:
    """Takes away the rows that a table's `eviction` chooses; see `RecStoreClient.evict`."""
    if ttl is not None and not 0 <= ttl < 2**63:
        raise ValueError(f"ttl must be from 0 to before 2**63 steps, got {ttl}")
    try:
        return torch.tensor(store.evict_rows(name, dry_run, ttl), dtype=torch.int64, device="cpu")
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def set_memory_limit(memory_limit: int | None) -> None:
    """Limits the memory of all tables of this process together, in bytes; `None` takes the limit away.

    A call whose new rows would exceed the limit raises an error that names the table, and changes nothing. A table with
    a `disk` moves rows there first, and a table with `eviction` drops its lowest-ranked rows for new ones. Tables that
    take more already keep what they have.

    Raises:
        ValueError: a limit below 1, or tables are opened on parameter servers.
    """
    if memory_limit is not None and memory_limit < 1:
        raise ValueError(f"memory_limit must be at least 1 or None, got {memory_limit}")
    store.set_memory_limit(memory_limit)


def _copies(ids: Tensor, values: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Copies of the ids and of the gradients or rows, `name`, of a call that is made later."""
    ids = check_ids(ids)
    if not isinstance(values, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(values).__name__}")
    return ids.clone(), values.detach().clone()


def memory_in_use() -> int:
    """Returns the bytes of memory that all tables of this process take together; those on servers take none of it."""
    return store.memory_in_use()


def table_statistics(name: str) -> dict[str, Any]:
    """The figures of a table's contents and operations; if it is sharded over ranks, those of this rank.

    Returns:
        `rows` now in the table, `inserts` and `deletes` of rows, `updates` (one a distinct id and step), and
        `evictions` (rows that left, which `deletes` counts too). `rejections` (updates of ids that were not admitted)
        and `candidates` (ids without a row that `admission` counts one by one). `shared_rows` (rows in memory that ids
        without their own share), and `refusals` of values that were not finite. `step`, `learning_rate`, and
        `learning_rate_was_set` by hand. The memory: `bytes`, the sum of `row_bytes` (weights), `slot_bytes` (the
        optimizer's), `index_bytes` (the id map) and `free_bytes` (records without a row); and the `memory_limit`. How
        ids are found: `linear_ids` (consecutive ones, rows made in their order) by number alone, `array_ids` (others
        that lie close together) in an array, and `hash_ids` (the rest) by a hash. If
        `eviction` has a `capacity`: `capacity_share`, the rows that a sweep leaves on one server or rank. If the
        optimizer has `catch_up`: `idle_kept`, a fraction and an exponent of two, the part of a weight without
        gradients that the steps left. With a `disk`: `disk_bytes` of its file, `resident_rows` in memory,
        `rows_fetched` from the disk and `rows_spilled` to it so far, and `disk_nanoseconds` that calls spent on moving
        rows.

    Raises:
        KeyError: there is no such table.
    """
    statistics = store.table_statistics(name)
    if statistics is None:
        raise KeyError(f'there is no table "{name}"')
    return Figures(statistics)
