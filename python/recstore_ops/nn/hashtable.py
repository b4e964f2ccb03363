"""`HashTable`: a table seen as the hash table it is, from ids to indices and from indices to rows and slots.

It trains like the other modules; beyond them it inserts, deletes and lists ids, shows the index of each and the
optimizer's slots by name, and takes gradients by hand.

Shape suffixes: N ids, D dim, U distinct ids.
"""

import gc
import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from recstore_ops.autograd import GradWorkerMeanFunction, HashTableLookupFunction
from recstore_ops.client.client import evict
from recstore_ops.config.keywords import takes
from recstore_ops.config.table_options import DEFAULT_LR, DEFAULTS, TableOptions
from recstore_ops.nn.dist_embedding import TableModule
from recstore_ops.nn.functional import needs_backward
from recstore_ops.nn.transformed import Lookup, read_rows
from recstore_ops.ops import operators
from recstore_ops.ops.traced_regions import region_refusal, stop
from recstore_ops.servers import store
from recstore_ops.sharding.ownership import check_owned, write_own
from recstore_ops.sharding.pooling import spread_rows
from recstore_ops.sharding.rows import Request, failing_together, sharded_rows
from recstore_ops.sparse.transforms import is_transformed
from recstore_ops.table.checks import check_ids
from recstore_ops.table.shard import Shard
from recstore_ops.table.table import disagreeing_on_error

EMBEDDING_SLOT = "embedding"
"""The name of the slot that holds the rows themselves; the others are the optimizer's."""

_IDS_PER_LOOKUP = 1 << 16
"""How many indices are looked up at once: their rows come along."""


class HashTableRegister:
    """The names of the live `HashTable`s of this process; every call of the class returns the same register."""

    __module__ = "recstore_ops"

    _only: ClassVar["HashTableRegister | None"] = None
    _claims: weakref.WeakValueDictionary[str, "NameClaim"]

    def __new__(cls) -> "HashTableRegister":
        if cls._only is None:
            cls._only = super().__new__(cls)
            cls._only._claims = weakref.WeakValueDictionary()
        return cls._only

    def __reduce__(self) -> tuple[type["HashTableRegister"], tuple[()]]:
        return (HashTableRegister, ())

    def check_free(self, name: str, description: str) -> None:
        """Checks that no live `HashTable` has the name.

        Args:
            name: the name asked for.
            description: the table that asks for it, for the message.

        Raises:
            ValueError: the name is taken; shows both tables.
        """
        if name in self._claims:
            gc.collect()  # A table in a reference cycle holds its name until it is collected.
        claim = self._claims.get(name)
        if claim is not None:
            raise ValueError(
                f'a HashTable named "{name}" exists, {claim.description}; a second one was requested, {description}'
            )

    def register(self, name: str, description: str, is_new: bool = False) -> "NameClaim":
        """Takes the name for as long as the returned claim is alive; raises as `check_free`.

        With `is_new` it is about a table that was just made, and one that was given up for it has the name no more.
        """
        if not is_new:
            self.check_free(name, description)
        claim = NameClaim(name, description)
        self._claims[name] = claim
        return claim

    def join(self, name: str, description: str) -> "NameClaim":
        """Returns the live claim to the name, or a new one: for a copy, which shares its original's."""
        return self._claims.get(name) or self.register(name, description)

    def names(self) -> list[str]:
        """The names taken, sorted."""
        return sorted(self._claims)


class NameClaim:
    """A claim on a name, which a `HashTable` and its copies hold as long as they have the name."""

    def __init__(self, name: str, description: str) -> None:
        self.name = name
        self.description = description

    def __reduce__(self) -> tuple[Callable[..., "NameClaim"], tuple[str, str]]:
        return (HashTableRegister().join, (self.name, self.description))


