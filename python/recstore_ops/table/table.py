"""The Python side of one table: its handle, the gradients collected for it, and its end.

A `Table` is what the modules share code over. Opening a name twice gives two `Table`s over one set of rows, each with
gradients of its own. It is pickled as name and configuration, and opened again from them if the table is open. A deep
copy is another table, with rows and optimizer state of its own.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from recstore_ops import _native, servers
from recstore_ops.config.html_table import html_facts
from recstore_ops.config.table_config import TableConfig, check_name_and_dim
from recstore_ops.ops import operators
from recstore_ops.ops.traced_regions import stop, transform_refusal
from recstore_ops.servers import store
from recstore_ops.table.checks import is_finite
from recstore_ops.table.copying import check_not_spawning, check_open, copy_content, note_made
from recstore_ops.table.known_shards import ELSEWHERE, WHOLE, note_new, note_part, refuse_sharded
from recstore_ops.table.owners import is_owned, opening, own
from recstore_ops.table.shard import Shard

_Found = TypeVar("_Found")

_COPIED = "copied tables"
"""The key of the copies of tables, by the numbers of the originals, in the memo of a deep copy."""


class Table:
    """An open table.

    Args:
        name: the table's name, unique in the process.
        dim: elements a row.
        config: initializer, optimizer and the rest; by default the defaults of `TableConfig`.
        shard: this process's part of a table that the ranks of a group share; all of them open it together.
        use: what else ranks must agree on.

    Attributes:
        handle: int64, 1-D, CPU: the operators take it for the table. The table's name is in it, so it is valid in every
            process that has the table open.
        collector: int64, 0-d, CPU: the operators take it for the gradients collected through this `Table`.
        anchor: a scalar that puts lookups on autograd's tape, unless the table is frozen. It never gets a gradient. A
            module's is the parameter that stands for the table, so that `backward(inputs=)` finds it.
        is_frozen: whether lookups collect no gradients.
        table_id: the table's number, which no other table ever has.
        is_new: whether opening created the table.
        times_cleared: how often what was collected was dropped.
        times_bound: how often a program gave its parameter other `data`.
        owner: what it was opened for, for messages.
        is_given_gradients: whether callers hand it gradients of their own, besides those that ranks exchange.

    Raises:
        TypeError: the name is no text, or the configuration has a value of another type.
        ValueError: the configuration is invalid, or the table exists with another one; or other ranks open another
            table, or this process has it open as another shard.
        RuntimeError: a job of several processes has no shard, so each process would train its own copy; or another rank
            could not open its shard.
    """

    __module__ = "recstore_ops"

    def __init__(
        self, name: str, dim: int, config: TableConfig | None = None, shard: Shard | None = None, use: str = ""
    ) -> None:
        # An error of this rank alone would leave the others waiting in `agree`.
        with disagreeing_on_error(shard):
            check_name_and_dim(name, dim)
            servers.prepare()
            _check_place(name, shard)
        self.name = name
        self.dim = dim
        self.config = config or TableConfig()
        self.shard = shard
        self.owner = type(self).__name__
        self.needs_start = False
        self.is_looked_up = False
        self.times_bound = 0
        self._lent: tuple[Tensor, Tensor] | None = None
        self._received_is_finite = True
        self._others_are_finite = True
        self._is_comparable = False
        self.is_given_gradients = False
        self.times_cleared = 0
        with disagreeing_on_error(shard):
            # Outside of inference mode: an anchor that was made within it could never be on autograd's tape.
            with opening, torch.inference_mode(False):
                self.is_new = store.find_table(name) is None
                self._open()
            # With both tensors, and not with the table itself, which would then never end.
            weakref.finalize(self, _release, self.handle, self.collector)
            _open_tables.add(self)
            _check_same_shard(self)
            # Not before: to be refused as another shard leaves the table its share of a capacity.
            if shard is not None:
                _native.set_shards(self.table_id, shard.world)
        if shard is not None:
            self._agree(shard, use)
        if not self.is_new:
            self.config = self._with_own_optimizer()

    def _agree(self, shard: Shard, use: str) -> None:
        try:
            shard.agree(self.name, f"{self.dim} {self.config.to_json()} {use}")
        except Exception:
            # A table that the ranks disagree on must not be there with this rank's configuration when they try again.
            if self.is_new:
                operators.drop_table(self.name)
            raise

    def _with_own_optimizer(self) -> TableConfig:
        """The configuration asked for with the learning rate and the weight decay that the table has."""
        description = store.describe_table(self.name)
        if description is None:
            return self.config  # Dropped meanwhile.
        asked, kept = self.config.optimizer, TableConfig.from_json(description[1]).optimizer
        is_kept = all(asked.get(key, 0.0) == kept[key] for key in ("lr", "alpha", "weight_decay") if key in kept)
        return self.config if is_kept else replace(self.config, optimizer=kept)

    @property
    def is_sharded(self) -> bool:
        """Whether other processes have rows of this table, and lookups ask them."""
        return self.shard is not None and not self.shard.is_alone and not _are_traced_as_whole.get()

    def _open(self) -> None:
        try:
            self.handle: Tensor = operators.make_hashtable(self.name, self.dim, self.config.to_json())
        except (RuntimeError, TypeError, ValueError) as error:
            where = "" if f'"{self.name}"' in str(error) else f'table "{self.name}": '
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{where}{error}") from None
        self.table_id: int = store.find_table(self.name) or 0
        self.collector: Tensor = operators.make_collector()
        self.anchor: Tensor = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
        self.is_frozen = False

    @property
    def requires_grad(self) -> bool:
        """Whether lookups through this `Table` collect gradients; set to False it is frozen."""
        return not self.is_frozen

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.is_frozen = not requires_grad
        with torch._C.DisableTorchFunctionSubclass():
            Tensor.requires_grad_(self.anchor, requires_grad)

    def anchored(self, anchor: Tensor, owner: str) -> "Table":
        """The same table, and the same collector, with another anchor, for the lookups of a module of type `owner`."""
        # The compiler does not know yet whether a transform is to differentiate the anchor.
        if torch.compiler.is_compiling() and (refusal := transform_refusal()):
            stop(self.name, refusal)
        # Not by the constructor, which would make another collector, and a finalizer that releases the handle a second
        # time.
        table = object.__new__(type(self))
        table.__dict__.update(self.__dict__, anchor=anchor, owner=owner, is_frozen=not anchor.requires_grad)
        return table

    @classmethod
    def open(cls, name: str) -> "Table":
        """Opens an existing table with the configuration it has.

        Raises:
            KeyError: there is no such table.
            RuntimeError: it is sharded, and this process has some of its rows; or as for a `Table` without a shard.
        """
        with opening:
            description = store.describe_table(name)
            if description is None:
                raise KeyError(f'there is no table "{name}"')
            refuse_sharded("a call by name", [name], f"modules over it look up the rows of all ranks; else {ELSEWHERE}")
            dim, config = description
            table = cls(name, dim, TableConfig.from_json(config))
            if table.is_new:
                operators.drop_table(name)
                raise KeyError(f'there is no table "{name}": it was dropped while it was opened')
            return table

    def has_collected(self) -> bool:
        """Whether gradients were collected and not yet applied."""
        # Tracers look at the `.grad` of stand-ins.
        with _disable_current_modes():
            return self._lent is not None or operators.collected_tables(self.collector).numel() > 0

    def collected(self) -> list[tuple[str, Tensor, Tensor]]:
        """The gradients collected and not yet applied: `(table_name, ids [U], grads [U, dim])`, ids distinct."""
        self.take_back()
        if operators.collected_tables(self.collector).numel() == 0:
            return []
        ids, grads = operators.collected_grads(self.collector, self.handle)
        return [(self.name, ids, grads)]

    def clear_collected(self) -> None:
        """Forgets the gradients collected and not yet applied."""
        self._lent = None
        self._received_is_finite = True
        self._is_comparable = False
        self.times_cleared += 1
        operators.clear_grads(self.collector)

    def lend_collected(self) -> Tensor | None:
        """Hands out the merged gradients `[U, dim]` to be changed in place; `None` if none were collected.

        The tensor stays the same one until more is collected, the gradients are looked at, or they are applied.

        If the table is sharded, these are the gradients of this rank's rows. All ranks call this together. If one has a
        value that is not finite, the others get NaN, so that a `GradScaler` leaves out the step on all.
        """
        if self._lent is None or operators.collected_tables(self.collector).numel() > 0:
            for _, ids, grads in self.collected():
                self._compare_with_others(grads)
                # Not `clear_collected`: lending is no drop, which `sharding.join` would announce to the other ranks.
                operators.clear_grads(self.collector)
                self._lent, self._received_is_finite = (ids, grads), True
                self._is_comparable = True
        if self._lent is None:
            return None
        return (
            self._lent[1]
            if self._others_are_finite
            else torch.full((1, self.dim), torch.nan, dtype=torch.float32, device="cpu")
        )

    def lent(self) -> tuple[Tensor, Tensor]:
        """The ids `[U]`, ascending, and the merged gradients `[U, dim]` that were handed out; none are empty."""
        empty = torch.empty(0, dtype=torch.int64, device="cpu")
        return self._lent or (empty, torch.empty(0, self.dim, dtype=torch.float32, device="cpu"))

    def _compare_with_others(self, grads: Tensor) -> None:
        if self.shard is not None and self.is_sharded:
            own_is_finite = is_finite(grads)
            self._others_are_finite = not self.shard.ranks_where(not own_is_finite) or not own_is_finite

    def note_received(self, grads: Tensor) -> None:
        """Looks whether gradients that a sharded table collects are finite, for `has_finite_gradients`."""
        if self.is_sharded and self.config.nan_policy == "error":
            self._received_is_finite = self._received_is_finite and is_finite(grads)

    def note_exchanged(self, grads: Tensor) -> None:
        """Notes whether gradients that this rank got are finite, if any rank's are not; all ranks call it."""
        self._is_comparable = True
        self.note_received(grads)

    @property
    def needs_comparing(self) -> bool:
        """Whether some rank may refuse a step for gradients that are not finite; the same on all ranks."""
        return self.config.nan_policy == "error" and (self._is_comparable or self.is_given_gradients)

    def note_compared(self) -> None:
        """Notes that no rank refuses a step for the gradients that were collected so far."""
        self._is_comparable = False

    def has_finite_gradients(self) -> bool:
        """Whether a step would not refuse what was collected of a sharded table for NaN or infinity."""
        if self.config.nan_policy != "error":
            return True
        # Gradients that were lent may have been changed in place since.
        return self._received_is_finite if self._lent is None else is_finite(self._lent[1])

    def take_back(self) -> None:
        """Puts gradients that were lent back among those collected, as they are now."""
        if self._lent is not None:
            ids, grads = self._lent
            self._lent = None
            self.note_received(grads)
            operators.accept_grad(self.collector, self.handle, ids, grads, None)

    def statistics(self) -> dict[str, Any]:
        """The table's statistics; see `recstore_ops.table_statistics`.

        Raises:
            RuntimeError: the table was dropped.
        """
        return self._if_there(_native.statistics_of(self.table_id))

    def learning_rate(self, asks: bool = False) -> tuple[float, bool]:
        """The learning rate, and whether it was set by hand.

        Args:
            asks: whether servers are asked for it; else it is as this process last set it, loaded it or asked for it.

        Raises:
            RuntimeError: the table was dropped.
        """
        (found,) = _native.learning_rates_of([self.table_id], asks)
        return self._if_there(found)

    def _if_there(self, found: _Found | None) -> _Found:
        if found is None:
            raise RuntimeError(f'table "{self.name}" was dropped')
        return found

    def __len__(self) -> int:
        """The number of rows."""
        return operators.hashtable_size(self.handle)

    def summary(self) -> str:
        """The optimizer and the number of rows, as modules show them; servers are not asked for rows."""
        kind, options = self.config.optimizer["kind"], dict(self.config.optimizer)
        del options["kind"]
        optimizer = f"optimizer={kind}({', '.join(f'{name}={value!r}' for name, value in options.items())})"
        if servers.current_ps_backend() != servers.EMBEDDED:
            return f"{optimizer}, rows on servers"
        try:
            return f"{optimizer}, rows={self.statistics()['rows']}"
        except RuntimeError:  # Dropped, or its rows are not to be read.
            return f"{optimizer}, no rows"

    def __repr__(self) -> str:
        return f"Table({self.name!r}, dim={self.dim})"

    def _repr_html_(self) -> str:
        try:
            statistics = self.statistics()
        except RuntimeError as error:  # Dropped, or on servers that do not answer.
            statistics = {"statistics": str(error)}
        return html_facts(f'table "{self.name}"', {"dim": self.dim, **asdict(self.config), **statistics})

    def __reduce__(self) -> tuple[Callable[..., "Table"], tuple[Any, ...]]:
        if self.shard is not None:
            self.shard.__reduce__()
        check_not_spawning(self.name, self.table_id, self.owner)
        return (type(self).reopen, (self.name, self.dim, self.config, self.owner))

    @classmethod
    def reopen(cls, name: str, dim: int, config: TableConfig, owner: str) -> "Table":
        """Opens a table of a pickle.

        Raises:
            RuntimeError: it is not open, outside `recstore_ops.opening_empty_tables`.
            ValueError: it has another configuration.
        """
        with opening:
            check_open(name, owner)
            table = cls(name, dim, config)
            table.owner, table.needs_start = owner, table.is_new
            if table.is_new:
                note_made(name)
            elif is_owned(table.table_id):
                own(table, name, table.table_id)
        return table

    def __deepcopy__(self, memo: dict[Any, Any]) -> "Table":
        """A `Table` over a copy of rows and optimizer state, which goes with the last `Table` over it.

        Gradients that are collected and not yet applied stay with the original. Several `Table`s over one name, copied
        together, are over one copy.

        Raises:
            RuntimeError: as `recstore_ops.table.copying.copy_content`.
        """
        if id(self) not in memo:
            copies: dict[int, Table] = memo.setdefault(_COPIED, {})
            memo[id(self)] = copied = self._copied(copies.get(self.table_id))
            copies.setdefault(self.table_id, copied)
        return memo[id(self)]

    def _first_copy(self) -> "Table":
        with disagreeing_on_error(self.shard):
            name = copy_content(self.name, self.table_id, self.shard)
        try:
            dim, described = self._if_there(store.describe_table(name))
            # The copy has another seed, by which its initial values equal those of the original under the other name.
            config = replace(self.config, seed=TableConfig.from_json(described).seed)
            return type(self)(name, dim, config, self.shard)
        except BaseException:
            operators.drop_table(name)
            raise

    def _copied(self, first: "Table | None") -> "Table":
        with opening:
            if first is None:
                copied = self._first_copy()
            else:
                copied = type(self)(first.name, first.dim, first.config, first.shard)
            own(copied, copied.name, copied.table_id)
        copied.owner, copied.requires_grad = self.owner, self.requires_grad
        copied.is_given_gradients = self.is_given_gradients
        return copied


