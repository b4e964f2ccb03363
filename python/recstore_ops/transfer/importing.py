"""Rows on their way to a table, and the tensors of files that they come from.

Shape suffixes: N ids, D dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from recstore_ops.config.progress_bars import Bar
from recstore_ops.ops import operators
from recstore_ops.table.checks import ROW_TYPES, check_ids
from recstore_ops.table.cut import rows_at_a_time
from recstore_ops.table.known_shards import refuse_sharded
from recstore_ops.table.table import Table
from recstore_ops.transfer.row_ranges import as_tensor, check_rows_follow, row_ranges
from recstore_ops.transfer.safetensors_file import SafetensorsFile
from recstore_ops.transfer.safetensors_index import SafetensorsIndex

_SHARDED = "import them in one process, save that by checkpoint.save, and give each rank its rows by sharding.load"


@dataclass(frozen=True)
class Import:
    """Rows for a table.

    Attributes:
        ids: the ids of the rows; a range if they are consecutive.
        rows: `[N, D]`.
        where: the origin of the rows, which errors add.
    """

    table: Table
    ids: Tensor | range
    rows: Tensor
    where: str = ""

    @classmethod
    def of_matrix(cls, table: Table, rows_ND: Tensor, first: int = 0, where: str = "") -> Import:
        """Row i belongs to the id `first + i`."""
        return cls(table, range(first, first + (rows_ND.shape[0] if rows_ND.dim() else 0)), rows_ND, where)

    def parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Ids and rows, some at a time."""
        rows_ND, count = self.rows.detach(), rows_at_a_time(self.table)
        for start in range(0, len(self.ids), count):
            yield as_tensor(self.ids[start : start + count]), rows_ND[start : start + count]

    def check(self) -> None:
        """Raises what `import_rows` does; changes nothing."""
        table = self.table
        refuse_sharded("an import of rows", [table.name], _SHARDED)
        ids_shape = [len(self.ids)] if isinstance(self.ids, range) else list(check_ids(self.ids).shape)
        if self.rows.dtype not in ROW_TYPES:
            raise TypeError(
                f'table "{table.name}" takes rows of {", ".join(map(str, ROW_TYPES))}, got {self.rows.dtype}'
                f"{self.where}: codes are multiplied by the scales that they lie beside first, and integers converted"
            )
        if len(ids_shape) != 1 or list(self.rows.shape) != [*ids_shape, table.dim]:
            raise ValueError(
                f'table "{table.name}" takes ids [N] and rows [N, {table.dim}], got {ids_shape} and '
                f"{list(self.rows.shape)}{self.where}"
            )
        self._check_bound()
        # Rows are read twice for this: a value that is not finite must be found before any row has changed.
        if table.config.nan_policy == "error":
            self._check_finite()

    def _check_bound(self) -> None:
        bound = self.table.config.num_embeddings
        if bound is None or len(self.ids) == 0:
            return
        for id in _least_and_most(self.ids):
            if not 0 <= id < bound:
                raise IndexError(
                    f'table "{self.table.name}" takes ids within num_embeddings {bound}, got {id}{self.where}'
                )

    def _check_finite(self) -> None:
        for ids_N, rows_ND in self.parts():
            # As float32, in which rows are written: a large float64 becomes infinite there.
            is_finite_N = rows_ND.to(torch.float32).isfinite().all(dim=1)
            if not bool(is_finite_N.all()):
                id = int(ids_N[is_finite_N.logical_not()][0])
                raise ValueError(f'the row of id {id} for table "{self.table.name}" is not finite{self.where}')

    def write(self, bar: Bar) -> None:
        """Writes all rows."""
        for ids_N, rows_ND in self.parts():
            operators.emb_write(self.table.handle, ids_N, rows_ND.to(torch.float32))
            bar.update(ids_N.numel())


class Source:
    """Tensors of a file or of several, as rows for tables."""

    def __init__(self, file: SafetensorsFile | SafetensorsIndex) -> None:
        self.file = file
        self._names = set(file.names())
        self._parts = row_ranges(self._names)

    def pairs(self) -> list[str]:
        """The names that stand for ids and rows, sorted."""
        tensors = self._names | self._parts.keys()
        names = {name.removesuffix(".ids") for name in tensors if name.endswith(".ids")}
        return sorted(name for name in names if f"{name}.rows" in tensors)

    def check_pairs(self) -> None:
        """Checks that every tensor belongs to a pair of ids and rows.

        Raises:
            ValueError: some belong to none, or there is no pair.
        """
        names = self.pairs()
        if not names:
            raise ValueError(f"{self.file.path} has no tensors NAME.ids and NAME.rows, but {self.file.names()}")
        known = {f"{name}.{half}" for name in names for half in ("ids", "rows")}
        parts = {part.tensor for name in known for part in self._parts.get(name, [])}
        if others := sorted(self._names - known - parts):
            raise ValueError(
                f"{self.file.path} has {others}, of which none has both NAME.ids and NAME.rows: name the tensors that "
                f"are to be imported, as tables={{{names[0]!r}: {names[0]!r}}}"
            )

    def imports(self, table: Table, names: str | tuple[str, ...]) -> list[Import]:
        """The imports of a table, tensor by tensor.

        Args:
            table: the table.
            names: of a pair, of a matrix, or of matrices one after another.

        Raises:
            OSError, ValueError: as `import_safetensors`.
        """
        if isinstance(names, str) and names in self.pairs():
            return self._pair(table, names)
        imports, first = [], 0
        for name in [names] if isinstance(names, str) else names:
            for tensor, rows_ND in self._tensors(name).items():
                imports.append(Import.of_matrix(table, rows_ND, first, self._where(tensor)))
                first += len(imports[-1].ids)
        return imports

    def _pair(self, table: Table, name: str) -> list[Import]:
        ids, rows = self._tensors(f"{name}.ids"), self._tensors(f"{name}.rows")
        if len(ids) != len(rows):
            raise ValueError(f"{self.file.path}: ids and rows must be split alike, got {list(ids)} and {list(rows)}")
        pairs = zip(ids.values(), rows.items(), strict=True)
        return [Import(table, ids_N, rows_ND, self._where(tensor)) for ids_N, (tensor, rows_ND) in pairs]

    def _tensors(self, name: str) -> dict[str, Tensor]:
        """A tensor, or the parts of one in the order of their rows, by their own names."""
        parts = self._parts.get(name, [])
        if name in self._names or not parts:
            return {name: self.file.tensor(name)}
        check_rows_follow(parts, self.file.path)
        tensors = {part.tensor: self.file.tensor(part.tensor) for part in parts}
        for part in parts:
            shape, expected = list(tensors[part.tensor].shape), part.end - part.first
            if shape[:1] != [expected]:
                raise ValueError(
                    f'the tensor "{part.tensor}" of {self.file.path} must have {expected} rows, got the shape {shape}'
                )
        return tensors

    def _where(self, tensor: str) -> str:
        return f', by "{tensor}" of {self.file.path}'


def _least_and_most(ids: Tensor | range) -> tuple[int, int]:
    if isinstance(ids, range):
        return ids[0], ids[-1]
    ids_N = ids.to(torch.int64)
    return int(ids_N.min()), int(ids_N.max())