class HashTable(TableModule):
    """Rows of any shape, by id.

    Only one live `HashTable` has a given name. A loaded pickle is a further view of the same table, with its own
    gradients; a deep copy has its own table and name. The rows outlive the module, as with every module here except
    deep copies: `RecStoreClient.drop` deletes them.

    Args:
        embedding_shape: the shape of one row; an int stands for one size. The table's dim is the product.
        name: the table's name.
        num_embeddings: ids outside `[0, num_embeddings)` are refused; `None` for an open vocabulary, in which every
            int64 is an id.
        lr: the learning rate, if neither `optimizer` nor the configuration file has one; 0.01 by default.
        insert_on_lookup: whether ids without a row get one when they are looked up in training; otherwise with
            their first update.
        grad_reduce_by: what a row's gradients are divided by once they are summed: `worker`, the number of workers;
            `id`, the times that the row occurs in the call.
        num_workers: the workers whose gradients come to this table; those of the `torch.distributed` job by default,
            and 1 with a `process_group`, whose `grad_reduce` divides already.
        **options: see `recstore_ops.TableOptions`. With a `process_group` a forward reads the rows of all ranks.
            `insert` and `delete` change only the rows of this rank: all are changed once every rank has called them
            with all ids. Methods that list ids, rows or gradients list those of this rank.

    Attributes:
        embedding_shape: the shape of one row.
        table: the open table, which `SparseOptimizer` steps.

    Raises:
        TypeError: an option of another name.
        ValueError: the name is empty or taken, an argument is invalid, or the table exists with another
            configuration.
        RuntimeError: a job of several processes has no `process_group`, so each process would train its own copy.

    Examples:
        >>> table = HashTable([2, 3], "user", optimizer={"kind": "adam", "lr": 0.1})
        >>> table(torch.tensor([7, -3, 7])).shape
        torch.Size([3, 2, 3])
        >>> table.slot_names()
        ['embedding', 'exp_avg', 'exp_avg_sq']
    """

    __module__ = "recstore_ops"

    @takes(TableOptions, DEFAULTS)
    def __init__(
        self,
        embedding_shape: int | Sequence[int],
        name: str,
        *,
        num_embeddings: int | None = None,
        lr: float = DEFAULT_LR,
        insert_on_lookup: bool = False,
        grad_reduce_by: Literal["worker", "id"] = "worker",
        num_workers: int | None = None,
        **options: Unpack[TableOptions],
    ) -> None:
        shard = Shard.of(options)
        with disagreeing_on_error(shard):
            shape = _checked_shape(embedding_shape)
            _check_arguments(grad_reduce_by, insert_on_lookup, options.get("admission"), num_workers)
            description = _description(shape, lr, options)
            # Before the table is opened: a name that is taken must leave no table behind.
            if options.get("on_existing") != "reset":
                HashTableRegister().check_free(name, description)
        super().__init__(num_embeddings, math.prod(shape), name, lr=lr, **options)
        # Only now: a table that could not be opened leaves its name free, even while its error is looked at.
        self._claim = HashTableRegister().register(name, description, self.table.is_new)
        # `accept_grad` is no exchange, so ranks compare before each step whether one of them refuses it.
        self.table.is_given_gradients = True
        self.embedding_shape = shape
        self.insert_on_lookup = insert_on_lookup
        self.grad_reduce_by = grad_reduce_by
        # The exchange divides gradients of a sharded table, by its grad_reduce.
        workers = 1 if shard is not None else count_workers()
        self.num_workers = workers if num_workers is None else num_workers

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._claim.name != self.name:  # A deep copy has a table of its own.
            self._claim = HashTableRegister().join(self.name, self._claim.description)

    def forward(self, ids: Tensor) -> Tensor:
        """Looks up the row of each id.

        In training mode the rows carry a gradient, and with `insert_on_lookup` ids without a row get one. In
        evaluation mode the table is only read: no id gets a row, and the rows carry no gradient.

        Args:
            ids: int64 (or narrower, or uint64 taken as int64 bits), any shape `[...]`.

        Returns:
            `[..., *embedding_shape]`, float32 unless the module was converted, on the ids' device. An id without a row
            gives its initial value.

        Raises:
            TypeError: ids of another dtype.
            IndexError: an id out of the table's `num_embeddings`; names table and id.
        """
        with failing_together([self.table]) if self.table.is_sharded else nullcontext():
            ids = _int64(ids)
        rows = self._trainable_rows(ids.reshape(-1)) if self.training else self._evaluated_rows(ids.reshape(-1))
        return rows.reshape((*ids.shape, *self.embedding_shape)).to(self.output_dtype)

    def _trainable_rows(self, ids_N: Tensor) -> Tensor:
        table = self.looked_up()
        if is_transformed() and not table.is_sharded:
            divisor = None if self.grad_reduce_by == "id" else self.num_workers
            return read_rows(ids_N, Lookup(table, inserts=self.insert_on_lookup, divisor=divisor))
        if table.is_sharded:
            ((rows_UD, inverse_N, _),) = sharded_rows([Request(table, ids_N, inserts=self.insert_on_lookup)])
        else:
            distinct_U, inverse_N = _distinct(ids_N)
            if not needs_backward(table, None):
                _, rows_UD = operators.hashtable_lookup(table.handle, distinct_U, table.dim, self.insert_on_lookup)
                return rows_UD.index_select(0, inverse_N)
            _, rows_UD = HashTableLookupFunction.apply(  # type: ignore[misc]
                table.anchor, distinct_U, table.handle, table.collector, table.dim, self.insert_on_lookup
            )
        return GradWorkerMeanFunction.apply(rows_UD, inverse_N, self.grad_reduce_by, self.num_workers)  # type: ignore[return-value]

    def _evaluated_rows(self, ids_N: Tensor) -> Tensor:
        if is_transformed() and not self.table.is_sharded:
            untrained = torch.zeros((), dtype=torch.float32, device="cpu")
            return read_rows(ids_N, Lookup(self.table.anchored(untrained, type(self).__name__)))
        if not self.table.is_sharded:
            if torch.compiler.is_compiling() and (refusal := region_refusal(False)):
                stop(self.table.name, refusal)
            return self._read(ids_N)
        with torch.no_grad():
            (rows,) = sharded_rows([Request(self.table, ids_N)])
        return spread_rows(rows)

    def requests(self, features: Tensor) -> list[Request]:
        """The lookups in a sharded table that a forward of these ids makes, for `ShardedPipeline`."""
        return [Request(self.table, _int64(features), inserts=self.training and self.insert_on_lookup)]

    def _read(self, ids: Tensor) -> Tensor:
        return operators.emb_read(self.table.handle, ids, self.table.dim)

    def insert(self, ids: Tensor, embeddings: Tensor) -> None:
        """Writes rows. An id without one gets it; one that has it keeps its optimizer's slots, but for FTRL's `z`.

        Args:
            ids: int64, `[...]`; of duplicates the last one wins.
            embeddings: floating point, `[..., *embedding_shape]`; rounded to the nearest in a table of 16-bit rows.

        Raises:
            TypeError: ids or embeddings of another dtype.
            ValueError: embeddings of another shape.
            RuntimeError: a value that is not finite, under the policy `error`; names table, id and position.
        """
        ids = _int64(ids)
        rows = self._flat("insert", "embeddings", ids, embeddings)
        if self.table.is_sharded:
            write_own(self.table, ids.reshape(-1), rows.reshape(-1, self.table.dim))
        else:
            operators.emb_write(self.table.handle, ids, rows)

    def delete(self, ids: Tensor) -> None:
        """Deletes rows, slots included, and frees their indices; an id without a row is no error.

        A deleted id starts again from its initial value. Gradients collected for it are kept; see `clear_grad`.
        """
        operators.hashtable_delete(self.table.handle, check_ids(ids))

    def evict(self, dry_run: bool = False, *, ttl: int | None = None) -> Tensor:
        """Takes away the rows that `eviction` chooses from the table as it is now; see `RecStoreClient.evict`."""
        self.table.statistics()  # An error, if another table has the name by now.
        return evict(self.name, dry_run, ttl)

    def clear(self) -> None:
        """Deletes all rows; configuration, learning rate, step and collected gradients stay."""
        operators.hashtable_clear(self.table.handle)

    def ids(self) -> Tensor:
        """The ids that have a row: int64, `[rows]`, in the order of their indices."""
        return operators.hashtable_ids(self.table.handle)

    def ids_map(self) -> tuple[Tensor, Tensor]:
        """The ids that have a row and the index of each: int64, `[rows]` both, indices rising."""
        ids = self.ids()
        handle, dim = self.table.handle, self.table.dim
        parts = [operators.hashtable_lookup(handle, part, dim, False)[0] for part in ids.split(_IDS_PER_LOOKUP)]
        return ids, torch.cat(parts)

    def embeddings(self) -> Tensor:
        """All rows, float32, `[rows, *embedding_shape]`, in the order of `ids()`."""
        return self.slot(EMBEDDING_SLOT)

    def slot_names(self) -> list[str]:
        """The names of the values kept for each id: `embedding`, then the optimizer's slots."""
        slots = store.table_slots(self.name) or []
        return [EMBEDDING_SLOT, *(name for name, _ in slots)]

    def slot(self, name: str, ids: Tensor | None = None) -> Tensor:
        """The values of a slot, by id.

        Args:
            name: one of `slot_names()`.
            ids: int64, `[...]`; by default all ids in the order of `ids()`.

        Returns:
            float32, `[..., *embedding_shape]`, or `[..., 1]` for a slot with one value a row. An id without a row
            gives zeros, and its initial value in the slot `embedding`.

        Raises:
            ValueError: no slot of this name, or ids of a sharded table that another rank owns.
            TypeError: ids of another dtype.
        """
        names = self.slot_names()
        if name not in names:
            raise ValueError(f'table "{self.name}" has the slots {names}, got {name!r}')
        ids = self.ids() if ids is None else _int64(ids)
        check_owned(self.table, ids)
        values = self._read(ids) if name == EMBEDDING_SLOT else operators.hashtable_slot(self.table.handle, ids, name)
        return self._shaped(values)

    def accept_grad(self, ids: Tensor, grad: Tensor) -> None:
        """Collects gradients for the next step, as `backward` does: those of equal ids add up.

        Args:
            ids: int64, `[...]`.
            grad: floating point, `[..., *embedding_shape]`; taken as it is, not divided by workers.

        Raises:
            TypeError: ids or gradients of another dtype.
            ValueError: gradients of another shape, or ids of a sharded table that another rank owns.
        """
        ids = check_ids(ids)
        check_owned(self.table, ids)
        gradients = self._flat("accept_grad", "gradients", ids, grad)
        # These come by no exchange, so no flag of one says whether they are finite.
        self.table.note_received(gradients)
        operators.accept_grad(self.table.collector, self.table.handle, ids, gradients, None)

    def grad(self) -> tuple[Tensor, Tensor]:
        """The gradients collected since the last step: distinct ids, rising, `[U]`; sums `[U, *embedding_shape]`."""
        for _, ids_U, sums_UD in self.table.collected():
            return ids_U, self._shaped(sums_UD)
        no_ids = torch.empty(0, dtype=torch.int64, device="cpu")
        return no_ids, torch.empty((0, *self.embedding_shape), dtype=torch.float32, device="cpu")

    def clear_grad(self) -> None:
        """Forgets the gradients collected and not yet applied."""
        self.table.clear_collected()

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.table)

    def extra_repr(self) -> str:
        reduction = f"grad_reduce_by={self.grad_reduce_by!r}"
        return f"{self.embedding_shape}, name={self.name!r}, {reduction}, {self.table.summary()}"

    def _shaped(self, values: Tensor) -> Tensor:
        """Gives values of one row each, `[..., dim]`, the shape of a row."""
        if values.shape[-1] != self.table.dim:
            return values
        return values.reshape((*values.shape[:-1], *self.embedding_shape))

    def _flat(self, operation: str, what: str, ids: Tensor, values: Tensor) -> Tensor:
        """Returns values of the shape `[..., *embedding_shape]` as `[..., dim]`."""
        expected = (*ids.shape, *self.embedding_shape)
        if values.shape != expected:
            raise ValueError(
                f'{operation}: table "{self.name}" takes {what} of shape {expected} for ids of shape '
                f"{tuple(ids.shape)}, got {tuple(values.shape)}"
            )
        if not values.is_floating_point():
            raise TypeError(f'{operation}: table "{self.name}" takes floating-point {what}, got {values.dtype}')
        return values.detach().reshape(*ids.shape, self.table.dim)


