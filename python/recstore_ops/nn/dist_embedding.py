"""`DistEmbedding`: `torch.nn.Embedding` over a table that grows by id."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from recstore_ops.client.dist_tensor import DistTensor, fill_rows
from recstore_ops.config.config_file import configure_table
from recstore_ops.config.keywords import takes
from recstore_ops.config.row_types import VALUE_TYPES, check_output_dtype
from recstore_ops.config.table_config import TableConfig, optimizer_with_lr, with_kind
from recstore_ops.config.table_options import DEFAULT_LR, DEFAULTS, TableOptions, config_options
from recstore_ops.nn.closed_module import ClosedModule
from recstore_ops.nn.copies import Copies
from recstore_ops.nn.functional import embedding
from recstore_ops.nn.padding import PaddingIdx, padding_ids, with_one_padding
from recstore_ops.nn.staging import StagedRows
from recstore_ops.nn.table_parameter import TableParameter, without_stand_ins
from recstore_ops.nn.table_rows import RowsOfTable
from recstore_ops.ops import operators
from recstore_ops.ops.operators import eager_only
from recstore_ops.sharding.ownership import write_own
from recstore_ops.sharding.rows import Request
from recstore_ops.state.ids_check import check_of_ids
from recstore_ops.state.keys import add_rows, load_rows
from recstore_ops.state.rows import rows_by_id
from recstore_ops.table.checks import check_ids
from recstore_ops.table.existing import check_choice, note_module, settle_existing
from recstore_ops.table.owners import is_owned, keep, opening
from recstore_ops.table.program_line import warn_program
from recstore_ops.table.refusals import NO_MAX_NORM
from recstore_ops.table.shard import Shard
from recstore_ops.table.table import Table, disagreeing_on_error

InitFunc = Callable[[tuple[int, int], torch.dtype], Tensor]


class TableModule(ClosedModule):
    """Common parts of modules over one table: opening it, its padding row, its trace, its place as a parameter.

    The table is no parameter, but a `TableParameter` stands for it in `parameters()`: with `requires_grad` it freezes
    the module, and with `grad = None` or `zero_grad()` it drops what was collected. Conversions such as `half()` change
    the type of what `forward` returns; rows keep their own type.

    Options that are left out here are taken from the configuration file's entry for the table, if there is one; see
    `recstore_ops.load_config_file`.

    Args:
        num_embeddings: the number of ids; `None` for an open vocabulary, in which every int64 is an id.
        embedding_dim: elements a row.
        name: the table's name. An existing table of this name and an equal configuration is shared.
        init_func: `init_func((num_embeddings, embedding_dim), dtype)` returns the rows that a new table starts with.
            `dtype` is the type of the table's rows, and the result may have it. Without `init_func` rows start
            at their initial values, without being stored.
        lr: the learning rate, if neither `optimizer` nor the configuration file has one; 0.01 by default.
        padding_idx: an id that gets no gradient, or several; their rows in a new table are zero, as in `torch.nn`.
        max_norm: refused: a lookup changes no row.
        scale_grad_by_freq: whether the gradient of a row is divided by how often its id occurs in the batch, before
            the gradients of several batches are summed.
        output_dtype: the type of what `forward` returns: `torch.float32`, the default, or the type of the rows.
        **options: see `recstore_ops.TableOptions`, which describes each: `optimizer`, `initializer`, `dtype`, `seed`,
            `admission`, `eviction`, `memory_limit`, `disk`, `process_group` and others.

    Raises:
        TypeError: an option of another name.
        ValueError: an empty name, an invalid configuration, a table of this name with another one, `max_norm`, another
            `output_dtype`, or ranks that make different modules.
        RuntimeError: a job of several processes has no `process_group`, so each process would train its own copy; or
            another rank could not make its module.
    """

    _fixed: ClassVar[frozenset[str]] = frozenset({"num_embeddings", "embedding_dim", "name", "table"})
    _scale_grad_by_freq = False

    @takes(TableOptions, DEFAULTS)
    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        name: str,
        init_func: InitFunc | None = None,
        lr: float = DEFAULT_LR,
        *,
        padding_idx: PaddingIdx = None,
        max_norm: float | None = None,
        scale_grad_by_freq: bool = False,
        output_dtype: torch.dtype | None = None,
        **options: Unpack[TableOptions],
    ) -> None:
        super().__init__()
        self._scale_grad_by_freq = scale_grad_by_freq
        shard = Shard.of(options)
        with disagreeing_on_error(shard):
            if max_norm is not None:
                raise ValueError(f"{type(self).__name__}: {NO_MAX_NORM}")
            config = configure_table(name, embedding_dim, num_embeddings, lr=lr, **config_options(options))
            self.num_embeddings = config.num_embeddings
            self.embedding_dim = embedding_dim
            self.name = name
            self.padding_idx = _wrap_padding_idx(padding_idx, config.num_embeddings)
            # A padding row that eviction drops would come back with its initial values, and not with zeros.
            config = _keeping(config, self.padding_idx)
            self.output_dtype = check_output_dtype(output_dtype, config.dtype, name)
            check_choice(options.get("on_existing"), name)
        # One lock over all of it: another thread finds the table either absent or with its first rows.
        with opening:
            settle_existing(name, embedding_dim, config, shard, options.get("on_existing"))
            # Ranks must agree on the padding too: each leaves it out of gradients that it receives from the others.
            self.table = Table(name, embedding_dim, config, shard, f"padding_idx={padding_ids(self.padding_idx)}")
            self._parameters["weight"] = TableParameter.of(self.table, self.output_dtype, type(self).__name__)
            self.table.owner = type(self).__name__
            # A `DistTensor` may own the table, and would take the rows along when it goes.
            keep(self.table.table_id)
            if self.table.is_new:
                self._start_rows(init_func, VALUE_TYPES[config.dtype])
            note_module(self.table)
        if self.table.is_new:
            return
        optimizer = options.get("optimizer")
        # A rate equal to the default may not have been given, so a table that keeps another is no reason to warn.
        asked = with_kind(optimizer, "sgd") if lr == DEFAULT_LR else optimizer_with_lr(optimizer, lr)
        _warn_of_kept_values(self.table, asked)

    def _start_rows(self, init_func: InitFunc | None, dtype: torch.dtype) -> None:
        if init_func is not None:
            fill_rows(self.table, self.num_embeddings, init_func, dtype)
        self._zero_padding_row()

    def _zero_padding_row(self) -> None:
        ids = padding_ids(self.padding_idx)
        if ids:
            zeros = torch.zeros(len(ids), self.embedding_dim, dtype=torch.float32, device="cpu")
            write_own(self.table, _ids(ids), zeros)

    def __getstate__(self) -> dict[str, Any]:
        # Without the stand-in: a pickle must not name a type that is not public.
        parameters = {name: each for name, each in self._parameters.items() if name != "weight"}
        return {**self.__dict__, "_parameters": parameters, "frozen": self.frozen}

    def __setstate__(self, state: dict[str, Any]) -> None:
        was_frozen = state.get("frozen", False)
        kept = {name: value for name, value in state.items() if name != "frozen"}
        super().__setstate__({**kept, "name": state["table"].name})  # Of a deep copy another than before.
        owner = type(self).__name__
        self._parameters["weight"] = TableParameter.of(self.table, self.output_dtype, owner, not was_frozen)
        with opening:
            if not is_owned(self.table.table_id):
                keep(self.table.table_id)
            if self.table.needs_start:
                # The pickle made this table. Its padding row is set once, by the first module over it.
                self.table.needs_start = False
                self._start_rows(None, torch.float32)
            note_module(self.table)

    def _repr_html_(self) -> str:
        return self.table._repr_html_()

    @property
    def weight(self) -> DistTensor:
        """The table as a `DistTensor` that outlives this module; of a sharded one this rank's rows only."""
        owner, stand_in = f"the weight of {type(self).__name__}", self._parameters.get("weight")
        device = None if stand_in is None else stand_in.device
        return DistTensor.over(self.table, (self.num_embeddings, self.embedding_dim), owner, device)

    @property
    def frozen(self) -> bool:
        """Whether lookups collect no gradients; the opposite of `weight.requires_grad`."""
        return not self.table.requires_grad

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        self.requires_grad_(not frozen)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As in `nn.Module`; without `recurse` those of a derived class alone, and not the stand-in of the table.

        DDP and FSDP ask every module so for what they reduce and shard, and the stand-in is neither.
        """
        found = super().named_parameters(prefix, recurse, remove_duplicate)
        return found if recurse else without_stand_ins(found)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """As in `nn.Module`; without `recurse` the stand-in of the table too, so that loops freeze it."""
        if recurse:
            yield from super().parameters()
        else:
            yield from (each for each in self._parameters.values() if each is not None)

    @contextmanager
    def _without_stand_in(self) -> Iterator[nn.Parameter | None]:
        stand_in = self._parameters.pop("weight", None)  # A function of torch that was refused may have taken it.
        try:
            yield stand_in
        finally:
            if stand_in is not None:
                self._parameters["weight"] = stand_in

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "TableModule":
        # torch would convert the scalar as a parameter of its own. The stand-in takes type and device by `moved`.
        with self._without_stand_in() as stand_in:
            super()._apply(fn, recurse)
        if isinstance(stand_in, TableParameter):
            self._parameters["weight"] = moved = stand_in.moved(fn)
            self.output_dtype = moved.dtype
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        with self._without_stand_in():
            super()._save_to_state_dict(destination, prefix, keep_vars)
        add_rows(self.table, destination, prefix)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: Any,
        missing_keys: Any,
        unexpected_keys: Any,
        error_msgs: Any,
    ) -> None:
        with self._without_stand_in():
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
        load_rows(self.table, state_dict, prefix, missing_keys, unexpected_keys)

    def looked_up(self) -> Table:
        """The table as lookups take it: with the anchor that `torch.func.functional_call` puts in the stand-in's place.

        The tensor put there decides whether rows get a gradient, as a replaced weight of an `nn.Embedding` does.
        """
        stand_in: Any = self._parameters.get("weight")
        return self.table if stand_in is self.table.anchor else self._table_behind(stand_in)

    def _table_behind(self, stand_in: Any) -> Table:
        """The table of another tensor in the place of the parameter: that of another module, or a clone of rows.

        Raises:
            RuntimeError: it stands for no table of this size.
        """
        owner = type(self).__name__
        if isinstance(stand_in, TableParameter | RowsOfTable):
            table = stand_in.table_of_rows()
            if table.dim == self.table.dim:
                return table
        # What transforms of `torch.func` make of the scalar.
        elif isinstance(stand_in, Tensor) and stand_in.dim() == 0:
            return self.table.anchored(stand_in, owner)
        found = f"a tensor of shape {tuple(stand_in.shape)}" if isinstance(stand_in, Tensor) else repr(stand_in)
        raise RuntimeError(
            f'"weight" of {owner} over table "{self.table.name}": {found} is in its place, and lookups read tables of '
            f"dim {self.table.dim}; give functional_call the parameter of a module, or its detach().clone()"
        )

    def tables(self) -> list[Table]:
        """The table of this module."""
        return [self.table]

    def requests(self, features: Tensor) -> list[Request]:
        """The lookups in a sharded table that a forward of these ids makes, for `ShardedPipeline`."""
        ids, padding_idx = with_one_padding(check_ids(features), self.padding_idx)
        return [Request(self.table, ids, padding_idx)]

    @eager_only
    def reset_parameters(self) -> None:
        """Brings all rows of the table, for all modules over it, back to their initial values, without slots.

        Rows get the values of `initializer`; values from `init_func` or a matrix are not kept. The padding row is zero.
        Learning rate, step and collected gradients stay. If the table is sharded, only this rank's rows are reset.
        """
        operators.hashtable_clear(self.table.handle)
        self._zero_padding_row()

    def reset_trace(self) -> None:
        """Forgets the gradients collected and not yet applied."""
        self.table.clear_collected()

    def ids(self) -> Tensor:
        """The ids that have a row, int64 `[N]`, in no order; of a sharded table those of this rank."""
        return operators.hashtable_ids(self.table.handle)

    def rows(self) -> Tensor:
        """All rows, in the row type, `[N, embedding_dim]`, those of rising ids; `state_dict` holds them so."""
        return rows_by_id(self.table)[1]

    def ids_check(self) -> Tensor:
        """The check of the ids that `state_dict` holds, int64 `[32]`; `load_state_dict` compares it with theirs."""
        return check_of_ids(self.ids())

    def extra_repr(self) -> str:
        size = "open" if self.num_embeddings is None else self.num_embeddings
        text = f"{size}, {self.embedding_dim}, name={self.name!r}"
        if self.table.config.dtype != "float32":
            text = f"{text}, dtype={self.table.config.dtype}"
        if self._scale_grad_by_freq:
            text = f"{text}, scale_grad_by_freq=True"
        if self.padding_idx is not None:
            text = f"{text}, padding_idx={self.padding_idx}"
        return f"{text}, {self.table.summary()}"


class DistEmbedding(TableModule):
    """Rows of a table, looked up by id: `[...]` ids give `[..., embedding_dim]`. `SparseOptimizer` steps them.

    Args:
        num_embeddings: ids are below it; `None` for an open vocabulary, in which every int64 is an id.
        embedding_dim: elements a row.
        name: the table's name. Modules with one name and one configuration share its rows.
        init_func: `init_func((num_embeddings, embedding_dim), dtype)` gives the first rows; without it they start at
            the values of `initializer`, and are stored once they are trained.
        lr: the learning rate, if neither `optimizer` nor the configuration file has one.
        padding_idx: an id, or several, whose row is zero and gets no gradient.
        max_norm: refused: a lookup changes no row.
        scale_grad_by_freq: divide the gradient of a row by how often its id occurs in the batch.
        output_dtype: `torch.float32`, the default, or the type of the rows.
        **options: `optimizer` (kind, or a dict with kind and `lr`), `initializer`, `dtype`, `seed`, `admission`,
            `eviction` (in steps and rows), `memory_limit` (in bytes), `disk` (a directory), `process_group`,
            `on_existing` and more: see `help(recstore_ops.TableOptions)`.

    Raises:
        TypeError: an option of another name.
        ValueError: an invalid value, or a table of this name with another configuration.
        RuntimeError: a job of several processes, without `process_group`.

    Examples:
        >>> user = DistEmbedding(None, 16, "user", optimizer={"kind": "adagrad", "lr": 0.1})
        >>> user(torch.tensor([[7, -3], [2**62, 7]])).shape
        torch.Size([2, 2, 16])
    """

    __module__ = "recstore_ops"

    @classmethod
    def from_pretrained(cls, embeddings: Tensor, name: str, freeze: bool = True, **kwargs: Any) -> "DistEmbedding":
        """Opens a new table with the rows of a matrix.

        Args:
            embeddings: floating point, `[num_embeddings, dim]`.
            name: the name of a table that does not exist yet.
            freeze: whether the rows get no gradient.
            **kwargs: further arguments of `DistEmbedding`.

        Raises:
            ValueError: embeddings that are not 2-D, or a table that exists.
        """
        if embeddings.dim() != 2:
            raise ValueError(f"embeddings must be 2-D, got {embeddings.dim()}-D")
        rows = embeddings.detach()
        num_embeddings, dim = rows.shape
        module = cls(num_embeddings, dim, name, init_func=lambda shape, dtype: rows, **kwargs)
        if not module.table.is_new:
            raise ValueError(f'table "{name}" exists; from_pretrained needs a new one')
        ids = padding_ids(module.padding_idx)
        if ids:
            # The constructor has set these rows to zero, and torch's `from_pretrained` leaves those of the matrix.
            write_own(module.table, _ids(ids), rows[list(ids)].to(torch.float32))
        module.frozen = freeze
        return module

    def stage(self, features: Tensor, copies: Copies) -> StagedRows:
        """Begins to read the rows of ids ahead, for `StagingDataLoader`."""
        return StagedRows(self.table, features, self.padding_idx, copies)

    def forward(self, ids: Tensor | StagedRows) -> Tensor:
        """Reads the row of each id: `[...] -> [..., embedding_dim]`, `output_dtype`; see `recstore_ops.embedding`.

        Rows that a `StagingDataLoader` gave are taken in the place of ids.
        """
        if isinstance(ids, StagedRows):
            return ids.rows_for(self.looked_up(), self.output_dtype, self._scale_grad_by_freq)
        rows = embedding(ids, self.looked_up(), self.padding_idx, self._scale_grad_by_freq)
        if rows.dtype != self.output_dtype:
            rows = rows.to(self.output_dtype)
        return rows

    @property
    def _trace(self) -> list[tuple[Tensor, Tensor]]:
        """The gradients collected and not yet applied, as `(ids [U], grads [U, dim])` with distinct ids."""
        return [(ids, grads) for _, ids, grads in self.table.collected()]


def _warn_of_kept_values(table: Table, asked: dict[str, Any]) -> None:
    """Warns if an existing table keeps a learning rate or weight decay that differs from the one asked for."""
    kept = table.config.optimizer
    for key in {"lr", "alpha", "weight_decay"} & asked.keys():
        value, kept_value = asked[key], kept.get(key, kept.get("alpha"))
        if kept_value != value:
            warn_program(
                f'table "{table.name}" exists and keeps {key}={kept_value}, not {value}; {_way_to_change(key)}'
            )


def _way_to_change(key: str) -> str:
    if key == "weight_decay":
        return "it stays as long as the table: RecStoreClient.drop drops that, for a new one"
    return "a learning rate can be changed with RecStoreClient.set_learning_rate or SparseOptimizer"


def _ids(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _keeping(config: TableConfig, padding_idx: PaddingIdx) -> TableConfig:
    """Makes padding rows ones that never leave."""
    if padding_idx is None or config.eviction is None:
        return config
    keep_ids = sorted({*config.eviction.get("keep", ()), *padding_ids(padding_idx)})
    return replace(config, eviction={**config.eviction, "keep": keep_ids})


def _wrap_padding_idx(padding_idx: PaddingIdx, num_embeddings: int | None) -> int | tuple[int, ...] | None:
    """Lets negative padding ids count from the end of a table that has one, as `torch.nn.Embedding` does."""
    wrapped = padding_ids([_wrapped(each, num_embeddings) for each in padding_ids(padding_idx)])
    return wrapped if len(wrapped) > 1 else next(iter(wrapped), None)


def _wrapped(padding_idx: int, num_embeddings: int | None) -> int:
    if num_embeddings is None:
        if not -(2**63) <= padding_idx < 2**63:
            raise ValueError(f"padding_idx must be an int64, got {padding_idx}")
        return padding_idx
    if not -num_embeddings <= padding_idx < num_embeddings:
        raise ValueError(f"padding_idx must be within num_embeddings {num_embeddings}, got {padding_idx}")
    return padding_idx % num_embeddings