_are_traced_as_whole = ContextVar("are_traced_as_whole", default=False)


@contextmanager
def traced_as_whole() -> Iterator[None]:
    """Within it lookups are traced as for whole tables, for programs that run in a process that has whole tables."""
    before = _are_traced_as_whole.set(True)
    try:
        yield
    finally:
        _are_traced_as_whole.reset(before)


_open_tables: weakref.WeakSet[Table] = weakref.WeakSet()


def open_tables() -> list[Table]:
    """The `Table`s that are alive in this process."""
    return list(_open_tables)


def learning_rates(tables: Sequence[Table]) -> list[tuple[float, bool]]:
    """The learning rate of each table, as this process knows it, and whether it was set by hand.

    Raises:
        RuntimeError: a table was dropped.
    """
    found = _native.learning_rates_of([table.table_id for table in tables], False)
    return [table._if_there(rate) for table, rate in zip(tables, found, strict=True)]


def _release(handle: Tensor, collector: Tensor) -> None:
    # A table may be collected as garbage while something else is traced.
    with _disable_current_modes():
        operators.hashtable_release(handle)
        operators.collector_release(collector)


def _check_place(name: str, shard: Shard | None) -> None:
    """Refuses an embedded table in a job of several processes: the replicas would drift apart. Servers are shared.

    Raises:
        RuntimeError: `torch.distributed` runs with a world size above 1.
        ValueError: the table is to be sharded over processes, and on servers.
    """
    if servers.current_ps_backend() != servers.EMBEDDED:
        if shard is not None:
            raise ValueError(f'table "{name}" lies on parameter servers: a process_group cannot shard it')
        return
    distributed = torch.distributed
    if shard is not None or not (distributed.is_available() and distributed.is_initialized()):
        return
    if distributed.get_world_size() > 1:
        raise RuntimeError(
            f'table "{name}" would be embedded in each of {distributed.get_world_size()} processes, '
            "and the copies would drift apart; give its module a process_group, over which it is sharded"
        )


