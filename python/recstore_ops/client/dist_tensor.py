"""`DistTensor`: a table as a matrix that is read and written by row."""

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from recstore_ops.config.row_types import ROW_TYPES, VALUE_TYPES, type_name
from recstore_ops.config.table_config import TableConfig
from recstore_ops.ops import operators
from recstore_ops.servers import store
from recstore_ops.sharding.ownership import check_owned, write_own
from recstore_ops.table.checks import as_ids
from recstore_ops.table.copied_values import CopiedValues, flat
from recstore_ops.table.copying import check_not_spawning, check_open, note_made
from recstore_ops.table.owners import is_owned, keep, opening, own
from recstore_ops.table.refusals import refused_for_rows
from recstore_ops.table.table import Table

_ROWS_PER_WRITE = 1 << 20

_global_tables: dict[str, int] = {}


class DistTensor:
    """A `[num_embeddings, dim]` matrix whose rows live in the table `name`.

    Args:
        shape: `(num_embeddings, dim)`.
        dtype: the type rows are kept in: `torch.float32`, `torch.bfloat16`, `torch.float16`, `torch.int8` or
            `torch.float8_e4m3fn`.
        name: the table's name. An existing table of this name and shape is shared, its rows kept.
        init_func: `init_func(shape, dtype)` gives the rows that a new table starts with; zeros without it. Of rows of
            8 bits it is called with bfloat16.
        persistent: whether the rows outlive the last `DistTensor` that is not persistent.
        is_gdata: whether `RecStoreClient.gdata_name_list` names the table.

    Raises:
        ValueError: an empty name, or a shape that is not 2-D.
        TypeError: a dtype that is not supported, or a table of this name with another shape or dtype.

    Rows are rounded to `dtype` when they are written, and read as float32; see `row_type` of `TableOptions`. The
    `DistTensor` of a module takes `requires_grad` and `grad = None` as a parameter does. It is no tensor, and refuses
    all other attributes of tensors.
    """

    __module__ = "recstore_ops"

    __slots__ = ("__weakref__", "_device", "_options", "_owner", "_shape", "_table")

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        name: str,
        init_func: Callable[[tuple[int, int], torch.dtype], Tensor] | None = None,
        persistent: bool = False,
        is_gdata: bool = True,
    ) -> None:
        if not name:
            raise ValueError("a DistTensor needs a name")
        if len(shape) != 2:
            raise ValueError(f"the shape of a DistTensor must be (rows, dim), got {tuple(shape)}")
        if dtype not in ROW_TYPES.values():
            raise TypeError(f"a DistTensor holds {', '.join(map(str, ROW_TYPES.values()))}, got {dtype}")
        with opening:
            table = _open_or_create((shape[0], shape[1]), dtype, name)
            if table.is_new and init_func is not None:
                fill_rows(table, shape[0], init_func, VALUE_TYPES[type_name(dtype)])
            if is_gdata:
                # By number: a table that takes the name over later was not declared global.
                _global_tables[name] = table.table_id
            if persistent:
                keep(table.table_id)
            # A table that others opened without an owner stays, so it gets none here.
            elif table.is_new or is_owned(table.table_id):
                own(self, name, table.table_id)
        self._set(table, shape, (persistent, is_gdata))

    def _set(self, table: Table, shape: Sequence[int | None], options: tuple[bool, bool] | None) -> None:
        self._table = table
        self._shape = tuple(shape)
        self._options = options
        self._owner = type(self).__name__
        self._device = torch.device("cpu")

    @classmethod
    def over(
        cls,
        table: Table,
        shape: Sequence[int | None],
        owner: str = "DistTensor",
        device: torch.device | None = None,
    ) -> "DistTensor":
        """A persistent view of an open table, which errors name by its owner, a module of a device.

        Without a bound its first size is the number of rows.
        """
        view = cls.__new__(cls)
        view._set(table, shape, None)
        view._owner, view._device = owner, device or view._device
        return view

    def __reduce__(self) -> tuple[Callable[..., "DistTensor"], tuple[object, ...]]:
        if self._options is None:
            return (DistTensor.over, (self.table, self._shape, self._owner, self._device))
        check_not_spawning(self.name, self.table.table_id, self._owner)
        return (DistTensor.reopen, (self._shape, self.dtype, self.name, *self._options))

    @classmethod
    def reopen(
        cls, shape: tuple[int, int], dtype: torch.dtype, name: str, persistent: bool, is_gdata: bool
    ) -> "DistTensor":
        """Opens the table of a pickle.

        Raises:
            RuntimeError: it is not open, outside `recstore_ops.opening_empty_tables`.
            TypeError: it has another shape or dtype.
        """
        with opening:
            check_open(name, cls.__name__)
            tensor = cls(shape, dtype, name, None, persistent, is_gdata)
            if tensor.table.is_new:
                note_made(name)
        return tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> "DistTensor":
        """A tensor over a copy of the rows, which goes with its last owner; see `Table`."""
        if id(self) not in memo:
            copied = memo[id(self)] = type(self).over(
                copy.deepcopy(self.table, memo), self._shape, self._owner, self._device
            )
            if self._options is not None:
                _, is_gdata = self._options
                copied._options = (False, is_gdata)
                if is_gdata:
                    _global_tables[copied.name] = copied.table.table_id
        return memo[id(self)]

    @property
    def table(self) -> Table:
        """The open table."""
        return self._table

    @property
    def name(self) -> str:
        """The table's name."""
        return self._table.name

    @property
    def tensor_name(self) -> str:
        """The table's name."""
        return self._table.name

    @property
    def dtype(self) -> torch.dtype:
        """The type rows are kept in."""
        return ROW_TYPES[self._table.config.dtype]

    @property
    def device(self) -> torch.device:
        """The device of the module that this is the weight of, else the CPU; rows stay in the store."""
        return self._device

    @property
    def requires_grad(self) -> bool:
        """Whether lookups collect gradients; that of a module's weight freezes the module, and thaws it."""
        return self._table.requires_grad

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self._table.requires_grad = requires_grad

    def requires_grad_(self, requires_grad: bool = True) -> "DistTensor":
        """Sets `requires_grad`."""
        self._table.requires_grad = requires_grad
        return self

    def __setattr__(self, name: str, value: object) -> None:
        if name == "grad" and value is None:
            self._table.clear_collected()
        elif name == "requires_grad" or name in DistTensor.__slots__:
            super().__setattr__(name, value)
        else:
            raise refused_for_rows(self._owner, self.name, name)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise refused_for_rows(self._owner, self.name, name)

    def __bool__(self) -> bool:
        raise refused_for_rows(self._owner, self.name, "__bool__")

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for each in flat([*args, *(kwargs or {}).values()]) if isinstance(each, DistTensor)]
        name = f', "{given[0].name}",' if given else ""
        raise TypeError(
            f"{func.__name__} takes tensors, and the weight of a table{name} is none: give it rows, of weight[ids] or, "
            "with gradients, of the module; initializer, init_func and reset_parameters() give rows their first values"
        )

    @property
    def shape(self) -> tuple[int, int]:
        """`(num_embeddings, dim)`; for an open vocabulary the number of rows and dim."""
        rows = self._shape[0]
        return (len(self.table) if rows is None else rows, self.table.dim)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, ids: Tensor | Sequence[int] | int | slice) -> Tensor:
        """Reads the rows of `ids`: float32, `[..., dim]`. A slice takes the ids below `num_embeddings`.

        Raises:
            TypeError: a slice of a table without a bound, several indices, or no ids.
            ValueError: an id of a sharded table that another rank owns.
        """
        asked = ids
        ids = self._ids(ids)
        check_owned(self.table, ids)
        rows = operators.emb_read(self.table.handle, ids, self.table.dim)
        # As in torch, a number and a slice give a view, and other indices a copy. Compiled code has no views.
        if torch.compiler.is_compiling() or not isinstance(asked, int | slice):
            return rows
        return _RowView.of(rows, ids, self.table)

    def __setitem__(self, ids: Tensor | Sequence[int] | int | slice, rows: Tensor) -> None:
        """Overwrites the rows of `ids` with `rows`, floating point, `[..., dim]`; of duplicates the last one wins."""
        ids, rows = self._ids(ids), _as_rows(rows)
        shape = (*ids.shape, self.table.dim)
        try:
            rows = rows.expand(shape)
        except RuntimeError:
            raise ValueError(
                f'table "{self.name}" takes rows of shape {shape} for these ids, got {tuple(rows.shape)}'
            ) from None
        check_owned(self.table, ids)
        operators.emb_write(self.table.handle, ids, rows)

    def _ids(self, ids: Any) -> Tensor:
        if isinstance(ids, tuple) or ids is None or ids is Ellipsis:
            raise TypeError(f'table "{self.name}" is read and written by whole rows, weight[ids], got weight[{ids}]')
        if not isinstance(ids, slice):
            return _as_ids(ids)
        bound = self._shape[0]
        if bound is None:
            raise TypeError(f'table "{self.name}" has no bound that a slice could end at: give it ids')
        # Not `arange(start, stop, step)`, which refuses the empty range of a slice such as `[5:3]`.
        found = range(*ids.indices(bound))
        return found.start + found.step * torch.arange(len(found), dtype=torch.int64, device="cpu")

    def __repr__(self) -> str:
        return f"DistTensor({self.shape}, {self.dtype}, name={self.name!r})"


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(self: DistTensor, *args: object) -> Any:
        raise refused_for_rows(self._owner, self.name, name)

    return refuse


