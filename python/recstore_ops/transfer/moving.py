"""Brings rows into tables and out of them: from `torch.nn`, TorchRec and safetensors, to safetensors and Parquet.

Only rows are transferred, not optimizer state. An import checks everything before it changes any row. It reads the rows
in parts, so those in a file may be larger than memory. Other threads must not change a table while it is exported.

Shape suffixes: N ids, D dim.
"""

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from recstore_ops.client.dist_tensor import DistTensor
from recstore_ops.config.extras import imported
from recstore_ops.config.paths import replacing, user_path
from recstore_ops.config.row_types import VALUE_TYPES
from recstore_ops.nn.dist_embedding import DistEmbedding, TableModule
from recstore_ops.nn.embedding_bag import DistEmbeddingBag
from recstore_ops.nn.embedding_bag_collection import RecStoreEmbeddingBagCollection
from recstore_ops.nn.table_collection import TableCollection
from recstore_ops.servers import store
from recstore_ops.table.checks import refuse_text
from recstore_ops.table.table import Table
from recstore_ops.transfer.exporting import Export, exports_of
from recstore_ops.transfer.importing import Import, Source
from recstore_ops.transfer.row_ranges import bar_of_rows
from recstore_ops.transfer.safetensors_file import write_safetensors
from recstore_ops.transfer.safetensors_index import open_safetensors, write_shards
from recstore_ops.transfer.torch_modules import kept_types, module_over_table

AnyTable = str | Table | TableModule | DistTensor
"""A table: its name, or what is open over it."""

TablesOfTensors = Mapping[str, AnyTable] | Mapping[tuple[str, ...], AnyTable] | Mapping[str | tuple[str, ...], AnyTable]
"""The table of each tensor, or of several tensors with the rows of one table one after another."""


def from_embedding(
    module: nn.Embedding | nn.EmbeddingBag, name: str, **options: Any
) -> DistEmbedding | DistEmbeddingBag:
    """Makes a module over a new table that has the rows of a `torch.nn` one and gives the same outputs.

    Padding, mode and row type are the original's, and so is the type of the outputs. The rows of a weight that needs
    no gradient get none. `recstore_ops.replace_embeddings` does so to all embeddings of a model.

    Args:
        module: an `nn.Embedding` or `nn.EmbeddingBag`, its weight float32, bfloat16 or float16. It is not changed.
        name: the name of a table that does not exist yet.
        **options: further keywords of `DistEmbedding`, such as `optimizer` and `lr`.

    Returns:
        A `DistEmbedding` for an `nn.Embedding`, a `DistEmbeddingBag` for an `nn.EmbeddingBag`.

    Raises:
        TypeError: another module, or a weight of another type.
        ValueError: a table that exists, or `max_norm`.
        RuntimeError: a weight that is not finite.

    Examples:
        >>> item = torch.nn.Embedding(100, 8, padding_idx=0)
        >>> ours = from_embedding(item, "item", optimizer="adagrad")
        >>> torch.equal(ours(torch.tensor([0, 7])), item(torch.tensor([0, 7])))
        True
    """
    _check_module(module, name)
    return module_over_table(module, name, module.weight.shape[0], **options)


def _check_module(module: Any, name: str) -> None:
    if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
        raise TypeError(f"from_embedding takes nn.Embedding or nn.EmbeddingBag, got {type(module).__name__}")
    if module.weight.dtype not in VALUE_TYPES.values():
        raise TypeError(f"a table is made of {kept_types()}, got {module.weight.dtype}")
    if store.find_table(name) is not None:
        raise ValueError(f'table "{name}" exists; from_embedding needs a new one')


def import_rows(table: AnyTable, ids: Tensor, rows: Tensor, *, progress: bool | None = None) -> None:
    """Writes rows to a table. Other rows stay, and so do the optimizer's slots, but for FTRL's `z`.

    Args:
        table: an open table or its name.
        ids: int64, `[N]`; of duplicates the last one wins.
        rows: float64, float32, float16 or bfloat16, `[N, dim]`; rounded to the nearest if the table's rows are
            narrower than float32.
        progress: whether to show a progress bar; by default if the standard error is a terminal or a notebook.

    Raises:
        KeyError: there is no table of this name.
        TypeError: ids or rows of another type.
        ValueError: ids or rows of another shape, or a value that is not finite, under the policy `error`.
        IndexError: an id outside the table's `num_embeddings`.
        RuntimeError: a sharded table.
    """
    _import([Import(_opened(table), ids, rows)], progress)