@contextmanager
def disagreeing_on_error(shard: Shard | None) -> Iterator[None]:
    """Signals the other ranks that open a table that this one cannot, if there is an error within."""
    try:
        yield
    except Exception:
        if shard is not None:
            shard.disagree()
        raise


def _check_same_shard(table: Table) -> None:
    """Refuses to open a table as another shard than the one whose rows it has."""
    own = WHOLE if table.shard is None else (table.shard.rank, table.shard.world)
    if table.is_new:
        note_new(table.table_id, own)
    others = note_part(table.table_id, own)
    if own != others:
        raise ValueError(
            f'table "{table.name}" is open as shard {others[0]} of {others[1]}, '
            f"and cannot be shard {own[0]} of {own[1]}"
        )


_default_tables: dict[int, Table] = {}


def default_table(dim: int) -> Table:
    """The table `default/<dim>` that the operators without a table address, opened; a new one starts at zeros."""
    name = f"default/{dim}"
    number = store.find_table(name)
    kept = _default_tables.get(dim)
    # A number is never given out twice, so it shows that the name was dropped and made again.
    if kept is None or kept.table_id != number:
        kept = Table(name, dim, TableConfig(initializer={"kind": "zeros"})) if number is None else Table.open(name)
        _default_tables[dim] = kept
    return kept
