"""Columns of Parquet: what each one is for, and the ids and numbers of its cells.

Columns have their roles by name, whatever their order. Several files, and those of a test part, have the columns of the
first file, in the same roles: integers may be of another width.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as types
from numpy.typing import NDArray

from recstore_ops.table.splitmix64 import splitmix64
from recstore_ops.training.formats.field_ids import MISSING, VALUE_BITS

_DEFAULT_LABELS = ("label", "click")
_PANDAS_INDEX = re.compile(r"__index_level_\d+__")
_VALUE_MASK = (1 << VALUE_BITS) - 1


@dataclass(frozen=True)
class ParquetColumns:
    """The names of the columns that are read.

    Attributes:
        label: of 0 and 1.
        dense: of floating-point numbers.
        fields: of integers, booleans or strings, or of lists of integers or strings.
    """

    label: str
    dense: tuple[str, ...]
    fields: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        return (self.label, *self.dense, *self.fields)

    def check(self, schema: pa.Schema, like: pa.Schema, dropped: Sequence[str], where: object) -> None:
        """Checks that a file has these columns, in the roles that they have in the file `where`, which is `like` that.

        Raises:
            ValueError: a column is missing, is of a type for another role, or is not in the other file.
        """
        for name in self.all:
            if name not in schema.names:
                raise ValueError(f"there is no column {name!r}, which is {like.field(name).type} in {where}")
            here, there = schema.field(name).type, like.field(name).type
            if _role(here) != _role(there) and not (name == self.label and _is_number(here)):
                raise ValueError(f"column {name!r} is {here}, and {there} in {where}")
        if more := [name for name in feature_names(schema, dropped) if name not in self.all]:
            raise ValueError(f"there is a column {more[0]!r}, which {where} lacks")


def choose_columns(schema: pa.Schema, label: str | None, dropped: Sequence[str]) -> ParquetColumns:
    """Tells by name and type what each column is for.

    Raises:
        ValueError: a named column is not there, no column is the label, or a type is none that can be read.
    """
    for name in dropped:
        if name not in schema.names:
            raise ValueError(f"expected a column {name!r} to drop, got only {_listed(schema.names)}")
    names = feature_names(schema, dropped)
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"expected each column once, got several of the name {min(repeated)!r}")
    label = _label_of(names, label)
    if not _is_number(schema.field(label).type):
        raise ValueError(
            f"expected numbers or booleans in column {label!r}, the labels, got {schema.field(label).type}"
        )
    features = [schema.field(name) for name in names if name != label]
    dense = tuple(column.name for column in features if types.is_floating(column.type))
    fields = tuple(column.name for column in features if not types.is_floating(column.type))
    for column in features:
        if column.name in fields and not (_is_category(column.type) or _is_list_of_categories(column.type)):
            raise ValueError(
                f"expected numbers, booleans, strings or lists of integers or strings in column {column.name!r}, "
                f"got {column.type}; drop_columns leaves a column out"
            )
    if not fields:
        raise ValueError(
            f"expected at least one column of ids besides labels and floating-point numbers, got only {_listed(names)}"
        )
    return ParquetColumns(label, dense, fields)


def feature_names(schema: pa.Schema, dropped: Sequence[str]) -> list[str]:
    """Returns the names of the columns without those that are dropped and the index that pandas adds."""
    return [name for name in schema.names if name not in dropped and not _PANDAS_INDEX.fullmatch(name)]


def labels_of(cells: pa.Array) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Returns the labels [B], and which of them are good: 0 or 1."""
    numbers = pc.cast(cells, pa.float64(), safe=False).fill_null(np.nan).to_numpy(zero_copy_only=False)
    return numbers.astype(np.float32), (numbers == 0) | (numbers == 1)