def import_safetensors(
    path: str | PathLike[str], tables: TablesOfTensors | None = None, *, progress: bool | None = None
) -> None:
    """Writes tensors of a file, or of several files with an index, to tables, as `import_rows` does.

    Files are mapped into memory and read some rows at a time; those without an asked tensor are not opened.

    Args:
        path: a safetensors file; the index of several, `*.safetensors.index.json`; or a directory with one of these.
        tables: the table of each tensor, by the tensor's name. `name` stands for the tensors `name.ids` and
            `name.rows`, as `export_safetensors` writes them, if the file has both. Otherwise it stands for a matrix
            whose row i belongs to the id i. Each may be split, `name[0:1000]` and so on. A tuple of names stands for
            matrices one after another, with consecutive ids. By default every pair goes to the table of its name, and
            the file must have nothing else.
        progress: as in `import_rows`.

    Raises:
        OSError: there is no such file, or not the one that a tensor lies in by the index.
        ValueError: a file is no safetensors file, lacks a tensor, or has others than the index lists. An index names a
            tensor twice, or parts of a tensor leave out rows or have them twice. Without `tables`, a tensor belongs to
            no pair. Further as `import_rows`.
        KeyError, TypeError, IndexError, RuntimeError: as `import_rows`.

    Warns:
        UserWarning: the tensors do not have the size that the index states.
    """
    if tables is not None and not isinstance(tables, Mapping):
        raise TypeError(f"tables are by the names of tensors, as {{'user': table}}, got {tables!r}")
    source = Source(open_safetensors(path))
    if tables is None:
        source.check_pairs()
        tables = {name: name for name in source.pairs()}
    imports = [each for names, table in tables.items() for each in source.imports(_opened(table), names)]
    if not imports:
        raise ValueError(f"import_safetensors: tables names no tensor of {source.file.path}")
    _import(imports, progress)


def import_torchrec(
    state_dict: Mapping[str, Any], collection: TableCollection[Any, Any], *, progress: bool | None = None
) -> None:
    """Writes the weights of a TorchRec collection to the tables of ours.

    Args:
        state_dict: the state of an unsharded TorchRec `EmbeddingBagCollection` or `EmbeddingCollection`, or of a model
            with one: `embedding_bags.<table>.weight` or `embeddings.<table>.weight`, with any prefix. Row i of a weight
                belongs to the id i.
        collection: a collection with tables of these names.
        progress: as in `import_rows`.

    Raises:
        TypeError: a weight that is sharded, or no tensor.
        ValueError: there is no weight of a table, or more than one; further as `import_rows`.
        IndexError, RuntimeError: as `import_rows`.
    """
    modules = collection._by_name()
    _import(
        [Import.of_matrix(module.table, _weight_of(state_dict, name)) for name, module in modules.items()], progress
    )


def export_torchrec(collection: TableCollection[Any, Any], *, progress: bool | None = None) -> dict[str, Tensor]:
    """Makes the state of a TorchRec collection of the tables of ours, for its `load_state_dict`.

    Args:
        collection: a collection whose tables have `num_embeddings`.
        progress: as in `import_rows`.

    Returns:
        `embedding_bags.<table>.weight` or `embeddings.<table>.weight` for each table, `[num_embeddings, dim]`, in the
        row type. An id without a row has its initial value.

    Raises:
        ValueError: a table without `num_embeddings`.
        RuntimeError: a sharded table.
    """
    kind = "embedding_bags" if isinstance(collection, RecStoreEmbeddingBagCollection) else "embeddings"
    modules = collection._by_name()
    with (
        exports_of([each.table for each in modules.values()], as_matrices=True) as exports,
        bar_of_rows("exporting", sum(len(export) for export in exports), progress) as bar,
    ):
        return {f"{kind}.{name}.weight": _matrix_of(each, bar) for name, each in zip(modules, exports, strict=True)}


def _matrix_of(export: Export, bar: Any) -> Tensor:
    rows = torch.empty(len(export), export.table.dim, dtype=VALUE_TYPES[export.table.config.dtype], device="cpu")
    for ids_N, rows_ND in export.parts(bar):
        rows[ids_N] = rows_ND.to(rows.dtype)
    return rows


