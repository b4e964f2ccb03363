"""Named, typed columns with roles, and the check that other files have them.

Each role takes some types of cells and turns them into a part of a row:

- label: numbers, booleans or one of two words become 0 or 1, by the rule of the column.
- categorical: integers, booleans, strings, or floating-point numbers without fractions become a field with one id a
  row.
- ids: lists of integers or strings, or strings cut at a separator, become a field with any number of ids.
- sequence: the same as ids, in the order of events; may share the ids of a categorical column.
- number: numbers or booleans become a dense feature, after the column's transform; a missing one becomes 0.
- vector: lists of numbers, all of one length, become as many dense features.
- weight: numbers, 0 or more, become the weight of the row's loss.
- time: numbers since 1970, times, or text such as 2026-11-26T17:09:59Z become the row's event time.
- group: cells as for categorical become the group in which the row is compared with others, as by AUC.
- ignored: cells of any type are not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from recstore_ops.training.data.sample import SEPARATORS

Role = Literal["label", "categorical", "ids", "sequence", "number", "vector", "weight", "time", "group", "ignored"]
Unit = Literal["s", "ms", "us", "ns"]
Transform = Literal["none", "log", "standard"]

SCALARS = ("integer", "number", "boolean", "string")

_SEVERAL_IDS = ("list of integer", "list of string", "string")

# The types that a column of a role may have.
_TYPES: dict[Role, tuple[str, ...]] = {
    "label": SCALARS,
    "categorical": SCALARS,
    "ids": _SEVERAL_IDS,
    "sequence": _SEVERAL_IDS,
    "number": ("integer", "number", "boolean"),
    "vector": ("list of number",),
    "weight": ("integer", "number", "boolean"),
    "time": ("integer", "number", "string", "time"),
    "group": SCALARS,
}
# Those that mean the same in a role: whole numbers with gaps are written as floating-point ones.
_ALIKE: dict[Role, tuple[tuple[str, ...], ...]] = {
    "label": (("integer", "number", "boolean"),),
    "categorical": (("integer", "number", "boolean"),),
    "group": (("integer", "number", "boolean"),),
    "number": (("integer", "number", "boolean"),),
    "weight": (("integer", "number", "boolean"),),
    "time": (("integer", "number"),),
}


@dataclass(frozen=True)
class ColumnSchema:
    """A column.

    Attributes:
        name: in the file.
        role: its use.
        type: of its cells: "integer", "number", "boolean", "string", "time", or "list of " one of these; others by
            Arrow's name.
        transform: of numbers: "none", "log" for sign(x) * ln(1 + |x|), "standard" for (x - mean) / deviation.
        mean, deviation: of "standard".
        separator: between the ids of a string.
        of: the categorical column whose ids a sequence has; None for ids of its own.
        size: of a vector.
        negative, positive: the two values of a label; None if `threshold` decides.
        threshold: the least number that is a positive label.
        unit: of numbers that are times since 1970.
        reason: why it has its role, for people.
    """

    name: str
    role: Role
    type: str
    transform: Transform | None = None
    mean: float | None = None
    deviation: float | None = None
    separator: str | None = None
    of: str | None = None
    size: int | None = None
    negative: str | None = None
    positive: str | None = None
    threshold: float | None = None
    unit: Unit | None = None
    reason: str = ""

    def check_role(self, where: str) -> None:
        """Checks that the type suits the role.

        Raises:
            ValueError: it does not.
        """
        if self.role != "ignored" and self.type not in _TYPES[self.role]:
            suitable = " or ".join(_TYPES[self.role])
            raise ValueError(
                f"{where}: column {self.name!r} is {self.type}, and a column of the role {self.role} is {suitable}"
            )

    def takes(self, cell_type: str) -> bool:
        """Whether cells of another type mean what those of this column do."""
        if self.threshold is not None and cell_type == "boolean":
            return False
        alike = next((types for types in _ALIKE.get(self.role, ()) if self.type in types), (self.type,))
        return cell_type in alike

    @property
    def has_amounts(self) -> bool:
        """Whether cells are amounts, as prices are, so that rows are grouped by ranges and not by single values."""
        if self.role in ("categorical", "group") or (self.role == "label" and self.threshold is None):
            return False
        return self.type == "number" or (self.role == "number" and self.type == "integer")

    @property
    def rule(self) -> str:
        """The rule for a positive label, or the transform of numbers."""
        if self.role == "label":
            return f"{self.negative} / {self.positive}" if self.threshold is None else f">= {self.threshold:g}"
        if self.role == "time":
            return "UTC" if self.unit is None else f"{self.unit} since 1970"
        if self.transform == "log":
            return "ln(1 + |x|)"
        if self.transform == "standard":
            return f"(x - {self.mean:.4g}) / {self.deviation:.4g}"
        parts = ("" if self.separator is None else f"cut at {self.separator!r}", self.of and f"ids of {self.of!r}")
        return ", ".join(filter(None, parts))


def read_role(text: str) -> tuple[Role, str | None]:
    """Reads a role; of a sequence perhaps with the column whose ids it has, as `sequence:item`.

    Raises:
        ValueError: there is no such role.
    """
    word, colon, target = text.partition(":")
    if word not in get_args(Role) or bool(colon) != bool(target) or (target and word != "sequence"):
        raise ValueError(f"expected a role, or sequence:NAME, got {text!r}")
    return cast(Role, word), target or None


def check_column_choices(label: str | None, dropped: Sequence[str], roles: Mapping[str, str]) -> None:
    """Checks that what a caller says of columns by name agrees.

    Args:
        label: the column of the labels, as `label_column`.
        dropped: columns that are ignored, as `drop_columns`.
        roles: of further columns, as `column_roles`.

    Raises:
        ValueError: one column is to be two things, or two are to be the labels.
    """
    for name in dropped:
        if roles.get(name, "ignored") != "ignored":
            raise ValueError(f"column {name!r} is left out by drop_columns, and {roles[name]} by column_roles")
    if label is None:
        return
    if label in dropped:
        raise ValueError(f"column {label!r} is left out by drop_columns, and has the labels by label_column")
    if roles.get(label, "label") != "label":
        raise ValueError(f"column {label!r} has the labels by label_column, and is {roles[label]} by column_roles")
    for name, role in roles.items():
        if role == "label" and name != label:
            raise ValueError(f"column {label!r} has the labels by label_column, and {name!r} by column_roles")


@dataclass(frozen=True)
class Schema:
    """The columns of a file, in its order.

    Attributes:
        columns: of every role; one at most is the label, one the weight, one the time, and one the group.
        source: the file that they were found in, or that says them.
        grouping: a column of any role by which rows are grouped in place of that of the role group; no part of what
            files keep.
    """

    columns: tuple[ColumnSchema, ...]
    source: str
    grouping: str | None = None

    def of_role(self, *roles: Role) -> tuple[ColumnSchema, ...]:
        """Returns the columns of some roles, in order."""
        return tuple(column for column in self.columns if column.role in roles)

    @property
    def label(self) -> ColumnSchema | None:
        return next(iter(self.of_role("label")), None)

    @property
    def weight(self) -> ColumnSchema | None:
        return next(iter(self.of_role("weight")), None)

    @property
    def time(self) -> ColumnSchema | None:
        return next(iter(self.of_role("time")), None)

    @property
    def group(self) -> ColumnSchema | None:
        """The column by which rows are grouped."""
        if self.grouping is None:
            return next(iter(self.of_role("group")), None)
        return self.column(self.grouping)

    @property
    def read(self) -> tuple[ColumnSchema, ...]:
        """The columns that are read."""
        group = self.group
        return tuple(column for column in self.columns if column is group or column.role not in ("ignored", "group"))

    @property
    def fields(self) -> tuple[ColumnSchema, ...]:
        """The columns that are fields."""
        return self.of_role("categorical", "ids", "sequence")

    @property
    def field_names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.fields)

    @property
    def sequences(self) -> tuple[tuple[str, str], ...]:
        """The names of each sequence with ids of another column, and of that column."""
        return tuple((column.name, column.of) for column in self.of_role("sequence") if column.of is not None)

    @property
    def dense_names(self) -> tuple[str, ...]:
        return tuple(name for column in self.of_role("number", "vector") for name in _dense_names(column))

    def column(self, name: str) -> ColumnSchema | None:
        """Returns the column of a name; None without one."""
        return next((column for column in self.columns if column.name == name), None)

    def with_sequences(self, sequences: Sequence[tuple[str, str]]) -> Schema:
        """Returns the schema with columns of ids as sequences.

        Args:
            sequences: pairs of names, a column of ids and the categorical one whose ids it has.

        Raises:
            ValueError: there is no such column, it has no ids or those of another one, or further as `check`.
        """
        targets = dict(sequences)
        for history, target in sequences:
            if history not in self.field_names or self.column(target) is None:
                name = target if history in self.field_names else history
                fields = ", ".join(self.field_names)
                raise ValueError(f"sequences must name a field, one of {fields}; got {name!r}")
        for name, target in self.sequences:
            if targets.get(name, target) != target:
                raise ValueError(
                    f"{self.source}: column {name!r} has the ids of {target!r}, and sequences say of {targets[name]!r}"
                )
        schema = replace(self, columns=tuple(_as_sequence(column, targets.get(column.name)) for column in self.columns))
        schema.check()
        return schema

    def grouped_by(self, name: str) -> Schema:
        """Returns the schema of rows that are grouped by a column, whatever else it is for.

        Args:
            name: of the column.

        Raises:
            ValueError: there is no such column, or it has neither integers, numbers, strings nor booleans.
        """
        if (column := self.column(name)) is None:
            names = listed([column.name for column in self.columns])
            raise ValueError(f"{self.source}: there is no column {name!r} to group rows by, only {names}")
        if column.role in ("ids", "sequence"):
            raise ValueError(f"{self.source}: column {name!r} has several ids in a cell, and a row is in one group")
        if column.type not in SCALARS:
            raise ValueError(
                f"{self.source}: column {name!r} is {column.type}, and rows are grouped by {', '.join(SCALARS)}"
            )
        return replace(self, grouping=name)

    def without_label(self) -> Schema:
        """Returns the schema of the same rows without labels."""
        return replace(self, columns=tuple(column for column in self.columns if column.role != "label"))

    def check(self) -> None:
        """Checks the schema by itself.

        Raises:
            ValueError: a name comes twice, a type does not suit its role, there are two labels, weights, times or
                groups, or no field, or a sequence cannot have the ids of the column that it names.
        """
        names = [column.name for column in self.columns]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"{self.source}: expected each column once, got several of the name {min(repeated)!r}")
        for column in self.columns:
            column.check_role(self.source)
        for column in self.of_role("sequence"):
            self._check_target(column)
        for role in ("label", "weight", "time", "group"):
            if len(several := self.of_role(role)) > 1:
                raise ValueError(f"{self.source}: columns {several[0].name!r} and {several[1].name!r} are both {role}")
        if not self.field_names:
            raise ValueError(
                f"{self.source}: expected at least one column of ids, categorical or ids, got only {listed(names)}"
            )

    def _check_target(self, column: ColumnSchema) -> None:
        if column.of is None:
            return
        target = self.column(column.of)
        has = f"{self.source}: column {column.name!r} has the ids of {column.of!r}"
        if target is None:
            raise ValueError(f"{has}, and there is no such column")
        if target.role != "categorical":
            raise ValueError(f"{has}, which has the role {target.role}, and must be categorical")
        # Text becomes what the other column has.
        element = column.type.removeprefix("list of ")
        if column.type != "string" and (element == "string") != (target.type == "string"):
            raise ValueError(f"{has}, but is {column.type}, and {target.name!r} is {target.type}")

    def check_names(self, names: tuple[str, ...], where: object) -> None:
        """Checks that a file has these columns, and no others.

        Raises:
            ValueError: a column that is read is not there, or is there twice; or one is that the schema does not know.
        """
        for column in self.read:
            if (count := names.count(column.name)) != 1:
                found = "there is no column" if count == 0 else f"there are {count} columns"
                raise ValueError(f"{where}: {found} {column.name!r}, which is {column.type} in {self.source}")
        known = {column.name for column in self.columns}
        if more := [name for name in names if name not in known]:
            raise ValueError(f"{where}: there is a column {more[0]!r}, which {self.source} lacks")

    def check_no_lists(self, where: object) -> None:
        """Checks that text can have the columns that are read.

        Raises:
            ValueError: one has lists.
        """
        for column in self.read:
            if column.type.startswith("list of "):
                raise ValueError(f"{where}: column {column.name!r} is text, and {column.type} in {self.source}")

    def check_types(self, types: Mapping[str, str], where: object) -> None:
        """Checks that the columns of a file mean what they do here.

        Raises:
            ValueError: one has another type.
        """
        for column in self.read:
            if not column.takes(types[column.name]):
                raise ValueError(
                    f"{where}: column {column.name!r} is {types[column.name]}, and {column.type} in {self.source}"
                )


def listed(names: list[str] | tuple[str, ...]) -> str:
    """Returns names for a message."""
    return ", ".join(map(repr, names)) or "none"


def _as_sequence(column: ColumnSchema, target: str | None) -> ColumnSchema:
    """Returns a column of ids as a sequence of a target's; without a target as it is."""
    if target is None:
        return column
    if column.role == "categorical" and column.type == "string":
        # Of which few cells have several ids, so that nothing tells what parts them.
        return replace(column, role="sequence", separator=SEPARATORS[0], of=target)
    return replace(column, role="sequence", of=target)


def _dense_names(column: ColumnSchema) -> tuple[str, ...]:
    if column.role == "number":
        return (column.name,)
    return tuple(f"{column.name}[{place}]" for place in range(column.size or 0))