# Python looks for operators at the class. `==` and `!=` stay those of objects, for programs look for one in a list.
for _name in (
    *("invert", "neg", "pos", "abs", "int", "float", "complex", "index", "lt", "le", "gt", "ge"),
    *("contains", "reversed"),
    *(
        prefix + name
        for name in (
            *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
            *("and", "or", "xor", "lshift", "rshift"),
        )
        for prefix in ("", "r", "i")
    ),
):
    setattr(DistTensor, f"__{_name}__", _refusing(f"__{_name}__"))


class _RowView(CopiedValues):
    """Rows as they were read; a function that writes to them writes the rows as they are then."""

    _rows: tuple[Tensor, Tensor, Table]
    """All rows in the memory of this view, and their ids and table."""

    @staticmethod
    def of(rows: Tensor, ids: Tensor, table: Table) -> Tensor:
        view = Tensor._make_subclass(_RowView, rows)
        view._rows = (rows, ids, table)
        return view.refusing(
            f'rows of table "{table.name}": this function does not say that it writes to them; write weight[ids] = rows'
        )

    def _begin_write(self, function: str) -> None:
        rows, ids, table = self._rows
        rows.copy_(operators.emb_read(table.handle, ids, table.dim))

    def _end_write(self) -> None:
        rows, ids, table = self._rows
        operators.emb_write(table.handle, ids, rows)

    def _view(self, values: Tensor) -> Tensor:
        view = values.as_subclass(_RowView)
        view._rows = self._rows
        return view.refusing(self._refusal)