def _weight_of(state_dict: Mapping[str, Any], table: str) -> Tensor:
    ends = [f".{kind}.{table}.weight" for kind in ("embedding_bags", "embeddings")]
    # The dot in front of the key lets a collection's own state match, and keeps `my_embeddings.<table>.weight` out.
    keys = [key for key in state_dict if f".{key}".endswith(tuple(ends))]
    if len(keys) != 1:
        raise ValueError(f'expected one weight of table "{table}" in the state, got {keys} among {sorted(state_dict)}')
    weight = state_dict[keys[0]]
    # A DTensor is an instance of Tensor, so isinstance would let a sharded weight pass.
    if type(weight) not in (Tensor, nn.Parameter):
        raise TypeError(f'"{keys[0]}" must be a tensor that is not sharded, got {type(weight).__name__}')
    return weight


def export_safetensors(
    path: str | PathLike[str],
    tables: Iterable[AnyTable] | None = None,
    *,
    as_matrices: bool = False,
    max_shard_size: int | None = None,
    progress: bool | None = None,
) -> None:
    """Writes the rows of tables to a file: `<table>.ids`, int64 `[N]`, rising, and `<table>.rows`, `[N, dim]`.

    Args:
        path: the file; replaced if it is there, once all is written. With `max_shard_size` a directory, new or empty.
        tables: open tables or names; by default all tables of the process.
        as_matrices: whether a table is one tensor instead, `<table>.weight`, `[num_embeddings, dim]`. Its row i belongs
            to the id i; an id without a row has its initial value.
        max_shard_size: the most bytes of a file. Then there are several files, `model-00001-of-00003.safetensors`, and
            the index `model.safetensors.index.json` lists the file of each tensor. The index is written last. The rows
            of a larger table are split, those at places 0 to 999 into `<table>.ids[0:1000]` and `<table>.rows[0:1000]`.
        progress: as in `import_rows`.

    Raises:
        TypeError: `tables` is a text, or one table.
        KeyError: there is no table of a name.
        ValueError: a row does not fit into `max_shard_size`; or, `as_matrices`, a table without `num_embeddings`; or a
            table has shared rows, which a file would not hold.
        RuntimeError: a sharded table.
        OSError: a file cannot be written, or the directory holds something.
    """
    refuse_text("tables", tables)
    opened = [_opened(table) for table in (store.table_names() if tables is None else tables)]
    with (
        exports_of(opened, as_matrices) as exports,
        bar_of_rows("exporting", sum(len(export) for export in exports), progress) as bar,
    ):
        if max_shard_size is None:
            write_safetensors(path, [column for each in exports for column in each.columns(bar, 0, len(each))])
        else:
            write_shards(path, [each.splittable(bar) for each in exports], max_shard_size)


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
        RuntimeError: a sharded table.
        OSError: the file cannot be written.
    """
    pyarrow, parquet = _pyarrow()
    opened = _opened(table)
    row_type = pyarrow.list_(pyarrow.float32(), opened.dim)
    schema = pyarrow.schema([("id", pyarrow.int64()), ("row", row_type)])
    with (
        exports_of([opened], as_matrices=False) as (export,),
        replacing([Path(user_path(path))]) as (beside,),
        bar_of_rows("exporting", len(export), progress) as bar,
        parquet.ParquetWriter(beside, schema, use_dictionary=False) as writer,
    ):
        for ids_N, rows_ND in export.parts(bar):
            values = pyarrow.array(rows_ND.reshape(-1).numpy())
            rows = pyarrow.FixedSizeListArray.from_arrays(values, type=row_type)
            group = pyarrow.table([pyarrow.array(ids_N.numpy()), rows], schema)
            writer.write_table(group, row_group_size=max(1, group.num_rows))


def _pyarrow() -> tuple[ModuleType, ModuleType]:
    pyarrow, parquet = (imported(module, "train", "export_parquet") for module in ("pyarrow", "pyarrow.parquet"))
    return pyarrow, parquet


def _import(imports: list[Import], progress: bool | None) -> None:
    # All are checked before the first is written: an error in the last one leaves the tables of the others as they
    # were.
    for part in imports:
        part.check()
    with bar_of_rows("importing", sum(len(part.ids) for part in imports), progress) as bar:
        for part in imports:
            part.write(bar)


def _opened(table: AnyTable) -> Table:
    if isinstance(table, str):
        return Table.open(table)
    return table if isinstance(table, Table) else table.table


__all__ = [
    "export_parquet",
    "export_safetensors",
    "export_torchrec",
    "from_embedding",
    "import_rows",
    "import_safetensors",
    "import_torchrec",
]