def dense_of(cells: pa.Array) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Returns floating-point numbers [B] with 0 where one is missing, and which of them are good: finite."""
    numbers = pc.cast(cells, pa.float64()).fill_null(0).to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):
        narrow = numbers.astype(np.float32)
    return narrow, np.isfinite(narrow)


def values_of(cells: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Returns the values of a field's ids [N], and how many each row has [B], None for one each.

    A missing cell or element becomes `MISSING`, a missing list has no ids.
    """
    if not _is_list_of_categories(cells.type):
        return _category_values(cells), None
    lengths = pc.call_function("list_value_length", [cells]).fill_null(0).to_numpy(zero_copy_only=False)
    return _category_values(cells.flatten()), lengths.astype(np.int64)


def _label_of(names: Sequence[str], label: str | None) -> str:
    wanted = _DEFAULT_LABELS if label is None else (label,)
    found = [name for name in wanted if name in names]
    if len(found) > 1:
        shown = " and ".join(map(repr, found))
        raise ValueError(
            f"columns {shown} could both be the labels: label_column names the one, drop_columns the other"
        )
    if found:
        return found[0]
    asked = " or ".join(map(repr, wanted))
    raise ValueError(f"expected a column {asked} with the labels, got only {_listed(names)}; label_column names it")


def _role(column_type: pa.DataType) -> str:
    """Returns what makes cells of two types mean the same."""
    if types.is_floating(column_type):
        return "number"
    if _is_list_of_categories(column_type):
        return f"list of {_role(column_type.value_type)}"
    if types.is_dictionary(column_type):
        column_type = column_type.value_type
    return "string" if _is_string(column_type) else "integer" if _is_number(column_type) else str(column_type)


def _is_number(column_type: pa.DataType) -> bool:
    return types.is_integer(column_type) or types.is_floating(column_type) or types.is_boolean(column_type)


def _is_category(column_type: pa.DataType) -> bool:
    if types.is_dictionary(column_type):
        column_type = column_type.value_type
    return types.is_integer(column_type) or types.is_boolean(column_type) or _is_string(column_type)


def _is_list_of_categories(column_type: pa.DataType) -> bool:
    is_list = types.is_list(column_type) or types.is_large_list(column_type)
    return is_list and _is_category(column_type.value_type) and not types.is_boolean(column_type.value_type)


def _is_string(column_type: pa.DataType) -> bool:
    return types.is_string(column_type) or types.is_large_string(column_type) or types.is_string_view(column_type)


def _category_values(cells: pa.Array) -> NDArray[np.int64]:
    if types.is_dictionary(cells.type):
        cells = cells.dictionary_decode()
    return _string_values(cells) if _is_string(cells.type) else _integer_values(cells)


def _string_values(cells: pa.Array) -> NDArray[np.int64]:
    # Few strings of a block differ, and only those are hashed.
    encoded = pc.cast(cells, pa.large_string()).dictionary_encode()
    hashes = [_string_hash(text) for text in encoded.dictionary.to_pylist()]
    places = encoded.indices.fill_null(len(hashes)).to_numpy(zero_copy_only=False)
    return np.array([*hashes, MISSING], dtype=np.int64)[places]


def _string_hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") & _VALUE_MASK


def _integer_values(cells: pa.Array) -> NDArray[np.int64]:
    """Integers of 40 bits stay as they are; larger ones are mixed to 40 bits, for cut they would meet others.

    So is the one that stands for a missing cell.
    """
    wide_type = pa.uint64() if types.is_unsigned_integer(cells.type) else pa.int64()
    numbers = pc.cast(cells, wide_type).fill_null(0).to_numpy(zero_copy_only=False)
    half = 1 << (VALUE_BITS - 1)
    mixed = splitmix64(numbers.view(np.int64)).view(np.int64) & _VALUE_MASK
    stays = (numbers >= -half) & (numbers < half) & (numbers != MISSING)
    values = np.where(stays, numbers.view(np.int64), mixed)
    values[cells.is_null().to_numpy(zero_copy_only=False)] = MISSING
    return values


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