def _as_ids(ids: Tensor | Sequence[int] | int) -> Tensor:
    if isinstance(ids, Tensor) and ids.dtype == torch.uint8:
        raise TypeError("a DistTensor takes no uint8 index, which torch takes for a mask; convert ids to int64")
    return as_ids(ids)


def _as_rows(rows: Any) -> Tensor:
    return rows if isinstance(rows, Tensor) else torch.as_tensor(rows, dtype=torch.float32, device="cpu")


def _open_or_create(shape: tuple[int, int], dtype: torch.dtype, name: str) -> Table:
    """Opens the table, which another module may have given another initializer or optimizer, or creates it."""
    if store.find_table(name) is None:
        config = TableConfig(num_embeddings=shape[0], dtype=type_name(dtype), initializer={"kind": "zeros"})
        return Table(name, shape[1], config)
    table = Table.open(name)
    if (table.config.num_embeddings, table.dim) != shape:
        existing = (table.config.num_embeddings, table.dim)
        raise TypeError(f'table "{name}" has the shape {existing}, got {shape}')
    if table.config.dtype != type_name(dtype):
        raise TypeError(f'table "{name}" has the dtype torch.{table.config.dtype}, got {dtype}')
    return table


def global_names() -> list[str]:
    """The names of the tables that a `DistTensor` declared as global, and that are there."""
    return sorted(name for name, number in _global_tables.items() if store.find_table(name) == number)


def fill_rows(
    table: Table,
    num_embeddings: int | None,
    init_func: Callable[[tuple[int, int], torch.dtype], Tensor],
    dtype: torch.dtype,
) -> None:
    """Writes the rows that `init_func((num_embeddings, dim), dtype)` returns.

    A default device `meta` is for dense parameters: `init_func` runs with the CPU instead, since its rows have values.

    Raises:
        ValueError: an open vocabulary, or rows of another shape or on the meta device; the new table is dropped again.
    """
    try:
        if num_embeddings is None:
            raise ValueError(f'init_func of table "{table.name}" needs num_embeddings')
        shape = (num_embeddings, table.dim)
        with _device_of_values():
            rows = init_func(shape, dtype)
        if tuple(rows.shape) != shape:
            raise ValueError(
                f'init_func of table "{table.name}" must return rows of shape {shape}, got {tuple(rows.shape)}'
            )
        if rows.is_meta:
            raise ValueError(f'the rows of table "{table.name}" are on the meta device, where they have no values')
        # In parts, so that a matrix of a narrow type is never widened to float32 as a whole.
        for number in range(math.ceil(num_embeddings / _ROWS_PER_WRITE)):
            part = slice(number * _ROWS_PER_WRITE, min((number + 1) * _ROWS_PER_WRITE, num_embeddings))
            ids = torch.arange(part.start, part.stop, dtype=torch.int64, device="cpu")
            write_own(table, ids, rows[part].to(torch.float32))
    except Exception:
        # A table without all of its first rows would be taken for a filled one by whatever opens it next.
        operators.drop_table(table.name)
        raise


def _device_of_values() -> AbstractContextManager[object]:
    """Makes the CPU the default device if that is `meta`."""
    return torch.device("cpu") if torch.get_default_device().type == "meta" else nullcontext()
