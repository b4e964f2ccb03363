"""Brings rows into tables and out of them: from `torch.nn`, TorchRec and safetensors, to safetensors and Parquet.

Rows only: optimizer state does not travel. An import checks everything before it changes any row, and goes through
the rows some at a time, so that they may be larger than memory where they lie in a file. Other threads must not change
a table while it is exported.

Shape suffixes: N ids, D dim.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from recstore_ops.client.dist_tensor import DistTensor
from recstore_ops.config.paths import user_path
from recstore_ops.config.row_types import VALUE_TYPES
from recstore_ops.nn.dist_embedding import DistEmbedding, TableModule
from recstore_ops.nn.embedding_bag import DistEmbeddingBag
from recstore_ops.nn.table_collection import TableCollection
from recstore_ops.ops import operators
from recstore_ops.servers import store
from recstore_ops.table.checks import check_ids
from recstore_ops.table.refusals import refuse_shared_rows
from recstore_ops.table.table import Table
from recstore_ops.transfer.safetensors_file import Column, SafetensorsFile, write_safetensors

AnyTable = str | Table | TableModule | DistTensor
"""A table: its name, or what is open over it."""

_BYTES_AT_A_TIME = 16 << 20


def from_embedding(
    module: nn.Embedding | nn.EmbeddingBag, name: str, **options: Any
) -> DistEmbedding | DistEmbeddingBag:
    """Makes a module over a new table that has the rows of a `torch.nn` one and gives the same outputs.

    Padding, mode and row type are the original's, and so is the type of the outputs. The rows of an `nn.Embedding`
    whose weight needs no gradient get none.

    Args:
        module: an `nn.Embedding` or `nn.EmbeddingBag`, its weight float32, bfloat16 or float16. It is not changed.
        name: the name of a table that does not exist yet.
        **options: further keywords of `DistEmbedding`, such as `optimizer` and `lr`.

    Returns:
        A `DistEmbedding` for an `nn.Embedding`, a `DistEmbeddingBag` for an `nn.EmbeddingBag`.

    Raises:
        TypeError: another module, or a weight of another type.
        ValueError: a table that exists, `max_norm`, or an `nn.EmbeddingBag` whose weight
            needs no gradient.
        RuntimeError: a weight that is not finite.

    Example:
        >>> item = torch.nn.Embedding(100, 8, padding_idx=0)
        >>> ours = from_embedding(item, "item", optimizer="adagrad")
        >>> torch.equal(ours(torch.tensor([0, 7])), item(torch.tensor([0, 7])))
        True
    """
    _check_module(module, name)
    weight_ND, padding_idx = module.weight.detach().cpu(), module.padding_idx
    size, dim = weight_ND.shape
    common: dict[str, Any] = {
        "init_func": lambda shape, dtype: weight_ND,
        "padding_idx": padding_idx,
        "max_norm": module.max_norm,
        "scale_grad_by_freq": module.scale_grad_by_freq,
        "dtype": weight_ND.dtype,
        "output_dtype": weight_ND.dtype,
        **options,
    }
    ours: DistEmbedding | DistEmbeddingBag
    if isinstance(module, nn.EmbeddingBag):
        bag = {"mode": module.mode, "include_last_offset": module.include_last_offset}
        ours = DistEmbeddingBag(size, dim, name, **bag, **common)
    else:
        ours = DistEmbedding(size, dim, name, **common)
    ours.frozen = not module.weight.requires_grad
    if padding_idx is not None:
        ours.weight[[padding_idx]] = weight_ND[padding_idx]  # A new table's is zero.
    return ours


def _check_module(module: Any, name: str) -> None:
    if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
        raise TypeError(f"from_embedding takes nn.Embedding or nn.EmbeddingBag, got {type(module).__name__}")
    kept = dict.fromkeys(VALUE_TYPES.values())
    if module.weight.dtype not in kept:
        raise TypeError(f"a table is made of {', '.join(map(str, kept))}, got {module.weight.dtype}")
    if store.find_table(name) is not None:
        raise ValueError(f'table "{name}" exists; from_embedding needs a new one')


def import_rows(table: AnyTable, ids: Tensor, rows: Tensor, *, progress: bool | None = None) -> None:
    """Writes rows to a table. Other rows stay, and so do the optimizer's slots, but for FTRL's `z`.

    Args:
        table: an open table or its name.
        ids: int64, `[N]`; of duplicates the last one wins.
        rows: floating point, `[N, dim]`; rounded to the nearest where rows are narrower than float32.
        progress: whether to show a progress bar; by default if the standard error is a terminal.

    Raises:
        KeyError: there is no table of this name.
        TypeError: ids or rows of another type.
        ValueError: ids or rows of another shape, or a value that is not finite, under the policy `error`.
        IndexError: an id outside the table's `num_embeddings`.
    """
    _import([_Import(_opened(table), ids, rows)], progress)


def import_safetensors(
    path: str | PathLike[str], tables: Mapping[str, AnyTable] | None = None, *, progress: bool | None = None
) -> None:
    """Writes tensors of a file to tables, as `import_rows` does.

    Args:
        path: a safetensors file.
        tables: the table of each tensor, by the tensor's name. `name` stands for the tensors `name.ids` and
            `name.rows`, as `export_safetensors` writes them, where the file has these; else for a matrix whose row
            i is that of the id i. Where absent, every such pair goes to the table of its name.
        progress: as in `import_rows`.

    Raises:
        OSError: there is no such file.
        ValueError: it is no safetensors file, or lacks a tensor; further as `import_rows`.
        KeyError, TypeError, IndexError: as `import_rows`.
    """
    file = SafetensorsFile(path)
    names = {name.removesuffix(".ids") for name in file.names() if name.endswith(".ids")}
    pairs = {name for name in names if f"{name}.rows" in file.names()}
    if tables is None:
        tables = {name: name for name in sorted(pairs)}
    imports = [_import_of(_opened(table), file, name, name in pairs) for name, table in tables.items()]
    if not imports:
        raise ValueError(f"{file.path} has no tensors NAME.ids and NAME.rows, but {file.names()}")
    _import(imports, progress)


def _import_of(table: Table, file: SafetensorsFile, name: str, is_pair: bool) -> "_Import":
    if is_pair:
        return _Import(table, file.tensor(f"{name}.ids"), file.tensor(f"{name}.rows"))
    return _Import.of_matrix(table, file.tensor(name))


def import_torchrec(
    state_dict: Mapping[str, Any], collection: TableCollection[Any, Any], *, progress: bool | None = None
) -> None:
    """Writes the weights of a TorchRec collection to the tables of ours.

    Args:
        state_dict: the state of an unsharded TorchRec `EmbeddingBagCollection` or `EmbeddingCollection`, or of a model
            with one: `embedding_bags.<table>.weight` or `embeddings.<table>.weight`, with any prefix. Row i of a
            weight is that of the id i.
        collection: a collection with tables of these names.
        progress: as in `import_rows`.

    Raises:
        TypeError: a weight that is sharded, or no tensor.
        ValueError: there is no weight of a table, or more than one; further as `import_rows`.
        IndexError: as `import_rows`.
    """
    modules = collection._by_name()
    _import(
        [_Import.of_matrix(module.table, _weight_of(state_dict, name)) for name, module in modules.items()], progress
    )


def _weight_of(state_dict: Mapping[str, Any], table: str) -> Tensor:
    ends = [f".{kind}.{table}.weight" for kind in ("embedding_bags", "embeddings")]
    keys = [key for key in state_dict if f".{key}".endswith(tuple(ends))]
    if len(keys) != 1:
        raise ValueError(f'expected one weight of table "{table}" in the state, got {keys} among {sorted(state_dict)}')
    weight = state_dict[keys[0]]
    if type(weight) not in (Tensor, nn.Parameter):
        raise TypeError(f'"{keys[0]}" must be a tensor that is not sharded, got {type(weight).__name__}')
    return weight


def export_safetensors(
    path: str | PathLike[str], tables: Iterable[AnyTable] | None = None, *, progress: bool | None = None
) -> None:
    """Writes the rows of tables to a file: `<table>.ids`, int64 `[N]`, rising, and `<table>.rows`, `[N, dim]`.

    Args:
        path: the file; replaced if it is there, once all is written.
        tables: open tables or names; all tables of the process where absent.
        progress: as in `import_rows`.

    Raises:
        KeyError: there is no table of a name.
        ValueError: a table has shared rows, which the file would not hold.
        OSError: the file cannot be written.
    """
    opened = [_opened(table) for table in (store.table_names() if tables is None else tables)]
    exports = {table.name: _Export(table) for table in opened}
    with _bar("exporting", sum(len(export) for export in exports.values()), progress) as bar:
        write_safetensors(path, [column for export in exports.values() for column in export.columns(bar)])


def export_parquet(path: str | PathLike[str], table: AnyTable, *, progress: bool | None = None) -> None:
    """Writes the rows of a table to a Parquet file, some at a time.

    The columns are `id`, int64, rising, and `row`, a list of `dim` float32. A row group has some 16 MiB.

    Args:
        path: the file; replaced if it is there, once all is written.
        table: an open table or its name.
        progress: as in `import_rows`.

    Raises:
        ImportError: pyarrow is not installed.
        KeyError: there is no table of this name.
        ValueError: the table has shared rows, which the file would not hold.
        OSError: the file cannot be written.
    """
    pyarrow, parquet = _pyarrow()
    export = _Export(_opened(table))
    row_type = pyarrow.list_(pyarrow.float32(), export.table.dim)
    schema = pyarrow.schema([("id", pyarrow.int64()), ("row", row_type)])
    beside = Path(f"{user_path(path)}.new")
    try:
        with (
            _bar("exporting", len(export), progress) as bar,
            parquet.ParquetWriter(beside, schema, use_dictionary=False) as writer,
        ):
            for ids_N, rows_ND in export.parts(bar):
                values = pyarrow.array(rows_ND.reshape(-1).numpy())
                rows = pyarrow.FixedSizeListArray.from_arrays(values, type=row_type)
                group = pyarrow.table([pyarrow.array(ids_N.numpy()), rows], schema)
                writer.write_table(group, row_group_size=max(1, group.num_rows))
        beside.replace(user_path(path))
    finally:
        beside.unlink(missing_ok=True)


def _pyarrow() -> tuple[ModuleType, ModuleType]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError("export_parquet needs pyarrow, which is not installed: run `pip install pyarrow`") from error
    return pyarrow, parquet


@dataclass(frozen=True)
class _Import:
    """Rows for a table."""

    table: Table
    ids: Tensor
    rows: Tensor

    @classmethod
    def of_matrix(cls, table: Table, rows_ND: Tensor) -> "_Import":
        """Row i is that of the id i."""
        ids_N = torch.arange(rows_ND.shape[0] if rows_ND.dim() else 0, dtype=torch.int64, device="cpu")
        return cls(table, ids_N, rows_ND)

    def parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Ids and rows, some at a time."""
        count = _rows_at_a_time(self.table)
        return zip(self.ids.split(count), self.rows.detach().split(count), strict=True)

    def check(self) -> None:
        """Raises what `import_rows` does; changes nothing."""
        table = self.table
        ids_N = check_ids(self.ids)
        if not self.rows.is_floating_point():
            raise TypeError(f'table "{table.name}" takes floating-point rows, got {self.rows.dtype}')
        if ids_N.dim() != 1 or self.rows.shape != (ids_N.numel(), table.dim):
            raise ValueError(
                f'table "{table.name}" takes ids [N] and rows [N, {table.dim}], got {list(ids_N.shape)} and '
                f"{list(self.rows.shape)}"
            )
        self._check_bound()
        if table.config.nan_policy == "error":
            self._check_finite()

    def _check_bound(self) -> None:
        bound = self.table.config.num_embeddings
        if bound is None or self.ids.numel() == 0:
            return
        ids_N = self.ids.to(torch.int64)
        for id in (int(ids_N.min()), int(ids_N.max())):
            if not 0 <= id < bound:
                raise IndexError(f'table "{self.table.name}" takes ids within num_embeddings {bound}, got {id}')

    def _check_finite(self) -> None:
        for ids_N, rows_ND in self.parts():
            is_finite_N = rows_ND.to(torch.float32).isfinite().all(dim=1)
            if not bool(is_finite_N.all()):
                id = int(ids_N[is_finite_N.logical_not()][0])
                raise ValueError(f'the row of id {id} for table "{self.table.name}" is not finite')

    def write(self, bar: "tqdm[Any]") -> None:
        """Writes all rows."""
        for ids_N, rows_ND in self.parts():
            operators.emb_write(self.table.handle, ids_N, rows_ND.to(torch.float32))
            bar.update(ids_N.numel())