def _distinct(ids_N: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ids in ascending order, `[U]`, and the place of each of `ids_N` among them, `[N]`.

    The number of distinct ids is not known to a traced graph. There duplicates stay, and all occurrences of an id
    have the place of the first, so that the others get a gradient of zero and the sums are the same.
    """
    if not torch.compiler.is_compiling():
        return torch.unique(ids_N, return_inverse=True)
    sorted_N = ids_N.sort().values
    return sorted_N, torch.searchsorted(sorted_N, ids_N)


def _int64(ids: Tensor) -> Tensor:
    ids = check_ids(ids)
    return ids.view(torch.int64) if ids.dtype == torch.uint64 else ids


def _check_arguments(
    grad_reduce_by: str, insert_on_lookup: bool, admission: dict[str, Any] | None, num_workers: int | None
) -> None:
    if grad_reduce_by not in ("worker", "id"):
        raise ValueError(f'grad_reduce_by must be "worker" or "id", got {grad_reduce_by!r}')
    if insert_on_lookup and admission is not None:
        raise ValueError("insert_on_lookup gives every id a row, and admission does not: give one of them")
    if num_workers is not None and num_workers < 1:
        raise ValueError(f"num_workers must be at least 1, got {num_workers}")


def _checked_shape(embedding_shape: int | Sequence[int]) -> tuple[int, ...]:
    shape = (embedding_shape,) if isinstance(embedding_shape, int) else tuple(embedding_shape)
    if not all(isinstance(size, int) and size > 0 for size in shape):
        raise ValueError(f"embedding_shape must be one or more positive ints, got {embedding_shape!r}")
    return shape


def _description(shape: tuple[int, ...], lr: float, options: TableOptions) -> str:
    """A table as the messages about taken names show it."""
    get = options.get
    shown = {
        "initializer": get("initializer"),
        "optimizer": get("optimizer"),
        "lr": lr,
        "block_size": get("block_size"),
        "seed": get("seed"),
    }
    return f"HashTable({shape}, {', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def count_workers(process_group: "torch.distributed.ProcessGroup | None" = None) -> int:
    """The number of processes of a `torch.distributed` group, or of the whole job; 1 if there is no job."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return distributed.get_world_size(process_group)