def _import(imports: list[_Import], progress: bool | None) -> None:
    for part in imports:
        part.check()
    with _bar("importing", sum(part.ids.numel() for part in imports), progress) as bar:
        for part in imports:
            part.write(bar)


class _Export:
    """Rows of a table, in the order of the ids that it has now."""

    def __init__(self, table: Table) -> None:
        refuse_shared_rows(table.name, table.config.admission, "a file of rows")
        self.table = table
        self.ids = operators.hashtable_ids(table.handle).sort().values

    def __len__(self) -> int:
        return self.ids.numel()

    def parts(self, bar: "tqdm[Any]") -> Iterator[tuple[Tensor, Tensor]]:
        """Ids and float32 rows, some at a time."""
        for ids_N in self.ids.split(_rows_at_a_time(self.table)):
            yield ids_N, operators.emb_read(self.table.handle, ids_N, self.table.dim)
            bar.update(ids_N.numel())

    def columns(self, bar: "tqdm[Any]") -> list[Column]:
        """The tensors of a safetensors file, rows in the type in which they are exact."""
        name, dtype = self.table.name, VALUE_TYPES[self.table.config.dtype]
        rows = (rows_ND.to(dtype) for _, rows_ND in self.parts(bar))
        return [
            Column.of(f"{name}.ids", self.ids),
            Column(f"{name}.rows", dtype, (len(self), self.table.dim), rows),
        ]


def _opened(table: AnyTable) -> Table:
    if isinstance(table, str):
        return Table.open(table)
    return table if isinstance(table, Table) else table.table


def _rows_at_a_time(table: Table) -> int:
    return max(1, _BYTES_AT_A_TIME // (4 * table.dim))


def _bar(what: str, rows: int, progress: bool | None) -> "tqdm[Any]":
    # None: tqdm looks whether the standard error is a terminal.
    return tqdm(total=rows, desc=what, unit="row", unit_scale=True, disable=None if progress is None else not progress)


__all__ = [
    "export_parquet",
    "export_safetensors",
    "from_embedding",
    "import_rows",
    "import_safetensors",
    "import_torchrec",
]
